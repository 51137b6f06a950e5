"""One rank's end of the pipeline's connections: messages between two ranks, and collectives.

The connections are the pipeline's own, so that a failure breaks neither the user's connections nor those of
another pipeline. On CPUs messages go over one gloo group, each kind of message under its own tag, so that no
receive blocks another; if all ranks share a machine, small messages go over sockets. On GPUs each ordered
pair of ranks and direction has its own NCCL communicator and stream. Where the ranks' process group has no
NCCL, as for two processes on one GPU, messages are copied to the CPU and travel from there.
"""

from __future__ import annotations

import json
import os
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from penstock.errors import AgreementError, MessageError
from penstock.faults import Activity, Meeting, Watch, end_waits
from penstock.transport.sockets import SMALL, Line, connect_lines
from penstock.values import TensorLayout

DAY = 24 * 3600.0
"""Seconds that a wait on a peer may take; the watch notices a silent peer much earlier."""
PACKED = 4 * SMALL
"""The most bytes of several tensors in one message, which takes their memory again while it waits."""
_CONTROL = 1
"""The tag of collectives."""
_DESCRIPTIONS = 1 << 29
"""Added to a message's tag to make that of its description."""
FIRST_TAG = 16
"""Tags of messages begin here."""


def launched() -> bool:
    """Whether several processes were launched, by their process group or the variables of ``torchrun``."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    # RANK without WORLD_SIZE is the launcher's mistake, which is reported when the ranks meet.
    return os.environ.get("WORLD_SIZE", "2" if "RANK" in os.environ else "1") != "1"


class Circle:
    """Processes that exchange values outside of a pipeline, such as its replicas.

    Args:
        group: their process group; None for all processes.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        alone = group is None and not (dist.is_available() and dist.is_initialized())
        members: Any = None if alone else group or dist.group.WORLD
        self._group = members
        self.rank = 0 if alone else members.rank()
        self.size = 1 if alone else members.size()
        backend = dist.get_backend(self._group) if dist.is_initialized() else "gloo"
        self._device = None
        if backend == "nccl":
            bound = members.bound_device_id
            self._device = bound or torch.accelerator.current_accelerator()

    def exchange(self, value: Any) -> list[Any]:
        """The JSON values of all processes, in rank order; all of them call this."""
        return [value] if self._group is None else exchange_json(value, self._gather)

    def sum(self, values: Tensor) -> Tensor:
        """The sum of all processes' CPU tensors, the same bits on each; all of them call this."""
        rows = [values] if self._group is None else self._gather(values)
        return torch.stack(rows).sum(0)

    def _gather(self, values: Tensor) -> list[Tensor]:
        mine = values.to(self._device) if self._device else values
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        self._group.allgather([rows], [mine]).wait()
        return [row.cpu() for row in rows]


_DIFFER = (
    "the ranks call different things: one exchanges values, and another waits for something else; "
    "call the same methods of the pipeline in the same order on every rank"
)
_JSON = 0x4A534F4E
"""Marks the length of JSON bytes, to tell it from another collective's data."""


