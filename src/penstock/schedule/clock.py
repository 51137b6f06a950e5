"""The clock: one loop that runs programs on simulated clocks, and how it sees a schedule.

The validator, the simulator, the search, the planner and the drawings all ask it when actions run, whether
all ranks finish, and who waits for whom.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeVar

from penstock.errors import UsageError
from penstock.schedule.action import (
    COMPUTE_OPS,
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

# ---- the loop


Link = tuple[int, float]
"""A number that is needed, and how long after its end its result arrives."""
NOT_YET = -1.0


class Ran(NamedTuple):
    """How far programs got, and when.

    Attributes:
        start: when each number started, or ``NOT_YET``.
        end: when each number ended, or ``NOT_YET``.
        order: the numbers in an order in which one process may run them.
        stuck: for each program that did not finish, the number at which it stopped and the one it needs.
    """

    start: list[float]
    end: list[float]
    order: list[int]
    stuck: dict[int, tuple[int, int]]


def run(
    programs: Sequence[Sequence[int]], duration: Sequence[float], needs: Sequence[Sequence[Link]]
) -> Ran:
    """Run programs, each on a clock of its own: a number starts as soon as its program and needs allow.

    A program runs until it needs a time that is not known yet, so the loop is linear in the numbers.

    Args:
        programs: the numbers of each program, in order.
        duration: how long each number takes.
        needs: what each number needs from other programs.
    """
    start, end, order = [NOT_YET] * len(duration), [NOT_YET] * len(duration), list[int]()
    asleep: dict[int, list[int]] = {}
    clock, at = [0.0] * len(programs), [0] * len(programs)
    ready = deque(range(len(programs)))

    def advance(one: int) -> None:
        """Run a program until it ends, or until it needs a number that has not ended."""
        now, program = clock[one], programs[one]
        for place in range(at[one], len(program)):
            number = program[place]
            for needed, lag in needs[number]:
                when = end[needed]
                if when < 0:
                    clock[one], at[one] = now, place
                    asleep.setdefault(needed, []).append(one)
                    return
                if when + lag > now:
                    now = when + lag
            order.append(number)
            start[number] = now
            end[number] = now = now + duration[number]
            if number in asleep:
                ready.extend(asleep.pop(number))

    while ready:
        advance(ready.popleft())
    waiting = ((one, needed) for needed, each in asleep.items() for one in each)
    stuck = {one: (programs[one][at[one]], needed) for one, needed in waiting}
    return Ran(start, end, order, stuck)


# ---- what actions cost


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
        links: latency and bandwidth between pairs of ranks, where they differ from these two.
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
    links: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    message: float | Mapping[str, float] = 0
    activation: Cost = 1
    stash: Cost = 1
    overlap: float = 0
    unit: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name in ("forward", "input", "weight", "activation", "stash"):
            _check(name, getattr(self, name))
        if self.backward is not None:
            _check("backward", self.backward)
        _check(
            "message",
            list(self.message.values()) if isinstance(self.message, Mapping) else self.message,
        )
        for latency, bandwidth in ((self.latency, self.bandwidth), *self.links.values()):
            _check("latency", latency)
            if not bandwidth > 0:
                raise UsageError(f"bandwidth={bandwidth}: must be above 0")
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

    def wire(self, source: int, target: int) -> tuple[float, float]:
        """Latency and bandwidth of messages from one rank to another."""
        return self.links.get((source, target), (self.latency, self.bandwidth))

    def bytes_of(self, value: str) -> float:
        """The bytes that a value of the edge table takes in a message."""
        return self.message.get(value, 0) if isinstance(self.message, Mapping) else self.message


def _check(name: str, cost: Cost) -> None:
    for number in cost if isinstance(cost, Sequence) else (cost,):
        if not (math.isfinite(number) and number >= 0):
            raise UsageError(f"{name}={number}: must be a finite number, at least 0")


_COST_OF = {Op.F: "forward", Op.I: "input", Op.W: "weight", Op.B: "backward"}


def durations(costs: Costs, stages: int) -> dict[Op, list[float]]:
    """How long each op that takes time takes on each stage."""
    return {op: costs.per_stage(name, stages) for op, name in _COST_OF.items()}


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
    return size / costs.wire(rank_of[send.stage], rank_of[send.peer_stage])[1]


def under_way(schedule: Schedule, rule: Dependencies, need: Need, user: int, costs: Costs) -> float:
    """How long a result travels to a stage on another rank if messages are not spelled out."""
    rank_of = schedule.placement.rank_of
    latency, _ = costs.wire(rank_of[need.stage], rank_of[user])
    if not costs.message:
        return latency
    sends = rule.sends(Action(need.stage, need.split_op, 0))
    transfers = (transfer_of(schedule, send, costs) for send in sends)
    return latency + max(transfers, default=0.0)


# ---- a schedule in numbers
# The validator and the simulator handle millions of actions, and a search runs programs ten thousand times.
# So each action is a number. The actions of one stage, op and peer form a *lane*, numbered by microbatch;
# the rule of ``dependencies.py`` is the same for all microbatches, so it is evaluated once per lane.


Lane = tuple[int, Op, int | None]
"""A stage, an op, and the peer of a message that does not go to the neighbour."""
Place = tuple[int, int]
"""A rank and a position in its program."""
Meeting = tuple[int, int]
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

    def numbers_of(self, stage: int, op: Op, peer: int | None = None) -> Sequence[int]:
        """The number of a lane's action for each microbatch, or one that no action has."""
        m = self.schedule.microbatches
        base = self._first.get((stage, op, peer))
        if base is None:
            return [_NONE] * m
        return [base] * m if op in STAGE_OPS else range(base, base + m)

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
    def needs(self) -> list[tuple[Lane, Need, list[Meeting]]]:
        """Each need of each lane, with every action of the lane beside the one that meets the need.

        The action that meets a need may be in no program; ``place`` then lacks its number.
        """
        bases = range(0, len(self), self.schedule.microbatches)
        return [
            (lane, need, self._beside(base, lane, self._meeting(need)))
            for base, lane in zip(bases, self.lanes, strict=True)
            for need in self.rule.needs(*lane)
        ]

    def _beside(self, base: int, lane: Lane, met: Sequence[int]) -> list[Meeting]:
        """Each action of a lane beside the action that meets one of its needs."""
        if lane[1] is Op.REDUCE_GRAD:
            return [(base, number) for number in met]
        if lane[1] in STAGE_OPS:
            return [(base, met[0])]
        return [pair for pair in enumerate(met, base) if pair[0] in self.place]

    def _meeting(self, need: Need) -> Sequence[int]:
        """The number of the action that meets a need, for each microbatch."""
        stage, op, peer = need
        if not isinstance(op, Half):
            return self.numbers_of(stage, op, peer)
        whole, half = self.numbers_of(stage, Op.B), self.numbers_of(stage, op.value)
        return [b if b in self.place else h for b, h in zip(whole, half, strict=True)]

    @cached_property
    def messages(self) -> list[tuple[int, int]]:
        """The SEND and the RECV of each message that has both, channel by channel."""
        return [
            (send, receive)
            for lane, _, beside in self.needs
            if lane[1] in RECV_OPS
            for receive, send in beside
            if send in self.place
        ]


