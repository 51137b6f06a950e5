"""Local search: simulated annealing on the programs of a draft.

A move takes one action out of a rank's program and puts it in elsewhere. What that does to the makespan is
first estimated from the times before and after the stretch between the two places, as job shops do (Balas
and Vazacopoulos, "Guided local search with shifting bottleneck for job shop scheduling", 1998); only what the
estimate lets pass is timed. A step repeats itself from microbatch to microbatch, so some moves are made for
several microbatches at once: they change how far a rank runs ahead, which no single move does.
"""

from __future__ import annotations

from math import exp, log
from random import Random
from time import monotonic

from penstock.schedule.searching.draft import Draft, Numbers
from penstock.schedule.searching.problem import SLACK, Problem

CRITICAL = 0.5
"""The share of moves of actions that the makespan hangs on."""
REPEATED = 0.2
"""The share of moves for several microbatches at once."""
FUSING = 0.1
"""The share of moves that make a backward a B or take one apart, where that can be better."""
REACH = 4.0
"""How far a move goes on average."""
HOT, COLD = 0.4, 0.02
"""The first and the last temperature, in durations of a mean action."""


class Annealer:
    """Changes a draft, and keeps the best that it passes.

    Args:
        draft: where to start; it is changed.
        random: what decides.
    """

    def __init__(self, draft: Draft, random: Random) -> None:
        self._problem: Problem = draft.problem
        self._draft = draft
        self._random = random.random
        self.best = draft.copy()
        self._place = [0] * len(draft.duration)
        self._held: list[list[float]] = [[] for _ in draft.programs]
        for rank in range(len(draft.programs)):
            self._index(rank)
        self._critical: Numbers = []

    def run(self, moves: int, until: float, target: float) -> None:
        """Try moves while it cools down.

        Args:
            moves: how many.
            until: when to stop early, on the monotonic clock.
            target: a makespan that cannot be bettered.
        """
        mean = sum(self._draft.duration) / len(self._draft.duration)
        for tried in range(moves):
            if tried % 64 == 0:
                heat = mean * HOT * exp(log(COLD / HOT) * tried / moves)
                if self.best.makespan <= target or monotonic() > until:
                    return
            self._try(self._draft.makespan - heat * log(1 - self._random()))

    def _try(self, bound: float) -> None:
        """Make one move if the makespan stays within a bound."""
        random = self._random
        if self._problem.fusible and random() < FUSING:
            self._fuse(bound)
            return
        if random() < CRITICAL:
            number = self._any_critical()
            rank = self._problem.rank[number // self._problem.microbatches]
            source = self._place[number]
        else:
            rank = int(random() * len(self._held))
            source = int(random() * len(self._draft.programs[rank]))
        way = 1 + int(-REACH * log(1 - random()))
        target = source + (way if random() < 0.5 else -way)
        if not 0 <= target < len(self._draft.programs[rank]):
            return
        if random() < REPEATED:
            self._move_several(rank, source, target, bound)
        else:
            self._move(rank, source, target, bound)

    def _any_critical(self) -> int:
        draft = self._draft
        if not self._critical:
            least = draft.makespan * (1 - SLACK)
            starts = map(float.__sub__, draft.end, draft.duration)
            through = map(float.__add__, starts, draft.after)
            self._critical = [number for number, path in enumerate(through) if path >= least]
        return self._critical[int(self._random() * len(self._critical))]

    # One action.

    def _move(self, rank: int, source: int, target: int, bound: float) -> None:
        program = self._draft.programs[rank]
        first, last = min(source, target), max(source, target)
        lane = program[source] // self._problem.microbatches
        window = program[first : last + 1]
        lowest = lane * self._problem.microbatches
        same = [n for n in window if lowest <= n < lowest + self._problem.microbatches]
        if len(same) == len(window):
            return
        allowed = self._may_go_later if source < target else self._may_go_earlier
        if not allowed(rank, same, source, target):
            return
        moved = window.pop(source - first)
        window.insert(target - first, moved)
        if len(same) > 1:  # The lane's microbatches stay in order.
            ascending = iter(same)
            window = [next(ascending) if lowest <= n <= same[-1] else n for n in window]
        if self._estimate(rank, first, window) <= bound:
            changed = program[:first] + window + program[last + 1 :]
            self._adopt(rank, changed, bound)

    def _may_go_later(self, rank: int, same: Numbers, source: int, target: int) -> bool:
        """Whether each of a lane's actions may go where the next one stands, the last to the target."""
        problem, place, m = self._problem, self._place, self._problem.microbatches
        lane = same[0] // m
        stands = [place[number] for number in same[1:]] + [target]
        for fed in problem.within_onward[lane]:
            for number, goes in zip(same, stands, strict=True):
                if place[number + (fed - lane) * m] <= goes:
                    return False
        growth = self._draft.growth[same[0]]
        held = self._held[rank]
        return growth >= 0 or max(held[source + 2 : target + 2]) - growth <= problem.limit[rank]

    def _may_go_earlier(self, rank: int, same: Numbers, source: int, target: int) -> bool:
        """Whether each of a lane's actions may go where the one before stands, the first to the target."""
        problem, place, m = self._problem, self._place, self._problem.microbatches
        lane = same[0] // m
        stands = [target] + [place[number] for number in same[:-1]]
        for needed in problem.within[lane]:
            for number, goes in zip(same, stands, strict=True):
                if place[number + (needed - lane) * m] >= goes:
                    return False
        growth = self._draft.growth[same[0]]
        held = self._held[rank]
        return growth <= 0 or max(held[target : source + 1]) + growth <= problem.limit[rank]

    def _estimate(self, rank: int, first: int, window: Numbers) -> float:
        """The longest way through a changed stretch of a program, if nothing else changed."""
        draft = self._draft
        program, duration, end, after = draft.programs[rank], draft.duration, draft.end, draft.after
        (need, lag, _), (feed, lead, _) = self._problem.across, self._problem.onward
        now = end[program[first - 1]] if first else 0.0
        starts = []
        for number in window:
            there = end[need[number]] + lag[number]
            if there > now:
                now = there
            starts.append(now)
            now += duration[number]
        last = first + len(window)
        rest = after[program[last]] if last < len(program) else 0.0
        longest = 0.0
        for number in reversed(window):
            other = after[feed[number]] + lead[number]
            rest = (other if other > rest else rest) + duration[number]
            way = starts.pop() + rest
            if way > longest:
                longest = way
        return longest

    # The same action of several microbatches.

    def _move_several(self, rank: int, source: int, target: int, bound: float) -> None:
        """Put an action, and those of its lane around it, next to the same other lane's action."""
        m, program = self._problem.microbatches, self._draft.programs[rank]
        moved, anchor = program[source], program[target]
        lane, first = moved // m, moved % m
        apart = anchor - moved
        if anchor // m == lane:
            return
        count = 1 + int(self._random() * m)
        first = max(0, first - int(self._random() * count))
        movers = range(lane * m + first, lane * m + min(m, first + count))
        anchors = range(anchor // m * m, anchor // m * m + m)
        lanes: Numbers = []
        for number in program:
            if number in movers and number + apart in anchors:
                continue
            if number in anchors and number - apart in movers:
                pair = (anchor // m, lane)
                lanes += pair if target > source else reversed(pair)
            else:
                lanes.append(number // m)
        changed = self._numbered(rank, lanes)
        if changed and changed != program:
            self._adopt(rank, changed, bound)

    def _numbered(self, rank: int, lanes: Numbers) -> Numbers | None:
        """A program from its lanes, if each action finds what it needs and there is memory for it."""
        problem, m = self._problem, self._problem.microbatches
        growth, within, most = problem.growth, problem.within, problem.limit[rank]
        done = dict.fromkeys(problem.lanes[rank], 0)
        held, numbers = 0.0, []
        for lane in lanes:
            k = done[lane]
            for needed in within[lane]:
                if done[needed] <= k:
                    return None
            held += growth[lane]
            if held > most:
                return None
            done[lane] = k + 1
            numbers.append(lane * m + k)
        return numbers

    # A backward as a whole, or in two halves.

    def _fuse(self, bound: float) -> None:
        draft, m = self._draft, self._problem.microbatches
        stage = self._problem.fusible[int(self._random() * len(self._problem.fusible))]
        place = stage * m + int(self._random() * m)
        rank = self._problem.rank[3 * stage]
        draft.set_fused(place, not draft.fused[place])
        if draft.fits(rank) and draft.accept(bound):
            self._note(rank)
        else:
            draft.set_fused(place, not draft.fused[place])

    def _adopt(self, rank: int, changed: Numbers, bound: float) -> None:
        """Take a changed program if it fits, completes and keeps to the bound."""
        draft = self._draft
        before, draft.programs[rank] = draft.programs[rank], changed
        if (not self._problem.fusible or draft.fits(rank)) and draft.accept(bound):
            self._note(rank)
        else:
            draft.programs[rank] = before

    def _note(self, rank: int) -> None:
        self._index(rank)
        self._critical = []
        if self._draft.makespan < self.best.makespan:
            self.best = self._draft.copy()

    def _index(self, rank: int) -> None:
        """Where a rank's actions stand, and what it holds before each and at the end."""
        growth, place = self._draft.growth, self._place
        held, now = [0.0], 0.0
        for position, number in enumerate(self._draft.programs[rank]):
            place[number] = position
            now += growth[number]
            held.append(now)
        self._held[rank] = held
