"""A measured step, held against what it should take: the time of its messages, and what is slow.

Only what actions take counts, not what ranks wait: a rank that waits for a slow one is not slow itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import mul
from statistics import median, median_low
from typing import Any, Literal

from penstock.schedule.action import COMPUTE_OPS, Action, Op
from penstock.schedule.base import Schedule
from penstock.schedule.clock import Costs, durations, transfer_of
from penstock.schedule.dependencies import Dependencies
from penstock.schedule.passes import compute_only
from penstock.schedule.simulation import Span, Timeline, simulate

SLOWER = 1.25
"""What takes so many times as long as the rest of the step is slow."""
FURTHER = 3.0
"""A link that delays messages so many times as long as it should, and as others do, is slow."""
NOTICED = 1e-3
"""No delay of a message below so many seconds is slow."""
MATTERS = 0.02
"""What costs a step a smaller share of its time is not told."""
Kind = Literal["rank", "stage", "link"]
Pair = tuple[int, int]
"""Two ranks: one that sends, and one that receives."""


@dataclass(frozen=True)
class Slow:
    """A rank, stage or link that takes longer than its costs say.

    Args:
        kind: What it is.
        ranks: The rank; of a link both.
        stages: The stages concerned.
        factor: How many times as long as its costs say it takes, beside the rest of the step.
        seconds: What it costs the step.
        share: The same as a share of the step.
    """

    kind: Kind
    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    factor: float
    seconds: float
    share: float

    @property
    def name(self) -> str:
        """What it is, in words."""
        if self.kind == "link":
            return f"the link between ranks {self.ranks[0]} and {self.ranks[1]}"
        stages = f"stage{'s' if len(self.stages) > 1 else ''} {', '.join(map(str, self.stages))}"
        return f"rank {self.ranks[0]} ({stages})" if self.kind == "rank" else stages

    def __str__(self) -> str:
        return (
            f"{self.name} takes {self.factor:.2f} times as long as its costs say beside the others, which "
            f"costs the step {self.seconds * 1e3:.3g} ms ({self.share:.0%})"
        )


@dataclass(frozen=True)
class MessageTimes:
    """What messages took in a step.

    Args:
        handling: How long a rank is busy with a message that it sends or receives.
        delays: How long messages travel beyond that, from rank to rank.
    """

    handling: float
    delays: Mapping[Pair, float]


def message_times(schedule: Schedule, timeline: Timeline) -> MessageTimes:
    """Find out what messages took, from when actions began.

    Args:
        schedule: The schedule of the step.
        timeline: The step, with its messages as spans; the ranks' clocks may differ by constants.
    """
    plain = compute_only(schedule)
    rule, rank_of = Dependencies(plain), schedule.placement.rank_of
    ends = {span.action: span.end for span in timeline.spans if span.action.op in COMPUTE_OPS}
    busy, waited = list[float](), defaultdict[Pair, list[float]](list)
    for rank in range(timeline.ranks):
        for before, between, span in _gaps(timeline.of_rank(rank)):
            needed = [one for one in rule.before(span.action) if rank_of[one.stage] != rank]
            came = max(((_end(ends, one), rank_of[one.stage]) for one in needed), default=None)
            if came is not None and (before is None or came[0] > before.end):
                waited[came[1], rank].append(span.start - came[0])
            elif before is not None and (count := between + bool(needed)):
                busy.append((span.start - before.end) / count)
    handling = max(0.0, median(busy)) if busy else 0.0
    raw = {pair: median(times) for pair, times in waited.items()}
    # There and back, a difference of clocks counts once for and once against.
    both = {
        (a, b): (time + raw[b, a]) / 2 if (b, a) in raw else time for (a, b), time in raw.items()
    }
    return MessageTimes(handling, {p: max(0.0, time - 2 * handling) for p, time in both.items()})


def _gaps(spans: tuple[Span, ...]) -> Iterator[tuple[Span | None, int, Span]]:
    """Each computing span of a rank, with the one before and the messages sent in between."""
    before, sent = None, 0
    for span in spans:
        if span.action.op in (Op.SEND_F, Op.SEND_B):
            sent += 1
        elif span.action.op in COMPUTE_OPS:
            yield before, sent, span
            before, sent = span, 0


def _end(ends: Mapping[Action, float], action: Action) -> float:
    """When what is needed was there; a whole backward stands for its half."""
    return ends.get(action, ends.get(action._replace(op=Op.B), 0.0))


def find_slow(schedule: Schedule, costs: Costs, timeline: Timeline) -> tuple[Slow, ...]:
    """Name what takes longer than its costs say, the worst first.

    What all stages have in common, such as a whole machine that is slower, is not told: each is held against
    the others.

    Args:
        schedule: The schedule of the step, with its messages.
        costs: What its actions and messages should take.
        timeline: The step as it was measured.
    """
    expected = durations(costs, schedule.stages)
    took, should = [0.0] * schedule.stages, [0.0] * schedule.stages
    for span in timeline.spans:
        if span.action.op in expected:
            took[span.action.stage] += span.duration
            should[span.action.stage] += expected[span.action.op][span.action.stage]
    known = [stage for stage in range(schedule.stages) if should[stage] and took[stage]]
    if len(known) < 2:
        return ()
    ratios = {stage: took[stage] / should[stage] for stage in known}
    step = _Step(schedule, costs, ratios)
    slow = [*_slow_ranks(step, ratios), *_slow_links(step, message_times(schedule, timeline))]
    return tuple(
        sorted((one for one in slow if one.share >= MATTERS), key=lambda one: -one.seconds)
    )


class _Step:
    """A step as it was, in simulation: what it takes, and would take.

    Args:
        schedule: Its schedule.
        costs: What its actions should take.
        ratios: How many times as long each stage took.

    Attributes:
        usual: The ratio that most ranks have.
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
        names = ("forward", "input", "weight", "backward")
        each = {name: self._costs.per_stage(name, self.schedule.stages) for name in names}
        scaled: dict[str, Any] = {name: list(map(mul, one, factors)) for name, one in each.items()}
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
            if action.op in (Op.SEND_F, Op.SEND_B) and rank_of[action.peer_stage] == pair[1]
        }
        transfers = [transfer_of(self.schedule, send, self._costs) for send in sends]
        return self._costs.wire(*pair)[0] + max(transfers, default=0.0)


