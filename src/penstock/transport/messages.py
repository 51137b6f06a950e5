"""A pipeline's connections, and messages over them: a few tensors of known shapes, the small ones as one.

A receive's buffers and a send's tensors are used on the stream that is current at the post, and the waits
are on that stream too: on GPUs a wait holds up that stream, not the host, and memory that is given back after
it is safe to use again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import MessageError
from penstock.transport.base import Ticket
from penstock.transport.sockets import EAGER, Line
from penstock.values import TensorSpec, settled

NOBODY = 0x4F
"""The tag of a message that nobody sends, see :func:`break_off`."""
SMALL = 32 * 1024
"""Bytes up to which copying a tensor costs less than sending it by itself."""


def connect_all(store: Any, rank: int, ranks: int, wait: float, timeout: float) -> Any:
    """Connect the ranks of a pipeline with each other over gloo; all of them call this together.

    Not by ``new_group``, which gives a part of the world the name of its last group again when that was
    ended: its members then find the addresses of that one.

    Args:
        store: one that only this meeting of theirs has.
        rank: this process's.
        ranks: how many there are.
        wait: seconds that they may take.
        timeout: seconds for each operation on what is made.

    Returns:
        A ``ProcessGroupGloo``; the stubs of torch do not tell its methods.

    Raises:
        MessageError: a rank ended, or did not come in time.
    """
    try:
        made = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=wait))
    except RuntimeError as error:
        raise MessageError(
            f"rank {rank} waits for all {ranks} ranks to make their pipeline: {error}\n"
            "another rank may say why it stopped"
        ) from error
    made.set_timeout(timedelta(seconds=timeout))
    return made


def break_off(group: Any) -> None:
    """Close the connections of a gloo group: a receive that is not served in time does that to all.

    From whom does not matter, unless that one is gone: then the receive is refused, and closes nothing.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([torch.zeros(1)], peer, NOBODY).wait(timedelta(milliseconds=1))


class Wire(NamedTuple):
    """How to reach the other end of a channel; small messages go over the line, where there is one."""

    # A ProcessGroup, or a ProcessGroupGloo, whose methods torch's stubs do not tell.
    group: Any
    peer: int
    tag: int
    line: Line | None = None

    def send(self, tensors: Sequence[Tensor], keep: set[Any]) -> Ticket:
        """Start to send; the ticket is kept among others until it is complete."""
        plain = [settled(tensor) for tensor in tensors]
        if self.line is not None and 0 < (size := _size(plain)) <= EAGER:
            return self.line.send(plain, size, keep)
        parcels = _pack(plain)
        works = [self.group.send([parcel], self.peer, self.tag) for parcel in parcels]
        return Departure(works, parcels, keep)

    def receive(self, specs: Sequence[TensorSpec], device: torch.device) -> Ticket:
        """Start to receive into new buffers."""
        tensors = [spec.empty(device) for spec in specs]
        if self.line is not None and 0 < _size(tensors) <= EAGER:
            return self.line.receive(tensors)
        small, large = _split(tensors)
        parcels = [_parcel_for(small), *large] if small else large
        works = [self.group.recv([parcel], self.peer, self.tag) for parcel in parcels]
        return Arrival(works, tensors, (parcels[0], small) if small else None)


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


class Departure(Ticket):
    """Sends under way, with what they send. Gloo tells only by a wait whether they are complete."""

    def __init__(self, works: list[dist.Work], parcels: list[Tensor], keep: set[Any]) -> None:
        self._works = works
        self._parcels = parcels
        self._keep = keep
        keep.add(self)

    def ready(self) -> bool:
        """Whether it was waited for."""
        return not self._works

    def wait(self) -> None:
        """Wait, and let go of the tensors."""
        for work in self._works:
            work.wait()
        self._works, self._parcels = [], []
        self._keep.discard(self)

    def take(self) -> None:
        """Wait; nothing arrives here."""
        self.wait()


Packed = tuple[Tensor, list[Tensor]]
"""A parcel, and the tensors it is for."""


class Arrival(Ticket):
    """Receives under way. Gloo tells only by a wait whether they are complete."""

    def __init__(
        self, works: list[dist.Work], tensors: list[Tensor], packed: Packed | None
    ) -> None:
        self._works = works
        self._tensors = tensors
        self._packed = packed

    def ready(self) -> bool:
        """Whether it was waited for."""
        return not self._works

    def wait(self) -> None:
        """Wait, and take parcels apart."""
        for work in self._works:
            work.wait()
        self._works = []
        if self._packed is not None:
            _unpack(*self._packed)
            self._packed = None

    def take(self) -> list[Tensor]:
        """The tensors, once."""
        self.wait()
        tensors, self._tensors = self._tensors, []
        return tensors


def _split(tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that travel together, and those that travel alone; what is empty does not travel."""
    there = [tensor for tensor in tensors if tensor.numel()]
    small = [t for t in there if t.nbytes <= SMALL] if len(there) > 1 else []
    if len(small) < 2:
        return [], there
    return small, [tensor for tensor in there if tensor.nbytes > SMALL]


def _pack(tensors: list[Tensor]) -> list[Tensor]:
    small, large = _split(tensors)
    return [torch.cat([_bytes_of(tensor) for tensor in small]), *large] if small else large


def _parcel_for(tensors: list[Tensor]) -> Tensor:
    size = sum(tensor.nbytes for tensor in tensors)
    return torch.empty(size, dtype=torch.uint8, device=tensors[0].device)


def _unpack(parcel: Tensor, tensors: list[Tensor]) -> None:
    """Copy, so that the tensors share no memory, and with it no count of changes in place."""
    parts: Any = parcel.split([tensor.nbytes for tensor in tensors])
    for part, tensor in zip(parts, tensors, strict=True):
        _bytes_of(tensor).copy_(part)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
