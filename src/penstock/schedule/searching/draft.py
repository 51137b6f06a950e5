"""A schedule on the way: for each rank the numbers of its actions in order, and when they run.

The simulator's clock in as few steps as Python can do it in, since a search runs it ten thousand times; what
is found is judged by the simulator itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy

from penstock.schedule.action import Op
from penstock.schedule.base import Schedule
from penstock.schedule.searching.problem import FORWARD, GRADIENT, WEIGHT, Problem

Numbers = list[int]
NOT_YET = -1.0
FIRST_LANE = {Op.F: FORWARD, Op.I: GRADIENT, Op.B: GRADIENT, Op.W: WEIGHT}


class Draft:
    """Programs, and when their actions run.

    Args:
        problem: what is to be scheduled.
        programs: for each rank all its numbers, those of a lane ascending.
        fused: for each stage and microbatch whether its backward is a B; by default none is.

    Attributes:
        makespan: when the last action ends; infinite where ranks wait for each other for ever.
        end: for each number when its action ends; 0 beyond the last.
        after: for each number how long the step takes at least from its start; 0 beyond the last.
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
        """Time the programs as they are now; if they complete within a bound, take these times for theirs."""
        makespan, end, order = self._run()
        if len(order) < len(self.duration) or makespan > bound:
            return False
        self.makespan, self.end, self._order = makespan, end, order
        self._look_back()
        return True

    def _run(self) -> tuple[float, list[float], Numbers]:
        """The makespan, when each action ends, and in which order they may run; some lack where it stops."""
        programs, duration = self.programs, self.duration
        need, lag, needs = self.problem.across
        end = [NOT_YET] * len(duration) + [0.0]
        order: Numbers = []
        clock = [0.0] * len(programs)
        at = [0] * len(programs)
        sleepers: dict[int, Numbers] = {}
        ready = list(range(len(programs)))
        while ready:
            rank = ready.pop()
            now, program = clock[rank], programs[rank]
            for place in range(at[rank], len(program)):
                number = program[place]
                awaited = need[number]
                there = end[awaited] + lag[number]
                if needs and number in needs:
                    awaited, there = _latest(needs[number], end)
                if end[awaited] < 0:
                    at[rank] = place
                    sleepers.setdefault(awaited, []).append(rank)
                    break
                now = (there if there > now else now) + duration[number]
                end[number] = now
                order.append(number)
                if number in sleepers:
                    ready += sleepers.pop(number)
            clock[rank] = now
        return max(clock), end, order

    def _look_back(self) -> None:
        """Work out how long the step takes from the start of each action, once the ends are known."""
        problem, m = self.problem, self.problem.microbatches
        rank_of, duration = problem.rank, self.duration
        feed, lead, feeds = problem.onward
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


def _latest(needs: Sequence[tuple[int, float]], end: Sequence[float]) -> tuple[int, float]:
    """Of several needs one that is not there yet, or the last to come, and when it is there."""
    latest, when = needs[0][0], NOT_YET
    for awaited, lag in needs:
        if end[awaited] < 0:
            return awaited, NOT_YET
        if end[awaited] + lag > when:
            latest, when = awaited, end[awaited] + lag
    return latest, when


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
