"""What is slow: recorded steps are held against what they should take."""

from __future__ import annotations

import logging
from collections import deque

from penstock.plan import Plan
from penstock.schedule import Costs, Schedule, Slow, Timeline, costs_of, find_slow

TOGETHER = 4
"""So many recorded steps are looked at together: a pause of a machine shared with others is no slow rank."""
WARM = 2
"""The first training step whose actions take as long as later ones: the one before it also sets things up."""
log = logging.getLogger("penstock")


class Slowness:
    """Holds recorded steps against a plan or, without one, against the first recorded step.

    Args:
        every: The number of training steps after which one is recorded; None for never.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._steps = 0
        self._first: dict[tuple[int, int], Costs] = {}
        self._latest: dict[tuple[int, int], deque[Timeline]] = {}

    def is_due(self) -> bool:
        """Count a training step; whether it is to be recorded."""
        self._steps += 1
        return self._every is not None and self._steps % self._every == 0

    def note(
        self, plan: Plan | None, schedule: Schedule, timeline: Timeline, *, warn: bool = False
    ) -> tuple[Slow, ...]:
        """What is slow in a recorded step and the ones before.

        Args:
            plan: The plan of the pipeline, if it has one.
            schedule: The schedule of the step, with its messages.
            timeline: The step.
            warn: Whether to log a warning for each.
        """
        key = schedule.stages, schedule.microbatches
        costs = self._first.get(key)
        if plan is not None and plan.microbatches == schedule.microbatches:
            costs = plan.stage_costs.costs
        if costs is None and self._steps < WARM:
            return ()
        if costs is None:
            self._first[key] = costs_of(schedule, timeline)
            return ()
        latest = self._latest.setdefault(key, deque(maxlen=TOGETHER))
        latest.append(timeline)
        slow = find_slow(schedule, costs, *latest)
        for one in slow if warn else ():
            log.warning("penstock: %s", one)
        return slow
