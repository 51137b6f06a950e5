"""Schedules whose stages lie in one direction: one per rank, or several in laps over all ranks.

They share a shape, :func:`one_forward_one_backward`: some forwards ahead, then a forward and a backward in
turn. How many are ahead, and how far the weights' half of backward lags behind, is what tells 1F1B,
Eager-1F1B, ZB-H1 and ZB-H2 apart; with the stages of a rank taken in laps they become the interleaved
schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from penstock.schedule.action import Action, Op
from penstock.schedule.base import Schedule
from penstock.schedule.edges import Placement, looped

Turn = tuple[int, int]
"""A stage and a microbatch: what one F, or one backward, is about."""

# ---- the shape that they share


def one_forward_one_backward(
    forwards: Sequence[Turn], backwards: Sequence[Turn], ahead: int, *, lag: int | None = None
) -> tuple[Action, ...]:
    """Some forwards ahead, then one forward and one backward in turn, then the rest of the backwards.

    Args:
        forwards: what to run forward, in order.
        backwards: the same in the order of its backwards.
        ahead: how many forwards come before the first pair.
        lag: ``None`` for full backwards. Otherwise each is an I, followed by the W that is ``lag``
            backwards behind; the last ``lag`` Ws come at the end.
    """
    ahead = min(ahead, len(forwards))
    program = [Action(stage, Op.F, m) for stage, m in forwards[:ahead]]
    op = Op.B if lag is None else Op.I
    for turn, (stage, m) in enumerate(backwards):
        if turn + ahead < len(forwards):
            program.append(Action(forwards[turn + ahead][0], Op.F, forwards[turn + ahead][1]))
        program.append(Action(stage, op, m))
        if lag is not None and turn >= lag:
            program.append(Action(backwards[turn - lag][0], Op.W, backwards[turn - lag][1]))
    if lag is not None:
        late = backwards[max(0, len(backwards) - lag) :]
        program += [Action(stage, Op.W, m) for stage, m in late]
    return tuple(program)


def _in_turn(
    name: str,
    ranks: int,
    microbatches: int,
    ahead: Callable[[int], int],
    lag: Callable[[int], int] | None = None,
    *,
    stages: int = 1,
) -> Schedule:
    """One forward, one backward on every rank, over as many stages there.

    Args:
        name: of the schedule.
        ranks: how many.
        microbatches: how many.
        ahead: for a rank, how many forwards of its last stage are ahead.
        lag: for a rank, how far its Ws lag behind; without it backwards are full.
        stages: how many on each rank, taken in laps.
    """
    placement = looped(ranks, stages)
    rounds = _rounds(ranks, microbatches)
    lap = (stages - 1) * max(map(len, rounds))
    programs = tuple(
        one_forward_one_backward(
            *_laps(placement.stages_on(rank), rounds), ahead(rank) + lap, lag=lag and lag(rank)
        )
        for rank in range(ranks)
    )
    return Schedule(name, placement, microbatches, programs)


def _laps(held: Sequence[int], rounds: Sequence[range]) -> tuple[list[Turn], list[Turn]]:
    """The forwards and backwards of a rank that takes its stages in laps, a round of microbatches each.

    Returns:
        Forwards: for each round each stage, for each stage each microbatch of the round; and backwards:
        the same with the last stage first.
    """
    forwards = [(stage, m) for round_ in rounds for stage in held for m in round_]
    backwards = [(stage, m) for round_ in rounds for stage in reversed(held) for m in round_]
    return forwards, backwards


def _rounds(ranks: int, microbatches: int) -> list[range]:
    """As many microbatches each as there are ranks; what is left over is spread over the rounds."""
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

    Zhuang et al., "On Optimizing the Communication of Model Parallelism", MLSys 2023. Twice the forwards
    ahead, so that messages travel while both ends compute. Rank ``r`` of ``p`` holds at most
    ``2 * (p - r) - 1`` microbatches. Without latency it takes as long as 1F1B; with latency, 1F1B waits for a
    round trip at
    every pair and this one does not.
    """
    return _in_turn("Eager-1F1B", ranks, microbatches, lambda rank: 2 * (ranks - 1 - rank))


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B, a third of its bubble in the same memory; one stage per rank, any ranks and microbatches.

    Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.1 and figure 2: backward in
    two halves, the weight half filling the idle end. No rank holds more than ``p`` microbatches, as in 1F1B,
    and the bubble is a third of 1F1B's where F = I = W.
    """
    ahead, lag = lambda rank: ranks - 1 - rank, lambda rank: rank
    return _in_turn("ZB-H1", ranks, microbatches, ahead, lag)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """No bubble within a rank for twice the memory; one stage per rank, any ranks and microbatches.

    Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.2 and figure 3. Forwards
    fill the time until the first gradient comes back; weight halves put off for as long fill the end. No rank
    holds more than ``2 * p - 1`` microbatches. Rank ``r`` starts and ends ``r`` late, so that the next step
    can start where this one has not ended.
    """
    ahead, lag = lambda rank: 2 * (ranks - 1 - rank), lambda rank: 2 * rank
    return _in_turn("ZB-H2", ranks, microbatches, ahead, lag)


# ---- several stages per rank, in laps


def interleaved_1f1b(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
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


def interleaved_zero_bubble(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """ZB-H1 in laps over several stages per rank; any number of ranks, microbatches and stages.

    Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024: ZB-H1's idea (section 2.1) on the laps
    of interleaved 1F1B. What is left of the bubble is the start, ``p - 1`` forwards of one stage.
    """
    ahead, lag = lambda rank: ranks - 1 - rank, lambda rank: rank
    return _in_turn(
        "InterleavedZeroBubble", ranks, microbatches, ahead, lag, stages=stages_per_rank
    )


def looped_bfs(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """GPipe in laps over several stages per rank; any number of ranks, microbatches and stages.

    Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023: each stage runs for all microbatches
    before the next. The bubble is that of GPipe divided by the number of stages per rank; each stage's
    parameters are needed in one stretch forward and one backward, which suits sharded parameters. A rank
    holds the activations of all microbatches.
    """
    return _breadth_first("LoopedBFS", ranks, microbatches, stages_per_rank)


def _breadth_first(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    placement = looped(ranks, stages_per_rank)
    held = [placement.stages_on(rank) for rank in range(ranks)]
    programs = tuple(
        (
            *_run(Op.F, _turns(stages, microbatches)),
            *_run(Op.B, _turns(stages[::-1], microbatches)),
        )
        for stages in held
    )
    return Schedule(name, placement, microbatches, programs)


def _run(op: Op, turns: Iterable[Turn]) -> list[Action]:
    """One op for several stages and microbatches in turn."""
    return [Action(stage, op, microbatch) for stage, microbatch in turns]


def _turns(stages: Iterable[int], microbatches: int) -> list[Turn]:
    """Stage after stage, each with all microbatches in order."""
    return [(stage, microbatch) for stage in stages for microbatch in range(microbatches)]


# ---- no backward


def forward_only(ranks: int, microbatches: int, stages: int | Placement = 1) -> Schedule:
    """The forwards alone, microbatch by microbatch; any ranks, microbatches, stages and placement.

    For evaluation and prediction.

    Args:
        ranks: how many ranks.
        microbatches: how many microbatches.
        stages: how many stages per rank, or where the stages are.
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
