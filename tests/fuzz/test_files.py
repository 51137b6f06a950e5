"""Plans, costs, clusters, schedules and traces that somebody has crafted; tests/checkpoint has the tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from penstock import plan as planning
from penstock import schedule as schedules
from penstock.errors import InputFileError
from penstock.schedule import Timeline
from tests.fuzz.files import refused


def profile() -> planning.Profile:
    x = torch.zeros(4, 4, device="meta")
    model = nn.Sequential(*(nn.Linear(4, 4, device="meta") for _ in range(3)))
    return planning.predict(model, x, target=x, loss_fn=nn.functional.mse_loss, device="h100")


def plan() -> planning.Plan:
    return planning.search(profile(), ranks=2, batch=4)[0]


def schedule() -> schedules.Schedule:
    return schedules.build("1F1B", ranks=2, microbatches=2)


def timed(text: str) -> float:
    return Timeline.from_chrome_trace(text).bubble


FILES: dict[str, tuple[Callable[[], str], Callable[[str], Any]]] = {
    "plan": (lambda: plan().to_json(), planning.Plan.from_json),
    "costs": (lambda: profile().to_json(), planning.Profile.from_json),
    "cluster": (
        lambda: planning.Cluster.parse("2xh100,2xa100").to_json(),
        planning.Cluster.from_json,
    ),
    "schedule": (lambda: schedules.to_json(schedule()), schedules.from_json),
    "trace": (lambda: schedules.simulate(schedule()).timeline.to_chrome_trace(), timed),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", FILES)
def test_crafted_files_are_refused_in_one_line_or_read(name: str) -> None:
    write, read = FILES[name]
    messages = refused(write(), read, 200)
    assert len(messages) > 50
    assert all(one.isprintable() and len(one) < 2000 for one in messages)


@pytest.mark.parametrize(
    "event", [{"tid": 10**12}, {"tid": float("inf")}, {"ts": 10**400}, {"dur": "1"}]
)
def test_a_number_in_a_trace_is_no_limitless_list(event: dict[str, Any]) -> None:
    span = {"ph": "X", "name": "0F0", "tid": 0, "ts": 0, "dur": 1}
    text = json.dumps({"traceEvents": [span | event]})
    with pytest.raises(InputFileError, match="not a trace of a step"):
        timed(text)


def test_costs_that_lack_a_stage_are_no_plan() -> None:
    data = json.loads(plan().to_json())
    data["plan"]["stage_costs"]["taken"].pop()
    with pytest.raises(InputFileError, match="one number per stage"):
        planning.Plan.from_json(json.dumps(data))
