"""Drafts made by a list scheduler, and made better by local search."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from math import exp, log
from operator import itemgetter
from random import Random
from time import monotonic
from typing import NamedTuple

from penstock.schedule.searching.problem import (
    FORWARD,
    GRADIENT,
    SLACK,
    WEIGHT,
    Draft,
    Numbers,
    Problem,
)

NEVER = math.inf
CRITICAL = 0.5
"""The share of moves that move an action on which the makespan depends."""
REPEATED = 0.2
"""The share of moves that are made for several microbatches at once."""
FUSING = 0.1
"""The share of moves that make a backward a B or take one apart, where that can be better."""
REACH = 4.0
"""How far a move goes on average."""
DISPATCHING = 0.8
"""The cost of making a draft by a rule, for each of its actions; a move that is not timed costs 1."""
KEPT = 8
"""How many rules are varied."""
TIMING = 1 / 8
"""The cost of timing a draft, for each of its actions; a move that is not timed costs 1."""
HOT, COLD = 0.5, 0.02
"""The first and the last temperature, in durations of a mean action."""


class Rule(NamedTuple):
    """What a list scheduler prefers.

    Attributes:
        offset: for each lane the priority of its first microbatch; the least comes first.
        period: what each further microbatch adds to that.
        patience: for each lane for how long its action waits for another that is preferred.
        ahead: for each stage the most microbatches that may be between their F and their gradient.
        whole: whether backwards that may be a B are.
    """

    offset: tuple[float, ...]
    period: float
    patience: tuple[float, ...]
    ahead: tuple[int, ...]
    whole: bool = False


class Dispatcher:
    """A list scheduler: at each moment the rank that can start first starts what its rule prefers.

    A rank whose memory is full waits for a gradient, which waits for forwards of other stages; so ranks that
    hold several stages could wait for each other forever. To prevent that, later microbatches take no memory
    that the oldest may still need to get through.

    Args:
        problem: what is to be scheduled.
        rule: what it prefers.
    """

    def __init__(self, problem: Problem, rule: Rule) -> None:
        lanes = len(problem.duration)
        m = problem.microbatches
        self._problem, self._rule = problem, rule
        whole = [rule.whole or problem.stash[s] > problem.activation[s] for s in problem.fusible]
        fused = {stage for stage, is_whole in zip(problem.fusible, whole, strict=True) if is_whole}
        self._fused = [stage in fused for stage in range(lanes // 3) for _ in range(m)]
        self._duration, self._growth = list(problem.duration), list(problem.growth)
        for stage in fused:
            gradient = 3 * stage + GRADIENT
            self._duration[gradient : gradient + 2] = problem.whole[stage], 0.0
            self._growth[gradient : gradient + 2] = -problem.activation[stage], 0.0
        # The W inside a B takes no time, and has nothing to wait for.
        pairs = zip(rule.patience, self._duration, strict=True)
        self._patience = [patience if duration else 0.0 for patience, duration in pairs]
        self._programs: list[list[int]] = [[] for _ in range(problem.ranks)]
        self._clock = [0.0] * problem.ranks
        self._held = [0.0] * problem.ranks
        self._one = [problem.held_by_one(rank) for rank in range(problem.ranks)]
        self._shares = [len(found) > 3 for found in problem.lanes]
        self._done = [0] * lanes
        self._end: list[list[float]] = [[] for _ in range(lanes)]
        self._ready = [0.0 if not needs else NEVER for needs in problem.needs]
        self._through = 0
        """How many microbatches have passed all forwards."""

    def run(self) -> Draft:
        """Start one action after the other until none is left."""
        problem = self._problem
        chosen = [self._choose(rank) for rank in range(problem.ranks)]
        for _ in range(len(self._done) * problem.microbatches):
            start, _, lane = min(chosen)
            stale = self._start(lane, start)
            for rank in stale:
                chosen[rank] = self._choose(rank)
        return Draft(problem, self._programs, self._fused)

    def _choose(self, rank: int) -> tuple[float, float, int]:
        """What a rank would start next: when, with which priority, and of which lane."""
        now, rule, ready, patience = self._clock[rank], self._rule, self._ready, self._patience
        best, best_when = (NEVER, NEVER, -1), (NEVER, NEVER)
        for lane in self._problem.lanes[rank]:
            start = ready[lane]
            if start == NEVER or (lane % 3 == FORWARD and not self._has_room(rank, lane)):
                continue
            if start < now:
                start = now
            when = (start + patience[lane], rule.offset[lane] + rule.period * self._done[lane])
            if when < best_when:
                best, best_when = (start, when[1], lane), when
        return best

    def _has_room(self, rank: int, lane: int) -> bool:
        """Whether a rank may take the next forward of a lane."""
        done, growth, most = self._done, self._growth, self._problem.limit[rank]
        if done[lane] - done[lane + GRADIENT] >= self._rule.ahead[lane // 3]:
            return False
        if self._held[rank] + growth[lane] > most:
            return False
        if not self._shares[rank] or done[lane] <= self._through:
            return True
        kept = self._one[rank] + growth[lane]
        for other in self._problem.lanes[rank][::3]:
            kept += growth[other] * max(0, done[other] - self._through - 1)
        return kept <= most

    def _start(self, lane: int, start: float) -> set[int]:
        """Start the next action of a lane; returns the ranks that must choose again."""
        problem, done = self._problem, self._done
        rank = problem.rank[lane]
        self._programs[rank].append(lane * problem.microbatches + done[lane])
        self._clock[rank] = end = start + self._duration[lane]
        self._end[lane].append(end)
        self._held[rank] += self._growth[lane]
        done[lane] += 1
        stale = {rank}
        self._ready[lane] = self._when_ready(lane)
        for fed, _ in problem.feeds[lane]:
            if self._ready[fed] == NEVER:
                self._ready[fed] = self._when_ready(fed)
                stale.add(problem.rank[fed])
        if lane % 3 == FORWARD and min(done[::3]) > self._through:
            self._through += 1
            stale.update(range(problem.ranks))
        return stale

    def _when_ready(self, lane: int) -> float:
        """When all that the next action of a lane needs is there."""
        k = self._done[lane]
        if k == self._problem.microbatches:
            return NEVER
        latest = 0.0
        for source, lag in self._problem.needs[lane]:
            if self._done[source] <= k:
                return NEVER
            latest = max(latest, self._end[source][k] + lag)
        return latest


def rules(problem: Problem) -> Iterator[Rule]:
    """The portfolio: several orders of preference, depths and kinds of patience."""
    stages, lanes = len(problem.duration) // 3, len(problem.duration)
    load = max(sum(problem.duration[lane] for lane in held) for held in problem.lanes)
    oldest_first = (tuple(-float(lane) for lane in range(lanes)), float(lanes))
    gradients_first = (tuple(-1e6 * (lane % 3 == GRADIENT) for lane in range(lanes)), 1.0)
    by_time = (tuple(_alone(problem)), load)
    every = (problem.microbatches,) * stages
    wholes = (False, True) if problem.fusible else (False,)
    for whole, share in product(wholes, (0.5, 1e6, 1.0)):
        patience = _patience_of_weights(problem, share)
        for order in (by_time, gradients_first):
            yield Rule(*order, patience, every, whole)
        for ahead in _depths(problem):
            yield Rule(*oldest_first, patience, (ahead,) * stages, whole)
    for ahead in _depths(problem):
        yield Rule(*gradients_first, _patience_of_weights(problem, 0.5), (ahead,) * stages)


def _patience_of_weights(problem: Problem, share: float) -> tuple[float, ...]:
    """Only Ws wait, for what comes within a share of their duration."""
    return tuple(
        share * duration if lane % 3 == WEIGHT else 0.0
        for lane, duration in enumerate(problem.duration)
    )


def _depths(problem: Problem) -> list[int]:
    """Numbers of microbatches ahead, from one to as many as a rank can use or has memory for."""
    most = 2 * problem.ranks
    if all(problem.activation):
        holds = (
            problem.limit[rank] / problem.activation[stage]
            for stage, rank in enumerate(problem.empty.placement.rank_of)
        )
        most = int(min(most, max(holds)))
    most = max(1, min(most, problem.microbatches - 1))
    return sorted({1 + round(step * (most - 1) / 7) for step in range(8)})


def _alone(problem: Problem) -> list[float]:
    """When each action of one microbatch starts if it is the only one."""
    start = [0.0] * len(problem.duration)
    for lane in problem.order:
        there = (
            start[source] + problem.duration[source] + lag for source, lag in problem.needs[lane]
        )
        start[lane] = max(there, default=0.0)
    return start


class Climber:
    """Hill climbing among rules: variations of the best few of them, each with another makespan.

    Where memory is tight, it matters which forwards wait although they could start, because they would take
    memory that others need sooner. The patience of a lane can express that; an order of preference cannot.

    Args:
        problem: what is to be scheduled.
        random: makes all random choices.
        until: when to stop, on the monotonic clock.
    """

    def __init__(self, problem: Problem, random: Random, until: float) -> None:
        self._problem, self._random, self._until = problem, random, until
        self._best: list[tuple[float, Rule, Draft]] = []
        for rule in rules(problem):
            if not self._best or monotonic() < until:
                self._attempt(rule)

    @property
    def drafts(self) -> list[Draft]:
        """Of the best rules, the best first."""
        return [draft for _, _, draft in self._best]

    def run(self, effort: float, target: float) -> None:
        """Try variations.

        Args:
            effort: how much to try, in moves of the annealer.
            target: a makespan that cannot be bettered.
        """
        each = DISPATCHING * len(self._problem.duration) * self._problem.microbatches
        for _ in range(int(effort / each)):
            if self._best[0][0] <= target or monotonic() > self._until:
                break
            rule = self._random.choice(self._best)[1]
            for _ in range(self._random.randint(1, 3)):
                rule = self._varied(rule)
            self._attempt(rule)

    def _attempt(self, rule: Rule) -> None:
        draft = Dispatcher(self._problem, rule).run()
        made = draft.makespan
        # Of rules with the same result the last is kept, so that changes can add up to one that helps.
        others = [known for known in self._best if abs(known[0] - made) > SLACK * made]
        self._best = sorted([*others, (made, rule, draft)], key=itemgetter(0))[:KEPT]

    def _varied(self, rule: Rule) -> Rule:
        """A rule with another patience, order or number of microbatches ahead for some lanes or stages."""
        random, problem = self._random, self._problem
        kind, lane = random.random(), random.randrange(len(rule.offset))
        if kind < 0.35:
            mean = sum(problem.duration) / len(problem.duration)
            patience = mean * random.choice((0, 0.5, 1, 2, 4, 8)) * random.random()
            return rule._replace(patience=_with(rule.patience, lane, patience))
        if kind < 0.45:
            share = random.choice((0.25, 0.5, 0.75, 1.0, 2.0, 1e6))
            return rule._replace(patience=_patience_of_weights(problem, share))
        if kind < 0.55:
            spread = rule.period / 2
            return rule._replace(offset=tuple(x + random.gauss(0, spread) for x in rule.offset))
        if kind < 0.65:
            moved = rule.offset[lane] + random.gauss(0, rule.period * random.choice((0.2, 1, 3)))
            return rule._replace(offset=_with(rule.offset, lane, moved))
        first = random.randrange(len(rule.ahead))
        last = random.randrange(first, len(rule.ahead))
        step = random.choice((-1, 1))
        ahead = [n + step * (first <= stage <= last) for stage, n in enumerate(rule.ahead)]
        return rule._replace(ahead=tuple(max(1, n) for n in ahead))


def _with(values: tuple[float, ...], index: int, value: float) -> tuple[float, ...]:
    return (*values[:index], value, *values[index + 1 :])


class Annealer:
    """Simulated annealing: changes the programs of a draft, and keeps the best that it meets.

    A move takes one action out of a rank's program and inserts it elsewhere. Its effect on the makespan is
    first estimated from the times before and after the stretch between the two places, as is done for job
    shops (Balas and Vazacopoulos, "Guided local search with shifting bottleneck for job shop scheduling",
    1998); only moves that pass the estimate are timed. A step repeats itself from microbatch to microbatch,
    so some moves are made for several microbatches at once: they change how far a rank runs ahead, which no
    single move does.

    Args:
        draft: where to start; it is changed.
        random: makes all random choices.
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
        self._spent = 0.0

    def run(self, effort: float, until: float, target: float) -> None:
        """Try moves while it cools down.

        Args:
            effort: how much to try: each move costs 1, and more if it is timed.
            until: when to stop early, on the monotonic clock.
            target: a makespan that cannot be bettered.
        """
        mean = sum(self._draft.duration) / len(self._draft.duration)
        self._spent = 0.0
        while self._spent < effort and self.best.makespan > target and monotonic() <= until:
            heat = mean * HOT * exp(log(COLD / HOT) * self._spent / effort)
            for _ in range(64):
                self._try(self._draft.makespan - heat * log(1 - self._random()))

    def _try(self, bound: float) -> None:
        """Make one move if the makespan stays within a bound."""
        self._spent += 1
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

    # ---- moves of one action

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
        """Whether each of a lane's actions may move to the place of the next, and the last to the target."""
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
        """Whether each of a lane's actions may move to the place before, and the first to the target."""
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
        """The longest path through a changed stretch of a program, if nothing else changed."""
        draft = self._draft
        program, duration, end, after = draft.programs[rank], draft.duration, draft.end, draft.after
        across, onward = self._problem.across, self._problem.onward
        need, lag, feed, lead = across.awaited, across.lag, onward.awaited, onward.lag
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

    # ---- moves of the same action of several microbatches

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

    # ---- a backward as a whole, or in two halves

    def _fuse(self, bound: float) -> None:
        draft, m = self._draft, self._problem.microbatches
        stage = self._problem.fusible[int(self._random() * len(self._problem.fusible))]
        place = stage * m + int(self._random() * m)
        rank = self._problem.rank[3 * stage]
        draft.set_fused(place, not draft.fused[place])
        if draft.fits(rank) and self._timed(bound):
            self._note(rank)
        else:
            draft.set_fused(place, not draft.fused[place])

    def _adopt(self, rank: int, changed: Numbers, bound: float) -> None:
        """Take a changed program if it fits, completes and keeps to the bound."""
        draft = self._draft
        before, draft.programs[rank] = draft.programs[rank], changed
        if (not self._problem.fusible or draft.fits(rank)) and self._timed(bound):
            self._note(rank)
        else:
            draft.programs[rank] = before

    def _timed(self, bound: float) -> bool:
        """Time the draft as it is now; returns whether it completes within a bound."""
        self._spent += TIMING * len(self._draft.duration)
        return self._draft.accept(bound)

    def _note(self, rank: int) -> None:
        self._index(rank)
        self._critical = []
        if self._draft.makespan < self.best.makespan:
            self.best = self._draft.copy()

    def _index(self, rank: int) -> None:
        """Note the places of a rank's actions, and what it holds before each and at the end."""
        growth, place = self._draft.growth, self._place
        held, now = [0.0], 0.0
        for position, number in enumerate(self._draft.programs[rank]):
            place[number] = position
            now += growth[number]
            held.append(now)
        self._held[rank] = held
