"""A step to be scheduled, in numbers, and drafts of its schedule.

The microbatches of a step are alike, so each stage may as well take them in order: any schedule can be
relabelled so that its stages do, and is then as long as before. What is left to decide is in which order a
rank takes its *lanes*, the ops of its stages. A lane is numbered ``3 * stage`` plus 0 for F, 1 for the
gradient (I, or B as a whole) and 2 for W; its action for microbatch ``k`` of ``m`` is number
``lane * m + k``. A B is a gradient that takes longer, and a W that takes no time and holds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy
from graphlib import TopologicalSorter

from penstock.schedule.action import Action, Op
from penstock.schedule.base import Edges, Placement, Schedule
from penstock.schedule.clock import Costs, Waits, durations, half_of, run, under_way
from penstock.schedule.dependencies import Dependencies

PARTS = (Op.F, Op.I, Op.W)
FORWARD, GRADIENT, WEIGHT = range(3)
FIRST_LANE = {Op.F: FORWARD, Op.I: GRADIENT, Op.B: GRADIENT, Op.W: WEIGHT}
Numbers = list[int]
Link = tuple[int, float]
"""Another lane or number, and how long the way to or from it takes."""
SLACK = 1e-9
"""The share by which sums of the same numbers may differ when they are added in another order."""


class Problem:
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
        within, within_onward: those of ``needs`` and of ``feeds`` on the same rank.
        across, onward: those of ``needs`` and of ``feeds`` on other ranks, by number.
        order: the lanes, each after those that it needs.
        limit: for each rank the most that it may hold.
        fusible: the stages for which B may be better than I and W.
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
        self.fusible = [stage for stage in range(stages) if self._may_fuse(stage)]

    def _wire(self) -> None:
        """Ask `Dependencies` what each lane needs, and the simulator how long that is under way."""
        stages = range(self.empty.stages)
        rule = Dependencies(self.empty.with_programs(self._one_microbatch()))
        lanes = [(stage, op) for stage in stages for op in PARTS]
        self.duration = [durations(self.costs, self.empty.stages)[op][stage] for stage, op in lanes]
        self.needs: list[list[Link]] = [[] for _ in lanes]
        self.feeds: list[list[Link]] = [[] for _ in lanes]
        for lane, (stage, op) in enumerate(lanes):
            for need in rule.needs(stage, op):
                source = 3 * need.stage + PARTS.index(half_of(need))
                is_local = self.rank[source] == self.rank[lane]
                lag = 0.0 if is_local else under_way(self.empty, rule, need, self.costs)
                self.needs[lane].append((source, lag))
                self.feeds[source].append((lane, lag))
        self.within, self.within_onward = self._within(self.needs), self._within(self.feeds)
        self.across, self.onward = self._across(self.needs), self._across(self.feeds)
        graph = {lane: [source for source, _ in needs] for lane, needs in enumerate(self.needs)}
        self.order = list(TopologicalSorter(graph).static_order())

    def _one_microbatch(self) -> list[list[Action]]:
        return [[_action(lane, 0) for lane in lanes] for lanes in self.lanes]

    def _within(self, table: Sequence[Sequence[Link]]) -> list[list[int]]:
        return [
            [other for other, _ in links if self.rank[other] == self.rank[lane]]
            for lane, links in enumerate(table)
        ]

    def _across(self, table: Sequence[Sequence[Link]]) -> Waits:
        """The links to other ranks, for each number."""
        m, none = self.microbatches, len(table) * self.microbatches
        waits = Waits([none] * none, [0.0] * none)
        for lane, links in enumerate(table):
            beyond = [link for link in links if self.rank[link[0]] != self.rank[lane]]
            for k in range(m if beyond else 0):
                for other, lag in beyond:
                    waits.add(lane * m + k, other * m + k, lag)
        return waits

    def _may_fuse(self, stage: int) -> bool:
        halves = self.duration[3 * stage + GRADIENT] + self.duration[3 * stage + WEIGHT]
        return (
            self.whole[stage] < halves * (1 - SLACK) or self.stash[stage] > self.activation[stage]
        )

    def held_by_one(self, rank: int) -> float:
        """What a rank holds of one microbatch between forward and backward: the least that it needs."""
        return math.fsum(self.activation[stage] for stage in self.empty.placement.stages_on(rank))

    def schedule(self, programs: Iterable[Iterable[int]], fused: Sequence[bool]) -> Schedule:
        """The programs as a schedule.

        Args:
            programs: for each rank its actions, by their numbers.
            fused: for each stage and microbatch whether its backward is a B.
        """
        return self.empty.with_programs(
            [self._entry(number, fused) for number in program if not self._is_ghost(number, fused)]
            for program in programs
        )

    def _entry(self, number: int, fused: Sequence[bool]) -> Action:
        lane, microbatch = divmod(number, self.microbatches)
        whole = lane % 3 == GRADIENT and fused[lane // 3 * self.microbatches + microbatch]
        return Action(lane // 3, Op.B if whole else PARTS[lane % 3], microbatch)

    def _is_ghost(self, number: int, fused: Sequence[bool]) -> bool:
        """Whether a number is the W inside a B."""
        lane, microbatch = divmod(number, self.microbatches)
        return lane % 3 == WEIGHT and fused[lane // 3 * self.microbatches + microbatch]


def _action(lane: int, microbatch: int) -> Action:
    return Action(lane // 3, PARTS[lane % 3], microbatch)


class Draft:
    """A schedule in the making: for each rank the numbers of its actions in order, and when they run.

    Args:
        problem: what is to be scheduled.
        programs: for each rank all its numbers, those of a lane ascending.
        fused: for each stage and microbatch whether its backward is a B; by default none is.

    Attributes:
        makespan: when the last action ends; infinite if ranks wait for each other forever.
        end: for each number when its action ends; 0 beyond the last.
        after: for each number how long the step takes at least from the start of its action; 0 beyond the
            last.
    """

    def __init__(
        self, problem: Problem, programs: Iterable[Iterable[int]], fused: Sequence[bool] = ()
    ) -> None:
        self.problem = problem
        self.programs = [list(program) for program in programs]
        lanes = range(len(problem.duration))
        m = problem.microbatches
        self.fused = list(fused) or [False] * (len(lanes) // 3 * m)
        self.duration = [problem.duration[lane] for lane in lanes for _ in range(m)]
        self.growth = [problem.growth[lane] for lane in lanes for _ in range(m)]
        for place, whole in enumerate(self.fused):
            if whole:
                self.set_fused(place, whole)
        self.end: list[float] = []
        self.after: list[float] = []
        self._order: Numbers = []
        self.makespan = float("inf")
        self.accept(float("inf"))

    def copy(self) -> Draft:
        """Another draft of the same programs."""
        other = copy(self)
        other.programs = [list(program) for program in self.programs]
        other.fused = list(self.fused)
        other.duration, other.growth = list(self.duration), list(self.growth)
        return other

    def set_fused(self, place: int, whole: bool) -> None:
        """Make one backward a B, or I and W; ``place`` counts stages and their microbatches."""
        problem, m = self.problem, self.problem.microbatches
        stage, microbatch = divmod(place, m)
        gradient = (3 * stage + GRADIENT) * m + microbatch
        weight = gradient + m
        self.fused[place] = whole
        for number in (gradient, weight):
            self.duration[number] = problem.duration[number // m]
            self.growth[number] = problem.growth[number // m]
        if whole:
            self.duration[gradient], self.duration[weight] = problem.whole[stage], 0.0
            self.growth[gradient], self.growth[weight] = -problem.activation[stage], 0.0

    def fits(self, rank: int) -> bool:
        """Whether a rank's program stays within its memory."""
        held, most = 0.0, self.problem.limit[rank]
        for number in self.programs[rank]:
            held += self.growth[number]
            if held > most:
                return False
        return True

    def accept(self, bound: float) -> bool:
        """Time the programs as they are now; keep these times if they complete within a bound."""
        ran = run(self.programs, self.duration, self.problem.across)
        makespan = max(ran.there)
        if ran.stuck or makespan > bound:
            return False
        self.makespan, self.end, self._order = makespan, ran.there, ran.order
        self._look_back()
        return True

    def _look_back(self) -> None:
        """Work out how long the step takes from the start of each action, once the ends are known."""
        problem, m = self.problem, self.problem.microbatches
        rank_of, duration = problem.rank, self.duration
        feed, lead, feeds = problem.onward.awaited, problem.onward.lag, problem.onward.several
        after = [0.0] * (len(duration) + 1)
        following = [0.0] * len(self.programs)
        for number in reversed(self._order):
            rank = rank_of[number // m]
            longest = following[rank]
            other = after[feed[number]] + lead[number]
            if feeds and number in feeds:
                other = max(after[fed] + lag for fed, lag in feeds[number])
            if other > longest:
                longest = other
            following[rank] = after[number] = longest + duration[number]
        self.after = after

    def schedule(self) -> Schedule:
        """The draft as a schedule."""
        return self.problem.schedule(self.programs, self.fused)


def draft_of(problem: Problem, schedule: Schedule) -> Draft:
    """A schedule as a draft; overlapped pairs run one half after the other.

    Its microbatches are relabelled in the order in which each lane takes them.
    """
    m = problem.microbatches
    fused = [False] * (schedule.stages * m)
    programs = []
    for rank in range(schedule.ranks):
        done = dict.fromkeys(range(3 * schedule.stages), 0)
        numbers = []
        for stage, op, _, _ in schedule.actions(rank):
            lane = 3 * stage + FIRST_LANE[op]
            whole = op is Op.B
            for taken in (lane, lane + 1) if whole else (lane,):
                numbers.append(taken * m + done[taken])
                done[taken] += 1
            if whole and stage in problem.fusible:
                fused[stage * m + done[lane] - 1] = True
        programs.append(numbers)
    return Draft(problem, programs, fused)
