"""ZB-V: no bubble within a rank, in the memory of 1F1B.

Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 6. Rank ``r`` of ``p`` holds
stages ``r`` and ``2p - 1 - r``, so the loss is on the rank that began, and a microbatch's activations
are held for as long on each rank. Rank ``r`` starts and ends ``r`` late, as in ZB-H2.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.schedule.action import Action
from penstock.schedule.base import Schedule
from penstock.schedule.edges import v_shaped
from penstock.schedule.library._v_shape import BuildingBlock, v_schedule
from penstock.schedule.library._v_writer import VWriter

BLOCK = BuildingBlock(forward=(3, 3), backward=(3, 3))


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """No bubble within a rank in 1F1B's memory; two stages per rank in a V, any ranks and microbatches."""
    if microbatches < 2 * ranks - 1:
        # Too few for the phases below: squeeze the steady block that they are made of.
        return v_schedule("ZB-V", ranks, microbatches, BLOCK, held=ranks)
    placement = v_shaped(ranks)
    programs = (tuple(_program(VWriter(rank, ranks), ranks, microbatches)) for rank in range(ranks))
    return Schedule("ZB-V", placement, microbatches, tuple(programs))


def _program(rank: VWriter, ranks: int, microbatches: int) -> Iterator[Action]:
    down, up = rank.down, rank.up
    for _ in range(2 * rank.below + 1):
        yield rank.forward(down)
    for _ in range(rank.rank):
        yield from (rank.forward(up), rank.forward(down))
    for _ in range(rank.below + 1):
        yield from (rank.forward(up), rank.input(up), *rank.weight())
    for turn in range(microbatches - ranks):
        if turn < microbatches - ranks - rank.below:
            yield rank.forward(down)
        yield from (rank.input(down), *rank.weight())
        yield from (rank.forward(up), rank.input(up), *rank.weight())
    for _ in range(rank.rank):
        yield from (rank.input(down), rank.input(up))
    for _ in range(rank.below + 1):
        yield from (rank.input(down), *rank.weight())
    yield from rank.weights()
