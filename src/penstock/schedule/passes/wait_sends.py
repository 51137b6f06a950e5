"""Wait for sends, or leave that to whoever frees their buffers."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.schedule.action import SEND_OPS, WAIT_SEND_OPS, Action, Entry, Op, Program
from penstock.schedule.base import Schedule

_WAIT = {Op.SEND_F: Op.WAIT_SEND_F, Op.SEND_B: Op.WAIT_SEND_B}


def wait_of(send: Action) -> Action:
    """The WAIT_SEND of a SEND."""
    return Action(send.stage, _WAIT[send.op], send.microbatch, send.peer)


def add_wait_sends(schedule: Schedule) -> Schedule:
    """Add a WAIT_SEND for each SEND, at the end of the program where it can hold nothing up.

    Newer versions of torch want them in files. A schedule that has some already is returned as it is. For
    waits that come early, so that little is kept, see :func:`release_sends`.
    """
    if not schedule.ops.isdisjoint(WAIT_SEND_OPS):
        return schedule
    return schedule.with_programs((*program, *_waits(program)) for program in schedule.programs)


def _waits(program: Program) -> Iterator[Entry]:
    for entry in program:
        if isinstance(entry, Action) and entry.op in SEND_OPS:
            yield wait_of(entry)


def remove_wait_sends(schedule: Schedule) -> Schedule:
    """Leave out every WAIT_SEND, as older versions of torch want it in files."""
    return schedule.with_programs(
        (e for e in program if not (isinstance(e, Action) and e.op in WAIT_SEND_OPS))
        for program in schedule.programs
    )
