"""Where each rank is, by its heartbeats, and which rank holds up the others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from penstock.errors import printable

T = TypeVar("T")

LARGEST = 100_000
"""The largest record of another rank that is read, in bytes."""
LONGEST_LINE = 500
LONGEST_TRACE = 20_000
STALE = 2.5
"""Seconds without a heartbeat, sent once a second, after which a rank's threads count as stopped."""


def name_of(rank: int, global_rank: int | None) -> str:
    """A rank's name in messages; pipelines side by side each have a rank of the same number."""
    return f"rank {rank}" + ("" if global_rank is None else f" (global rank {global_rank})")


@dataclass(frozen=True)
class Place:
    """Where a rank is: its last heartbeat, and the heartbeat's age.

    Args:
        rank: the rank.
        number: the number of the heartbeat.
        status: ``runs``, ``stops`` (with an error) or ``left`` (it is done).
        calls: how many steps and evaluations it has begun.
        step: the current training step, or the last one.
        inside: whether it is in a step or an evaluation.
        setup: the part of the set-up that it is in; ``None`` once its pipeline is made.
        stage: the stage of the current action.
        microbatch: the microbatch of the current action.
        action: the current action, or the last one.
        waits: what it waits for; ``None`` while it works.
        peer: the rank that it waits for; ``None`` for all that are not in the same operation.
        age: seconds from its last progress to this heartbeat.
        slack: seconds without progress that it has asked for.
        address: its machine's address, as the host of the store sees it; empty if unknown.
        global_rank: its rank among all processes, where that differs.
        stale: seconds since the reader received this heartbeat.
    """

    rank: int
    number: int = 0
    status: str = "runs"
    calls: int = 0
    step: int = 0
    inside: bool = True
    setup: str | None = None
    stage: int | None = None
    microbatch: int | None = None
    action: str | None = None
    waits: str | None = None
    peer: int | None = None
    age: float = 0.0
    slack: float = 0.0
    address: str = ""
    global_rank: int | None = None
    stale: float = 0.0

    def __str__(self) -> str:
        return f"{name_of(self.rank, self.global_rank)} {self.words}"

    @property
    def is_mute(self) -> bool:
        """Whether none of its threads run, or its heartbeats do not arrive."""
        return self.stale >= STALE

    @property
    def idle(self) -> float:
        """Seconds without progress."""
        return self.age + self.stale

    @property
    def words(self) -> str:
        """A description of what the rank is doing, and for how long."""
        if not self.is_mute:
            return f"{self.doing} for {self.idle:.1f} s"
        return (
            f"{self.doing}, by its last heartbeat {self.stale:.1f} s ago; its process has ended or is "
            "stopped by a signal, its interpreter is held by code that does not let other threads run, its "
            "machine is down, or the network to it is cut"
        )

    @property
    def advice(self) -> str:
        """What to do about a silent rank."""
        if self.is_mute:
            return ""
        if self.inside and self.setup is None:
            return ", and waits for nobody"
        remedy = "raise rendezvous_timeout=" if self.setup else "say so by pipe.patient()"
        return f", and waits for nobody; if it needs that long, {remedy}"

    @property
    def doing(self) -> str:
        """A description of what the rank is doing."""
        if self.setup is not None:
            return f"is making its pipeline ({self.waits or self.setup})"
        if self.waits is not None:
            source = "" if self.peer is None else f" from rank {self.peer}"
            return f"waits for {self.waits}{source}"
        if not self.inside:
            steps = (
                f"between steps, after step {self.step}" if self.step else "before its first step"
            )
            return f"is {steps}, in its own code"
        return f"is in {self.action}" if self.action else "prepares a step"


def read_record(kind: type[T], data: bytes) -> T | None:
    """Read a dataclass from JSON that another process wrote; ``None`` if it is anything else.

    Any process that reaches the store may have written it, so its size, its depth and the type of each field
    are checked, and texts are escaped, so that they cannot control a terminal.
    """
    if len(data) > LARGEST:
        return None
    try:
        record = json.loads(data)
        values = {f.name: _checked(record[f.name], str(f.type), f.name) for f in fields(kind)}  # type: ignore[arg-type]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return kind(**values)


def _checked(value: Any, kinds: str, name: str) -> Any:
    kind = type(value).__name__
    if value is None and "None" in kinds:
        return None
    if kind == "str" and kinds.startswith("str"):
        return printable(value)[: LONGEST_TRACE if name == "trace" else LONGEST_LINE]
    if kind == "int" and kinds.startswith(("int", "float")) and abs(value) < 2**53:
        return value
    if kind == kinds and kind in ("bool", "float"):
        return value
    raise TypeError(name)


# ---- which rank is silent


def find_silent(places: Mapping[int, Place], start: int, limit: float) -> tuple[int, ...]:
    """Follow the waits from a rank to where they end.

    Args:
        places: the place of every rank.
        start: the rank that has waited too long.
        limit: seconds for which a rank may make no progress, unless it has asked for more.

    Returns:
        The rank that waits for no other and makes no progress; several if ranks wait in a circle; none while
        the ranks at the end still make progress, or while it is too early to know.
    """
    order = [start]
    for rank in order:
        order += [peer for peer in awaited(places, rank) if peer not in order]

    def is_late(place: Place, seconds: float) -> bool:
        return seconds >= max(limit, place.slack)

    chain = [places[rank] for rank in order]
    ends = [place for place in chain if place.waits is None or place.is_mute]
    late = [p for p in ends if is_late(p, p.idle if p.is_mute else p.age)]
    if late:
        return (max(late, key=lambda place: place.idle).rank,)
    # A rank may have gone on since its heartbeat: in a circle, only its age at the heartbeat counts.
    circle = not ends and all(is_late(place, place.age) for place in chain)
    return tuple(sorted(order)) if circle else ()


def awaited(places: Mapping[int, Place], rank: int) -> Sequence[int]:
    """The ranks that a rank waits for.

    In an operation of all ranks: those that are not in it, or else all others.
    """
    place = places[rank]
    if place.waits is None or place.is_mute:
        return ()
    if place.peer is not None:
        return [place.peer] if place.peer in places and place.peer != rank else []
    others = [other for other in places.values() if other.rank != rank]
    absent = [other.rank for other in others if other.waits is None or other.peer is not None]
    return absent or [other.rank for other in others]