def _slow_ranks(step: _Step, ratios: Mapping[int, float]) -> Iterator[Slow]:
    placement = step.schedule.placement
    for rank in range(placement.ranks):
        mine = {stage: ratios[stage] for stage in placement.stages_on(rank) if stage in ratios}
        slow = {stage: ratio for stage, ratio in mine.items() if ratio > SLOWER * step.usual}
        if mine and len(slow) == len(mine):
            yield step.slow("rank", rank, tuple(slow), median(slow.values()) / step.usual)
        else:
            for stage, ratio in slow.items():
                yield step.slow("stage", rank, (stage,), ratio / step.usual)


def _slow_links(step: _Step, times: MessageTimes) -> Iterator[Slow]:
    for pair, delay in times.delays.items():
        if pair[0] > pair[1] and pair[::-1] in times.delays:
            continue
        others = [late for other, late in times.delays.items() if {*other} != {*pair}]
        usual = max(step.delay(pair), median(others) if others else 0.0)
        if delay > max(NOTICED, FURTHER * usual):
            whole = step.seconds(links={pair: delay, pair[::-1]: delay})
            lost = whole - step.seconds()
            placement = step.schedule.placement
            stages = tuple(sorted(s for rank in pair for s in placement.stages_on(rank)))
            yield Slow("link", pair, stages, delay / max(usual, NOTICED / 10), lost, lost / whole)
