"""Actions (an op on a stage for a microbatch), their text form, and patterns that match it.

An action is written ``<stage><op><microbatch>``: ``2F0``, ``0SEND_F1``, ``3W2``, ``0UNSHARD``. Where
sequences are cut, the slice follows: ``2F0.1``. A message that does not go to the neighbouring stage names
its peer stage after an ``@``: ``0SEND_F1@5``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from penstock.errors import ScheduleError


class Op(StrEnum):
    """A kind of work. The letters are the field's; the value is the text form."""

    F = "F"
    """Forward."""
    I = "I"  # noqa: E741 - the field's letter for the input half of backward
    """Backward for the stage's inputs."""
    W = "W"
    """Backward for the stage's weights."""
    B = "B"
    """Full backward: I then W."""
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    WAIT_SEND_F = "WAIT_SEND_F"
    WAIT_SEND_B = "WAIT_SEND_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    WAIT_REDUCE_GRAD = "WAIT_REDUCE_GRAD"
    OFFLOAD = "OFFLOAD"
    """Begin to move what F has saved for backward to the host."""
    RELOAD = "RELOAD"
    """Begin to bring it back."""


COMPUTE_OPS = frozenset({Op.F, Op.I, Op.W, Op.B})
GRADIENT_OPS = frozenset({Op.I, Op.B})
"""Ops that produce the gradient for the previous stages."""
SEND_OPS = frozenset({Op.SEND_F, Op.SEND_B})
RECV_OPS = frozenset({Op.RECV_F, Op.RECV_B})
MESSAGE_OPS = SEND_OPS | RECV_OPS
WAIT_SEND_OPS = frozenset({Op.WAIT_SEND_F, Op.WAIT_SEND_B})
PEER_OPS = MESSAGE_OPS | WAIT_SEND_OPS
"""Ops with a stage at the other end."""
STAGE_OPS = frozenset({Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD, Op.WAIT_REDUCE_GRAD})
"""Ops on a whole stage, which name no microbatch."""

# Distance to the neighbour: an activation goes to the next stage, a gradient to the previous one.
NEIGHBOUR = {
    Op.SEND_F: 1,
    Op.RECV_F: -1,
    Op.SEND_B: -1,
    Op.RECV_B: 1,
    Op.WAIT_SEND_F: 1,
    Op.WAIT_SEND_B: -1,
}


class Slice(NamedTuple):
    """A slice of a microbatch's sequences, where a schedule cuts them. Written ``0.1``.

    Args:
        microbatch: index of the microbatch, from 0.
        number: index of the slice in it, from 0.
    """

    microbatch: int
    number: int

    def __str__(self) -> str:
        return f"{self.microbatch}.{self.number}"


class Action(NamedTuple):
    """One op on one stage, for one microbatch if the op has one.

    Args:
        stage: index of the stage, from 0.
        op: what to do.
        microbatch: index of the microbatch, from 0, or one of its slices; ``None`` for ops on a whole stage.
        peer: for a message, the stage at its other end; ``None`` means the neighbouring stage.
    """

    stage: int
    op: Op
    microbatch: int | Slice | None = None
    peer: int | None = None

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else self.microbatch
        peer = "" if self.peer is None else f"@{self.peer}"
        return f"{self.stage}{self.op.value}{microbatch}{peer}"

    @property
    def peer_stage(self) -> int:
        """The stage at the other end of a message."""
        return self.stage + NEIGHBOUR[self.op] if self.peer is None else self.peer


OVERLAPPED = "OVERLAP_F_B"
"""The kind of work of an overlapped pair."""


class Overlap(NamedTuple):
    """A forward and a backward that run at the same time on one rank (``OVERLAP_F_B``).

    Written ``(0F1;1B2)OVERLAP_F_B``.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward}){OVERLAPPED}"


Entry = Action | Overlap
"""One position of a program."""
Program = tuple[Entry, ...]
"""One rank's actions, in the order in which it starts them."""


def halves(entry: Entry) -> tuple[Action, ...]:
    """The actions of an entry: of an overlapped pair its forward, then its backward."""
    return entry if isinstance(entry, Overlap) else (entry,)


def microbatch_of(action: Action) -> int | None:
    """The microbatch of an action, also if it is for one slice of it."""
    return action[2].microbatch if isinstance(action[2], Slice) else action[2]


def computes(entry: Entry) -> bool:
    """Tell if an entry is an F, I, W or B, or an overlapped pair of them."""
    return isinstance(entry, Overlap) or entry.op in COMPUTE_OPS


def message(stage: int, op: Op, microbatch: int | Slice | None, peer: int) -> Action:
    """Make a message action; ``peer`` is left out if it is the neighbour: one form per message."""
    neighbour = peer == stage + NEIGHBOUR[op]
    return Action(stage, op, microbatch, None if neighbour else peer)


