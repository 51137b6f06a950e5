"""Recorded steps: when each rank ran each action, and what is slow in it."""

from __future__ import annotations

from collections import defaultdict, deque

from penstock._engine.runtime import StepState, TimelineKind
from penstock._engine.transport import Job
from penstock.pipeline.plan import ProvenSchedules
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


class Slowness:
    """Holds recorded steps against a plan or, without one, against the first recorded step.

    Args:
        schedules: the schedules of the pipeline, and its plan if it has one.
        job: reaches the other ranks.
    """

    def __init__(self, schedules: ProvenSchedules, job: Job) -> None:
        self._schedules, self._job = schedules, job
        self._first: dict[tuple[int, int], Costs] = {}
        self._latest: dict[tuple[int, int], deque[Timeline]] = {}

    def note(self, step: StepState) -> tuple[Timeline, TimelineKind, tuple[Slow, ...]]:
        """When the actions of a recorded step ran, and what is slow in it; every rank calls this."""
        schedule = step.agreement.program.schedule
        timeline, kind = self._timeline(step, schedule)
        return timeline, kind, self._slow(schedule, timeline)

    def _timeline(self, step: StepState, schedule: Schedule) -> tuple[Timeline, TimelineKind]:
        assert step.recorder is not None
        spans = step.recorder.spans
        if self._job.transport is None and schedule.ranks > 1:
            durations: dict[Action, float] = defaultdict(float)
            for span in spans:
                durations[span.action] += span.duration
            ran = Timeline(tuple(spans), schedule.ranks, "s", schedule.pairs)
            stages = {pair.forward.stage for pair in ran.overlapped}
            overlap = [float(stage in stages) for stage in range(schedule.stages)]
            return replay(schedule, durations, overlap=overlap), "replayed"
        mine = [[span.rank, str(span.action), span.start, span.end] for span in spans]
        of_all = tuple(
            Span(rank, action, start, end)
            for rows in self._job.meet(lambda: mine, among=self._job.pipeline)
            for rank, text, start, end in rows
            for action in flat((parse_action(text),))
        )
        return Timeline(of_all, schedule.ranks, "s", schedule.pairs), "measured"

    def _slow(self, schedule: Schedule, timeline: Timeline) -> tuple[Slow, ...]:
        key = schedule.stages, schedule.microbatches
        costs = self._first.get(key)
        plan = self._schedules.plan
        if plan is not None and plan.microbatches == schedule.microbatches:
            costs = plan.stage_costs.costs
        if costs is None and self._job.steps < WARM:
            return ()
        if costs is None:
            self._first[key] = costs_of(schedule.stages, timeline)
            return ()
        latest = self._latest.setdefault(key, deque(maxlen=TOGETHER))
        latest.append(timeline)
        return find_slow(schedule, costs, *latest)
