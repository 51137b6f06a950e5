"""What happens when: schedules as values. Nothing here imports torch."""

from penstock.schedule.action import Action, Op, Overlap, parse_action
from penstock.schedule.base import Schedule
from penstock.schedule.dependencies import Dependencies
from penstock.schedule.drawing import draw_svg, draw_text
from penstock.schedule.edges import Edge, chain
from penstock.schedule.library import build, names
from penstock.schedule.passes import (
    Pass,
    add_communication,
    add_wait_sends,
    compose,
    delay_receives,
    merge_backward,
    prefetch,
    reduce_gradients,
    remove_wait_sends,
)
from penstock.schedule.placement import Placement, looped, v_shaped
from penstock.schedule.simulation import Costs, Gap, Simulation, replay, simulate
from penstock.schedule.timeline import Span, Timeline
from penstock.schedule.validation import Problem, Report, validate

__all__ = [
    "Action",
    "Costs",
    "Dependencies",
    "Edge",
    "Gap",
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
    "add_wait_sends",
    "build",
    "chain",
    "compose",
    "delay_receives",
    "draw_svg",
    "draw_text",
    "looped",
    "merge_backward",
    "names",
    "parse_action",
    "prefetch",
    "reduce_gradients",
    "remove_wait_sends",
    "replay",
    "simulate",
    "v_shaped",
    "validate",
]
