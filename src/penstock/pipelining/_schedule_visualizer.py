"""Schedules as rows of actions, and drawings of them. The names are torch's, the drawings Penstock's."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import UsageError
from penstock.pipeline.plan import AHEAD
from penstock.pipelining._utils import CallError
from penstock.pipelining.rows import (
    ActionTuple,
    ComputationType,
    Order,
    Row,
    add_messages,
    add_reductions,
    add_unshards,
    microbatches_of,
    schedule_of,
    stages_of,
    to_entry,
)
from penstock.pipelining.running import PipelineSchedule
from penstock.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    get_schedule_class,
)
from penstock.pipelining.stage import StageBase
from penstock.schedule import Action, Costs, Span, Timeline, draw_svg, draw_text, simulate
from penstock.schedule.base import flat

__all__ = ["OpKey", "add_schedule_op_spacing", "get_schedule_ops", "visualize_schedule"]

WIDTHS = {"B": 2, "OVERLAP_F_B": 3}
"""How many steps a kind of work takes; all others take one."""


class OpKey(NamedTuple):
    """Identifies an action."""

    stage_index: int
    computation_type: ComputationType
    microbatch_index: int


class _Place(StageBase):
    """A stage that stands in for real ones and is never run."""

    def __init__(self, ranks: int, stages: int) -> None:
        self.group_size, self.num_stages = ranks, stages


def get_schedule_ops(  # noqa: PLR0913 - torch's arguments
    schedule: str | type[PipelineSchedule],
    pp_degree: int,
    num_microbatches: int,
    num_stages_per_rank: int | None = None,
    add_spacing: bool = False,
    with_comms: bool = False,
    defer_pp_recv: bool = False,
) -> list[list[ActionTuple | None]]:
    """Each rank's actions.

    Args:
        schedule: a name or a class.
        pp_degree: the number of ranks.
        num_microbatches: the number of parts that a batch is split into.
        num_stages_per_rank: by default 1 for schedules with one stage per rank, otherwise 2.
        add_spacing: whether ``None`` stands for steps in which a rank idles.
        with_comms: whether to include messages, gathering of parameters, and reductions.
        defer_pp_recv: with messages, whether receives are posted as late as possible.

    Raises:
        ValueError: both spacing and messages were asked for, there is no such schedule, or it cannot have
            that many stages.
    """
    if add_spacing and with_comms:
        raise UsageError("add_spacing and with_comms cannot both be asked for; take one")
    order = _order(_class_of(schedule), pp_degree, num_microbatches, num_stages_per_rank)
    if with_comms:
        order = _lowered(order, num_microbatches, defer_pp_recv)
    rows = [list(order[rank]) for rank in range(pp_degree)]
    return add_schedule_op_spacing(rows) if add_spacing else rows


def _class_of(schedule: Any) -> type[PipelineSchedule]:
    kind = get_schedule_class(schedule) if isinstance(schedule, str) else schedule
    if not issubclass(kind, PipelineScheduleSingle | PipelineScheduleMulti):
        raise UsageError(f"{kind.__name__} is not a schedule class")
    return kind


def _order(chosen: Any, ranks: int, microbatches: int, each: int | None) -> Order:
    single = issubclass(chosen, PipelineScheduleSingle)
    count = (1 if single else 2) if each is None else each
    if (count == 1) is not single or count < 1:
        wanted = "1" if single else "at least 2"
        raise CallError(f"num_stages_per_rank={count}: {chosen.__name__} needs {wanted}")
    places = [_Place(ranks, count * ranks) for _ in range(count)]
    order: Order = chosen(places[0] if single else places, microbatches).pipeline_order
    if not order:
        raise CallError(f"{chosen.__name__} defines no order of actions; take a class that does")
    return order


def _lowered(order: Order, microbatches: int, defer: bool) -> Order:
    rank_of = schedule_of(order, stages_of(order), microbatches).placement.rank_of
    whole = {r: add_reductions(add_unshards(row), microbatches) for r, row in order.items()}
    return add_messages(whole, rank_of.__getitem__, len(rank_of), ahead=1 if defer else AHEAD)


def add_schedule_op_spacing(
    schedule: Sequence[Row],
) -> list[list[ActionTuple | None]]:
    """The same rows, with ``None`` for each step in which a rank idles.

    A full backward takes two steps, an overlapped pair three, and any other action one.

    Args:
        schedule: each rank's actions.

    Raises:
        ScheduleError: it does not complete.
    """
    order = {rank: [a for a in row if a is not None] for rank, row in enumerate(schedule)}
    if not any(order.values()):
        return [[] for _ in order]
    placed = schedule_of(order, stages_of(order), microbatches_of(order))
    timeline = simulate(placed, Costs(backward=WIDTHS["B"])).timeline
    start = {span.action: round(span.start) for span in timeline.spans}
    return [list(_spaced(order[rank], start, round(timeline.makespan))) for rank in order]


def _spaced(
    row: Sequence[ActionTuple], start: dict[Action, int], end: int
) -> Iterator[ActionTuple | None]:
    now = 0
    for action in row:
        begins = start[next(flat((to_entry(action),)))]
        yield from [None] * (begins - now)
        yield action
        now = begins + _width(action)
    yield from [None] * (end - now)


def _width(action: ActionTuple | None) -> int:
    return 1 if action is None else WIDTHS.get(action.computation_type.value, 1)


def visualize_schedule(schedule: Sequence[Row], filename: str | None = None) -> None:
    """Draw rows of actions.

    Args:
        schedule: each rank's actions, with ``None`` where it idles.
        filename: of an SVG file; without it, the schedule is printed.

    Raises:
        UsageError: the file name does not end in ``.svg``.
    """
    spans = tuple(span for rank, row in enumerate(schedule) for span in _spans(rank, row))
    timeline = Timeline(spans, len(schedule), "")
    if filename is None:
        sys.stdout.write(draw_text(timeline) + "\n")
    elif Path(filename).suffix != ".svg":
        raise UsageError(f"{filename}: drawings are SVG; name it {Path(filename).stem}.svg")
    else:
        Path(filename).write_text(draw_svg(timeline), encoding="utf-8")


def _spans(rank: int, row: Row) -> Iterator[Span]:
    now = 0
    for action in row:
        if action is None:
            now += 1
            continue
        for part in action.sub_actions or (action,):
            yield from (Span(rank, a, now, now + _width(part)) for a in flat((to_entry(part),)))
            now += _width(part)
