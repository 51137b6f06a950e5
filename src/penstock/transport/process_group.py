"""One process per rank, over a ``torch.distributed`` process group: gloo on CPU, NCCL on GPU.

The given group is only used to meet. The connections are the pipeline's own, so that a failure breaks
neither the user's connections nor those of another pipeline on the same group, such as the next one. On
gloo all channels share one group and have a tag each, and small messages between processes of one machine
take a shorter way (``penstock.transport.messages``). On NCCL every channel is a group with a communicator
and stream of its own, so that a receive never blocks a send. The communicators are made when the channels
are opened, by all ranks in the same order, since making one waits for the other end. The NCCL side is the
same code, but its test needs two GPUs, and has not been run yet.
"""

from __future__ import annotations

import ctypes
import json
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import reduce
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import UsageError
from penstock.faults import SLACK, Activity, Patience, Rendezvous, Watch
from penstock.transport.base import CONTROL, KINDS, Channel, Ticket, Transport
from penstock.transport.messages import (
    EAGER,
    Ends,
    Line,
    Wire,
    break_off,
    connect_all,
    connect_lines,
    ends_of,
)
from penstock.values import TensorSpec, settled

_TAGS = {kind: tag for tag, kind in enumerate(KINDS, start=0x50)}
"""The tag of each kind of message; other code on the same group uses 0 by default."""
DAY = 24 * 3600.0
"""Seconds that a wait on a peer may take; the watch finds a silent peer much earlier."""
FEW = 16
"""Up to this many ranks of one machine, all are connected by lines; control operations of more use gloo."""
_OPEN: weakref.WeakSet[ProcessGroupTransport] = weakref.WeakSet()


def launched() -> bool:
    """Whether there is a process group, or a launcher such as ``torchrun`` has set the variables for one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    # RANK without WORLD_SIZE is a mistake of the launcher's, which is reported when the ranks meet.
    return os.environ.get("WORLD_SIZE", "2" if "RANK" in os.environ else "1") != "1"


def connect(
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    patience: Patience | None = None,
) -> ProcessGroupTransport:
    """This process's end of a pipeline over ``group``; all of its ranks call this together.

    If there is no default process group, it is started from the launcher's environment, and ended by
    :meth:`ProcessGroupTransport.close`. The watch over the ranks begins as soon as they have met, before the
    first connection is made.

    Args:
        device: where this rank's stages live.
        group: the ranks of the pipeline, in order; by default all.
        patience: how long ranks may take to meet, and how long they may later make no progress.

    Raises:
        UsageError: this process is not in the group, or its environment is wrong.
        AgreementError: not all ranks came in time.
        PeerFailed: another rank has failed, or is silent.
    """
    patience = patience or Patience()
    owns_world = not dist.is_initialized()
    meeting = (
        Rendezvous.of_launcher(patience.meeting)
        if owns_world
        else Rendezvous.of_group(_checked(group), patience.meeting)
    )
    watch = Watch(Activity(meeting.rank), meeting.meet(), patience)
    try:
        watch.activity.make("connects with the others")
        watch.activity.wait("waits for all to connect", None)
        if owns_world:
            meeting.start_world("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", DAY)
        rank, ranks, wait = meeting.rank, meeting.ranks, patience.meeting + SLACK
        control = connect_all(meeting.room("gloo"), rank, ranks, wait, DAY)
        watch.activity.make("has connected with the others")
    except BaseException as error:
        cause = watch.failed(error)
        watch.close()
        if owns_world and dist.is_initialized():
            dist.destroy_process_group()
        if cause is error:
            raise
        raise cause from None
    return ProcessGroupTransport(group, device, control, watch, owns_world=owns_world)


def _checked(group: dist.ProcessGroup | None) -> Any:
    if group is not None and not isinstance(group, dist.ProcessGroup):
        # Torch returns this as the group to processes that are not in it.
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise UsageError(f"process {dist.get_rank()} is not in the group that was given")
        raise UsageError(f"group={group!r}: must be a process group or a DeviceMesh")
    found = group or dist.group.WORLD
    members = dist.get_process_group_ranks(found)
    if dist.get_rank() not in members:
        raise UsageError(f"process {dist.get_rank()} is not in the group {members}")
    return found


class Circle:
    """Processes that exchange values outside of a pipeline, such as its replicas.

    Args:
        group: their process group; None for all processes.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        alone = group is None and not (dist.is_available() and dist.is_initialized())
        found: Any = None if alone else group or dist.group.WORLD
        self._group = found
        self.rank = 0 if alone else found.rank()
        self.size = 1 if alone else found.size()
        backend = dist.get_backend(self._group) if dist.is_initialized() else "gloo"
        self._device = torch.accelerator.current_accelerator() if backend == "nccl" else None

    def exchange(self, value: Any) -> list[Any]:
        """The JSON values of all, in rank order; all processes call this."""
        return [value] if self._group is None else _Agreed(value, self._gathered).take()

    def sum(self, values: Tensor) -> Tensor:
        """The sum of all CPU tensors, with the same bits on each process; all processes call this."""
        rows = [values] if self._group is None else self._gathered(values).take()
        return torch.stack(rows).sum(0)

    def _gathered(self, values: Tensor) -> Ticket:
        mine = values.to(self._device) if self._device else values
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        return _gathered_by(self._group.allgather([rows], [mine]), rows)


