"""A process a rank, over a ``torch.distributed`` process group: gloo on CPU, NCCL on GPU.

The given group only serves to meet. On gloo all channels share one group, which is this pipeline's own, and
have a tag each. On NCCL every channel is a group of its own with its own communicator and stream, so that a
receive never stands in front of a send; the communicators are made when the channels are opened, by all ranks
in the same order, since making one waits for the other end.
The NCCL side is the same code; two GPUs, which its test needs, were not at hand.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import UsageError
from penstock.faults.rendezvous import PATIENCE, start_world
from penstock.specs import TensorSpec
from penstock.transport.base import KINDS, Channel, Ticket, Transport
from penstock.transport.connections import break_off, connect_all
from penstock.transport.messages import Departure, Wire, settled

_TAGS = {kind: tag for tag, kind in enumerate(KINDS, start=0x50)}
"""Tags of messages; away from 0, the default of other code on the same group."""


def launched() -> bool:
    """Whether a process group is there, or a launcher such as ``torchrun`` has prepared one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    # A rank without a world is a mistake of the launcher's, which is told when the ranks meet.
    return os.environ.get("WORLD_SIZE", "2" if "RANK" in os.environ else "1") != "1"


def connect(
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    timeout: float = 24 * 3600.0,
    patience: float = PATIENCE,
) -> ProcessGroupTransport:
    """This process's end of a pipeline over ``group``.

    Starts the default process group from the launcher's environment where nobody has, and then ends it
    on :meth:`ProcessGroupTransport.close`.

    Args:
        device: where this rank's stages live.
        group: the ranks of the pipeline, in order; by default all.
        timeout: seconds after which a wait on a peer is an error; a silent peer is found earlier.
        patience: seconds until all ranks must be there, where nobody has started the group.
    """
    owns_world = not dist.is_initialized()
    if owns_world:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        start_world(backend, timeout, patience)
    return ProcessGroupTransport(group, device, timeout, owns_world=owns_world)


def sum_over(group: dist.ProcessGroup) -> tuple[int, Callable[[Tensor], Tensor]]:
    """How many ranks a group has, and a sum over them of a CPU tensor, the same bits on each."""
    backend = dist.get_backend(group) if dist.is_initialized() else "gloo"
    device = torch.accelerator.current_accelerator() if backend == "nccl" else None

    def add(values: Tensor) -> Tensor:
        mine = values.to(device) if device else values
        rows = [torch.empty_like(mine) for _ in range(group.size())]
        group.allgather([rows], [mine]).wait()
        return torch.stack(rows).cpu().sum(0)

    return group.size(), add


class ProcessGroupTransport(Transport):
    """One rank's end, in a process of its own; made by :func:`connect` on all ranks together."""

    separate = True

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        timeout: float,
        *,
        owns_world: bool = False,
    ) -> None:
        parent = group or _world()
        self._members = dist.get_process_group_ranks(parent)
        if dist.get_rank() not in self._members:
            raise UsageError(f"process {dist.get_rank()} is not in the group {self._members}")
        self.rank = self._members.index(dist.get_rank())
        self.ranks = len(self._members)
        self._owns_world = owns_world
        self._timeout = timeout
        self._device = device
        self._store: Any = parent.get_group_store()
        meets_on = torch.device("cpu") if _carries(parent, "cpu") else device
        self._control = connect_all(parent, meets_on, timedelta(seconds=timeout))
        self._wires: dict[Channel, Wire] = {}
        self._leaving: set[Departure] = set()
        self._aborted: set[Any] = set()
        self._closed = False

    def open(self, channels: Iterable[Channel]) -> None:
        """Give each channel its wire: on gloo a tag, on NCCL a group that all ranks make in turn."""
        for channel in channels:
            if channel not in self._wires:
                self._wires[channel] = self._wire(channel)

    def _wire(self, channel: Channel) -> Wire:
        """The group, the other end's rank in it, and the tag."""
        other = channel.target if channel.source == self.rank else channel.source
        if self._device.type == "cpu":
            return Wire(self._control, other, _TAGS[channel.kind])
        ends = sorted((channel.source, channel.target))
        # Every rank makes every group, also those it is no end of, since torch counts them.
        backend = dist.get_default_backend_for_device(self._device)
        group = self._new_group([self._members[end] for end in ends], backend, self._device)
        return Wire(group, ends.index(other), 0)

    def _new_group(
        self, members: list[int], backend: str, device: torch.device | None = None
    ) -> dist.ProcessGroup:
        """A group that this pipeline's ranks make together; those outside it get a stand-in.

        With a device its members connect at once.
        """
        partial = len(self._members) < dist.get_world_size()
        made: dist.ProcessGroup = dist.new_group(
            members,
            timedelta(seconds=self._timeout),
            backend,
            use_local_synchronization=partial,
            device_id=device,
        )
        return made

    def post_send(self, channel: Channel, tensors: Sequence[Tensor]) -> Ticket:
        """Start sends that run beside the next actions; the ticket keeps the tensors until it is complete."""
        return self._wires[channel].send(tensors, self._leaving)

    def post_receive(
        self, channel: Channel, specs: Sequence[TensorSpec], device: torch.device
    ) -> Ticket:
        """Start receives into new buffers."""
        return self._wires[channel].receive(specs, device)

    def agree(self, value: Any) -> Ticket:
        """Exchange JSON bytes: first their lengths, then all padded to the longest."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        return _Agreed(data, self._gathered)

    def sum(self, values: Tensor) -> Ticket:
        """Gather, then add in rank order, so that the bits do not depend on the backend."""
        return _Sum(self._gathered(values))

    def gather(self, values: Tensor) -> Ticket:
        """Gather over the control group."""
        return self._gathered(values)

    def _gathered(self, values: Tensor) -> _Gathered:
        rows = [torch.empty_like(values) for _ in range(self.ranks)]
        return _Gathered(self._control.allgather([rows], [values]), rows)

    def broadcast(self, tensor: Tensor, source: int) -> Ticket:
        """Broadcast over the control group, on the CPU, as bytes: gloo knows only some types."""
        data = settled(tensor).flatten().view(torch.uint8).cpu().clone()
        return _Broadcast(self._control.broadcast(data, source), data, tensor)

    def finish(self) -> None:
        """Wait for the sends that nobody has waited for, and let go of their tensors."""
        for departure in list(self._leaving):
            departure.wait()

    def cut(self) -> None:
        """Break all connections, from whichever thread; a wait on them ends at once, also at their ends."""
        for group in {wire.group for wire in self._wires.values()} - {self._control}:
            if group not in self._aborted:
                self._aborted.add(group)
                group.abort()
        break_off(self._control)

    @property
    def store(self) -> Any:
        """The store of the process group, over a connection of its own."""
        return self._store.clone()

    def close(self) -> None:
        """End the connections, and the default group if it was started here."""
        if self._closed:
            return
        self._closed = True
        self._leaving.clear()
        self._wires.clear()
        # What still waits on them, after an error, would keep the group from ending.
        break_off(self._control)
        del self._control
        if self._owns_world:
            dist.destroy_process_group()


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    if world is None:
        raise UsageError("there is no process group; start the processes with torchrun")
    return world


def _carries(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether a group has a backend for a kind of device."""
    backends = dict(item.split(":") for item in dist.get_backend_config(group).split(","))
    return device_type in backends


