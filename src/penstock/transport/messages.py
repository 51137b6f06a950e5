"""How a message gets from one process to another: a few tensors of known shapes, the small ones as one.

Both ends know from the agreed specs how large a message is, and so which way it travels.

*Small ones* go over sockets of the pipeline's own, between processes of one machine. Gloo hands every message
to a thread of its own and back again. For a small one that costs many times what the message does, and tiny
stages spend most of a step on it. Here the thread that runs the schedule writes a small message straight into
the other process's socket and goes on: the system keeps it until it is read. What finds no room there is
copied, and written by a helper thread. So a send never waits for the receiver, which may be waiting for
something else, and two ranks that send to each other cannot block one another.

*All others* go over gloo. A receive's buffers and a send's tensors are used on the stream that is current at
the post, and the waits are on that stream too: on GPUs a wait holds up that stream, not the host, and memory
that is given back after it is safe to use again.
"""

from __future__ import annotations

import shutil
import socket
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import MessageError
from penstock.faults import this_host
from penstock.transport.base import KINDS, Channel, Ticket
from penstock.values import TensorSpec, settled

# ---- small messages, over sockets


EAGER = 64 * 1024
"""Bytes up to which a message travels here; the system has room for a few of these in each direction."""

Ends: TypeAlias = tuple[int, int, str]
"""The two ranks of a line, the lower first, and the kind of its messages."""

_HEADER = struct.Struct("=QQ")
"""How many bytes a message has, and how many messages went before it in its direction."""
_HELLO = struct.Struct("=QQ")
"""Who connects, and for which kind of messages."""
_MEETING = 30.0
"""Seconds that a connection that was made may take to say whose it is."""


class Line:
    """What carries the small messages of one kind between two ranks, in both directions.

    Args:
        connection: the two ranks' own.
        peer: the other one.
    """

    def __init__(self, connection: socket.socket, peer: int) -> None:
        self._connection = connection
        self._peer = peer
        self._sent = 0
        self._received = 0
        self._expected: deque[Arriving] = deque()
        self._backlog: deque[tuple[bytes, Leaving]] = deque()
        self._lock = threading.Lock()

    def send(self, tensors: Sequence[Tensor], size: int, keep: set[Any]) -> Ticket:
        """Write a message, or let it be written; what is still to be written is kept among others.

        Raises:
            MessageError: the other end is gone.
        """
        parts = [_HEADER.pack(size, self._sent), *_memory(tensors)]
        self._sent += 1
        done = 0
        if not self._backlog:
            try:
                done = self._connection.sendmsg(parts, (), _DONTWAIT)
            except BlockingIOError:
                pass
            except OSError as error:
                raise self._broken(error) from error
        if done < size + _HEADER.size:
            self._write_later(b"".join(_behind(parts, done)), keep)
        return _LEFT

    def _write_later(self, data: bytes, keep: set[Any]) -> None:
        with self._lock:
            self._backlog.append((data, Leaving(keep)))
            if len(self._backlog) == 1:
                threading.Thread(target=self._write_all, name="penstock send", daemon=True).start()

    def _write_all(self) -> None:
        """In a thread of its own: write until nothing is left."""
        while True:
            data, ticket = self._backlog[0]
            failure: MessageError | None = None
            try:
                self._connection.sendall(data)
            except OSError as error:
                failure = self._broken(error)
            ticket.left(failure)
            with self._lock:
                self._backlog.popleft()
                if not self._backlog:
                    return

    def receive(self, tensors: list[Tensor]) -> Arriving:
        """Expect a message into these tensors, after all that is expected already."""
        ticket = Arriving(self, tensors)
        self._expected.append(ticket)
        return ticket

    def read(self, wanted: Arriving, *, block: bool) -> bool:
        """Read until a message is there, the earlier ones before; whether it is.

        Raises:
            MessageError: the other end is gone, or has sent something else.
        """
        while not wanted.is_here:
            if not self._read_into(self._expected[0].tensors, block=block):
                return False
            self._expected.popleft().is_here = True
        return True

    def _read_into(self, tensors: Sequence[Tensor], *, block: bool) -> bool:
        header = bytearray(_HEADER.size)
        parts = [memoryview(header), *_memory(tensors)]
        found = 0
        while parts:
            try:
                count = self._connection.recvmsg_into(parts, 0, 0 if block else _DONTWAIT)[0]
            except BlockingIOError:
                return False
            except OSError as error:
                raise self._broken(error) from error
            if not count:
                raise self._broken(None)
            # What has begun to arrive is about to be there.
            block = True
            found += count
            parts = _behind(parts, count)
        expected = found - _HEADER.size, self._received
        if _HEADER.unpack(header) != expected:
            raise MessageError(
                f"rank {self._peer} sent a message (bytes, number) {_HEADER.unpack(header)} where "
                f"{expected} was agreed on"
            )
        self._received += 1
        return True

    def _broken(self, error: OSError | None) -> MessageError:
        told = f": {error.strerror or error}" if error else ""
        return MessageError(f"the connection to rank {self._peer} is closed at its end{told}")

    def cut(self) -> None:
        """End all waits on it, at both ends; from whichever thread."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back; what was sent can still be read."""
        self._connection.close()


