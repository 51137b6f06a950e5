"""The seam between a rank's program and whatever carries its messages.

A transport is one rank's end. It can post a send, post a receive, and run four control operations in
which all ranks take part. What is posted gives a :class:`Ticket`: is it ready, wait for it, take it.
Messages travel on FIFO channels, one for each ordered pair of ranks and kind, so that a gradient never
stands behind an activation.
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
"""The kind of the channels that activations travel on."""
BACKWARD = "B"
"""The kind of the channels that gradients travel on."""
SHARED = "S"
"""The kind of the channels that shares of shared weights' gradients travel on."""
CONTROL = "C"
"""The kind of the channels that control words travel on."""
KINDS = (FORWARD, BACKWARD, SHARED, CONTROL)


class Channel(NamedTuple):
    """An ordered pair of ranks and the kind of message.

    ``F`` are activations, ``B`` gradients, ``S`` weights and what stages that share them tell each other, and
    ``C`` what a transport sends for its control operations.
    """

    source: int
    target: int
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} channel from rank {self.source} to rank {self.target}"


class Ticket(ABC):
    """Something posted that is complete later."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether :meth:`take` would return at once; false where the transport cannot tell."""

    @abstractmethod
    def wait(self) -> None:
        """Block until it is complete.

        Raises:
            MessageError: it can never be complete.
        """

    @abstractmethod
    def take(self) -> Any:
        """Wait, then give what arrived and let go of it: a second call is an error."""


class Transport(ABC):
    """One rank's end of the pipeline's wires.

    Attributes:
        rank: this end's position in the pipeline.
        ranks: how many there are.
        separate: whether each rank is a process of its own.
        activity: what this rank does, for those who watch it.
        watch: over all ranks, where each is a process.
    """

    rank: int
    ranks: int
    activity: Activity
    separate: bool = False
    watch: Watch | None = None

    @abstractmethod
    def open(self, channels: Iterable[Channel]) -> None:
        """Prepare channels before they are used; every rank names the same ones in the same order."""

    @abstractmethod
    def post_send(self, channel: Channel, tensors: Sequence[Tensor]) -> Ticket:
        """Start to send tensors over a channel from this rank.

        Returns:
            A ticket that is complete when the message has left, which a large one may only do once the
            receiver has posted its end. Until then it is kept, also where nobody keeps the ticket, and the
            tensors must not change.
        """

    @abstractmethod
    def post_receive(
        self, channel: Channel, specs: Sequence[TensorSpec], device: torch.device
    ) -> Ticket:
        """Start to receive the next message of a channel to this rank.

        Args:
            channel: which one.
            specs: shapes and types of the message's tensors, as agreed with the sender.
            device: where the tensors shall live.

        Returns:
            A ticket for a list of tensors that need no gradient.
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
        """Give every rank the tensor of rank ``source``; the others pass one of the same spec."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for the sends whose tickets nobody has waited for."""

    def cut(self) -> None:  # noqa: B027 - within one process there is nothing to break
        """Break all connections, so that a wait on them ends; safe from another thread."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the transport holds; idempotent."""


# ---- a transport that hands everything on to another one, to build one upon that adds something


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
