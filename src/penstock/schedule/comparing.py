"""A recorded step, held against what it should take: the costs that it shows, and what is slow in it.

Only what actions take counts, not what ranks wait: a rank that waits for a slow one is not slow itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, median, median_low
from typing import Any, Literal

from penstock.schedule.action import COMPUTE_OPS, Op
from penstock.schedule.base import Placement, Schedule
from penstock.schedule.clock import COST_OF, Costs, durations
from penstock.schedule.timeline import Timeline

SLOWER = 1.25
"""What takes so many times as long as the rest of the step is slow."""
MATTERS = 0.02
"""What is slower by a smaller share of the step is not reported."""


@dataclass(frozen=True)
class Slow:
    """A rank or stage that takes longer than predicted.

    Args:
        kind: what it is.
        rank: the rank.
        stages: the stages concerned.
        factor: how many times as long as predicted it takes, relative to the rest of the step.
        seconds: how much longer it computes in a step than if it took as long as the rest.
        share: the same as a share of the step.
    """

    kind: Literal["rank", "stage"]
    rank: int
    stages: tuple[int, ...]
    factor: float
    seconds: float
    share: float

    @property
    def name(self) -> str:
        """Its name in a message."""
        stages = f"stage{'s' if len(self.stages) > 1 else ''} {', '.join(map(str, self.stages))}"
        return f"rank {self.rank} ({stages})" if self.kind == "rank" else stages

    def __str__(self) -> str:
        return (
            f"{self.name} takes {self.factor:.2f} times as long as predicted, relative to the rest: "
            f"{self.seconds * 1e3:.3g} ms more ({self.share:.0%} of the step)"
        )


def costs_of(stages: int, timeline: Timeline) -> Costs:
    """The median times of the actions of a recorded step; 0 for those that did not run.

    Of pairs whose halves ran at the same time, what these take alone shows how much they have hidden.

    Args:
        stages: the number of stages.
        timeline: the step as it was recorded.
    """
    took = _durations_in(timeline)
    costs: dict[str, Any] = {
        name: [median(took[op, stage] or [0.0]) for stage in range(stages)]
        for op, name in COST_OF.items()
    }
    spans = {span.action: span for span in timeline.spans if timeline.overlapped}
    hidden: dict[int, list[float]] = defaultdict(lambda: [0.0])
    for forward, backward in timeline.overlapped:
        halves = costs["forward"][forward.stage], costs["backward"][backward.stage]
        whole = max(spans[forward].end, spans[backward].end) - spans[forward].start
        hidden[forward.stage].append((sum(halves) - whole) / (min(halves) or 1.0))
    shares = [min(1.0, max(0.0, median(hidden[stage][1:] or [0.0]))) for stage in range(stages)]
    return Costs(**costs, overlap=shares if hidden else 0, unit="s")


def find_slow(schedule: Schedule, costs: Costs, *timelines: Timeline) -> tuple[Slow, ...]:
    """Name the ranks and stages that take longer than predicted, the worst first.

    What all stages have in common, such as a whole machine that is slower, is not reported: each is compared
    with the others.

    Args:
        schedule: the schedule of the step.
        costs: what its actions should take.
        timelines: the step as it was recorded, once or several times: what is slow is so in all of them.
    """
    expected = durations(costs, schedule.stages)
    took, should = [0.0] * schedule.stages, [0.0] * schedule.stages
    for (op, stage), each in _durations_in(*timelines).items():
        took[stage] += len(each) * _middle(each) / len(timelines)
        should[stage] += len(each) * expected[op][stage] / len(timelines)
    ratios = {n: took[n] / should[n] for n in range(schedule.stages) if took[n] and should[n]}
    if len(ratios) < 2:
        return ()
    step, found = fmean(map(_longest, timelines)), list[Slow]()

    def note(kind: Literal["rank", "stage"], rank: int, factors: Mapping[int, float]) -> None:
        more = sum(took[stage] * (1 - 1 / factor) for stage, factor in factors.items())
        if more >= MATTERS * step:
            factor = median(factors.values())
            found.append(Slow(kind, rank, tuple(factors), factor, more, more / step))

    for rank, factors in enumerate(relative(ratios, schedule.placement)):
        slow = {stage: factor for stage, factor in factors.items() if factor > SLOWER}
        if slow and len(slow) == len(factors):
            note("rank", rank, slow)
            continue
        for stage, factor in slow.items():
            note("stage", rank, {stage: factor})
    return tuple(sorted(found, key=lambda one: -one.seconds))


def relative(ratios: Mapping[int, float], placement: Placement) -> list[dict[int, float]]:
    """For each rank, how much longer each of its stages takes than those of most ranks.

    Args:
        ratios: how many times as long as it should each stage has taken.
        placement: which rank holds which stage.
    """
    ranks = [
        {stage: ratios[stage] for stage in placement.stages_on(rank) if stage in ratios}
        for rank in range(placement.ranks)
    ]
    usual = median_low([median(each.values()) for each in ranks if each])
    return [{stage: ratio / usual for stage, ratio in each.items()} for each in ranks]


def _durations_in(*timelines: Timeline) -> dict[tuple[Op, int], list[float]]:
    """How long the computing actions of each op and stage took; beside another half only if never alone."""
    alone: dict[tuple[Op, int], list[float]] = defaultdict(list)
    beside: dict[tuple[Op, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        together = set(chain(*timeline.overlapped))
        for span in timeline.spans:
            if span.action.op in COMPUTE_OPS:
                took = beside if span.action in together else alone
                took[span.action.op, span.action.stage].append(span.duration)
    for key in beside.keys() - alone.keys():
        alone[key] = beside[key]
    return alone


def _longest(timeline: Timeline) -> float:
    """Return how long the step takes on the rank that is longest at it: the clocks of ranks differ."""
    rows = filter(None, map(timeline.of_rank, range(timeline.ranks)))
    return max((max(span.end for span in row) - row[0].start for row in rows), default=0.0)


def _middle(seconds: Sequence[float]) -> float:
    """The mean without the quarters at both ends: a pause of the machine makes nobody slow."""
    cut = len(seconds) // 4
    return fmean(sorted(seconds)[cut : len(seconds) - cut])
