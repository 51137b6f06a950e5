"""Schedules as values: what each rank does, and when. Nothing here imports torch.

Modules are imported when a name is first used, so that commands which only list schedules start fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock._engine.lazily import lazily

if TYPE_CHECKING:
    from penstock.schedule.action import Action as Action
    from penstock.schedule.action import Op as Op
    from penstock.schedule.action import Overlap as Overlap
    from penstock.schedule.action import Slice as Slice
    from penstock.schedule.action import matching as matching
    from penstock.schedule.action import parse_action as parse_action
    from penstock.schedule.base import Edge as Edge
    from penstock.schedule.base import Placement as Placement
    from penstock.schedule.base import Schedule as Schedule
    from penstock.schedule.base import chain as chain
    from penstock.schedule.base import looped as looped
    from penstock.schedule.base import v_shaped as v_shaped
    from penstock.schedule.clock import Costs as Costs
    from penstock.schedule.comparing import Slow as Slow
    from penstock.schedule.comparing import costs_of as costs_of
    from penstock.schedule.comparing import find_slow as find_slow
    from penstock.schedule.dependencies import Dependencies as Dependencies
    from penstock.schedule.drawing import Picture as Picture
    from penstock.schedule.drawing import draw_svg as draw_svg
    from penstock.schedule.drawing import draw_text as draw_text
    from penstock.schedule.files import from_csv as from_csv
    from penstock.schedule.files import from_json as from_json
    from penstock.schedule.files import load as load
    from penstock.schedule.files import save as save
    from penstock.schedule.files import to_csv as to_csv
    from penstock.schedule.files import to_json as to_json
    from penstock.schedule.library import build as build
    from penstock.schedule.library import names as names
    from penstock.schedule.library import register as register
    from penstock.schedule.library import unregister as unregister
    from penstock.schedule.passes import Pass as Pass
    from penstock.schedule.passes import add_communication as add_communication
    from penstock.schedule.passes import compose as compose
    from penstock.schedule.passes import compute_only as compute_only
    from penstock.schedule.passes import merge_backward as merge_backward
    from penstock.schedule.passes import offload as offload
    from penstock.schedule.passes import prefetch as prefetch
    from penstock.schedule.passes import reduce_gradients as reduce_gradients
    from penstock.schedule.passes import wait_for_sends as wait_for_sends
    from penstock.schedule.searching import lower_bound as lower_bound
    from penstock.schedule.searching import search as search
    from penstock.schedule.simulation import Gap as Gap
    from penstock.schedule.simulation import Simulation as Simulation
    from penstock.schedule.simulation import merged as merged
    from penstock.schedule.simulation import replay as replay
    from penstock.schedule.simulation import simulate as simulate
    from penstock.schedule.timeline import Span as Span
    from penstock.schedule.timeline import Timeline as Timeline
    from penstock.schedule.validation import Problem as Problem
    from penstock.schedule.validation import Report as Report
    from penstock.schedule.validation import validate as validate

__all__, __getattr__, __dir__ = lazily(__name__)
