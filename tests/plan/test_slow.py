"""What is slow is named by its own time, not by that of those who wait for it."""

from __future__ import annotations

import logging
import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from penstock import Pipeline, SlowWarning
from penstock.errors import UsageError
from penstock.plan import Cluster, correct, plan_for, search
from penstock.schedule import (
    Costs,
    Schedule,
    Span,
    Timeline,
    add_communication,
    build,
    costs_of,
    find_slow,
    simulate,
)
from tests.plan.test_clusters import chain, cluster

HANDLING = 0.002


def step(schedule: Schedule, costs: Costs, *, skew: float = 0.0, noise: float = 0.0) -> Timeline:
    """A step as it would be recorded: on clocks that differ, with sends, and noise in all that is done."""
    draw = random.Random(0)
    shaken = {
        name: [
            cost * (1 + noise * draw.random()) for cost in costs.per_stage(name, schedule.stages)
        ]
        for name in ("forward", "input", "weight", "backward")
    }
    more: dict[str, Any] = {name: [cost + HANDLING for cost in of] for name, of in shaken.items()}
    ran = simulate(schedule, replace(costs, **more))
    spans = []
    for rank in range(schedule.ranks):
        for span in ran.timeline.of_rank(rank):
            start, end = span.start + rank * skew, span.end + rank * skew
            spans.append(Span(rank, span.action, start + HANDLING, end))
    return Timeline(tuple(spans), schedule.ranks, "s")


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1", "ZB-V", "Interleaved1F1B"])
def test_a_slow_rank_is_named(name: str) -> None:
    schedule = add_communication(build(name, ranks=4, microbatches=8), ahead=2)
    stages = schedule.stages
    costs = Costs(forward=[0.1] * stages, input=0.1, weight=0.1, backward=0.2, unit="s")
    assert find_slow(schedule, costs, step(schedule, costs, noise=0.1)) == ()
    for slow in range(4):
        factors = [2.0 if rank == slow else 1.0 for rank in schedule.placement.rank_of]
        took = replace(
            costs,
            forward=[0.1 * factor for factor in factors],
            input=[0.1 * factor for factor in factors],
            weight=[0.1 * factor for factor in factors],
            backward=[0.2 * factor for factor in factors],
        )
        timeline = step(schedule, took, skew=3.0, noise=0.1)
        (worst,) = find_slow(schedule, costs, timeline)
        assert (worst.kind, worst.rank) == ("rank", slow)
        assert worst.factor == pytest.approx(2.0, rel=0.15)
        assert f"rank {slow} (stage" in str(worst)
        ran = simulate(schedule, took)
        assert worst.seconds == pytest.approx(ran.busy[slow] / 2, rel=0.15)
        assert worst.share == pytest.approx(worst.seconds / ran.makespan, rel=0.15)


def test_a_slow_stage_of_a_rank_is_named() -> None:
    schedule = add_communication(build("Interleaved1F1B", ranks=2, microbatches=4), ahead=2)
    costs = Costs(forward=[0.1] * 4, backward=[0.2] * 4, unit="s")
    took = replace(costs, backward=[0.2, 0.2, 0.6, 0.2])
    (worst,) = find_slow(schedule, costs, step(schedule, took))
    assert (worst.kind, worst.stages) == ("stage", (2,))


def test_the_costs_of_a_step_are_read_off_it() -> None:
    schedule = add_communication(build("1F1B", ranks=2, microbatches=8), ahead=2)
    costs = Costs(forward=[0.1, 0.3], backward=[0.2, 0.2], latency=0.01, unit="s")
    again = costs_of(2, step(schedule, costs, skew=0.5))
    assert again.per_stage("forward", 2) == pytest.approx([0.1, 0.3])
    assert again.per_stage("weight", 2) == [0, 0]


