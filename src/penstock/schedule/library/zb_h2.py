"""ZB-H2: no bubble but the start, for twice the memory.

Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.2 and figure 3. Forwards fill
the time until the first gradient comes back; weight halves put off for as long fill the end. No rank holds
more than ``2 * p - 1`` microbatches. Rank ``r`` starts and ends ``r`` late, so that the next step can start
where this one has not ended.
"""

from __future__ import annotations

from penstock.schedule.base import Schedule
from penstock.schedule.edges import looped
from penstock.schedule.library._patterns import one_forward_one_backward, turns


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """No bubble within a rank for twice the memory; one stage per rank, any ranks and microbatches."""
    placement = looped(ranks)
    order = [turns(rank, microbatches) for rank in range(ranks)]
    programs = tuple(
        one_forward_one_backward(order[rank], order[rank], 2 * (ranks - 1 - rank), lag=2 * rank)
        for rank in range(ranks)
    )
    return Schedule("ZB-H2", placement, microbatches, programs)
