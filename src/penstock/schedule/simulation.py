"""When each action runs: timelines, and simulations that find bubbles, memory and reasons for idle time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UsageError
from penstock.schedule.action import COMPUTE_OPS, MESSAGE_OPS, WAIT_SEND_OPS, Action, Op, Overlap
from penstock.schedule.base import Schedule, paused_collection
from penstock.schedule.clock import Costs, Numbers, Prices, Times, prices, run_clocks
from penstock.schedule.packed import CODE, NOWHERE, Packed, Wiring

# ---- the timeline of a step, simulated or measured


MICROSECONDS: Mapping[str, float] = {"s": 1e6, "ms": 1e3, "us": 1.0, "": 1e3}
"""How long a unit of time is in a Chrome trace; a unit without a name is drawn as a millisecond."""


class Span(NamedTuple):
    """An action of a rank and when it ran."""

    rank: int
    action: Action
    start: float
    end: float

    @property
    def duration(self) -> float:
        """How long it ran."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The spans of a step.

    Args:
        spans: the actions with their ranks and times, in any order.
        ranks: how many ranks there are.
        unit: the unit of the times: ``s``, ``ms``, ``us``, or empty for plain numbers.
        pairs: the forwards and backwards that the schedule runs as overlapped pairs.

    Raises:
        UsageError: an unknown unit, or a span that is of no such rank or ends before it starts.
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
        """From the first start to the last end."""
        return max((span.end for span in self.spans), default=0.0) - self.start

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each rank how long it computed; time in which spans overlap counts once."""
        return tuple(_covered(self.of_rank(rank)) for rank in range(self.ranks))

    @property
    def bubbles(self) -> tuple[float, ...]:
        """For each rank the share of the makespan in which it did not compute."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The share of the makespan in which ranks did not compute, over all ranks."""
        return sum(self.bubbles) / self.ranks

    @cached_property
    def _of_rank(self) -> tuple[tuple[Span, ...], ...]:
        found: list[list[Span]] = [[] for _ in range(self.ranks)]
        for span in sorted(self.spans, key=lambda span: (span.start, span.end)):
            found[span.rank].append(span)
        return tuple(map(tuple, found))

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """The spans of a rank, in the order in which they start."""
        return self._of_rank[rank]

    def to_chrome_trace(self) -> str:
        """The timeline as Chrome-trace JSON, for ``chrome://tracing`` or Perfetto: one thread per rank."""
        scale = MICROSECONDS[self.unit]
        names = (_thread_name(rank) for rank in range(self.ranks))
        events = (_event(span, self.start, scale) for span in self.spans)
        return json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"})


def _covered(spans: Iterable[Span]) -> float:
    """How long at least one computing span runs; ``spans`` are in the order in which they start."""
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
    """Idle time of a rank between two computing actions, and what it waited for.

    Attributes:
        rank: the idle rank.
        start: when it had nothing to do.
        end: when ``action`` started.
        action: the action that it then started.
        waits_for: the action of another rank that it waited for last.
    """

    rank: int
    start: float
    end: float
    action: Action
    waits_for: Action


