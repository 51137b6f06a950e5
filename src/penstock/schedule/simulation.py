"""A schedule on the clock: when each action runs, what ranks hold, and what they wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain
from operator import itemgetter
from typing import NamedTuple

from penstock.errors import ScheduleError, UsageError
from penstock.schedule.action import (
    COMPUTE_OPS,
    PEER_OPS,
    SEND_OPS,
    Action,
    Entry,
    Op,
    Overlap,
    computes,
)
from penstock.schedule.base import Schedule, flat, paused_collection
from penstock.schedule.clock import ITS_TURN, Cost, Costs, Ran, durations, growths
from penstock.schedule.numbered import Numbered
from penstock.schedule.passes import add_communication
from penstock.schedule.timeline import Span, Timeline
from penstock.schedule.validation import obstacles


class Gap(NamedTuple):
    """Idle time of a rank before a computing action, and what the rank waited for.

    Attributes:
        rank: the idle rank.
        start: when the rank became idle.
        end: when ``action`` started.
        action: the action that the rank then started.
        waits_for: the action of another rank, or the RELOAD, that the rank waited for last.
    """

    rank: int
    start: float
    end: float
    action: Action
    waits_for: Action


class Simulation:
    """A schedule run on simulated clocks; see :func:`simulate`.

    Args:
        schedule: the schedule.
        costs: the costs of its messages, of what ranks hold and of overlapped pairs.
        takes: how long an action keeps its rank busy.

    Raises:
        ScheduleError: the schedule does not complete.
    """

    def __init__(self, schedule: Schedule, costs: Costs, takes: Callable[[Action], float]) -> None:
        self.schedule, self.costs, self._takes = schedule, costs, takes
        self._overlap = costs.per_stage("overlap", schedule.stages)
        self._numbered = Numbered(schedule, costs)
        self._lengths = [*map(self._length, self._numbered.entries)]
        self._start, self._end, self._cause, *_ = completed(self._numbered, self._lengths)

    def _length(self, entry: Entry) -> float:
        """Return how long an entry keeps its rank busy."""
        if isinstance(entry, Action):
            return self._takes(entry)
        return self._before_backward(entry) + self._takes(entry.backward)

    def _before_backward(self, pair: Overlap) -> float:
        """Return how long the forward of a pair runs before the backward starts beside it."""
        forward, backward = map(self._takes, pair)
        return forward - self._overlap[pair.forward.stage] * min(forward, backward)

    # ---- what took how long

    def _spans_at(self, number: int) -> tuple[Span, ...]:
        """When the one or two actions of an entry ran."""
        entry, rank = self._numbered.entries[number], self._numbered.rank[number]
        start, end = self._start[number], self._end[number]
        if isinstance(entry, Action):
            return (Span(rank, entry, start, end),)
        forward, backward = entry
        return (
            Span(rank, forward, start, start + self._takes(forward)),
            Span(rank, backward, start + self._before_backward(entry), end),
        )

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """All actions and when they ran, rank by rank in the order of the programs."""
        numbers = range(len(self._numbered.entries))
        return tuple(chain.from_iterable(map(self._spans_at, numbers)))

    def span(self, action: Action) -> Span:
        """The span of an action; of one that recurs, the first.

        Raises:
            UsageError: the schedule has no such action.
        """
        number = self._numbered.find(action)
        if number is None:
            raise UsageError(f"{self.schedule.name} has no action {action}")
        return next(s for s in self._spans_at(number) if s.action[:3] == action[:3])

    @cached_property
    def _rows(self) -> list[list[int]]:
        """The numbers of each rank's computing entries."""
        entries, programs = self._numbered.entries, self._numbered.programs
        return [
            [number for number in program if computes(entries[number])]
            for program in programs[: self.schedule.ranks]
        ]

    @cached_property
    def makespan(self) -> float:
        """The end of the last computing action; all clocks start at 0."""
        return max((self._end[row[-1]] for row in self._rows if row), default=0.0)

    @cached_property
    def timeline(self) -> Timeline:
        """The computing actions as spans."""
        numbers = chain.from_iterable(self._rows)
        spans = tuple(chain.from_iterable(map(self._spans_at, numbers)))
        return Timeline(spans, self.schedule.ranks, self.costs.unit, self.schedule.pairs)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The computing time of each rank; time in which a pair overlaps counts once."""
        return tuple(sum(map(self._lengths.__getitem__, row)) for row in self._rows)

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
        takes = (self._end[row[-1]] - self._start[row[0]] for row in self._rows if row)
        return max(takes, default=0.0)

    @property
    def longest_stage_bubble(self) -> float:
        """The share of :attr:`longest_stage` in which the busiest rank does not compute."""
        return 1 - max(self.busy) / self.longest_stage if self.longest_stage else 0.0

    @property
    def messages(self) -> int:
        """The number of messages between ranks."""
        if self.schedule.communicates:
            return sum(map(len, self._numbered.channels))
        programs = add_communication(self.schedule).programs
        return sum(action.op in SEND_OPS for program in programs for action in flat(program))

    # ---- what ranks hold

    @cached_property
    def _held(self) -> list[list[tuple[float, float]]]:
        """What each rank holds from each time on at which that changes."""
        growth = growths(self.costs, self.schedule.stages)
        size_of = self.costs.per_slice("slice_sizes", self.schedule)
        held = []
        for rank, row in enumerate(self._rows):
            changes = [
                (end if op is not Op.F else start, number, growth[op][stage] * size_of(m))
                for number in row
                for _, (stage, op, m, _), start, end in self._spans_at(number)
            ]
            changes += (
                (self._end[copy] if size > 0 else self._start[copy], number, -size)
                for number, copy, size in self._copies(rank)
            )
            held.append(_summed(changes))
        return held

    def _copies(self, rank: int) -> Iterator[tuple[int, int, float]]:
        """A rank's OFFLOADs and RELOADs, their transfers, and by how much each changes its host's memory."""
        numbered = self._numbered
        sizes = self.costs.per_stage("activation", self.schedule.stages)
        size_of = self.costs.per_slice("slice_sizes", self.schedule)
        for number, copy in numbered.copies.items():
            if numbered.rank[number] == rank:
                stage, op, m, _ = numbered.action(number)
                size = sizes[stage] * size_of(m)
                yield number, copy, size if op is Op.OFFLOAD else -size

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """The most that each rank holds at any time, in units of ``activation`` and ``stash``."""
        return tuple(max([0.0, *(most for _, most in held)]) for held in self._held)

    @property
    def host_memory(self) -> tuple[float, ...]:
        """The most that each rank holds on its host at any time: from an OFFLOAD to the end of its RELOAD."""
        peaks = []
        for rank in range(self.schedule.ranks):
            changes = [
                (self._start[copy] if size > 0 else self._end[copy], number, size)
                for number, copy, size in self._copies(rank)
            ]
            peaks.append(max([0.0, *(most for _, most in _summed(changes))]))
        return tuple(peaks)

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """The memory of a rank over time: pairs of a time and the memory from then on.

        F takes memory when it starts; the other computing ops free memory when they end. An OFFLOAD frees it
        when its copy ends; a RELOAD takes it when its copy starts.
        """
        return self._held[rank]

    # ---- why actions started when they did

    def gaps(self, rank: int) -> list[Gap]:
        """The idle times of a rank before and between its computing actions, each with its reason."""
        gaps, idle_from = [], 0.0
        for number in self._rows[rank]:
            start = self._start[number]
            if start > idle_from:
                action = self._numbered.action(number)
                gaps.append(Gap(rank, idle_from, start, action, self._awaited(number)))
            idle_from = self._end[number]
        return gaps

    def _awaited(self, number: int) -> Action:
        """The action of another rank, or the message, that a rank waited for last before an entry."""
        numbered = self._numbered
        while self._cause[number] == ITS_TURN:
            number -= 1
        cause = self._cause[number]
        if cause >= len(numbered.entries):
            # A transfer needs both ends of its message: this rank's is the one to name.
            ends = (end for end, _ in numbered.needs[cause])
            cause = next(end for end in ends if numbered.rank[end] == numbered.rank[number])
        return numbered.action(cause, number)


def _summed(changes: Sequence[tuple[float, int, float]]) -> list[tuple[float, float]]:
    """The sums of changes from each time on; changes at one time are added in the order of their entries."""
    ordered = sorted(changes, key=itemgetter(0, 1))
    times, _, amounts = zip(*ordered, strict=True) if ordered else ((), (), ())
    return list(zip(times, accumulate(amounts), strict=True))


def completed(numbered: Numbered, lengths: Sequence[float] = ()) -> Ran:
    """Run a schedule that must come to its end.

    Raises:
        ScheduleError: an action is on a wrong rank, or needs one that no program has or that comes
            later, or there is a deadlock.
    """
    ran = numbered.run(lengths)
    for obstacle in obstacles(numbered, ran):
        raise ScheduleError(f"{numbered.schedule.name} does not complete: {obstacle}")
    return ran


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
    costs = costs or Costs()
    table = durations(costs, schedule.stages)

    def takes(action: Action) -> float:
        return table[action.op][action.stage] if action.op in table else 0.0

    if schedule.slices == 1:
        return Simulation(schedule, costs, takes)
    share_of = costs.per_slice("slice_times", schedule)
    return Simulation(schedule, costs, lambda action: takes(action) * share_of(action.microbatch))


@paused_collection()
def replay(
    schedule: Schedule, durations: Mapping[Action, float], *, latency: float = 0, overlap: Cost = 0
) -> Timeline:
    """Lay measured durations out on one clock per rank.

    If one thread ran all ranks in turn, this is the timeline that separate processes would have had.

    Args:
        schedule: the schedule that was run, with or without its messages.
        durations: the seconds of each action; an action that is not listed took none.
        latency: the seconds that a message takes to arrive.
        overlap: the share of the shorter half that pairs hid, as in :class:`Costs`.

    Raises:
        ScheduleError: the schedule does not complete.
        UsageError: a computing action has no duration.
    """
    every = (action for rank in range(schedule.ranks) for action in schedule.actions(rank))
    lacking = [str(a) for a in every if a.op in COMPUTE_OPS and a not in durations]
    if lacking:
        raise UsageError(f"no duration for {len(lacking)} actions: {', '.join(lacking[:5])}")
    costs = Costs(latency=latency, overlap=overlap)
    ran = Simulation(schedule, costs, lambda action: durations.get(action, 0.0))
    spans = tuple(span for span in ran.spans if span.action.op not in PEER_OPS)
    return Timeline(spans, schedule.ranks, "s", schedule.pairs)


@paused_collection()
def merged(schedule: Schedule) -> list[Action]:
    """Merge all ranks' actions into one order that respects every dependency, for a single process.

    Each rank's own order is kept. The backward of an overlapped pair directly follows its forward. The time
    is linear in the number of actions.

    Args:
        schedule: the schedule; its messages are left out, since one process needs none.

    Raises:
        ScheduleError: there is a deadlock, or an action needs one that comes later or is in no program; the
            message says which rank waits for which.
    """
    silent = schedule.with_programs(
        (e for e in program if isinstance(e, Overlap) or e.op not in PEER_OPS)
        for program in schedule.programs
    )
    numbered = Numbered(silent)
    entries = numbered.entries
    return [*flat([entries[n] for n in completed(numbered).order if n < len(entries)])]