def test_what_a_step_corrects() -> None:
    """A rank that is slower than the others is corrected as that, and what all are is the units'."""
    ranks = cluster(1.0, 1.0)
    asked: dict[str, Any] = {"batch": 8, "microbatches": 8, "schedules": "1F1B", "seconds": 0}
    costs = chain(12)
    before = search(costs, cluster=ranks, pipeline=2, **asked)[0]
    assert [len(paths) for paths in before.stages] == [6, 6]
    of = before.stage_costs.costs
    took = replace(
        of,
        forward=[1.5 * time * (1 + stage) for stage, time in enumerate(of.per_stage("forward", 2))],
        backward=[
            1.5 * time * (1 + stage) for stage, time in enumerate(of.per_stage("backward", 2))
        ],
    )
    schedule = add_communication(before.schedule, ahead=2)
    timeline = simulate(schedule, took).timeline
    corrected, slower = correct(costs, timeline, schedule, before.stages, samples=1, cluster=ranks)
    assert slower is not None
    assert [device.pace for device in slower.devices] == pytest.approx([1.0, 2.0], rel=0.01)
    assert corrected.at(1).units[0].forward == pytest.approx(1.5, rel=0.01)
    after = search(corrected, cluster=slower, pipeline=2, **asked)[0]
    assert [len(paths) for paths in after.stages] == [8, 4]
    old = plan_for(
        corrected, build("1F1B", ranks=2, microbatches=8), before.stages, batch=8, cluster=slower
    )
    assert old.seconds == pytest.approx(timeline.makespan, rel=0.02)
    assert old.seconds > 1.25 * after.seconds
    one = Cluster(ranks.devices[:1])
    given: dict[str, Any] = {"stages": before.stages, "samples": 1, "cluster": ranks}
    for wrong in ({"stages": [*before.stages, ["more"]]}, {"cluster": one}):
        with pytest.raises(UsageError, match=r"the step had 2 stages on 2 ranks; give the stages="):
            correct(costs, timeline, schedule, **{**given, **wrong})


class Clock:
    """A clock that only the model moves on.

    Attributes:
        now: its time, in seconds.
        pause: for how many seconds the forward of each stage takes.
    """

    def __init__(self, stages: int) -> None:
        self.now, self.pause = 0.0, [0.01] * stages

    def __call__(self) -> float:
        return self.now

    def model(self) -> nn.Sequential:
        """A model of as many stages, whose forwards move the clock on."""
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in self.pause])
        for stage, module in enumerate(model):
            module.register_forward_hook(lambda *_, stage=stage: self.wait(self.pause[stage]))
        return model

    def wait(self, seconds: float) -> None:
        """Move the clock on."""
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that steps of four stages are measured with."""
    clock = Clock(4)
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def watched(clock: Clock, **more: Any) -> Pipeline:
    """A pipeline of four stages, whose steps the clock measures."""
    return Pipeline(clock.model(), ranks=4, microbatches=2, loss_fn=nn.functional.mse_loss, **more)


def slow_in(pipe: Pipeline) -> dict[tuple[int, ...], float]:
    """How many times as long the slow ranks of a recorded step take, by their stages."""
    x = torch.ones(8, 8)
    return {one.stages: one.factor for one in pipe.step(x, target=x, record=True).slow}


def test_a_pipeline_tells_what_became_slow(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(8, 8)
    with watched(clock) as pipe:
        pipe.on_step(SlowWarning(every=4))
        for _ in range(2):
            assert slow_in(pipe) == {}
        clock.pause[2] = 0.2
        with caplog.at_level(logging.WARNING, "penstock"):
            assert slow_in(pipe) == {(2,): pytest.approx(20.0)}
            assert not caplog.records
            pipe.step(x, target=x)
        assert "rank 2 (stage 2) takes" in caplog.text
    with pytest.raises(UsageError, match="every=0: must be at least 1"):
        SlowWarning(every=0)


def test_a_pause_of_the_machine_makes_no_rank_slow(clock: Clock) -> None:
    """A rank is slow that is so in the latest four recorded steps together."""
    with watched(clock) as pipe:
        for _ in range(8):
            assert slow_in(pipe) == {}
        clock.pause[1] = 1.0
        assert slow_in(pipe) == {}
        clock.pause[1] = 0.01
        for _ in range(4):
            assert slow_in(pipe) == {}
        clock.pause[1] = 0.03
        assert slow_in(pipe) == {}
        assert slow_in(pipe) == {(1,): pytest.approx(2.0)}
        assert slow_in(pipe) == {(1,): pytest.approx(3.0)}
