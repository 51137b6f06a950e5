"""Say when a stage's gradients are summed over data-parallel replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from penstock.schedule.action import Action, Entry, Op, Program
from penstock.schedule.base import Schedule, flat

_LAST = (Op.W, Op.B)
"""Ops that complete a weight gradient."""


def reduce_gradients(schedule: Schedule) -> Schedule:
    """Add a REDUCE_GRAD behind the last weight gradient of each stage.

    So it runs beside what other stages of the rank have still to do. A schedule that has them already is
    returned as it is.
    """
    if Op.REDUCE_GRAD in schedule.ops:
        return schedule
    return schedule.with_programs(map(_reduce, schedule.programs))


def _reduce(program: Program) -> Iterator[Entry]:
    left = Counter(action.stage for action in flat(program) if action.op in _LAST)
    for entry in program:
        yield entry
        for stage in [action.stage for action in flat((entry,)) if action.op in _LAST]:
            left[stage] -= 1
            if not left[stage]:
                yield Action(stage, Op.REDUCE_GRAD)
