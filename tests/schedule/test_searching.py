"""The search: against optima and the library; what it promises and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import PenstockError, ScheduleError, UsageError
from penstock.schedule import (
    Costs,
    Edge,
    Op,
    Placement,
    Schedule,
    Simulation,
    add_communication,
    build,
    chain,
    load,
    looped,
    lower_bound,
    names,
    save,
    search,
    simulate,
    v_shaped,
    validate,
)
from penstock.testing import Case, compare

FEW = 0.03
"""Effort that takes a tenth of a second."""


def step_of(
    placement: Placement, microbatches: int, memory: float | Sequence[float]
) -> dict[str, Any]:
    """What is to be scheduled, but for its costs."""
    size = {"ranks": placement.ranks, "microbatches": microbatches}
    return {**size, "memory": memory, "placement": placement}


def some_costs(random: Random, stages: int, **more: Any) -> Costs:
    kinds = ("forward", "input", "weight", "activation")
    drawn = {kind: [float(random.randint(3, 12)) for _ in range(stages)] for kind in kinds}
    stash = [random.choice((0.0, 0.5, 1.0)) * held for held in drawn["activation"]]
    return Costs(**{**drawn, "stash": stash, "latency": random.choice((0.0, 2.0)), **more})


def fits(ran: Simulation, memory: Sequence[float]) -> bool:
    return all(a <= b * (1 + 1e-9) for a, b in zip(ran.peak_memory, memory, strict=True))


def peaks_fit(schedule: Schedule, costs: Costs, memory: float) -> bool:
    return fits(simulate(schedule, costs), [memory] * schedule.ranks)


OPTIMA: list[tuple[Placement, int, tuple[float, float, float]]] = [
    (looped(2), 3, (96.6, 144, 71)),
    (looped(3), 2, (90, 76, 68)),
    (v_shaped(2), 2, (121, 111, 96)),
    (looped(2, 2), 2, (117.6, 96.6, 94.8)),
    (Placement((0, 0, 1)), 2, (120, 123.4, 87)),
]
"""The least makespans of small steps, found by trying all orders: with memory for one microbatch, with
1.6 times as much, and without a limit."""
SMALL = [
    pytest.param(
        placement, microbatches, room, least, id=f"{placement.rank_of}-{room}",
        # By day each placement, and each amount of memory.
        marks=() if room == 1.6 or placement == v_shaped(2) else pytest.mark.nightly,
    )
    for placement, microbatches, optima in OPTIMA
    for room, least in zip((1.0, 1.6, math.inf), optima, strict=True)
]  # fmt: skip


@pytest.mark.whole
@pytest.mark.parametrize(("placement", "microbatches", "room", "least"), SMALL)
def test_small_steps_take_no_longer_than_the_optimum(
    placement: Placement, microbatches: int, room: float, least: float
) -> None:
    random = Random(f"{placement}{microbatches}{room}")
    costs = some_costs(random, placement.stages)
    if random.random() < 0.5:
        halves = (costs.per_stage(kind, placement.stages) for kind in ("input", "weight"))
        costs = replace(costs, backward=[0.8 * sum(pair) for pair in zip(*halves, strict=True)])
    held = costs.per_stage("activation", placement.stages)
    ranks = range(placement.ranks)
    memory = room * max(sum(held[s] for s in placement.stages_on(rank)) for rank in ranks)
    step = step_of(placement, microbatches, memory)
    result = search(costs, **step, effort=4 * FEW, seconds=math.inf)
    assert simulate(result, costs).makespan == pytest.approx(least)
    assert lower_bound(costs, **step) <= least * (1 + 1e-9)
    assert validate(result).ok
    assert peaks_fit(result, costs, memory)


KINDS = {
    "equal": Costs(),
    "slow messages": Costs(forward=2, input=3, latency=1.5),
    "cheap weights": Costs(weight=0.25, stash=0.5),
    "overlap": Costs(overlap=1),
    "whole backwards": Costs(backward=1.5),
}


def library(placement: Placement, microbatches: int) -> list[Schedule]:
    """Every schedule of the library that trains over a placement."""
    size = {"ranks": placement.ranks, "stages_per_rank": len(placement.stages_on(0))}
    built = []
    for name in names():
        with suppress(ScheduleError):
            built.append(build(name, microbatches=microbatches, **size))
    return [known for known in built if known.placement == placement and known.trains]


@pytest.mark.parametrize("kind", [*KINDS, *range(3)])
@pytest.mark.parametrize("placement", [looped(4), looped(2, 2), v_shaped(3)])
def test_never_longer_than_the_library_in_the_same_memory(
    kind: str | int, placement: Placement
) -> None:
    random = Random(f"{kind}{placement}")
    costs = KINDS[kind] if isinstance(kind, str) else some_costs(random, placement.stages)
    ran = [simulate(known, costs) for known in library(placement, 6)]
    assert len(ran) >= 3
    for memory in {each.peak_memory for each in ran}:
        known = [each.makespan for each in ran if fits(each, memory)]
        step = step_of(placement, 6, memory)
        result = search(costs, **step, effort=0.001)
        assert simulate(result, costs).makespan <= min(known) * (1 + 1e-9)
        assert fits(simulate(result, costs), memory)
        assert validate(result).ok


@pytest.mark.parametrize(
    ("name", "least"), [("ZB-H1", 27), ("ZB-H2", 27), ("ZB-V", 51), ("V-Half", 53), ("V-Min", 59)]
)
def test_equal_costs_take_no_longer_than_the_schedule_made_for_them(name: str, least: int) -> None:
    known = build(name, ranks=4, microbatches=8)
    memory = max(simulate(known).peak_memory)
    step = step_of(known.placement, 8, memory)
    assert simulate(known).makespan == least
    assert simulate(search(Costs(), **step, effort=FEW, seconds=math.inf)).makespan == least
    assert lower_bound(Costs(), **step) <= least


@pytest.mark.parametrize("placement", [looped(3), looped(2, 2), v_shaped(2)])
@pytest.mark.parametrize("seed", range(3))
def test_slices_are_searched_in_the_order_that_their_state_needs(
    placement: Placement, seed: int
) -> None:
    random = Random(f"{placement}{seed}")
    shares = {"slice_times": [0.25, 0.3, 0.45], "slice_sizes": [0.5, 0.25, 0.25]}
    costs = some_costs(random, placement.stages, **(shares if seed else {}))
    held = costs.per_stage("activation", placement.stages)
    memory = [
        1.2 * sum(map(held.__getitem__, placement.stages_on(r))) for r in range(placement.ranks)
    ]
    step = {**step_of(placement, 4, memory), "slices": 3}
    result = search(costs, **step, effort=FEW)
    assert validate(result).ok
    ran = simulate(result, costs)
    assert fits(ran, memory)
    assert lower_bound(costs, **step) <= ran.makespan * (1 + 1e-9)
    known = build("Seq1F1B", ranks=placement.ranks, microbatches=4, slices=3)
    if known.placement == placement and fits(simulate(known, costs), memory):
        assert ran.makespan <= simulate(known, costs).makespan * (1 + 1e-9)


@pytest.mark.parametrize(("slices", "least"), [(1, 27.0), (2, 25.5), (4, 24.75)])
def test_slices_shrink_the_bubble_of_split_backwards(slices: int, least: float) -> None:
    """Of 24 units of work for each rank; Seq1F1B, whose backwards are whole, takes 28.5 and 26.25."""
    costs = Costs(stash=0.5)
    step = {**step_of(looped(4), 8, 4), "slices": slices}
    assert simulate(search(costs, **step, effort=FEW), costs).makespan == least
    assert lower_bound(costs, **step) == least


UNEQUAL = Costs(
    forward=[2.23, 2.12, 1.95, 1.68, 2.34, 1.69, 2.46, 1.66],
    input=[2.2, 1.9, 2.8, 1.75, 1.69, 1.05, 2.1, 1.18],
    weight=[2.26, 1.35, 1.43, 2.05, 1.38, 1.89, 2.82, 2.62],
    activation=[1.56, 2.75, 1.95, 1.62, 2.18, 2.06, 2.74, 1.07],
    stash=0,
    latency=0.5,
)


def test_in_a_v_with_memory_for_two_microbatches_the_result_is_near_the_best_known() -> None:
    """No schedule of the library fits; a tenth of the default effort comes this near."""
    memory, costs = [5.26, 10.98, 8.02, 7.6], UNEQUAL
    assert not any(fits(simulate(each, costs), memory) for each in library(v_shaped(4), 6))
    step = step_of(v_shaped(4), 6, memory)
    ran = simulate(search(costs, **step, effort=0.1, seconds=math.inf), costs)
    assert lower_bound(costs, **step) <= ran.makespan * (1 + 1e-9) <= 1.05 * 104.17
    assert fits(ran, memory)


def test_same_arguments_same_schedule() -> None:
    step = step_of(looped(3), 6, 25.0)
    limits: dict[str, Any] = {"effort": FEW, "seconds": math.inf}
    costs = some_costs(Random(1), 3)
    assert search(costs, **step, **limits) == search(costs, **step, **limits)


def test_the_time_ends_it() -> None:
    costs = some_costs(Random(3), 16)
    step = step_of(v_shaped(8), 16, 60.0)
    for seconds in (0.0, 0.3):
        # The effort would take an hour; how soon after its time it ends is a matter of the machine.
        start = monotonic()
        result = search(costs, **step, seconds=seconds, effort=1000)
        assert monotonic() - start < seconds + 30
        assert validate(result).ok
        assert peaks_fit(result, costs, 60)


def test_skips_are_waited_for() -> None:
    edges = [Edge("a", 0, (1, 3)), Edge("b", 1, (2,)), Edge("mask", 1, (3,), gradient=False)]
    edges.append(Edge("c", 2, (3,)))
    costs = some_costs(Random(4), 4, message={"a": 6.0, "b": 1.0}, bandwidth=2.0)
    result = search(costs, ranks=2, microbatches=4, memory=40, edges=edges, effort=FEW)
    assert result.edges == tuple(edges)
    assert validate(result).ok
    assert validate(add_communication(result)).ok
    bound = lower_bound(costs, ranks=2, microbatches=4, memory=40, edges=edges)
    chained = search(costs, ranks=2, microbatches=4, memory=40, effort=FEW)
    assert bound <= simulate(result, costs).makespan * (1 + 1e-9)
    assert bound >= lower_bound(costs, ranks=2, microbatches=4)
    assert chained.edges == chain(4)


def test_ranks_have_memory_of_their_own() -> None:
    step = step_of(looped(3), 6, [3, 1, 2])
    assert fits(simulate(search(Costs(), **step, effort=FEW)), [3, 1, 2])


def test_a_backward_stays_whole_where_halves_do_not_fit() -> None:
    costs = Costs(activation=1, stash=3)
    result = search(costs, ranks=3, microbatches=4, memory=2, effort=FEW)
    assert result.ops == {Op.F, Op.B}
    assert peaks_fit(result, costs, 2)


def test_of_loops_and_a_v_only_what_fits_is_searched() -> None:
    costs = Costs(forward=1, activation=[3, 1, 1, 3])  # A V has both of the large ones on one rank.
    assert search(costs, ranks=2, microbatches=3, memory=4, effort=FEW).placement == looped(2, 2)
    assert lower_bound(costs, ranks=2, microbatches=3, memory=4) > 0
    with pytest.raises(ScheduleError, match=r"hold \[4.0, 4.0\]: .* or 4 to all"):
        search(costs, ranks=2, microbatches=3, memory=3.9)


@pytest.mark.parametrize(
    ("costs", "ranks", "microbatches", "least"),
    [
        (Costs(), 1, 1, 3),
        (Costs(), 1, 5, 15),
        (Costs(), 4, 1, 9),
        (Costs(), 5, 2, None),
        (Costs(forward=0, input=0, weight=0), 2, 3, 0),
        (Costs(activation=0, stash=0), 2, 3, 10),
        (Costs(weight=0), 2, 3, None),
        (Costs(stash=0), 2, 3, None),
        (Costs(forward=[0, 5], activation=[0, 1]), 2, 3, None),
    ],
)
def test_few_ranks_and_microbatches_and_costs_of_nothing(
    costs: Costs, ranks: int, microbatches: int, least: float | None
) -> None:
    result = search(costs, ranks=ranks, microbatches=microbatches, memory=1, effort=FEW)
    bound = lower_bound(costs, ranks=ranks, microbatches=microbatches)
    assert validate(result).ok
    assert bound <= simulate(result, costs).makespan
    assert least is None or bound == simulate(result, costs).makespan == least


def test_the_bound_is_the_busiest_rank_and_what_must_come_before_and_after_it() -> None:
    whole = Costs(backward=2, stash=2)  # halves do not fit, so the gradients' way back counts, too
    assert lower_bound(Costs(), ranks=4, microbatches=8) == 8 * 3 + 3
    assert lower_bound(Costs(latency=0.5), ranks=4, microbatches=8) == 8 * 3 + 3 * 1.5
    assert lower_bound(Costs(forward=[1, 9, 1]), ranks=3, microbatches=4) == 1 + 4 * 11
    assert lower_bound(whole, ranks=2, microbatches=1) == 1 + 1 + 2 + 2
    # Beside a B, a forward may take no time.
    assert lower_bound(Costs(overlap=1), ranks=1, microbatches=4) == 4 * 2


LACKING = r"memory=2 is too little .* hold \[1.0, 3.0\]: .* or 3 to all, make microbatches smaller"
WRONG: list[tuple[dict[str, Any], type[PenstockError], str]] = [
    ({"ranks": 0}, ScheduleError, "ranks=0: must be at least 1"),
    ({"memory": 2}, ScheduleError, LACKING),
    ({"memory": [1, 2]}, ScheduleError, r"memory=\[1, 2\] is too little"),
    ({"memory": math.nan}, UsageError, "memory=nan: must be a number, at least 0"),
    ({"memory": [3, 3, 3]}, ScheduleError, "3 numbers for 2 ranks: give one"),
    ({"placement": looped(3)}, ScheduleError, "ranks=2, but the placement has 3"),
    ({"placement": looped(2, 2)}, UsageError, "activation has 2 numbers for 4 stages"),
    ({"costs": Costs(forward=[1, 2, 3])}, ScheduleError, "not a multiple of ranks"),
    ({"costs": Costs(forward=[1, 2], input=[1])}, UsageError, r"costs list \[1, 2\] stages: give"),
    ({"edges": [Edge("x", 0, (5,))]}, ScheduleError, "stages beyond the last"),
]


@pytest.mark.parametrize("call", [search, lower_bound])
@pytest.mark.parametrize(("change", "error", "text"), WRONG)
def test_numbers_that_do_not_go_together_are_refused(
    change: dict[str, Any], error: type[PenstockError], text: str, call: Any
) -> None:
    arguments = {"costs": Costs(activation=[1, 3]), "ranks": 2, "microbatches": 2, **change}
    with pytest.raises(error, match=text):
        call(arguments.pop("costs"), **arguments)


@pytest.mark.parametrize("placement", [looped(3), v_shaped(2)])
def test_what_is_found_is_saved_and_trains(placement: Placement, tmp_path: Path) -> None:
    costs = some_costs(Random(6), placement.stages)
    step = step_of(placement, 4, 40.0)
    result = search(costs, **step, effort=FEW)
    assert result.name == "searched"
    for file in ("result.json", "result.csv"):
        save(add_communication(result), tmp_path / file)
    assert (
        load(tmp_path / "result.json") == load(tmp_path / "result.csv") == add_communication(result)
    )
    batch, target = torch.randn(2, 8, 3)
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(placement.stages)])
    case = Case(model, (batch,), target, nn.functional.mse_loss)
    compare(case, schedule=result, microbatches=4).check(1e-6)
