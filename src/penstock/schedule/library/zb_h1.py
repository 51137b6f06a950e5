"""ZB-H1: 1F1B with backward in two halves, the weight half filling the idle end.

Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.1 and figure 2. No rank holds
more than ``p`` microbatches, as in 1F1B, and the bubble is a third of 1F1B's where F = I = W.
"""

from __future__ import annotations

from penstock.schedule.base import Schedule
from penstock.schedule.edges import looped
from penstock.schedule.library._patterns import one_forward_one_backward, turns


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B, a third of its bubble in the same memory; one stage per rank, any ranks and microbatches."""
    placement = looped(ranks)
    order = [turns(rank, microbatches) for rank in range(ranks)]
    programs = tuple(
        one_forward_one_backward(order[rank], order[rank], ranks - 1 - rank, lag=rank)
        for rank in range(ranks)
    )
    return Schedule("ZB-H1", placement, microbatches, programs)
