"""Schedules as rows of actions, and drawings of them. The names are torch's, the drawings Penstock's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import UsageError
from penstock.pipeline.plan import prove
from penstock.pipelining._utils import CallError
from penstock.pipelining.rows import ActionTuple, Row, proven, schedule_of, to_entry, to_order
from penstock.pipelining.running import PipelineSchedule
from penstock.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from penstock.schedule import (
    Timeline,
    build,
    draw_svg,
    draw_text,
    prefetch,
    reduce_gradients,
    simulate,
)
from penstock.schedule.base import flat

__all__ = ["add_schedule_op_spacing", "get_schedule_ops", "visualize_schedule"]


def get_schedule_ops(
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
        schedule: a schedule's name or class.
        pp_degree: the number of ranks.
        num_microbatches: the number of microbatches in a batch.
        num_stages_per_rank: by default 1 for schedules with one stage per rank, otherwise 2.
        add_spacing: whether to put ``None`` for steps in which a rank idles.
        with_comms: whether to include messages, gathering of parameters, and reductions.
        defer_pp_recv: accepted and ignored: receives are posted where they are needed.

    Raises:
        ValueError: spacing and messages were both requested, there is no such schedule, or it cannot
            have this many stages per rank.
    """
    if add_spacing and with_comms:
        raise UsageError("add_spacing and with_comms cannot both be asked for; take one")
    chosen = get_schedule_class(schedule) if isinstance(schedule, str) else schedule
    if chosen.recipe is None:
        raise CallError(f"{chosen.__name__} is not the class of a named schedule; take one that is")
    single = issubclass(chosen, PipelineScheduleSingle)
    usual = 1 if single else 2
    each = usual if num_stages_per_rank is None else num_stages_per_rank
    if (each == 1) is not single:
        wanted = "1" if single else "at least 2"
        raise CallError(f"num_stages_per_rank={each}: {chosen.__name__} needs {wanted}")
    sizes = {"ranks": pp_degree, "microbatches": num_microbatches, "stages_per_rank": each}
    built = build(chosen.recipe, **sizes)
    if with_comms:
        built = prove(reduce_gradients(prefetch(built)))
    rows = list(to_order(built.programs).values())
    return add_schedule_op_spacing(rows) if add_spacing else rows


def add_schedule_op_spacing(schedule: Sequence[Row]) -> list[list[ActionTuple | None]]:
    """Insert ``None`` for each step in which a rank idles.

    A full backward takes two steps, an overlapped pair three, and any other action one.

    Args:
        schedule: each rank's actions, which only compute.

    Raises:
        PlacementError: the schedule does not complete.
    """
    timeline = _timeline(schedule)
    times = {span.action: (round(span.start), round(span.end)) for span in timeline.spans}
    steps: list[list[ActionTuple | None]] = []
    for row in schedule:
        steps.append([])
        now = 0
        for action in filter(None, row):
            starts, ends = zip(*(times[part] for part in flat((to_entry(action),))), strict=True)
            steps[-1] += [*[None] * (min(starts) - now), action]
            now = max(ends)
        steps[-1] += [None] * (max(end for _, end in times.values()) - now)
    return steps


def visualize_schedule(schedule: Sequence[Row], filename: str | None = None) -> None:
    """Draw rows of actions as they run: a forward takes one step and a full backward two.

    Args:
        schedule: each rank's actions.
        filename: the SVG file to write; by default the drawing is printed as text.

    Raises:
        PlacementError: the schedule does not complete.
        UsageError: the file name does not end in ``.svg``.
    """
    timeline = _timeline(schedule)
    if filename is None:
        sys.stdout.write(draw_text(timeline) + "\n")
    elif Path(filename).suffix != ".svg":
        raise UsageError(f"{filename}: drawings are SVG; name it {Path(filename).stem}.svg")
    else:
        Path(filename).write_text(draw_svg(timeline), encoding="utf-8")


def _timeline(rows: Sequence[Row]) -> Timeline:
    return simulate(proven(schedule_of(dict(enumerate(rows))))).timeline
