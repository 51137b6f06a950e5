"""Lower bounds: proof that no schedule can complete a step within a given time.

Each action gets a window, from the earliest time at which it can start to the time by which it must end.
Then, until nothing changes, on each rank:

- an action that cannot end before another must start comes after it;
- memory gives more order: before a forward come the gradients and Ws without which it would not fit, and
  after it the forwards that would leave it no room;
- an action starts no earlier than all before it can be done, and ends in time for all after it.

An empty window is the proof. Job shops are bounded in this way (Carlier and Pinson, "An algorithm for solving
the job-shop problem", 1989); here memory is one more limited resource.
"""

from __future__ import annotations

import math
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.searching.task import FORWARD, GRADIENT, SLACK, WEIGHT, Task

Numbers = NDArray[np.float64]
Counts = NDArray[np.int64]
Mask = NDArray[np.bool_]
Windows = tuple[Numbers, Numbers]
PRECISION = 1e-4
"""The share by which two times must differ to count as different."""
ROUNDS = 200
"""The most rounds, since windows may go on shrinking by less and less."""
LARGEST = 600_000
"""The most ranks times the square of a rank's actions; beyond it, only needs are considered."""


class TooShort(Exception):
    """No schedule completes in the given time."""


class Bound:
    """Proofs for one task.

    Each action counts with the shortest time that it may take: a gradient with the shorter of I and B, a W
    with the rest of a B if that is shorter, and a forward with the part that an overlap cannot hide.

    Args:
        task: the step to schedule.
        until: when to stop and keep what is proven, on the monotonic clock.

    Attributes:
        least: a lower bound that is known without trying a time.
    """

    def __init__(self, task: Task, until: float = math.inf) -> None:
        self._until = until
        m = task.microbatches
        self._task = task
        self._duration = _least_durations(task)
        self._late = np.outer(self._duration, np.arange(m))
        lags = sum(lag for needs in task.needs for _, lag in needs)
        self._serial = (float(self._duration.sum()) + lags) * m
        """The time of all actions one after the other, which is always enough."""
        self._ranks: list[_RankBound] = []
        if task.ranks * (m * max(map(len, task.lanes))) ** 2 <= LARGEST:
            reach = _reach(task)
            self._ranks = [
                _RankBound(task, rank, self._duration, reach) for rank in range(task.ranks)
            ]
        shape = self._late.shape
        self._windows = self._shrunk(np.zeros(shape), np.full(shape, self._serial))
        start, due = self._windows
        self.least = float((start - due).max()) + self._serial

    def excludes(self, time: float) -> bool:
        """Whether it is proven that no schedule completes within a time."""
        start, due = self._windows
        try:
            self._shrunk(start.copy(), due - (self._serial - time))
        except TooShort:
            return True
        return False

    def lowest(self, makespan: float) -> float:
        """A time before which no schedule completes, given the makespan of one."""
        low, high = self.least, makespan
        if self.excludes(high * (1 - PRECISION)):
            return high
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            if self.excludes(middle):
                low = middle
            else:
                high = middle
        return low

    def _shrunk(self, start: Numbers, due: Numbers) -> Windows:
        """Shrink the windows, earliest starts and latest ends, until nothing changes or one is empty."""
        before = [rank.always.copy() for rank in self._ranks]
        self._along_needs(start, due)
        for _ in range(ROUNDS):
            old = start.copy(), due.copy(), sum(map(np.count_nonzero, before))
            for rank, order in zip(self._ranks, before, strict=True):
                rank.shrink(start, due, order)
            self._along_needs(start, due)
            same = (start == old[0]).all() and (due == old[1]).all()
            same = same and sum(map(np.count_nonzero, before)) == old[2]
            if same or monotonic() > self._until:
                break
        return start, due

    def _along_needs(self, start: Numbers, due: Numbers) -> None:
        """Put each action after what it needs, and the microbatches of a lane one after the other."""
        task, duration, late = self._task, self._duration, self._late
        for lane in task.order:
            for source, lag in task.needs[lane]:
                np.maximum(start[lane], start[source] + (duration[source] + lag), out=start[lane])
            start[lane] = np.maximum.accumulate(start[lane] - late[lane]) + late[lane]
        for lane in reversed(task.order):
            for fed, lag in task.feeds[lane]:
                np.minimum(due[lane], due[fed] - (duration[fed] + lag), out=due[lane])
            early = (due[lane] - late[lane])[::-1]
            due[lane] = np.minimum.accumulate(early)[::-1] + late[lane]
        if (start + duration[:, None] > due + SLACK * self._serial).any():
            raise TooShort


