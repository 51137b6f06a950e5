"""The search for plans: what it finds, proves, refuses and writes."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from penstock import Pipeline
from penstock.errors import InputFileError, UsageError
from penstock.plan import Plan, Profile, ValueCost, plan_for, predict, search
from penstock.schedule import Op, build, simulate, validate
from tests.plan.models import SLOW, Tower, profile, stepped

mse = nn.functional.mse_loss
ONE: dict[str, Any] = {"ranks": 2, "pipeline": 2, "batch": 4, "microbatches": 4, "seconds": 0}


def test_the_best_plan_is_the_best_of_all_cuts_and_schedules() -> None:
    costs = profile([1.0, 1.0, 1.0, 1.0, 5.0])
    plans = search(costs, **{**ONE, "seconds": 1})
    known = []
    for name, cut in itertools.product(("1F1B", "ZB-H1", "GPipe"), range(1, 5)):
        schedule = build(name, ranks=2, microbatches=4)
        stages = costs.at(1).stages((0, cut), schedule.placement, latency=0.01, bandwidth=1e6)
        known.append(simulate(schedule.with_edges(stages.edges), stages.costs).makespan)
    assert plans[0].seconds <= min(known) * (1 + 1e-9)
    assert validate(plans[0].schedule).ok
    # The table says why others lose.
    head, first, *rest, note = str(plans).splitlines()
    assert head.split()[0] == "schedule"
    assert first.endswith("the fastest")
    assert len(rest) == len(plans) - 1
    assert all("%: its " in line or line.endswith("as fast") for line in rest)
    assert note.startswith("costs predicted for paper; ")
    # Plans travel as JSON, schedules made for them too.
    for plan in plans:
        again = Plan.from_json(plan.to_json())
        assert again == plan
        assert again.schedule == plan.schedule
        assert again.simulation.makespan == pytest.approx(plan.seconds)


@pytest.mark.parametrize("memory", [None, 250.0, 140.0])
def test_what_is_pruned_is_none_of_the_best(memory: float | None) -> None:
    """Where all plans are kept, nothing is skipped."""
    costs = profile([1.0, 3.0, 1.0, 2.0, 1.0, 1.0, 4.0, 1.0])
    asked: dict[str, Any] = {"ranks": 4, "batch": 4, "memory": memory, "seconds": 0}
    quick, whole = search(costs, **asked, keep=6), search(costs, **asked, keep=1000)
    assert [plan.seconds for plan in quick] == [plan.seconds for plan in whole.plans[:6]]
    assert quick.simulated < whole.simulated
    assert quick.looked_at == whole.looked_at


def test_nothing_is_pruned_where_two_branches_run_side_by_side() -> None:
    """Unit 0 and unit 1 feed unit 2: the second rank need not wait for the first."""
    values = (ValueCost("a", 0, (2,), 1.0), ValueCost("b", 1, (2,), 1.0))
    chain = profile([1.0, 4.0, 1.0], sizes=(1,))
    known = {1: replace(chain.at(1), values=values)}
    costs = replace(chain, known=known, latency=0.0)
    asked: dict[str, Any] = {"ranks": 3, "batch": 2, "pipeline": 3, "microbatches": 2, "seconds": 0}
    found = search(costs, **asked, schedules=["1F1B", "GPipe"], keep=1)
    assert found[0].seconds == pytest.approx(24.0, rel=1e-3)
    whole = search(costs, **asked, schedules=["1F1B", "GPipe"], keep=50)
    assert found[0].seconds == whole[0].seconds


def test_a_batch_that_does_not_divide_is_planned_as_it_is_split() -> None:
    model, x = Tower(), torch.empty(11, 16)
    costs = predict(model, x, device=SLOW, stages=2)
    first, *rest = [unit.path for unit in costs.at(1).units]
    stages = [[first], rest]
    by_hand = plan_for(costs, build("1F1B", ranks=2, microbatches=4), stages, batch=11)
    assert by_hand.shape.samples == 3
    few = plan_for(costs, build("1F1B", ranks=2, microbatches=16), stages, batch=11)
    assert few.shape.samples == 1


def test_memory_is_kept_to_by_computing_again() -> None:
    costs = profile([1.0] * 6)
    free = search(costs, **ONE)
    assert not any(plan.recompute for plan in free)
    limit = max(free[0].memory) * 0.8
    tight = search(costs, **ONE, memory=limit)
    assert all(max(plan.memory) <= limit for plan in tight)
    assert tight[0].recompute
    assert tight[0].seconds > free[0].seconds
    assert len(search(costs, **ONE, memory=limit, recompute="all")[0].recompute) == 6
    # Where all fits, as few units as needed are none, and such plans are listed once.
    roomy = search(costs, **ONE, memory=1e9, keep=1000)
    assert {plan.shape.recompute for plan in roomy} == {"none", "all"}


def test_memory_is_kept_to_by_a_host_where_that_is_faster_than_computing_again() -> None:
    costs = profile([1.0] * 8)
    asked: dict[str, Any] = {
        "ranks": 4, "pipeline": 4, "batch": 16, "microbatches": 16, "schedules": "1F1B", "seconds": 0,
    }  # fmt: skip
    free = search(costs, **asked)[0]
    limit = max(free.memory) - 10.0
    tight = search(costs, **asked, memory=limit)[0]
    moved = search(costs, **asked, memory=limit, host_bandwidth=20.0)[0]
    assert moved.shape.recompute == "offload"
    assert moved.recompute == ()
    assert "activations offloaded" in str(moved)
    assert moved.seconds == pytest.approx(free.seconds)
    assert moved.seconds < tight.seconds
    assert max(moved.memory) <= limit
    # The first rank alone has too much, and nothing leaves the others.
    leaving = [sum(a.op == Op.OFFLOAD for a in moved.schedule.actions(rank)) for rank in range(4)]
    assert leaving[0] > 0 == leaving[3]
    # As the simulator counts activations, by the time when their copies end.
    fixed = [costs.at(1).units[0].parameters * 2 * 4] * 4
    peaks = zip(moved.simulation.peak_memory, fixed, strict=True)
    assert all(activations + held <= limit for activations, held in peaks)
    assert Plan.from_json(moved.to_json()).schedule == moved.schedule
    # A host that takes longer for a copy than a stage for its work would only hold it up.
    slow = search(costs, **asked, memory=limit, host_bandwidth=1.0)[0]
    assert slow.shape.recompute == "needed"


def test_fixed_choices_are_kept() -> None:
    plans = search(
        profile([1.0] * 8), ranks=4, batch=4, schedules=["1f1b", "Interleaved1F1B"], pipeline=2,
        stages_per_rank=2, microbatches=2, seconds=0,
    )  # fmt: skip
    assert {
        (p.shape.schedule, p.ranks, p.replicas, p.microbatches, p.shape.samples, len(p.stages))
        for p in plans
    } == {("Interleaved1F1B", 2, 2, 2, 1, 4)}


def test_each_pipeline_has_as_many_microbatches_as_ranks_at_least() -> None:
    plans = search(profile([1.0] * 4), ranks=2, pipeline=2, batch=4, seconds=0, keep=1000)
    assert {plan.microbatches for plan in plans} == {2, 4}


def test_a_plan_that_computes_more_says_so() -> None:
    """Alone, a rank never waits: what it takes longer is what it computes again."""
    asked: dict[str, Any] = {"ranks": 1, "batch": 4, "microbatches": 4, "schedules": "1F1B"}
    plans = search(profile([1.0] * 4), **asked, recompute=["none", "all"], seconds=0)
    assert str(plans).splitlines()[2].endswith("+33.3%: its busiest rank computes 16 s more")


def test_replicas_pay_for_their_sum() -> None:
    """With one sample each, four replicas take no bubble; a slow wire makes their sum the longer way."""
    costs = profile([1.0] * 4)
    assert search(costs, ranks=4, batch=4, seconds=0)[0].replicas == 4
    plans = search(replace(costs, bandwidth=1.0), ranks=4, batch=4, seconds=0, keep=40)
    reduce = {plan.replicas: plan.reduce for plan in plans}
    assert reduce[4] == pytest.approx(6 * (4 * 8 / 4 / 1.0 + 0.01))
    assert reduce[1] == 0


def test_where_nothing_fits_it_says_what_would() -> None:
    costs = profile([1.0] * 8)
    with pytest.raises(UsageError, match=r"nothing fits into memory=100 .*; more ranks") as caught:
        search(costs, **ONE, memory=100.0)
    enough = float(str(caught.value).split("memory=")[2].split(" ")[0])
    assert max(search(costs, **ONE, memory=enough)[0].memory) <= enough
    with pytest.raises(UsageError, match="nothing fits"):
        search(costs, **ONE, memory=enough - 1)


@pytest.mark.parametrize(
    ("wrong", "gist"),
    [
        ({"schedules": "1F1C"}, "unknown schedule"),
        ({"schedules": "forward-only"}, "no backward"),
        ({"schedules": "Seq1F1B"}, "cuts sequences into slices"),
        ({"recompute": "some"}, "none, needed, all, offload"),
        ({"recompute": "offload"}, "as host_bandwidth="),
        ({"host_bandwidth": -1}, "host_bandwidth=-1"),
        ({"pipeline": 3}, "cannot be divided into pipelines"),
        ({"batch": 0}, "batch=0"),
        ({"ranks": True}, "ranks=True: must be a whole number"),
        ({"ranks": 10**6 + 10**9}, "ranks=1001000000: must be a whole number"),
        ({"batch": 10**30}, "batch=1000000"),
        ({"microbatches": 10**9, "batch": 10**9}, "microbatches=1000000000: must be"),
        ({"microbatches": 8}, "the batch has only 4 samples"),
        ({"microbatches": 2**20, "batch": 2**20}, "2097152 forwards, and at most 1048576"),
        ({"microbatches": 3}, "leave some of these options out"),
        ({"schedules": "ZB-V"}, "leave some of these options out"),
        ({"memory": 0.5}, "at least one byte"),
        ({"memory": float("nan")}, "memory=nan"),
        ({"seconds": -1}, "seconds=-1"),
    ],
    ids=repr,
)
def test_wrong_numbers_are_refused_before_costs_are_found(wrong: dict[str, Any], gist: str) -> None:
    asked: list[int] = []

    def costs() -> Profile:
        asked.append(1)
        return profile([1.0] * 2)

    with pytest.raises(UsageError, match=gist):
        search(costs, **{**ONE, **wrong})
    # Only what depends on the number of units is found out later.
    assert not asked or "leave" in gist


@pytest.mark.parametrize(
    ("old", "new", "gist"),
    [
        (".*", "[]", "object"),
        (".*", "{}", "plan: Field required"),
        (".*", "nonsense", "Invalid JSON"),
        (r'"stages": \[', '"stages": 3, "x": [', "plan.stages"),
        ('"microbatches": 4', '"microbatches": 4000000000', "microbatches=4000000000"),
        ('"replicas": 1', '"replicas": 10000000', "replicas=10000000"),
        ('"ranks": 2', '"ranks": 3', "has 3 stages"),
        ('"seconds": ', '"seconds": -', "plan.seconds"),
        ('"version": 6', '"version": 5', "version: Input should be 6"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_before_anything_is_built(
    old: str, new: str, gist: str
) -> None:
    text = search(profile([1.0] * 4), **ONE, schedules="1F1B")[0].to_json()
    with pytest.raises(InputFileError, match=f"not a plan .*{re.escape(gist)}"):
        Plan.from_json(re.sub(old, new, text, count=1, flags=re.DOTALL))


def test_a_pipeline_runs_a_plan() -> None:
    """Every plan of a search, with the gradients of the plain model."""
    torch.manual_seed(0)
    model, x, y = Tower(), torch.empty(64, 16), torch.empty(64, 64)
    costs = predict(model, x, target=y, loss_fn=mse, device=SLOW)
    asked: dict[str, Any] = {"ranks": 2, "pipeline": 2, "batch": 64, "microbatches": 4}
    roomy = search(costs, **asked, schedules="GPipe", memory=0, seconds=0)[0]
    limit = max(roomy.memory) * 0.9
    plans = [
        *search(costs, **asked, memory=0, seconds=1, keep=3),
        *search(costs, **asked, recompute="all", seconds=0, keep=1),
        search(costs, **asked, memory=limit, recompute="offload", host_bandwidth=1e9, seconds=0)[0],
    ]
    assert plans[-2].recompute
    assert Op.OFFLOAD in plans[-1].schedule.ops
    for plan in plans:
        assert stepped(model, schedule=plan).schedule.microbatches == plan.microbatches
    with pytest.raises(UsageError, match="the plan in schedule= decides ranks= itself"):
        Pipeline(model, schedule=plans[0], ranks=2, loss_fn=mse)
