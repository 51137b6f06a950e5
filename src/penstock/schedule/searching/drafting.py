"""Drafts of a schedule, made by a list scheduler whose rules are varied."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product
from operator import attrgetter
from random import Random
from time import monotonic
from types import MappingProxyType
from typing import NamedTuple

from penstock.schedule.action import Action, Op
from penstock.schedule.base import Schedule
from penstock.schedule.searching.task import FORWARD, GRADIENT, PARTS, SLACK, WEIGHT, Task

NEVER = math.inf
KEPT = 8
"""How many drafts are varied."""
CLIMBS = 4
"""How often to climb from the start."""


class Rule(NamedTuple):
    """What a list scheduler prefers.

    Attributes:
        offset: for each lane the priority of its first microbatch; the least comes first.
        period: what each further microbatch adds to that.
        patience: for each lane for how long its action waits for another that is preferred.
        ahead: for each stage the most microbatches that may be between their F and their gradient.
        whole: whether backwards that may be a B are.
        delayed: by number, actions that wait longer, or less long, than their lane says.
        changed: the stages and microbatches whose backwards are B where others are not, or the reverse.
    """

    offset: tuple[float, ...]
    period: float
    patience: tuple[float, ...]
    ahead: tuple[int, ...]
    whole: bool = False
    delayed: Mapping[int, float] = MappingProxyType({})
    changed: frozenset[int] = frozenset()


class Draft(NamedTuple):
    """A schedule in the making.

    Attributes:
        makespan: when the last action ends.
        rule: what it was made by.
        task: what it is for.
        programs: for each rank its actions.
    """

    makespan: float
    rule: Rule
    task: Task
    programs: list[list[Action]]

    def schedule(self) -> Schedule:
        """The draft as a schedule."""
        return self.task.empty.with_programs(self.programs)


class Dispatcher:
    """A list scheduler: at each moment the rank that can start first starts what its rule prefers.

    A rank whose memory is full waits for a gradient, which waits for forwards of other stages; so ranks that
    hold several stages could wait for each other forever. To prevent that, later microbatches take no memory
    that the oldest may still need to get through.

    Args:
        task: what is to be scheduled.
        rule: what it prefers.
    """

    def __init__(self, task: Task, rule: Rule) -> None:
        lanes = len(task.duration)
        m = task.microbatches
        self._task, self._rule = task, rule
        whole = [
            has_to or (rule.whole and s in task.fusible) for s, has_to in enumerate(task.is_whole)
        ]
        self._whole = [is_whole for is_whole in whole for _ in range(m)]
        for place in rule.changed:
            self._whole[place] = not self._whole[place]
        self._programs: list[list[Action]] = [[] for _ in range(task.ranks)]
        self._clock = [0.0] * task.ranks
        self._held = [0.0] * task.ranks
        self._one = [task.held_by_one(rank) for rank in range(task.ranks)]
        self._shares = [len(held) > 3 for held in task.lanes]
        self._done = [0] * lanes
        self._end: list[list[float]] = [[] for _ in range(lanes)]
        self._ready = [0.0 if not needs else NEVER for needs in task.needs]
        self._through = 0
        """How many microbatches have passed all forwards."""

    def run(self) -> Draft:
        """Start one action after the other until none is left."""
        task = self._task
        chosen = [self._choose(rank) for rank in range(task.ranks)]
        for _ in range(len(self._done) * task.microbatches):
            start, _, lane = min(chosen)
            stale = self._start(lane, start)
            for rank in stale:
                chosen[rank] = self._choose(rank)
        return Draft(max(self._clock), self._rule, task, self._programs)

    def _choose(self, rank: int) -> tuple[float, float, int]:
        """What a rank would start next: when, with which priority, and of which lane."""
        now, rule, ready, done = self._clock[rank], self._rule, self._ready, self._done
        m, delayed = self._task.microbatches, rule.delayed
        best, best_when = (NEVER, NEVER, -1), (NEVER, NEVER)
        for lane in self._task.lanes[rank]:
            start = ready[lane]
            if start == NEVER or (lane % 3 == FORWARD and not self._has_room(rank, lane)):
                continue
            if start < now:
                start = now
            patience = rule.patience[lane]
            if delayed:
                patience += delayed.get(lane * m + done[lane], 0.0)
            if lane % 3 == WEIGHT and self._whole[lane // 3 * m + done[lane]]:
                patience = 0.0  # The W inside a B takes no time, and has nothing to wait for.
            when = (start + patience, rule.offset[lane] + rule.period * done[lane])
            if when < best_when:
                best, best_when = (start, when[1], lane), when
        return best

    def _has_room(self, rank: int, lane: int) -> bool:
        """Whether a rank may take the next forward of a lane."""
        done, growth, most = self._done, self._task.growth, self._task.limit[rank]
        if done[lane] - done[lane + GRADIENT] >= self._rule.ahead[lane // 3]:
            return False
        if self._held[rank] + growth[lane] > most:
            return False
        if not self._shares[rank] or done[lane] <= self._through:
            return True
        kept = self._one[rank] + growth[lane]
        for other in self._task.lanes[rank][::3]:
            kept += growth[other] * max(0, done[other] - self._through - 1)
        return kept <= most

    def _start(self, lane: int, start: float) -> set[int]:
        """Start the next action of a lane; returns the ranks that must choose again."""
        task, done = self._task, self._done
        rank = task.rank[lane]
        op, takes, grows = self._next(lane)
        if op is not None:
            self._programs[rank].append(Action(lane // 3, op, done[lane]))
        self._clock[rank] = end = start + takes
        self._end[lane].append(end)
        self._held[rank] += grows
        done[lane] += 1
        stale = {rank}
        self._ready[lane] = self._when_ready(lane)
        for fed, _ in task.feeds[lane]:
            if self._ready[fed] == NEVER:
                self._ready[fed] = self._when_ready(fed)
                stale.add(task.rank[fed])
        if lane % 3 == FORWARD and min(done[::3]) > self._through:
            self._through += 1
            stale.update(range(task.ranks))
        return stale

    def _next(self, lane: int) -> tuple[Op | None, float, float]:
        """The op of a lane's next action, how long that takes, and by how much its rank then holds more."""
        task, stage = self._task, lane // 3
        if lane % 3 == FORWARD or not self._whole[stage * task.microbatches + self._done[lane]]:
            return PARTS[lane % 3], task.duration[lane], task.growth[lane]
        if lane % 3 == WEIGHT:
            return None, 0.0, 0.0
        return Op.B, task.whole[stage], -task.activation[stage]

    def _when_ready(self, lane: int) -> float:
        """When all that the next action of a lane needs is there."""
        k = self._done[lane]
        if k == self._task.microbatches:
            return NEVER
        latest = 0.0
        for source, lag in self._task.needs[lane]:
            if self._done[source] <= k:
                return NEVER
            latest = max(latest, self._end[source][k] + lag)
        return latest


