"""A schedule as a value: which rank holds which stage, which values travel, and what each rank does."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain as concatenate
from operator import index, itemgetter
from typing import cast, overload

from penstock.errors import ScheduleError, UsageError
from penstock.schedule.action import (
    MESSAGE_OPS,
    NEIGHBOUR,
    Action,
    Entry,
    Op,
    Overlap,
    Program,
    Slice,
    halves,
    microbatch_of,
    misfit,
)

# ---- which rank holds which stages


@dataclass(frozen=True)
class Placement:
    """A map from stages to ranks.

    Args:
        rank_of: the rank of each stage; every rank from 0 up to the largest has at least one stage.

    Raises:
        ScheduleError: no stage, a negative rank, or a rank without a stage.
    """

    rank_of: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.rank_of:
            raise ScheduleError("a placement needs at least one stage")
        empty = sorted(set(range(max(self.rank_of) + 1)) - set(self.rank_of))
        if min(self.rank_of) < 0 or empty:
            raise ScheduleError(
                f"placement {self.rank_of}: ranks count from 0 and each holds a stage; without one: {empty}"
            )

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.rank_of)

    @cached_property
    def ranks(self) -> int:
        """The number of ranks."""
        return max(self.rank_of) + 1

    @cached_property
    def _stages_on(self) -> tuple[tuple[int, ...], ...]:
        held: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage, rank in enumerate(self.rank_of):
            held[rank].append(stage)
        return tuple(map(tuple, held))

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` holds, ascending."""
        return self._stages_on[rank]


def looped(ranks: int, stages_per_rank: int = 1) -> Placement:
    """Put stage ``s`` on rank ``s % ranks``: a chain, or laps for interleaved schedules."""
    check_at_least_one(ranks=ranks, stages_per_rank=stages_per_rank)
    return Placement(tuple(stage % ranks for stage in range(ranks * stages_per_rank)))


def v_shaped(ranks: int) -> Placement:
    """Rank ``r`` holds stages ``r`` and ``2 * ranks - 1 - r``: down the ranks and back up."""
    check_at_least_one(ranks=ranks)
    down = tuple(range(ranks))
    return Placement(down + down[::-1])


def check_at_least_one(**counts: int) -> None:
    """Refuse named counts that are below 1 or not whole numbers."""
    for name, count in counts.items():
        if whole_number(name, count) < 1:
            raise ScheduleError(f"{name}={count}: must be at least 1")


@overload
def whole_number(name: str, number: int) -> int: ...
@overload
def whole_number(name: str, number: None) -> None: ...
@overload
def whole_number(name: str, number: int | None) -> int | None: ...


def whole_number(name: str, number: int | None) -> int | None:
    """Convert a whole number, which may be numpy's, to ``int``; ``None`` stays ``None``.

    Args:
        name: the name of the argument, for the message.
        number: the user's number.

    Raises:
        UsageError: the number is not whole.
    """
    try:
        return None if number is None else index(number)
    except TypeError:
        raise UsageError(f"{name}={number!r}: must be a whole number") from None


# ---- which values travel between stages, and over which messages
# An *edge* is a value, the stage that makes it and the stages that use it; the chain, where each stage
# feeds the next, is the usual table. A value is sent once to each rank that needs it: all values that a
# stage makes for one rank travel as one message, named after the lowest stage there that uses any of them.
# Their gradients come back as one message from that same stage.


@dataclass(frozen=True)
class Edge:
    """A value made by one stage and used by later ones.

    Args:
        value: the name of the value, unique in the edge table.
        source: the stage that makes it.
        targets: the later stages that use it, in ascending order.
        gradient: whether a gradient comes back; false for masks, indices and the like.
    """

    value: str
    source: int
    targets: tuple[int, ...]
    gradient: bool = True

    def __post_init__(self) -> None:
        if not self.targets or list(self.targets) != sorted(set(self.targets)):
            raise ScheduleError(
                f"edge {self.value!r}: targets {self.targets} must be at least one stage, in ascending order"
            )
        if self.source < 0 or self.targets[0] <= self.source:
            raise ScheduleError(
                f"edge {self.value!r}: made by stage {self.source}, used by stages {self.targets}; "
                "a value goes to later stages only"
            )


