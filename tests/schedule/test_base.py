"""Schedules, placements, edges and timelines are values, and none of the wrong shape can be constructed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from penstock.errors import ScheduleError, UsageError
from penstock.schedule import (
    Action,
    Edge,
    Op,
    Placement,
    Schedule,
    Span,
    Timeline,
    build,
    chain,
    looped,
    simulate,
    v_shaped,
)
from tests.schedule.programs import schedule


def test_schedules_compare_by_what_they_do_not_by_name() -> None:
    made = build("1F1B", ranks=2, microbatches=3)
    assert made == build("1f1b", ranks=2, microbatches=3)
    assert made == dataclasses.replace(made, name="mine")
    assert made != build("GPipe", ranks=2, microbatches=3)
    assert len({made, dataclasses.replace(made, name="mine")}) == 1


def alone(action: Action) -> Schedule:
    return Schedule("test", looped(1), 1, ((action,),))


def with_edges(*edges: Edge) -> Schedule:
    return schedule("0F0", "1F0").with_edges(edges)


STAGE, MICROBATCH = "stages go from 0 to 0", "microbatches go from 0 to 0"
IMPOSSIBLE: list[tuple[Callable[[], object], str]] = [
    (lambda: schedule("1F0"), f"rank 0, position 0, 1F0: there is no stage 1; {STAGE}"),
    (lambda: schedule("0F0 0F1"), f"position 1, 0F1: there is no microbatch 1; {MICROBATCH}"),
    (lambda: schedule("0SEND_F0"), "its peer, stage 1, does not exist"),
    (lambda: alone(Action(0, Op.F)), "F needs a microbatch"),
    (lambda: alone(Action(0, Op.UNSHARD, 0)), "UNSHARD names no microbatch"),
    (lambda: alone(Action(0, Op.F, 0, 0)), "F is not a message and names no peer"),
    (lambda: Schedule("test", looped(2), 1, ((),)), "1 programs for 2 ranks"),
    (lambda: Schedule("test", looped(1), 0, ((),)), "microbatches=0"),
    (lambda: Placement(()), "a placement needs at least one stage"),
    (lambda: Placement((0, 2)), "ranks count from 0"),
    (lambda: looped(0, 1), "=0: must be at least 1"),
    (lambda: v_shaped(0), "ranks=0"),
    (lambda: Edge("x", 0, (2, 1)), "must be at least one stage, in ascending order"),
    (lambda: Edge("x", 1, (1,)), "goes to later stages only"),
    (lambda: with_edges(Edge("x", 0, (1, 2))), r"edges \['x'\] go to stages beyond the last, 1"),
    (lambda: with_edges(*[Edge("x", 0, (1,))] * 2), r"edges named twice: \['x'\]"),
]


@pytest.mark.parametrize(("make", "says"), IMPOSSIBLE)
def test_what_has_the_wrong_shape_cannot_be_made(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        make()


# ---- where stages are, and which values travel


def test_stages_are_laid_in_laps_or_in_a_v_and_chained() -> None:
    assert looped(3).rank_of == (0, 1, 2)
    assert looped(2, 3).rank_of == (0, 1, 0, 1, 0, 1)
    placement = v_shaped(3)
    assert placement.rank_of == (0, 1, 2, 2, 1, 0)
    assert (placement.stages, placement.ranks) == (6, 3)
    assert [placement.stages_on(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [(edge.source, edge.targets) for edge in chain(3)] == [(0, (1,)), (1, (2,))]
    assert chain(1) == ()


# ---- timelines


def span(rank: int, op: Op, start: float, end: float, microbatch: int | None = 0) -> Span:
    return Span(rank, Action(rank, op, microbatch), start, end)


LINE = Timeline((span(0, Op.F, 10, 11), span(1, Op.F, 11, 12), span(1, Op.B, 12, 14)), 2)


def test_makespan_and_idle_shares_count_from_the_first_start() -> None:
    assert (LINE.start, LINE.makespan, LINE.bubble) == (10, 4, 0.5)
    assert (LINE.busy, LINE.bubbles) == ((1, 3), (0.75, 0.25))
    assert (Timeline((), 2).makespan, Timeline((), 2).bubble) == (0, 0)


def test_what_overlaps_is_busy_once_and_other_ops_are_not_busy() -> None:
    spans = (span(0, Op.F, 0, 3), span(0, Op.B, 2, 4), span(0, Op.REDUCE_GRAD, 4, 9, None))
    assert Timeline(spans, 1).busy == (4,)


def test_the_chrome_trace_has_a_thread_a_rank_and_microseconds() -> None:
    events = json.loads(LINE.to_chrome_trace())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["rank 0", "rank 1"]
    args = {"op": "B", "stage": 1, "microbatch": 0}
    times = {"ts": 2e6, "dur": 2e6, "pid": 0, "tid": 1}
    assert events[-1] == {"ph": "X", "name": "1B0", "cat": "B", "args": args} | times


def test_a_chrome_trace_keeps_idle_ranks_and_pairs() -> None:
    timeline = simulate(build("DualPipeV", ranks=2, microbatches=4)).timeline
    again = Timeline.from_chrome_trace(timeline.to_chrome_trace())
    assert again.pairs == timeline.pairs != ()
    assert Timeline.from_chrome_trace(Timeline(LINE.spans, 4).to_chrome_trace()).ranks == 4


def test_a_schedule_of_lists_is_the_same_value() -> None:
    made = build("1F1B", ranks=2, microbatches=2)
    lists: list[Any] = [list(program) for program in made.programs]
    again = Schedule("mine", made.placement, 2, lists, list(made.edges))  # type: ignore[arg-type]
    assert (again, hash(again)) == (made, hash(made))
    with pytest.raises(UsageError, match=r"microbatches=1\.5"):
        Schedule("mine", made.placement, 1.5, made.programs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spans", "unit", "says"),
    [
        ([span(2, Op.F, 0, 1)], "", "rank below 2"),
        ([span(0, Op.F, 2, 1)], "", "rank below 2"),
        ([], "h", "unit='h'"),
    ],
)
def test_timelines_that_cannot_be(spans: list[Span], unit: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Timeline(tuple(spans), 2, unit)
