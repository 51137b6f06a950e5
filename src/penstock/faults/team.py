"""The other ranks as seen from one: their heartbeats, their processes, their last words."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from time import monotonic, sleep
from typing import Any

from penstock.faults.board import Board
from penstock.faults.processes import Process
from penstock.faults.silence import Place, place_of
from penstock.faults.slate import Slate

BEAT, LEFT, RAISED, STACK, TOLD = "beat", "left", "raised", "stack", "told"
"""Topics of the board: a heartbeat; that a rank is done; that it stops; its stacks; that all is written."""

_POLL = 0.02


class Team:
    """All ranks of a pipeline, seen from one of them.

    Args:
        rank: this one.
        processes: of every rank.
        board: where they leave word.
    """

    def __init__(self, rank: int, processes: Mapping[int, Process], board: Board) -> None:
        self.rank = rank
        self.processes = processes
        self._board = board
        self._slates: dict[int, Slate | None] = {}
        self._beats: dict[int, tuple[int, float]] = {}

    @property
    def others(self) -> list[int]:
        """All but this rank."""
        return [rank for rank in self.processes if rank != self.rank]

    def say(self, topic: str, text: str = "{}") -> None:
        """Leave this rank's word on a topic."""
        self._board.post(topic, self.rank, text)

    def said(self, topic: str, rank: int) -> str | None:
        """A rank's word on a topic."""
        return self._board.read(topic, rank)

    def left(self, rank: int) -> dict[str, Any] | None:
        """What a rank said when it was done."""
        text = self.said(LEFT, rank)
        return None if text is None else as_dict(text)

    def gone(self, rank: int) -> bool:
        """Whether it is done, or its process has ended."""
        return self.processes[rank].condition() == "ended" or self.left(rank) is not None

    def await_word(self, topic: str, ranks: list[int], seconds: float) -> bool:
        """Wait some time until these ranks have left word on a topic, or have gone; whether they did."""
        deadline = monotonic() + seconds
        while missing := [r for r in ranks if self.said(topic, r) is None and not self.gone(r)]:
            if monotonic() >= deadline:
                return False
            ranks = missing
            sleep(_POLL)
        return True

    def places(self, own: dict[str, Any], limits: tuple[float, float]) -> dict[int, Place]:
        """Where every rank is.

        Args:
            own: this rank's activity.
            limits: seconds without progress that a rank may have inside a call and outside.
        """
        inside, outside = limits
        found = {}
        for rank in self.processes:
            beat = own if rank == self.rank else self.beat(rank)
            stale = 0.0 if rank == self.rank else self._staleness(rank, beat)
            found[rank] = place_of(
                beat or _unheard(rank),
                stale=stale,
                condition=self.processes[rank].condition(),
                inside=inside,
                outside=outside,
            )
        return found

    def beat(self, rank: int) -> dict[str, Any]:
        """The last heartbeat of a rank; empty where there is none or it cannot be read."""
        found = as_dict(self.said(BEAT, rank) or "")
        slate = self._slates[rank] = self._slates.get(rank) or self._board.slate(rank)
        seen = slate.read() if slate is not None else {}
        if not _is_beat(found):
            # A rank may be far on before its first heartbeat.
            return _unheard(rank) | seen if seen else {}
        # What was written down since the heartbeat is newer.
        return found | seen if seen.get("progress", 0) > found["progress"] else found

    @property
    def is_near(self) -> bool:
        """Whether all ranks are on this machine."""
        return all(process.is_here for process in self.processes.values())

    def staleness(self, rank: int) -> float:
        """Seconds since the heartbeat of a rank last changed."""
        return self._staleness(rank, self.beat(rank))

    def listen(self) -> None:
        """Note which heartbeats have changed, from which their age is found."""
        for rank in self.others:
            self._staleness(rank, self.beat(rank))

    def _staleness(self, rank: int, beat: Mapping[str, Any]) -> float:
        number, now = int(beat.get("beat", 0)), monotonic()
        if self._beats.get(rank, (-1, 0.0))[0] != number:
            self._beats[rank] = (number, now)
        return now - self._beats[rank][1]


def as_dict(text: str) -> dict[str, Any]:
    """JSON text of an object; of anything else nothing."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


_BEAT: dict[str, type | tuple[type, ...]] = {
    "beat": int,
    "rank": int,
    "calls": int,
    "step": int,
    "inside": bool,
    "age": (int, float),
    "progress": int,
    "busy": dict,
}
_MAYBE: dict[str, Callable[[Any], bool]] = {
    "stage": lambda v: isinstance(v, int),
    "microbatch": lambda v: isinstance(v, int),
    "action": lambda v: isinstance(v, str),
    "waits": lambda v: isinstance(v, str),
    "peers": lambda v: isinstance(v, list) and all(isinstance(p, int) for p in v),
}


def _is_beat(found: Mapping[str, Any]) -> bool:
    return all(isinstance(found.get(name), kind) for name, kind in _BEAT.items()) and all(
        name in found and (found[name] is None or fits(found[name]))
        for name, fits in _MAYBE.items()
    )


def _unheard(rank: int) -> dict[str, Any]:
    """In place of a heartbeat that never came."""
    empty = dict.fromkeys(_MAYBE)
    return {
        **empty,
        "beat": 0,
        "rank": rank,
        "calls": 0,
        "step": 0,
        "inside": True,
        "age": 0.0,
        "progress": 0,
        "busy": {},
    }