# ---- a schedule on the clock
# Beside its ranks run its channels, as programs of their own: one per ordered pair of ranks and kind of
# message. Their numbers follow those of the actions; each is a *transfer*, which needs both ends of its
# message posted. So the loop knows no messages. An overlapped pair runs under the number of its forward.


class Clock:
    """A schedule run on simulated clocks; it may stop before its end.

    If the messages are not spelled out, a transfer starts when the value is made, and channels carry any
    number at once. A need that nothing meets counts as met: ``validation.py`` reports it.

    Args:
        numbered: the schedule.
        takes: how long each action keeps its rank busy.
        costs: the costs of messages and overlapped pairs; by default messages take no time.

    Attributes:
        start: when each action, and after them each transfer, started; or ``NOT_YET``.
        end: when each ended.
        crossing: how often a result went from rank to rank.
    """

    def __init__(
        self,
        numbered: Numbered,
        takes: Sequence[float],
        costs: Costs | None = None,
    ) -> None:
        self._numbered, self._costs = numbered, costs or Costs()
        self._transfer: dict[int, int] = {}
        """The number of the transfer of each SEND and RECV that has another end."""
        self._needs: list[list[Link]] = [[] for _ in range(len(numbered))]
        self._forward = {backward: forward for forward, backward in numbered.pairs.items()}
        hidden = {
            f: self._costs.overlap * min(takes[f], takes[b]) for f, b in numbered.pairs.items()
        }
        self._takes = list(takes)
        for f, b in numbered.pairs.items():
            self._takes[f] += takes[b] - hidden[f]
        self._programs = [
            [n for n in program if n not in self._forward] if self._forward else program
            for program in numbered.programs
        ]
        self._add_channels()
        self._add_needs()
        self.crossing = len(numbered.messages) or sum(map(len, self._needs))
        self.start, self.end, self._order, self._stuck = self._run()
        for f, b in numbered.pairs.items():
            if self.end[f] >= 0:
                self.start[b], self.end[b] = self.end[f] - takes[b], self.end[f]
                self.end[f] = self.start[f] + takes[f]

    def _run(self) -> Ran:
        return run(self._programs, self._takes, self._needs)

    def _add_channels(self) -> None:
        numbered = self._numbered
        receive_of = dict(numbered.messages)
        lengths = self._transfer_lengths()
        rank_of = numbered.schedule.placement.rank_of
        channel_of = numbered.per_lane(
            lambda lane: (
                (rank_of[lane[0]], rank_of[Action(*lane[:2], 0, lane[2]).peer_stage], lane[1])
                if lane[1] in SEND_OPS
                else None
            )
        )
        channels: dict[object, list[int]] = defaultdict(list)
        for send in (n for program in self._programs for n in program if n in receive_of):
            number = len(self._takes)
            channels[channel_of[send]].append(number)
            self._transfer[send] = self._transfer[receive_of[send]] = number
            self._takes.append(lengths[send])
            self._needs.append([(send, 0.0), (receive_of[send], 0.0)])
        self._programs = [*self._programs, *channels.values()]

    def _transfer_lengths(self) -> Sequence[float]:
        """How long each SEND's message keeps its channel busy."""
        schedule, costs = self._numbered.schedule, self._costs
        if not costs.message:
            return [0.0] * len(self._numbered)
        return self._numbered.per_lane(
            lambda lane: (
                transfer_of(schedule, Action(lane[0], lane[1], 0, lane[2]), costs)
                if lane[1] in SEND_OPS
                else 0.0
            )
        )

    def _add_needs(self) -> None:
        numbered, costs, transfer = self._numbered, self._costs, self._transfer
        schedule = numbered.schedule
        rank_of = schedule.placement.rank_of
        for (stage, op, _), need, beside in numbered.needs:
            is_message = need.op in MESSAGE_OPS
            is_local = not is_message and rank_of[need.stage] == rank_of[stage]
            if op in MESSAGE_OPS or op in STAGE_OPS or is_local:
                continue
            if is_message:
                sender = Action(need.stage, need.split_op, 0, need.peer).peer_stage
                lag, _ = costs.wire(rank_of[sender], rank_of[stage])
            else:
                lag = under_way(schedule, numbered.rule, need, stage, costs)
            for number, needed in beside:
                if is_message and needed in transfer:
                    self._needs[self._forward.get(number, number)].append((transfer[needed], lag))
                elif not is_message and needed in numbered.place:
                    needed = self._forward.get(needed, needed)
                    self._needs[self._forward.get(number, number)].append((needed, lag))

    def completes_blocking(self) -> bool:
        """Whether all would end, too, if each SEND kept its rank until the message is received."""
        is_send = self._numbered.per_lane(lambda lane: lane[1] in SEND_OPS)
        is_free = self._numbered.per_lane(lambda lane: lane[1] in STAGE_OPS)
        for program in self._numbered.programs:
            sent: int | None = None
            for number in program:
                if is_free[number] or number in self._forward:
                    continue
                if sent in self._transfer:
                    self._needs[number].append((self._transfer[sent], self._costs.latency))
                sent = number if is_send[number] else None
        self._stuck = self._run().stuck
        return self.completes

    # ---- how far it came

    @property
    def completes(self) -> bool:
        """Whether all programs came to their end."""
        return not self._stuck

    @property
    def order(self) -> Iterator[int]:
        """The actions in an order in which one process may run them; halves of a pair stay together."""
        pairs, size = self._numbered.pairs, len(self._numbered)
        for number in self._order:
            if number < size:
                yield number
                if number in pairs:
                    yield pairs[number]

    def blame(self) -> list[tuple[int, int, int]]:
        """Who waits for whom where programs stopped: (rank, its action, the awaited action), in a circle.

        Where ranks wait for one that waits for nobody, the list ends with the last that waits.
        """
        ranks = self._numbered.schedule.ranks
        program_of = {n: at for at, program in enumerate(self._programs) for n in program}
        at = min(one for one in self._stuck if one < ranks)
        path: dict[int, tuple[int, int, int]] = {}
        while at in self._stuck and at not in path:
            number, needed = self._stuck[at]
            while needed >= len(
                self._numbered
            ):  # A transfer: its channel waits for one of its ends.
                needed = self._stuck[program_of[needed]][1]
            path[at] = at, number, needed
            at = program_of[needed]
        return list(path.values())[list(path).index(at) if at in path else 0 :]

    # ---- why an action started when it did

    @cached_property
    def _before(self) -> dict[int, int]:
        """The number before each number in its program."""
        return {two: one for program in self._programs for one, two in pairwise(program)}

    def _cause(self, number: int) -> tuple[int | None, bool]:
        """What determined when a number started, and whether that was one of its needs."""
        before = self._before.get(number)
        free = 0.0 if before is None else self._over(before)
        needed, lag = max(
            self._needs[number],
            key=lambda link: self._over(link[0]) + link[1],
            default=(_NONE, 0.0),
        )
        if needed != _NONE and self._over(needed) + lag > free:
            return needed, True
        return before, False

    def _over(self, number: int) -> float:
        """When a number ended; for a pair, when both halves had."""
        return self.end[self._numbered.pairs.get(number, number)]

    def awaited(self, number: int) -> int | None:
        """The action of another rank, or the message, that an action's rank waited for last before it."""
        at: int | None = self._forward.get(number, number)
        while at is not None:
            cause, is_need = self._cause(at)
            if is_need:
                assert cause is not None
                return self._end_on_rank_of(cause, at)
            if cause is None or self._computes[cause]:
                return None
            at = cause
        return None

    def path(self, number: int) -> Iterator[int]:
        """The actions that determined when an action started, last first, and the action itself."""
        at: int | None = self._forward.get(number, number)
        size = len(self._numbered)
        while at is not None:
            if at in self._numbered.pairs:
                yield self._numbered.pairs[at]
            if at < size:
                yield at
            at, _ = self._cause(at)

    def _end_on_rank_of(self, needed: int, number: int) -> int:
        """An action that was needed; of a message, the end on the rank that needed it."""
        if needed < len(self._numbered):
            return needed
        place = self._numbered.place
        ends = (end for end, transfer in self._transfer.items() if transfer == needed)
        return next(end for end in ends if place[end][0] == place[number][0])

    @cached_property
    def _computes(self) -> list[bool]:
        return self._numbered.per_lane(lambda lane: lane[1] in COMPUTE_OPS)
