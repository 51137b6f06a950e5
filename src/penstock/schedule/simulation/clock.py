"""Run a schedule on simulated clocks, one per rank."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError
from penstock.schedule.action import SEND_OPS, Op
from penstock.schedule.packed import NOWHERE, Packed, Wiring

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Prices:
    """What each action costs, by its number.

    Attributes:
        duration: how long the action keeps its rank busy.
        transfer: how long its message keeps its channel busy.
        hidden: how much earlier than the end of its forward half a backward half may start.
        latency: from the end of a transfer until the message is there.
    """

    duration: Numbers
    transfer: Numbers
    hidden: Numbers
    latency: float


@dataclass(frozen=True)
class Times:
    """When each action ran, by its number.

    Attributes:
        start: when it started; of a message, when it was posted.
        end: when it ended.
        there: when what it gives was there for another rank: of a message, its arrival.
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
"""A time before all times: what has not happened."""


@dataclass
class _Channels:
    """The messages under way: the times of their ends, and until when each channel is busy."""

    partner: array[int]
    transfer: array[float]
    channel: array[int]
    latency: float
    busy_until: dict[int, float] = field(default_factory=dict)

    def arrival(self, number: int, first: float, second: float) -> float:
        """When a message is there whose ends were posted at these two times."""
        posted = max(first, second)
        transfer = self.transfer[number]
        if transfer:
            channel = self.channel[number]
            posted = max(posted, self.busy_until.get(channel, posted)) + transfer
            self.busy_until[channel] = posted
        return posted + self.latency


class _Clocks:
    """Runs each rank until it must wait for a rank whose time is not known yet."""

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
        """An overlapped pair gives what it makes when both halves are done."""
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
            raise _refusal(self._packed, stands, "waits for ever")

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
        """When what an action waits for is there; ``NOT_YET`` where that is not known."""
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
    """For each SEND and RECV a number of its channel: the ranks it joins and the kind of message."""
    packed = wiring.packed
    other = packed.rank[wiring.partner]
    is_send = packed.having(SEND_OPS)
    sender = np.where(is_send, packed.rank, other)
    receiver = np.where(is_send, other, packed.rank)
    gradient = packed.having(frozenset({Op.SEND_B, Op.RECV_B}))
    return (sender * packed.schedule.ranks + receiver) * 2 + gradient