_DONTWAIT = getattr(socket, "MSG_DONTWAIT", 0)


class _Left(Ticket):
    """A message that has been handed on, and whose tensors may change."""

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing is to be waited for."""

    def take(self) -> None:
        """Nothing arrives here."""


_LEFT = _Left()


class Leaving(Ticket):
    """A message that found no room and is being written."""

    def __init__(self, keep: set[Any]) -> None:
        self._keep = keep
        self._failure: MessageError | None = None
        self._done = threading.Event()
        keep.add(self)

    def left(self, failure: MessageError | None) -> None:
        """It has been written, or cannot be."""
        self._failure = failure
        self._done.set()

    def ready(self) -> bool:
        """Whether it has left."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait until it has."""
        self._done.wait()
        self._keep.discard(self)
        if self._failure is not None:
            raise self._failure

    def take(self) -> None:
        """Wait; nothing arrives here."""
        self.wait()


class Arriving(Ticket):
    """A message that is expected."""

    def __init__(self, line: Line, tensors: list[Tensor]) -> None:
        self.is_here = False
        self.tensors = tensors
        self._line = line

    def ready(self) -> bool:
        """Whether it is here, or can be read at once."""
        return self.is_here or self._line.read(self, block=False)

    def wait(self) -> None:
        """Wait until it is here."""
        self._line.read(self, block=True)

    def take(self) -> list[Tensor]:
        """The tensors, once."""
        self.wait()
        tensors, self.tensors = self.tensors, []
        return tensors


def _memory(tensors: Iterable[Tensor]) -> list[Any]:
    """The memory of contiguous tensors; of those that have some."""
    return [
        tensor.numpy()
        if tensor.dtype in _PLAIN
        # NumPy knows no bfloat16 and none of the small floating-point types.
        else tensor.view(-1).view(torch.uint8).numpy()
        for tensor in tensors
        if tensor.numel()
    ]


_PLAIN = {torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool}


def _behind(parts: Sequence[Any], done: int) -> list[memoryview]:
    """What is left of a message's memory after its first bytes."""
    left = []
    for part in parts:
        view = memoryview(part).cast("B")
        if done < len(view):
            left.append(view[done:])
        done = max(0, done - len(view))
    return left


# ---- connections


