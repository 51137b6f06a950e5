"""Count a rank's traffic: messages and bytes by channel, and operations of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from penstock.errors import UsageError
from penstock.pipeline import Pipeline
from penstock.transport import Arrival, Transport
from penstock.values import TensorLayout


class Channel(NamedTuple):
    """An ordered pair of ranks, and a direction: 0 for values, 1 for gradients, 2 for weights."""

    source: int
    target: int
    direction: int


class Traffic:
    """The traffic that one rank has sent or received.

    Attributes:
        messages: the number of messages by channel; empty ones are not sent, and do not count.
        bytes: the number of bytes by channel.
        pending: the bytes of receives that are posted but not taken yet.
        most: the most bytes that were pending at once.
    """

    def __init__(self) -> None:
        self.messages: Counter[Channel] = Counter()
        self.bytes: Counter[Channel] = Counter()
        self.pending = self.most = 0

    def count(self, channel: Channel, size: int) -> None:
        """Count a message of this many bytes."""
        if size:
            self.messages[channel] += 1
            self.bytes[channel] += size

    def reset(self) -> None:
        """Start counting anew; pending bytes stay pending."""
        self.messages.clear()
        self.bytes.clear()
        self.most = self.pending


class CountingTransport:
    """Counts the traffic of a transport, and passes it on.

    Args:
        transport: this rank's transport.

    Attributes:
        sent: the traffic that this rank sent.
        received: the traffic that this rank received.
        control: how often each operation of all ranks ran: ``gather`` (also sums) and ``broadcast``.
        descriptions: how many descriptions of new kinds of messages were sent.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.sent, self.received = Traffic(), Traffic()
        self.control: Counter[str] = Counter()
        self.descriptions = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def reset(self) -> None:
        """Start counting anew, for instance after the first step."""
        self.sent.reset()
        self.received.reset()
        self.control.clear()
        self.descriptions = 0

    def send(self, peer: int, tag: int, tensors: Sequence[Tensor], direction: int = 0) -> None:
        """Send, and count."""
        channel = Channel(self._transport.rank, peer, direction)
        self.sent.count(channel, sum(tensor.nbytes for tensor in tensors))
        self._transport.send(peer, tag, tensors, direction)

    def describe(self, peer: int, tag: int, description: Any) -> None:
        """Send a description, and count it."""
        self.descriptions += 1
        self._transport.describe(peer, tag, description)

    def post(
        self, peer: int, tag: int, layouts: Sequence[TensorLayout], direction: int = 0
    ) -> Arrival:
        """Receive, and count."""
        size = sum(layout.nbytes for layout in layouts)
        self.received.count(Channel(peer, self._transport.rank, direction), size)
        self.received.pending += size
        self.received.most = max(self.received.most, self.received.pending)
        return _CountedArrival(self._transport.post(peer, tag, layouts, direction), self, size)

    def gather(self, values: Tensor) -> list[Tensor]:
        """Gather, and count."""
        self.control["gather"] += 1
        return self._transport.gather(values)

    def sum(self, values: Tensor) -> Tensor:
        """Sum, and count."""
        self.control["gather"] += 1
        return self._transport.sum(values)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Broadcast, and count."""
        self.control["broadcast"] += 1
        return self._transport.broadcast(tensor, source)


class _CountedArrival(Arrival):
    """A message whose bytes are pending until it is taken."""

    __slots__ = ("_arrival", "_counter", "_size")

    def __init__(self, arrival: Arrival, counter: CountingTransport, size: int) -> None:
        self._arrival, self._counter, self._size = arrival, counter, size

    def take(self) -> list[Tensor]:
        tensors = self._arrival.take()
        self._counter.received.pending -= self._size
        return tensors


def count_messages(pipe: Pipeline) -> CountingTransport:
    """Count the traffic of this process's rank from now on.

    Raises:
        UsageError: all ranks share this process, so nothing is sent.
    """
    counters: list[CountingTransport] = []

    def wrap(transport: Transport) -> Any:
        counters.append(CountingTransport(transport))
        return counters[-1]

    pipe.wrap_transport(wrap)
    if not counters:
        raise UsageError(
            "all ranks share this process, so no messages travel; start it by torchrun"
        )
    return counters[0]
