"""When each action of a step ran, on this process's clock."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from penstock.schedule import Action, Span


class Recorder:
    """Notes the start and end of actions, in seconds since it was made.

    On an accelerator the device is synchronised before each reading, so that a span holds the work
    itself and not its launch; this slows a recorded step down.

    Args:
        rank: whose actions.
        device: where they run.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self.spans: list[Span] = []
        self._rank = rank
        self._synchronize: Callable[[], object] = (
            _nothing if device.type == "cpu" else torch.accelerator.synchronize
        )
        self._origin = self._now()
        self._start = 0.0

    def start(self) -> None:
        """An action begins, or a piece of one."""
        self._start = self._now() - self._origin

    def stop(self, action: Action) -> None:
        """It ends; the pieces of an action, where it has several one after the other, are one span."""
        start = self._start
        if self.spans and self.spans[-1].action == action:
            start = self.spans.pop().start
        self.spans.append(Span(self._rank, action, start, self._now() - self._origin))

    def elapsed(self) -> float:
        """Seconds since the recorder was made."""
        return self._now() - self._origin

    def _now(self) -> float:
        self._synchronize()
        return perf_counter()


def _nothing() -> None:
    """The CPU has done what it was told."""
