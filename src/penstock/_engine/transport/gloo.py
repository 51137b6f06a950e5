"""Messages over gloo, each kind under its own tag, so that no receive blocks another.

If all ranks share a machine, small messages go over sockets. Stages on a GPU use this transport where the
ranks' process group has no NCCL, as for two processes on one GPU: messages are copied to the CPU and travel
from there.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from penstock._engine.faults import DAY, Activity, Meeting, Watch
from penstock._engine.transport.base import (
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
)
from penstock._engine.transport.buffers import Buffers
from penstock._engine.transport.group import Group
from penstock._engine.transport.sockets import SMALL, Line
from penstock._engine.values import TensorLayout
from penstock.errors import MessageError


class GlooTransport(Transport):
    """A transport over gloo, with lines for small messages.

    Args:
        meeting: where the ranks have met.
        watch: the watch over all ranks.
        activity: where this rank notes what it is doing.
        device: where this rank's stages live.
        wait: seconds to wait for all ranks to connect.

    Attributes:
        buffers: the memory that messages arrive in, and that small ones are packed into.
    """

    def __init__(
        self, meeting: Meeting, watch: Watch, activity: Activity, device: torch.device, wait: float
    ) -> None:
        job = meeting.job
        self._meeting = meeting
        self._stages_on = device
        self._posted: defaultdict[tuple[int, int], deque[LineArrival]] = defaultdict(deque)
        self.buffers = Buffers()
        self._closed = False
        activity.wait("all ranks to connect", None)
        try:
            group = _connected(meeting.store, job.pipeline, job.rank, wait)
        except RuntimeError as error:
            raise MessageError(
                f"rank {job.rank} waits for all {len(job.pipeline)} ranks to make their pipeline: {error}"
            ) from error
        super().__init__(group, job.pipeline, watch, activity)
        watch.protect(self.abort)
        # Not at exit, when the watch itself reports whether an error was the reason.
        weakref.finalize(self, watch.close).atexit = False
        self.connect_lines()
        if len(job.members) > self.ranks:
            activity.wait("the other pipelines of the job to connect", None)
            place = job.members.index(job.process)
            group = _connected(PrefixStore("job", meeting.room), job.members, place, wait)
            self.wide = Group(group, watch, job.members)
            watch.protect(self.wide.abort)
            self.wide.connect_lines()

    def connect(self, channels: Iterable[tuple[int, int, int]]) -> None:
        """Do nothing: all ranks are connected."""

    def send(
        self, peer: int, tag: int, tensors: Sequence[Tensor], direction: int = VALUES
    ) -> Sending:
        """Start to send tensors."""
        buffers = [as_bytes(tensor) for tensor in tensors]
        if self._stages_on.type != "cpu":
            buffers = [buffer.cpu() for buffer in buffers]
        size = sum([buffer.numel() for buffer in buffers])
        if size <= SMALL and peer in self._lines:
            self._lines[peer].send(tag, [buffer.numpy() for buffer in buffers], size)
            return LEFT
        parcels = packed(buffers, self.buffers.bytes)
        return Sending([self.group.send([parcel], peer, tag) for parcel in parcels], parcels)

    def post(
        self, peer: int, tag: int, layouts: Sequence[TensorLayout], direction: int = VALUES
    ) -> Arrival:
        """Start to receive tensors."""
        take = self.buffers.take
        tensors = [take(layout.shape, layout.torch_dtype) for layout in layouts]
        if peer in self._lines and sum([layout.nbytes for layout in layouts]) <= SMALL:
            posted = self._posted[peer, tag]
            return LineArrival(self._lines[peer], tag, posted, tensors, self._stages_on)
        parcels, is_packed = parcels_for(tensors, self.buffers.bytes)
        works = [self.group.recv([parcel], peer, tag) for parcel in parcels]
        return GroupArrival(works, tensors, parcels if is_packed else (), self._stages_on)

    def settle(self) -> None:
        """At the end of a step, let go of memory that no step has used for a while."""
        self.buffers.rest()
        super().settle()

    def close(self) -> None:
        """End the connections, and the process group if this pipeline started it."""
        # In a forked process, the threads that this would wait for do not run.
        if self._closed or self.watch.is_child():
            return
        self._closed = True
        self.watch.close()
        for one in filter(None, (self, self.wide)):
            # After an error, operations that still wait would keep a group from ending.
            one.end()
        self._meeting.close()


def _connected(store: Any, members: Sequence[int], place: int, wait: float) -> Any:
    """A process group of these processes, connected within so many seconds."""
    # Not new_group: for a part of the world it reuses the name of an earlier, ended group, and its
    # members then find that group's addresses.
    store = PrefixStore("gloo", store)
    group: Any = dist.ProcessGroupGloo(store, place, len(members), timedelta(seconds=wait))
    group.set_timeout(DAY)
    return group


class LineArrival(Arrival):
    """A message that arrives over a line.

    Args:
        line: the line.
        tag: the tag of the message.
        posted: the messages of that tag which are posted and not yet read, in order; this one is added.
        tensors: the tensors that it fills.
        device: where the tensors are wanted.
    """

    __slots__ = ("_device", "_is_here", "_line", "_posted", "_tag", "_tensors")

    def __init__(
        self,
        line: Line,
        tag: int,
        posted: deque[LineArrival],
        tensors: list[Tensor],
        device: torch.device,
    ) -> None:
        self._line, self._tag, self._posted = line, tag, posted
        self._tensors, self._device, self._is_here = tensors, device, False
        posted.append(self)

    def take(self) -> list[Tensor]:
        """Wait for the message, and return its tensors."""
        # Messages are taken in any order, but arrive in the order in which they were posted.
        while not self._is_here:
            self._posted.popleft()._read()
        return moved(self._tensors, self._device)

    def _read(self) -> None:
        # Read before the line is read again, which uses the same memory.
        data, start = np.frombuffer(self._line.receive(self._tag), dtype=np.uint8), 0
        for tensor in self._tensors:
            size = tensor.nbytes
            tensor.reshape(-1).view(torch.uint8).numpy()[:] = data[start : start + size]
            start += size
        self._is_here = True
