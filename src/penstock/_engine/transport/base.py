"""What a transport is: six methods, and what all transports build on them.

A transport is one rank's end of the pipeline's connections: a group of its ranks, which gathers and adds up
small tensors of all of them, that can also connect channels, send, post a receive, and abort. Nothing outside
this package asks which one it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from penstock._engine.faults import Activity, Watch
from penstock._engine.transport.group import Group, as_text, value_of
from penstock._engine.values import TensorLayout, layout_of
from penstock.errors import MessageError

VALUES = 0
"""The direction of a channel whose messages carry values."""
GRADIENTS = 1
"""The direction of a channel whose messages carry gradients."""
WEIGHTS = 2
"""The direction of a channel whose messages carry weights."""
WORDS = 3
"""The direction of a channel whose messages carry descriptions, and copies of one rank's value."""
FIRST_TAG = 16
"""Tags of messages begin here."""
PACKED = 256 * 1024
"""The most bytes of several tensors in one message, which takes their memory again while it waits."""
_DESCRIPTIONS = 1 << 29
"""Added to a message's tag to make that of its description."""
_COPIES = 4
"""The tag of :meth:`Transport.broadcast`."""


class Channel(NamedTuple):
    """An ordered pair of ranks, and what travels: values, gradients, weights or digests."""

    source: int
    target: int
    direction: int


class Sending:
    """A message that is being sent; its tensors must not change until it has left.

    Args:
        works: the operations of a process group that send it; none if it has left.
        parcels: the buffers that they read.
    """

    __slots__ = ("_parcels", "_works")

    def __init__(self, works: Sequence[Any] = (), parcels: Sequence[Tensor] = ()) -> None:
        self._works = works
        self._parcels = parcels

    def wait(self) -> None:
        """Wait until the message has left. With NCCL the device's stream waits, and the caller goes on.

        Raises:
            MessageError: the connection is broken.
        """
        wait_for(self._works)
        self._works = self._parcels = ()

    def used(self) -> None:
        """Note that the peer is known to have used the message."""
        # Gloo reports that a message has left only to a wait, which then returns at once.
        self.wait()


LEFT = Sending()
"""A message that has left."""


class Arrival(ABC):
    """A message that is being received."""

    __slots__ = ()

    @abstractmethod
    def take(self) -> list[Tensor]:
        """Wait for the message, and return its tensors. With NCCL the device's stream waits.

        Raises:
            MessageError: the connection is broken.
        """


class GroupArrival(Arrival):
    """A message that arrives over a process group.

    Args:
        works: the operations that receive it.
        tensors: the tensors that it fills.
        parcels: the buffers in which several of the tensors arrive together; none if each fills its own.
        device: where the tensors are wanted.
    """

    __slots__ = ("_device", "_parcels", "_tensors", "_works")

    def __init__(
        self,
        works: Sequence[Any],
        tensors: list[Tensor],
        parcels: Sequence[Tensor],
        device: torch.device,
    ) -> None:
        self._works, self._tensors, self._parcels = works, tensors, parcels
        self._device = device

    def take(self) -> list[Tensor]:
        """Wait for the message, and return its tensors."""
        wait_for(self._works)
        for parcel in self._parcels:
            unpack(parcel, self._tensors)
        return moved(self._tensors, self._device)


