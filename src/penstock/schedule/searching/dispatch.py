"""List scheduling: at each moment the rank that can start first starts what its rule prefers.

A rank whose memory is full waits for a gradient, which waits for forwards of other stages; ranks that hold
several stages could so wait for each other for ever. What lets the oldest microbatch through is therefore
kept free: the microbatches after it take no memory that it may still need.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from random import Random
from typing import NamedTuple

from penstock.schedule.searching.draft import Draft
from penstock.schedule.searching.problem import FORWARD, GRADIENT, WEIGHT, Problem

NEVER = math.inf


class Rule(NamedTuple):
    """What a list scheduler prefers.

    Attributes:
        offset: for each lane the rank of its first microbatch in the order of preference; the least is first.
        period: by how much each further microbatch ranks lower.
        patience: a W gives way to what comes within this share of its duration.
        ahead: for each stage the most microbatches that may be between their F and their gradient.
        whole: whether backwards that may be a B are.
    """

    offset: tuple[float, ...]
    period: float
    patience: float
    ahead: tuple[int, ...]
    whole: bool = False


class Dispatcher:
    """Makes a draft by a rule.

    Args:
        problem: what is to be scheduled.
        rule: what to prefer.
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
        self._patience = [
            rule.patience * duration if lane % 3 == WEIGHT else 0.0
            for lane, duration in enumerate(self._duration)
        ]
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
        """What a rank would start next: when, how preferred, and of which lane."""
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
        """When what the next action of a lane needs is there."""
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
    """The portfolio: some orders of preference with several depths and kinds of patience."""
    stages, lanes = len(problem.duration) // 3, len(problem.duration)
    load = max(sum(problem.duration[lane] for lane in held) for held in problem.lanes)
    oldest_first = (tuple(-float(lane) for lane in range(lanes)), float(lanes))
    gradients_first = (tuple(-1e6 * (lane % 3 == GRADIENT) for lane in range(lanes)), 1.0)
    by_time = (tuple(_alone(problem)), load)
    every = (problem.microbatches,) * stages
    wholes = (False, True) if problem.fusible else (False,)
    for whole, patience in product(wholes, (0.5, 1e6, 1.0)):
        for order in (by_time, gradients_first):
            yield Rule(*order, patience, every, whole)
        for ahead in _depths(problem):
            yield Rule(*oldest_first, patience, (ahead,) * stages, whole)
    for ahead in _depths(problem):
        yield Rule(*gradients_first, 0.5, (ahead,) * stages)


def _depths(problem: Problem) -> list[int]:
    """Some numbers of microbatches ahead, from one to more than a rank makes use of or has memory for."""
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


def varied(rule: Rule, random: Random) -> Rule:
    """A rule with other numbers of microbatches ahead for some stages, or another patience or order."""
    kind = random.random()
    if kind < 0.2:
        return rule._replace(patience=random.choice((0.25, 0.5, 0.75, 1.0, 2.0, 1e6)))
    if kind < 0.4:
        spread = rule.period / 2
        return rule._replace(offset=tuple(x + random.gauss(0, spread) for x in rule.offset))
    first = random.randrange(len(rule.ahead))
    last = random.randrange(first, len(rule.ahead))
    step = random.choice((-1, 1))
    ahead = [n + step * (first <= stage <= last) for stage, n in enumerate(rule.ahead)]
    return rule._replace(ahead=tuple(max(1, n) for n in ahead))
