"""Microbatches in their order, in whatever order they come."""

from __future__ import annotations


class Turns:
    """Lets microbatches through one after the other, from 0.

    Sums of floating-point numbers depend on their order; one order for all schedules gives all the same bits.
    """

    def __init__(self) -> None:
        self._next = 0
        self._early: set[int] = set()

    def is_next(self, microbatch: int) -> bool:
        """Whether it is this one's turn."""
        return microbatch == self._next

    def arrived(self, microbatch: int) -> list[int]:
        """Those whose turn it is, now that ``microbatch`` has come: none, or it and those that waited."""
        self._early.add(microbatch)
        return self._due()

    def passed(self) -> list[int]:
        """Those whose turn it is, now that the next one has gone through by itself."""
        self._next += 1
        return self._due()

    def _due(self) -> list[int]:
        due = []
        while self._next in self._early:
            self._early.remove(self._next)
            due.append(self._next)
            self._next += 1
        return due
