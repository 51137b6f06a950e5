"""Recorded steps: when each rank ran each action, and what is slow in it."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable

from penstock.plan import Plan
from penstock.runtime import Runner, StepState, TimelineKind
from penstock.schedule import (
    Action,
    Costs,
    Schedule,
    Slow,
    Span,
    Timeline,
    costs_of,
    find_slow,
    parse_action,
    replay,
)
from penstock.schedule.base import flat

TOGETHER = 4
"""So many recorded steps are looked at together: a pause of a machine shared with others is no slow rank."""
WARM = 2
"""The first training step whose actions take as long as later ones: the one before it also sets things up."""
log = logging.getLogger("penstock")


class Slowness:
    """Holds recorded steps against a plan or, without one, against the first recorded step.

    Args:
        every: the number of training steps after which one is recorded; None for never.
        plan: the plan of the pipeline, if it has one.
        runner: runs the steps, and reaches the other ranks.
        leads: says whether this process warns.
    """

    def __init__(
        self,
        every: int | None,
        plan: Plan | None,
        runner: Runner,
        leads: Callable[[], bool],
    ) -> None:
        self._every, self._plan = every, plan
        self._runner, self._leads = runner, leads
        self._steps = 0
        self._first: dict[tuple[int, int], Costs] = {}
        self._latest: dict[tuple[int, int], deque[Timeline]] = {}

    def count_step(self) -> bool:
        """Count a training step; whether it is watched, so that it must be recorded."""
        self._steps += 1
        return self._every is not None and self._steps % self._every == 0

    def note(
        self, step: StepState, *, warn: bool
    ) -> tuple[Timeline, TimelineKind, tuple[Slow, ...]]:
        """When the actions of a recorded step ran, and what is slow in it; every rank calls this.

        Args:
            step: the step.
            warn: whether the process that leads logs a warning for each thing that is slow.
        """
        schedule = step.agreement.program.schedule
        timeline, kind = self._timeline(step, schedule)
        slow = self._slow(schedule, timeline)
        for one in slow if warn and self._leads() else ():
            log.warning("penstock: %s", one)
        return timeline, kind, slow

    def _timeline(self, step: StepState, schedule: Schedule) -> tuple[Timeline, TimelineKind]:
        assert step.recorder is not None
        spans = step.recorder.spans
        if self._runner.transport is None and schedule.ranks > 1:
            durations: dict[Action, float] = defaultdict(float)
            for span in spans:
                durations[span.action] += span.duration
            return replay(schedule, durations), "replayed"
        mine = [[span.rank, str(span.action), span.start, span.end] for span in spans]
        of_all = tuple(
            Span(rank, action, start, end)
            for rows in self._runner.gather(mine)
            for rank, text, start, end in rows
            for action in flat((parse_action(text),))
        )
        return Timeline(of_all, schedule.ranks, "s", schedule.pairs), "measured"

    def _slow(self, schedule: Schedule, timeline: Timeline) -> tuple[Slow, ...]:
        key = schedule.stages, schedule.microbatches
        costs = self._first.get(key)
        if self._plan is not None and self._plan.microbatches == schedule.microbatches:
            costs = self._plan.stage_costs.costs
        if costs is None and self._steps < WARM:
            return ()
        if costs is None:
            self._first[key] = costs_of(schedule, timeline)
            return ()
        latest = self._latest.setdefault(key, deque(maxlen=TOGETHER))
        latest.append(timeline)
        return find_slow(schedule, costs, *latest)