Edges = tuple[Edge, ...]


def chain(stages: int) -> Edges:
    """The edge table in which every stage feeds the next one."""
    return tuple(Edge(f"stage{stage}", stage, (stage + 1,)) for stage in range(stages - 1))


# ---- Python's cyclic garbage collector, kept out of the way of millions of small values
# Actions are tuples that can never be part of a cycle, yet each full collection visits all of them: with a
# million actions that takes half of the run time. The decorated functions make no cycles worth collecting.


@contextmanager
def paused_collection() -> Iterator[None]:
    """Pause the cyclic collector; also usable as a decorator. When nested, the outermost resumes it."""
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

    A schedule is frozen and comparable. The constructor refuses a wrong *shape*;
    :func:`penstock.schedule.validate` reports a wrong *order*.

    Args:
        name: the name of the schedule; not compared.
        placement: which rank holds which stages.
        microbatches: the number of microbatches; every microbatch index is below it.
        programs: each rank's actions, in the order in which it starts them.
        edges: the values that travel between stages; by default the chain.
        slices: into how many slices the sequences of each microbatch are cut. If there are several, every
            action for a microbatch is for one slice of it.

    Raises:
        ScheduleError: there is not one program per rank, a stage, microbatch, slice or peer is out of range,
            or an action lacks a part that its op needs.
    """

    name: str = field(compare=False)
    placement: Placement
    microbatches: int
    programs: tuple[Program, ...] = field(repr=False)
    # None means the chain, see __post_init__; an empty tuple means no edges at all.
    edges: Edges = field(default=cast("Edges", None), repr=False)
    slices: int = 1

    def __post_init__(self) -> None:
        _check_counts(self)
        edges = chain(self.stages) if self.edges is None else tuple(self.edges)
        object.__setattr__(self, "edges", edges)
        object.__setattr__(self, "programs", tuple(map(tuple, self.programs)))
        _check_edges(self.edges, self.stages)
        for rank, program in enumerate(self.programs):
            _check_program(rank, program, self)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.placement.stages

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.placement.ranks

    @property
    def parts(self) -> Sequence[int] | Sequence[Slice]:
        """What a stage runs, each forward once: the microbatches, or all of their slices."""
        microbatches = range(self.microbatches)
        if self.slices == 1:
            return microbatches
        return [Slice(m, number) for m in microbatches for number in range(self.slices)]

    def position(self, part: int | Slice) -> int:
        """The position of a microbatch or slice among :attr:`parts`."""
        return part.microbatch * self.slices + part.number if isinstance(part, Slice) else part

    @cached_property
    def ops(self) -> frozenset[Op]:
        """The ops that occur in the programs."""
        return frozenset(
            op for program in self.programs for op in set(map(itemgetter(1), flat(program)))
        )

    @property
    def communicates(self) -> bool:
        """True if the programs contain messages."""
        return not self.ops.isdisjoint(MESSAGE_OPS)

    @property
    def trains(self) -> bool:
        """True if it runs any backward."""
        return not self.ops.isdisjoint({Op.I, Op.W, Op.B})

    @property
    def pairs(self) -> tuple[Overlap, ...]:
        """The forwards and backwards that run as overlapped pairs."""
        entries = (entry for program in self.programs for entry in program)
        return tuple(entry for entry in entries if isinstance(entry, Overlap))

    def actions(self, rank: int) -> Iterator[Action]:
        """The actions of ``rank`` in order; an overlapped pair gives its forward, then its backward."""
        return flat(self.programs[rank])

    def with_programs(self, programs: Iterable[Iterable[Entry]]) -> Schedule:
        """The same schedule with other programs."""
        return replace(self, programs=tuple(map(tuple, programs)))

    def with_edges(self, edges: Iterable[Edge]) -> Schedule:
        """The same schedule with another edge table."""
        return replace(self, edges=tuple(edges))

    def __str__(self) -> str:
        rows = (
            f"rank {rank}: {' '.join(map(str, program))}"
            for rank, program in enumerate(self.programs)
        )
        head = f"{self.name}: {self.ranks} ranks, {self.stages} stages, {self.microbatches} microbatches"
        head += f" of {self.slices} slices" if self.slices > 1 else ""
        return "\n".join((head, *rows))


def flat(program: Sequence[Entry]) -> Iterator[Action]:
    """The actions of a program; an overlapped pair gives its forward, then its backward."""
    if Overlap not in set(map(type, program)):
        return iter(cast("Sequence[Action]", program))
    return concatenate.from_iterable(map(halves, program))


def _check_counts(schedule: Schedule) -> None:
    check_at_least_one(microbatches=schedule.microbatches, slices=schedule.slices)
    if len(schedule.programs) != schedule.ranks:
        raise ScheduleError(
            f"{len(schedule.programs)} programs for {schedule.ranks} ranks: give one program per rank"
        )


def _check_edges(edges: Edges, stages: int) -> None:
    beyond = [edge.value for edge in edges if edge.targets[-1] >= stages]
    if beyond:
        raise ScheduleError(f"edges {beyond} go to stages beyond the last, {stages - 1}")
    counts = Counter(edge.value for edge in edges)
    twice = sorted(value for value, count in counts.items() if count > 1)
    if twice:
        raise ScheduleError(f"edges named twice: {twice}")


def _check_program(rank: int, program: Program, schedule: Schedule) -> None:
    """Check that each action is valid: first by kind, and one by one only to find the error."""
    if _sound(tuple(flat(program)), schedule):
        return
    for position, action in enumerate(flat(program)):
        problem = _problem(action, schedule)
        if problem:
            raise ScheduleError(f"rank {rank}, position {position}, {action}: {problem}")


def _sound(actions: Sequence[Action], schedule: Schedule) -> bool:
    if not actions:
        return True
    columns = zip(*actions, strict=True)
    stage, op, microbatch, peer = columns
    without = [m is None for m in microbatch]
    named = [m for m in microbatch if m is not None]
    if schedule.slices > 1 or Slice in set(map(type, named)):
        one: int | Slice = Slice(0, 0)
        in_range = set(named) <= set(schedule.parts)
    else:
        one = 0
        in_range = min(named, default=0) >= 0 and max(named, default=0) < schedule.microbatches
    kinds = (
        Action(stage, op, None if none else one, peer)
        for stage, op, none, peer in set(zip(stage, op, without, peer, strict=True))
    )
    return in_range and not any(_problem(kind, schedule) for kind in kinds)


def _problem(action: Action, schedule: Schedule) -> str | None:
    stages, microbatches, slices = schedule.stages, schedule.microbatches, schedule.slices
    if not 0 <= action.stage < stages:
        return f"there is no stage {action.stage}; stages go from 0 to {stages - 1}"
    number = microbatch_of(action)
    if number is not None and not 0 <= number < microbatches:
        return f"there is no microbatch {number}; microbatches go from 0 to {microbatches - 1}"
    if isinstance(action.microbatch, Slice):
        if slices == 1:
            return "the schedule has no slices; give it slices= if it cuts sequences"
        if not 0 <= action.microbatch.number < slices:
            return f"there is no slice {action.microbatch.number}; slices go from 0 to {slices - 1}"
    elif number is not None and slices > 1:
        return f"it names no slice, and the schedule has {slices}; write {action}.0 for the first"
    if action.op in NEIGHBOUR and not 0 <= action.peer_stage < stages:
        return f"its peer, stage {action.peer_stage}, does not exist"
    return misfit(action)
