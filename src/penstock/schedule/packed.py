"""A schedule as columns of integers.

Validator and simulator look at millions of actions. Here each action is a number: its place in the
programs laid end to end, rank after rank. The actions of one stage, op and peer form a *lane*, one slot a
microbatch; since the rule speaks of lanes, one array operation answers it for all their microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.action import (
    MESSAGE_OPS,
    NEIGHBOUR,
    STAGE_OPS,
    Action,
    Op,
    Overlap,
    Program,
)
from penstock.schedule.base import Schedule, flat
from penstock.schedule.dependencies import Dependencies, Half, Need

Column = NDArray[np.int32]
Mask = NDArray[np.bool_]

OPS = tuple(Op)
CODE = {op: code for code, op in enumerate(OPS)}
NOWHERE = -1


class Lane(NamedTuple):
    """The actions of one stage, op and peer."""

    stage: int
    op: Op
    peer: int | None = None


class Packed:
    """The actions of a schedule, numbered, and what they need.

    Args:
        schedule: any schedule.

    Attributes:
        starts: the number of each rank's first action, and one past the last rank's last.
        lane: the lane of each action.
        microbatch: the microbatch of each action; 0 where it names none.
        halves: the backward halves of overlapped pairs; each follows its forward.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.rule = Dependencies(schedule)
        self._far: dict[Lane, int] = {}
        """Lanes whose peer is not the neighbour, numbered after those of the neighbours."""
        lanes, microbatches = self._columns()
        self.starts = np.cumsum([0, *map(len, lanes)])
        self.lane: Column = np.concatenate(lanes)
        self.microbatch: Column = np.concatenate(microbatches)
        self._where = self._locate()

    def __len__(self) -> int:
        return len(self.lane)

    def _columns(self) -> tuple[list[Column], list[Column]]:
        lanes, microbatches = [], []
        halves = []
        first = 0
        for program in self.schedule.programs:
            actions: Program | list[Action] = program
            if Overlap in set(map(type, program)):
                actions = list(flat(program))
                halves.append(first + _second_halves(program))
            lane, microbatch = self._pack(actions)
            lanes.append(lane)
            microbatches.append(microbatch)
            first += len(lane)
        self.halves = np.concatenate(halves) if halves else np.empty(0, np.int64)
        return lanes, microbatches

    def _pack(self, actions: Sequence[Action | Overlap]) -> tuple[Column, Column]:
        if not actions:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        stages, ops, microbatches, peers = zip(*actions, strict=True)
        lane = np.array(stages, np.int32) * len(OPS)
        lane += np.fromiter(map(CODE.__getitem__, ops), np.int32, len(ops))
        if peers.count(None) < len(peers):
            for i, peer in enumerate(peers):
                if peer is not None:
                    lane[i] = self._number(Lane(stages[i], ops[i], peer))
        if None in microbatches:
            microbatches = tuple(m or 0 for m in microbatches)
        return lane, np.array(microbatches, np.int32)

    def _number(self, lane: Lane) -> int:
        """The number of a lane, given it now where it has none."""
        stage, op, peer = lane
        if peer is None or peer == stage + NEIGHBOUR[op]:
            return stage * len(OPS) + CODE[op]
        return self._far.setdefault(lane, self.schedule.stages * len(OPS) + len(self._far))

    def _locate(self) -> Column:
        """For each slot of each lane the first action there."""
        size = self.schedule.stages * len(OPS) + len(self._far)
        where = np.full(size * self.schedule.microbatches, NOWHERE, np.int32)
        slots = self.slots
        # Of several assignments to one slot the last holds: backwards, the first action wins.
        where[slots[::-1]] = np.arange(len(slots) - 1, -1, -1, dtype=np.int32)
        return where.reshape(size, -1)

    @property
    def first(self) -> Column:
        """For each action the first one like it, most often itself."""
        first: Column = self._where.reshape(-1)[self.slots]
        return first

    @property
    def slots(self) -> NDArray[np.int64]:
        """For each action the number of its lane and microbatch together."""
        return self.lane.astype(np.int64) * self.schedule.microbatches + self.microbatch

    @cached_property
    def op(self) -> NDArray[np.int8]:
        """For each action the code of its op."""
        ops = np.arange(len(self._where), dtype=np.int32) % len(OPS)
        for lane, number in self._far.items():
            ops[number] = CODE[lane.op]
        return ops.astype(np.int8)[self.lane]

    @cached_property
    def stage(self) -> Column:
        """For each action its stage."""
        stages = np.arange(len(self._where), dtype=np.int32) // len(OPS)
        for lane, number in self._far.items():
            stages[number] = lane.stage
        return stages[self.lane]

    @cached_property
    def rank(self) -> Column:
        """For each action the rank whose program holds it."""
        return np.repeat(np.arange(self.schedule.ranks, dtype=np.int32), np.diff(self.starts))

    @cached_property
    def messages(self) -> Mask:
        """Which actions are a SEND or a RECV."""
        return self.having(MESSAGE_OPS)

    @cached_property
    def is_half(self) -> Mask:
        """Which actions are the backward half of an overlapped pair."""
        half = np.zeros(len(self), bool)
        half[self.halves] = True
        return half

    def having(self, ops: frozenset[Op]) -> Mask:
        """Which actions have one of these ops."""
        wanted = np.array([op in ops for op in OPS])
        found: Mask = wanted[self.op]
        return found

    def number(self, action: Action) -> int:
        """The number of an action, or ``NOWHERE``."""
        lane = Lane(action.stage, action.op, action.peer)
        if self._number(lane) >= len(self._where):
            return NOWHERE
        return int(self._where[self._number(lane), action.microbatch or 0])

    def action(self, number: int) -> Action:
        """The action of a number."""
        lane = self._lane(int(self.lane[number]))
        microbatch = None if lane.op in STAGE_OPS else int(self.microbatch[number])
        return Action(lane.stage, lane.op, microbatch, lane.peer)

    def _lane(self, number: int) -> Lane:
        near = self.schedule.stages * len(OPS)
        if number >= near:
            return list(self._far)[number - near]
        stage, code = divmod(number, len(OPS))
        return Lane(stage, OPS[code])

    def position(self, number: int) -> int:
        """The place of an action among the entries of its rank's program."""
        start = self.starts[self.rank[number]]
        pairs = np.searchsorted(self.halves, [start, number + 1])
        return int(number - start - (pairs[1] - pairs[0]))

    def lanes(self) -> Iterator[tuple[Lane, Column]]:
        """Every lane that has an action, with the actions of its microbatches or ``NOWHERE``."""
        for number in np.flatnonzero((self._where != NOWHERE).any(axis=1)).tolist():
            yield self._lane(number), self._where[number]

    def find(self, need: Need) -> Column:
        """For each microbatch the action that meets a need, or ``NOWHERE``."""
        if isinstance(need.op, Half):
            full = self.find(Need(need.stage, Op.B))
            return np.where(full != NOWHERE, full, self.find(Need(need.stage, need.op.value)))
        lane = Lane(need.stage, need.op, need.peer)
        if lane.peer is not None and lane not in self._far:
            return np.full(self.schedule.microbatches, NOWHERE, np.int32)
        row: Column = self._where[self._number(lane)]
        return row


def _second_halves(program: Program) -> NDArray[np.int64]:
    """The places of the backward halves of overlapped pairs in the flat program."""
    pairs = np.array([isinstance(entry, Overlap) for entry in program])
    halves: NDArray[np.int64] = np.flatnonzero(pairs) + np.cumsum(pairs)[pairs]
    return halves
