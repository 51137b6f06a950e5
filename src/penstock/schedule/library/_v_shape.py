"""Schedules on the V placement, from a building block that repeats.

Qi, Wan, Amar, Lin, "Pipeline Parallelism with Controllable Memory", NeurIPS 2024: the times at which one
microbatch runs on each rank are a *building block*; repeated every six units (F, I and W of two stages) it
is a steady schedule, and the time between a stage's F and its W decides the memory. The start and the end
are then squeezed: here by running the ranks in unit steps, each in the order of the block, where

1. the next F or I runs if what it needs is there and the rank may hold one more,
2. else a W that is due,
3. else the F or I after the next, so that an idle step is used but no order changes by more than one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from penstock.errors import InternalError
from penstock.schedule.action import Action, Op
from penstock.schedule.base import Schedule
from penstock.schedule.dependencies import Dependencies, Half
from penstock.schedule.edges import v_shaped

PERIOD = 6
"""F, I and W of a rank's two stages."""

Lane = tuple[int, Op]
"""A stage and an op."""


@dataclass(frozen=True)
class BuildingBlock:
    """The times of one microbatch, as the time between neighbouring ranks.

    Attributes:
        forward: on the way down the ranks, and back up.
        backward: the same of the input gradients.
        turn: idle time between the last stage's forward and backward.
    """

    forward: tuple[int, int]
    backward: tuple[int, int]
    turn: int = 0

    def times(self, rank: int, ranks: int) -> tuple[int, int, int, int]:
        """When a rank runs F on its first and second stage, then I on its second and first."""
        below, hops = ranks - 1 - rank, ranks - 1
        bottom = hops * self.forward[0] + 1
        loss = bottom + hops * self.forward[1] + 1 + self.turn
        back = loss + hops * self.backward[0] + 1
        return (
            rank * self.forward[0],
            bottom + below * self.forward[1],
            loss + rank * self.backward[0],
            back + below * self.backward[1],
        )


@dataclass
class _Rank:
    """A rank on the way: what it has still to start, and what it has started."""

    todo: deque[Action]
    room: int
    """How many more stages' activations it may hold."""
    due: deque[Action] = field(default_factory=deque)
    """The Ws whose I is done."""
    program: list[Action] = field(default_factory=list)

    def start(self, action: Action) -> None:
        self.program.append(action)
        if action.op is Op.F:
            self.room -= 1
        elif action.op is Op.I:
            self.due.append(action._replace(op=Op.W))
        else:
            self.room += 1


def v_schedule(
    name: str, ranks: int, microbatches: int, block: BuildingBlock, held: int
) -> Schedule:
    """Repeat a building block and squeeze it.

    Args:
        name: of the schedule.
        ranks: how many.
        microbatches: how many.
        block: the steady state.
        held: the most microbatches, counted as both stages of a rank, whose activations a rank may hold.
    """
    empty = Schedule(name, v_shaped(ranks), microbatches, ((),) * ranks)
    line = [
        _Rank(deque(_order(rank, ranks, microbatches, block)), 2 * held) for rank in range(ranks)
    ]
    _Steps(empty).run(line)
    return empty.with_programs(rank.program for rank in line)


def _order(rank: int, ranks: int, microbatches: int, block: BuildingBlock) -> list[Action]:
    """A rank's Fs and Is by their times in the repeated block."""
    stages = (rank, 2 * ranks - 1 - rank)
    kinds = ((stages[0], Op.F), (stages[1], Op.F), (stages[1], Op.I), (stages[0], Op.I))
    timed = [
        (time + PERIOD * m, Action(stage, op, m))
        for time, (stage, op) in zip(block.times(rank, ranks), kinds, strict=True)
        for m in range(microbatches)
    ]
    return [action for _, action in sorted(timed, key=lambda pair: pair[0])]


class _Steps:
    """Runs ranks in unit steps; a stage's microbatches stay in order, so counts say what is done."""

    def __init__(self, schedule: Schedule) -> None:
        rule = Dependencies(schedule)
        lanes = [(stage, op) for stage in range(schedule.stages) for op in (Op.F, Op.I)]
        self._done = dict.fromkeys(lanes, 0)
        self._needs: dict[Lane, list[Lane]] = {
            lane: [
                (need.stage, need.op.value if isinstance(need.op, Half) else need.op)
                for need in rule.needs(*lane)
            ]
            for lane in lanes
        }

    def run(self, line: list[_Rank]) -> None:
        while any(rank.todo or rank.due for rank in line):
            chosen = [(rank, action) for rank in line if (action := self._choose(rank))]
            if not chosen:
                raise InternalError("the building block leaves no rank anything to do")
            for rank, action in chosen:
                rank.start(action)
                if action.op is not Op.W:
                    self._done[action.stage, action.op] += 1

    def _choose(self, rank: _Rank) -> Action | None:
        """Take the action that a rank runs in this step off its lists."""
        todo = rank.todo
        if todo and self._may(todo[0], rank.room):
            return todo.popleft()
        if rank.due:
            return rank.due.popleft()
        if len(todo) > 1 and self._may(todo[1], rank.room - (todo[0].op is Op.F)):
            overtakes = todo[1]
            del todo[1]
            return overtakes
        return None

    def _may(self, action: Action, room: int) -> bool:
        stage, op, microbatch, _ = action
        if microbatch is None or (op is Op.F and room < 1) or self._done[stage, op] != microbatch:
            return False
        return all(self._done[lane] > microbatch for lane in self._needs[stage, op])
