"""One order for the actions of all ranks: what a single process runs."""

from __future__ import annotations

from penstock.schedule.action import MESSAGE_OPS, WAIT_SEND_OPS, Action, Overlap
from penstock.schedule.base import Schedule, paused_collection
from penstock.schedule.clock import Numbered, waits_of
from penstock.schedule.validation import completed

_BETWEEN_RANKS = MESSAGE_OPS | WAIT_SEND_OPS


@paused_collection()
def merged(schedule: Schedule) -> list[Action]:
    """All ranks' actions in one order that respects every dependency, in time linear in their number.

    Each rank's own order is kept. The two halves of an overlapped pair follow each other, the forward first.

    Args:
        schedule: with or without its messages; these are left out, since one process needs none.

    Raises:
        ScheduleError: a deadlock, or an action that needs one which comes later or in no program; the
            message says who waits for whom.
    """
    silent = schedule.with_programs(
        (e for e in program if isinstance(e, Overlap) or e.op not in _BETWEEN_RANKS)
        for program in schedule.programs
    )
    numbered = Numbered(silent)
    ran = completed(numbered, [0.0] * len(numbered), waits_of(numbered))
    return [numbered.action(number) for number in ran.order]
