"""Schedules on the V placement: each microbatch passes the ranks on the way down and again on the way back.

Rank ``r`` of ``p`` holds stages ``r`` and ``2p - 1 - r``, so the loss is on the rank that began. ZB-V, V-Half
and V-Min are one idea with different times, a *building block* that repeats; DualPipeV is written phase by
phase, and so is ZB-V where there are microbatches enough for all its phases.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.errors import InternalError, ScheduleError
from penstock.schedule.action import Action, Entry, Op, Overlap
from penstock.schedule.base import Schedule
from penstock.schedule.dependencies import Dependencies, Half
from penstock.schedule.edges import v_shaped

# ---- from a building block that repeats
# Qi, Wan, Amar, Lin, "Pipeline Parallelism with Controllable Memory", NeurIPS 2024: the times at which one
# microbatch runs on each rank are a *building block*; repeated every six units (F, I and W of two stages) it
# is a steady schedule, and the time between a stage's F and its W decides the memory. The start and the end
# are then squeezed: here by running the ranks in unit steps, each in the order of the block, where
#
# 1. the next F or I runs if what it needs is there and the rank may hold one more,
# 2. else a W that is due,
# 3. else the F or I after the next, so that an idle step is used but no order changes by more than one.

_PERIOD = 6
"""F, I and W of a rank's two stages."""

_Lane = tuple[int, Op]
"""A stage and an op."""


@dataclass(frozen=True)
class _Block:
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


def _squeezed(name: str, ranks: int, microbatches: int, block: _Block, held: int) -> Schedule:
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


