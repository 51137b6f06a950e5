"""A schedule on the clock: when each action runs, what its rank waits for, and what keeps it from its end.

Messages have this meaning. SEND and RECV *post* and return. A message is complete when both ends have posted
it and the earlier ones on its channel are complete; there is one first-in first-out channel per ordered pair
of ranks and kind of message. A compute action waits for what it needs, WAIT_SEND for its message. An
overlapped pair starts when both halves may.

An action that may run now may also run later. So one run shows for all runs whether they complete.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, compress, pairwise
from operator import itemgetter, neg, sub
from typing import NamedTuple

from penstock.errors import ScheduleError, UsageError
from penstock.schedule.action import (
    COMPUTE_OPS,
    MESSAGE_OPS,
    PEER_OPS,
    RECV_OPS,
    SEND_OPS,
    STAGE_OPS,
    WAIT_SEND_OPS,
    Action,
    Op,
    Overlap,
    Program,
    message,
)
from penstock.schedule.base import Schedule, flat, paused_collection
from penstock.schedule.clock import (
    Costs,
    Link,
    durations,
    latency_of,
    run,
    transfer_of,
    under_way,
)
from penstock.schedule.dependencies import Dependencies, Half, Need, counterpart
from penstock.schedule.timeline import Span, Timeline

# ---- a schedule in numbers
# The validator and the simulator handle millions of actions, so each action is a number. The actions of one
# stage, op and peer form a *lane*; the rule of ``dependencies.py`` is the same for all of them, so it is
# evaluated once per lane.


Lane = tuple[int, Op, int | None]
"""A stage, an op, and the peer of a message that does not go to the neighbour."""


class Numbered:
    """A schedule as the clock takes it: programs of numbers, and what each number needs.

    Actions are numbered in the order of the ranks and their programs. Beside the ranks run the channels, as
    programs of *transfers*, whose numbers follow; a transfer needs both ends of its message posted. So the
    clock knows no messages. An overlapped pair runs under the number of its forward.

    Args:
        schedule: any schedule, with or without messages.
        costs: what it costs.

    Attributes:
        rule: what must come before each action.
        actions: the action of each number.
        rank: the rank of each number.
        number: the number at which each action first occurs.
        lanes: the numbers of each lane, ascending.
        forward: the number of the forward of each overlapped pair, by that of its backward.
        channels: the SEND and the RECV of each message that has both, by channel, in the order of the SENDs.
        transfer: the number of the transfer of each of these ends.
        lengths: how long each transfer takes.
        programs: the numbers that each rank, and then each channel, runs.
        needs: what each number needs that other programs run. What no program runs counts as met.
        unmet: what does not come before an action, though it must: the action's number, what it needs, and
            the number of that, if a program has it.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs, self.rule = schedule, costs, Dependencies(schedule)
        self.actions, self.rank, self.forward = list[Action](), list[int](), dict[int, int]()
        self.programs: list[Sequence[int]] = []
        for rank, program in enumerate(schedule.programs):
            self._add(rank, program)
        self.number: dict[tuple[int, Op, int | None, int | None], int] = {}
        self.lanes: dict[Lane, list[int]] = defaultdict(list)
        for number, action in enumerate(self.actions):
            self.number.setdefault(action, number)
            self.lanes[action[0], action[1], action[3]].append(number)
        self.needs: list[list[Link]] = [[] for _ in self.actions]
        self.unmet: list[tuple[int, Action, int | None]] = []
        self.channels: dict[Lane, list[tuple[int, int]]] = defaultdict(list)
        self.transfer: dict[int, int] = {}
        self.lengths: list[float] = []
        self._open_channels()
        for lane in [lane for lane in self.lanes if lane[1] not in RECV_OPS]:
            for need in self.rule.needs(*lane):
                self._link(lane, need)

    def _add(self, rank: int, program: Program) -> None:
        """Number the actions of a rank."""
        first = len(self.actions)
        self.actions += map(_one_form, flat(program))
        numbers = range(first, len(self.actions))
        self.rank += [rank] * len(numbers)
        if len(numbers) == len(program):
            self.programs.append(numbers)
            return
        own: list[int] = []
        for entry in program:
            own.append(first)
            if isinstance(entry, Overlap):
                self.forward[first + 1] = first
            first += 2 if isinstance(entry, Overlap) else 1
        self.programs.append(own)

    def _open_channels(self) -> None:
        """Make a transfer of each message that has both ends."""
        rank_of, takes = self.schedule.placement.rank_of, dict[int, float]()
        for lane in [lane for lane in self.lanes if lane[1] in RECV_OPS]:
            (need,) = self.rule.needs(*lane)
            sent = self.rule.settle(need, 0)
            ends = [(send, number) for number, _, send in self._met(lane, need) if send is not None]
            takes |= dict.fromkeys(dict(ends), transfer_of(self.schedule, sent, self.costs))
            self.channels[rank_of[sent.stage], sent.op, rank_of[lane[0]]] += ends
        for messages in self.channels.values():
            messages.sort()
            first = len(self.needs)
            for number, (send, receive) in enumerate(messages, first):
                self.transfer[send] = self.transfer[receive] = number
                self.lengths.append(takes[send])
                self.needs.append([(send, 0.0), (receive, 0.0)])
            self.programs.append(range(first, len(self.needs)))

    def _met(self, lane: Lane, need: Need) -> list[tuple[int, int | None, int | None]]:
        """Each action of a lane, the microbatch of what it needs, and the number of that."""
        (stage, op, peer), get, actions = need, self.number.get, self.actions
        asked: list[tuple[int, int | None]]
        if lane[1] is Op.REDUCE_GRAD:
            every = range(self.schedule.microbatches)
            asked = [(number, m) for number in self.lanes[lane] for m in every]
        elif op in STAGE_OPS:
            asked = [(number, None) for number in self.lanes[lane]]
        else:
            asked = [(number, actions[number][2]) for number in self.lanes[lane]]
        if not isinstance(op, Half):
            return [(n, m, get((stage, op, m, peer))) for n, m in asked]
        half = op.value
        return [(n, m, get((stage, Op.B, m, None), get((stage, half, m, None)))) for n, m in asked]

    def _link(self, lane: Lane, need: Need) -> None:
        """Hold a lane against one of its needs, and link what meets it in another program."""
        stage, op, _ = lane
        rank_of, forward, rank = self.schedule.placement.rank_of, self.forward, self.rank
        is_message, lag = need.op in MESSAGE_OPS, 0.0
        waits = op in COMPUTE_OPS or op in WAIT_SEND_OPS
        if waits and is_message:
            lag = latency_of(self.schedule, self.rule.settle(need, 0), self.costs)
        elif waits and rank_of[need.stage] != rank_of[stage]:
            lag = under_way(self.schedule, self.rule, need, stage, self.costs)
        else:
            waits = False
        for number, microbatch, met in self._met(lane, need):
            place = forward.get(number, number)
            if met is None:
                self.unmet.append((number, self.rule.settle(need, microbatch), None))
            elif rank[met] == rank[number] and forward.get(met, met) >= place:
                self.unmet.append((number, self.actions[met], met))
            elif waits and (met in self.transfer or not is_message):
                met = self.transfer[met] if is_message else forward.get(met, met)
                self.needs[place].append((met, lag))

    def priced(self, table: Mapping[Op, Sequence[float]]) -> list[float]:
        """A table's entry for each number's op and stage; 0 for an op that it lacks."""
        prices = [0.0] * len(self.actions)
        for (stage, op, _), numbers in self.lanes.items():
            for number in numbers if op in table else ():
                prices[number] = table[op][stage]
        return prices

    def position(self, number: int) -> int:
        """The place of an action in the program of its rank."""
        program = self.programs[self.rank[number]]
        return bisect_right(program, self.forward.get(number, number)) - 1

    def problem(self, number: int, what: str, remedy: str) -> Problem:
        """Say what is wrong with an action, and where it is."""
        place = self.rank[number], self.position(number)
        return Problem(*place, self.actions[number], what, remedy)


