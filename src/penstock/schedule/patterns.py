"""Which actions a text means: an action's own text form, in which ``*`` stands for anything."""

from __future__ import annotations

import re
from collections.abc import Callable

from penstock.errors import ScheduleError
from penstock.schedule.action import MESSAGE_OPS, STAGE_OPS, WAIT_SEND_OPS, Action, Op

_OPS = "|".join(sorted((op.value for op in Op), key=len, reverse=True))
_PART = r"(\*|0|[1-9][0-9]*)"
_PATTERN = re.compile(rf"{_PART}(\*|{_OPS}){_PART}?(?:@{_PART})?")


def matching(pattern: str) -> Callable[[Action], bool]:
    """A function that tells whether an action is meant by a pattern.

    Args:
        pattern: ``<stage><op><microbatch>``, each of them as in an action's text or ``*``: ``3F0``, ``*F*``,
            ``3*0``, ``3B*``. For any op, and for ops on a whole stage, the microbatch may be left out:
            ``3*`` is all that stage 3 does, ``*UNSHARD`` every unshard, ``*`` everything. A message may
            name its peer stage, ``0SEND_F*@5``; without one it is any.

    Raises:
        ScheduleError: it is no pattern, or means nothing.
    """
    stage, op, microbatch, peer = _parts(pattern)

    def matches(action: Action) -> bool:
        return (
            stage in ("*", str(action.stage))
            and op in ("*", action.op.value)
            and microbatch in ("*", str(action.microbatch))
            and (peer == "*" or (action.op in _WITH_PEER and peer == str(action.peer_stage)))
        )

    return matches


_WITH_PEER = MESSAGE_OPS | WAIT_SEND_OPS


def _parts(pattern: str) -> tuple[str, str, str, str]:
    found = _PATTERN.fullmatch("**" if pattern == "*" else pattern)
    if found is None:
        raise ScheduleError(
            f"{pattern!r} matches no kind of action; write <stage><op><microbatch> "
            "with * for anything, such as "
            f"3F0, *F*, 3*0 or 3*; ops are {', '.join(op.value for op in Op)}"
        )
    stage, op, microbatch, peer = found.groups()
    whole = op in {o.value for o in STAGE_OPS}
    if microbatch is None and op != "*" and not whole:
        raise ScheduleError(f"{pattern!r} lacks a microbatch; {pattern}* means all of them")
    if whole and microbatch not in (None, "*"):
        raise ScheduleError(
            f"{pattern!r} cannot match: {op} is done once for all microbatches and has none in its name"
        )
    if peer and op != "*" and op not in {o.value for o in _WITH_PEER}:
        raise ScheduleError(
            f"{pattern!r} cannot match: {op} is not a message and has no peer stage"
        )
    return stage, op, microbatch or "*", peer or "*"
