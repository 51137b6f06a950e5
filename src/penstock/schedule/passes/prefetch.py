"""Say when a stage's sharded parameters are gathered and freed."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import ScheduleError
from penstock.schedule.action import COMPUTE_OPS, Action, Entry, Op, Overlap, Program
from penstock.schedule.base import Schedule, flat


def prefetch(schedule: Schedule, *, unsharded: int = 3) -> Schedule:
    """Add UNSHARD and RESHARD so that each stage is gathered ahead of its use.

    At any time a rank holds the stages that it uses next, up to a bound; a stage that is not among them is
    freed. A schedule that has UNSHARD already is returned as it is.

    Args:
        schedule: with or without messages.
        unsharded: how many stages of a rank may be gathered at a time; at least 2 where F and B overlap.

    Raises:
        ScheduleError: the bound is too small.
    """
    least = 2 if any(Overlap in set(map(type, program)) for program in schedule.programs) else 1
    if unsharded < least:
        raise ScheduleError(f"unsharded={unsharded}: must be at least {least} for {schedule.name}")
    if Op.UNSHARD in schedule.ops:
        return schedule
    return schedule.with_programs(_prefetch(program, unsharded) for program in schedule.programs)


def _prefetch(program: Program, bound: int) -> Iterator[Entry]:
    held: list[int] = []
    for entry, coming in zip(program, _coming(program, bound), strict=True):
        if _computes(entry):
            yield from (Action(stage, Op.RESHARD) for stage in held if stage not in coming)
            yield from (Action(stage, Op.UNSHARD) for stage in coming if stage not in held)
            held = coming
        yield entry
    yield from (Action(stage, Op.RESHARD) for stage in held)


def _computes(entry: Entry) -> bool:
    return isinstance(entry, Overlap) or entry.op in COMPUTE_OPS


def _coming(program: Program, bound: int) -> list[list[int]]:
    """For each entry the next distinct stages that are used from there on, nearest first."""
    found: list[list[int]] = []
    order: list[int] = []
    for entry in reversed(program):
        if _computes(entry):
            stages = [action.stage for action in flat((entry,))]
            if stages != order[: len(stages)]:
                order = stages + [stage for stage in order if stage not in stages]
        found.append(order[:bound])
    return found[::-1]
