"""The schedules of the library: with stages in one direction, and on the V placement."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, zip_longest
from operator import itemgetter

from penstock.errors import InternalError, ScheduleError
from penstock.schedule.action import Action, Entry, Op, Overlap, Slice, microbatch_of
from penstock.schedule.base import Placement, Schedule, looped, v_shaped
from penstock.schedule.dependencies import Dependencies

# ---- stages in one direction: one per rank, or several in laps over all ranks
# These schedules share a shape, `_in_turn`: some forwards ahead, then a forward and a backward in turn. 1F1B,
# Eager-1F1B, ZB-H1 and ZB-H2 differ only in how many forwards are ahead, and in how far the weight half of
# backward lags behind. With the stages of a rank taken in laps, they become the interleaved schedules.


def _in_turn(
    name: str,
    ranks: int,
    microbatches: int,
    ahead: Callable[[int], int],
    lag: Callable[[int], int] | None = None,
    *,
    stages: int = 1,
    slices: int = 1,
) -> Schedule:
    """Run some forwards ahead, then one forward and one backward in turn, then the other backwards.

    Args:
        name: the name of the schedule.
        ranks: the number of ranks.
        microbatches: the number of microbatches.
        ahead: how many forwards a rank's last stage is ahead, by rank.
        lag: how many backwards a W is behind its I, by rank; without it backwards are full.
        stages: the number of stages on each rank, which takes them in laps of a round of microbatches.
        slices: the number of slices of a microbatch, which run forward from the first and backward from the
            last.
    """
    placement = looped(ranks, stages)
    rounds = _rounds(ranks, microbatches)
    lap = (stages - 1) * max(map(len, rounds))
    half = Op.B if lag is None else Op.I

    parts: list[Sequence[int | Slice]] = [
        [m] if slices == 1 else [Slice(m, number) for number in range(slices)]
        for m in range(microbatches)
    ]

    def program(rank: int) -> Iterator[Action]:
        held, first = placement.stages_on(rank), ahead(rank) + lap
        forwards = [
            Action(s, Op.F, part)
            for round_ in rounds
            for s in held
            for m in round_
            for part in parts[m]
        ]
        backwards = [
            Action(s, half, part)
            for round_ in rounds
            for s in held[::-1]
            for m in round_
            for part in parts[m][::-1]
        ]
        weights: list[Action | None] = []
        if lag is not None:
            weights = [*[None] * lag(rank), *(Action(s, Op.W, m) for s, _, m, _ in backwards)]
        yield from forwards[:first]
        yield from filter(
            None, chain.from_iterable(zip_longest(forwards[first:], backwards, weights))
        )

    programs = tuple(tuple(program(rank)) for rank in range(ranks))
    return Schedule(name, placement, microbatches, programs, slices=slices)


def _rounds(ranks: int, microbatches: int) -> list[range]:
    """Rounds of as many microbatches as there are ranks; the remainder is spread over the rounds."""
    count = max(1, microbatches // ranks)
    bounds = [microbatches * i // count for i in range(count + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


# ---- one stage per rank


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards; one stage per rank, any number of ranks and microbatches.

    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
    NeurIPS 2019, figure 2(c). A rank holds the activations of all microbatches.
    """
    return _breadth_first("GPipe", ranks, microbatches, 1)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """One forward, one backward; one stage per rank, any number of ranks and microbatches.

    Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, figure 4;
    with a flush after each step as in "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, figure 3.
    Rank ``r`` of ``p`` holds the activations of at most ``p - r`` microbatches.
    """
    return _in_turn("1F1B", ranks, microbatches, lambda rank: ranks - 1 - rank)


