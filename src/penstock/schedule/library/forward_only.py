"""Forward only: for evaluation and prediction."""

from __future__ import annotations

from penstock.schedule.action import Action, Op
from penstock.schedule.base import Schedule
from penstock.schedule.placement import Placement, looped


def forward_only(ranks: int, microbatches: int, placement: Placement | None = None) -> Schedule:
    """Build the forwards alone, microbatch by microbatch.

    Args:
        ranks: how many ranks.
        microbatches: how many microbatches.
        placement: where the stages are; by default one a rank.
    """
    placement = placement or looped(ranks)
    programs = tuple(
        tuple(
            Action(stage, Op.F, m)
            for m in range(microbatches)
            for stage in placement.stages_on(rank)
        )
        for rank in range(ranks)
    )
    return Schedule("forward-only", placement, microbatches, programs)
