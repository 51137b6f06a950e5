"""Interleaved zero bubble: interleaved 1F1B with backward in two halves.

Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024: ZB-H1's idea (section 2.1) on the laps of
interleaved 1F1B. What is left of the bubble is the start, ``p - 1`` forwards of one stage.
"""

from __future__ import annotations

from penstock.schedule.base import Schedule
from penstock.schedule.edges import looped
from penstock.schedule.library._patterns import laps, longest_round, one_forward_one_backward


def interleaved_zero_bubble(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """ZB-H1 in laps over several stages per rank; any number of ranks, microbatches and stages."""
    placement = looped(ranks, stages_per_rank)
    lap = (stages_per_rank - 1) * longest_round(ranks, microbatches)
    programs = tuple(
        one_forward_one_backward(
            *laps(rank, ranks, microbatches, stages_per_rank), ranks - 1 - rank + lap, lag=rank
        )
        for rank in range(ranks)
    )
    return Schedule("InterleavedZeroBubble", placement, microbatches, programs)