class Simulation:
    """A schedule run on simulated clocks; made by :func:`simulate`.

    Args:
        wiring: the schedule.
        costs: what its actions cost.
        times: when each action ran.
    """

    def __init__(self, wiring: Wiring, costs: Costs, times: Times) -> None:
        packed = wiring.packed
        self._wiring = wiring
        self.schedule = packed.schedule
        self.costs = costs
        self._packed = packed
        self._times = times
        self._is_computing = packed.having(COMPUTE_OPS)
        self._computes = np.flatnonzero(self._is_computing)

    @cached_property
    def makespan(self) -> float:
        """When the last computing action ends; all clocks start at 0."""
        return float(self._times.end[self._computes].max(initial=0.0))

    @cached_property
    def timeline(self) -> Timeline:
        """The computing actions as spans."""
        spans = tuple(map(self._span, self._computes.tolist()))
        return Timeline(spans, self.schedule.ranks, self.costs.unit, self.schedule.pairs)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each rank how long it computes; time in which a pair overlaps counts once."""
        if len(self._packed.halves) and self.costs.overlap:
            return self.timeline.busy
        start, end = self._times.start[self._computes], self._times.end[self._computes]
        ranks = self._packed.rank[self._computes]
        return tuple(np.bincount(ranks, end - start, self.schedule.ranks).tolist())

    @property
    def bubble(self) -> float:
        """The share of the makespan in which ranks do not compute, over all ranks."""
        whole = self.makespan * self.schedule.ranks
        return 1 - sum(self.busy) / whole if whole else 0.0

    @cached_property
    def longest_stage(self) -> float:
        """The longest time that any rank takes from the start of its first action to the end of its last.

        The zero-bubble papers measure a step by it, since the idle ends of two steps overlap.
        """
        ranks = self._packed.rank[self._computes]
        first = np.full(self.schedule.ranks, np.inf)
        last = np.zeros(self.schedule.ranks)
        np.minimum.at(first, ranks, self._times.start[self._computes])
        np.maximum.at(last, ranks, self._times.end[self._computes])
        return float((last - first).max(initial=0.0))

    @property
    def longest_stage_bubble(self) -> float:
        """The share of :attr:`longest_stage` in which the busiest rank does not compute."""
        return 1 - max(self.busy) / self.longest_stage if self.longest_stage else 0.0

    @cached_property
    def _changes(self) -> Numbers:
        activation = self.costs.per_stage("activation", self.schedule.stages)
        stash = self.costs.per_stage("stash", self.schedule.stages)
        return changes(self._packed, activation, stash)

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """For each rank the most that it holds at any time, in units of ``activation`` and ``stash``."""
        return peaks(self._packed, self._changes)

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """What a rank holds over time: pairs of a time and what the rank holds from then on.

        An F takes memory when it starts; the others give memory back when they end.
        """
        numbers = self._numbers(rank)
        held = np.cumsum(self._changes[numbers]).tolist()
        forward = self._packed.op[numbers] == CODE[Op.F]
        when = np.where(forward, self._times.start[numbers], self._times.end[numbers]).tolist()
        return list(zip(when, held, strict=True))

    @cached_property
    def messages(self) -> int:
        """How many messages cross between ranks."""
        if self.schedule.communicates:
            return int(self._packed.messages.sum()) // 2
        return sum(int((column != NOWHERE).sum()) for column in self._wiring.waits)

    def span(self, action: Action) -> Span:
        """When an action ran.

        Raises:
            UsageError: the schedule has no such action.
        """
        number = self._packed.number(action)
        if number == NOWHERE:
            raise UsageError(f"{self.schedule.name} has no action {action}")
        return self._span(number)

    def gaps(self, rank: int) -> list[Gap]:
        """The idle times of a rank before and between its computing actions, each with its reason."""
        found = []
        before = 0.0
        for number in self._numbers(rank).tolist():
            span = self._span(number)
            if span.start > before:
                awaited = self._packed.action(self._awaited(number))
                found.append(Gap(rank, before, span.start, span.action, awaited))
            before = max(before, span.end)
        return found

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The computing actions, first to last, that determine how long the step takes."""
        path = []
        number = int(self._computes[np.argmax(self._times.end[self._computes])])
        while number != NOWHERE:
            path.append(self._span(number))
            number = self._cause(number)
        return tuple(reversed(path))

    # ---- why an action started when it did

    def _awaited(self, number: int) -> int:
        """The action that the rank last waited for before ``number`` could start, or ``NOWHERE``.

        Messages and other actions that take no time stand between two computing actions; the rank may have
        waited at any of them.
        """
        at: int | None = number
        while at is not None:
            if self._idle_before(at):
                return self._latest_wait(at)
            at = self._before(at)
            if at is not None and self._is_computing[at]:
                return NOWHERE
        return NOWHERE

    def _cause(self, number: int) -> int:
        """The computing action whose end let ``number`` start; ``NOWHERE`` for the first."""
        awaited = self._awaited(number)
        if awaited == NOWHERE:
            return self._compute_before(number)
        if self._is_computing[awaited]:
            return awaited
        other = int(self._wiring.partner[awaited])
        later = max(awaited, other, key=lambda end: float(self._times.start[end]))
        return self._cause(later)

    def _before(self, number: int) -> int | None:
        first = self._packed.starts[self._packed.rank[number]]
        return number - 1 if number > first else None

    def _compute_before(self, number: int) -> int:
        at = self._before(number)
        while at is not None and not self._is_computing[at]:
            at = self._before(at)
        return NOWHERE if at is None else at

    def _idle_before(self, number: int) -> bool:
        before = self._before(number)
        free = 0.0 if before is None else self._times.end[before]
        return bool(self._times.start[number] > free)

    def _latest_wait(self, number: int) -> int:
        waits = [int(column[number]) for column in self._wiring.waits]
        found = [awaited for awaited in waits if awaited != NOWHERE]
        return max(found, key=lambda awaited: float(self._times.there[awaited]), default=NOWHERE)

    def _numbers(self, rank: int) -> NDArray[np.int64]:
        bounds = np.searchsorted(self._computes, self._packed.starts[rank : rank + 2])
        return self._computes[bounds[0] : bounds[1]]

    def _span(self, number: int) -> Span:
        start, end = float(self._times.start[number]), float(self._times.end[number])
        return Span(int(self._packed.rank[number]), self._packed.action(number), start, end)