class ProcessGroupTransport(Transport):
    """One rank's end, in a process of its own; made by :func:`connect` on all ranks together."""

    separate = True
    watch: Watch

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        control: Any,
        watch: Watch,
        *,
        owns_world: bool = False,
    ) -> None:
        self._members = dist.get_process_group_ranks(group)
        self.rank = watch.activity.rank
        self.ranks = len(self._members)
        self.activity = watch.activity
        self.watch = watch
        self._owns_world = owns_world
        self._device = device
        self._control = control
        self._wires: dict[Channel, Wire] = {}
        self._known: set[Ends] = set()
        self._lines: dict[Ends, Line] = {}
        self._others: dict[int, Line] = {}
        self._leaving: set[Ticket] = set()
        self._aborted: set[Any] = set()
        self._closed = False
        self._process = os.getpid()
        cut = weakref.WeakMethod(self.cut)
        watch.over(lambda: (found := cut()) and found())
        weakref.finalize(self, watch.close)
        _OPEN.add(self)

    def open(self, channels: Iterable[Channel]) -> None:
        """Give each channel its wire: a tag on gloo, and on NCCL a group that all ranks make in turn."""
        new = [channel for channel in dict.fromkeys(channels) if channel not in self._wires]
        if self._device.type == "cpu":
            self._connect_lines(new)
        for channel in new:
            self._wires[channel] = self._wire(channel)

    def _connect_lines(self, channels: Iterable[Channel]) -> None:
        """Connect the ends of new channels.

        The first time, also all ranks with each other, if they are few.
        """
        wanted = {ends_of(channel) for channel in channels} - self._known
        if not self._known and self.ranks <= FEW:
            pairs = combinations(range(self.ranks), 2)
            wanted |= {(low, high, CONTROL) for low, high in pairs}
        self._known |= wanted
        lines, made = connect_lines(self.rank, wanted, lambda told: self.agree(told).take())
        self._lines |= lines
        others = [ends for ends in wanted if ends[2] == CONTROL]
        if others and made.issuperset(others):
            self._others = {sum(e[:2]) - self.rank: lines[e] for e in others if self.rank in e[:2]}

    def _wire(self, channel: Channel) -> Wire:
        """The group, the other end's rank in it, and the tag."""
        other = channel.target if channel.source == self.rank else channel.source
        if self._device.type == "cpu":
            line = self._lines.get(ends_of(channel))
            return Wire(self._control, other, _TAGS[channel.kind], line)
        ends = sorted((channel.source, channel.target))
        # Every rank makes every group, even those that it is not in, since torch counts them.
        backend = dist.get_default_backend_for_device(self._device)
        group = self._new_group([self._members[end] for end in ends], backend, self._device)
        return Wire(group, ends.index(other), 0)

    def _new_group(
        self, members: list[int], backend: str, device: torch.device | None = None
    ) -> dist.ProcessGroup:
        """A group that this pipeline's ranks make together; ranks outside of it get a placeholder.

        If a device is given, its members connect at once.
        """
        partial = len(self._members) < dist.get_world_size()
        made: dist.ProcessGroup = dist.new_group(
            members,
            timedelta(seconds=DAY),
            backend,
            use_local_synchronization=partial,
            device_id=device,
        )
        return made

    def post_send(self, channel: Channel, tensors: Sequence[Tensor]) -> Ticket:
        """Start a send that runs beside the next actions.

        The ticket keeps the tensors until it is complete.
        """
        return self._wires[channel].send(tensors, self._leaving)

    def post_receive(
        self, channel: Channel, specs: Sequence[TensorSpec], device: torch.device
    ) -> Ticket:
        """Start a receive into new buffers."""
        return self._wires[channel].receive(specs, device)

    def agree(self, value: Any) -> Ticket:
        """Exchange JSON bytes: first their lengths, then the bytes, padded to the longest."""
        return _Agreed(value, self._gathered)

    def sum(self, values: Tensor) -> Ticket:
        """Gather, then add in rank order, so that the bits do not depend on the backend."""
        rows = self._gathered(values)
        return _After(rows.ready, rows.wait, lambda: reduce(torch.add, rows.take()))

    def gather(self, values: Tensor) -> Ticket:
        """Gather over the control group."""
        return self._gathered(values)

    def _gathered(self, values: Tensor) -> Ticket:
        layout = torch.contiguous_format
        rows = [torch.empty_like(values, memory_format=layout) for _ in range(self.ranks)]
        if not self._others or values.nbytes > EAGER or not values.numel():
            return _gathered_by(self._control.allgather([rows], [values]), rows)
        own = rows[self.rank].copy_(values)
        arriving: list[Ticket] = []
        for other, line in self._others.items():
            line.send([own], own.nbytes, self._leaving)
            arriving.append(line.receive([rows[other]]))
        return _After(
            lambda: all(ticket.ready() for ticket in arriving),
            lambda: [ticket.wait() for ticket in arriving],
            lambda: rows,
        )

    def broadcast(self, tensor: Tensor, source: int) -> Ticket:
        """Broadcast over the control group on the CPU, as bytes, since gloo supports only some types."""
        data = settled(tensor).flatten().view(torch.uint8).cpu().clone()
        work = self._control.broadcast(data, source)
        return _After(
            work.is_completed,
            work.wait,
            lambda: data.view(tensor.dtype).reshape(tensor.shape).to(tensor.device),
        )

    def finish(self) -> None:
        """Wait for all sends that nobody has waited for, and drop their tensors."""
        for ticket in list(self._leaving):
            ticket.wait()

    def cut(self) -> None:
        """Break all connections, from any thread; waits on them end at once, at both ends."""
        for group in {wire.group for wire in self._wires.values()} - {self._control}:
            if group not in self._aborted:
                self._aborted.add(group)
                group.abort()
        for line in list(self._lines.values()):
            line.cut()
        break_off(self._control)

    def close(self) -> None:
        """End the connections, and the default process group if it was started here."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._process:
            return
        self.watch.close()
        self._leaving.clear()
        self._wires.clear()
        for line in self._lines.values():
            line.close()
        # After an error, operations that still wait would keep the group from ending.
        break_off(self._control)
        del self._control
        if self._owns_world:
            dist.destroy_process_group()

    def abandon(self) -> None:
        """In a process forked from the rank's: leave the rank's groups alone, and close its sockets.

        To end a group there would wait for threads that only the rank has, and remove its connections from
        the rank's event loop. The sockets must be closed: an end that stayed open here would hide the
        rank's death.
        """
        if not self._closed:
            for line in self._lines.values():
                line.close()
            for group in (self._control, dist.group.WORLD):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _abandon_all() -> None:
    for end in list(_OPEN):
        end.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)


class _After(Ticket):
    """A ticket for the result of an operation under way.

    Args:
        ready: whether the operation is complete.
        wait: waits until it is.
        result: gives the result.
    """

    def __init__(
        self, ready: Callable[[], bool], wait: Callable[[], object], result: Callable[[], Any]
    ) -> None:
        self._ready = ready
        self._wait = wait
        self._result = result

    def ready(self) -> bool:
        return self._ready()

    def wait(self) -> None:
        self._wait()

    def take(self) -> Any:
        self._wait()
        return self._result()


def _gathered_by(work: dist.Work, rows: list[Tensor]) -> Ticket:
    return _After(work.is_completed, work.wait, lambda: [row.cpu() for row in rows])


class _Agreed(Ticket):
    """JSON bytes of every rank, in two rounds: the second one begins when the lengths are known."""

    def __init__(self, value: Any, gather: Callable[[Tensor], Ticket]) -> None:
        text = bytearray(json.dumps(value).encode())
        self._data = torch.frombuffer(text, dtype=torch.uint8)
        self._gather = gather
        self._lengths = gather(torch.tensor([len(text)]))
        self._texts: list[bytes] | None = None

    def ready(self) -> bool:
        return self._texts is not None

    def wait(self) -> None:
        if self._texts is None:
            lengths = [int(length) for length in self._lengths.take()]
            padded = torch.zeros(max(lengths), dtype=torch.uint8)
            padded[: self._data.numel()] = self._data
            rows = zip(self._gather(padded).take(), lengths, strict=True)
            self._texts = [row[:length].numpy().tobytes() for row, length in rows]

    def take(self) -> list[Any]:
        self.wait()
        return [json.loads(text) for text in self._texts or ()]


class Groups:
    """The processes of a machine that share a file, and groups of the first few of them; for tests.

    Args:
        rank: the rank of this process.
        size: the number of processes.
        store: a new file that all of them can reach.
    """

    def __init__(self, rank: int, size: int, store: str) -> None:
        dist.init_process_group(
            "gloo", init_method=Path(store).absolute().as_uri(), rank=rank, world_size=size
        )
        # All groups are made at the start by all processes, since torch counts the groups of each process.
        self._groups = [dist.new_group(list(range(count))) for count in range(1, size + 1)]

    def first(self, count: int) -> Any:
        """The group of the first ``count`` processes."""
        return self._groups[count - 1]

    def __enter__(self) -> Groups:
        return self

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()
