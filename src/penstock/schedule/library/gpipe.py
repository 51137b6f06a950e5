"""GPipe: all forwards, then all backwards.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
NeurIPS 2019, figure 2(c). A rank holds the activations of all microbatches.
"""

from __future__ import annotations

from penstock.schedule.action import Op
from penstock.schedule.base import Schedule
from penstock.schedule.edges import looped
from penstock.schedule.library._patterns import run


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards; one stage per rank, any number of ranks and microbatches."""
    each = range(microbatches)
    programs = tuple((*run(rank, Op.F, each), *run(rank, Op.B, each)) for rank in range(ranks))
    return Schedule("GPipe", looped(ranks), microbatches, programs)
