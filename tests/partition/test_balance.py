"""Where to cut: the best cut of all, for stages and for the ranks that hold them."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PartitionError, UsageError
from penstock.partition.balance import Room, choose_cuts, loads
from penstock.schedule import Placement, looped, v_shaped

COSTS = st.lists(
    st.one_of(st.integers(0, 20).map(float), st.floats(0, 100)), min_size=1, max_size=9
)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(COSTS, st.data())
def test_no_cut_is_better_with_one_stage_a_rank(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    cut = choose_cuts(costs, stages)
    assert cut[0] == 0
    assert list(cut) == sorted(set(cut))
    cuts = ((0, *rest) for rest in combinations(range(1, len(costs)), stages - 1))
    assert len(cut) == stages
    best = min(max(loads(costs, other)) for other in cuts)
    assert max(loads(costs, cut)) == pytest.approx(best, rel=1e-9, abs=1e-12)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(COSTS, st.data())
def test_ranks_get_at_least_as_even_as_stages(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    ranks = data.draw(st.integers(1, stages))
    order = data.draw(st.permutations([*range(ranks), *(s % ranks for s in range(stages - ranks))]))
    placement = Placement(tuple(order))
    cut = choose_cuts(costs, stages, placement)
    assert len(set(cut)) == stages
    even = max(loads(costs, choose_cuts(costs, stages), placement))
    assert max(loads(costs, cut, placement)) <= even * (1 + 1e-9)


def test_what_costs_nothing_is_cut() -> None:
    assert choose_cuts([0.0] * 6, 4, v_shaped(2)) == choose_cuts([5e-324] * 6, 4, v_shaped(2))


MODEL = [5.0, *[3.0] * 48, 11.0]
"""48 equal blocks between an embedding and a head."""


@pytest.mark.parametrize(
    ("placement", "best"),
    [
        pytest.param(Placement(tuple(range(8))), 21.0, id="one a rank"),
        pytest.param(v_shaped(8), 21.0, id="V"),
        pytest.param(looped(8, 2), 21.0, id="looped"),
        pytest.param(looped(4, 4), 41.0, id="looped more"),
    ],
)
def test_large_models_are_cut_well_and_soon(placement: Placement, best: float) -> None:
    cut = choose_cuts(MODEL, placement.stages, placement)
    assert max(loads(MODEL, cut, placement)) <= best


def test_equal_blocks_are_shared_evenly() -> None:
    assert choose_cuts([1.0] * 8, 4) == (0, 2, 4, 6)
    assert choose_cuts([0.0] * 8, 4) == (0, 2, 4, 6)


def test_a_heavy_head_gets_fewer_blocks() -> None:
    assert choose_cuts([1, 1, 1, 1, 1, 1, 3], 3) == (0, 3, 6)


def test_a_rank_weighs_all_its_stages() -> None:
    costs = [4.0, 1, 1, 1, 1, 1, 1, 4]
    cut = choose_cuts(costs, 4, v_shaped(2))
    assert loads(costs, cut, v_shaped(2)) == [8.0, 6.0]


def test_no_stage_holds_more_than_fits() -> None:
    costs, memory = [1.0] * 6, [(9.0, 0.0), *[(1.0, 1.0)] * 5]
    assert choose_cuts(costs, 2, memory=memory, room=Room(99.0, (2, 1))) == (0, 3)
    assert choose_cuts(costs, 2, memory=memory, room=Room(10.0, (2, 1))) == (0, 1)
    # If nothing fits, all stages hold equally much.
    assert choose_cuts(costs, 2, memory=memory, room=Room(1.0, (2, 1))) == (0, 1)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(
        PartitionError, match="3 blocks cannot be cut into 4 stages; use from 1 to 3"
    ):
        choose_cuts([1, 1, 1], 4)
    with pytest.raises(UsageError, match="costs must be numbers from 0 up, not nan"):
        choose_cuts([1, float("nan"), 1], 2)
    with pytest.raises(UsageError, match="the placement is for 4 stages, not 2"):
        choose_cuts([1, 1, 1], 2, v_shaped(2))


def test_a_slow_rank_gets_less_of_all_its_stages() -> None:
    costs, paces = [9.0, 3, 3, 8, 3, 3, 3, 2, 5, 4], (1.0, 2.0)
    cut = choose_cuts(costs, 4, v_shaped(2), paces)
    weighed = zip(loads(costs, cut, v_shaped(2)), paces, strict=True)
    assert max(load * pace for load, pace in weighed) == 29.0
