"""Looped BFS: several stages per rank, each run for all microbatches before the next.

Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023. The bubble is that of
GPipe divided by the number of stages per rank; each stage's parameters are needed in one stretch forward and
one backward, which suits sharded parameters. A rank holds the activations of all microbatches.
"""

from __future__ import annotations

from penstock.schedule.action import Action, Op
from penstock.schedule.base import Schedule
from penstock.schedule.edges import looped


def looped_bfs(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """GPipe in laps over several stages per rank; any number of ranks, microbatches and stages."""
    placement = looped(ranks, stages_per_rank)
    programs = tuple(
        (
            *(Action(s, Op.F, m) for s in placement.stages_on(rank) for m in range(microbatches)),
            *(
                Action(s, Op.B, m)
                for s in placement.stages_on(rank)[::-1]
                for m in range(microbatches)
            ),
        )
        for rank in range(ranks)
    )
    return Schedule("LoopedBFS", placement, microbatches, programs)