class Transport(Group, ABC):
    """One rank's end of the connections. All ranks make theirs together.

    Args:
        group: the process group of the pipeline's ranks.
        global_ranks: the ranks of all positions among all processes.
        watch: the watch over all ranks.
        activity: where this rank notes what it is doing, for the watch.

    Attributes:
        wide: all processes of the job, if these are more than the ranks of the pipeline.
    """

    wide: Group | None = None

    def __init__(
        self, group: Any, global_ranks: Sequence[int], watch: Watch, activity: Activity
    ) -> None:
        super().__init__(group, watch, global_ranks)
        self.ranks = self.size
        self.global_ranks = global_ranks
        self.watch = watch
        self.activity = activity

    @abstractmethod
    def connect(self, channels: Iterable[tuple[int, int, int]]) -> None:
        """Connect channels; all ranks call this with the same ones. What a channel lacks is slower."""

    @abstractmethod
    def send(
        self, peer: int, tag: int, tensors: Sequence[Tensor], direction: int = VALUES
    ) -> Sending:
        """Start to send tensors, which must not change until the message has left.

        A send never waits for its receiver. Messages of one tag arrive in order.
        """

    @abstractmethod
    def post(
        self, peer: int, tag: int, layouts: Sequence[TensorLayout], direction: int = VALUES
    ) -> Arrival:
        """Start to receive tensors of known layouts."""

    @abstractmethod
    def close(self) -> None:
        """End the connections, and the process group if this pipeline started it."""

    # ---- what follows from these, for all transports

    def settle(self) -> None:
        """At the end of a step, wait for what holds only the device: here nothing does."""
        self.activity.go_on()

    def describe(self, peer: int, tag: int, description: Any) -> Sequence[Sending]:
        """Send the description of a kind's first message, as JSON."""
        text = as_text(description)
        parts = torch.tensor([text.numel()], device="cpu"), text
        return [self.send(peer, _DESCRIPTIONS + tag, [part], WORDS) for part in parts]

    def described(self, peer: int, tag: int) -> Any:
        """Wait for what :meth:`describe` sent, and return it."""
        tag += _DESCRIPTIONS
        (length,) = self.post(peer, tag, [layout_of(torch.tensor([0], device="cpu"))], WORDS).take()
        layout = layout_of(torch.empty(int(length), dtype=torch.uint8, device="meta"))
        (text,) = self.post(peer, tag, [layout], WORDS).take()
        return value_of(text.cpu())

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The tensor of rank ``source``; the others pass one of the same shape, type and device."""
        place = (self.rank - source) % self.ranks
        # Whoever has it passes it on: in each round the number of those that have it doubles.
        reach, sendings = 1, list[Sending]()
        while reach < self.ranks:
            if place < reach and place + reach < self.ranks:
                peer = (self.rank + reach) % self.ranks
                sendings.append(self.send(peer, _COPIES, [tensor], WORDS))
            elif reach <= place < 2 * reach:
                peer = (self.rank - reach) % self.ranks
                self.activity.wait("a copy of a value", peer)
                (tensor,) = self.post(peer, _COPIES, [layout_of(tensor)], WORDS).take()
            reach *= 2
        for sending in sendings:
            self.activity.wait("a copy of a value to leave", None)
            sending.wait()
        self.activity.go_on()
        return tensor


# ---- messages in bytes


def wait_for(works: Iterable[Any]) -> None:
    """Wait for operations of a process group.

    Raises:
        MessageError: the connection is broken.
    """
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        # A process group raises this for a peer that has gone.
        raise MessageError(f"a connection is closed: {error}") from error


Parcel: TypeAlias = Callable[[int], Tensor]
"""Makes a row of so many bytes."""


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's data as bytes in one row."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def moved(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors on a device."""
    return tensors if device.type == "cpu" else [tensor.to(device) for tensor in tensors]


def packed(buffers: list[Tensor], parcel: Parcel) -> list[Tensor]:
    """Pack several small tensors into one parcel; large ones travel one by one."""
    full = [buffer for buffer in buffers if buffer.numel()]
    if not _is_one_parcel(full):
        return full
    return [torch.cat(full, out=parcel(sum([buffer.numel() for buffer in full])))]


def parcels_for(tensors: list[Tensor], parcel: Parcel) -> tuple[list[Tensor], bool]:
    """The buffers that a message of tensors arrives in, and whether it must be unpacked from them."""
    full = [t.reshape(-1).view(torch.uint8) for t in tensors if t.numel()]
    if not _is_one_parcel(full):
        return full, False
    return [parcel(sum([buffer.numel() for buffer in full]))], True


def _is_one_parcel(buffers: list[Tensor]) -> bool:
    """Tell whether buffers travel together: both ends must answer alike."""
    return len(buffers) > 1 and sum([buffer.numel() for buffer in buffers]) <= PACKED


def unpack(data: Tensor, tensors: list[Tensor]) -> None:
    """Fill tensors from a parcel."""
    start = 0
    for tensor in tensors:
        size = tensor.nbytes
        tensor.reshape(-1).view(torch.uint8).copy_(data[start : start + size])
        start += size
