"""How messages travel between neighbours, on the transport that a pipeline has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter, sleep

import torch
from torch import Tensor

from penstock._engine.devices import wait_for
from penstock._engine.transport import FIRST_TAG, VALUES, Transport
from penstock._engine.values import layout_of
from penstock.plan import Link

TINY, SMALL, LARGE = 64, 2**17, 2**22
"""The bytes of messages; those of one machine that are smaller than SMALL may take another way."""
TIMES = 15
STREAMS = 3
"""How often a link is kept busy; the best counts."""
LONGEST = 32
"""The most messages of a stream."""


@dataclass(frozen=True)
class LinkReport:
    """What was found out about the way from a rank to its neighbour.

    Args:
        link: its latency and bandwidth, as the planner takes them.
        tiny: the seconds after which a message of a few bytes has arrived.
        back: the bytes per second of the other direction alone.
    """

    link: Link
    tiny: float
    back: float


@dataclass(frozen=True)
class Handling:
    """How long a rank is busy with messages that it sends and receives: the median of both, by size."""

    small: float
    large: float


def neighbours(ranks: int) -> list[list[tuple[int, int]]]:
    """Pairs of neighbours in rounds, in each of which no rank is twice; the last one joins the ends."""
    pairs = [(rank, rank + 1) for rank in range(ranks - 1)]
    rounds = [pairs[::2], pairs[1::2], [(ranks - 1, 0)] if ranks > 2 else []]
    return [one for one in rounds if one]


def channels(ranks: int) -> list[tuple[int, int, int]]:
    """The channels between neighbours."""
    pairs = [pair for one in neighbours(ranks) for pair in one]
    return sorted({(a, b, VALUES) for pair in pairs for a, b in (pair, pair[::-1])})


class Ends:
    """One end of a link to a peer: both ends call the same methods, in the same order.

    Args:
        transport: this rank's transport.
        device: where messages lie.
        peer: the other rank.
        first: whether this end begins.
    """

    def __init__(
        self, transport: Transport, device: torch.device, peer: int, *, first: bool
    ) -> None:
        self._transport, self._peer, self._first = transport, peer, first
        self._device = device
        self._data = {
            size: torch.ones(size, dtype=torch.uint8, device=device)
            for size in (TINY, SMALL, LARGE)
        }

    def _send(self, tensor: Tensor, tag: int = 0) -> None:
        self._transport.send(self._peer, FIRST_TAG + tag, [tensor]).wait()

    def _receive(self, like: Tensor, tag: int = 0) -> Tensor:
        (tensor,) = self._transport.post(self._peer, FIRST_TAG + tag, [layout_of(like)]).take()
        return tensor

    def _finish(self) -> None:
        wait_for(self._device)

    def one_way(self, size: int) -> float:
        """How long a message travels: half of the way there and back. Both ends get the first one's."""
        data, times = self._data[size], []
        for _ in range(TIMES):
            start = perf_counter()
            for sends in (self._first, not self._first):
                if sends:
                    self._send(data)
                else:
                    self._receive(data)
                self._finish()
            times.append((perf_counter() - start) / 2)
        # What else the machines do only makes it longer.
        return self.agree(min(times))

    def agree(self, number: float, *, mine: bool | None = None) -> float:
        """The first end's number, or the number of the end that says that it is its own."""
        row = torch.tensor([number], dtype=torch.float64, device=self._device)
        if self._first if mine is None else mine:
            self._send(row)
            return number
        return float(self._receive(row)[0])

    def stream(self, count: int, *, there: bool, back: bool) -> float:
        """The bytes per second of a stream of large messages from the first end, to it, or both at once."""
        sends, receives = (there, back) if self._first else (back, there)
        data, about = self._data[LARGE], layout_of(self._data[LARGE])
        self.agree(0.0)
        start = perf_counter()
        tags = [FIRST_TAG + 1 + number % 2 for number in range(count)]
        arrivals = [self._transport.post(self._peer, tag, [about]) for tag in tags if receives]
        sendings = [self._transport.send(self._peer, tag, [data]) for tag in tags if sends]
        for arrival in arrivals:
            arrival.take()
        self._finish()
        seconds = perf_counter() - start
        for sending in sendings:
            sending.wait()
        # Whoever has received last knows how long it took.
        seconds = self.agree(seconds, mine=receives if there != back else None)
        return count * LARGE / seconds

    def handling(self, size: int) -> float:
        """How long this end is busy with a message: the mean of sending and receiving one that is there."""
        data, about = self._data[size], layout_of(self._data[size])
        sending, receiving = [], []
        for _ in range(TIMES // 2):
            self.agree(0.0)
            start = perf_counter()
            sent = self._transport.send(self._peer, FIRST_TAG + 3, [data])
            sending.append(perf_counter() - start)
            sleep(0.005)
            start = perf_counter()
            self._transport.post(self._peer, FIRST_TAG + 3, [about]).take()
            receiving.append(perf_counter() - start)
            sent.wait()
        return (min(sending) + min(receiving)) / 2


def examine_links(
    transport: Transport, device: torch.device, window: float, say: Callable[[str], None]
) -> tuple[list[LinkReport], list[Handling]]:
    """What this rank finds out about its links, each seen by its first end; all ranks call this together.

    Args:
        transport: this rank's transport.
        device: where messages lie.
        window: the seconds for which a link is kept busy each time.
        say: told what is measured next.
    """
    reports, handlings = list[LinkReport](), list[Handling]()
    transport.connect(channels(transport.ranks))
    for pairs in neighbours(transport.ranks):
        mine = [pair for pair in pairs if transport.rank in pair]
        for source, target in mine:
            say(f"measures the link between ranks {source} and {target}")
            first = transport.rank == source
            ends = Ends(transport, device, target if first else source, first=first)
            report, handling = _examine(ends, source, target, window)
            reports += [report] if first else []
            handlings.append(handling)
        transport.meet(lambda: None)
    return reports, handlings


def _examine(ends: Ends, source: int, target: int, window: float) -> tuple[LinkReport, Handling]:
    tiny, small, large = map(ends.one_way, (TINY, SMALL, LARGE))
    count = max(2, min(LONGEST, int(window / large)))
    ways = {"there": (True, False), "back": (False, True), "both": (True, True)}
    rates = {
        way: max(ends.stream(count, there=there, back=back) for _ in range(STREAMS))
        for way, (there, back) in ways.items()
    }
    latency = max(0.0, small - SMALL / rates["there"])
    link = Link(source, target, latency, rates["there"], rates["both"])
    handling = Handling(ends.handling(SMALL), ends.handling(LARGE))
    return LinkReport(link, tiny, rates["back"]), handling


def per_message(handlings: Iterator[Handling]) -> tuple[float, float]:
    """Return how long a rank is busy with a message of any size, and with each byte of it."""
    several = list(handlings)
    if not several:
        return 0.0, 0.0
    small = median(one.small for one in several)
    large = median(one.large for one in several)
    copying = max(0.0, (large - small) / (LARGE - SMALL))
    return max(0.0, small - SMALL * copying), copying