class _RankBound:
    """The actions of one rank, by lane; ``always`` holds which come before which in any schedule."""

    def __init__(self, task: Task, rank: int, duration: Numbers, reach: Mask) -> None:
        m = self._microbatches = task.microbatches
        self._lanes = held = task.lanes[rank]
        self._long: Numbers = np.repeat(duration[held], m)
        self._tiny = SLACK * float(duration.sum()) * m
        turn = np.arange(m)
        earlier, not_later = turn[:, None] < turn, turn[:, None] <= turn
        needed = reach[np.ix_(held, held)][:, None, :, None]
        same = np.eye(len(held), dtype=bool)[:, None, :, None]
        always = (needed & not_later[:, None, :]) | (same & earlier[:, None, :])
        self.always: Mask = always.reshape(len(self._long), -1)
        self._limit = task.limit[rank]
        stages = [lane // 3 for lane in held[::3]]
        self._activation = [task.activation[stage] for stage in stages]
        self._stash = [min(task.stash[s], task.activation[s]) for s in stages]
        self._turn = turn
        self._followers = [
            [b for b, other in enumerate(held[1::3]) if reach[lane, other]] for lane in held[1::3]
        ]
        """The stages whose gradients come after each stage's own."""
        self._forwards = np.concatenate([self._of(3 * i + FORWARD) for i in range(len(stages))])

    def _of(self, lane: int) -> Counts:
        return lane * self._microbatches + self._turn

    def shrink(self, start: Numbers, due: Numbers, before: Mask) -> None:
        """Shrink the windows of the rank's actions, and find more actions that come before others."""
        first, last, long = start[self._lanes].ravel(), due[self._lanes].ravel(), self._long
        late = first[:, None] + (long[:, None] + long) > last + self._tiny
        np.fill_diagonal(late, False)
        before |= late.T
        if math.isfinite(self._limit):
            first = self._with_memory(first, before)
        if (before & before.T).any():
            raise TooShort
        first = np.maximum(first, _after_all(first, long, before))
        last = -np.maximum(-last, _after_all(-last, long, before.T))
        if (first + long > last + self._tiny).any():
            raise TooShort
        start[self._lanes], due[self._lanes] = (
            x.reshape(-1, self._microbatches) for x in (first, last)
        )

    def _with_memory(self, first: Numbers, before: Mask) -> Numbers:
        """Order what must come before and after each forward so that it fits; return the new earliest starts.

        The least and the most actions of each lane before a forward give the least that each stage holds
        then. What the other stages leave bounds what a stage may hold, and so these numbers.
        """
        m, at = self._microbatches, self._forwards
        least = before[:, at].reshape(-1, m, len(at)).sum(axis=1)
        most = m - before[at].reshape(len(at), -1, m).sum(axis=2).T
        stages = range(len(self._activation))
        for stage in stages:
            forwards = slice(stage * m, (stage + 1) * m)
            least[3 * stage, forwards] = most[3 * stage, forwards] = self._turn + 1
        held = [self._holds(stage, least[3 * stage], most) for stage in stages]
        spare = self._limit - np.sum(held, axis=0)
        if (spare < 0).any():
            raise TooShort
        for stage in stages:
            room = spare + held[stage]
            self._forwards_after(stage, most, room, before)
            # Fewer gradients of a stage mean fewer of those that follow them, which leaves less room.
            count = np.arange(m + 1)[:, None]
            for other in self._followers[stage]:
                fewer = np.minimum(most[3 * other + GRADIENT], count)
                room = room + held[other] - self._holds(other, least[3 * other], most, fewer)
            when = self._backwards_before(stage, least, most, room, first, before)
            first[at] = np.maximum(first[at], when)
        return first

    def _holds(
        self, stage: int, forwards: Counts, most: Counts, gradients: Counts | None = None
    ) -> Numbers:
        """The least that a stage holds after these forwards and at most so many gradients and Ws."""
        gradients = most[3 * stage + GRADIENT] if gradients is None else gradients
        gradients = np.minimum(gradients, forwards)
        weights = np.minimum(most[3 * stage + WEIGHT], gradients)
        activation, stash = self._activation[stage], self._stash[stage]
        held: Numbers = activation * forwards - (activation - stash) * gradients - stash * weights
        return held

    def _forwards_after(self, stage: int, most: Counts, room: Numbers, before: Mask) -> None:
        """Put the forwards of a stage that have no room after the others."""
        count = np.arange(self._microbatches + 1)[:, None]
        fitting = (self._holds(stage, count, most) <= room).sum(axis=0) - 1
        before[np.ix_(self._forwards, self._of(3 * stage))] |= self._turn >= fitting[:, None]

    def _backwards_before(
        self,
        stage: int,
        least: Counts,
        most: Counts,
        room: Numbers,
        first: Numbers,
        before: Mask,
    ) -> Numbers:
        """Put the gradients and Ws that make room for a stage first; return when they are done.

        They trade off: more gradients need fewer Ws.
        """
        m, at, turn = self._microbatches, self._forwards, self._turn[:, None]
        gradient, weight = self._of(3 * stage + GRADIENT), self._of(3 * stage + WEIGHT)
        activation, stash = self._activation[stage], self._stash[stage]
        count = np.arange(m + 1)[:, None]
        forwards = np.maximum(least[3 * stage], count)
        excess = activation * forwards - (activation - stash) * count - room
        with np.errstate(divide="ignore", invalid="ignore"):
            weights = np.where(excess > 0, np.ceil(excess / stash), 0.0)
        does = count <= most[3 * stage + GRADIENT]
        does &= weights <= np.minimum(most[3 * stage + WEIGHT], count)
        before[np.ix_(gradient, at)] |= turn < np.where(does, count, m).min(axis=0)
        before[np.ix_(weight, at)] |= turn < np.where(does, weights, m).min(axis=0)
        ends = [np.append(0.0, first[lane] + self._long[lane]) for lane in (gradient, weight)]
        both = np.maximum(ends[0][count], ends[1][np.where(does, weights, 0).astype(int)])
        done: Numbers = np.where(does, both, np.inf).min(axis=0)
        return done


def _after_all(first: Numbers, long: Numbers, before: Mask) -> Numbers:
    """When each action can start, given when those before it can start."""
    order = np.argsort(first, kind="stable")
    earlier = before[order]
    work = (earlier * long[order][:, None])[::-1].cumsum(axis=0)[::-1]
    ends: Numbers = np.where(earlier, first[order][:, None] + work, -np.inf).max(axis=0)
    return ends


def _least_durations(task: Task) -> Numbers:
    least = np.array(task.duration)
    whole = np.array(task.whole)
    gradient = least[GRADIENT::3] = np.minimum(least[GRADIENT::3], whole)
    least[WEIGHT::3] = np.minimum(least[WEIGHT::3], whole - gradient)
    least[FORWARD::3] *= 1 - task.costs.overlap
    return least


def _reach(task: Task) -> Mask:
    """Which lanes (rows) come before each lane (columns) in every microbatch, directly or not."""
    reach = np.zeros((len(task.duration),) * 2, bool)
    for lane in task.order:
        for source, _ in task.needs[lane]:
            reach[:, lane] |= reach[:, source]
            reach[source, lane] = True
    return reach
