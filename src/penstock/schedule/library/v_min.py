"""V-Min: a third of the activation memory of 1F1B, for a larger bubble.

Qi, Wan, Amar, Lin, "Pipeline Parallelism with Controllable Memory", NeurIPS 2024. Rank
``r`` of ``p`` holds stages ``r`` and ``2p - 1 - r``; each microbatch goes down and up the ranks without a
pause. With a multiple of three ranks two actions of a block would fall on one time of the period; waiting
at the loss moves them apart.
"""

from __future__ import annotations

from penstock.schedule.base import Schedule
from penstock.schedule.library._v_shape import BuildingBlock, v_schedule


def v_min(ranks: int, microbatches: int) -> Schedule:
    """A third of 1F1B's memory; two stages per rank in a V, any number of ranks and microbatches."""
    turn = 0 if ranks % 3 else 2
    block = BuildingBlock(forward=(1, 1), backward=(1, 1), turn=turn)
    return v_schedule("V-Min", ranks, microbatches, block, held=(ranks + 4) // 3)
