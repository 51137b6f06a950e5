"""A measured step, held against what it should take: the time of its messages, and what is slow.

Only what actions take counts, not what ranks wait: a rank that waits for a slow one is not slow itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from operator import mul
from statistics import fmean, median, median_low
from typing import Any, Literal

from penstock.schedule.action import COMPUTE_OPS, SEND_OPS, Op
from penstock.schedule.base import Schedule
from penstock.schedule.clock import COST_OF, Costs, durations, transfer_of
from penstock.schedule.dependencies import Dependencies
from penstock.schedule.passes import compute_only
from penstock.schedule.simulation import simulate
from penstock.schedule.timeline import Span, Timeline

SLOWER = 1.25
"""What takes so many times as long as the rest of the step is slow."""
FURTHER = 3.0
"""A link that delays messages so many times as long as it should, and as others do, is slow."""
NOTICED = 1e-3
"""No delay of a message below so many seconds is slow."""
MATTERS = 0.02
"""What costs a step a smaller share of its time is not reported."""
Kind = Literal["rank", "stage", "link"]
Pair = tuple[int, int]
"""Two ranks: one that sends, and one that receives."""


@dataclass(frozen=True)
class Slow:
    """A rank, stage or link that takes longer than predicted.

    Args:
        kind: what it is.
        ranks: the rank; of a link both.
        stages: the stages concerned.
        factor: how many times as long as predicted it takes, relative to the rest of the step.
        seconds: what it costs the step.
        share: the same as a share of the step.
    """

    kind: Kind
    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    factor: float
    seconds: float
    share: float

    @property
    def name(self) -> str:
        """Its name in a message."""
        if self.kind == "link":
            return f"the link between ranks {self.ranks[0]} and {self.ranks[1]}"
        stages = f"stage{'s' if len(self.stages) > 1 else ''} {', '.join(map(str, self.stages))}"
        return f"rank {self.ranks[0]} ({stages})" if self.kind == "rank" else stages

    def __str__(self) -> str:
        return (
            f"{self.name} is {self.factor:.2f} times slower than predicted, relative to the rest; this "
            f"costs the step {self.seconds * 1e3:.3g} ms ({self.share:.0%})"
        )


@dataclass(frozen=True)
class MessageTimes:
    """The times of messages in a step.

    Args:
        handling: how long a rank is busy with a message that it sends or receives.
        delays: how long messages travel beyond that, from rank to rank.
    """

    handling: float
    delays: Mapping[Pair, float]


def message_times(schedule: Schedule, timeline: Timeline) -> MessageTimes:
    """Find out what messages took, from when actions began.

    Args:
        schedule: the schedule of the step.
        timeline: the step, with its messages as spans; the ranks' clocks may differ by constants.
    """
    sources = _sources(schedule, timeline)
    ahead = _clocks(timeline.ranks, sources)
    busy, waited = list[float](), defaultdict[Pair, list[float]](list)
    for rank in range(timeline.ranks):
        before, sent = None, 0
        for span in timeline.of_rank(rank):
            sent += span.action.op in SEND_OPS
            if span.action.op not in COMPUTE_OPS:
                continue
            ends = [
                (source.end - ahead[source.rank] + ahead[rank], source.rank)
                for source in sources[span]
            ]
            last, sender = max(ends, default=(-inf, rank))
            if before is None or last > before.end:
                waited[sender, rank] += [span.start - last] if ends else []
            elif count := sent + bool(ends):
                busy.append((span.start - before.end) / count)
            before, sent = span, 0
    handling = max(0.0, median(busy)) if busy else 0.0
    return MessageTimes(
        handling,
        {pair: max(0.0, median(each) - 2 * handling) for pair, each in waited.items() if each},
    )


def _sources(schedule: Schedule, timeline: Timeline) -> dict[Span, list[Span]]:
    """For each computing span the spans of other ranks whose values it used."""
    rule = Dependencies(compute_only(schedule))
    spans = {span.action: span for span in timeline.spans if span.action.op in COMPUTE_OPS}
    return {
        span: [
            source
            for need in rule.before(span.action)
            # A whole backward stands for its half.
            if (source := spans.get(need) or spans.get(need._replace(op=Op.B)))
            and source.rank != span.rank
        ]
        for span in spans.values()
    }


def _clocks(ranks: int, sources: Mapping[Span, Sequence[Span]]) -> list[float]:
    """By how much each rank's clock is ahead of the first one's.

    The quickest message there and the quickest one back are taken to travel equally long.
    """
    least: dict[Pair, float] = {}
    for span, each in sources.items():
        for source in each:
            pair, late = (source.rank, span.rank), span.start - source.end
            least[pair] = min(least.get(pair, inf), late)
    ahead = {0: 0.0}
    for _ in range(ranks):
        for (a, b), there in least.items():
            if a in ahead and b not in ahead:
                back = least.get((b, a), there if there < 0 else -there)
                ahead[b] = ahead[a] + (there - back) / 2
    return [ahead.get(rank, 0.0) for rank in range(ranks)]


def _durations_in(*timelines: Timeline) -> dict[tuple[Op, int], list[float]]:
    """How long the computing actions of each op and stage took."""
    took: dict[tuple[Op, int], list[float]] = defaultdict(list)
    for span in chain(*(timeline.spans for timeline in timelines)):
        if span.action.op in COMPUTE_OPS:
            took[span.action.op, span.action.stage].append(span.duration)
    return took


def costs_of(schedule: Schedule, timeline: Timeline) -> Costs:
    """The times of actions and messages in a step, as costs of the next one.

    Args:
        schedule: the schedule of the step, with its messages.
        timeline: the step as it was measured.
    """
    took = _durations_in(timeline)
    costs: dict[str, Any] = {
        name: [median(took[op, stage] or [0.0]) for stage in range(schedule.stages)]
        for op, name in COST_OF.items()
    }
    delays = message_times(schedule, timeline).delays
    links = {pair: (late, inf) for pair, late in delays.items()}
    return Costs(**costs, links=links, unit="s")


def find_slow(schedule: Schedule, costs: Costs, *timelines: Timeline) -> tuple[Slow, ...]:
    """Name the ranks, stages and links that take longer than predicted, the worst first.

    What all stages have in common, such as a whole machine that is slower, is not reported: each is compared
    with the others.

    Args:
        schedule: the schedule of the step, with its messages.
        costs: what its actions and messages should take.
        timelines: the step as it was measured, once or several times: what is slow is so in all of them.
    """
    expected = durations(costs, schedule.stages)
    took, should = [0.0] * schedule.stages, [0.0] * schedule.stages
    for (op, stage), each in _durations_in(*timelines).items():
        took[stage] += len(each) * _middle(each)
        should[stage] += len(each) * expected[op][stage]
    known = [stage for stage in range(schedule.stages) if should[stage] and took[stage]]
    if len(known) < 2:
        return ()
    ratios = {stage: took[stage] / should[stage] for stage in known}
    step = _MeasuredStep(schedule, costs, ratios)
    delays: dict[Pair, float] = {}
    for timeline in timelines:
        for pair, late in message_times(schedule, timeline).delays.items():
            delays[pair] = min(delays.get(pair, inf), late)
    slow = [*_slow_ranks(step, ratios), *_slow_links(step, delays)]
    return tuple(
        sorted((one for one in slow if one.share >= MATTERS), key=lambda one: -one.seconds)
    )


def _middle(seconds: Sequence[float]) -> float:
    """The mean without the quarters at both ends: a pause of the machine makes nobody slow."""
    cut = len(seconds) // 4
    return fmean(sorted(seconds)[cut : len(seconds) - cut])


class _MeasuredStep:
    """A step as it was, in simulation: what it takes, and would take.

    Args:
        schedule: its schedule.
        costs: what its actions should take.
        ratios: how many times as long each stage took.

    Attributes:
        usual: the ratio that most ranks have.
    """

    def __init__(self, schedule: Schedule, costs: Costs, ratios: Mapping[int, float]) -> None:
        self.schedule, self._costs, self._ratios = schedule, costs, ratios
        placement = schedule.placement
        ranks = [
            [ratios[stage] for stage in placement.stages_on(rank) if stage in ratios]
            for rank in range(placement.ranks)
        ]
        self.usual = median_low([median(each) for each in ranks if each])

    def seconds(
        self, usual: Collection[int] = (), links: Mapping[Pair, float] | None = None
    ) -> float:
        """What the step takes, if some stages take what they should, and some links these delays."""
        factors = [
            self._ratios.get(stage, self.usual) if stage not in usual else self.usual
            for stage in range(self.schedule.stages)
        ]
        each = durations(self._costs, self.schedule.stages)
        scaled: dict[str, Any] = {COST_OF[op]: list(map(mul, each[op], factors)) for op in each}
        wires = {pair: (late, self._costs.wire(*pair)[1]) for pair, late in (links or {}).items()}
        changed = replace(self._costs, **scaled, links={**self._costs.links, **wires})
        return simulate(self.schedule, changed).makespan

    def slow(self, kind: Kind, rank: int, stages: tuple[int, ...], factor: float) -> Slow:
        """A slow rank or stage, with what it costs."""
        whole = self.seconds()
        lost = whole - self.seconds(stages)
        return Slow(kind, (rank,), stages, factor, lost, lost / whole)

    def delay(self, pair: Pair) -> float:
        """How long a message from one rank to another should travel."""
        rank_of = self.schedule.placement.rank_of
        sends = {
            action._replace(microbatch=0)
            for action in self.schedule.actions(pair[0])
            if action.op in SEND_OPS and rank_of[action.peer_stage] == pair[1]
        }
        transfers = [transfer_of(self.schedule, send, self._costs) for send in sends]
        return self._costs.wire(*pair)[0] + max(transfers, default=0.0)


def _slow_ranks(step: _MeasuredStep, ratios: Mapping[int, float]) -> Iterator[Slow]:
    placement = step.schedule.placement
    for rank in range(placement.ranks):
        mine = {stage: ratios[stage] for stage in placement.stages_on(rank) if stage in ratios}
        slow = {stage: ratio for stage, ratio in mine.items() if ratio > SLOWER * step.usual}
        if mine and len(slow) == len(mine):
            yield step.slow("rank", rank, tuple(slow), median(slow.values()) / step.usual)
        else:
            for stage, ratio in slow.items():
                yield step.slow("stage", rank, (stage,), ratio / step.usual)


def _slow_links(step: _MeasuredStep, delays: Mapping[Pair, float]) -> Iterator[Slow]:
    for pair, delay in delays.items():
        if pair[0] > pair[1] and pair[::-1] in delays:
            continue
        others = [late for other, late in delays.items() if {*other} != {*pair}]
        usual = max(step.delay(pair), median(others) if others else 0.0)
        if delay > max(NOTICED, FURTHER * usual):
            whole = step.seconds(links={pair: delay, pair[::-1]: delay})
            lost = whole - step.seconds()
            placement = step.schedule.placement
            stages = tuple(sorted(s for rank in pair for s in placement.stages_on(rank)))
            yield Slow("link", pair, stages, delay / max(usual, NOTICED / 10), lost, lost / whole)
