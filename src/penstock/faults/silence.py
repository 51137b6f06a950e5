"""Where each rank is, by its heartbeats, which rank holds up the others, and which stage is slow."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any, TypeVar

from penstock.errors import printable

T = TypeVar("T")

LARGEST = 100_000
"""Bytes of a record of another rank beyond which it is not read."""
LONGEST_LINE = 500
LONGEST_TRACE = 20_000
STALE = 2.5
"""Seconds without a heartbeat after which a rank's threads are taken not to run; they send one a second."""


def name_of(rank: int, global_rank: int | None) -> str:
    """What messages call a rank; of several pipelines side by side, each has a rank of the same number."""
    return f"rank {rank}" + ("" if global_rank is None else f" (global rank {global_rank})")


@dataclass(frozen=True)
class Place:
    """Where a rank is: its heartbeat, and what the reader knows besides.

    Args:
        rank: the rank.
        number: the number of the heartbeat.
        status: ``runs``; ``stops``: with an error; ``left``: it is done.
        calls: how many steps and evaluations it has begun.
        step: the training step that it is in, or that it did last.
        inside: whether it is in a step or an evaluation.
        setup: the part of the set-up that it is in; ``None`` once its pipeline is made.
        stage: of the current action.
        microbatch: of the current action.
        action: the current action, or the last one.
        waits: what it waits for; ``None`` while it works.
        peer: the rank that it waits for; ``None`` for all that are not in the same operation.
        age: seconds since it last made progress, when it sent this.
        slack: seconds that it has asked for.
        busy: for each stage, the seconds that its computations took, and their number.
        stale: seconds since the reader got this.
        condition: of its process: ``runs``, ``stopped``, ``ended`` or ``unknown``.
        limit: seconds that it may make no progress.
        global_rank: its rank among all processes, where that is another number.
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
    busy: dict[str, list[float]] = field(default_factory=dict)
    stale: float = 0.0
    condition: str = "runs"
    limit: float = math.inf
    global_rank: int | None = None

    def __str__(self) -> str:
        return f"{name_of(self.rank, self.global_rank)} {self.words}"

    @property
    def is_mute(self) -> bool:
        """Whether none of its threads run, or its words do not arrive."""
        return self.stale >= STALE or self.condition in ("stopped", "ended")

    @property
    def idle(self) -> float:
        """Seconds without progress."""
        return self.age + self.stale

    @property
    def words(self) -> str:
        """What it is doing, and for how long."""
        if not self.is_mute:
            return f"{self._doing} for {self.idle:.1f} s"
        why = {
            "stopped": "its process is stopped by a signal",
            "runs": "its interpreter is held by code that does not let other threads run",
        }.get(
            self.condition,
            "its process is stopped, its machine is down, or the network to it is cut",
        )
        if self.condition == "ended":
            return f"{self._doing}, by its last heartbeat {self.stale:.1f} s ago"
        return f"{self._doing}, by its last heartbeat {self.stale:.1f} s ago; {why}"

    @property
    def advice(self) -> str:
        """For a silent rank: what to do."""
        if self.is_mute:
            return ""
        if self.inside and self.setup is None:
            return ", and waits for nobody"
        remedy = "raise rendezvous_timeout=" if self.setup else "say so by pipe.patient()"
        return f", and waits for nobody; if it needs that long, {remedy}"

    @property
    def _doing(self) -> str:
        if self.setup is not None:
            return f"is making its pipeline ({self.waits or self.setup})"
        if self.waits is not None:
            source = "" if self.peer is None else f" from rank {self.peer}"
            return f"waits for {self.waits}{source}"
        if not self.inside:
            steps = (
                f"between steps, after step {self.step}" if self.step else "before its first step"
            )
            return f"is {steps}, in its own code,"
        return f"is in {self.action}" if self.action else "prepares a step"


def read_record(kind: type[T], data: bytes) -> T | None:
    """A dataclass from JSON that another process wrote; ``None`` if it is anything else.

    Any process that reaches the store may have written it: its size, its depth and the type of each field
    are checked, and nothing in its texts can steer a terminal.
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
    if kind == "bool" and kinds == "bool":
        return value
    if kind == "int" and kinds.startswith(("int", "float")) and abs(value) < 2**53:
        return value
    if kind == "float" and kinds == "float":
        return value
    if kind == "dict" and kinds.startswith("dict") and len(value) < 1000:
        return {
            str(int(stage)): [float(seconds), int(count)]
            for stage, (seconds, count) in value.items()
        }
    raise TypeError(name)


