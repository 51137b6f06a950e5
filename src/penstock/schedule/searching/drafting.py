"""Drafts of a schedule, made by a list scheduler with different rules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product, starmap
from typing import NamedTuple

from penstock.schedule.searching.task import FORWARD, GRADIENT, WEIGHT, Draft, Task

NEVER = math.inf


class Rule(NamedTuple):
    """The rule by which a list scheduler holds actions back.

    Attributes:
        ahead: the most microbatches, or slices of them, of a stage that may be between their F and their
            gradient.
        patience: the share of its duration for which a W waits for another action.
        whole: whether every backward that may be a B is one.
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
        task: the step to schedule.
        rule: when to hold actions back.
    """

    def __init__(self, task: Task, rule: Rule) -> None:
        m = task.parts
        self._task, self._rule = task, rule
        lanes = [*task.whole, *(task.fusible if rule.whole else ())]
        self._wholes = frozenset(number for n in lanes for number in range(n * m, n * m + m))
        self._duration, self._growth = task.per_number(self._wholes)
        self._clock = [0.0] * task.ranks
        self._held = [0.0] * task.ranks
        self._end = [NEVER] * len(self._duration)
        self._done = [0] * (len(self._end) // m)
        self._through = 0
        """How many microbatches, or slices of them, have passed all forwards."""

    def run(self) -> Draft:
        """Start one action after the other until none is left."""
        task, done, m = self._task, self._done, self._task.parts
        programs: list[list[int]] = [[] for _ in range(task.ranks)]
        chosen = [self._choose(rank) for rank in range(task.ranks)]
        for _ in self._end:
            start, _, lane = min(chosen)
            number = lane * m + done[lane]
            rank = task.rank[number]
            programs[rank].append(number)
            self._clock[rank] = self._end[number] = start + self._duration[number]
            self._held[rank] += self._growth[number]
            done[lane] += 1
            stale = {rank, *(task.rank[fed] for fed, _ in task.feeds[number])}
            if lane % 3 == FORWARD and min(done[::3]) > self._through:
                self._through += 1
                stale.update(range(task.ranks))
            for rank in stale:
                chosen[rank] = self._choose(rank)
        return Draft(max(self._clock), task, programs, self._wholes)

    def _choose(self, rank: int) -> tuple[float, int, int]:
        """The action that a rank would start next: its time, priority and lane."""
        task, done, m = self._task, self._done, self._task.parts
        best, best_when = (NEVER, 0, -1), (NEVER, 0)
        for lane in task.lanes[rank]:
            k = done[lane]
            if k == m or (lane % 3 == FORWARD and not self._has_room(rank, lane)):
                continue
            number = lane * m + k
            start = max([self._clock[rank], *map(self._end.__getitem__, task.before[number])])
            for needed, lag in task.needs[number]:
                start = max(start, self._end[needed] + lag)
            priority = k * len(done) - lane
            patience = self._rule.patience if lane % 3 == WEIGHT else 0.0
            when = start + patience * self._duration[number], priority
            if when < best_when:
                best, best_when = (start, priority, lane), when
        return best

    def _has_room(self, rank: int, lane: int) -> bool:
        """Tell whether a rank may take the next forward of a lane."""
        task, done, most = self._task, self._done, self._task.limit[rank]
        if done[lane] - done[lane + GRADIENT] >= self._rule.ahead:
            return False
        parts, growth, lanes = task.parts, task.growth, task.lanes[rank][::3]
        takes = growth[lane * parts + done[lane]]
        if self._held[rank] + takes > most:
            return False
        # The first part after the oldest microbatch that has not passed all forwards.
        next_one = self._through - self._through % task.slices + task.slices
        if len(lanes) == 1 or done[lane] < next_one:
            return True
        later = sum(
            sum(growth[each * parts + next_one : each * parts + done[each]]) for each in lanes
        )
        return task.held_by_one[rank] + takes + later <= most


def rules(task: Task) -> Iterator[Rule]:
    """Rules of several depths and degrees of patience."""
    wholes = (False, True) if task.fusible else (False,)
    return starmap(Rule, product(_depths(task), (0.5, 1e6, 1.0), wholes))


def _depths(task: Task) -> list[int]:
    """Numbers of parts ahead, from those of one microbatch to as many as a rank can use or has memory for."""
    least, parts = task.slices, task.parts
    most = 2 * task.ranks + least - 1
    if all(task.activation):
        holds = (
            limit / max(task.growth[lane * parts : lane * parts + least])
            for limit, lanes in zip(task.limit, task.lanes, strict=True)
            for lane in lanes[::3]
        )
        most = int(min(most, max(holds)))
    most = max(least, min(most, parts - 1))
    return sorted({least + round(step * (most - least) / 7) for step in range(8)})