def _one_form(action: Action) -> Action:
    """An action that names its peer only if that is not the neighbour."""
    return action if action[3] is None else message(action[0], action[1], action[2], action[3])


# ---- a run of it: times, bubbles, memory, the reasons for idle time, and what keeps it from its end


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a schedule.

    Attributes:
        rank: the rank whose program is wrong; ``None`` if it is not a single one.
        position: the place in that program, from 0; ``None`` for a missing action.
        action: the action at fault.
        what: what is wrong.
        remedy: what to change.
    """

    rank: int | None
    position: int | None
    action: Action | None
    what: str
    remedy: str

    def __str__(self) -> str:
        rank = None if self.rank is None else f"rank {self.rank}"
        position = None if self.position is None else f"position {self.position}"
        action = None if self.action is None else str(self.action)
        where = ", ".join(part for part in (rank, position, action) if part is not None)
        return f"{where}: {self.what}; {self.remedy}"


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
    """A schedule run on simulated clocks, to its end or as far as it comes; see :func:`simulate`.

    Args:
        numbered: the schedule.
        takes: how long each action keeps its rank busy.
        blocking_sends: whether each SEND keeps its rank until the message is received.
    """

    def __init__(
        self, numbered: Numbered, takes: Sequence[float], *, blocking_sends: bool = False
    ) -> None:
        self.schedule, self.costs, self._numbered = numbered.schedule, numbered.costs, numbered
        self._takes, self._needs = takes, numbered.needs
        if blocking_sends:
            self._needs = [*map(list, numbered.needs)]
            self._block()
        lengths = [*takes, *numbered.lengths]
        shown = {  # the part of an overlapped pair before its backward
            first: takes[first] - self.costs.overlap * min(takes[first], takes[second])
            for second, first in numbered.forward.items()
        }
        for first, alone in shown.items():
            lengths[first] = alone + takes[first + 1]
        ran = run(numbered.programs, lengths, self._needs)
        self._start, self._end, self._order, self._stuck = ran
        for first, alone in shown.items():
            if self._end[first] >= 0:
                self._start[first + 1] = self._start[first] + alone
                self._end[first + 1] = self._end[first]
                self._end[first] = self._start[first] + takes[first]

    def _block(self) -> None:
        """Let what follows a SEND wait until its message has arrived."""
        actions, transfer = self._numbered.actions, self._numbered.transfer
        for program in self._numbered.programs[: self.schedule.ranks]:
            for before, number in pairwise(n for n in program if actions[n][1] not in STAGE_OPS):
                if actions[before][1] in SEND_OPS and before in transfer:
                    lag = latency_of(self.schedule, actions[before], self.costs)
                    self._needs[number].append((transfer[before], lag))

    # ---- how far it came

    @property
    def completes(self) -> bool:
        """Whether all ranks came to their end."""
        return not self._stuck

    @property
    def order(self) -> Iterator[Action]:
        """The actions in an order in which one process may run them; halves of a pair stay together."""
        actions, forward = self._numbered.actions, self._numbered.forward
        for number in self._order:
            if number < len(actions):
                yield actions[number]
                if number + 1 in forward:
                    yield actions[number + 1]

    def obstacles(self, known: Container[Action | None] = ()) -> Iterator[Problem]:
        """What keeps the ranks from their end; ``known`` actions are reported as missing elsewhere."""
        numbered, rank_of = self._numbered, self.schedule.placement.rank_of
        for number, needed, met in sorted(numbered.unmet, key=itemgetter(0)):
            which, remedy = "is in no program", f"add it to rank {rank_of[needed.stage]}"
            if met is not None:
                which = f"comes later, at position {numbered.position(met)}"
                remedy = f"move {needed} before it"
            if needed not in known:
                yield numbered.problem(number, f"needs {needed}, which {which}", remedy)
        for (stage, op, _), numbers in numbered.lanes.items():
            home = rank_of[stage]
            for number in numbers if op in MESSAGE_OPS else ():
                if number not in numbered.transfer:
                    other = counterpart(numbered.actions[number])
                    what = f"no rank has the {other.op.value} at its other end"
                    remedy = f"add {other} to rank {rank_of[other.stage]}, or remove it"
                    yield numbered.problem(number, what, remedy)
            for number in [number for number in numbers if numbered.rank[number] != home]:
                what, remedy = f"stage {stage} is on rank {home}", f"move it to rank {home}"
                yield numbered.problem(number, what, remedy)
        if self._stuck:
            yield self._deadlock()

    def _deadlock(self) -> Problem:
        """Which ranks wait for which where programs stopped: most often in a circle."""
        numbered = self._numbered
        waits = self._blame()
        circle = " -> ".join(
            f"rank {rank} at {numbered.actions[number]} waits for {numbered.actions[needed]} "
            f"of rank {numbered.rank[needed]}"
            for rank, number, needed in waits
        )
        remedy = "move one of these actions before the one it holds up"
        return numbered.problem(waits[0][1], f"deadlock: {circle}", remedy)

    def _blame(self) -> list[tuple[int, int, int]]:
        """Who waits for whom where programs stopped: (rank, its number, the awaited number), in a circle.

        Where ranks wait for one that waits for nobody, the list ends with the last that waits.
        """
        numbered, size = self._numbered, len(self._numbered.actions)
        program_of = {n: at for at, program in enumerate(numbered.programs) for n in program}
        at = min(self._stuck)
        path: dict[int, tuple[int, int, int]] = {}
        while at in self._stuck and at not in path:
            number, needed = self._stuck[at]
            while needed >= size:  # A transfer: its channel waits for one of its ends.
                needed = self._stuck[program_of[needed]][1]
            path[at] = at, number, needed
            at = program_of[needed]
        return list(path.values())[list(path).index(at) if at in path else 0 :]

    # ---- what took how long

    @cached_property
    def _computes(self) -> list[bool]:
        computes = [False] * len(self._numbered.actions)
        for (_, op, _), numbers in self._numbered.lanes.items():
            for number in numbers if op in COMPUTE_OPS else ():
                computes[number] = True
        return computes

    @cached_property
    def _rows(self) -> list[list[int]]:
        """The numbers of each rank's computing actions."""
        rows: list[list[int]] = [[] for _ in range(self.schedule.ranks)]
        for number in compress(range(len(self._computes)), self._computes):
            rows[self._numbered.rank[number]].append(number)
        return rows

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """All actions and when they ran, rank by rank in the order of the programs."""
        columns = self._numbered.rank, self._numbered.actions, self._start, self._end
        return tuple(map(Span, *columns))

    def span(self, action: Action) -> Span:
        """When an action ran; for one that recurs, the first time.

        Raises:
            UsageError: the schedule has no such action.
        """
        number = self._numbered.number.get(_one_form(action))
        if number is None:
            raise UsageError(f"{self.schedule.name} has no action {action}")
        return self.spans[number]

    @cached_property
    def makespan(self) -> float:
        """When the last computing action ends; all clocks start at 0."""
        return max(compress(self._end, self._computes), default=0.0)

    @cached_property
    def timeline(self) -> Timeline:
        """The computing actions as spans."""
        spans = tuple(compress(self.spans, self._computes))
        return Timeline(spans, self.schedule.ranks, self.costs.unit, self.schedule.pairs)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes; time in which a pair overlaps counts once."""
        if self.costs.overlap and self._numbered.forward:
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
        start, end = self._start.__getitem__, self._end.__getitem__
        rows = filter(None, self._rows)
        return max((max(map(end, row)) - min(map(start, row)) for row in rows), default=0.0)

    @property
    def longest_stage_bubble(self) -> float:
        """The share of :attr:`longest_stage` in which the busiest rank does not compute."""
        return 1 - max(self.busy) / self.longest_stage if self.longest_stage else 0.0

    @property
    def messages(self) -> int:
        """The number of messages between ranks."""
        numbered = self._numbered
        return len(numbered.lengths) or sum(map(len, numbered.needs))

    # ---- what ranks hold

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
        spans = map(self.spans.__getitem__, self._rows[rank])
        when = (span.start if span.action.op is Op.F else span.end for span in spans)
        return list(zip(when, self._held[rank], strict=True))

    # ---- why actions started when they did

    def gaps(self, rank: int) -> list[Gap]:
        """The idle times of a rank before and between its computing actions, each with its reason."""
        gaps = []
        before = 0.0
        for number in self._rows[rank]:
            span = self.spans[number]
            if span.start > before:
                gaps.append(Gap(rank, before, span.start, span.action, self._awaited(number)))
            before = max(before, span.end)
        return gaps

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The computing actions, first to last, that determine how long the step takes."""
        computing = compress(range(len(self._computes)), self._computes)
        last = max(computing, key=self._end.__getitem__, default=None)
        forward, path = self._numbered.forward, list[int]()
        at = None if last is None else forward.get(last, last)
        while at is not None:
            path += [at + 1, at] if at + 1 in forward else [at]
            at, _ = self._cause(at)
        computes = dict(enumerate(self._computes))  # not the transfers
        return tuple(self.spans[number] for number in reversed(path) if computes.get(number))

    @cached_property
    def _before(self) -> dict[int, int]:
        """The number before each number in its program."""
        return {two: one for program in self._numbered.programs for one, two in pairwise(program)}

    def _cause(self, number: int) -> tuple[int | None, bool]:
        """What determined when a number started, and whether that was one of its needs."""
        before = self._before.get(number)
        latest = 0.0 if before is None else self._over(before)
        cause, is_need = before, False
        for needed, lag in self._needs[number]:
            if self._over(needed) + lag > latest:
                cause, is_need, latest = needed, True, self._over(needed) + lag
        return cause, is_need

    def _over(self, number: int) -> float:
        """When a number ended; for a pair, when both halves had."""
        return self._end[number + 1 if number + 1 in self._numbered.forward else number]

    def _awaited(self, number: int) -> Action:
        """The action of another rank, or the message, that a rank waited for last before an action."""
        numbered, is_need = self._numbered, False
        cause: int | None = numbered.forward.get(number, number)
        while not is_need:
            assert cause is not None, "only a wait makes a gap"
            at = cause
            cause, is_need = self._cause(at)
        assert cause is not None
        if cause < len(numbered.actions):
            return numbered.actions[cause]
        # Of a message, the end on the rank that waited.
        ends = (end for end, transfer in numbered.transfer.items() if transfer == cause)
        return next(numbered.actions[n] for n in ends if numbered.rank[n] == numbered.rank[at])


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
    numbered = Numbered(schedule, costs or Costs())
    return completed(numbered, numbered.priced(durations(numbered.costs, schedule.stages)))


def completed(numbered: Numbered, takes: Sequence[float] = ()) -> Simulation:
    """Run a schedule that must come to its end.

    Raises:
        ScheduleError: an action is on a wrong rank, or needs one that no program has or that comes
            later, or there is a deadlock.
    """
    ran = Simulation(numbered, takes or [0.0] * len(numbered.actions))
    for obstacle in ran.obstacles():
        raise ScheduleError(f"{numbered.schedule.name} does not complete: {obstacle}")
    return ran


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
    numbered = Numbered(schedule, Costs(latency=latency))
    actions = numbered.actions
    lacking = [str(a) for a in actions if a.op in COMPUTE_OPS and a not in durations]
    if lacking:
        raise UsageError(f"no duration for {len(lacking)} actions: {', '.join(lacking[:5])}")
    ran = completed(numbered, [durations.get(action, 0.0) for action in actions])
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
    return list(completed(Numbered(silent, Costs())).order)