@paused_collection()
def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Run a schedule on one simulated clock per rank: each action starts as soon as its rank and needs allow.

    Where the messages are spelled out, a transfer starts when both ends have posted it and its channel is
    free. Where they are not, it starts when the value is made, and channels carry any number at once.

    Args:
        schedule: with or without messages.
        costs: by default 1 for each F, I and W.

    Raises:
        ScheduleError: the schedule does not complete.
    """
    costs = costs or Costs()
    wiring = Wiring(schedule)
    return Simulation(wiring, costs, run_clocks(wiring, prices(wiring, costs)))


@paused_collection()
def replay(
    schedule: Schedule, durations: Mapping[Action, float], *, latency: float = 0
) -> Timeline:
    """Lay measured durations out on one clock per rank.

    If one thread ran all ranks in turn, this is the timeline that separate processes would have had.

    Args:
        schedule: what was run, with its messages or without.
        durations: seconds of each action; one that is not listed took none.
        latency: the seconds that a message takes to arrive.

    Raises:
        ScheduleError: the schedule does not complete.
        UsageError: a computing action has no duration.
    """
    wiring = Wiring(schedule)
    packed = wiring.packed
    actions = [action for rank in range(schedule.ranks) for action in schedule.actions(rank)]
    lacking = [str(a) for a in actions if a.op in COMPUTE_OPS and a not in durations]
    if lacking:
        raise UsageError(f"no duration for {len(lacking)} actions: {', '.join(lacking[:5])}")
    duration = np.array([durations.get(action, 0.0) for action in actions])
    none = np.zeros(len(packed))
    times = run_clocks(wiring, Prices(duration, none, none, latency))
    shown = [i for i, action in enumerate(actions) if action.op not in MESSAGE_OPS | WAIT_SEND_OPS]
    rank, start, end = packed.rank.tolist(), times.start.tolist(), times.end.tolist()
    spans = tuple(Span(rank[i], actions[i], start[i], end[i]) for i in shown)
    return Timeline(spans, schedule.ranks, "s", schedule.pairs)


# ---- what each rank holds


def changes(packed: Packed, activation: Sequence[float], stash: Sequence[float]) -> Numbers:
    """By how much each action changes what its rank holds.

    Args:
        packed: the schedule.
        activation: for each stage what its F holds until I or B.
        stash: for each stage what its I leaves until W.
    """
    table = np.zeros((len(CODE), packed.schedule.stages))
    table[CODE[Op.F]] = activation
    table[CODE[Op.B]] = np.negative(activation)
    table[CODE[Op.I]] = np.subtract(stash, activation)
    table[CODE[Op.W]] = np.negative(stash)
    found: Numbers = table[packed.op, packed.stage]
    return found


def peaks(packed: Packed, changed: Numbers) -> tuple[float, ...]:
    """The most that each rank holds at any time."""
    ends = packed.starts.tolist()
    return tuple(
        float(np.cumsum(changed[first:last]).max(initial=0.0)) for first, last in pairwise(ends)
    )
