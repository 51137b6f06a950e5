"""The report: one self-contained HTML file with the table, and each plan's timelines, memory and cut."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.plan.choice import COLUMNS, Plan, row_of
from penstock.plan.costs import Profile, UnitCost
from penstock.schedule import Action, Op, Span, Timeline
from penstock.schedule.drawing import COLOURS, NAMES

TEMPLATE = Path(__file__).with_name("report.html")
MOST_SPANS = 60_000
"""The most actions that are drawn; if that is not enough for all plans, only the first have pictures."""
HELD = ("weights", "gradients", "optimizer", "messages", "activations", "between I and W")
"""The contents of a rank's memory, from the bottom of the picture up."""


def report_of(
    plans: Iterable[Plan],
    *,
    profile: Profile | None = None,
    title: str = "A plan and its step",
    note: str = "",
    measured: Timeline | None = None,
) -> str:
    """The report as the text of an HTML file that needs no other file and no network.

    Args:
        plans: the plans, the fastest first.
        profile: the profile that they were made from, to show the costs of each unit.
        title: the heading.
        note: a sentence below the heading.
        measured: a step that ran the first plan, to show next to its simulation.
    """
    data = {
        "title": title,
        "note": note,
        "head": COLUMNS,
        "colours": {op.value: colour for op, colour in COLOURS.items()},
        "names": {op.value: name for op, name in NAMES.items()},
        "held": HELD,
        "plans": list(_plans(list(plans), profile, measured)),
    }
    # "</" would end the script element that holds the data, even inside a string.
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return TEMPLATE.read_text(encoding="utf-8").replace("__DATA__", text)


def _plans(
    plans: Sequence[Plan], profile: Profile | None, measured: Timeline | None
) -> Iterator[dict[str, Any]]:
    left = MOST_SPANS
    for number, plan in enumerate(plans):
        left -= sum(map(len, plan.schedule.programs))
        units = profile.at(plan.shape.samples).units if profile is not None else ()
        timelines = []
        if left >= 0 or number == 0:
            timelines.append(_simulated(plan))
        if measured is not None and number == 0:
            timelines.append(_measured(plan, measured))
        yield {
            "row": row_of(plan, plans[0]),
            "limit": plan.limit,
            "cut": list(_cut(plan, units)),
            "timelines": timelines,
        }


def _simulated(plan: Plan) -> dict[str, Any]:
    ran = plan.simulation
    gaps = [
        [(gap.start, gap.end, gap.action, gap.waits_for) for gap in ran.gaps(rank)]
        for rank in range(plan.ranks)
    ]
    return _timeline("simulated", plan, ran.timeline, gaps)


def _measured(plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """A measured step. A recording lacks the reasons for gaps, so they are taken from the simulation."""
    ran = plan.simulation
    waits = {gap.action: gap.waits_for for rank in range(plan.ranks) for gap in ran.gaps(rank)}
    gaps = [
        [
            (a.end, b.start, b.action, waits.get(b.action))
            for a, b in pairwise(_computing(timeline, rank))
            if b.start > a.end
        ]
        for rank in range(timeline.ranks)
    ]
    return _timeline("measured", plan, timeline, gaps)


def _computing(timeline: Timeline, rank: int) -> list[Span]:
    return [span for span in timeline.of_rank(rank) if span.action.op in COLOURS]


def _timeline(
    label: str,
    plan: Plan,
    timeline: Timeline,
    gaps: Sequence[Sequence[tuple[float, float, Action, Action | None]]],
) -> dict[str, Any]:
    """A step as the page draws it; times count from its start."""
    origin = timeline.start
    ranks = [_computing(timeline, rank) for rank in range(timeline.ranks)]
    return {
        "label": label,
        "seconds": timeline.makespan,
        "spans": [[_span(span, origin) for span in spans] for spans in ranks],
        "gaps": [
            [
                [_short(a - origin), _short(b - origin), str(action), awaited(cause)]
                for a, b, action, cause in of_rank
            ]
            for of_rank in gaps
        ],
        "memory": [_memory(plan, rank, spans, origin) for rank, spans in enumerate(ranks)],
    }


def awaited(action: Action | None) -> str:
    """The action that a rank waits for, in words."""
    if action is None:
        return ""
    _, op, microbatch, _ = action
    if op is Op.RECV_F:
        return f"what {action.peer_stage}F{microbatch} sends"
    if op is Op.RECV_B:
        return f"the gradient of microbatch {microbatch} from stage {action.peer_stage}"
    return str(action)


def _span(span: Span, origin: float) -> list[Any]:
    stage, op, microbatch, _ = span.action
    return [op.value, stage, microbatch, _short(span.start - origin), _short(span.end - origin)]


def _short(seconds: float) -> float:
    return float(f"{seconds:.7g}")


def _memory(plan: Plan, rank: int, spans: Sequence[Span], origin: float) -> dict[str, Any]:
    """What a rank holds all the time, and what it holds from each moment on."""
    costs, placement = plan.stage_costs, plan.schedule.placement
    mine = placement.stages_on(rank)
    fixed = [sum(costs.kinds[stage][kind] for stage in mine) for kind in HELD[:3]]
    fixed.append(sum(map(costs.messages, mine)))
    activation, stash = costs.activation, costs.stash
    held, left = 0.0, 0.0
    steps: list[tuple[float, float, float]] = []
    for span in spans:
        op, stage = span.action.op, span.action.stage
        if op is Op.F:
            held += activation[stage]
        elif op in (Op.I, Op.B):
            held -= activation[stage]
        left += {Op.I: stash[stage], Op.W: -stash[stage]}.get(op, 0.0)
        when = span.start if op is Op.F else span.end
        steps.append((_short(when - origin), round(max(held, 0.0)), round(max(left, 0.0))))
    return {"fixed": [round(size) for size in fixed], "steps": steps}


def _cut(plan: Plan, units: Sequence[UnitCost]) -> Iterator[dict[str, Any]]:
    known = {unit.path: unit for unit in units}
    costs = {"weights": "parameters"} | {
        name: name for name in ("forward", "backward", "spread", "held", "stash")
    }
    for stage, paths in enumerate(plan.stages):
        yield {
            "stage": stage,
            "rank": plan.schedule.placement.rank_of[stage],
            "units": [
                {"path": path, "again": path in plan.recompute}
                | {name: getattr(known.get(path), of, None) for name, of in costs.items()}
                for path in paths
            ],
        }
