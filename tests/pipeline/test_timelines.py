"""What a recorded step tells about time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from penstock import StepResult
from penstock.schedule import Op
from penstock.testing import WorkerPool
from tests.pipeline.models import X, Y, make

COMPUTE = {Op.F, Op.B, Op.I, Op.W}


def computed(result: StepResult) -> list[str]:
    assert result.timeline is not None
    spans = sorted(result.timeline.spans, key=lambda span: (span.rank, span.start))
    return [f"{span.rank}:{span.action}" for span in spans if span.action.op in COMPUTE]


def expected(schedule: Any) -> list[str]:
    return [
        f"{rank}:{action}"
        for rank in range(schedule.ranks)
        for action in schedule.actions(rank)
        if action.op in COMPUTE
    ]


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZB-H1"])
def test_in_one_process_the_ranks_are_replayed(schedule: str) -> None:
    pipe = make(schedule=schedule)
    result, plain = pipe.step(X, target=Y, record=True), make().step(X, target=Y)
    assert (plain.loss, plain.timeline, plain.timeline_kind) == (result.loss, None, None)
    assert result.timeline is not None
    for rank in range(2):
        spans = sorted((s.start, s.end) for s in result.timeline.spans if s.rank == rank)
        assert all(start <= end for start, end in spans)
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(spans))
    assert make(ranks=1).step(X, target=Y, record=True).timeline_kind == "measured"
    assert result.timeline_kind == "replayed"
    assert computed(result) == expected(pipe.schedule)
    assert result.bubble is not None
    assert 0 < result.bubble < 1


def record(group: Any) -> dict[str, Any]:
    pipe = make(group=group)
    result = pipe.step(X, target=Y, record=True)
    return {
        "kind": result.timeline_kind,
        "computed": computed(result),
        "expected": expected(pipe.schedule),
        "bubble": result.bubble,
        "leads": pipe.leads,
    }


def test_processes_measure_and_share(workers: WorkerPool) -> None:
    answers = workers.run(f"{__name__}:record", 2, 100.0)
    assert [answer.pop("leads") for answer in answers] == [True, False]
    assert answers[0] == answers[1]
    assert answers[0]["kind"] == "measured"
    assert answers[0]["computed"] == answers[0]["expected"]
    assert 0 <= answers[0]["bubble"] < 1