def eager_1f1b(ranks: int, microbatches: int) -> Schedule:
    """1F1B that hides latency for more memory; one stage per rank, any number of ranks and microbatches.

    Zhuang et al., "On Optimizing the Communication of Model Parallelism", MLSys 2023. It runs twice the
    forwards ahead, so messages travel while both ends compute. Rank ``r`` of ``p`` holds at most
    ``2 * (p - r) - 1`` microbatches. Without latency it takes as long as 1F1B; with latency, 1F1B waits for a
    round trip at every pair and this schedule does not.
    """
    return _in_turn("Eager-1F1B", ranks, microbatches, lambda rank: 2 * (ranks - 1 - rank))


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """A third of 1F1B's bubble in the same memory; one stage per rank, any ranks and microbatches.

    Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.1 and figure 2: backward in
    two halves, the weight half filling the idle end. No rank holds more than ``p`` microbatches, as in 1F1B,
    and the bubble is a third of 1F1B's where F = I = W.
    """
    ahead, lag = lambda rank: ranks - 1 - rank, lambda rank: rank
    return _in_turn("ZB-H1", ranks, microbatches, ahead, lag)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """No bubble within a rank for twice the memory; one stage per rank, any ranks and microbatches.

    Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.2 and figure 3. Forwards
    fill the time until the first gradient comes back; weight halves deferred for as long fill the end. No
    rank holds more than ``2 * p - 1`` microbatches. Rank ``r`` starts and ends ``r`` units late, so the first
    ranks can start the next step before the last ranks end this one.
    """
    ahead, lag = lambda rank: 2 * (ranks - 1 - rank), lambda rank: 2 * rank
    return _in_turn("ZB-H2", ranks, microbatches, ahead, lag)


def seq_1f1b(ranks: int, microbatches: int, *, slices: int = 2) -> Schedule:
    """1F1B of slices of sequences; one stage per rank, any number of ranks, microbatches and slices.

    Ao et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language Model Training",
    2024, section 3. The slices of a microbatch run forward from the first and backward from the last, since
    in causal attention a slice uses the keys and values of those before. With ``k`` equal slices the bubble
    is a ``k``-th of 1F1B's, and rank ``r`` of ``p`` holds at most ``p - r + k - 1`` slices, each a ``k``-th
    of a microbatch.
    """
    ahead = lambda rank: ranks - 1 - rank + slices - 1  # noqa: E731 - as above
    return _in_turn("Seq1F1B", ranks, microbatches, ahead, slices=slices)


# ---- several stages per rank, in laps