def rules(task: Task) -> Iterator[Rule]:
    """The portfolio: several orders of preference, depths and kinds of patience."""
    stages, lanes = len(task.duration) // 3, len(task.duration)
    load = max(sum(task.duration[lane] for lane in held) for held in task.lanes)
    oldest_first = (tuple(-float(lane) for lane in range(lanes)), float(lanes))
    gradients_first = (tuple(-1e6 * (lane % 3 == GRADIENT) for lane in range(lanes)), 1.0)
    by_time = (tuple(_alone(task)), load)
    every = (task.microbatches,) * stages
    wholes = (False, True) if task.fusible else (False,)
    for whole, share in product(wholes, (0.5, 1e6, 1.0)):
        patience = _patience_of_weights(task, share)
        for order in (by_time, gradients_first):
            yield Rule(*order, patience, every, whole)
        for ahead in _depths(task):
            yield Rule(*oldest_first, patience, (ahead,) * stages, whole)
    for ahead in _depths(task):
        yield Rule(*gradients_first, _patience_of_weights(task, 0.5), (ahead,) * stages)


def _patience_of_weights(task: Task, share: float) -> tuple[float, ...]:
    """Only Ws wait, for what comes within a share of their duration."""
    return tuple(
        share * duration if lane % 3 == WEIGHT else 0.0
        for lane, duration in enumerate(task.duration)
    )


