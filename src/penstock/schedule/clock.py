"""What actions cost, and the one loop that runs programs on simulated clocks, one per rank."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeVar

from penstock.errors import UsageError
from penstock.schedule.action import (
    MESSAGE_OPS,
    NEIGHBOUR,
    RECV_OPS,
    SEND_OPS,
    STAGE_OPS,
    Action,
    Op,
    Overlap,
    Program,
)
from penstock.schedule.base import Schedule
from penstock.schedule.dependencies import Dependencies, Half, Need

T = TypeVar("T")

Cost = float | Sequence[float]
"""One number for every stage, or one per stage."""


@dataclass(frozen=True)
class Costs:
    """What each action costs: one number for all stages, or one per stage.

    Args:
        forward: time of F.
        input: time of I.
        weight: time of W.
        backward: time of B; input + weight if not given.
        latency: time from the moment a message is posted at both ends until it has arrived.
        bandwidth: bytes that a channel carries per unit of time, one message after the other.
        message: bytes of each value by its name in the edge table, or one number for all.
        activation: memory that F of a stage holds until its I or B is done.
        stash: memory that I holds until W is done.
        overlap: the share of the shorter half that an overlapped pair of F and B hides, from 0 to 1.
        unit: the unit of the times: ``s``, ``ms``, ``us``, or empty for plain numbers.

    Raises:
        UsageError: a number that is negative or not finite, or a bandwidth of 0.
    """

    forward: Cost = 1
    input: Cost = 1
    weight: Cost = 1
    backward: Cost | None = None
    latency: float = 0
    bandwidth: float = math.inf
    message: float | Mapping[str, float] = 0
    activation: Cost = 1
    stash: Cost = 1
    overlap: float = 0
    unit: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name in ("forward", "input", "weight", "activation", "stash", "latency"):
            _check(name, getattr(self, name))
        if self.backward is not None:
            _check("backward", self.backward)
        _check(
            "message",
            list(self.message.values()) if isinstance(self.message, Mapping) else self.message,
        )
        if not self.bandwidth > 0:
            raise UsageError(f"bandwidth={self.bandwidth}: must be above 0")
        if not 0 <= self.overlap <= 1:
            raise UsageError(f"overlap={self.overlap}: must be from 0 to 1")

    def per_stage(self, name: str, stages: int) -> list[float]:
        """One of the costs as a list, with a number for each stage.

        Args:
            name: ``forward``, ``input``, ``weight``, ``backward``, ``activation`` or ``stash``.
            stages: the number of stages.

        Raises:
            UsageError: the cost is a list of another length.
        """
        if name == "backward" and self.backward is None:
            halves = zip(
                self.per_stage("input", stages), self.per_stage("weight", stages), strict=True
            )
            return [first + second for first, second in halves]
        cost: Cost = getattr(self, name)
        if not isinstance(cost, Sequence):
            return [cost] * stages
        if len(cost) != stages:
            raise UsageError(
                f"{name} has {len(cost)} numbers for {stages} stages: give one for each stage, or one for all"
            )
        return list(cost)

    def bytes_of(self, value: str) -> float:
        """The bytes that a value of the edge table takes in a message."""
        return self.message.get(value, 0) if isinstance(self.message, Mapping) else self.message


def _check(name: str, cost: Cost) -> None:
    for number in cost if isinstance(cost, Sequence) else (cost,):
        if not (math.isfinite(number) and number >= 0):
            raise UsageError(f"{name}={number}: must be a finite number, at least 0")


# ---- a schedule in numbers
# The validator and the simulator handle millions of actions, and a search runs programs ten thousand times.
# So each action is a number. The actions of one stage, op and peer form a *lane*, numbered by microbatch;
# the rule of ``dependencies.py`` is the same for all microbatches, so it is evaluated once per lane.


Lane = tuple[int, Op, int | None]
"""A stage, an op, and the peer of a message that does not go to the neighbour."""
Place = tuple[int, int]
"""A rank and a position in its program."""
Link = tuple[int, int]
"""The number of an action, and of one that it needs."""
_NONE = -1
"""A number that no action has."""


class Numbered:
    """The actions of a schedule as numbers, with their places and needs.

    Args:
        schedule: any schedule.

    Attributes:
        rule: what must come before each action.
        lanes: the lanes in the order of their numbers; number ``n`` is in ``lanes[n // microbatches]``.
        programs: the numbers of each rank's actions; an overlapped pair gives its two halves.
        pairs: the backward half of each overlapped pair, by its forward half.
        place: where each action first occurs.
        again: further occurrences of actions, and their places.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.rule = Dependencies(schedule)
        self.lanes: list[Lane] = []
        self.pairs: dict[int, int] = {}
        self.place: dict[int, Place] = {}
        self.again: list[tuple[int, Place]] = []
        self._first: dict[Lane, int] = {}
        self.programs = [self._numbers(*ranked) for ranked in enumerate(schedule.programs)]

    def _numbers(self, rank: int, program: Program) -> list[int]:
        numbers: list[int] = []
        first, place = self._first, self.place
        for position, entry in enumerate(program):
            for stage, op, microbatch, peer in entry if isinstance(entry, Overlap) else (entry,):
                base = first.get((stage, op, peer))
                if base is None:
                    base = self._add_lane(stage, op, peer)
                number = base + (microbatch or 0)
                numbers.append(number)
                if number in place:
                    self.again.append((number, (rank, position)))
                else:
                    place[number] = rank, position
            if isinstance(entry, Overlap):
                self.pairs[numbers[-2]] = numbers[-1]
        return numbers

    def _add_lane(self, stage: int, op: Op, peer: int | None) -> int:
        near = peer is None or peer == stage + NEIGHBOUR[op]
        lane = (stage, op, None if near else peer)
        if lane not in self._first:
            self._first[lane] = len(self.lanes) * self.schedule.microbatches
            self.lanes.append(lane)
        self._first[stage, op, peer] = self._first[lane]
        return self._first[lane]

    def __len__(self) -> int:
        return len(self.lanes) * self.schedule.microbatches

    def number(self, action: Action) -> int | None:
        """The number of an action, if the schedule has it."""
        base = self._first.get((action.stage, action.op, action.peer))
        number = None if base is None else base + (action.microbatch or 0)
        return number if number in self.place else None

    def has(self, stage: int, op: Op) -> list[bool]:
        """Whether the schedule has the action, for each microbatch."""
        return [number in self.place for number in self.numbers_of(stage, op)]

    def action(self, number: int) -> Action:
        """The action that has a number."""
        lane, microbatch = divmod(number, self.schedule.microbatches)
        stage, op, peer = self.lanes[lane]
        return Action(stage, op, None if op in STAGE_OPS else microbatch, peer)

    def per_lane(self, figure: Callable[[Lane], T]) -> list[T]:
        """A figure of each lane, repeated for all its numbers."""
        m = self.schedule.microbatches
        return [number for lane in self.lanes for number in [figure(lane)] * m]

    def priced(self, table: Mapping[Op, Sequence[float]]) -> list[float]:
        """A table's entry for each number's op and stage; 0 for an op that it lacks."""
        return self.per_lane(lambda lane: table[lane[1]][lane[0]] if lane[1] in table else 0.0)

    @cached_property
    def needs(self) -> list[tuple[Lane, Need, list[Link]]]:
        """Each need of each lane, with a link from every action of the lane to the one that meets it.

        The action that meets a need may be in no program; ``place`` then lacks its number.
        """
        return [
            (lane, need, self._links(base, lane, self._meeting(need)))
            for base, lane in zip(self._bases, self.lanes, strict=True)
            for need in self.rule.needs(*lane)
        ]

    @property
    def _bases(self) -> range:
        return range(0, len(self), self.schedule.microbatches)

    def _links(self, base: int, lane: Lane, met: Sequence[int]) -> list[Link]:
        """Link each action of a lane to the action that meets one of its needs."""
        if lane[1] is Op.REDUCE_GRAD:
            return [(base, number) for number in met]
        if lane[1] in STAGE_OPS:
            return [(base, met[0])]
        pairs = enumerate(met, base)
        return [pair for pair in pairs if pair[0] in self.place]

    def _meeting(self, need: Need) -> Sequence[int]:
        """The number of the action that meets a need, for each microbatch."""
        stage, op, peer = need
        if not isinstance(op, Half):
            return self.numbers_of(stage, op, peer)
        whole, half = self.numbers_of(stage, Op.B), self.numbers_of(stage, op.value)
        return [b if b in self.place else h for b, h in zip(whole, half, strict=True)]

    def numbers_of(self, stage: int, op: Op, peer: int | None = None) -> Sequence[int]:
        """The number of a lane's action for each microbatch, or one that no action has."""
        m = self.schedule.microbatches
        base = self._first.get((stage, op, peer))
        if base is None:
            return [_NONE] * m
        return [base] * m if op in STAGE_OPS else range(base, base + m)

    @cached_property
    def partner(self) -> dict[int, int]:
        """The other end of each SEND and RECV that has one."""
        ends: dict[int, int] = {}
        for lane, _, links in self.needs:
            if lane[1] in RECV_OPS:
                met = [(receive, send) for receive, send in links if send in self.place]
                ends.update(met)
                ends.update((send, receive) for receive, send in met)
        return ends


# ---- the loop: programs on simulated clocks, one per rank


NOT_YET = -1.0


@dataclass
class Waits:
    """What numbers wait for: actions of other ranks, and messages. Ranks run their own actions in order.

    Attributes:
        awaited: the number that each number waits for; the length of this list if there is none.
        lag: how long after its end the awaited result arrives, for each number.
        several: all awaited numbers and their lags, for numbers that wait for more than one.
        partner: the other end of each SEND and RECV.
        transfer: the channel of each SEND and RECV, and how long it keeps the channel busy, if known.
        latency: how long after its transfer a message arrives.
        pairs: the backward half of each overlapped pair, by its forward half, which waits for both.
        hidden: how long before the end of its forward half a backward half starts.
    """

    awaited: list[int]
    lag: list[float]
    several: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    partner: dict[int, int] = field(default_factory=dict)
    transfer: dict[int, tuple[object, float]] = field(default_factory=dict)
    latency: float = 0.0
    pairs: dict[int, int] = field(default_factory=dict)
    hidden: dict[int, float] = field(default_factory=dict)

    def add(self, number: int, awaited: int, lag: float) -> None:
        """Make a number wait for one more."""
        if self.awaited[number] == len(self.awaited):
            self.awaited[number], self.lag[number] = awaited, lag
        else:
            first = (self.awaited[number], self.lag[number])
            self.several.setdefault(number, [first]).append((awaited, lag))


class Ran(NamedTuple):
    """How far programs got, and when.

    Attributes:
        start: when each number started, or ``NOT_YET``.
        there: when each number's result was available; for a message, when it arrived.
        order: the numbers in an order in which one process may run them.
        stuck: for each rank that did not finish, the number at which it stopped and the awaited number.
    """

    start: list[float]
    there: list[float]
    order: list[int]
    stuck: dict[int, tuple[int, int]]


def run(programs: Sequence[Sequence[int]], duration: Sequence[float], waits: Waits) -> Ran:
    """Run programs on simulated clocks: each action starts as soon as its rank and what it waits for allow.

    This is the only loop that runs programs without doing their work: it finds when each action runs, whether
    all ranks finish and, if not, which rank waits for which. A rank runs until it needs a time that is not
    known yet, so the loop is linear in the number of actions.

    Args:
        programs: the numbers of each rank, in order.
        duration: how long each number keeps its rank busy.
        waits: what the numbers wait for.
    """
    awaited_by, lag, several = waits.awaited, waits.lag, waits.several
    start = [NOT_YET] * len(awaited_by)
    there = [*start, 0.0]
    order: list[int] = []
    clock, at = [0.0] * len(programs), [0] * len(programs)
    asleep: dict[int, list[int]] = {}
    ready = deque(range(len(programs)))

    def arrive(number: int, when: float) -> None:
        there[number] = when
        ready.extend(asleep.pop(number, ()))

    special = _Special(waits, duration, start, arrive)
    while ready:
        rank = ready.popleft()
        now, program = clock[rank], programs[rank]
        for place in range(at[rank], len(program)):
            number = program[place]
            awaited = awaited_by[number]
            when = there[awaited] + lag[number]
            if several and number in several:
                awaited, when = _latest(several[number], there)
            if there[awaited] < 0:
                at[rank] = place
                asleep.setdefault(awaited, []).append(rank)
                break
            if when > now:
                now = when
            order.append(number)
            start[number] = now
            now += duration[number]
            if number in special.numbers:
                now = special.end(number, now)
                continue
            there[number] = now
            if number in asleep:
                ready.extend(asleep.pop(number))
        else:
            at[rank] = len(program)
        clock[rank] = now
    stuck = {
        rank: (programs[rank][at[rank]], awaited)
        for awaited, ranks in asleep.items()
        for rank in ranks
    }
    return Ran(start, there, order, stuck)


def _latest(needed: list[tuple[int, float]], there: list[float]) -> tuple[int, float]:
    """Pick an awaited number that has not arrived, or else the last to arrive; with its time."""
    latest, when = needed[0][0], NOT_YET
    for awaited, lag in needed:
        if there[awaited] < 0:
            return awaited, NOT_YET
        if there[awaited] + lag > when:
            latest, when = awaited, there[awaited] + lag
    return latest, when


class _Special:
    """Ends messages and overlapped pairs; results of other actions are available as soon as they end.

    Args:
        waits: what the numbers wait for.
        duration: how long each number keeps its rank busy.
        start: when each number started.
        arrive: called with a number and the time at which its result is available.
    """

    def __init__(
        self,
        waits: Waits,
        duration: Sequence[float],
        start: list[float],
        arrive: Callable[[int, float], None],
    ) -> None:
        self._waits, self._duration, self._start, self._arrive = waits, duration, start, arrive
        self._forward = {backward: forward for forward, backward in waits.pairs.items()}
        self._free: dict[object, float] = {}
        self.numbers = {*waits.partner, *waits.pairs, *self._forward}

    def end(self, number: int, now: float) -> float:
        """End an action; return the time at which its rank is free."""
        if number in self._forward:
            return self._end_pair(self._forward[number], number)
        if number in self._waits.partner:
            self._post(number, self._waits.partner[number], now)
        return now

    def _post(self, number: int, other: int, now: float) -> None:
        if self._start[other] < 0:
            return
        when = max(now, self._start[other] + self._duration[other])
        if number in self._waits.transfer:
            channel, takes = self._waits.transfer[number]
            when = self._free[channel] = max(when, self._free.get(channel, when)) + takes
        for end in (number, other):
            self._arrive(end, when + self._waits.latency)

    def _end_pair(self, forward: int, backward: int) -> float:
        """End a pair: the results of both halves are available when both are done."""
        self._start[backward] -= self._waits.hidden.get(backward, 0.0)
        over = max(self._start[half] + self._duration[half] for half in (forward, backward))
        for half in (forward, backward):
            self._arrive(half, over)
        return over


# ---- what the actions of a schedule wait for, and what they cost


_COST_OF = {Op.F: "forward", Op.I: "input", Op.W: "weight", Op.B: "backward"}


def durations(costs: Costs, stages: int) -> dict[Op, list[float]]:
    """How long each op that takes time takes on each stage."""
    return {op: costs.per_stage(name, stages) for op, name in _COST_OF.items()}


def waits_of(numbered: Numbered, costs: Costs | None = None) -> Waits:
    """What the actions of a schedule wait for.

    If its messages are not spelled out, a transfer starts when the value is made, and channels carry any
    number at once. A need that nothing meets counts as met: ``validation.py`` reports it.

    Args:
        numbered: the schedule.
        costs: the costs of messages and overlapped pairs; by default messages take no time.
    """
    costs = costs or Costs()
    size = len(numbered)
    waits = Waits([size] * size, [0.0] * size, partner=numbered.partner, latency=costs.latency)
    waits.pairs = numbered.pairs
    waiting = {backward: forward for forward, backward in numbered.pairs.items()}
    schedule = numbered.schedule
    rank_of = schedule.placement.rank_of
    for (stage, op, _), need, links in numbered.needs:
        is_message = need.op in MESSAGE_OPS
        is_local = not is_message and rank_of[need.stage] == rank_of[stage]
        if op in MESSAGE_OPS or op in STAGE_OPS or is_local:
            continue
        lag = 0.0 if is_message else under_way(schedule, numbered.rule, need, costs)
        for number, awaited in links:
            if awaited in numbered.place:
                waits.add(waiting.get(number, number), awaited, lag)
    if costs.message:
        waits.transfer = _transfers(numbered, costs)
    if costs.overlap:
        takes = numbered.priced(durations(costs, schedule.stages))
        waits.hidden = {
            backward: costs.overlap * min(takes[forward], takes[backward])
            for forward, backward in numbered.pairs.items()
        }
    return waits


def block_sends(numbered: Numbered, waits: Waits) -> None:
    """Make each rank wait after each SEND until the message is received."""
    is_send = numbered.per_lane(lambda lane: lane[1] in SEND_OPS)
    is_free = numbered.per_lane(lambda lane: lane[1] in STAGE_OPS)
    for program in numbered.programs:
        sent: int | None = None
        for number in program:
            if is_free[number]:
                continue
            if sent is not None:
                waits.add(number, sent, 0.0)
            sent = number if is_send[number] else None


def transfer_of(schedule: Schedule, send: Action, costs: Costs) -> float:
    """How long a message, given by its SEND, keeps its channel busy."""
    forward = send.op is Op.SEND_F
    maker, user = (send.stage, send.peer_stage) if forward else (send.peer_stage, send.stage)
    rank_of = schedule.placement.rank_of
    size = sum(
        costs.bytes_of(edge.value)
        for edge in schedule.edges
        if edge.source == maker
        and (forward or edge.gradient)
        and rank_of[user] in {rank_of[target] for target in edge.targets}
    )
    return size / costs.bandwidth


def under_way(schedule: Schedule, rule: Dependencies, need: Need, costs: Costs) -> float:
    """How long a result travels to another rank if messages are not spelled out."""
    if not costs.message:
        return costs.latency
    sends = rule.sends(Action(need.stage, need.split_op, 0))
    transfers = (transfer_of(schedule, send, costs) for send in sends)
    return costs.latency + max(transfers, default=0.0)


def _transfers(numbered: Numbered, costs: Costs) -> dict[int, tuple[object, float]]:
    """The channel of each SEND and RECV, and how long it keeps the channel busy."""
    rank_of = numbered.schedule.placement.rank_of

    def channel_of(lane: Lane) -> tuple[object, float] | None:
        send = Action(lane[0], lane[1], 0, lane[2])
        if send.op not in SEND_OPS:
            return None
        channel = rank_of[send.stage], rank_of[send.peer_stage], send.op
        return channel, transfer_of(numbered.schedule, send, costs)

    transfers = {}
    for number, taken in enumerate(numbered.per_lane(channel_of)):
        if taken and number in numbered.partner:
            transfers[number] = transfers[numbered.partner[number]] = taken
    return transfers