def _order(rank: int, ranks: int, microbatches: int, block: _Block) -> list[Action]:
    """A rank's Fs and Is by their times in the repeated block."""
    stages = (rank, 2 * ranks - 1 - rank)
    kinds = ((stages[0], Op.F), (stages[1], Op.F), (stages[1], Op.I), (stages[0], Op.I))
    timed = [
        (time + _PERIOD * m, Action(stage, op, m))
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
        self._needs: dict[_Lane, list[_Lane]] = {
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


def v_half(ranks: int, microbatches: int) -> Schedule:
    """Half of 1F1B's memory; two stages per rank in a V, any number of ranks and microbatches.

    Its bubble is as large as 1F1B's. With an even number of ranks two actions of a block would fall on one
    time of the period; waiting at the loss moves them apart.
    """
    turn = 1 if ranks % 2 else 4
    block = _Block(forward=(1, 2), backward=(1, 2), turn=turn)
    return _squeezed("V-Half", ranks, microbatches, block, held=(ranks + 2) // 2)


def v_min(ranks: int, microbatches: int) -> Schedule:
    """A third of 1F1B's memory; two stages per rank in a V, any number of ranks and microbatches.

    Its bubble is larger; each microbatch goes down and up the ranks without a pause. With a multiple of three
    ranks two actions of a block would fall on one time of the period; waiting at the loss moves them apart.
    """
    turn = 0 if ranks % 3 else 2
    block = _Block(forward=(1, 1), backward=(1, 1), turn=turn)
    return _squeezed("V-Min", ranks, microbatches, block, held=(ranks + 4) // 3)


# ---- written phase by phase


class _Writer:
    """Writes the program of a rank: each op on one of its two stages takes the stage's next microbatch.

    Args:
        rank: which rank.
        ranks: how many there are.

    Attributes:
        down: the stage that microbatches pass on the way from the first rank to the last.
        up: the stage that they pass on the way back.
        below: how many ranks come after this one.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank = rank
        self.down, self.up = rank, 2 * ranks - 1 - rank
        self.below = ranks - 1 - rank
        self._begun: Counter[tuple[int, bool]] = Counter()
        self._due: deque[Action] = deque()

    def forward(self, stage: int) -> Action:
        """F of the next microbatch."""
        return self._next(stage, Op.F)

    def full(self, stage: int) -> Action:
        """B of the next microbatch."""
        return self._next(stage, Op.B)

    def pair(self, forward: int, backward: int) -> Overlap:
        """F of one stage overlapped with B of the other."""
        return Overlap(self.forward(forward), self.full(backward))

    def input(self, stage: int) -> Action:
        """I of the next microbatch; its W is due from now on."""
        action = self._next(stage, Op.I)
        self._due.append(action._replace(op=Op.W))
        return action

    def weight(self) -> Iterator[Action]:
        """The W that has been due for longest, if any is."""
        if self._due:
            yield self._due.popleft()

    def weights(self) -> Iterator[Action]:
        """All Ws that are due."""
        while self._due:
            yield self._due.popleft()

    def _next(self, stage: int, op: Op) -> Action:
        key = (stage, op is Op.F)
        self._begun[key] += 1
        return Action(stage, op, self._begun[key] - 1)


_ZB_V = _Block(forward=(3, 3), backward=(3, 3))


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """No bubble within a rank in 1F1B's memory; two stages per rank in a V, any ranks and microbatches.

    Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 6. A microbatch's activations
    are held for as long on each rank. Rank ``r`` starts and ends ``r`` late, as in ZB-H2.
    """
    if microbatches < 2 * ranks - 1:
        # Too few for the phases below: squeeze the steady block that they are made of.
        return _squeezed("ZB-V", ranks, microbatches, _ZB_V, held=ranks)
    placement = v_shaped(ranks)
    programs = (
        tuple(_zb_v_program(_Writer(rank, ranks), ranks, microbatches)) for rank in range(ranks)
    )
    return Schedule("ZB-V", placement, microbatches, tuple(programs))


def _zb_v_program(rank: _Writer, ranks: int, microbatches: int) -> Iterator[Action]:
    down, up = rank.down, rank.up
    for _ in range(2 * rank.below + 1):
        yield rank.forward(down)
    for _ in range(rank.rank):
        yield from (rank.forward(up), rank.forward(down))
    for _ in range(rank.below + 1):
        yield from (rank.forward(up), rank.input(up), *rank.weight())
    for turn in range(microbatches - ranks):
        if turn < microbatches - ranks - rank.below:
            yield rank.forward(down)
        yield from (rank.input(down), *rank.weight())
        yield from (rank.forward(up), rank.input(up), *rank.weight())
    for _ in range(rank.rank):
        yield from (rank.input(down), rank.input(up))
    for _ in range(rank.below + 1):
        yield from (rank.input(down), *rank.weight())
    yield from rank.weights()


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """Overlapped F and B; two stages per rank in a V, at least twice as many microbatches as ranks.

    DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1, for DualPipe; Qi et al., "DualPipe could
    be better without the Dual", 2025, for the cut in half. A pair of F and B, of different microbatches, runs
    at the same time, so that each hides the other's communication.
    """
    if microbatches < 2 * ranks:
        raise ScheduleError(
            f"DualPipeV on ranks={ranks} needs microbatches={2 * ranks} or more, not {microbatches}: "
            "with fewer there is nothing to overlap; take ZB-V, or more microbatches"
        )
    programs = (
        tuple(_dualpipe_program(_Writer(rank, ranks), ranks, microbatches)) for rank in range(ranks)
    )
    return Schedule("DualPipeV", v_shaped(ranks), microbatches, tuple(programs))


def _dualpipe_program(rank: _Writer, ranks: int, microbatches: int) -> Iterator[Entry]:
    for _ in range(2 * rank.below):
        yield rank.forward(rank.down)
    for _ in range(rank.rank + 1):
        yield from (rank.forward(rank.down), rank.forward(rank.up))
    for _ in range(rank.below):
        yield from (rank.input(rank.up), *rank.weight(), rank.forward(rank.up))
    yield from _steady(rank, microbatches - 2 * ranks + rank.rank + 1)
    for _ in range(rank.below):
        yield from (rank.full(rank.up), rank.pair(rank.up, rank.down))
    yield from _end(rank)


def _steady(rank: _Writer, turns: int) -> Iterator[Entry]:
    for turn in range(turns):
        if turn == 0 and rank.below == 0:
            # The stages at the tip of the V wait for each other here, overlapped or not.
            yield from (rank.forward(rank.down), rank.full(rank.up))
        else:
            yield rank.pair(rank.down, rank.up)
        yield rank.pair(rank.up, rank.down)


def _end(rank: _Writer) -> Iterator[Entry]:
    """The last backwards: whole for the first half, then split, the weight halves filling the end."""
    for turn in range(2 * (rank.rank + 1)):
        stage = rank.down if turn % 2 else rank.up
        yield rank.input(stage) if turn > rank.rank else rank.full(stage)
    for _ in range(rank.below):
        yield from (*rank.weight(), rank.input(rank.down))
    yield from rank.weights()
