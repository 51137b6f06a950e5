"""A GPU that a CPU plays, to find races between streams: one for computing, and one for each NCCL channel.

The real :class:`NcclTransport` runs over communicators that are played here. Every operation is reported as a
kernel of the computing stream, every message as one of its channel's stream, with the events by which NCCL
orders them. torch's own detector (private, ``torch.cuda._sanitizer`` of torch 2.13) keeps the clocks and says
which accesses are unordered. Memory is used again as soon as its tensor is freed, as by a caching allocator.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from traceback import StackSummary
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.cuda._sanitizer import EventHandler
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from penstock import Pipeline
from penstock._engine.transport import VALUES, WORDS, Arrival, Channel, Sending, Transport
from penstock._engine.transport.nccl import NcclTransport
from penstock._engine.values import TensorLayout, layout_of

COMPUTING = 0
LOOKS = 3
"""How often a caller looks at a message until it is complete: a device is slow."""


class PlayedDevice(TorchDispatchMode):
    """Reports what runs within it as kernels of the computing stream.

    Attributes:
        races: each race, in words.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.races: list[str] = []
        self._detector: Any = EventHandler()
        self._events, self._streams = itertools.count(1), itertools.count(1)
        self._addresses: dict[int, int] = {}
        self._free: list[int] = []
        self._fresh = itertools.count(4096)
        self._detector._handle_stream_creation(COMPUTING)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and report what it reads and writes; a view does neither."""
        kwargs = kwargs or {}
        results = function(*args, **kwargs)
        inputs = _tensors((args, kwargs))
        arguments = zip(function._schema.arguments, args, strict=False)
        changed = [value for one, value in arguments if one.alias_info and one.alias_info.is_write]
        shared = {tensor.untyped_storage()._cdata for tensor in inputs}
        new = [t for t in _tensors(results) if t.untyped_storage()._cdata not in shared]
        if new or changed:
            self.launch(COMPUTING, str(function), inputs, new + _tensors(changed))
        return results

    def new_stream(self) -> int:
        """A stream for a channel."""
        stream = next(self._streams)
        self._detector._handle_stream_creation(stream)
        return stream

    def launch(
        self, stream: int, name: str, reads: Iterable[Tensor], writes: Iterable[Tensor]
    ) -> None:
        """A kernel on a stream."""
        written = {self._address(tensor) for tensor in writes}
        read = {self._address(tensor) for tensor in reads} - written
        names = {address: [name] for address in read | written}
        with patch.object(
            StackSummary, "extract", lambda *_, **__: []
        ):  # slow, and nobody reads it
            races = self._detector._handle_kernel_launch(
                stream, read, written, written, name, names
            )
        for race in races:
            now, before = race.current_access, race.previous_access
            self.races.append(
                f"{now.operator} on {now.stream} after {before.operator} on {before.stream}"
            )

    def record(self, stream: int) -> int:
        """An event: what a stream has been given so far."""
        event = next(self._events)
        self._detector._handle_event_creation(event)
        self._detector._handle_event_record(event, stream)
        return event

    def hold(self, stream: int, event: int) -> None:
        """Let a stream wait for an event."""
        self._detector._handle_event_wait(event, stream)

    def wait(self, event: int) -> None:
        """Let the host wait for an event."""
        self._detector._handle_event_synchronization(event)

    def _address(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._addresses:
            address = self._addresses[key] = self._free.pop() if self._free else next(self._fresh)
            if address not in self._detector.tensors_accessed.accesses:
                self._detector._handle_memory_allocation(address)
            weakref.finalize(storage, self._release, key).atexit = False
        return self._addresses[key]

    def _release(self, key: int) -> None:
        self._free.append(self._addresses.pop(key))


def _tensors(values: Any) -> list[Tensor]:
    """The tensors that are really there."""
    return [
        t
        for t in tree_leaves(values)
        if isinstance(t, Tensor)
        and not isinstance(t, FakeTensor)
        and t.device.type == "cpu"
        and not t.is_sparse
    ]


class PlayedWork:
    """A message on a channel's stream."""

    def __init__(self, device: PlayedDevice, stream: int, arrive: Callable[[], Any]) -> None:
        self.device, self.event = device, device.record(stream)
        self._carry_out: Callable[[], Any] | None = arrive
        self._looks = 0

    def wait(self) -> None:
        """The computing stream waits; the host goes on."""
        self.device.hold(COMPUTING, self.event)
        self.arrive()

    def is_completed(self) -> bool:
        """Whether the host sees that it is done."""
        self._looks += 1
        if self._looks < LOOKS:
            return False
        self.device.wait(self.event)
        self.arrive()
        return True

    def arrive(self) -> None:
        """Carry the message out, if that is not done yet; nobody waits for it."""
        if self._carry_out is not None:
            with _disable_current_modes():
                self._carry_out()
        self._carry_out = None


class PlayedGroup:
    """The communicator of a channel. Messages really travel over gloo."""

    def __init__(self, device: PlayedDevice, channel: Channel, gloo: Transport) -> None:
        self.device, self.stream = device, device.new_stream()
        self._gloo, self.channel = gloo, channel

    def send(self, parcels: Sequence[Tensor], place: int, tag: int) -> PlayedWork:
        """Send a tensor, behind what has been computed so far."""
        (parcel,) = parcels
        self.device.hold(self.stream, self.device.record(COMPUTING))
        self.device.launch(self.stream, "send", [parcel], [])
        with _disable_current_modes():
            copy = parcel.clone()
            sending = self._gloo.send(self.channel.target, tag, [copy], self.channel.direction)
        return PlayedWork(self.device, self.stream, sending.wait)

    def recv(self, parcels: Sequence[Tensor], place: int, tag: int) -> PlayedWork:
        """Receive into a tensor."""
        (parcel,) = parcels
        self.device.hold(self.stream, self.device.record(COMPUTING))
        self.device.launch(self.stream, "receive", [], [parcel])
        with _disable_current_modes():
            source, direction = self.channel.source, self.channel.direction
            arrival = self._gloo.post(source, tag, [layout_of(parcel)], direction)
        return PlayedWork(self.device, self.stream, lambda: parcel.copy_(arrival.take()[0]))

    def abort(self) -> None:
        """Nothing to break: gloo is broken too."""

    shutdown = abort


class PlayedTransport(NcclTransport):
    """The transport over NCCL, with communicators that are played."""

    def __init__(self, gloo: Any, device: PlayedDevice) -> None:
        super().__init__(gloo, SimpleNamespace(store=None), torch.device("cpu"))  # type: ignore[arg-type]
        self._played = device

    def _joined(self, channel: Channel) -> Any:
        return PlayedGroup(self._played, channel, self._gloo)

    def send(
        self, peer: int, tag: int, tensors: Sequence[Tensor], direction: int = VALUES
    ) -> Sending:
        """Start to send; every channel is connected, but for words."""
        if direction != WORDS:
            self.connect([(self.rank, peer, direction)])
        return super().send(peer, tag, tensors, direction)

    def post(
        self, peer: int, tag: int, layouts: Sequence[TensorLayout], direction: int = VALUES
    ) -> Arrival:
        """Start to receive."""
        if direction != WORDS:
            self.connect([(peer, self.rank, direction)])
        return super().post(peer, tag, layouts, direction)


@contextmanager
def played(pipe: Pipeline) -> Iterator[PlayedDevice]:
    """A context in which a pipeline's rank runs on a played device."""
    device = PlayedDevice()
    pipe.job.wrap_transport(lambda gloo: PlayedTransport(gloo, device))
    with device:
        yield device