def connect_lines(
    rank: int, wanted: Iterable[Ends], agree: Callable[[Any], list[Any]]
) -> tuple[dict[Ends, Line], set[Ends]]:
    """Connect pairs of ranks, where they are processes of one machine.

    All ranks of a pipeline call this together, with the same pairs. Where no connection can be made, as
    between containers that share no folder, there is no line.

    Args:
        rank: this one.
        wanted: of all ranks.
        agree: gives each rank what all have passed to it.

    Returns:
        The lines of this rank; and the ends of those of all ranks.
    """
    wanted = sorted(wanted)
    if not wanted:
        return {}, set()
    listener, folder = _listen()
    try:
        told = agree([this_host(), folder])
        mine = [ends for ends in wanted if ends[1] == rank and told[ends[0]][0] == this_host()]
        lines = {ends: line for ends in mine if (line := _called(told[ends[0]][1], ends))}
        made: set[Ends] = {tuple(ends) for of_one in agree(list(lines)) for ends in of_one}
        for _ in [ends for ends in made if ends[0] == rank]:
            ends, line = _accepted(listener, rank)
            lines[ends] = line
        return lines, made
    finally:
        if listener is not None:
            listener.close()
            shutil.rmtree(folder, ignore_errors=True)


def ends_of(channel: Channel) -> Ends:
    """The ends of a channel's line."""
    return min(channel[:2]), max(channel[:2]), channel.kind


def _listen() -> tuple[socket.socket | None, str]:
    """A socket in a folder that only this user may enter; none where there can be none."""
    folder = tempfile.mkdtemp(prefix="penstock-")
    listener = None
    try:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(Path(folder) / "line"))
        listener.listen(socket.SOMAXCONN)
    except (OSError, AttributeError):
        # The path may be too long for a socket, and not every system has such sockets.
        if listener is not None:
            listener.close()
        shutil.rmtree(folder, ignore_errors=True)
        return None, ""
    return listener, folder


def _called(folder: str, ends: Ends) -> Line | None:
    """The upper rank's end of a line."""
    connection = None
    try:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(Path(folder) / "line"))
        connection.sendall(_HELLO.pack(ends[1], KINDS.index(ends[2])))
    except (OSError, AttributeError):
        if connection is not None:
            connection.close()
        return None
    return Line(connection, ends[0])


def _accepted(listener: Any, rank: int) -> tuple[Ends, Line]:
    """The lower rank's end of a line that the upper one has made."""
    listener.settimeout(_MEETING)
    connection, _ = listener.accept()
    connection.settimeout(_MEETING)
    hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
    connection.settimeout(None)
    peer, kind = _HELLO.unpack(hello)
    return (rank, peer, KINDS[kind]), Line(connection, peer)


# ---- all others, over gloo


NOBODY = 0x4F
"""The tag of a message that nobody sends, see :func:`break_off`."""
SMALL = 32 * 1024
"""Bytes up to which copying a tensor costs less than sending it by itself."""


def connect_all(store: Any, rank: int, ranks: int, wait: float, timeout: float) -> Any:
    """Connect the ranks of a pipeline with each other over gloo; all of them call this together.

    Not by ``new_group``, which gives a part of the world the name of its last group again when that was
    ended: its members then find the addresses of that one.

    Args:
        store: one that only this meeting of theirs has.
        rank: this process's.
        ranks: how many there are.
        wait: seconds that they may take.
        timeout: seconds for each operation on what is made.

    Returns:
        A ``ProcessGroupGloo``; the stubs of torch do not tell its methods.

    Raises:
        MessageError: a rank ended, or did not come in time.
    """
    try:
        made = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=wait))
    except RuntimeError as error:
        raise MessageError(
            f"rank {rank} waits for all {ranks} ranks to make their pipeline: {error}\n"
            "another rank may say why it stopped"
        ) from error
    made.set_timeout(timedelta(seconds=timeout))
    return made


