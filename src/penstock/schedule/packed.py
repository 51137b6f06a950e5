"""A schedule in arrays, and which actions wait for which: fast to check and to simulate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.action import (
    COMPUTE_OPS,
    MESSAGE_OPS,
    NEIGHBOUR,
    RECV_OPS,
    STAGE_OPS,
    WAIT_SEND_OPS,
    Action,
    Op,
    Overlap,
    Program,
)
from penstock.schedule.base import Schedule, flat
from penstock.schedule.dependencies import Dependencies, Half, Need

# ---- a schedule as columns of integers
# The validator and the simulator look at millions of actions. Here each action is a number: its place in the
# programs laid end to end, rank after rank. The actions of one stage, op and peer form a *lane*, with one
# slot per microbatch; since the rule speaks of lanes, one array operation answers it for all their
# microbatches.

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
        starts: the number of each rank's first action, and after these one past the last action of all.
        lane: the number of each action's lane.
        microbatch: the microbatch of each action; 0 where it names none.
        halves: the backward halves of overlapped pairs; each follows its forward.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.rule = Dependencies(schedule)
        self._far: dict[Lane, int] = {}
        """Lanes whose peer is not the neighbour, numbered after all the others."""
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
        """The number of a lane, which it gets now if it has none."""
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
        """For each action the first equal one, most often itself."""
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
    """The places of the backward halves of overlapped pairs in the program without pairs."""
    pairs = np.array([isinstance(entry, Overlap) for entry in program])
    halves: NDArray[np.int64] = np.flatnonzero(pairs) + np.cumsum(pairs)[pairs]
    return halves


# ---- what the actions of a schedule need of each other: the rule of ``dependencies.py`` on whole columns


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
        """What each action waits for beyond its own rank, else ``NOWHERE``; one column for each such wait.

        A message is given by its end on the rank that waits: the RECV of a value, the SEND of a WAIT_SEND.
        An overlapped pair waits at its first half for what both halves need.
        """
        columns: list[Column] = []
        for block in self.blocks:
            if block.lane.op not in MESSAGE_OPS:
                waits = self._beyond(block)
                at = block.after[waits] - self.packed.is_half[block.after[waits]]
                _spread(columns, len(self.packed), at, block.before[waits])
        return tuple(columns)

    def late(self, block: Block) -> Mask:
        """Which needs of a block stand on the same rank, but not before the action that needs them.

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
