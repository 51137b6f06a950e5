"""Simulated annealing: moves along the critical path improve drafts.

A move puts one action elsewhere in its rank's program. It shortens the step only if it breaks the critical
path, so most moves start from there, as in job shops (van Laarhoven, Aarts and Lenstra, "Job shop scheduling
by simulated annealing", 1992). The times before and after the stretch that a move changes first give an
estimate of the makespan (Balas and Vazacopoulos, "Guided local search with shifting bottleneck for job shop
scheduling", 1998); only moves that pass are timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import exp, inf, log
from operator import add
from random import Random
from time import monotonic

from penstock.schedule.clock import run
from penstock.schedule.searching.task import SLACK, Draft

CRITICAL = 0.75
"""The share of moves that move an action of the critical path."""
FUSING = 0.1
"""The share of moves that fuse a backward into a B or split one, where that may help."""
REACH = 4.0
"""How far a move goes on average."""
HOT, COLD = 0.5, 0.02
"""The first and the last temperature, in mean durations of actions."""
TIMING = 1 / 8
"""The cost of timing a draft, per action; trying a move costs 1."""


class Annealer:
    """Changes a draft, and keeps the best one found.

    Args:
        draft: the draft to start from.
        random: the source of all random choices.

    Attributes:
        best: the best draft so far.
    """

    def __init__(self, draft: Draft, random: Random) -> None:
        self.best = draft
        self._task, self._random = draft.task, random.random
        self._programs, self._wholes = list(draft.programs), draft.wholes
        self._duration, self._growth = draft.task.per_number(draft.wholes)
        self._spent = 0.0
        self._is_timed(self._programs, inf)

    def run(self, effort: float, until: float) -> None:
        """Try moves while the temperature falls.

        Args:
            effort: the cost of all moves to try.
            until: when to stop early, on the monotonic clock.
        """
        mean = sum(self._task.duration) / len(self._task.duration)
        least = self._task.least * (1 + SLACK)
        while self._spent < effort and self.best.makespan > least and monotonic() <= until:
            heat = mean * HOT * exp(log(COLD / HOT) * self._spent / effort)
            for _ in range(32):
                bound = self._makespan - heat * log(1 - self._random())
                if self._task.fusible and self._random() < FUSING:
                    self._fuse(bound)
                else:
                    self._move(bound)

    def _move(self, bound: float) -> None:
        """Put an action elsewhere in its program if the makespan stays within a bound."""
        self._spent += 1
        random, parts = self._random, self._task.parts
        among = self._critical if random() < CRITICAL else range(len(self._duration))
        number = among[int(random() * len(among))]
        rank = self._task.rank[number]
        program = self._programs[rank]
        way = 1 + int(-REACH * log(1 - random()))
        source = program.index(number)
        target = source + (way if random() < 0.5 else -way)
        if not 0 <= target < len(program):
            return
        first, last = min(source, target), max(source, target)
        window = program[first : last + 1]
        window.insert(target - first, window.pop(source - first))
        lane = range(number - number % parts, number - number % parts + parts)
        # The lane's parts stay in order.
        turns = iter(sorted(each for each in window if each in lane))
        window = [next(turns) if each in lane else each for each in window]
        if not self._is_allowed(rank, first, window):
            return
        if self._estimate(program, first, window) <= bound:
            programs = list(self._programs)
            programs[rank] = program[:first] + window + program[last + 1 :]
            self._is_timed(programs, bound)

    def _fuse(self, bound: float) -> None:
        """Fuse a backward into a B, or split a B, if the makespan stays within a bound."""
        self._spent += 1
        task, before = self._task, (self._wholes, self._duration, self._growth)
        lane = task.fusible[int(self._random() * len(task.fusible))]
        number = lane * task.parts + int(self._random() * task.parts)
        self._wholes = self._wholes ^ {number}
        self._duration, self._growth = task.per_number(self._wholes)
        rank = task.rank[number]
        held = accumulate(map(self._growth.__getitem__, self._programs[rank]))
        if not (max(held) <= task.limit[rank] and self._is_timed(self._programs, bound)):
            self._wholes, self._duration, self._growth = before

    def _is_allowed(self, rank: int, first: int, window: Sequence[int]) -> bool:
        """Tell whether needs and memory allow a rank to run a stretch of its program in another order."""
        growth, before, most = self._growth, self._task.before, self._task.limit[rank]
        held = sum(map(growth.__getitem__, self._programs[rank][:first]))
        later = set(window)
        for number in window:
            later.discard(number)
            held += growth[number]
            if held > most or not later.isdisjoint(before[number]):
                return False
        return True

    def _estimate(self, program: Sequence[int], first: int, window: Sequence[int]) -> float:
        """The longest path through a changed stretch of a program, if nothing else changed."""
        end, after, duration = self._end, self._after, self._duration
        needs, feeds = self._task.needs, self._task.feeds
        now = end[program[first - 1]] if first else 0.0
        starts = []
        for number in window:
            for other, lag in needs[number]:
                if end[other] + lag > now:
                    now = end[other] + lag
            starts.append(now)
            now += duration[number]
        last = first + len(window)
        rest = after[program[last]] if last < len(program) else 0.0
        longest = 0.0
        for number in reversed(window):
            for other, lag in feeds[number]:
                if after[other] + lag > rest:
                    rest = after[other] + lag
            rest += duration[number]
            longest = max(longest, starts.pop() + rest)
        return longest

    def _is_timed(self, programs: list[list[int]], bound: float) -> bool:
        """Time programs; keep them if they complete within a bound."""
        duration, rank_of, feeds = self._duration, self._task.rank, self._task.feeds
        self._spent += TIMING * len(duration)
        ran = run(programs, duration, self._task.needs)
        makespan = max(ran.end)
        if ran.stuck or makespan > bound:
            return False
        self._programs, self._makespan, self._end = programs, makespan, ran.end
        after, following = [0.0] * len(duration), [0.0] * len(programs)
        for number in reversed(ran.order):
            rest = following[rank_of[number]]
            for other, lag in feeds[number]:
                if after[other] + lag > rest:
                    rest = after[other] + lag
            following[rank_of[number]] = after[number] = rest + duration[number]
        self._after = after
        least = makespan * (1 - SLACK)
        paths = map(add, ran.start, after)
        self._critical = [number for number, path in enumerate(paths) if path >= least]
        if makespan < self.best.makespan:
            self.best = Draft(makespan, self._task, programs, self._wholes)
        return True
