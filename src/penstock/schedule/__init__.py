"""What happens when: schedules as values. Nothing here imports torch."""

from penstock.schedule.action import Action, Op, Overlap, parse_action
from penstock.schedule.base import Schedule
from penstock.schedule.dependencies import Dependencies
from penstock.schedule.edges import Edge, chain
from penstock.schedule.library import build, names
from penstock.schedule.passes import add_communication
from penstock.schedule.placement import Placement, looped, v_shaped

__all__ = [
    "Action",
    "Dependencies",
    "Edge",
    "Op",
    "Overlap",
    "Placement",
    "Schedule",
    "add_communication",
    "build",
    "chain",
    "looped",
    "names",
    "parse_action",
    "v_shaped",
]
