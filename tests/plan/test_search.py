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
from penstock.plan import Plan, Plans, Profile, predict, search
from penstock.schedule import build, simulate, validate
from tests.plan.models import SLOW, Tower, profile

mse = nn.functional.mse_loss
ONE: dict[str, Any] = {"ranks": 2, "pipeline": 2, "batch": 4, "microbatches": 4, "seconds": 0}


def test_the_best_plan_is_the_best_of_all_cuts_and_schedules() -> None:
    costs = profile([1.0, 1.0, 1.0, 1.0, 5.0])
    best = search(costs, **{**ONE, "seconds": 1})[0]
    known = []
    for name, cut in itertools.product(("1F1B", "ZB-H1", "GPipe"), range(1, 5)):
        schedule = build(name, ranks=2, microbatches=4)
        stages = costs.at(1).stages((0, cut), schedule.placement, latency=0.01, bandwidth=1e6)
        known.append(simulate(schedule.with_edges(stages.edges), stages.costs).makespan)
    assert best.seconds <= min(known) * (1 + 1e-9)
    assert validate(best.schedule).ok


@pytest.mark.parametrize("memory", [None, 250.0, 140.0])
def test_what_is_pruned_is_none_of_the_best(memory: float | None) -> None:
    costs = profile([1.0, 3.0, 1.0, 2.0, 1.0, 1.0, 4.0, 1.0])
    asked: dict[str, Any] = {"ranks": 4, "batch": 4, "memory": memory, "seconds": 0, "keep": 6}
    quick, whole = search(costs, **asked), search(costs, **asked, prune=False)
    assert [plan.seconds for plan in quick] == [plan.seconds for plan in whole]
    assert quick.simulated < whole.simulated
    assert quick.looked_at == whole.looked_at


def test_memory_is_kept_to_by_computing_again() -> None:
    costs = profile([1.0] * 6)
    free = search(costs, **ONE)
    assert not any(plan.checkpoint for plan in free)
    tight = search(costs, **ONE, memory=max(free[0].memory) * 0.8)
    assert all(max(plan.memory) <= max(free[0].memory) * 0.8 for plan in tight)
    assert tight[0].checkpoint
    assert tight[0].seconds > free[0].seconds
    alls = search(costs, **ONE, memory=max(free[0].memory) * 0.8, checkpoint="all")
    assert len(alls[0].checkpoint) == 6


def test_fixed_choices_are_kept() -> None:
    costs = profile([1.0] * 8)
    found = search(
        costs, ranks=4, batch=4, schedules=["1f1b", "Interleaved1F1B"], pipeline=2,
        stages_per_rank=2, microbatches=2, seconds=0,
    )  # fmt: skip
    assert {plan.shape.schedule for plan in found} == {"Interleaved1F1B"}
    assert {(p.ranks, p.replicas, p.microbatches, p.shape.samples) for p in found} == {(2, 2, 2, 1)}
    assert len(found[0].stages) == 4


def test_replicas_pay_for_their_sum() -> None:
    """With one sample each, four replicas take no bubble; a slow wire makes their sum the longer way."""
    costs = profile([1.0] * 4)
    assert search(costs, ranks=4, batch=4, seconds=0)[0].replicas == 4
    slow = replace(costs, bandwidth=1.0)
    best = search(slow, ranks=4, batch=4, seconds=0, keep=40)
    by_replicas = {plan.replicas: plan for plan in reversed(best.plans)}
    assert by_replicas[4].reduce == pytest.approx(6 * (4 * 8 / 4 / 1.0 + 0.01))
    assert by_replicas[1].reduce == 0


def test_what_would_do_where_nothing_fits() -> None:
    costs = profile([1.0] * 8)
    with pytest.raises(UsageError) as caught:
        search(costs, **ONE, memory=100.0)
    told = str(caught.value)
    assert "nothing fits into memory=100" in told
    enough = float(told.split("memory=")[2].split(" ")[0])
    assert max(search(costs, **ONE, memory=enough)[0].memory) <= enough
    with pytest.raises(UsageError):
        search(costs, **ONE, memory=enough - 1)
    more = int(told.split("; ranks=")[1].split(" ")[0])
    assert search(costs, ranks=more, batch=4, microbatches=4, memory=100.0, seconds=0)
    with pytest.raises(UsageError):
        search(costs, ranks=more - 1, batch=4, microbatches=4, memory=100.0, seconds=0)


def test_smaller_microbatches_are_told() -> None:
    costs = profile([1.0] * 2, held=100.0)
    asked: dict[str, Any] = {
        "ranks": 2,
        "pipeline": 2,
        "batch": 4,
        "seconds": 0,
        "checkpoint": "none",
    }
    fits = max(search(costs, **asked, microbatches=4, schedules="1F1B")[0].memory)
    with pytest.raises(UsageError, match="microbatches=4 would do"):
        search(costs, **asked, microbatches=1, memory=fits)