# ---- which rank is silent


@dataclass(frozen=True)
class SilenceVerdict:
    """Which ranks are silent, and how that was found.

    Args:
        culprits: the ranks that wait for nobody and make no progress; several if they wait in a circle.
        chain: the chain of waits in words, from the rank that asked.
    """

    culprits: tuple[int, ...]
    chain: tuple[str, ...]


def find_silent(places: Mapping[int, Place], start: int) -> SilenceVerdict | None:
    """Follow the waits from a rank to where they end.

    Args:
        places: of every rank.
        start: the rank that has waited too long.

    Returns:
        The verdict; ``None`` while the ranks at the end still make progress, or that cannot be known yet.
    """
    order = [start]
    for rank in order:
        order += [peer for peer in awaited(places, rank) if peer not in order]
    chain = tuple(str(places[rank]) for rank in order)
    idle = [places[rank] for rank in order if places[rank].waits is None or places[rank].is_mute]
    late = [p for p in idle if (p.idle if p.is_mute else p.age) >= p.limit]
    if late:
        return SilenceVerdict((max(late, key=lambda place: place.idle).rank,), chain)
    # In a circle, what a rank says must be as old as its wait: it may have gone on since its heartbeat.
    circle = not idle and all(places[rank].age >= places[rank].limit for rank in order)
    return SilenceVerdict(tuple(sorted(order)), chain) if circle else None


def awaited(places: Mapping[int, Place], rank: int) -> Sequence[int]:
    """The ranks that a rank waits for.

    In an operation of all ranks, those that are not in it, if there are any.
    """
    place = places[rank]
    if place.waits is None or place.is_mute:
        return ()
    if place.peer is not None:
        return [place.peer] if place.peer in places and place.peer != rank else []
    others = [other for other in places.values() if other.rank != rank]
    absent = [other.rank for other in others if other.waits is None or other.peer is not None]
    return absent or [other.rank for other in others]


# ---- which stage is slow: that is only logged

SLOW = 3.0
"""A stage this many times slower than the others' median is a straggler, as stages should be balanced."""
FEWEST = 8
"""Computations of a stage before it is judged."""
SHORTEST = 0.005
"""Seconds of a computation below which a stage is too fast to matter."""


class Stragglers:
    """Compares the stages of a pipeline by how long their computations take."""

    def __init__(self) -> None:
        self._before: dict[str, list[float]] = {}
        self._named: set[str] = set()

    def find(self, places: Iterable[Place]) -> list[str]:
        """Sentences about stragglers that were not named before, by what came since the last look."""
        now = {stage: pair for place in places for stage, pair in place.busy.items()}
        means = {}
        for stage, (seconds, count) in now.items():
            before = self._before.get(stage, [0.0, 0])
            if count - before[1] >= FEWEST:
                means[stage] = (seconds - before[0]) / (count - before[1])
        if len(means) < len(now) or len(means) < 2:
            return []
        self._before = now
        sentences = []
        for stage, mean in means.items():
            usual = median(other for name, other in means.items() if name != stage)
            if stage not in self._named and mean >= max(SHORTEST, SLOW * usual):
                self._named.add(stage)
                sentences.append(
                    f"stage {stage} is a straggler: an action takes {1e3 * mean:.1f} ms there, and "
                    f"{1e3 * usual:.1f} ms in the other stages, which wait for it; look at its device, or "
                    "cut the model so that this stage holds less"
                )
        return sentences
