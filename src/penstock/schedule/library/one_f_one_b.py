"""1F1B: as soon as a rank has a gradient it alternates one forward and one backward.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, figure 4;
with a flush after each step as in "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, figure 3.
Rank ``r`` of ``p`` holds the activations of at most ``p - r`` microbatches.
"""

from __future__ import annotations

from penstock.schedule.action import Action, Op
from penstock.schedule.base import Schedule
from penstock.schedule.library._patterns import run
from penstock.schedule.placement import looped


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Build 1F1B for one stage a rank; any number of ranks and microbatches."""
    programs = tuple(tuple(_program(rank, ranks, microbatches)) for rank in range(ranks))
    return Schedule("1F1B", looped(ranks), microbatches, programs)


def _program(rank: int, ranks: int, microbatches: int) -> list[Action]:
    ahead = min(ranks - 1 - rank, microbatches)
    steady = [
        action
        for m in range(microbatches - ahead)
        for action in (Action(rank, Op.F, m + ahead), Action(rank, Op.B, m))
    ]
    return [
        *run(rank, Op.F, range(ahead)),
        *steady,
        *run(rank, Op.B, range(microbatches - ahead, microbatches)),
    ]