def break_off(group: Any) -> None:
    """Close the connections of a gloo group: a receive that is not served in time does that to all.

    From whom does not matter, unless that one is gone: then the receive is refused, and closes nothing.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([torch.zeros(1)], peer, NOBODY).wait(timedelta(milliseconds=1))


class Wire(NamedTuple):
    """How to reach the other end of a channel; small messages go over the line, where there is one."""

    # A ProcessGroup, or a ProcessGroupGloo, whose methods torch's stubs do not tell.
    group: Any
    peer: int
    tag: int
    line: Line | None = None

    def send(self, tensors: Sequence[Tensor], keep: set[Any]) -> Ticket:
        """Start to send; the ticket is kept among others until it is complete."""
        plain = [settled(tensor) for tensor in tensors]
        if self.line is not None and 0 < (size := _size(plain)) <= EAGER:
            return self.line.send(plain, size, keep)
        parcels = _pack(plain)
        works = [self.group.send([parcel], self.peer, self.tag) for parcel in parcels]
        return GlooDeparture(works, parcels, keep)

    def receive(self, specs: Sequence[TensorSpec], device: torch.device) -> Ticket:
        """Start to receive into new buffers."""
        tensors = [spec.empty(device) for spec in specs]
        if self.line is not None and 0 < _size(tensors) <= EAGER:
            return self.line.receive(tensors)
        small, large = _split(tensors)
        parcels = [_parcel_for(small), *large] if small else large
        works = [self.group.recv([parcel], self.peer, self.tag) for parcel in parcels]
        return GlooArrival(works, tensors, (parcels[0], small) if small else None)


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


class GlooDeparture(Ticket):
    """Sends under way, with what they send. Gloo tells only by a wait whether they are complete."""

    def __init__(self, works: list[dist.Work], parcels: list[Tensor], keep: set[Any]) -> None:
        self._works = works
        self._parcels = parcels
        self._keep = keep
        keep.add(self)

    def ready(self) -> bool:
        """Whether it was waited for."""
        return not self._works

    def wait(self) -> None:
        """Wait, and let go of the tensors."""
        for work in self._works:
            work.wait()
        self._works, self._parcels = [], []
        self._keep.discard(self)

    def take(self) -> None:
        """Wait; nothing arrives here."""
        self.wait()


Packed = tuple[Tensor, list[Tensor]]
"""A parcel, and the tensors it is for."""


class GlooArrival(Ticket):
    """Receives under way. Gloo tells only by a wait whether they are complete."""

    def __init__(
        self, works: list[dist.Work], tensors: list[Tensor], packed: Packed | None
    ) -> None:
        self._works = works
        self._tensors = tensors
        self._packed = packed

    def ready(self) -> bool:
        """Whether it was waited for."""
        return not self._works

    def wait(self) -> None:
        """Wait, and take parcels apart."""
        for work in self._works:
            work.wait()
        self._works = []
        if self._packed is not None:
            _unpack(*self._packed)
            self._packed = None

    def take(self) -> list[Tensor]:
        """The tensors, once."""
        self.wait()
        tensors, self._tensors = self._tensors, []
        return tensors


def _split(tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that travel together, and those that travel alone; what is empty does not travel."""
    there = [tensor for tensor in tensors if tensor.numel()]
    small = [t for t in there if t.nbytes <= SMALL] if len(there) > 1 else []
    if len(small) < 2:
        return [], there
    return small, [tensor for tensor in there if tensor.nbytes > SMALL]


def _pack(tensors: list[Tensor]) -> list[Tensor]:
    small, large = _split(tensors)
    return [torch.cat([_bytes_of(tensor) for tensor in small]), *large] if small else large


def _parcel_for(tensors: list[Tensor]) -> Tensor:
    size = sum(tensor.nbytes for tensor in tensors)
    return torch.empty(size, dtype=torch.uint8, device=tensors[0].device)


def _unpack(parcel: Tensor, tensors: list[Tensor]) -> None:
    """Copy, so that the tensors share no memory, and with it no count of changes in place."""
    parts: Any = parcel.split([tensor.nbytes for tensor in tensors])
    for part, tensor in zip(parts, tensors, strict=True):
        _bytes_of(tensor).copy_(part)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
