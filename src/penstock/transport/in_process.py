"""All ranks of a pipeline in one process: one thread runs their programs in turn, and nothing is copied."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.errors import InternalError, MessageError, SpecError
from penstock.faults import Activity
from penstock.transport.base import Channel, Ticket, Transport
from penstock.values import TensorSpec


@dataclass
class _Box:
    """A channel: the messages that were not received yet, and the receives that wait for one."""

    letters: deque[Sequence[Tensor]] = field(default_factory=deque)
    waiting: deque[_Message] = field(default_factory=deque)
    sent: int = 0
    asked: int = 0


_Mail = defaultdict[Channel, _Box]


class InProcessTransport(Transport):
    """One rank's end; :func:`in_process` makes the ends of all ranks, which share their channels.

    To wait for a ticket before the other ranks have done their part would never end, since the waiting
    thread is the one that would run them. So it raises a :class:`MessageError`.
    """

    def __init__(self, rank: int, ranks: int, mail: _Mail, rounds: _Rounds) -> None:
        self.rank = rank
        self.ranks = ranks
        self.activity = Activity(rank)
        self._mail = mail
        self._rounds = rounds

    def open(self, channels: Iterable[Channel]) -> None:
        """Make the channels."""
        for channel in channels:
            self._mail[channel] = self._mail[channel]

    def post_send(self, channel: Channel, tensors: Sequence[Tensor]) -> Ticket:
        """Put the tensors themselves into the channel."""
        if channel.source != self.rank:
            raise _wrong_end(channel, self.rank)
        box = self._mail[channel]
        box.letters.append(tensors)
        box.sent += 1
        return _Sent(channel, box, box.sent)

    def post_receive(
        self, channel: Channel, specs: Sequence[TensorSpec], device: torch.device
    ) -> Ticket:
        """Queue for the channel's next message."""
        if channel.target != self.rank:
            raise _wrong_end(channel, self.rank)
        box = self._mail[channel]
        ticket = _Message(channel, specs, device, box)
        box.waiting.append(ticket)
        box.asked += 1
        return ticket

    def agree(self, value: Any) -> Ticket:
        """Exchange JSON data, by way of its text as on a wire."""
        text = json.dumps(value)
        return self._rounds.join(self.rank, text, lambda texts: [json.loads(t) for t in texts])

    def sum(self, values: Tensor) -> Ticket:
        """Add the ranks' tensors in rank order."""
        return self._rounds.join(self.rank, values.clone(), _add_in_order)

    def gather(self, values: Tensor) -> Ticket:
        """Hand round copies of the ranks' tensors."""
        return self._rounds.join(self.rank, values.clone(), list)

    def broadcast(self, tensor: Tensor, source: int) -> Ticket:
        """Give every rank the source's tensor."""
        return self._rounds.join(
            self.rank, tensor, lambda tensors: tensors[source].detach().to(tensor.device)
        )

    def finish(self) -> None:
        """Nothing to do: what was sent stays until it is received."""

    def close(self) -> None:
        """Drop what this rank did not take; what it has sent stays there for the others."""
        for channel, box in self._mail.items():
            if channel.target == self.rank:
                box.letters.clear()
                box.waiting.clear()


def in_process(ranks: int) -> list[InProcessTransport]:
    """The ends of a pipeline of ``ranks`` ranks inside this process."""
    mail: _Mail = defaultdict(_Box)
    rounds = _Rounds(ranks)
    return [InProcessTransport(rank, ranks, mail, rounds) for rank in range(ranks)]


def _wrong_end(channel: Channel, rank: int) -> InternalError:
    return InternalError(f"rank {rank} used the {channel}, whose end it does not hold")


def _add_in_order(values: list[Tensor]) -> Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


class _Message(Ticket):
    """A receive: complete when the earlier ones on its channel are taken and the next is sent."""

    def __init__(
        self,
        channel: Channel,
        specs: Sequence[TensorSpec],
        device: torch.device,
        box: _Box,
    ) -> None:
        self._channel = channel
        self._specs = specs
        self._device = device
        self._box = box
        self._tensors: list[Tensor] | None = None

    def ready(self) -> bool:
        box = self._box
        while self._tensors is None and box.letters:
            # Messages go to the receives in the order in which these were posted.
            box.waiting.popleft().arrive(box.letters.popleft())
        return self._tensors is not None

    def arrive(self, tensors: Sequence[Tensor]) -> None:
        """Accept a message, after a check against the agreed specs."""
        fits = len(tensors) == len(self._specs) and all(
            tensor.shape == spec.shape and tensor.dtype is spec.torch_dtype
            for tensor, spec in zip(tensors, self._specs, strict=True)
        )
        if not fits:
            found = [(tuple(t.shape), t.dtype) for t in tensors]
            expected = [(s.shape, s.torch_dtype) for s in self._specs]
            raise SpecError(f"{self._channel}: expected {expected}, found {found}")
        # New objects over the same memory, so that requires_grad can be set on them alone.
        device = self._device
        self._tensors = [
            tensor.detach() if tensor.device == device else tensor.detach().to(device)
            for tensor in tensors
        ]

    def wait(self) -> None:
        if not self.ready():
            raise MessageError(f"{self._channel}: a message is expected that nobody has sent")

    def take(self) -> list[Tensor]:
        self.wait()
        tensors, self._tensors = self._tensors, None
        return tensors or []


class _Sent(Ticket):
    """A send: complete when the receive that takes it is posted."""

    def __init__(self, channel: Channel, box: _Box, number: int) -> None:
        self._channel = channel
        self._box = box
        self._number = number

    def ready(self) -> bool:
        return self._box.asked >= self._number

    def wait(self) -> None:
        if not self.ready():
            raise MessageError(f"{self._channel}: a message was sent that nobody receives")

    def take(self) -> None:
        self.wait()


class _Rounds:
    """Control operations: the n-th operation of each rank belongs to the n-th of all others."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._joined = [0] * ranks
        self._open: dict[int, dict[int, Any]] = {}

    def join(self, rank: int, value: Any, combine: Callable[[list[Any]], Any]) -> Ticket:
        """Add a rank's value to its next operation."""
        number = self._joined[rank]
        self._joined[rank] += 1
        values = self._open.setdefault(number, {})
        values[rank] = value
        if len(values) == self._ranks:
            del self._open[number]
        return _Round(values, self._ranks, combine)


class _Round(Ticket):
    def __init__(
        self, values: dict[int, Any], ranks: int, combine: Callable[[list[Any]], Any]
    ) -> None:
        self._values = values
        self._ranks = ranks
        self._combine = combine

    def ready(self) -> bool:
        return len(self._values) == self._ranks

    def wait(self) -> None:
        if not self.ready():
            missing = sorted(set(range(self._ranks)) - set(self._values))
            raise MessageError(
                f"a control operation waits for ranks {missing}, which do not take part in it"
            )

    def take(self) -> Any:
        self.wait()
        return self._combine([self._values[rank] for rank in range(self._ranks)])
