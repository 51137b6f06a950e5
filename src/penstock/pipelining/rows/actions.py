"""Actions and their kinds under torch's names, and the way to and from Penstock's own."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from penstock.schedule import Action, Op, Overlap, parse_action
from penstock.schedule.action import OVERLAPPED, Entry


class ComputationType(str, Enum):  # noqa: UP042 - its text is the member's, as users of torch print it
    """A kind of work."""

    FORWARD = "F"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    WAIT_SEND_F = "WAIT_SEND_F"
    WAIT_SEND_B = "WAIT_SEND_B"
    FULL_BACKWARD = "B"
    OVERLAP_F_B = OVERLAPPED
    REDUCE_GRAD = "REDUCE_GRAD"

    @staticmethod
    def from_str(action: str) -> ComputationType:
        """The kind that a text names.

        Raises:
            RuntimeError: none.
        """
        try:
            return ComputationType(action)
        except ValueError as error:
            known = ", ".join(kind.value for kind in ComputationType)
            raise RuntimeError(f"{action!r} is no kind of work; there are {known}") from error


class ActionTuple(NamedTuple):
    """One kind of work on one stage for one microbatch; two of them where a pair overlaps."""

    stage_index: int
    computation_type: ComputationType
    microbatch_index: int | None = None
    sub_actions: tuple[ActionTuple, ...] | None = None

    def __str__(self) -> str:
        return self.__repr__()

    def __repr__(self) -> str:
        if self.sub_actions is not None:
            pair = ";".join(map(repr, self.sub_actions))
            return f"({pair}){self.computation_type.value}"
        microbatch = "" if self.microbatch_index is None else self.microbatch_index
        return f"{self.stage_index}{self.computation_type.value}{microbatch}"

    @property
    def is_compute_op(self) -> bool:
        """Whether it computes, rather than moves data or parameters."""
        return self.computation_type.value in ("F", "I", "W", "B", OVERLAPPED)

    @staticmethod
    def from_str(action_string: str) -> ActionTuple | None:
        """Read the text form; nothing for an empty text.

        Raises:
            RuntimeError: the text is no action.
        """
        text = action_string.strip()
        if not text:
            return None
        try:
            return to_tuple(parse_action(text))
        except ValueError as error:
            raise RuntimeError(f"invalid action: {error}") from error


def to_tuple(entry: Entry) -> ActionTuple:
    """An action under torch's names."""
    if isinstance(entry, Overlap):
        pair = (to_tuple(entry.forward), to_tuple(entry.backward))
        return ActionTuple(-1, ComputationType.OVERLAP_F_B, None, pair)
    return ActionTuple(entry.stage, ComputationType(entry.op.value), entry.microbatch)


def to_entry(found: ActionTuple) -> Entry:
    """An action under Penstock's names."""
    if found.sub_actions is not None:
        # Torch takes a pair in either order.
        pair = sorted(map(_to_action, found.sub_actions), key=lambda part: part.op is not Op.F)
        return Overlap(*pair)
    return _to_action(found)


def _to_action(found: ActionTuple) -> Action:
    return Action(found.stage_index, Op(found.computation_type.value), found.microbatch_index)


def to_order(programs: Iterable[Iterable[Entry]]) -> dict[int, list[ActionTuple | None]]:
    """Each rank's actions, by rank."""
    return {rank: [to_tuple(entry) for entry in row] for rank, row in enumerate(programs)}
