"""Where stages are, which values travel between them, and over which messages."""

from __future__ import annotations

import pytest

from penstock.errors import ScheduleError
from penstock.schedule import Edge, Placement, chain, looped, v_shaped


def test_stages_are_laid_in_laps_or_in_a_v() -> None:
    assert looped(3).rank_of == (0, 1, 2)
    assert looped(2, 3).rank_of == (0, 1, 0, 1, 0, 1)
    assert v_shaped(3).rank_of == (0, 1, 2, 2, 1, 0)


def test_a_placement_knows_its_ranks_and_their_stages() -> None:
    placement = v_shaped(3)
    assert (placement.stages, placement.ranks) == (6, 3)
    assert [placement.stages_on(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


@pytest.mark.parametrize("rank_of", [(), (0, 2), (-1, 0), (1,)])
def test_each_rank_holds_a_stage(rank_of: tuple[int, ...]) -> None:
    with pytest.raises(ScheduleError, match="placement"):
        Placement(rank_of)


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0)])
def test_counts_are_at_least_one(numbers: tuple[int, int]) -> None:
    with pytest.raises(ScheduleError, match="=0: must be at least 1"):
        looped(*numbers)
    with pytest.raises(ScheduleError, match="ranks=0"):
        v_shaped(0)


def test_the_chain_joins_each_stage_to_the_next() -> None:
    assert [(edge.source, edge.targets) for edge in chain(3)] == [(0, (1,)), (1, (2,))]
    assert chain(1) == ()


@pytest.mark.parametrize("targets", [(), (2, 1), (1, 1)])
def test_targets_ascend(targets: tuple[int, ...]) -> None:
    with pytest.raises(ScheduleError, match="must be at least one stage, in ascending order"):
        Edge("x", 0, targets)


@pytest.mark.parametrize(("source", "target"), [(1, 1), (2, 1), (-1, 0)])
def test_a_value_goes_to_later_stages_only(source: int, target: int) -> None:
    with pytest.raises(ScheduleError, match="goes to later stages only"):
        Edge("x", source, (target,))
