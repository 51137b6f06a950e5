"""The other ranks as seen from one: their heartbeats, their processes, their last words, their failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from time import monotonic, sleep
from typing import Any

from penstock.faults.board import Board
from penstock.faults.failure import Failure
from penstock.faults.processes import Process
from penstock.faults.silence import Place, place_of

BEAT, LEFT, RAISED, STACK, TOLD = "beat", "left", "raised", "stack", "told"
"""Topics of the board: a heartbeat; that a rank is done; that it stops; its stacks; that all is written."""

_POLL = 0.02


class Team:
    """All ranks of a pipeline, seen from one of them; both of a process's threads use it.

    Args:
        rank: this one.
        processes: of every rank.
        board: where they leave word.
    """

    def __init__(self, rank: int, processes: Mapping[int, Process], board: Board) -> None:
        self.rank = rank
        self.processes = processes
        self.board = board
        self._beats: dict[int, tuple[int, float]] = {}
        self._lock = threading.Lock()
        self._failures: tuple[Failure, ...] = ()

    @property
    def others(self) -> list[int]:
        """All but this rank."""
        return [rank for rank in self.processes if rank != self.rank]

    @property
    def is_near(self) -> bool:
        """Whether all ranks are on this machine."""
        return all(process.is_here for process in self.processes.values())

    # ---- words

    def say(self, topic: str, word: Any = True) -> None:
        """Leave this rank's word on a topic."""
        self.board.post(topic, word)

    def left(self, rank: int) -> dict[str, Any] | None:
        """What a rank said when it was done."""
        found = self.board.read(LEFT, rank)
        return found if found is None or isinstance(found, dict) else {}

    def gone(self, rank: int) -> bool:
        """Whether it is done, or its process has ended."""
        return self.processes[rank].condition() == "ended" or self.left(rank) is not None

    def await_word(self, topic: str, ranks: list[int], seconds: float) -> bool:
        """Wait some time until these ranks have left word on a topic, or have gone; whether they did."""
        deadline = monotonic() + seconds
        while missing := [r for r in ranks if not self.board.read(topic, r) and not self.gone(r)]:
            if monotonic() >= deadline:
                return False
            ranks = missing
            sleep(_POLL)
        return True

    # ---- failures

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Those that were read, each rank's first; what follows from a failure is none."""
        return self._failures

    @property
    def of_others(self) -> tuple[Failure, ...]:
        """All but what this rank raised itself; a network that was cut has this rank's name on it too."""
        return tuple(f for f in self._failures if f.rank != self.rank or not f.is_raised)

    def report(self, failure: Failure) -> None:
        """Put a failure on the board, unless there is one of that rank."""
        self.refresh()
        if all(failure.rank != known.rank for known in self.failures):
            self.board.report(asdict(failure))
            self.refresh()

    def refresh(self) -> None:
        """Read what is new."""
        with self._lock:
            found: dict[int, Failure] = {}
            for failure in map(Failure.from_data, self.board.reports()):
                if failure is not None:
                    found.setdefault(failure.rank, failure)
            self._failures = tuple(found.values())

    # ---- heartbeats

    def places(self, own: dict[str, Any], limit: float) -> dict[int, Place]:
        """Where every rank is.

        Args:
            own: this rank's activity.
            limit: seconds without progress that a rank may have, unless it has asked for more.
        """
        found = {}
        for rank, process in self.processes.items():
            beat = own if rank == self.rank else self.beat(rank)
            stale = 0.0 if rank == self.rank else self._staleness(rank, beat)
            found[rank] = place_of(beat, stale=stale, condition=process.condition(), limit=limit)
        return found

    @staticmethod
    def words_of(own: dict[str, Any]) -> str:
        """Where this rank is, from its activity."""
        return place_of(own, stale=0.0, condition="runs", limit=0.0).words

    def beat(self, rank: int) -> dict[str, Any]:
        """The last heartbeat of a rank; an empty one where there is none or it cannot be read."""
        found: dict[str, Any] = self.board.read(BEAT, rank)
        slate = self.board.slate(rank)
        seen = slate.read() if slate is not None else {}
        if not _is_beat(found):
            # A rank may be far on before its first heartbeat.
            found = _unheard(rank)
        # What was written down since the heartbeat is newer.
        return found | seen if seen.get("progress", 0) > found["progress"] else found

    def staleness(self, rank: int) -> float:
        """Seconds since the heartbeat of a rank last changed."""
        return self._staleness(rank, self.beat(rank))

    def listen(self) -> None:
        """Note which heartbeats have changed, from which their age is found."""
        for rank in self.others:
            self.staleness(rank)

    def _staleness(self, rank: int, beat: Mapping[str, Any]) -> float:
        number, now = int(beat.get("beat", 0)), monotonic()
        if self._beats.get(rank, (-1, 0.0))[0] != number:
            self._beats[rank] = (number, now)
        return now - self._beats[rank][1]


_BEAT: dict[str, type | tuple[type, ...]] = {
    "beat": int,
    "rank": int,
    "calls": int,
    "step": int,
    "inside": bool,
    "age": (int, float),
    "progress": int,
    "slack": (int, float),
    "busy": dict,
}
_MAYBE: dict[str, Callable[[Any], bool]] = {
    "stage": lambda v: isinstance(v, int),
    "microbatch": lambda v: isinstance(v, int),
    "action": lambda v: isinstance(v, str),
    "making": lambda v: isinstance(v, str),
    "waits": lambda v: isinstance(v, str),
    "peers": lambda v: isinstance(v, list) and all(isinstance(p, int) for p in v),
}


def _is_beat(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and all(isinstance(found.get(name), kind) for name, kind in _BEAT.items())
        and all(
            name in found and (found[name] is None or fits(found[name]))
            for name, fits in _MAYBE.items()
        )
    )


def _unheard(rank: int) -> dict[str, Any]:
    """In place of a heartbeat that never came."""
    numbers = dict.fromkeys(("beat", "calls", "step", "age", "progress", "slack"), 0)
    return {**dict.fromkeys(_MAYBE), **numbers, "rank": rank, "inside": True, "busy": {}}