def interleaved_1f1b(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """1F1B in laps over several stages per rank; any number of ranks, microbatches and stages.

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    SC 2021, section 2.2 and figure 4. The bubble is divided by the number of stages per rank.
    """
    return _in_turn(
        "Interleaved1F1B",
        ranks,
        microbatches,
        lambda rank: 2 * (ranks - 1 - rank),
        stages=stages_per_rank,
    )


def interleaved_zero_bubble(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """ZB-H1 in laps over several stages per rank; any number of ranks, microbatches and stages.

    Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024: ZB-H1's idea (section 2.1) on the laps
    of interleaved 1F1B. Only the start of the bubble remains, ``p - 1`` forwards of one stage.
    """
    ahead, lag = lambda rank: ranks - 1 - rank, lambda rank: rank
    return _in_turn(
        "InterleavedZeroBubble", ranks, microbatches, ahead, lag, stages=stages_per_rank
    )


def looped_bfs(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """GPipe in laps over several stages per rank; any number of ranks, microbatches and stages.

    Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023: each stage runs all microbatches before
    the next. The bubble is that of GPipe divided by the number of stages per rank; each stage's
    parameters are needed in one stretch forward and one backward, which suits sharded parameters. A rank
    holds the activations of all microbatches.
    """
    return _breadth_first("LoopedBFS", ranks, microbatches, stages_per_rank)


def _breadth_first(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    placement = looped(ranks, stages_per_rank)
    programs = tuple(
        tuple(
            Action(stage, op, microbatch)
            for op, stages in ((Op.F, held), (Op.B, held[::-1]))
            for stage in stages
            for microbatch in range(microbatches)
        )
        for held in map(placement.stages_on, range(ranks))
    )
    return Schedule(name, placement, microbatches, programs)


# ---- no backward


def forward_only(ranks: int, microbatches: int, stages: int | Placement = 1) -> Schedule:
    """The forwards alone, microbatch by microbatch; any ranks, microbatches, stages and placement.

    For evaluation and prediction.

    Args:
        ranks: the number of ranks.
        microbatches: the number of microbatches.
        stages: the number of stages per rank, or the placement of the stages.
    """
    placement = looped(ranks, stages) if isinstance(stages, int) else stages
    programs = tuple(
        tuple(
            Action(stage, Op.F, m)
            for m in range(microbatches)
            for stage in placement.stages_on(rank)
        )
        for rank in range(ranks)
    )
    return Schedule("forward-only", placement, microbatches, programs)


# ---- the V placement: each microbatch goes down the ranks and back up
# Rank ``r`` of ``p`` holds stages ``r`` and ``2p - 1 - r``, so the first rank computes the loss. ZB-V,
# V-Half and V-Min are one idea with different times, a *building block* that repeats; DualPipeV is written
# phase by phase, and so is ZB-V if there are enough microbatches for all its phases.


# ---- from a building block that repeats
# Qi, Wan, Amar, Lin, "Pipeline Parallelism with Controllable Memory", NeurIPS 2024: the times at which one
# microbatch runs on each rank are a *building block*; repeated every six units (F, I and W of two stages) it
# is a steady schedule, and the time between a stage's F and its W determines the memory. The start and the
# end are then squeezed: here by running the ranks in unit steps, each in the order of the block, where
#
# 1. the next F or I runs if what it needs is there and the rank may hold one more,
# 2. else a W that is due,
# 3. else the F or I after the next, so that an idle step is used but no action overtakes more than one.

_PERIOD = 6
"""F, I and W of a rank's two stages."""


@dataclass(frozen=True)
class _BuildingBlock:
    """When one microbatch runs on each rank, given as the time from a rank to the next.

    Attributes:
        forward: the times of the forwards, on the way down the ranks and on the way back up.
        backward: the same for the input gradients.
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


def _squeezed(
    name: str, ranks: int, microbatches: int, block: _BuildingBlock, held: int
) -> Schedule:
    """Repeat a building block and squeeze it.

    Args:
        name: the name of the schedule.
        ranks: the number of ranks.
        microbatches: the number of microbatches.
        block: the steady state.
        held: the most microbatches whose activations both stages of a rank may hold.
    """
    empty = Schedule(name, v_shaped(ranks), microbatches, ((),) * ranks)
    rule = Dependencies(empty)
    todo = [deque(_order(rank, ranks, microbatches, block)) for rank in range(ranks)]
    due: list[deque[Action]] = [deque() for _ in todo]
    programs: list[list[Action]] = [[] for _ in todo]
    room, done = [2 * held] * ranks, set[Action]()

    def may_start(action: Action, room: int) -> bool:
        stage, op, *_ = action
        microbatch = microbatch_of(action)
        before = [Action(need.stage, need.split_op, microbatch) for need in rule.needs(stage, op)]
        before += [Action(stage, op, microbatch - 1)] if microbatch else []
        return done.issuperset(before) and (op is not Op.F or room > 0)

    def choose(rank: int) -> Action | None:
        waiting = todo[rank]
        if waiting and may_start(waiting[0], room[rank]):
            return waiting.popleft()
        if due[rank]:
            return due[rank].popleft()
        if len(waiting) > 1 and may_start(waiting[1], room[rank] - (waiting[0].op is Op.F)):
            first = waiting.popleft()
            overtakes, waiting[0] = waiting[0], first
            return overtakes
        return None

    while any(todo) or any(due):
        step = [(rank, action) for rank in range(ranks) if (action := choose(rank))]
        if not step:
            raise InternalError("the building block leaves no rank anything to do")
        for rank, action in step:
            programs[rank].append(action)
            done.add(action)
            if action.op is Op.I:
                due[rank].append(action._replace(op=Op.W))
            else:
                room[rank] += 1 if action.op is Op.W else -1
    return empty.with_programs(programs)


def _order(rank: int, ranks: int, microbatches: int, block: _BuildingBlock) -> list[Action]:
    """A rank's Fs and Is, sorted by their times in the repeated block."""
    down, up = rank, 2 * ranks - 1 - rank
    kinds = ((down, Op.F), (up, Op.F), (up, Op.I), (down, Op.I))
    timed = [
        (time + _PERIOD * m, Action(stage, op, m))
        for time, (stage, op) in zip(block.times(rank, ranks), kinds, strict=True)
        for m in range(microbatches)
    ]
    return [action for _, action in sorted(timed, key=itemgetter(0))]


def v_half(ranks: int, microbatches: int) -> Schedule:
    """Half of 1F1B's memory; two stages per rank in a V, any number of ranks and microbatches.

    Its bubble is as large as 1F1B's. With an even number of ranks, two actions of a block would fall on the
    same time of the period; a wait at the loss moves them apart.
    """
    turn = 1 if ranks % 2 else 4
    block = _BuildingBlock(forward=(1, 2), backward=(1, 2), turn=turn)
    return _squeezed("V-Half", ranks, microbatches, block, held=(ranks + 2) // 2)


def v_min(ranks: int, microbatches: int) -> Schedule:
    """A third of 1F1B's memory; two stages per rank in a V, any number of ranks and microbatches.

    Its bubble is larger; each microbatch goes down and up the ranks without a pause. If the number of ranks
    is a multiple of three, two actions of a block would fall on the same time of the period; a wait at the
    loss moves them apart.
    """
    turn = 0 if ranks % 3 else 2
    block = _BuildingBlock(forward=(1, 1), backward=(1, 1), turn=turn)
    return _squeezed("V-Min", ranks, microbatches, block, held=(ranks + 4) // 3)


# ---- written phase by phase


class _ProgramWriter:
    """Writes the program of a rank: each op on one of its two stages takes the stage's next microbatch.

    Args:
        rank: the index of the rank.
        ranks: the number of ranks.

    Attributes:
        down: the stage that microbatches pass on the way from the first rank to the last.
        up: the stage that they pass on the way back.
        below: the number of ranks after this one.
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
        """The W that has been due for longest, if any."""
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


_ZB_V = _BuildingBlock(forward=(3, 3), backward=(3, 3))


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """No bubble within a rank in 1F1B's memory; two stages per rank in a V, any ranks and microbatches.

    Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 6. Every rank holds a
    microbatch's activations equally long. Rank ``r`` starts and ends ``r`` units late, as in ZB-H2.
    """
    if microbatches < 2 * ranks - 1:
        # Too few for the phases below: squeeze the building block of their steady state.
        return _squeezed("ZB-V", ranks, microbatches, _ZB_V, held=ranks)
    placement = v_shaped(ranks)
    programs = (
        tuple(_zb_v_program(_ProgramWriter(rank, ranks), ranks, microbatches))
        for rank in range(ranks)
    )
    return Schedule("ZB-V", placement, microbatches, tuple(programs))


def _zb_v_program(rank: _ProgramWriter, ranks: int, microbatches: int) -> Iterator[Action]:
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
            "with fewer there is nothing to overlap; use ZB-V, or more microbatches"
        )
    programs = (
        tuple(_dualpipe_program(_ProgramWriter(rank, ranks), ranks, microbatches))
        for rank in range(ranks)
    )
    return Schedule("DualPipeV", v_shaped(ranks), microbatches, tuple(programs))


def _dualpipe_program(rank: _ProgramWriter, ranks: int, microbatches: int) -> Iterator[Entry]:
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


def _steady(rank: _ProgramWriter, turns: int) -> Iterator[Entry]:
    for turn in range(turns):
        if turn == 0 and rank.below == 0:
            # The stages at the tip of the V wait for each other here, overlapped or not.
            yield from (rank.forward(rank.down), rank.full(rank.up))
        else:
            yield rank.pair(rank.down, rank.up)
        yield rank.pair(rank.up, rank.down)


def _end(rank: _ProgramWriter) -> Iterator[Entry]:
    """The last backwards: the first half whole, the rest split; their Ws fill the end."""
    for turn in range(2 * (rank.rank + 1)):
        stage = rank.down if turn % 2 else rank.up
        yield rank.input(stage) if turn > rank.rank else rank.full(stage)
    for _ in range(rank.below):
        yield from (*rank.weight(), rank.input(rank.down))
    yield from rank.weights()
