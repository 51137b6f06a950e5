"""A transport that hands everything on to another one: what to build a transport upon that adds something."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.transport.base import Channel, Ticket, Transport
from penstock.values import TensorSpec


class Relay(Transport):
    """Does nothing of its own.

    Args:
        inner: what it hands on to.
    """

    def __init__(self, inner: Transport) -> None:
        self.rank = inner.rank
        self.ranks = inner.ranks
        self.separate = inner.separate
        self.activity = inner.activity
        self.watch = inner.watch
        self.inner = inner

    def open(self, channels: Iterable[Channel]) -> None:
        """Prepare channels."""
        self.inner.open(channels)

    def post_send(self, channel: Channel, tensors: Sequence[Tensor]) -> Ticket:
        """Start to send."""
        return self.inner.post_send(channel, tensors)

    def post_receive(
        self, channel: Channel, specs: Sequence[TensorSpec], device: torch.device
    ) -> Ticket:
        """Start to receive."""
        return self.inner.post_receive(channel, specs, device)

    def agree(self, value: Any) -> Ticket:
        """Exchange JSON data."""
        return self.inner.agree(value)

    def sum(self, values: Tensor) -> Ticket:
        """Add over all ranks."""
        return self.inner.sum(values)

    def gather(self, values: Tensor) -> Ticket:
        """Collect from all ranks."""
        return self.inner.gather(values)

    def broadcast(self, tensor: Tensor, source: int) -> Ticket:
        """Give every rank the tensor of one."""
        return self.inner.broadcast(tensor, source)

    def finish(self) -> None:
        """Wait for sends."""
        self.inner.finish()

    def cut(self) -> None:
        """Break all connections."""
        self.inner.cut()

    def close(self) -> None:
        """Give back what the transport holds."""
        self.inner.close()
