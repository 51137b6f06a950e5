"""Interleaved 1F1B: several stages per rank, taken in laps, so that the bubble is divided by their number.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
SC 2021, section 2.2 and figure 4.
"""

from __future__ import annotations

from penstock.schedule.base import Schedule
from penstock.schedule.edges import looped
from penstock.schedule.library._patterns import laps, longest_round, one_forward_one_backward


def interleaved_1f1b(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """1F1B in laps over several stages per rank; any number of ranks, microbatches and stages."""
    placement = looped(ranks, stages_per_rank)
    lap = (stages_per_rank - 1) * longest_round(ranks, microbatches)
    programs = tuple(
        one_forward_one_backward(
            *laps(rank, ranks, microbatches, stages_per_rank), 2 * (ranks - 1 - rank) + lap
        )
        for rank in range(ranks)
    )
    return Schedule("Interleaved1F1B", placement, microbatches, programs)
