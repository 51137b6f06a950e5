"""The interface between a rank's program and whatever carries its messages.

A transport is one rank's end. It can post a send, post a receive, and run four control operations in which
all ranks take part. Each of these returns a :class:`Ticket`, to ask whether it is ready, to wait for it, or
to take what it brings. Messages travel on FIFO channels, one for each ordered pair of ranks and kind of
message, so that a gradient never waits behind an activation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.faults import Activity, Watch
from penstock.values import TensorSpec

FORWARD = "F"
"""The kind of channel that activations travel on."""
BACKWARD = "B"
"""The kind of channel that gradients travel on."""
SHARED = "S"
"""The kind of channel for weights, and for the gradients of weights that stages share."""
CONTROL = "C"
"""The kind of channel for a transport's own control operations."""
KINDS = (FORWARD, BACKWARD, SHARED, CONTROL)


class Channel(NamedTuple):
    """An ordered pair of ranks and the kind of message: ``F``, ``B``, ``S`` or ``C``."""

    source: int
    target: int
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} channel from rank {self.source} to rank {self.target}"


class Ticket(ABC):
    """Something that was posted and will be complete later."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether :meth:`take` would return at once; False if the transport cannot tell."""

    @abstractmethod
    def wait(self) -> None:
        """Block until it is complete.

        Raises:
            MessageError: it can never be complete.
        """

    @abstractmethod
    def take(self) -> Any:
        """Wait, then return what arrived and drop it: a second call is an error."""


class Transport(ABC):
    """One rank's end of the pipeline's wires.

    Attributes:
        rank: this end's position in the pipeline.
        ranks: the number of ranks.
        separate: whether each rank is a process of its own.
        activity: what this rank is doing, for the watch.
        watch: the watch over all ranks, if each is a process.
    """

    rank: int
    ranks: int
    activity: Activity
    separate: bool = False
    watch: Watch | None = None

    @abstractmethod
    def open(self, channels: Iterable[Channel]) -> None:
        """Prepare channels before they are used; every rank passes the same ones in the same order."""

    @abstractmethod
    def post_send(self, channel: Channel, tensors: Sequence[Tensor]) -> Ticket:
        """Start to send tensors over a channel from this rank.

        Returns:
            A ticket that is complete when the message has left. A large message may only leave once the
                receiver has posted its end. Until then the transport keeps the tensors, even if nobody
                keeps the ticket, and they must not change.
        """

    @abstractmethod
    def post_receive(
        self, channel: Channel, specs: Sequence[TensorSpec], device: torch.device
    ) -> Ticket:
        """Start to receive the next message of a channel to this rank.

        Args:
            channel: which one.
            specs: shapes and types of the message's tensors, as agreed with the sender.
            device: where to put the tensors.

        Returns:
            A ticket for the list of tensors, which require no grad.
        """

    @abstractmethod
    def agree(self, value: Any) -> Ticket:
        """Exchange JSON data; a ticket for the list of all ranks' values, in rank order."""

    @abstractmethod
    def sum(self, values: Tensor) -> Ticket:
        """Add a CPU tensor of numbers over all ranks, in rank order; a ticket for the sum."""

    @abstractmethod
    def gather(self, values: Tensor) -> Ticket:
        """Exchange CPU tensors of one spec; a ticket for the list of all ranks' tensors, in rank order."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> Ticket:
        """Give every rank the tensor of rank ``source``; the others pass a tensor of the same spec."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for all sends that nobody has waited for."""

    def cut(self) -> None:  # noqa: B027 - in one process there are no connections
        """Break all connections, so that any wait on them ends; may be called from another thread."""

    @abstractmethod
    def close(self) -> None:
        """Release what the transport holds; a second call does nothing."""


# ---- the base of transports that add something to another one


class Relay(Transport):
    """Passes everything on to another transport; a subclass adds something.

    Args:
        inner: the other transport.
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
