"""A rank's row of an interleaved schedule, for those who write schedules of their own."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from penstock.pipelining.rows.actions import ActionTuple, ComputationType

FORWARD = ComputationType.FORWARD
INPUT = ComputationType.BACKWARD_INPUT
WEIGHT = ComputationType.BACKWARD_WEIGHT
FULL = ComputationType.FULL_BACKWARD


def interleaved_row(  # noqa: PLR0913 - torch's arguments
    n_local_stages: int,
    pp_group_size: int,
    warmup_ops: int,
    fwd_bwd_ops: int,
    cooldown_ops: int,
    rank: int,
    forward_stage_index: Callable[[int], int],
    backward_stage_index: Callable[[int], int],
    num_1f1b_microbatches: int = 0,
    enable_zero_bubble: bool = False,
) -> list[ActionTuple | None]:
    """Forwards, then pairs of a forward and a backward, then backwards; ``None`` where the rank idles.

    Args:
        n_local_stages: stages of the rank.
        pp_group_size: how many ranks there are.
        warmup_ops: how many forwards come first.
        fwd_bwd_ops: how many pairs follow.
        cooldown_ops: how many backwards come last.
        rank: whose row it is.
        forward_stage_index: the stage whose forward stands at a place.
        backward_stage_index: the stage whose backward stands at a place.
        num_1f1b_microbatches: with halves, how many inputs' halves come before the first weights' half.
        enable_zero_bubble: whether backward comes in halves.
    """
    row = _Row(rank)
    for place in range(warmup_ops):
        row.add(FORWARD, forward_stage_index(place))
    if warmup_ops:
        ahead = n_local_stages * pp_group_size + 2 * (pp_group_size - 1 - rank)
        until = pp_group_size - 1 if enable_zero_bubble else ahead - warmup_ops
        row.idle(until - rank)
    owed: deque[int] = deque()
    for place in range(warmup_ops, warmup_ops + fwd_bwd_ops + cooldown_ops):
        if place < warmup_ops + fwd_bwd_ops:
            row.add(FORWARD, forward_stage_index(place))
        elif not enable_zero_bubble:
            row.idle(1)
        stage = backward_stage_index(place)
        row.add(INPUT if enable_zero_bubble else FULL, stage)
        owed.append(stage)
        if enable_zero_bubble and place - warmup_ops >= num_1f1b_microbatches:
            row.add(WEIGHT, owed.popleft())
    for stage in owed if enable_zero_bubble else ():
        row.add(WEIGHT, stage)
    return row.actions


class _Row:
    """A row that grows; each kind of work of a stage takes its microbatches in order."""

    def __init__(self, idle: int) -> None:
        self.actions: list[ActionTuple | None] = [None] * idle
        self._next: Counter[tuple[ComputationType, int]] = Counter()

    def idle(self, count: int) -> None:
        self.actions += [None] * count

    def add(self, kind: ComputationType, stage: int) -> None:
        self.actions.append(ActionTuple(stage, kind, self._next[kind, stage]))
        self._next[kind, stage] += 1


def warm_up(
    rank: int,
    n_local_stages: int,
    microbatches_per_round: int,
    pp_group_size: int,
    n_microbatches: int,
    multiply_factor: int = 2,
) -> int:
    """How many forwards of a rank come before its first backward in an interleaved schedule."""
    least = (n_local_stages - 1) * microbatches_per_round
    ahead = least + multiply_factor * (pp_group_size - 1 - rank)
    return min(ahead, n_microbatches * n_local_stages)
