"""Count what travels: messages and bytes by channel, control operations, and what is under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from penstock.pipeline import Pipeline
from penstock.transport import Channel, Relay, Ticket, Transport
from penstock.values import TensorSpec


@dataclass
class Traffic:
    """What one rank has sent, or what it has received.

    Attributes:
        messages: the messages by channel; empty ones do not travel, and do not count.
        bytes: the bytes by channel.
        pending: the bytes that are posted but not complete yet.
        most: the most bytes that were pending at any time.
    """

    messages: Counter[Channel] = field(default_factory=Counter)
    bytes: Counter[Channel] = field(default_factory=Counter)
    pending: int = 0
    most: int = 0

    def post(self, channel: Channel, size: int, inner: Ticket) -> Ticket:
        """Count a message of so many bytes, until its ticket is complete."""
        if size:
            self.messages[channel] += 1
            self.bytes[channel] += size
        self.pending += size
        self.most = max(self.most, self.pending)
        return _Counted(inner, self, size)

    def reset(self) -> None:
        """Start counting anew; what is pending stays pending."""
        self.messages.clear()
        self.bytes.clear()
        self.most = self.pending


class _Counted(Ticket):
    """The ticket of a message, whose bytes are pending until it is complete."""

    def __init__(self, inner: Ticket, traffic: Traffic, size: int) -> None:
        self._inner = inner
        self._traffic = traffic
        self._size = size

    def ready(self) -> bool:
        return self._inner.ready()

    def wait(self) -> None:
        self._inner.wait()

    def take(self) -> Any:
        found = self._inner.take()
        self._traffic.pending -= self._size
        self._size = 0
        return found


class CountingTransport(Relay):
    """Counts what goes over another transport.

    Args:
        inner: the other transport.

    Attributes:
        sent: what this rank sent.
        received: what this rank received.
        control: how often each control operation ran.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.sent = Traffic()
        self.received = Traffic()
        self.control: Counter[str] = Counter()

    def reset(self) -> None:
        """Start counting anew, for instance after the first step."""
        self.sent.reset()
        self.received.reset()
        self.control.clear()

    def post_send(self, channel: Channel, tensors: Sequence[Tensor]) -> Ticket:
        """Send, and count."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return self.sent.post(channel, size, super().post_send(channel, tensors))

    def post_receive(
        self, channel: Channel, specs: Sequence[TensorSpec], device: torch.device
    ) -> Ticket:
        """Receive, and count."""
        size = sum(prod(spec.shape) * spec.torch_dtype.itemsize for spec in specs)
        return self.received.post(channel, size, super().post_receive(channel, specs, device))

    def agree(self, value: Any) -> Ticket:
        """Agree, and count."""
        self.control["agree"] += 1
        return super().agree(value)

    def gather(self, values: Tensor) -> Ticket:
        """Gather, and count."""
        self.control["gather"] += 1
        return super().gather(values)

    def sum(self, values: Tensor) -> Ticket:
        """Sum, and count."""
        self.control["sum"] += 1
        return super().sum(values)

    def broadcast(self, tensor: Tensor, source: int) -> Ticket:
        """Broadcast, and count."""
        self.control["broadcast"] += 1
        return super().broadcast(tensor, source)


def count_messages(pipe: Pipeline) -> list[CountingTransport]:
    """Count what the ranks of this process exchange from now on.

    Returns:
        A counter for each rank of this process.
    """
    counters: list[CountingTransport] = []

    def wrap(transport: Transport) -> Transport:
        counters.append(CountingTransport(transport))
        return counters[-1]

    pipe.wrap_transports(wrap)
    return counters