class _Gathered(Ticket):
    def __init__(self, work: dist.Work, rows: list[Tensor]) -> None:
        self._work = work
        self._rows = rows

    def ready(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        self._work.wait()

    def take(self) -> list[Tensor]:
        self.wait()
        return self._rows


class _Sum(Ticket):
    def __init__(self, gathered: _Gathered) -> None:
        self._gathered = gathered

    def ready(self) -> bool:
        return self._gathered.ready()

    def wait(self) -> None:
        self._gathered.wait()

    def take(self) -> Tensor:
        total, *rows = self._gathered.take()
        for row in rows:
            total = total + row
        return total


class _Agreed(Ticket):
    """JSON bytes of every rank, in two rounds: the second can only begin when the first is over."""

    def __init__(self, data: Tensor, gather: Callable[[Tensor], Ticket]) -> None:
        self._data = data
        self._gather = gather
        self._lengths = gather(torch.tensor([data.numel()]))
        self._texts: list[bytes] | None = None

    def ready(self) -> bool:
        return self._texts is not None

    def wait(self) -> None:
        if self._texts is None:
            lengths = [int(length) for length in self._lengths.take()]
            padded = torch.zeros(max(lengths), dtype=torch.uint8)
            padded[: self._data.numel()] = self._data
            rows = zip(self._gather(padded).take(), lengths, strict=True)
            self._texts = [bytes(row[:length].tolist()) for row, length in rows]

    def take(self) -> list[Any]:
        self.wait()
        return [json.loads(text) for text in self._texts or ()]


class _Broadcast(Ticket):
    def __init__(self, work: dist.Work, data: Tensor, like: Tensor) -> None:
        self._work = work
        self._data = data
        self._like = like

    def ready(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        self._work.wait()

    def take(self) -> Tensor:
        self.wait()
        like = self._like
        return self._data.view(like.dtype).reshape(like.shape).to(like.device)


class Groups:
    """The processes of a machine that share a file, and groups of the first few of them; for tests.

    Args:
        rank: this process's.
        size: how many processes there are.
        store: a file that all of them can reach and none has used before.
    """

    def __init__(self, rank: int, size: int, store: str) -> None:
        dist.init_process_group(
            "gloo", init_method=Path(store).absolute().as_uri(), rank=rank, world_size=size
        )
        # All at the start, by all: torch counts the groups that a process has made.
        self._groups = [dist.new_group(list(range(count))) for count in range(1, size + 1)]

    def first(self, count: int) -> Any:
        """The group of the first ``count`` processes."""
        return self._groups[count - 1]

    def __enter__(self) -> Groups:
        return self

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()
