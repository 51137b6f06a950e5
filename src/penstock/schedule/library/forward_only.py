"""Forward only: for evaluation and prediction."""

from __future__ import annotations

from penstock.schedule.action import Action, Op
from penstock.schedule.base import Schedule
from penstock.schedule.edges import Placement, looped


def forward_only(ranks: int, microbatches: int, stages: int | Placement = 1) -> Schedule:
    """The forwards alone, microbatch by microbatch; any ranks, microbatches, stages and placement.

    Args:
        ranks: how many ranks.
        microbatches: how many microbatches.
        stages: how many stages per rank, or where the stages are.
    """
    placement = looped(ranks, stages) if isinstance(stages, int) else stages
    programs = tuple(
        tuple(
            Action(stage, Op.F, m)
            for m in range(microbatches)
            for stage in placement.stages_on(rank)
        )
        for rank in range(ranks)
    )
    return Schedule("forward-only", placement, microbatches, programs)
