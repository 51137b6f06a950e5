"""When each action runs: timelines, and simulations that find bubbles, memory and reasons for idle time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, compress
from operator import neg, sub
from typing import NamedTuple

from penstock.errors import InputFileError, PenstockError, UsageError
from penstock.schedule.action import COMPUTE_OPS, PEER_OPS, Action, Op, Overlap, parse_action
from penstock.schedule.base import Schedule, flat, paused_collection
from penstock.schedule.clock import Costs, Numbered, durations
from penstock.schedule.validation import completed

# ---- the timeline of a step, simulated or measured


MICROSECONDS: Mapping[str, float] = {"s": 1e6, "ms": 1e3, "us": 1.0, "": 1e3}
"""Microseconds in each unit of time; a Chrome trace draws a unit without a name as a millisecond."""


class Span(NamedTuple):
    """An action of a rank and when it ran."""

    rank: int
    action: Action
    start: float
    end: float

    @property
    def duration(self) -> float:
        """How long the action ran."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The spans of a step.

    Args:
        spans: the actions with their ranks and times, in any order.
        ranks: the number of ranks.
        unit: the unit of the times: ``s``, ``ms``, ``us``, or empty for plain numbers.
        pairs: the forwards and backwards that the schedule runs as overlapped pairs.

    Raises:
        UsageError: the unit is unknown, or a span has no valid rank or ends before it starts.
    """

    spans: tuple[Span, ...]
    ranks: int
    unit: str = "s"
    pairs: tuple[Overlap, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "spans", tuple(self.spans))
        if self.unit not in MICROSECONDS:
            raise UsageError(
                f"unit={self.unit!r}: must be one of {', '.join(map(repr, MICROSECONDS))}"
            )
        for span in self.spans:
            if not (0 <= span.rank < self.ranks and span.start <= span.end):
                raise UsageError(
                    f"{span}: must be of a rank below {self.ranks} and end after it starts"
                )

    @cached_property
    def start(self) -> float:
        """When the first span starts; 0 if there are none."""
        return min((span.start for span in self.spans), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """The time from the first start to the last end."""
        return max((span.end for span in self.spans), default=0.0) - self.start

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computed; time in which spans overlap counts once."""
        return tuple(_covered(self.of_rank(rank)) for rank in range(self.ranks))

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The share of the makespan in which each rank did not compute."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The share of the makespan in which ranks did not compute, over all ranks."""
        return sum(self.bubbles) / self.ranks

    @cached_property
    def _of_rank(self) -> tuple[tuple[Span, ...], ...]:
        spans: list[list[Span]] = [[] for _ in range(self.ranks)]
        for span in sorted(self.spans, key=lambda span: (span.start, span.end)):
            spans[span.rank].append(span)
        return tuple(map(tuple, spans))

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """The spans of a rank, in the order in which they start."""
        return self._of_rank[rank]

    def to_chrome_trace(self) -> str:
        """The timeline as Chrome-trace JSON, for ``chrome://tracing`` or Perfetto: one thread per rank."""
        scale = MICROSECONDS[self.unit]
        names = (_thread_name(rank) for rank in range(self.ranks))
        events = (_event(span, self.start, scale) for span in self.spans)
        return json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"})

    @staticmethod
    def from_chrome_trace(text: str) -> Timeline:
        """Read what `to_chrome_trace` wrote; times are in seconds.

        Raises:
            InputFileError: the text is not such a trace.
        """
        try:
            events = [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]
            spans = [
                Span(int(event["tid"]), one, event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
                for event in events
                for one in flat((parse_action(event["name"]),))
            ]
            ranks = 1 + max((span.rank for span in spans), default=0)
            return Timeline(tuple(spans), ranks, "s")
        except (ValueError, KeyError, TypeError, AttributeError, PenstockError) as error:
            raise InputFileError(
                f"not a trace of a step as Timeline.to_chrome_trace writes it: {error}"
            ) from error


def _covered(spans: Iterable[Span]) -> float:
    """How long at least one computing span runs; ``spans`` are sorted by start."""
    covered, end = 0.0, float("-inf")
    for span in spans:
        if span.action.op in COMPUTE_OPS and span.end > end:
            covered += span.end - max(span.start, end)
            end = span.end
    return covered


def _thread_name(rank: int) -> dict[str, object]:
    return {
        "ph": "M",
        "name": "thread_name",
        "pid": 0,
        "tid": rank,
        "args": {"name": f"rank {rank}"},
    }


def _event(span: Span, origin: float, scale: float) -> dict[str, object]:
    stage, op, microbatch, _ = span.action
    return {
        "ph": "X",
        "name": str(span.action),
        "cat": op.value,
        "pid": 0,
        "tid": span.rank,
        "ts": (span.start - origin) * scale,
        "dur": span.duration * scale,
        "args": {"op": op.value, "stage": stage, "microbatch": microbatch},
    }


# ---- a simulated step: bubbles, memory, and the reasons for idle time


class Gap(NamedTuple):
    """Idle time of a rank before a computing action, and what the rank waited for.

    Attributes:
        rank: the idle rank.
        start: when the rank became idle.
        end: when ``action`` started.
        action: the action that the rank then started.
        waits_for: the action of another rank that the rank waited for last.
    """

    rank: int
    start: float
    end: float
    action: Action
    waits_for: Action


class Simulation:
    """A schedule run on simulated clocks; made by :func:`simulate`.

    Args:
        numbered: the schedule.
        costs: what its actions cost.

    Raises:
        ScheduleError: the schedule does not complete.
    """

    def __init__(self, numbered: Numbered, costs: Costs) -> None:
        self.schedule = numbered.schedule
        self.costs = costs
        self._numbered = numbered
        self._takes = numbered.priced(durations(costs, numbered.schedule.stages))
        self._clock = completed(numbered, self._takes, costs)
        self._end = self._clock.end[: len(numbered)]
        self._computes = numbered.per_lane(lambda lane: lane[1] in COMPUTE_OPS)

    @cached_property
    def makespan(self) -> float:
        """When the last computing action ends; all clocks start at 0."""
        return max(compress(self._end, self._computes), default=0.0)

    @cached_property
    def timeline(self) -> Timeline:
        """The computing actions as spans."""
        spans = tuple(self._span(number) for row in self._rows for number in row)
        return Timeline(spans, self.schedule.ranks, self.costs.unit, self.schedule.pairs)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes; time in which a pair overlaps counts once."""
        if self.costs.overlap and self.schedule.pairs:
            return self.timeline.busy
        return tuple(sum(map(self._takes.__getitem__, row)) for row in self._rows)

    @property
    def bubble(self) -> float:
        """The share of the makespan in which ranks do not compute, over all ranks."""
        available = self.makespan * self.schedule.ranks
        return 1 - sum(self.busy) / available if available else 0.0

    @cached_property
    def longest_stage(self) -> float:
        """The longest time that any rank takes from the start of its first action to the end of its last.

        The zero-bubble papers measure a step by it, since the idle ends of successive steps overlap.
        """
        start, end = self._clock.start.__getitem__, self._end.__getitem__
        rows = filter(None, self._rows)
        return max((max(map(end, row)) - min(map(start, row)) for row in rows), default=0.0)

    @property
    def longest_stage_bubble(self) -> float:
        """The share of :attr:`longest_stage` in which the busiest rank does not compute."""
        return 1 - max(self.busy) / self.longest_stage if self.longest_stage else 0.0

    @cached_property
    def _held(self) -> list[list[float]]:
        """What each rank holds after each of its computing actions."""
        stages = self.schedule.stages
        activation = self.costs.per_stage("activation", stages)
        stash = self.costs.per_stage("stash", stages)
        growth: dict[Op, list[float]] = {
            Op.F: activation,
            Op.I: list(map(sub, stash, activation)),
            Op.W: list(map(neg, stash)),
            Op.B: list(map(neg, activation)),
        }
        grows = self._numbered.priced(growth)
        return [list(accumulate(map(grows.__getitem__, row))) for row in self._rows]

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """The most that each rank holds at any time, in units of ``activation`` and ``stash``."""
        return tuple(max([0.0, *held]) for held in self._held)

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """What a rank holds over time: pairs of a time and what the rank holds from then on.

        F takes memory when it starts; the other ops free memory when they end.
        """
        spans = map(self._span, self._rows[rank])
        when = (span.start if span.action.op is Op.F else span.end for span in spans)
        return list(zip(when, self._held[rank], strict=True))

    @property
    def messages(self) -> int:
        """The number of messages between ranks."""
        return self._clock.crossing

    def span(self, action: Action) -> Span:
        """When an action ran.

        Raises:
            UsageError: the schedule has no such action.
        """
        number = self._numbered.number(action)
        if number is None:
            raise UsageError(f"{self.schedule.name} has no action {action}")
        return self._span(number)

    def gaps(self, rank: int) -> list[Gap]:
        """The idle times of a rank before and between its computing actions, each with its reason."""
        gaps = []
        before = 0.0
        for number in self._rows[rank]:
            span = self._span(number)
            if span.start > before:
                awaited = self._clock.awaited(number)
                assert awaited is not None, "only a wait makes a gap"
                waits_for = self._numbered.action(awaited)
                gaps.append(Gap(rank, before, span.start, span.action, waits_for))
            before = max(before, span.end)
        return gaps

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The computing actions, first to last, that determine how long the step takes."""
        last = max(compress(range(len(self._end)), self._computes), key=self._end.__getitem__)
        path = [number for number in self._clock.path(last) if self._computes[number]]
        return tuple(map(self._span, reversed(path)))

    @cached_property
    def _rows(self) -> list[list[int]]:
        """The numbers of each rank's computing actions."""
        computes = self._computes
        return [[n for n in program if computes[n]] for program in self._numbered.programs]

    def _span(self, number: int) -> Span:
        rank, _ = self._numbered.place[number]
        return Span(
            rank, self._numbered.action(number), self._clock.start[number], self._end[number]
        )


@paused_collection()
def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Run a schedule on one simulated clock per rank: each action starts as soon as its rank and needs allow.

    If the messages are spelled out, a transfer starts when both ends have posted it and its channel is
    free. If not, it starts when the value is made, and channels carry any number at once.

    Args:
        schedule: the schedule, with or without messages.
        costs: the costs of its actions; by default 1 for each F, I and W.

    Raises:
        ScheduleError: the schedule does not complete.
    """
    return Simulation(Numbered(schedule), costs or Costs())


@paused_collection()
def replay(
    schedule: Schedule, durations: Mapping[Action, float], *, latency: float = 0
) -> Timeline:
    """Lay measured durations out on one clock per rank.

    If one thread ran all ranks in turn, this is the timeline that separate processes would have had.

    Args:
        schedule: the schedule that was run, with or without its messages.
        durations: the seconds of each action; an action that is not listed took none.
        latency: the seconds that a message takes to arrive.

    Raises:
        ScheduleError: the schedule does not complete.
        UsageError: a computing action has no duration.
    """
    numbered = Numbered(schedule)
    actions = {number: numbered.action(number) for number in numbered.place}
    lacking = [str(a) for a in actions.values() if a.op in COMPUTE_OPS and a not in durations]
    if lacking:
        raise UsageError(f"no duration for {len(lacking)} actions: {', '.join(lacking[:5])}")
    takes = [0.0] * len(numbered)
    for number, action in actions.items():
        takes[number] = durations.get(action, 0.0)
    start = completed(numbered, takes, Costs(latency=latency)).start
    spans = tuple(
        Span(numbered.place[number][0], action, start[number], start[number] + takes[number])
        for number, action in actions.items()
        if action.op not in PEER_OPS
    )
    return Timeline(spans, schedule.ranks, "s", schedule.pairs)
