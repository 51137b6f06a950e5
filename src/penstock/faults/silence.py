"""Who holds everybody up: follow what the ranks wait for to the one that waits for nobody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """Where a rank is, as its last heartbeat tells and as it looks by now.

    Args:
        rank: whose.
        calls: how many calls of the pipeline it has begun.
        inside: whether it is in one.
        step: how many training steps it has begun.
        stage: where in its program it is, as far as it is in an action.
        microbatch: likewise.
        action: likewise.
        waits: what it waits for, None if it does not wait.
        peers: from which ranks, None: from all that do not wait alike.
        age: seconds since it last moved.
        stale: seconds since its last heartbeat.
        condition: of its process: ``runs``, ``stopped``, ``ended`` or ``unknown``.
        limit: seconds that it may go without progress.
    """

    rank: int
    calls: int = 0
    inside: bool = True
    step: int = 0
    stage: int | None = None
    microbatch: int | None = None
    action: str | None = None
    waits: str | None = None
    peers: tuple[int, ...] | None = None
    age: float = 0.0
    stale: float = 0.0
    condition: str = "runs"
    limit: float = 0.0

    def __str__(self) -> str:
        return f"rank {self.rank} {self.words}"

    @property
    def words(self) -> str:
        """What it does, and for how long."""
        if self.is_mute:
            return (
                f"has not been heard of for {self.stale:.1f} s; by its last word it {self._doing}"
            )
        return f"{self._doing} for {self.age:.1f} s{self._trouble}"

    @property
    def is_mute(self) -> bool:
        """Whether it gives no heartbeat, and its process cannot be looked at from here."""
        return self.stale >= STALE and self.condition == "unknown"

    @property
    def _doing(self) -> str:
        if not self.inside:
            after = f" after step {self.step}" if self.step else ""
            return f"is outside of the pipeline, in its own code{after},"
        if self.waits is not None:
            return f"{self.waits}{self._sources}"
        return f"is in {self.action}" if self.action else "prepares a call"

    @property
    def _sources(self) -> str:
        if not self.peers:
            return ""
        ranks = ", ".join(map(str, self.peers))
        return f" from rank{'s' if len(self.peers) > 1 else ''} {ranks}"

    @property
    def _trouble(self) -> str:
        if self.condition == "stopped":
            return "; its process is stopped by a signal"
        if self.condition == "ended":
            return "; its process has ended"
        held = "; its interpreter is held by code that does not let other threads run"
        return held if self.stale >= STALE else ""


STALE = 1.5
"""Seconds without a heartbeat after which a rank's own threads do not run any more."""


@dataclass(frozen=True)
class Verdict:
    """Who is silent, and how that follows.

    Args:
        culprits: the ranks that wait for nobody and make no progress.
        chain: the way there in words, from the rank that asked.
    """

    culprits: tuple[int, ...]
    chain: tuple[str, ...]


def find_silent(places: Mapping[int, Place], start: int) -> Verdict | None:
    """Follow the waits from a rank to where they end.

    Args:
        places: of every rank.
        start: the rank that waits too long.

    Returns:
        None while those at the end still make progress.
    """
    order = _reached(places, start)
    idle = [rank for rank in order if not _held_up(places, rank)]
    late = [rank for rank in idle if _late(places[rank])]
    chain = tuple(str(places[rank]) for rank in order)
    if late:
        return Verdict((max(late, key=lambda rank: places[rank].age),), chain)
    if idle:
        return None
    waiting = [rank for rank in order if places[rank].age >= places[rank].limit]
    return Verdict(tuple(sorted(waiting)), chain) if len(waiting) == len(order) else None


def awaited(places: Mapping[int, Place], rank: int) -> Sequence[int]:
    """For whom a rank waits: in an operation of all, those that are not in one; where all are, each other."""
    place = places[rank]
    if place.waits is None:
        return ()
    if place.peers is not None:
        return [peer for peer in place.peers if peer in places and peer != rank]
    absent = [other for other in places if not _in_operation_of_all(places[other])]
    return absent or [other for other in places if other != rank]


def _in_operation_of_all(place: Place) -> bool:
    return place.inside and place.waits is not None and place.peers is None


def _reached(places: Mapping[int, Place], start: int) -> list[int]:
    order = [start]
    for rank in order:
        order += [peer for peer in awaited(places, rank) if peer not in order]
    return order


def _held_up(places: Mapping[int, Place], rank: int) -> bool:
    """Whether it waits; a process that no longer runs its threads waits for nobody, whatever it said."""
    place = places[rank]
    return place.waits is not None and place.stale < STALE and place.condition != "stopped"


def _late(place: Place) -> bool:
    return place.condition == "ended" or place.age >= place.limit or place.condition == "stopped"


def place_of(
    found: Mapping[str, Any], *, stale: float, condition: str, inside: float, outside: float
) -> Place:
    """A place from a heartbeat, grown older by the time since."""
    peers = found["peers"]
    is_inside = bool(found["inside"])
    return Place(
        int(found["rank"]),
        int(found["calls"]),
        is_inside,
        int(found["step"]),
        found["stage"],
        found["microbatch"],
        found["action"],
        found["waits"],
        None if peers is None else tuple(int(peer) for peer in peers),
        float(found["age"]) + (0.0 if found.get("exact") else stale),
        stale,
        condition,
        inside if is_inside else outside,
    )
