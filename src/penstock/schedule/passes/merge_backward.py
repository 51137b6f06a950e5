"""Run adjacent halves of a backward as one."""

from __future__ import annotations

from penstock.schedule.action import Action, Entry, Op, Program
from penstock.schedule.base import Schedule


def merge_backward(schedule: Schedule) -> Schedule:
    """Replace each I that its own W follows directly by one B, which saves a second pass over the graph.

    Apply it before :func:`add_communication`: a message between the two halves keeps them apart, since a
    merged B would send it later.
    """
    return schedule.with_programs(map(_merge, schedule.programs))


def _merge(program: Program) -> list[Entry]:
    merged: list[Entry] = []
    for entry in program:
        full = _together(merged[-1], entry) if merged else None
        if full is None:
            merged.append(entry)
        else:
            merged[-1] = full
    return merged


def _together(first: Entry, second: Entry) -> Action | None:
    """The B that an I and a W make up, if they are of one stage and microbatch."""
    if not (isinstance(first, Action) and first.op is Op.I):
        return None
    weight = Action(first.stage, Op.W, first.microbatch)
    return Action(first.stage, Op.B, first.microbatch) if second == weight else None