def _depths(task: Task) -> list[int]:
    """Numbers of microbatches ahead, from one to as many as a rank can use or has memory for."""
    most = 2 * task.ranks
    if all(task.activation):
        holds = (
            task.limit[rank] / task.activation[stage]
            for stage, rank in enumerate(task.empty.placement.rank_of)
        )
        most = int(min(most, max(holds)))
    most = max(1, min(most, task.microbatches - 1))
    return sorted({1 + round(step * (most - 1) / 7) for step in range(8)})


def _alone(task: Task) -> list[float]:
    """When each action of one microbatch starts if it is the only one."""
    start = [0.0] * len(task.duration)
    for lane in task.order:
        there = (start[source] + task.duration[source] + lag for source, lag in task.needs[lane])
        start[lane] = max(there, default=0.0)
    return start


class Climber:
    """Hill climbing among rules: variations of the best few of them, each with another makespan.

    Where memory is tight, it matters which forwards wait although they could start, because they would take
    memory that others need sooner. The patience of a lane can express that; an order of preference cannot.

    Args:
        task: what is to be scheduled.
        random: makes all random choices.
        until: when to stop, on the monotonic clock.
    """

    def __init__(self, task: Task, random: Random, until: float) -> None:
        self._task, self._random, self._until = task, random, until
        self.best: list[Draft] = []
        for rule in rules(task):
            if not self.best or monotonic() < until:
                self._keep(Dispatcher(task, rule).run())

    def run(self, effort: float, target: float) -> None:
        """Try variations, several times from the start, since each climb ends elsewhere; then of the best.

        Args:
            effort: how many actions to place.
            target: a makespan that cannot be bettered.
        """
        start, ends = self.best, list[Draft]()
        for _ in range(CLIMBS):
            self.best = start
            self._climb(effort / (CLIMBS + 1), target)
            ends += self.best
        self.best = []
        for draft in ends:
            self._keep(draft)
        self._climb(effort / (CLIMBS + 1), target)

    def _climb(self, effort: float, target: float) -> None:
        each = len(self._task.duration) * self._task.microbatches
        for _ in range(int(effort / each)):
            if self.best[0].makespan <= target or monotonic() > self._until:
                break
            rule = self._random.choice(self.best).rule
            for _ in range(self._random.randint(1, 3)):
                rule = self._varied(rule)
            self._keep(Dispatcher(self._task, rule).run())

    def _keep(self, draft: Draft) -> None:
        """Keep a draft if it is among the best few.

        Of drafts that take equally long the last is kept, so that changes can add up to one that helps.
        """
        apart = SLACK * draft.makespan
        others = [known for known in self.best if abs(known.makespan - draft.makespan) > apart]
        self.best = sorted([*others, draft], key=attrgetter("makespan"))[:KEPT]

    def _varied(self, rule: Rule) -> Rule:
        """A rule with another patience, order or number of microbatches ahead for some lanes or stages."""
        random, task = self._random, self._task
        kind, lane = random.random(), random.randrange(len(rule.offset))
        m = task.microbatches
        if task.fusible and kind < 0.2:
            place = random.choice(task.fusible) * m + random.randrange(m)
            return rule._replace(changed=rule.changed ^ {place})
        if kind < 0.5:
            mean = sum(task.duration) / len(task.duration)
            number = random.randrange(len(rule.offset) * m)
            delay = mean * random.choice((0, 0.5, 1, 2, 4, 8)) * random.random()
            return rule._replace(delayed={**rule.delayed, number: delay})
        kind = random.random()
        if kind < 0.35:
            mean = sum(task.duration) / len(task.duration)
            patience = mean * random.choice((0, 0.5, 1, 2, 4, 8)) * random.random()
            return rule._replace(patience=_with(rule.patience, lane, patience))
        if kind < 0.45:
            share = random.choice((0.25, 0.5, 0.75, 1.0, 2.0, 1e6))
            return rule._replace(patience=_patience_of_weights(task, share))
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
