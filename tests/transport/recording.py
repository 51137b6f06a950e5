"""A transport that counts what a rank sends, receives and gathers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from penstock._engine.transport import VALUES, WORDS, Arrival, Channel, Sending, Transport
from penstock._engine.values import TensorLayout
from penstock.pipeline import Pipeline


class Recording(Transport):
    """Counts what a rank does with its transport, and passes it on.

    Attributes:
        messages: the number of messages sent, by channel; neither empty ones nor words count.
        bytes: their bytes, by channel.
        words: how many descriptions of new kinds, or copies of one rank's value, were sent.
        gathers: how often all ranks exchanged something.
        pending: the bytes of receives that are posted but not taken yet.
        most: the most bytes that were pending at once.
    """

    def __init__(self, transport: Transport) -> None:
        super().__init__(
            transport.group, transport.global_ranks, transport.watch, transport.activity
        )
        self.wide, self._transport, self.pending = transport.wide, transport, 0
        self.reset()

    def reset(self) -> None:
        """Count anew, for instance after the first step; pending bytes stay pending."""
        self.messages, self.bytes = Counter[Channel](), Counter[Channel]()
        self.words = self.gathers = 0
        self.most = self.pending

    def connect(self, channels: Iterable[tuple[int, int, int]]) -> None:
        self._transport.connect(channels)

    def send(
        self, peer: int, tag: int, tensors: Sequence[Tensor], direction: int = VALUES
    ) -> Sending:
        channel, size = Channel(self.rank, peer, direction), sum(t.nbytes for t in tensors)
        if direction == WORDS:
            self.words += 1
        elif size:
            self.messages[channel] += 1
            self.bytes[channel] += size
        return self._transport.send(peer, tag, tensors, direction)

    def post(
        self, peer: int, tag: int, layouts: Sequence[TensorLayout], direction: int = VALUES
    ) -> Arrival:
        size = sum(layout.nbytes for layout in layouts)
        self.pending += size
        self.most = max(self.most, self.pending)
        return _Pending(self, self._transport.post(peer, tag, layouts, direction), size)

    def gather(self, values: Tensor, what: str = "an exchange") -> Tensor:
        self.gathers += 1
        return self._transport.gather(values, what)

    def settle(self) -> None:
        self._transport.settle()

    def abort(self) -> None:
        self._transport.abort()

    def close(self) -> None:
        self._transport.close()


class _Pending(Arrival):
    __slots__ = ("_arrival", "_recording", "_size")

    def __init__(self, recording: Recording, arrival: Arrival, size: int) -> None:
        self._recording, self._arrival, self._size = recording, arrival, size

    def take(self) -> list[Tensor]:
        tensors = self._arrival.take()
        self._recording.pending -= self._size
        return tensors


def record_messages(pipe: Pipeline) -> Recording:
    """Count the messages of this process's rank from now on, which no other rank may share."""
    recordings: list[Recording] = []

    def wrap(transport: Transport) -> Any:
        recordings.append(Recording(transport))
        return recordings[-1]

    pipe.job.wrap_transport(wrap)
    (recording,) = recordings
    return recording
