"""Eager-1F1B: 1F1B with twice the forwards ahead, so that messages travel while both ends compute.

Zhuang et al., "On Optimizing the Communication of Model Parallelism", MLSys 2023.
Rank ``r`` of ``p`` holds at most ``2 * (p - r) - 1`` microbatches. Without latency it takes as long as 1F1B;
with latency, 1F1B waits for a round trip at every pair and this one does not.
"""

from __future__ import annotations

from penstock.schedule.base import Schedule
from penstock.schedule.edges import looped
from penstock.schedule.library._patterns import one_forward_one_backward, turns


def eager_1f1b(ranks: int, microbatches: int) -> Schedule:
    """1F1B that hides latency for more memory; one stage per rank, any number of ranks and microbatches."""
    placement = looped(ranks)
    order = [turns(rank, microbatches) for rank in range(ranks)]
    programs = tuple(
        one_forward_one_backward(order[rank], order[rank], 2 * (ranks - 1 - rank))
        for rank in range(ranks)
    )
    return Schedule("Eager-1F1B", placement, microbatches, programs)
