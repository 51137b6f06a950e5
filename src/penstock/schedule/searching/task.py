"""The step to schedule, in numbers.

The microbatches of a step are alike, so each stage may as well take them in order: any schedule can be
relabelled so that its stages do, without a change in length. The search only decides the order in which a
rank takes its *lanes*, the ops of its stages. A lane is numbered ``3 * stage`` plus 0 for F, 1 for the
gradient (I, or B as a whole) and 2 for W; its action for microbatch ``k`` of ``m`` has the number
``lane * m + k``. A B is a gradient that takes longer, and a W that takes no time and holds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from graphlib import TopologicalSorter
from operator import gt
from typing import NamedTuple

from penstock.schedule.action import Action, Op
from penstock.schedule.base import Edges, Placement, Schedule
from penstock.schedule.clock import Costs, Link, durations, under_way
from penstock.schedule.dependencies import Dependencies

PARTS = (Op.F, Op.I, Op.W)
FORWARD, GRADIENT, WEIGHT = range(3)
SLACK = 1e-9
"""The share by which sums of the same numbers may differ when they are added in another order."""


class Task:
    """The work of each rank: what it needs, how long it takes and what it holds.

    Args:
        placement: which rank holds which stages.
        edges: the values that travel between stages.
        microbatches: the number of microbatches.
        costs: the costs of each stage.
        memory: the most that each rank may hold.

    Attributes:
        lanes: the lanes of each rank.
        rank: the rank of each lane.
        duration: how long an action of each lane takes, a gradient as I.
        growth: by how much an action of each lane changes what the rank holds, a gradient as I.
        whole: the duration of B on each stage.
        needs: the lanes whose results each lane needs for the same microbatch, and how long after their
            end these results arrive.
        feeds: the same in the other direction.
        order: the lanes, each after those that it needs.
        limit: the most that each rank may hold.
        is_whole: whether each stage's backwards must be B, since I would take memory.
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
        """Get the needs of each lane from `Dependencies`, and their lags from the simulator."""
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
                lag = 0.0 if is_local else under_way(self.empty, rule, need, stage, self.costs)
                self.needs[lane].append((source, lag))
                self.feeds[source].append((lane, lag))
        graph = {lane: [source for source, _ in needs] for lane, needs in enumerate(self.needs)}
        self.order = list(TopologicalSorter(graph).static_order())

    def _may_fuse(self, stage: int) -> bool:
        halves = self.duration[3 * stage + GRADIENT] + self.duration[3 * stage + WEIGHT]
        return not self.is_whole[stage] and self.whole[stage] < halves * (1 - SLACK)

    @cached_property
    def least(self) -> float:
        """A time that every schedule takes at least; see :func:`penstock.schedule.lower_bound`."""
        takes = self._least_durations()
        before, after = [0.0] * len(takes), [0.0] * len(takes)
        for lane in self.order:
            ends = (before[source] + takes[source] + lag for source, lag in self.needs[lane])
            before[lane] = max(ends, default=0.0)
        for lane in reversed(self.order):
            rests = (after[fed] + takes[fed] + lag for fed, lag in self.feeds[lane])
            after[lane] = max(rests, default=0.0)
        ways = [sum(way) for way in zip(before, takes, after, strict=True)]
        for lanes in self.lanes:
            working = [lane for lane in lanes if takes[lane]] or lanes
            head, tail = (min(map(side.__getitem__, working)) for side in (before, after))
            ways.append(head + self.microbatches * sum(takes[lane] for lane in lanes) + tail)
        return max(ways)

    def _least_durations(self) -> list[float]:
        """The least that each lane takes: a gradient the shorter of I and B, a W the rest of a B if less."""
        takes = list(self.duration)
        for stage, whole in enumerate(self.whole):
            forward, gradient, weight = (3 * stage + part for part in range(3))
            takes[forward] *= 1 - self.costs.overlap
            takes[gradient] = whole if self.is_whole[stage] else min(takes[gradient], whole)
            takes[weight] = min(takes[weight], whole - takes[gradient])
        return takes

    @cached_property
    def links(self) -> Links:
        """What each action needs and feeds."""
        return Links(self)

    def per_action(self, wholes: frozenset[int]) -> tuple[list[float], list[float]]:
        """How long each number takes, and by how much it changes what its rank holds.

        Args:
            wholes: the backwards that are a B, as ``stage * microbatches + microbatch``.
        """
        m = self.microbatches
        duration = [takes for takes in self.duration for _ in range(m)]
        growth = [change for change in self.growth for _ in range(m)]
        for place in wholes:
            stage, microbatch = divmod(place, m)
            gradient = (3 * stage + GRADIENT) * m + microbatch
            duration[gradient], duration[gradient + m] = self.whole[stage], 0.0
            growth[gradient], growth[gradient + m] = -self.activation[stage], 0.0
        return duration, growth

    def held_by_one(self, rank: int) -> float:
        """What a rank holds of one microbatch between forward and backward: its least memory."""
        return math.fsum(self.activation[stage] for stage in self.empty.placement.stages_on(rank))


class Links:
    """What the actions of a task need and feed, by number.

    Attributes:
        before: the numbers on its own rank that each number needs.
        needs: the numbers on other ranks that each number needs, and how long their results travel.
        feeds: the same in the other direction.
    """

    def __init__(self, task: Task) -> None:
        m, size = task.microbatches, len(task.duration) * task.microbatches
        self.before: list[list[int]] = [[] for _ in range(size)]
        self.needs: list[list[Link]] = [[] for _ in range(size)]
        self.feeds: list[list[Link]] = [[] for _ in range(size)]
        for lane, needs in enumerate(task.needs):
            for (other, lag), k in ((link, k) for link in needs for k in range(m)):
                number, needed = lane * m + k, other * m + k
                if task.rank[other] == task.rank[lane]:
                    self.before[number].append(needed)
                else:
                    self.needs[number].append((needed, lag))
                    self.feeds[needed].append((number, lag))


class Draft(NamedTuple):
    """A schedule under construction.

    Attributes:
        makespan: when the last action ends.
        task: the task that the schedule solves.
        programs: the numbers of each rank's actions, in order.
        wholes: the backwards that are a B, as ``stage * microbatches + microbatch``.
    """

    makespan: float
    task: Task
    programs: list[list[int]]
    wholes: frozenset[int]

    def schedule(self) -> Schedule:
        """The draft as a schedule."""
        return self.task.empty.with_programs(
            filter(None, map(self._action, program)) for program in self.programs
        )

    def _action(self, number: int) -> Action | None:
        """The action that has a number; ``None`` for the W inside a B."""
        m = self.task.microbatches
        lane, microbatch = divmod(number, m)
        stage, part = divmod(lane, 3)
        if stage * m + microbatch not in self.wholes:
            return Action(stage, PARTS[part], microbatch)
        if part == WEIGHT:
            return None
        return Action(stage, Op.B if part == GRADIENT else Op.F, microbatch)
