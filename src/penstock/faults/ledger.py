"""The failures that a process knows of, in the order in which they were put on the board."""

from __future__ import annotations

import threading
from time import monotonic, sleep

from penstock.faults.board import Board
from penstock.faults.failure import Failure

_POLL = 0.02


class Ledger:
    """Reads the board and remembers; both of a process's threads use it.

    Args:
        board: where the failures stand.
        rank: this process's.
    """

    def __init__(self, board: Board, rank: int) -> None:
        self._board = board
        self._rank = rank
        self._lock = threading.Lock()
        self._read = 0
        self._found: list[Failure] = []

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Those that were read, each rank's first; what follows from a failure is none."""
        with self._lock:
            return tuple(self._found)

    @property
    def of_others(self) -> tuple[Failure, ...]:
        """All but what this rank raised itself; a network that was cut has this rank's name on it too."""
        return tuple(f for f in self.failures if f.rank != self._rank or not f.is_raised)

    def post(self, failure: Failure) -> None:
        """Put a failure on the board, unless there is one of that rank."""
        self.refresh()
        if all(failure.rank != known.rank for known in self.failures):
            self._board.report(failure.to_json())
            self.refresh()

    def refresh(self) -> None:
        """Read what is new."""
        with self._lock:
            texts = self._board.reports(self._read)
            self._read += len(texts)
            for failure in map(Failure.from_json, texts):
                if failure is not None and all(failure.rank != f.rank for f in self._found):
                    self._found.append(failure)

    def await_others(self, seconds: float) -> tuple[Failure, ...]:
        """Wait some time for the failure of another rank."""
        deadline = monotonic() + seconds
        while not self.of_others and monotonic() < deadline:
            sleep(_POLL)
            self.refresh()
        return self.of_others
