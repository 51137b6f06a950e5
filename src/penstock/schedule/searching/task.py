"""The step to schedule, in the numbers of the clock.

The microbatches of a step are alike, so each stage may as well take them in order: any schedule can be
relabelled so that its stages do, without a change in length. The slices of a microbatch have an order anyway:
forward from the first, backward from the last. The search only decides the order in which a rank takes its
*lanes*, the ops of its stages. Each stage has three, one after the other: F, the gradient (I, or B as a
whole) and W. A B is a gradient that takes longer, and a W that takes no time and holds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from penstock.schedule.action import Action, Op, Slice
from penstock.schedule.base import Edges, Placement, Schedule
from penstock.schedule.clock import Costs, Link, durations, growths, run
from penstock.schedule.numbered import Numbered

LANES = (Op.F, Op.I, Op.W)
FORWARD, GRADIENT, WEIGHT = range(3)
SLACK = 1e-9
"""The share by which sums of the same numbers may differ when they are added in another order."""


class Task:
    """The work of each rank: what it needs, how long it takes and what it holds.

    Lane ``n`` has one number for each part, a microbatch or one of its slices, from ``n * parts`` on.

    Args:
        placement: which rank holds which stages.
        edges: the values that travel between stages.
        microbatches: the number of microbatches.
        costs: the costs of each stage.
        memory: the most that each rank may hold.
        slices: into how many slices the sequences of each microbatch are cut.

    Attributes:
        parts: the numbers of a lane.
        split: a schedule of all numbers, in which every backward is split and the order means nothing.
        actions: the action of each number, a gradient as I.
        rank: the rank of each number.
        lanes: the lanes of each rank.
        before: the numbers on its own rank that each number needs.
        needs: the numbers on other ranks that each number needs, and how long their results travel.
        feeds: the same in the other direction.
        limit: the most that each rank may hold.
        whole: the lanes whose gradients must be B, since I would take memory.
        fusible: the other lanes for whose gradients B may be better than I and W.
    """

    def __init__(
        self,
        placement: Placement,
        edges: Edges,
        microbatches: int,
        costs: Costs,
        memory: Sequence[float],
        slices: int = 1,
    ) -> None:
        programs = tuple(
            tuple(
                Action(stage, op, part)
                for stage in placement.stages_on(rank)
                for op in LANES
                for part in in_order(op, microbatches, slices)
            )
            for rank in range(placement.ranks)
        )
        self.split = Schedule("searched", placement, microbatches, programs, edges, slices=slices)
        self.ranks, self.microbatches, self.costs = placement.ranks, microbatches, costs
        self.slices, self.parts = slices, microbatches * slices
        self.limit = [most * (1 + SLACK) for most in memory]
        numbered = Numbered(self.split, costs)
        self.actions = [action for program in programs for action in program]
        self.rank, self.needs = numbered.rank, numbered.needs
        self.feeds = _turned(self.needs)
        self.before = [
            [
                number
                for needed in numbered.rule.before(action)
                if (number := numbered.find(needed)) is not None and self.rank[number] == rank
            ]
            for action, rank in zip(self.actions, self.rank, strict=True)
        ]
        size = 3 * self.parts
        self.lanes = [range(p[0] // size * 3, p[-1] // size * 3 + 3) for p in numbered.programs]
        self._price()

    def _price(self) -> None:
        costs, stages = self.costs, self.split.stages
        self.activation = costs.per_stage("activation", stages)
        self._backward = costs.per_stage("backward", stages)
        takes, grows = durations(costs, stages), growths(costs, stages)
        time_of, size_of = (costs.per_slice(f"slice_{of}", self.split) for of in ("times", "sizes"))
        self._time = [time_of(part) for _, _, part, _ in self.actions]
        self._size = [size_of(part) for _, _, part, _ in self.actions]
        self.duration = [
            takes[op][stage] * share
            for (stage, op, _, _), share in zip(self.actions, self._time, strict=True)
        ]
        self.growth = [
            grows[op][stage] * share
            for (stage, op, _, _), share in zip(self.actions, self._size, strict=True)
        ]
        gradients = range(GRADIENT, 3 * stages, 3)
        self.whole = {lane for lane in gradients if grows[Op.I][self.stage(lane)] > 0}
        self.fusible = [
            lane for lane in gradients if lane not in self.whole and self._may_fuse(lane)
        ]

    def stage(self, lane: int) -> int:
        """The stage of a lane."""
        return self.actions[lane * self.parts].stage

    def _may_fuse(self, lane: int) -> bool:
        number = lane * self.parts
        halves = self.duration[number] + self.duration[number + self.parts]
        return self._whole(number) < halves * (1 - SLACK)

    def _whole(self, number: int) -> float:
        """Return how long a gradient takes as a B."""
        return self._backward[self.actions[number].stage] * self._time[number]

    def per_number(self, wholes: Iterable[int]) -> tuple[list[float], list[float]]:
        """Return how long each number takes, and by how much it changes what its rank holds.

        Args:
            wholes: the gradients that are a B.
        """
        parts, duration, growth = self.parts, list(self.duration), list(self.growth)
        for number in wholes:
            held = self.activation[self.actions[number].stage] * self._size[number]
            duration[number], duration[number + parts] = self._whole(number), 0.0
            growth[number], growth[number + parts] = -held, 0.0
        return duration, growth

    @cached_property
    def least(self) -> float:
        """A time that every schedule takes at least; see :func:`penstock.schedule.lower_bound`."""
        return self.least_of(self.microbatches)

    def least_of(self, microbatches: int) -> float:
        """The same for another number of microbatches."""
        parts, takes = self.parts, self._least_durations()
        # One microbatch, with a clock for each lane: there and, against the links, back.
        links = [
            [*needs, *((n, 0.0) for n in before)]
            for needs, before in zip(self.needs, self.before, strict=True)
        ]
        alone = [range(first, first + self.slices) for first in range(0, len(takes), parts)]
        heads = run(alone, takes, links).start
        tails = run([lane[::-1] for lane in alone], takes, _turned(links)).start
        ways = [heads[n] + takes[n] + tails[n] for lane in alone for n in lane]
        for lanes in self.lanes:
            work = {lane: sum(takes[n] for n in alone[lane]) for lane in lanes}
            working = [lane for lane in lanes if work[lane]] or lanes
            head = min(heads[alone[lane][0]] for lane in working)
            tail = min(tails[alone[lane][-1]] for lane in working)
            ways.append(head + microbatches * sum(work.values()) + tail)
        return max(ways)

    def _least_durations(self) -> list[float]:
        """The least that numbers take: a gradient the shorter of I and B, a W the rest of a B if less."""
        parts, takes = self.parts, list(self.duration)
        overlap = self.costs.per_stage("overlap", self.split.stages)
        for lane in range(GRADIENT, len(takes) // parts, 3):
            for number in range(lane * parts, lane * parts + self.slices):
                whole = self._whole(number)
                takes[number - parts] *= 1 - overlap[self.stage(lane)]
                takes[number] = whole if lane in self.whole else min(takes[number], whole)
                takes[number + parts] = min(takes[number + parts], whole - takes[number])
        return takes

    @cached_property
    def held_by_one(self) -> list[float]:
        """What each rank holds of one microbatch between forward and backward: its least memory."""
        parts, slices = self.parts, self.slices
        return [
            math.fsum(sum(self.growth[f * parts : f * parts + slices]) for f in lanes[::3])
            for lanes in self.lanes
        ]


def in_order(op: Op, microbatches: int, slices: int) -> Sequence[int | Slice]:
    """The microbatches or slices in the order in which a stage takes them."""
    if slices == 1:
        return range(microbatches)
    numbers = range(slices) if op is Op.F else range(slices)[::-1]
    return [Slice(m, number) for m in range(microbatches) for number in numbers]


def _turned(links: Sequence[Sequence[Link]]) -> list[list[Link]]:
    """Links in the other direction."""
    turned: list[list[Link]] = [[] for _ in links]
    for number, needs in enumerate(links):
        for needed, lag in needs:
            turned[needed].append((number, lag))
    return turned


class Draft(NamedTuple):
    """A schedule under construction.

    Attributes:
        makespan: when the last action ends.
        task: the task that the schedule solves.
        programs: the numbers of each rank's actions, in order.
        wholes: the gradients that are a B.
    """

    makespan: float
    task: Task
    programs: list[list[int]]
    wholes: frozenset[int]

    def schedule(self) -> Schedule:
        """The draft as a schedule."""
        parts, actions = self.task.parts, self.task.actions
        return self.task.split.with_programs(
            [
                actions[n]._replace(op=Op.B) if n in self.wholes else actions[n]
                for n in program
                if n - parts not in self.wholes  # the W inside a B
            ]
            for program in self.programs
        )
