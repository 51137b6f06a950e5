"""Messages over gloo, each kind under its own tag, so that no receive blocks another.

If all ranks share a machine, small messages go over sockets. Stages on a GPU use this transport where the
ranks' process group has no NCCL, as for two processes on one GPU: messages are copied to the CPU and travel
from there.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from penstock.errors import MessageError
from penstock.faults import DAY, Activity, Meeting, Watch, end_waits
from penstock.transport.base import (
    LEFT,
    VALUES,
    Arrival,
    GroupArrival,
    Sending,
    Transport,
    as_bytes,
    moved,
    packed,
    parcels_for,
    unpack,
    wait_for,
)
from penstock.transport.circle import Circle, DifferentCalls, circle_beside
from penstock.transport.sockets import SMALL, Line, connect_lines
from penstock.values import TensorLayout

_CONTROL = 1
"""The tag of collectives on lines."""
_CPU = torch.device("cpu")


class GlooTransport(Transport):
    """A transport over gloo, with lines for small messages.

    Args:
        meeting: where the ranks have met.
        watch: the watch over all ranks.
        activity: where this rank notes what it is doing.
        device: where this rank's stages live.
        wait: seconds to wait for all ranks to connect.
    """

    def __init__(
        self, meeting: Meeting, watch: Watch, activity: Activity, device: torch.device, wait: float
    ) -> None:
        super().__init__(meeting.job.rank, meeting.job.pipeline, watch, activity)
        self._meeting = meeting
        self._device = device
        self._lines: dict[int, Line] = {}
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._closed = False
        # Not new_group: for a part of the world it reuses the name of an earlier, ended group, and its
        # members then find that group's addresses.
        store = PrefixStore("gloo", meeting.store)
        activity.wait("all ranks to connect", None)
        try:
            self._group: Any = dist.ProcessGroupGloo(
                store, self.rank, self.ranks, timedelta(seconds=wait)
            )
        except RuntimeError as error:
            raise MessageError(
                f"rank {self.rank} waits for all {self.ranks} ranks to make their pipeline: {error}"
            ) from error
        self._group.set_timeout(DAY)
        watch.protect(self.abort)
        self.beside = circle_beside(meeting, watch, wait)
        # Not at exit, when the watch itself reports whether an error was the reason.
        weakref.finalize(self, watch.close).atexit = False
        self._lines = connect_lines(self.rank, self.ranks, self.exchange)

    @property
    def along(self) -> Circle:
        """The ranks of this pipeline, for exchanges with the first of them."""
        return Circle(self._group, self.watch, self.global_ranks, self.gather)

    def connect(self, channels: Iterable[tuple[int, int, int]]) -> None:
        """Do nothing: all ranks are connected."""

    def send(
        self, peer: int, tag: int, tensors: Sequence[Tensor], direction: int = VALUES
    ) -> Sending:
        """Start to send tensors."""
        buffers = [as_bytes(tensor) for tensor in tensors]
        if self._device.type != "cpu":
            buffers = [buffer.cpu() for buffer in buffers]
        size = sum([buffer.numel() for buffer in buffers])
        if size <= SMALL and peer in self._lines:
            self._lines[peer].send(tag, [buffer.numpy() for buffer in buffers], size)
            return LEFT
        parcels = packed(buffers)
        return Sending([self._group.send([parcel], peer, tag) for parcel in parcels], parcels)

    def post(
        self, peer: int, tag: int, layouts: Sequence[TensorLayout], direction: int = VALUES
    ) -> Arrival:
        """Start to receive tensors."""
        tensors = [layout.empty(_CPU) for layout in layouts]
        if peer in self._lines and sum([layout.nbytes for layout in layouts]) <= SMALL:
            lane = self._lanes.get((peer, tag))
            if lane is None:
                lane = self._lanes[peer, tag] = Lane(self._lines[peer], tag)
            return LineArrival(lane, tensors, self._device)
        parcels, is_packed = parcels_for(tensors)
        works = [self._group.recv([parcel], peer, tag) for parcel in parcels]
        return GroupArrival(works, tensors, parcels if is_packed else (), self._device)

    def gather(self, values: Tensor, what: str = "an exchange") -> list[Tensor]:
        """The CPU tensors of all ranks, in rank order."""
        rows = [
            torch.empty_like(values, memory_format=torch.contiguous_format)
            for _ in range(self.ranks)
        ]
        self.activity.come(what)
        if not self._lines or values.nbytes > SMALL or not values.numel():
            wait_for([self._group.allgather([rows], [values])])
            self.activity.go_on()
            return rows
        data = as_bytes(values)
        for line in self._lines.values():
            line.send(_CONTROL, [data.numpy()], data.numel())
        rows[self.rank].copy_(values)
        for peer, line in self._lines.items():
            row = torch.frombuffer(line.receive(_CONTROL), dtype=torch.uint8)
            if row.numel() != data.numel():
                raise DifferentCalls
            as_bytes(rows[peer]).copy_(row)
        self.activity.go_on()
        return rows

    def abort(self) -> None:
        """Break all connections."""
        for line in list(self._lines.values()):
            line.abort()
        end_waits(self._group)

    def close(self) -> None:
        """End the connections, and the process group if this pipeline started it."""
        # In a forked process, the threads that this would wait for do not run.
        if self._closed or self.watch.is_child():
            return
        self._closed = True
        self.watch.close()
        for line in self._lines.values():
            line.close()
        # After an error, operations that still wait would keep the group from ending.
        end_waits(self._group)
        self.beside.abort()
        del self._group, self.beside
        self._meeting.close()


class Lane:
    """The messages of one tag from one peer over its line.

    Args:
        line: the line to the peer.
        tag: the tag.

    Attributes:
        posted: the messages that are posted and not yet read, in order.
    """

    def __init__(self, line: Line, tag: int) -> None:
        self.line, self.tag = line, tag
        self.posted: deque[LineArrival] = deque()


class LineArrival(Arrival):
    """A message that arrives over a line.

    Args:
        lane: its lane.
        tensors: the tensors that it fills.
        device: where the tensors are wanted.
    """

    __slots__ = ("_device", "_is_here", "_lane", "_tensors")

    def __init__(self, lane: Lane, tensors: list[Tensor], device: torch.device) -> None:
        self._lane, self._tensors, self._device = lane, tensors, device
        self._is_here = False
        lane.posted.append(self)

    def take(self) -> list[Tensor]:
        """Wait for the message, and return its tensors."""
        # Messages are taken in any order, but arrive in the order in which they were posted.
        while not self._is_here:
            self._lane.posted.popleft()._read()
        return moved(self._tensors, self._device)

    def _read(self) -> None:
        message = bytearray(self._lane.line.receive(self._lane.tag))
        if message:
            unpack(torch.frombuffer(message, dtype=torch.uint8), self._tensors)
        self._is_here = True
