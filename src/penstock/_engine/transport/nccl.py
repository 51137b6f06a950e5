"""Messages between GPUs over NCCL, each channel with a communicator and a stream of its own.

A wait on such a message holds the device's stream, not the host. So that a peer that is stopped can be named,
:meth:`NcclTransport.settle` waits on the host for what was sent and taken, and notes each message before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from penstock._engine.faults import DAY, Meeting
from penstock._engine.transport.base import (
    VALUES,
    Arrival,
    Channel,
    GroupArrival,
    Sending,
    Transport,
    as_bytes,
    packed,
    parcels_for,
)
from penstock._engine.transport.gloo import GlooTransport
from penstock._engine.values import TensorLayout
from penstock.errors import MessageError

_POLL = 1e-4
"""Seconds between two looks at a message that the host waits for."""


class NcclTransport(Transport):
    """A transport over NCCL channels; what no channel was connected for travels over gloo.

    Args:
        gloo: this rank's gloo transport, which also carries the collectives.
        meeting: where the ranks have met.
        device: the GPU of this rank's stages.
    """

    def __init__(self, gloo: GlooTransport, meeting: Meeting, device: torch.device) -> None:
        super().__init__(gloo.group, gloo.global_ranks, gloo.watch, gloo.activity)
        self._gloo = gloo
        self.wide = gloo.wide
        self._store = meeting.store
        self._stages_on = device
        self._groups: dict[Channel, Any] = {}
        self._under_way: dict[Channel, deque[tuple[Any, Sequence[Tensor]]]] = {}
        self.watch.protect(self.abort)

    def connect(self, channels: Iterable[tuple[int, int, int]]) -> None:
        """Connect channels."""
        for channel in in_rounds(channels):
            if channel not in self._groups and self.rank in (channel.source, channel.target):
                self._under_way[channel] = deque()
                self._groups[channel] = self._joined(channel)

    def _joined(self, channel: Channel) -> Any:
        """A new communicator, whose first message has connected both ends.

        In a step, two ranks might wait for each other on different channels; here all ranks go through the
        channels in one order.
        """
        peer, place = self._other_end(channel)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = DAY
        name = "/".join(map(str, channel))
        self.activity.wait("a channel to connect", peer)
        try:
            # As for gloo: groups of new_group would share names with groups of replicas.
            store = PrefixStore(f"nccl/{name}", self._store)
            group: Any = dist.ProcessGroupNCCL(store, 1 - place, 2, options)
            byte = torch.zeros(1, dtype=torch.uint8, device=self._stages_on)
            move = group.send if channel.source == self.rank else group.recv
            move([byte], place, 0).wait()
        except RuntimeError as error:
            raise MessageError(
                f"rank {self.rank} on {self._stages_on} cannot connect to rank {peer} by NCCL: {error}; "
                "each process needs a GPU of its own, or give the pipeline a gloo group by mesh="
            ) from error
        return group

    def _other_end(self, channel: Channel) -> tuple[int, int]:
        """The rank at the other end, and its place in the communicator."""
        peer = channel.target if channel.source == self.rank else channel.source
        return peer, int(peer > self.rank)

    def send(
        self, peer: int, tag: int, tensors: Sequence[Tensor], direction: int = VALUES
    ) -> Sending:
        """Start to send tensors."""
        channel = Channel(self.rank, peer, direction)
        if channel not in self._groups:
            return self._gloo.send(peer, tag, tensors, direction)
        # To the GPU: a stage on a GPU may send a tensor that is on the CPU.
        parcels = packed([as_bytes(tensor).to(self._stages_on) for tensor in tensors], self._bytes)
        works = [self._groups[channel].send([p], int(peer > self.rank), tag) for p in parcels]
        self._keep(channel, works, parcels)
        return NcclSending(works, parcels)

    def post(
        self, peer: int, tag: int, layouts: Sequence[TensorLayout], direction: int = VALUES
    ) -> Arrival:
        """Start to receive tensors."""
        channel = Channel(peer, self.rank, direction)
        if channel not in self._groups:
            return self._gloo.post(peer, tag, layouts, direction)
        tensors = [layout.empty(self._stages_on) for layout in layouts]
        parcels, is_packed = parcels_for(tensors, self._bytes)
        works = [self._groups[channel].recv([p], int(peer > self.rank), tag) for p in parcels]
        self._keep(channel, works, ())
        return GroupArrival(works, tensors, parcels if is_packed else (), self._stages_on)

    def _bytes(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._stages_on)

    def _keep(self, channel: Channel, works: Sequence[Any], parcels: Sequence[Tensor]) -> None:
        """Keep what is under way; a channel's messages complete in order."""
        queue = self._under_way[channel]
        # Of messages that arrive, the last one stands for all.
        while queue and (channel.target == self.rank or queue[0][0].is_completed()):
            queue.popleft()
        if works:
            queue.append((works[-1], parcels))

    def settle(self) -> None:
        """Wait on the host until all messages are done, noting each."""
        for channel, queue in self._under_way.items():
            peer, _ = self._other_end(channel)
            for work, _ in queue:
                self.activity.wait("a message on its GPU", peer)
                while not work.is_completed():
                    self.watch.check()
                    time.sleep(_POLL)
            queue.clear()
        self._gloo.settle()

    def gather(self, values: Tensor, what: str = "an exchange") -> Tensor:
        """The CPU tensors of all ranks, in rank order."""
        return self._gloo.gather(values, what)

    def abort(self) -> None:
        """Break all connections."""
        for group in list(self._groups.values()):
            with suppress(Exception):
                group.abort()
        self._gloo.abort()

    def close(self) -> None:
        """End the connections, and the process group if this pipeline started it."""
        if self.watch.is_child():
            return
        self.watch.close()
        for group in self._groups.values():
            # Waits for pending messages, which a peer may still need; after abort() there are none.
            with suppress(Exception):
                group.shutdown()
        self._groups.clear()
        self._gloo.close()


class NcclSending(Sending):
    """A message that is being sent over NCCL."""

    __slots__ = ()

    def used(self) -> None:
        """Do nothing: the transport sees unasked when a message has left; a wait would hold up the device."""


def in_rounds(channels: Iterable[tuple[int, int, int]]) -> list[Channel]:
    """Channels in the order in which all ranks connect them: even ones, then odd ones along a chain.

    In a round no rank has two channels. So neighbours connect at the same time along the whole chain, where
    one sorted order would have each wait for the one before.
    """
    rounds: list[list[Channel]] = []
    busy: list[set[int]] = []
    for channel in map(Channel._make, sorted(set(channels))):
        ends = {channel.source, channel.target}
        place = next((i for i, taken in enumerate(busy) if not taken & ends), len(rounds))
        if place == len(rounds):
            rounds.append([])
            busy.append(set())
        rounds[place].append(channel)
        busy[place] |= ends
    return [channel for one in rounds for channel in one]
