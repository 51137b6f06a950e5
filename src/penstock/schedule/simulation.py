"""From a schedule and costs to times, bubbles, memory and the reasons for idle time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UsageError
from penstock.schedule.action import COMPUTE_OPS, MESSAGE_OPS, WAIT_SEND_OPS, Action, Op
from penstock.schedule.base import Schedule, paused_collection
from penstock.schedule.clock import Costs, Numbers, Prices, Times, prices, run_clocks
from penstock.schedule.packed import CODE, NOWHERE, Packed, Wiring
from penstock.schedule.timeline import Span, Timeline


class Gap(NamedTuple):
    """Idle time of a rank between two computing actions, and what it waited for.

    Attributes:
        rank: the idle rank.
        start: when it had nothing to do.
        end: when ``action`` started.
        action: what it went on with.
        waits_for: the action of another rank whose result came last.
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
        costs: what was given.
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
        """For each rank how long it computes; what an overlapped pair hides counts once."""
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
        """The longest that any rank takes from the start of its first action to the end of its last.

        The zero-bubble papers measure a step so, since the idle ends of two steps overlap.
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
        """What a rank holds over time: when it changes, and what it holds from then on.

        An F takes its memory when it starts, the others give theirs back when they end.
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
        """The computing actions, first to last, none of which can be longer without the step being longer."""
        path = []
        number = int(self._computes[np.argmax(self._times.end[self._computes])])
        while number != NOWHERE:
            path.append(self._span(number))
            number = self._cause(number)
        return tuple(reversed(path))

    # ---- why an action started when it did

    def _awaited(self, number: int) -> int:
        """The action that the rank last waited for before ``number`` could start; ``NOWHERE`` if for none.

        Messages and other actions that take no time stand between two computing actions; the wait may have
        been at any of them.
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

    Where one thread runs all ranks in turn, this is the timeline that ranks of their own would have had.

    Args:
        schedule: what was run, with its messages or without.
        durations: seconds of each action; one that is not listed took none.
        latency: seconds until a message is there.

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


Amounts = NDArray[np.float64]


def changes(packed: Packed, activation: Sequence[float], stash: Sequence[float]) -> Amounts:
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
    found: Amounts = table[packed.op, packed.stage]
    return found


def peaks(packed: Packed, changed: Amounts) -> tuple[float, ...]:
    """The most that each rank holds at any time."""
    ends = packed.starts.tolist()
    return tuple(
        float(np.cumsum(changed[first:last]).max(initial=0.0)) for first, last in pairwise(ends)
    )
