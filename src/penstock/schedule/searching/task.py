"""A step to be scheduled, in numbers.

The microbatches of a step are alike, so each stage may as well take them in order: any schedule can be
relabelled so that its stages do, and is then as long as before. What is left to decide is in which order a
rank takes its *lanes*, the ops of its stages. A lane is numbered ``3 * stage`` plus 0 for F, 1 for the
gradient (I, or B as a whole) and 2 for W. A B is a gradient that takes longer, and a W that takes no time and
holds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from graphlib import TopologicalSorter
from operator import gt

from penstock.schedule.action import Action, Op
from penstock.schedule.base import Edges, Placement, Schedule
from penstock.schedule.clock import Costs, durations, under_way
from penstock.schedule.dependencies import Dependencies

PARTS = (Op.F, Op.I, Op.W)
FORWARD, GRADIENT, WEIGHT = range(3)
Link = tuple[int, float]
"""Another lane, and how long the way to or from it takes."""
SLACK = 1e-9
"""The share by which sums of the same numbers may differ when they are added in another order."""


class Task:
    """What has to be done on which rank, what it needs, how long it takes and what it holds.

    Args:
        placement: which rank holds which stages.
        edges: the values that travel between stages.
        microbatches: how many there are.
        costs: the costs of each stage.
        memory: the most that each rank may hold.

    Attributes:
        lanes: for each rank its lanes.
        rank: for each lane its rank.
        duration: for each lane how long an action of it takes, its gradient as I.
        growth: for each lane by how much an action changes what the rank holds, its gradient as I.
        whole: for each stage the duration of B.
        needs: for each lane the lanes whose results for the same microbatch it needs, and how long after
            their end these arrive.
        feeds: the same in the other direction.
        order: the lanes, each after those that it needs.
        limit: for each rank the most that it may hold.
        is_whole: for each stage whether its backwards have to be B, since I would take memory.
        fusible: the other stages for which B may be better than I and W.
    """

    def __init__(
        self,
        placement: Placement,
        edges: Edges,
        microbatches: int,
        costs: Costs,
        memory: Sequence[float],
    ) -> None:
        stages = placement.stages
        self.empty = Schedule("searched", placement, microbatches, ((),) * placement.ranks, edges)
        self.microbatches = microbatches
        self.ranks = placement.ranks
        self.costs = costs
        self.rank = [rank for rank in placement.rank_of for _ in PARTS]
        self.lanes = [
            [3 * stage + part for stage in placement.stages_on(rank) for part in range(3)]
            for rank in range(self.ranks)
        ]
        self.activation = costs.per_stage("activation", stages)
        self.stash = costs.per_stage("stash", stages)
        self.whole = costs.per_stage("backward", stages)
        self.growth = [
            change
            for held, left in zip(self.activation, self.stash, strict=True)
            for change in (held, left - held, -left)
        ]
        self.limit = [most * (1 + SLACK) for most in memory]
        self._wire()
        self.is_whole = list(map(gt, self.stash, self.activation))
        self.fusible = [stage for stage in range(stages) if self._may_fuse(stage)]

    def _wire(self) -> None:
        """Ask `Dependencies` what each lane needs, and the simulator how long that is under way."""
        stages = range(self.empty.stages)
        halves = [[Action(lane // 3, PARTS[lane % 3], 0) for lane in lanes] for lanes in self.lanes]
        rule = Dependencies(self.empty.with_programs(halves))
        lanes = [(stage, op) for stage in stages for op in PARTS]
        self.duration = [durations(self.costs, self.empty.stages)[op][stage] for stage, op in lanes]
        self.needs: list[list[Link]] = [[] for _ in lanes]
        self.feeds: list[list[Link]] = [[] for _ in lanes]
        for lane, (stage, op) in enumerate(lanes):
            for need in rule.needs(stage, op):
                source = 3 * need.stage + PARTS.index(need.split_op)
                is_local = self.rank[source] == self.rank[lane]
                lag = 0.0 if is_local else under_way(self.empty, rule, need, self.costs)
                self.needs[lane].append((source, lag))
                self.feeds[source].append((lane, lag))
        graph = {lane: [source for source, _ in needs] for lane, needs in enumerate(self.needs)}
        self.order = list(TopologicalSorter(graph).static_order())

    def _may_fuse(self, stage: int) -> bool:
        halves = self.duration[3 * stage + GRADIENT] + self.duration[3 * stage + WEIGHT]
        return not self.is_whole[stage] and self.whole[stage] < halves * (1 - SLACK)

    def held_by_one(self, rank: int) -> float:
        """What a rank holds of one microbatch between forward and backward: the least that it needs."""
        return math.fsum(self.activation[stage] for stage in self.empty.placement.stages_on(rank))
