"""What the actions of a schedule need of each other: the rule of ``dependencies.py`` on whole columns."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.action import (
    COMPUTE_OPS,
    MESSAGE_OPS,
    RECV_OPS,
    STAGE_OPS,
    WAIT_SEND_OPS,
    Op,
)
from penstock.schedule.base import Schedule
from penstock.schedule.dependencies import Need
from penstock.schedule.packed import NOWHERE, Column, Lane, Mask, Packed


class Block(NamedTuple):
    """One need of one lane, for all its microbatches: ``after[i]`` needs ``before[i]``."""

    lane: Lane
    need: Need
    after: Column
    before: Column
    microbatch: NDArray[np.int64]


class Wiring:
    """The needs of a schedule's actions, by their numbers.

    Args:
        schedule: any schedule.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.packed = Packed(schedule)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Every need of every lane."""
        every = np.arange(self.packed.schedule.microbatches, dtype=np.int64)
        return tuple(
            self._block(lane, at, need, every)
            for lane, at in self.packed.lanes()
            for need in self.packed.rule.needs(*lane)
        )

    def _block(self, lane: Lane, at: Column, need: Need, every: NDArray[np.int64]) -> Block:
        met = self.packed.find(need)
        if lane.op is Op.REDUCE_GRAD:
            return Block(lane, need, np.broadcast_to(at[0], met.shape), met, every)
        if isinstance(need.op, Op) and need.op in STAGE_OPS:
            met = np.broadcast_to(met[0], met.shape)
        there = at != NOWHERE
        if there.all():
            return Block(lane, need, at, met, every)
        return Block(lane, need, at[there], met[there], every[there])

    @cached_property
    def partner(self) -> Column:
        """For each SEND and RECV the action at the other end, else ``NOWHERE``."""
        partner = np.full(len(self.packed), NOWHERE, np.int32)
        for block in self.blocks:
            if block.lane.op in RECV_OPS:
                partner[block.after] = block.before
                met = block.before != NOWHERE
                partner[block.before[met]] = block.after[met]
        return partner

    @cached_property
    def waits(self) -> tuple[Column, ...]:
        """What each action waits for beyond its own rank, else ``NOWHERE``; a column per wait it may have.

        A message is given by its end on the rank that waits: the RECV of a value, the SEND of a WAIT_SEND.
        An overlapped pair waits for both its halves at its first.
        """
        columns: list[Column] = []
        for block in self.blocks:
            if block.lane.op not in MESSAGE_OPS:
                waits = self._beyond(block)
                at = block.after[waits] - self.packed.is_half[block.after[waits]]
                _spread(columns, len(self.packed), at, block.before[waits])
        return tuple(columns)

    def late(self, block: Block) -> Mask:
        """Which needs of a block stand on the same rank, but not before what needs them.

        An overlapped pair is one place: neither half is before the other. A RECV may stand anywhere.
        """
        if block.lane.op in RECV_OPS:
            return np.zeros(len(block.after), bool)
        here = self.packed.rank[block.after] == self.packed.rank[block.before]
        after = block.after - self.packed.is_half[block.after]
        before = block.before - self.packed.is_half[block.before]
        late: Mask = (block.before != NOWHERE) & here & (before >= after)
        return late

    def _beyond(self, block: Block) -> Mask:
        """Which needs of a block are messages, or actions of another rank."""
        there: Mask = block.before != NOWHERE
        if block.lane.op in WAIT_SEND_OPS or block.need.op in MESSAGE_OPS:
            return there
        if block.lane.op not in COMPUTE_OPS:
            return np.zeros(len(there), bool)
        there &= self.packed.rank[block.after] != self.packed.rank[block.before]
        return there


def _spread(columns: list[Column], size: int, after: Column, before: Column) -> None:
    """Put each pair into the first column that is free for it."""
    for column in columns:
        free = column[after] == NOWHERE
        column[after[free]] = before[free]
        after, before = after[~free], before[~free]
    if len(after):
        column = np.full(size, NOWHERE, np.int32)
        column[after] = before
        columns.append(column)
