"""Which rank holds which stage, and which values travel between stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import overload

from penstock.errors import ScheduleError, UsageError

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
                f"placement {self.rank_of}: ranks count from 0 and each holds a stage; "
                f"without one: {empty}"
            )

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.rank_of)

    @cached_property
    def ranks(self) -> int:
        """How many ranks there are."""
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
    """Stage ``s`` on rank ``s % ranks``: the chain, and its laps for interleaved schedules."""
    check_at_least_one(ranks=ranks, stages_per_rank=stages_per_rank)
    return Placement(tuple(stage % ranks for stage in range(ranks * stages_per_rank)))


def v_shaped(ranks: int) -> Placement:
    """Rank ``r`` holds stages ``r`` and ``2 * ranks - 1 - r``: down the ranks and back up."""
    check_at_least_one(ranks=ranks)
    down = tuple(range(ranks))
    return Placement(down + down[::-1])


def check_at_least_one(**counts: int) -> None:
    """Refuse a count below one, or that is none, by its name."""
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
    """A number that is whole, also one of numpy; or nothing.

    Args:
        name: of the argument that it was given as.
        number: as the user gave it.

    Raises:
        UsageError: it is something else.
    """
    try:
        return None if number is None else index(number)
    except TypeError:
        raise UsageError(f"{name}={number!r}: must be a whole number") from None


# ---- which values travel between stages, and over which messages
# An *edge* is a value, the stage that makes it and the stages that use it; the chain, where each stage
# feeds the next, is the common table. A value is sent once to each rank that needs it: all values that a
# stage makes for one rank travel as one message, named by the lowest stage there that uses any of them. Its
# gradients come back as one message from that same stage.


@dataclass(frozen=True)
class Edge:
    """A value made by one stage and used by later ones.

    Args:
        value: its name, unique in a table.
        source: the stage that makes it.
        targets: the later stages that use it, ascending.
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
    """The table in which every stage feeds the next one."""
    return tuple(Edge(f"stage{stage}", stage, (stage + 1,)) for stage in range(stages - 1))


Table = tuple[tuple[int, ...], ...]
"""For each stage, some other stages, ascending."""


@dataclass(frozen=True)
class Routes:
    """How an edge table runs over a placement, per stage.

    Attributes:
        sources: the stages whose values a stage uses.
        users: the stages that use a stage's values and owe it a gradient.
        messages_in: of the sources on other ranks, those whose message names this stage.
        messages_out: the stages on other ranks that name this stage's messages, one per rank.
        gradients_in: like ``messages_out``, of the messages that bring gradients back.
        gradients_out: like ``messages_in``, of the messages that take gradients back.
    """

    placement: Placement
    sources: Table
    users: Table
    messages_in: Table
    messages_out: Table
    gradients_in: Table
    gradients_out: Table

    def carrier(self, source: int, user: int) -> int:
        """The stage on ``user``'s rank that names the message from ``source``."""
        rank = self.placement.rank_of[user]
        return next(s for s in self.messages_out[source] if self.placement.rank_of[s] == rank)

    def gradient_carrier(self, source: int, user: int) -> int:
        """The stage on ``user``'s rank that names the gradient message to ``source``."""
        rank = self.placement.rank_of[user]
        return next(s for s in self.gradients_in[source] if self.placement.rank_of[s] == rank)

    def owing(self, source: int, carrier: int) -> tuple[int, ...]:
        """The stages on ``carrier``'s rank whose gradients make up its message to ``source``."""
        rank = self.placement.rank_of[carrier]
        return tuple(u for u in self.users[source] if self.placement.rank_of[u] == rank)


def routes(edges: Iterable[Edge], placement: Placement) -> Routes:
    """Work out the messages of an edge table over a placement."""
    table = tuple(edges)
    out = _message_targets(table, placement)
    back = _message_targets((edge for edge in table if edge.gradient), placement)
    return Routes(
        placement,
        sources=_inverse(_used_by(table, placement.stages)),
        users=_used_by((edge for edge in table if edge.gradient), placement.stages),
        messages_in=_inverse(out),
        messages_out=out,
        gradients_in=back,
        gradients_out=_inverse(back),
    )


def _used_by(edges: Iterable[Edge], stages: int) -> Table:
    users: list[set[int]] = [set() for _ in range(stages)]
    for edge in edges:
        users[edge.source].update(edge.targets)
    return tuple(tuple(sorted(found)) for found in users)


def _message_targets(edges: Iterable[Edge], placement: Placement) -> Table:
    """For each stage, the lowest user of its values on each other rank."""
    return tuple(
        _first_on_each_rank(users, placement, placement.rank_of[source])
        for source, users in enumerate(_used_by(edges, placement.stages))
    )


def _first_on_each_rank(users: Sequence[int], placement: Placement, home: int) -> tuple[int, ...]:
    first: dict[int, int] = {}
    for user in users:
        first.setdefault(placement.rank_of[user], user)
    first.pop(home, None)
    return tuple(sorted(first.values()))


def _inverse(table: Table) -> Table:
    found: list[list[int]] = [[] for _ in table]
    for stage, others in enumerate(table):
        for other in others:
            found[other].append(stage)
    return tuple(map(tuple, found))