def test_wrong_numbers_are_refused_before_costs_are_found() -> None:
    asked: list[int] = []

    def found() -> Profile:
        asked.append(1)
        return profile([1.0] * 2)

    with pytest.raises(UsageError, match="microbatches=1000000000"):
        search(found, ranks=2, batch=10**9, microbatches=10**9)
    assert not asked
    assert search(found, **ONE) == search(profile([1.0] * 2), **ONE)


def test_refusals() -> None:
    costs = profile([1.0] * 2)
    mistakes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"schedules": "1F1C"}, "unknown schedule"),
        ({"schedules": "forward-only"}, "no backward"),
        ({"checkpoint": "some"}, "none, needed, all"),
        ({"pipeline": 3}, "cannot be divided into pipelines"),
        ({"batch": 0}, "batch=0"),
        ({"ranks": True}, "ranks=True: must be a whole number"),
        ({"ranks": 10**6 + 10**9}, "ranks=1001000000: must be a whole number"),
        ({"batch": 10**30}, "batch=1000000"),
        ({"microbatches": 10**9, "batch": 10**9}, "microbatches=1000000000: must be"),
        ({"microbatches": 8}, "the batch has only 4 samples"),
        ({"microbatches": 2**20, "batch": 2**20}, "2097152 forwards, and at most 1048576"),
        ({"microbatches": 3}, "leave some of these options out"),
        ({"memory": 0.5}, "at least one byte"),
        ({"memory": float("nan")}, "memory=nan"),
        ({"seconds": -1}, "seconds=-1"),
    )
    for wrong, told in mistakes:
        with pytest.raises(UsageError, match=told):
            search(costs, **{**ONE, **wrong})
    with pytest.raises(UsageError, match="leave some of these options out"):
        search(costs, ranks=2, pipeline=2, batch=4, schedules="ZB-V", seconds=0)


def test_plans_travel_as_json() -> None:
    plans = search(profile([1.0, 1.0, 1.0, 5.0]), **{**ONE, "seconds": 1})
    for plan in plans:
        again = Plan.from_json(plan.to_json())
        assert again == plan
        assert again.schedule == plan.schedule
        assert again.simulation.makespan == pytest.approx(plan.seconds)


def test_a_file_that_is_no_plan_is_refused_before_anything_is_built() -> None:
    text = search(profile([1.0] * 4), **ONE, schedules="1F1B")[0].to_json()
    for wrong, gist in (
        ("[]", "object"),
        ("{}", "plan: Field required"),
        ("nonsense", "Invalid JSON"),
        (text.replace('"stages": [', '"stages": 3, "x": [', 1), "plan.stages"),
        (
            text.replace('"microbatches": 4', '"microbatches": 4000000000'),
            "microbatches=4000000000",
        ),
        (text.replace('"replicas": 1', '"replicas": 10000000'), "replicas=10000000"),
        (text.replace('"ranks": 2', '"ranks": 3'), "has 3 stages"),
        (text.replace('"seconds": ', '"seconds": -'), "plan.seconds"),
        (text.replace('"version": 2', '"version": 1'), "version: Input should be 2"),
    ):
        with pytest.raises(InputFileError, match=f"not a plan .*{re.escape(gist)}"):
            Plan.from_json(wrong)


def test_the_table_says_why_others_lose() -> None:
    plans = search(profile([1.0, 1.0, 1.0, 5.0]), **ONE)
    text = str(plans)
    assert text.splitlines()[1].endswith("the fastest")
    assert len(text.splitlines()) == len(plans) + 2
    assert isinstance(plans, Plans)
    assert all("+" in plans.why(i) or plans.why(i) == "as fast" for i in range(1, len(plans)))


def test_a_pipeline_runs_a_plan() -> None:
    """Every plan of a search gives the gradients of the plain model."""
    torch.manual_seed(0)
    model, x, y = Tower(), torch.randn(64, 16), torch.randn(64, 64)
    mse(model(x), y).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    costs = predict(model, x, target=y, loss_fn=mse, device=SLOW)
    asked: dict[str, Any] = {"ranks": 2, "pipeline": 2, "batch": 64, "microbatches": 4}
    plans = [
        *search(costs, **asked, memory=0, seconds=1, keep=3),
        *search(costs, **asked, checkpoint="all", seconds=0, keep=1),
    ]
    assert plans[-1].checkpoint
    for plan in plans:
        model.zero_grad()
        with Pipeline(model, plan=plan, loss_fn=mse) as pipe:
            assert pipe.schedule.microbatches == plan.microbatches
            pipe.step(x, target=y)
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
    with pytest.raises(UsageError, match="already decides schedule=, ranks="):
        Pipeline(model, plan=plans[0], schedule="1F1B", ranks=2, loss_fn=mse)
    with pytest.raises(UsageError, match=r"must be a penstock\.plan\.Plan"):
        Pipeline(model, plan="best", loss_fn=mse)  # type: ignore[arg-type]
