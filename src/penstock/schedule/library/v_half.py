"""V-Half: half the activation memory of 1F1B, for a bubble as large.

Qi, Wan, Amar, Lin, "Pipeline Parallelism with Controllable Memory", NeurIPS 2024. Rank
``r`` of ``p`` holds stages ``r`` and ``2p - 1 - r``. With an even number of ranks two actions of a block
would fall on one time of the period; waiting at the loss moves them apart.
"""

from __future__ import annotations

from penstock.schedule.base import Schedule
from penstock.schedule.library._v_shape import BuildingBlock, v_schedule


def v_half(ranks: int, microbatches: int) -> Schedule:
    """Half of 1F1B's memory; two stages per rank in a V, any number of ranks and microbatches."""
    turn = 1 if ranks % 2 else 4
    block = BuildingBlock(forward=(1, 2), backward=(1, 2), turn=turn)
    return v_schedule("V-Half", ranks, microbatches, block, held=(ranks + 2) // 2)
