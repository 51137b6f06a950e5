"""1F1B: as soon as a rank has a gradient it alternates one forward and one backward.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, figure 4;
with a flush after each step as in "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, figure 3.
Rank ``r`` of ``p`` holds the activations of at most ``p - r`` microbatches.
"""

from __future__ import annotations

from penstock.schedule.base import Schedule
from penstock.schedule.edges import looped
from penstock.schedule.library._patterns import one_forward_one_backward, turns


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """One forward, one backward; one stage per rank, any number of ranks and microbatches."""
    placement = looped(ranks)
    order = [turns(rank, microbatches) for rank in range(ranks)]
    programs = tuple(
        one_forward_one_backward(order[rank], order[rank], ranks - 1 - rank)
        for rank in range(ranks)
    )
    return Schedule("1F1B", placement, microbatches, programs)
