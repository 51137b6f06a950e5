"""What happens when: schedules as values. Nothing here imports torch.

Its modules are imported when a name is first used, so that commands which only list schedules are quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazily import lazily

if TYPE_CHECKING:
    from penstock.schedule.action import Action, Op, Overlap, matching, parse_action
    from penstock.schedule.base import Edge, Placement, Schedule, chain, looped, v_shaped
    from penstock.schedule.clock import Costs
    from penstock.schedule.dependencies import Dependencies
    from penstock.schedule.drawing import draw_svg, draw_text
    from penstock.schedule.files import Limits, from_csv, from_json, load, save, to_csv, to_json
    from penstock.schedule.library import build, names, register, unregister
    from penstock.schedule.order import merged
    from penstock.schedule.passes import (
        Pass,
        add_communication,
        compose,
        compute_only,
        merge_backward,
        prefetch,
        reduce_gradients,
    )
    from penstock.schedule.searching import lower_bound, search
    from penstock.schedule.simulation import Gap, Simulation, Span, Timeline, replay, simulate
    from penstock.schedule.validation import Problem, Report, validate


__all__ = [
    "Action",
    "Costs",
    "Dependencies",
    "Edge",
    "Gap",
    "Limits",
    "Op",
    "Overlap",
    "Pass",
    "Placement",
    "Problem",
    "Report",
    "Schedule",
    "Simulation",
    "Span",
    "Timeline",
    "add_communication",
    "build",
    "chain",
    "compose",
    "compute_only",
    "draw_svg",
    "draw_text",
    "from_csv",
    "from_json",
    "load",
    "looped",
    "lower_bound",
    "matching",
    "merge_backward",
    "merged",
    "names",
    "parse_action",
    "prefetch",
    "reduce_gradients",
    "register",
    "replay",
    "save",
    "search",
    "simulate",
    "to_csv",
    "to_json",
    "unregister",
    "v_shaped",
    "validate",
]

__getattr__ = lazily(
    __name__,
    {
        "action": "Action Op Overlap matching parse_action",
        "base": "Edge Placement Schedule chain looped v_shaped",
        "dependencies": "Dependencies",
        "drawing": "draw_svg draw_text",
        "files": "Limits from_csv from_json load save to_csv to_json",
        "library": "build names register unregister",
        "order": "merged",
        "passes": "Pass add_communication compose compute_only merge_backward prefetch reduce_gradients",
        "searching": "lower_bound search",
        "clock": "Costs",
        "simulation": "Gap Simulation Span Timeline replay simulate",
        "validation": "Problem Report validate",
    },
)