_OPS = "|".join(sorted((op.value for op in Op), key=len, reverse=True))
_SHOWN = 60
"""The most characters of an invalid text that an error shows."""
_NUMBER = "(0|[1-9][0-9]{0,8})"
_ACTION = re.compile(rf"{_NUMBER}({_OPS})(?:{_NUMBER}(?:\.{_NUMBER})?)?(?:@{_NUMBER})?")
_OVERLAP = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


def parse_action(text: str) -> Entry:
    """Read the text form of an action.

    Args:
        text: an action: ``2F0``, ``2F0.1``, ``0SEND_F1``, ``0SEND_F1@5``, ``0UNSHARD`` or
            ``(0F1;1B2)OVERLAP_F_B``.

    Raises:
        ScheduleError: the text is not an action; the message shows the form.
    """
    pair = _OVERLAP.fullmatch(text)
    if pair is None:
        return _parse_one(text)
    forward, backward = _parse_one(pair[1]), _parse_one(pair[2])
    if forward.op is not Op.F or backward.op not in GRADIENT_OPS:
        raise ScheduleError(f"{text[:_SHOWN]!r}: OVERLAP_F_B must hold an F and then a B or I")
    return Overlap(forward, backward)


def _parse_one(text: str) -> Action:
    parts = _ACTION.fullmatch(text)
    if parts is None:
        raise ScheduleError(
            f"{text[:_SHOWN]!r} is not an action; write <stage><op><microbatch>, such as 2F0 or 0SEND_F1"
        )
    stage, op, whole, number, peer = parts.groups()
    microbatch = _index(whole) if number is None else Slice(int(whole), int(number))
    action = Action(int(stage), Op(op), microbatch, _index(peer))
    problem = misfit(action)
    if problem:
        raise ScheduleError(f"{text!r}: {problem}")
    return action


def _index(digits: str | None) -> int | None:
    return None if digits is None else int(digits)


def misfit(action: Action) -> str | None:
    """Say why the parts of an action do not fit together, or return ``None``."""
    if action.op in STAGE_OPS:
        return f"{action.op.value} names no microbatch" if action.microbatch is not None else None
    if action.microbatch is None:
        return f"{action.op.value} needs a microbatch"
    if action.peer is not None and action.op not in NEIGHBOUR:
        return f"{action.op.value} is not a message and names no peer"
    return None


# ---- patterns: the text form of an action, in which ``*`` stands for anything


_PART = r"(\*|0|[1-9][0-9]*)"
_PATTERN = re.compile(rf"{_PART}(\*|{_OPS})({_PART[1:-1]}|\d+\.\d+)?(?:@{_PART})?")


def matching(pattern: str) -> Callable[[Action], bool]:
    """Make a function that tests whether an action matches a pattern.

    Args:
        pattern: ``<stage><op><microbatch>``, each of them as in an action's text or ``*``: ``3F0``, ``*F*``,
            ``3*0``, ``3B*``. The microbatch may be left out if the op is ``*`` or acts on a whole stage:
            ``3*`` matches all that stage 3 does, ``*UNSHARD`` every unshard, ``*`` everything. ``3F0``
            matches all slices of a microbatch, ``3F0.1`` one. A message may name its peer stage, as in
            ``0SEND_F*@5``; otherwise any peer matches.

    Raises:
        ScheduleError: the text is not a pattern, or no action can match it.
    """
    stage, op, microbatch, peer = _pattern_parts(pattern)

    def matches(action: Action) -> bool:
        return (
            stage in ("*", str(action.stage))
            and op in ("*", action.op.value)
            and (microbatch in ("*", str(action[2])) or microbatch == str(microbatch_of(action)))
            and (peer == "*" or (action.op in PEER_OPS and peer == str(action.peer_stage)))
        )

    return matches


def _pattern_parts(pattern: str) -> tuple[str, str, str, str]:
    parts = _PATTERN.fullmatch("**" if pattern == "*" else pattern)
    if parts is None:
        raise ScheduleError(
            f"{pattern!r} matches no kind of action; write <stage><op><microbatch> with * for anything, such "
            f"as 3F0, *F*, 3*0 or 3*; ops are {', '.join(op.value for op in Op)}"
        )
    stage, op, microbatch, peer = parts.groups()
    is_of_stage = op in {o.value for o in STAGE_OPS}
    if microbatch is None and op != "*" and not is_of_stage:
        raise ScheduleError(f"{pattern!r} lacks a microbatch; {pattern}* means all of them")
    if is_of_stage and microbatch not in (None, "*"):
        raise ScheduleError(
            f"{pattern!r} cannot match: {op} is done once for all microbatches and has none in its name"
        )
    if peer and op != "*" and op not in {o.value for o in PEER_OPS}:
        raise ScheduleError(
            f"{pattern!r} cannot match: {op} is not a message and has no peer stage"
        )
    return stage, op, microbatch or "*", peer or "*"
