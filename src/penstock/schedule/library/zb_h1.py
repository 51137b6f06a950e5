"""ZB-H1: 1F1B with backward in two halves, the weight half filling the idle end.

Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.1 and figure 2. No rank holds
more than ``p`` microbatches, as in 1F1B, and the bubble is a third of 1F1B's where F = I = W.
"""

from __future__ import annotations

from penstock.schedule.action import Action, Op
from penstock.schedule.base import Schedule
from penstock.schedule.library._patterns import run
from penstock.schedule.placement import looped


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Build ZB-H1 for one stage a rank; any number of ranks and microbatches."""
    programs = tuple(tuple(_program(rank, ranks, microbatches)) for rank in range(ranks))
    return Schedule("ZB-H1", looped(ranks), microbatches, programs)


def _program(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """1F1B with I for B; rank ``r`` leaves its first ``r`` weight halves for the end."""
    ahead = min(ranks - 1 - rank, microbatches)
    program = run(rank, Op.F, range(ahead))
    for m in range(microbatches):
        if m + ahead < microbatches:
            program.append(Action(rank, Op.F, m + ahead))
        program.append(Action(rank, Op.I, m))
        if m >= rank:
            program.append(Action(rank, Op.W, m - rank))
    return program + run(rank, Op.W, range(max(0, microbatches - rank), microbatches))