def exchange_json(value: Any, gather: Callable[[Tensor], list[Tensor]]) -> list[Any]:
    """Exchange JSON values by a function that gathers tensors: first lengths, then bytes."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    words = [row.tolist() for row in gather(torch.tensor([_JSON, text.numel()]))]
    if any(mark != _JSON for mark, _ in words):
        raise AgreementError(_DIFFER)
    lengths = [length for _, length in words]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: text.numel()] = text
    rows = zip(gather(padded), lengths, strict=True)
    return [json.loads(row[:length].numpy().tobytes()) for row, length in rows]


class Transport:
    """One rank's end of the connections. All ranks make theirs together.

    Args:
        meeting: where the ranks have met.
        watch: the watch over all ranks.
        activity: where this rank notes what it is doing, for the watch.
        device: where this rank's stages live.
        wait: seconds to wait for all ranks to connect.

    Attributes:
        rank: this rank's position in the pipeline.
        ranks: the number of ranks.
        global_ranks: their ranks among all processes.
    """

    def __init__(
        self, meeting: Meeting, watch: Watch, activity: Activity, device: torch.device, wait: float
    ) -> None:
        self.rank = meeting.rank
        self.ranks = meeting.ranks
        self.global_ranks = meeting.global_ranks
        self.watch = watch
        self.activity = activity
        self._meeting = meeting
        self._device = device
        # The device to send from. NCCL orders its work on streams; sockets and gloo read memory.
        nccl = f"{device.type}:nccl" in dist.get_backend_config(meeting.group).split(",")
        self._carrier = device if nccl else torch.device("cpu")
        self._small = -1 if nccl else SMALL
        self._sent: defaultdict[tuple[int, int], deque[tuple[Sequence[Any], Any]]]
        self._sent = defaultdict(deque)
        self._channels: dict[tuple[int, int, int], Any] = {}
        self._lines: dict[int, Line] = {}
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._closed = False
        # Not new_group: for a part of the world it reuses the name of an earlier, ended group, and its
        # members then find that group's addresses.
        store = PrefixStore("gloo", meeting.store)
        activity.wait("all ranks to connect", None)
        try:
            self._gloo: Any = dist.ProcessGroupGloo(
                store, self.rank, self.ranks, timedelta(seconds=wait)
            )
        except RuntimeError as error:
            raise MessageError(
                f"rank {self.rank} waits for all {self.ranks} ranks to make their pipeline: {error}"
            ) from error
        self._gloo.set_timeout(timedelta(seconds=DAY))
        watch.protect(self.abort)
        # Not at exit, when the watch itself reports whether an error was the reason.
        weakref.finalize(self, watch.close).atexit = False
        self._lines = connect_lines(self.rank, self.ranks, self.exchange)

    # ---- messages between two ranks

    def open(self, channels: Iterable[tuple[int, int, int]]) -> None:
        """Connect new channels (source, target, direction); all ranks call this in one order."""
        if self._carrier.type == "cpu":
            return
        for channel in channels:
            source, target, direction = channel
            if channel in self._channels or self.rank not in (source, target):
                continue
            peer = target if source == self.rank else source
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=DAY)
            store = PrefixStore(f"nccl/{source}/{target}/{direction}", self._meeting.store)
            # As for gloo: groups of new_group would share names with groups of replicas.
            group: Any = dist.ProcessGroupNCCL(store, int(self.rank > peer), 2, options)
            self._channels[channel] = group
            # The first message connects, and waits for the other end. In a step two ranks might wait for each
            # other on different channels; here all ranks go through the channels in one order.
            self.activity.wait("a channel to connect", peer)
            byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
            move = group.send if source == self.rank else group.recv
            try:
                move([byte], int(peer > self.rank), 0).wait()
            except RuntimeError as error:
                raise MessageError(
                    f"rank {self.rank} on {self._device} cannot connect to rank {peer} by NCCL: {error}; "
                    "each process needs a GPU of its own, or give the pipeline a gloo group by group="
                ) from error

    def send(self, peer: int, tag: int, tensors: Sequence[Tensor], direction: int = 0) -> None:
        """Start to send tensors, which must not change until :meth:`settle` or :meth:`let_go`."""
        buffers = [_bytes_of(tensor) for tensor in tensors]
        if self._device.type != "cpu":
            # Also to the GPU: a stage on a GPU may send a tensor that is on the CPU.
            buffers = [buffer.to(self._carrier) for buffer in buffers]
        size = sum([buffer.numel() for buffer in buffers])
        if size <= self._small and peer in self._lines:
            self._lines[peer].send(tag, [buffer.numpy() for buffer in buffers], size)
            return
        group, place = self._group(self.rank, peer, direction)
        parcels = _packed(buffers)
        works = [group.send([parcel], place, tag) for parcel in parcels]
        if works:
            sent = self._sent[peer, tag]
            while sent and sent[0][0][-1].is_completed():
                sent.popleft()
            sent.append((works, parcels))

    def let_go(self, peer: int, tag: int) -> None:
        """Release the oldest message with a tag, which the peer is known to have used.

        Gloo reports that a message has left only to a wait. NCCL reports it unasked, and a wait there would
        hold up the device.
        """
        sent = self._sent.get((peer, tag))
        if sent and self._carrier.type == "cpu":
            _wait_for(sent.popleft()[0])

    def post(
        self, peer: int, tag: int, layouts: Sequence[TensorLayout], direction: int = 0
    ) -> Arrival:
        """Start to receive tensors of known layouts."""
        size = sum([layout.nbytes for layout in layouts])
        tensors = [layout.empty(self._carrier) for layout in layouts]
        line = self._lines.get(peer) if size <= self._small else None
        if line is not None:
            lane = self._lanes.get((peer, tag))
            if lane is None:
                lane = self._lanes[peer, tag] = Lane(line, tag, deque())
            arrival = Arrival(self._device, tensors, lane)
            lane.posted.append(arrival)
            return arrival
        buffers = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        group, place = self._group(peer, self.rank, direction)
        parcels = _parcels_for(buffers)
        works = [group.recv([parcel], place, tag) for parcel in parcels]
        packed = parcels if parcels and parcels[0] is not buffers[0] else ()
        return Arrival(self._device, tensors, works=works, parcels=packed)

    def _group(self, source: int, target: int, direction: int) -> tuple[Any, int]:
        peer = target if source == self.rank else source
        if self._carrier.type == "cpu":
            return self._gloo, peer
        return self._channels[source, target, direction], int(peer > self.rank)

    def describe(self, peer: int, tag: int, description: Any) -> None:
        """Send the description of a kind's first message, as JSON."""
        text = torch.frombuffer(bytearray(json.dumps(description).encode()), dtype=torch.uint8)
        if peer in self._lines and text.numel() <= SMALL:
            self._lines[peer].send(_DESCRIPTIONS + tag, [text.numpy()], text.numel())
            return
        length = torch.tensor([text.numel()])
        works = [self._gloo.send([part], peer, _DESCRIPTIONS + tag) for part in (length, text)]
        self._sent[peer, _DESCRIPTIONS + tag].append((works, (length, text)))

    def described(self, peer: int, tag: int) -> Any:
        """Wait for what :meth:`describe` sent, and return it."""
        if peer in self._lines:
            return json.loads(bytes(self._lines[peer].receive(_DESCRIPTIONS + tag)))
        length = torch.zeros(1, dtype=torch.int64)
        _wait_for([self._gloo.recv([length], peer, _DESCRIPTIONS + tag)])
        text = torch.empty(int(length), dtype=torch.uint8)
        _wait_for([self._gloo.recv([text], peer, _DESCRIPTIONS + tag)])
        return json.loads(text.numpy().tobytes())

    def settle(self) -> None:
        """Wait until everything that was sent has left."""
        self.activity.wait("what it sent to leave", None)
        for sent in self._sent.values():
            for works, _ in sent:
                _wait_for(works)
        self._sent.clear()
        self.activity.go_on()

    # ---- collectives

    def gather(self, values: Tensor) -> list[Tensor]:
        """The CPU tensors of all ranks, in rank order; all have one shape and type.

        Raises:
            AgreementError: another rank gathers a tensor of another size.
        """
        rows = [
            torch.empty_like(values, memory_format=torch.contiguous_format)
            for _ in range(self.ranks)
        ]
        self.activity.wait("all ranks", None)
        if not self._lines or values.nbytes > SMALL or not values.numel():
            _wait_for([self._gloo.allgather([rows], [values])])
            self.activity.go_on()
            return rows
        data = _bytes_of(values)
        for line in self._lines.values():
            line.send(_CONTROL, [data.numpy()], data.numel())
        rows[self.rank].copy_(values)
        for peer, line in self._lines.items():
            row = torch.frombuffer(line.receive(_CONTROL), dtype=torch.uint8)
            if row.numel() != data.numel():
                raise AgreementError(_DIFFER)
            _bytes_of(rows[peer]).copy_(row)
        self.activity.go_on()
        return rows

    def sum(self, values: Tensor) -> Tensor:
        """The sum of CPU tensors over all ranks, added in rank order: the same bits on each."""
        return reduce(torch.add, self.gather(values))

    def exchange(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, in rank order."""
        return exchange_json(value, self.gather)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The tensor of rank ``source``; the others pass one of the same shape, type and device."""
        data = _bytes_of(tensor).cpu().clone()
        self.activity.wait("all ranks", None)
        _wait_for([self._gloo.broadcast(data, source)])
        self.activity.go_on()
        return data.view(tensor.dtype).reshape(tensor.shape).to(tensor.device)

    # ---- the end

    def abort(self) -> None:
        """Break all connections, from any thread; waits on them end at once, at both ends."""
        for group in list(self._channels.values()):
            with suppress(Exception):
                group.abort()
        for line in list(self._lines.values()):
            line.abort()
        end_waits(self._gloo)

    def close(self) -> None:
        """End the connections, and the process group if this pipeline started it."""
        # In a forked process, the threads that this would wait for do not run.
        if self._closed or self.watch.is_child():
            return
        self._closed = True
        self.watch.close()
        self._sent.clear()
        for line in self._lines.values():
            line.close()
        for group in self._channels.values():
            # Waits for pending messages, which a peer may still need; after abort() there are none.
            with suppress(Exception):
                group.shutdown()
        self._channels.clear()
        # After an error, operations that still wait would keep the group from ending.
        end_waits(self._gloo)
        del self._gloo
        self._meeting.close()


class Lane(NamedTuple):
    """The messages of one tag from one peer over its line; those posted but not yet read, in order."""

    line: Line
    tag: int
    posted: deque[Arrival]


class Arrival:
    """A message that is being received.

    Args:
        device: where its tensors are wanted.
        tensors: the tensors that it fills.
        lane: its lane if it comes over a socket, or None.
        works: the operations to wait for if it comes over process groups.
        parcels: the buffers in which several of the tensors arrive together.
    """

    __slots__ = ("_device", "_is_here", "_lane", "_parcels", "_tensors", "_works")

    def __init__(
        self,
        device: torch.device,
        tensors: list[Tensor],
        lane: Lane | None = None,
        works: Sequence[Any] = (),
        parcels: Sequence[Tensor] = (),
    ) -> None:
        self._device = device
        self._lane = lane
        self._is_here = False
        self._works = works
        self._tensors = tensors
        self._parcels = parcels

    def take(self) -> list[Tensor]:
        """Wait for the message, and return its tensors.

        With NCCL the device's stream waits, and the caller goes on.

        Raises:
            MessageError: the connection is broken.
        """
        if self._lane is not None:
            # Messages are taken in any order, but arrive in the order in which they were posted.
            while not self._is_here:
                self._lane.posted.popleft()._read(self._lane)
        else:
            _wait_for(self._works)
            for parcel in self._parcels:
                _unpack(parcel, self._tensors)
        if self._device.type == "cpu":
            return self._tensors
        return [tensor.to(self._device) for tensor in self._tensors]

    def _read(self, lane: Lane) -> None:
        data = torch.frombuffer(bytearray(lane.line.receive(lane.tag)), dtype=torch.uint8)
        _unpack(data, self._tensors)
        self._is_here = True


def _wait_for(works: Iterable[Any]) -> None:
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        # A process group raises this for a peer that has gone.
        raise MessageError(f"a connection is closed: {error}") from error


def _bytes_of(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def _packed(buffers: list[Tensor]) -> list[Tensor]:
    """Pack several small tensors into one parcel; large ones travel one by one."""
    full = [buffer for buffer in buffers if buffer.numel()]
    if len(full) > 1 and sum([buffer.numel() for buffer in full]) <= PACKED:
        return [torch.cat(full)]
    return full


def _parcels_for(buffers: list[Tensor]) -> list[Tensor]:
    full = [buffer for buffer in buffers if buffer.numel()]
    size = sum([buffer.numel() for buffer in full])
    if len(full) > 1 and size <= PACKED:
        return [torch.empty(size, dtype=torch.uint8, device=full[0].device)]
    return full


def _unpack(data: Tensor, tensors: list[Tensor]) -> None:
    start = 0
    for tensor in tensors:
        size = tensor.nbytes
        tensor.reshape(-1).view(torch.uint8).copy_(data[start : start + size])
        start += size
