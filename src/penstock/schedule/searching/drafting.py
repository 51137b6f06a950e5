"""Drafts of a schedule, made by a list scheduler with different rules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product, starmap
from typing import NamedTuple

from penstock.schedule.searching.task import FORWARD, GRADIENT, WEIGHT, Draft, Task

NEVER = math.inf


class Rule(NamedTuple):
    """What holds a list scheduler back.

    Attributes:
        ahead: the most microbatches of a stage that may be between their F and their gradient.
        patience: for what share of its duration a W waits for another action.
        whole: whether backwards that may be a B are.
    """

    ahead: int
    patience: float
    whole: bool


class Dispatcher:
    """A list scheduler: the rank that can start first takes the oldest microbatch that is furthest on.

    A rank whose memory is full waits for a gradient, which waits for forwards of other stages; so ranks that
    hold several stages could wait for each other forever. To prevent that, later microbatches take no memory
    that the oldest may still need to get through.

    Args:
        task: what is to be scheduled.
        rule: what holds it back.
    """

    def __init__(self, task: Task, rule: Rule) -> None:
        lanes = len(task.duration)
        m = task.microbatches
        self._task, self._rule = task, rule
        stages = [s for s, must in enumerate(task.is_whole) if must]
        stages += task.fusible if rule.whole else []
        self._wholes = frozenset(stage * m + k for stage in stages for k in range(m))
        self._duration, self._growth = task.per_action(self._wholes)
        self._programs: list[list[int]] = [[] for _ in range(task.ranks)]
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
        return Draft(max(self._clock), task, self._programs, self._wholes)

    def _choose(self, rank: int) -> tuple[float, float, int]:
        """What a rank would start next: when, with which priority, and of which lane."""
        now, rule, ready, done = self._clock[rank], self._rule, self._ready, self._done
        m = self._task.microbatches
        best, best_when = (NEVER, NEVER, -1), (NEVER, NEVER)
        for lane in self._task.lanes[rank]:
            start = ready[lane]
            if start == NEVER or (lane % 3 == FORWARD and not self._has_room(rank, lane)):
                continue
            if start < now:
                start = now
            when = start, done[lane] * len(done) - lane
            if lane % 3 == WEIGHT:
                when = start + rule.patience * self._duration[lane * m + done[lane]], when[1]
            if when < best_when:
                best, best_when = (start, when[1], lane), when
        return best

    def _has_room(self, rank: int, lane: int) -> bool:
        """Whether a rank may take the next forward of a lane."""
        done, growth, most = self._done, self._task.growth, self._task.limit[rank]
        if done[lane] - done[lane + GRADIENT] >= self._rule.ahead:
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
        number = lane * task.microbatches + done[lane]
        self._programs[rank].append(number)
        self._clock[rank] = end = start + self._duration[number]
        self._end[lane].append(end)
        self._held[rank] += self._growth[number]
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
    """Several depths and kinds of patience."""
    wholes = (False, True) if task.fusible else (False,)
    return starmap(Rule, product(_depths(task), (0.5, 1e6, 1.0), wholes))


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
