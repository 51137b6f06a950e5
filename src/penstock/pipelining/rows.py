"""Schedules as rows of actions, in torch's form, and the conversion to and from Penstock's schedules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from penstock.errors import InputFileError, ScheduleError, UsageError
from penstock.pipeline.plan import prove
from penstock.pipelining._utils import PlacementError, RowsError
from penstock.schedule import (
    Action,
    Op,
    Overlap,
    Placement,
    Schedule,
    Slice,
    from_csv,
    parse_action,
)
from penstock.schedule.action import OVERLAPPED, Entry
from penstock.schedule.reading import read_text

# ---- actions and their kinds


class ComputationType(str, Enum):  # noqa: UP042 - str() must give the member, as users of torch print it
    """An operation."""

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
    WAIT_REDUCE_GRAD = "WAIT_REDUCE_GRAD"

    @staticmethod
    def from_str(action: str) -> ComputationType:
        """Return the operation with this name.

        Raises:
            RuntimeError: there is none.
        """
        try:
            return ComputationType(action)
        except ValueError as error:
            known = ", ".join(op.value for op in ComputationType)
            raise RuntimeError(f"{action!r} is no operation; there are {known}") from error


class ActionTuple(NamedTuple):
    """An operation on one stage for one microbatch, or an overlapped pair of them."""

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
        """Whether the action computes, rather than moving data or parameters."""
        return self.computation_type.value in ("F", "I", "W", "B", OVERLAPPED)

    @staticmethod
    def from_str(action_string: str) -> ActionTuple | None:
        """Parse an action; None for an empty string.

        Raises:
            RuntimeError: the string is not an action.
        """
        text = action_string.strip()
        if not text:
            return None
        try:
            return to_tuple(parse_action(text))
        except ValueError as error:
            raise RuntimeError(f"invalid action: {error}") from error


def to_tuple(entry: Entry) -> ActionTuple:
    """Convert Penstock's action to torch's form."""
    if isinstance(entry, Overlap):
        pair = (to_tuple(entry.forward), to_tuple(entry.backward))
        return ActionTuple(-1, ComputationType.OVERLAP_F_B, None, pair)
    if isinstance(entry.microbatch, Slice):
        raise UsageError(f"{entry}: torch's schedules have no slices of microbatches")
    return ActionTuple(entry.stage, ComputationType(entry.op.value), entry.microbatch)


def to_entry(action: ActionTuple) -> Entry:
    """Convert torch's action to Penstock's form."""
    if action.sub_actions is not None:
        # Torch allows a pair in either order.
        pair = sorted(map(_to_action, action.sub_actions), key=lambda part: part.op is not Op.F)
        return Overlap(*pair)
    return _to_action(action)


def _to_action(action: ActionTuple) -> Action:
    return Action(action.stage_index, Op(action.computation_type.value), action.microbatch_index)


def to_order(programs: Iterable[Iterable[Entry]]) -> dict[int, list[ActionTuple | None]]:
    """Convert each rank's program to torch's actions."""
    return {rank: [to_tuple(entry) for entry in row] for rank, row in enumerate(programs)}


# ---- the actions of all ranks


Row = Sequence[ActionTuple | None]
Order = Mapping[int, Row]
"""Each rank's actions, by rank; ``None`` stands for idle time and is ignored."""


def schedule_of(
    order: Order,
    *,
    stages: int | None = None,
    microbatches: int | None = None,
) -> Schedule:
    """Build the schedule of these actions.

    Args:
        order: the actions.
        stages: the number of stages; by default, as many as the actions name.
        microbatches: the number of microbatches; by default, likewise.

    Raises:
        PlacementError: the actions form no schedule.
    """
    parts = [
        (rank, part)
        for rank, row in order.items()
        for action in row
        if action is not None
        for part in action.sub_actions or (action,)
    ]
    count = stages or 1 + max((part.stage_index for _, part in parts), default=0)
    ranks = dict.fromkeys(range(count), 0)
    ranks |= {part.stage_index: rank for rank, part in parts if part.is_compute_op}
    if microbatches is None:
        microbatches = 1 + max((part.microbatch_index or 0 for _, part in parts), default=0)
    programs = tuple(
        tuple(to_entry(action) for action in order[rank] if action is not None)
        for rank in sorted(order)
    )
    try:
        return Schedule(
            "by hand",
            Placement(tuple(ranks[stage] for stage in range(count))),
            microbatches,
            programs,
        )
    except ScheduleError as error:
        raise PlacementError(str(error)) from error


def check_trains(schedule: Schedule, *, wanted: bool = True) -> None:
    """Check that a schedule has a backward, if one is wanted."""
    if wanted and not schedule.trains:
        raise PlacementError(
            f"{schedule.name} has forwards and no backward, so that the loss would train nothing; add the "
            "backwards, or leave out loss_fn"
        )


def proven(schedule: Schedule) -> Schedule:
    """Prove that a schedule completes, and return it; an error lists every reason why it does not."""
    try:
        prove(schedule)
    except ScheduleError as error:
        raise PlacementError(str(error)) from error
    return schedule


FORMATS = ("compute_only", "compute_comms")


def check_format(format: str) -> None:
    """Raise NotImplementedError for an unknown format."""
    if format not in FORMATS:
        raise NotImplementedError(f"format={format!r}: must be {FORMATS[0]!r} or {FORMATS[1]!r}")


def check_computes(order: Order) -> None:
    """Check that the actions only compute."""
    for rank, row in order.items():
        for place, action in enumerate(row):
            if action is not None and not action.is_compute_op:
                raise PlacementError(
                    f"{action} at rank {rank}, position {place}: a 'compute_only' schedule has no messages "
                    "and no UNSHARD, RESHARD or REDUCE_GRAD; leave them out, or say format='compute_comms'"
                )


def read_rows(filename: str | Path) -> Schedule:
    """Read a schedule from a file with one row per rank."""
    try:
        return from_csv(read_text(Path(filename)), name="CSV")
    except InputFileError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        raise RowsError(str(error)) from error
