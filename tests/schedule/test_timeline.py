"""Timelines: what they measure and what they say to a trace viewer."""

from __future__ import annotations

import json

import pytest

from penstock.errors import UsageError
from penstock.schedule import Action, Op, Span, Timeline


def span(rank: int, op: Op, start: float, end: float, microbatch: int | None = 0) -> Span:
    return Span(rank, Action(rank, op, microbatch), start, end)


LINE = Timeline((span(0, Op.F, 10, 11), span(1, Op.F, 11, 12), span(1, Op.B, 12, 14)), 2)


def test_makespan_and_idle_shares_count_from_the_first_start() -> None:
    assert (LINE.start, LINE.makespan) == (10, 4)
    assert LINE.busy == (1, 3)
    assert LINE.bubbles == (0.75, 0.25)
    assert LINE.bubble == 0.5


def test_what_overlaps_is_busy_once_and_other_ops_are_not_busy() -> None:
    spans = (span(0, Op.F, 0, 3), span(0, Op.B, 2, 4), span(0, Op.REDUCE_GRAD, 4, 9, None))
    assert Timeline(spans, 1).busy == (4,)


def test_an_empty_timeline_has_no_bubble() -> None:
    assert (Timeline((), 2).makespan, Timeline((), 2).bubble) == (0, 0)


def test_the_chrome_trace_has_a_thread_a_rank_and_microseconds() -> None:
    events = json.loads(LINE.to_chrome_trace())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["rank 0", "rank 1"]
    assert events[-1] == {
        "ph": "X",
        "name": "1B0",
        "cat": "B",
        "pid": 0,
        "tid": 1,
        "ts": 2e6,
        "dur": 2e6,
        "args": {"op": "B", "stage": 1, "microbatch": 0},
    }


@pytest.mark.parametrize("bad", [span(2, Op.F, 0, 1), span(0, Op.F, 2, 1)])
def test_impossible_spans_are_refused(bad: Span) -> None:
    with pytest.raises(UsageError, match="rank below 2"):
        Timeline((bad,), 2)


def test_unknown_units_are_refused() -> None:
    with pytest.raises(UsageError, match="unit='h'"):
        Timeline((), 1, "h")
