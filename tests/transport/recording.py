"""A transport that records what a rank does: messages, waits, and operations of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor

from penstock._engine.transport import (
    LEFT,
    VALUES,
    WORDS,
    Arrival,
    Channel,
    Sending,
    Transport,
)
from penstock._engine.values import TensorLayout
from penstock.errors import UsageError
from penstock.pipeline import Pipeline

What = Literal["send", "leave", "post", "take", "gather"]
"""What was done: ``leave`` waits for a message that was sent, ``take`` for one that was posted."""


class Recorded(NamedTuple):
    """One thing that a rank did.

    Attributes:
        what: what it did.
        channel: of a message: its ends, and what travels.
        tag: of a message: its tag.
        bytes: how many bytes travel.
        tensors: the tensors, if the recording keeps them; of a receive, once it was taken.
    """

    what: What
    channel: Channel | None
    tag: int
    bytes: int
    tensors: tuple[Tensor, ...] = ()


class Traffic:
    """The traffic that one rank has sent or received.

    Attributes:
        messages: the number of messages by channel; empty ones are not sent, and do not count.
        bytes: the number of bytes by channel.
        pending: the bytes of receives that are posted but not taken yet.
        most: the most bytes that were pending at once.
    """

    def __init__(self) -> None:
        self.messages: Counter[Channel] = Counter()
        self.bytes: Counter[Channel] = Counter()
        self.pending = self.most = 0

    def count(self, channel: Channel, size: int) -> None:
        """Count a message of this many bytes; descriptions and copies do not count."""
        if size and channel.direction != WORDS:
            self.messages[channel] += 1
            self.bytes[channel] += size

    def reset(self) -> None:
        """Start counting anew; pending bytes stay pending."""
        self.messages.clear()
        self.bytes.clear()
        self.most = self.pending


class RecordingTransport(Transport):
    """Records what a rank does with its transport, and passes it on.

    Args:
        transport: this rank's transport.
        keeps: whether events keep their tensors.

    Attributes:
        events: everything that was done, in order, if ``keeps`` is true.
        sent: the traffic that this rank sent.
        received: the traffic that this rank received.
        control: how often each operation of all ranks ran: ``gather``.
        words: how many messages carried descriptions of new kinds, or copies of one rank's value.
    """

    def __init__(self, transport: Transport, *, keeps: bool = False) -> None:
        super().__init__(
            transport.group, transport.global_ranks, transport.watch, transport.activity
        )
        self.wide = transport.wide
        self._transport, self._keeps = transport, keeps
        self.events: list[Recorded] = []
        self.sent, self.received = Traffic(), Traffic()
        self.control: Counter[str] = Counter()
        self.words = 0

    def reset(self) -> None:
        """Start recording anew, for instance after the first step."""
        self.events.clear()
        self.sent.reset()
        self.received.reset()
        self.control.clear()
        self.words = 0

    def note(
        self, what: What, channel: Channel | None, tag: int, size: int, tensors: Sequence[Tensor]
    ) -> None:
        """Record an event."""
        if self._keeps:
            self.events.append(Recorded(what, channel, tag, size, tuple(tensors)))

    def connect(self, channels: Iterable[tuple[int, int, int]]) -> None:
        """Connect channels."""
        self._transport.connect(channels)

    def send(
        self, peer: int, tag: int, tensors: Sequence[Tensor], direction: int = VALUES
    ) -> Sending:
        """Send, and record it."""
        channel, size = Channel(self.rank, peer, direction), sum(t.nbytes for t in tensors)
        self.sent.count(channel, size)
        self.words += direction == WORDS
        self.note("send", channel, tag, size, tensors)
        sending = self._transport.send(peer, tag, tensors, direction)
        if sending is LEFT or not self._keeps:
            return sending
        return _RecordedSending(
            self, sending, Recorded("leave", channel, tag, size, tuple(tensors))
        )

    def post(
        self, peer: int, tag: int, layouts: Sequence[TensorLayout], direction: int = VALUES
    ) -> Arrival:
        """Receive, and record it."""
        channel, size = Channel(peer, self.rank, direction), sum(of.nbytes for of in layouts)
        self.received.count(channel, size)
        self.received.pending += size
        self.received.most = max(self.received.most, self.received.pending)
        self.note("post", channel, tag, size, ())
        arrival = self._transport.post(peer, tag, layouts, direction)
        return _RecordedArrival(self, arrival, Recorded("take", channel, tag, size))

    def gather(self, values: Tensor, what: str = "an exchange") -> Tensor:
        """Gather, and record it."""
        self.control["gather"] += 1
        self.note("gather", None, 0, values.nbytes, (values,))
        return self._transport.gather(values, what)

    def settle(self) -> None:
        """Wait for what holds only the device."""
        self._transport.settle()

    def abort(self) -> None:
        """Break all connections."""
        self._transport.abort()

    def close(self) -> None:
        """End the connections."""
        self._transport.close()


class _RecordedSending(Sending):
    __slots__ = ("_event", "_recording", "_sending")

    def __init__(self, recording: RecordingTransport, sending: Sending, event: Recorded) -> None:
        super().__init__()
        self._recording, self._sending, self._event = recording, sending, event

    def wait(self) -> None:
        self._recording.note(*self._event)
        self._sending.wait()

    def used(self) -> None:
        self._sending.used()


class _RecordedArrival(Arrival):
    __slots__ = ("_arrival", "_event", "_recording")

    def __init__(self, recording: RecordingTransport, arrival: Arrival, event: Recorded) -> None:
        self._recording, self._arrival, self._event = recording, arrival, event

    def take(self) -> list[Tensor]:
        tensors = self._arrival.take()
        self._recording.received.pending -= self._event.bytes
        self._recording.note(*self._event[:-1], tensors)
        return tensors


def record_messages(pipe: Pipeline, *, keeps: bool = False) -> RecordingTransport:
    """Record the messages of this process's rank from now on.

    Args:
        pipe: the pipeline.
        keeps: whether to keep all events, with their tensors.

    Raises:
        UsageError: all ranks share this process, so nothing is sent.
    """
    recordings: list[RecordingTransport] = []

    def wrap(transport: Transport) -> Any:
        recordings.append(RecordingTransport(transport, keeps=keeps))
        return recordings[-1]

    pipe.job.wrap_transport(wrap)
    if not recordings:
        raise UsageError(
            "all ranks share this process, so no messages travel; start it by torchrun"
        )
    return recordings[0]
