"""A schedule: the program of each rank, as a value."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain as concatenate
from operator import itemgetter
from typing import cast

from penstock.errors import ScheduleError
from penstock.schedule.action import (
    MESSAGE_OPS,
    NEIGHBOUR,
    Action,
    Entry,
    Op,
    Overlap,
    Program,
    misfit,
)
from penstock.schedule.edges import Edge, Edges, Placement, Routes, chain, routes

# ---- Python's cyclic garbage collector, kept out of the way of millions of small values
# Actions are tuples that can never be part of a cycle, yet each full collection walks all of them: with a
# million actions that is half of the time. What is decorated here makes no cycles worth collecting.


@contextmanager
def paused_collection() -> Iterator[None]:
    """Pause the cyclic collector; also a decorator. Nested use is fine, the outermost resumes it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# ---- a schedule: what every rank does, in which order, as a value


@dataclass(frozen=True)
class Schedule:
    """Programs, one per rank, with the placement of stages and the edges between them.

    A schedule is frozen and comparable. One of the wrong *shape* cannot be constructed; whether its
    *order* is right is what :func:`penstock.schedule.validate` reports.

    Args:
        name: what to call it; not compared.
        placement: which rank holds which stages.
        microbatches: how many there are; every microbatch index is below.
        programs: for each rank its actions, in the order in which it starts them.
        edges: the values that travel between stages; by default the chain.

    Raises:
        ScheduleError: as many programs as ranks are expected; stages, microbatches and peers must be in
            range; an action must have the parts its op needs.
    """

    name: str = field(compare=False)
    placement: Placement
    microbatches: int
    programs: tuple[Program, ...] = field(repr=False)
    # None stands for the chain until the object is made; no edges at all are another table.
    edges: Edges = field(default=cast("Edges", None), repr=False)

    def __post_init__(self) -> None:
        if self.edges is None:
            object.__setattr__(self, "edges", chain(self.stages))
        _check_counts(self)
        _check_edges(self.edges, self.stages)
        for rank, program in enumerate(self.programs):
            _check_program(rank, program, self.stages, self.microbatches)

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return self.placement.stages

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.placement.ranks

    @cached_property
    def routes(self) -> Routes:
        """The messages that the edges need over the placement."""
        return routes(self.edges, self.placement)

    @cached_property
    def ops(self) -> frozenset[Op]:
        """The ops that occur."""
        return frozenset(
            op for program in self.programs for op in set(map(itemgetter(1), flat(program)))
        )

    @property
    def communicates(self) -> bool:
        """Whether the messages are spelled out."""
        return not self.ops.isdisjoint(MESSAGE_OPS)

    @property
    def trains(self) -> bool:
        """Whether there is any backward."""
        return not self.ops.isdisjoint({Op.I, Op.W, Op.B})

    @property
    def pairs(self) -> tuple[Overlap, ...]:
        """The forwards and backwards that run as overlapped pairs."""
        entries = (entry for program in self.programs for entry in program)
        return tuple(entry for entry in entries if isinstance(entry, Overlap))

    def actions(self, rank: int) -> Iterator[Action]:
        """The actions of ``rank`` in order, an overlapped pair as its forward and then its backward."""
        return flat(self.programs[rank])

    def with_programs(self, programs: Iterable[Iterable[Entry]]) -> Schedule:
        """The same schedule with other programs."""
        return replace(self, programs=tuple(map(tuple, programs)))

    def with_edges(self, edges: Iterable[Edge]) -> Schedule:
        """The same schedule for another edge table."""
        return replace(self, edges=tuple(edges))

    def __str__(self) -> str:
        rows = (
            f"rank {rank}: {' '.join(map(str, program))}"
            for rank, program in enumerate(self.programs)
        )
        head = f"{self.name}: {self.ranks} ranks, {self.stages} stages, {self.microbatches} microbatches"
        return "\n".join((head, *rows))


def flat(program: Sequence[Entry]) -> Iterator[Action]:
    """The actions of a program, an overlapped pair as its forward and then its backward."""
    if Overlap not in set(map(type, program)):
        return iter(cast("Sequence[Action]", program))
    return concatenate.from_iterable(
        entry if isinstance(entry, Overlap) else (entry,) for entry in program
    )


def _check_counts(schedule: Schedule) -> None:
    if schedule.microbatches < 1:
        raise ScheduleError(f"microbatches={schedule.microbatches}: must be at least 1")
    if len(schedule.programs) != schedule.ranks:
        raise ScheduleError(
            f"{len(schedule.programs)} programs for {schedule.ranks} ranks: give one program per rank"
        )


def _check_edges(edges: Edges, stages: int) -> None:
    beyond = [edge.value for edge in edges if edge.targets[-1] >= stages]
    if beyond:
        raise ScheduleError(f"edges {beyond} go to stages beyond the last, {stages - 1}")
    values = [edge.value for edge in edges]
    twice = (
        sorted({value for value in values if values.count(value) > 1}) if _repeats(values) else []
    )
    if twice:
        raise ScheduleError(f"edges named twice: {twice}")


def _repeats(values: list[str]) -> bool:
    return len(set(values)) < len(values)


def _check_program(rank: int, program: Program, stages: int, microbatches: int) -> None:
    """Check that each action could exist: first by kinds, of which there are few, then one by one."""
    if _sound(tuple(flat(program)), stages, microbatches):
        return
    for position, action in enumerate(flat(program)):
        problem = _problem(action, stages, microbatches)
        if problem:
            raise ScheduleError(f"rank {rank}, position {position}, {action}: {problem}")


def _sound(actions: Sequence[Action], stages: int, microbatches: int) -> bool:
    if not actions:
        return True
    columns = zip(*actions, strict=True)
    stage, op, microbatch, peer = columns
    without = [m is None for m in microbatch]
    named = [m for m in microbatch if m is not None]
    kinds = (
        Action(stage, op, None if none else 0, peer)
        for stage, op, none, peer in set(zip(stage, op, without, peer, strict=True))
    )
    in_range = min(named, default=0) >= 0 and max(named, default=0) < microbatches
    return in_range and not any(_problem(kind, stages, microbatches) for kind in kinds)


def _problem(action: Action, stages: int, microbatches: int) -> str | None:
    if not 0 <= action.stage < stages:
        return f"there is no stage {action.stage}; stages go from 0 to {stages - 1}"
    if action.microbatch is not None and not 0 <= action.microbatch < microbatches:
        return (
            f"there is no microbatch {action.microbatch}; "
            f"microbatches go from 0 to {microbatches - 1}"
        )
    if action.op in NEIGHBOUR and not 0 <= action.peer_stage < stages:
        return f"its peer, stage {action.peer_stage}, does not exist"
    return misfit(action)
