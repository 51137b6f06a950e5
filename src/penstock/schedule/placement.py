"""Which rank holds which stages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import overload

from penstock.errors import ScheduleError, UsageError


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
