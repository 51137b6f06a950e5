"""What the actions of a schedule cost, and when each runs on simulated clocks, one per rank."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError, UsageError
from penstock.schedule.action import COMPUTE_OPS, GRADIENT_OPS, SEND_OPS, Action, Op
from penstock.schedule.base import Schedule
from penstock.schedule.packed import CODE, NOWHERE, Packed, Wiring

Cost = float | Sequence[float]
"""One number for every stage, or one per stage."""


@dataclass(frozen=True)
class Costs:
    """What each action costs, one number for all stages or one per stage.

    Args:
        forward: time of F.
        input: time of I.
        weight: time of W.
        backward: time of B; input + weight where not given.
        latency: time from the moment a message is posted at both ends until it has arrived.
        bandwidth: bytes that a channel carries in a unit of time; its messages go one after the other.
        message: bytes of each value by its name in the edge table, or one number for all.
        activation: what F of a stage holds until its I or B is done.
        stash: what I holds until W is done.
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
        """One of the costs, as a number for each stage.

        Args:
            name: ``forward``, ``input``, ``weight``, ``backward``, ``activation`` or ``stash``.
            stages: how many stages there are.

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
        """The bytes of one message of a value of the edge table."""
        return self.message.get(value, 0) if isinstance(self.message, Mapping) else self.message


def _check(name: str, cost: Cost) -> None:
    for number in cost if isinstance(cost, Sequence) else (cost,):
        if not (math.isfinite(number) and number >= 0):
            raise UsageError(f"{name}={number}: must be a finite number, at least 0")


# ---- from costs per stage to prices per action


Numbers = NDArray[np.float64]
_COST_OF = {Op.F: "forward", Op.I: "input", Op.W: "weight", Op.B: "backward"}


@dataclass(frozen=True)
class Prices:
    """What each action costs, by its number.

    Attributes:
        duration: how long the action keeps its rank busy.
        transfer: how long its message keeps its channel busy.
        hidden: how much earlier than the end of its forward half a backward half may start.
        latency: the time from the end of a transfer until the message has arrived.
    """

    duration: Numbers
    transfer: Numbers
    hidden: Numbers
    latency: float


def prices(wiring: Wiring, costs: Costs) -> Prices:
    """What each action of a schedule costs."""
    packed = wiring.packed
    table = np.zeros((len(CODE), packed.schedule.stages))
    for op in COMPUTE_OPS:
        table[CODE[op]] = costs.per_stage(_COST_OF[op], packed.schedule.stages)
    duration = table[packed.op, packed.stage]
    return Prices(
        duration, _transfers(wiring, costs), _hidden(packed, duration, costs), costs.latency
    )


def _hidden(packed: Packed, duration: Numbers, costs: Costs) -> Numbers:
    hidden = np.zeros(len(packed))
    shorter = np.minimum(duration[packed.halves], duration[packed.halves - 1])
    hidden[packed.halves] = costs.overlap * shorter
    return hidden


def _transfers(wiring: Wiring, costs: Costs) -> Numbers:
    """How long each message is under way, at its SEND and RECV or at the action that makes its value."""
    packed = wiring.packed
    transfer = np.zeros(len(packed))
    if not costs.message:
        return transfer
    ops = SEND_OPS if packed.schedule.communicates else frozenset({Op.F}) | GRADIENT_OPS
    for lane, at in packed.lanes():
        if lane.op in ops:
            there = at[at != NOWHERE]
            transfer[there] = (
                _bytes(packed, Action(lane.stage, lane.op, 0, lane.peer), costs) / costs.bandwidth
            )
    sends = packed.messages & (wiring.partner != NOWHERE)
    transfer[sends] = np.maximum(transfer[sends], transfer[wiring.partner[sends]])
    return transfer


def _bytes(packed: Packed, action: Action, costs: Costs) -> float:
    """The bytes of a SEND, or of the largest message that an action makes possible."""
    sends = [action] if action.op in SEND_OPS else packed.rule.sends(action)
    return max((_message_bytes(packed.schedule, send, costs) for send in sends), default=0)


def _message_bytes(schedule: Schedule, send: Action, costs: Costs) -> float:
    forward = send.op is Op.SEND_F
    maker, user = (send.stage, send.peer_stage) if forward else (send.peer_stage, send.stage)
    rank_of = schedule.placement.rank_of
    return sum(
        costs.bytes_of(edge.value)
        for edge in schedule.edges
        if edge.source == maker
        and (forward or edge.gradient)
        and rank_of[user] in {rank_of[target] for target in edge.targets}
    )


# ---- simulated clocks


@dataclass(frozen=True)
class Times:
    """When each action ran, by its number.

    Attributes:
        start: when it started; of a message, when it was posted.
        end: when it ended.
        there: when its result was available to another rank; for a message, when it arrived.
    """

    start: Numbers
    end: Numbers
    there: Numbers


def run_clocks(wiring: Wiring, prices: Prices) -> Times:
    """Work out when each action runs if each starts as soon as its rank and its needs allow.

    Raises:
        ScheduleError: the schedule does not complete.
    """
    _check_needs(wiring)
    clocks = _Clocks(wiring, prices)
    clocks.run()
    return Times(*(np.frombuffer(column, np.float64) for column in clocks.columns))


def _check_needs(wiring: Wiring) -> None:
    packed = wiring.packed
    lonely = np.flatnonzero(packed.messages & (wiring.partner == NOWHERE))
    if len(lonely):
        raise _refusal(packed, int(lonely[0]), "has nothing at its other end")
    for block in wiring.blocks:
        wrong = np.flatnonzero(wiring.late(block) | (block.before == NOWHERE))
        if len(wrong):
            needed = packed.rule.settle(block.need, int(block.microbatch[wrong[0]]))
            why = f"needs {needed}, which does not stand before it"
            raise _refusal(packed, int(block.after[wrong[0]]), why)


def _refusal(packed: Packed, number: int, why: str) -> ScheduleError:
    where = f"rank {packed.rank[number]}, position {packed.position(number)}"
    return ScheduleError(
        f"{packed.schedule.name} does not complete: {where}: {packed.action(number)} {why}; "
        "validate() lists everything that is wrong"
    )


def _doubles(values: Numbers) -> array[float]:
    return array("d", values.astype(np.float64).tobytes())


def _integers(values: NDArray[np.int32]) -> array[int]:
    return array("i", values.astype(np.int32).tobytes())


NOT_YET = -1.0
"""Stands for the time of what has not happened yet."""


@dataclass
class _Channels:
    """The messages under way, and until when each channel is busy."""

    partner: array[int]
    transfer: array[float]
    channel: array[int]
    latency: float
    busy_until: dict[int, float] = field(default_factory=dict)

    def arrival(self, number: int, first: float, second: float) -> float:
        """When a message arrives whose two ends were posted at these times."""
        posted = max(first, second)
        transfer = self.transfer[number]
        if transfer:
            channel = self.channel[number]
            posted = max(posted, self.busy_until.get(channel, posted)) + transfer
            self.busy_until[channel] = posted
        return posted + self.latency


class _Clocks:
    """Runs each rank until it must wait for an action whose time is not known yet."""

    def __init__(self, wiring: Wiring, prices: Prices) -> None:
        packed = wiring.packed
        size = len(packed)
        self._packed = packed
        self._at = packed.starts[:-1].tolist()
        self._last = packed.starts[1:].tolist()
        self._clock = [0.0] * len(self._at)
        self._start = _doubles(np.full(size, NOT_YET))
        self._end = _doubles(np.full(size, NOT_YET))
        self._there = _doubles(np.full(size, NOT_YET))
        self._duration = _doubles(prices.duration)
        self._hidden = _doubles(prices.hidden)
        self._waits = [_integers(column) for column in wiring.waits]
        self._first_halves = frozenset((packed.halves - 1).tolist())
        """The forward halves of overlapped pairs: their results are there when both halves are done."""
        self._message = bytes(packed.messages.astype(np.uint8))
        partner = _integers(wiring.partner)
        transfer = _doubles(prices.transfer)
        self._channels = _Channels(partner, transfer, _integers(_channel(wiring)), prices.latency)
        self._sleepers: dict[int, list[int]] = {}
        self._ready = deque(range(len(self._at)))

    @property
    def columns(self) -> tuple[array[float], array[float], array[float]]:
        """The times of starts, ends and arrivals."""
        return self._start, self._end, self._there

    def run(self) -> None:
        """Run all ranks to their ends."""
        while self._ready:
            self._advance(self._ready.popleft())
        stands = next(
            (at for at, last in zip(self._at, self._last, strict=True) if at < last), None
        )
        if stands is not None:
            raise _refusal(self._packed, stands, "waits forever")

    def _advance(self, rank: int) -> None:
        clock = self._clock[rank]
        message, start, end, duration = self._message, self._start, self._end, self._duration
        first_halves = self._first_halves
        number = self._at[rank]
        for number in range(self._at[rank], self._last[rank]):
            ready = self._ready_at(number, rank, clock - self._hidden[number])
            if ready < 0:
                break
            over = ready + duration[number]
            start[number] = ready
            end[number] = over
            clock = max(clock, over)
            if message[number]:
                self._post(number, over)
            elif number not in first_halves:
                self._give(number, over)
            if number - 1 in first_halves:
                self._give(number - 1, clock)
        else:
            number = self._last[rank]
        self._at[rank], self._clock[rank] = number, clock

    def _ready_at(self, number: int, rank: int, ready: float) -> float:
        """When all that an action waits for is there; ``NOT_YET`` where that is not known."""
        for column in self._waits:
            awaited = column[number]
            if awaited >= 0:
                there = self._there[awaited]
                if there < 0:
                    self._sleepers.setdefault(awaited, []).append(rank)
                    return NOT_YET
                ready = max(ready, there)
        return ready

    def _post(self, number: int, clock: float) -> None:
        other = self._channels.partner[number]
        posted = self._end[other]
        if posted >= 0:
            there = self._channels.arrival(number, clock, posted)
            self._there[number] = self._there[other] = there
            self._wake(number)
            self._wake(other)

    def _give(self, number: int, clock: float) -> None:
        self._there[number] = clock + self._channels.transfer[number] + self._channels.latency
        self._wake(number)

    def _wake(self, number: int) -> None:
        if number in self._sleepers:
            self._ready.extend(self._sleepers.pop(number))


def _channel(wiring: Wiring) -> NDArray[np.int32]:
    """For each SEND and RECV the number of its channel, made of its two ranks and the kind of message."""
    packed = wiring.packed
    other = packed.rank[wiring.partner]
    is_send = packed.having(SEND_OPS)
    sender = np.where(is_send, packed.rank, other)
    receiver = np.where(is_send, other, packed.rank)
    gradient = packed.having(frozenset({Op.SEND_B, Op.RECV_B}))
    return (sender * packed.schedule.ranks + receiver) * 2 + gradient
