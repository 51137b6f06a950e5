"""How a message, which is a few tensors of known shapes, gets from one process to another.

Both ends know from the agreed specs how large a message is, and so which way it travels.

*Small messages* between processes of one machine go over sockets of the pipeline's own. Gloo hands every
message to another thread and back, which for a small message costs many times as much as the message
itself; tiny stages would spend most of a step on it. Here, the thread that runs the schedule writes a small
message straight into the other process's socket and goes on: the system keeps it until it is read. If the
socket has no room, the message is copied, and a helper thread writes it. So a send never waits for the
receiver, which may be waiting for something else, and two ranks that send to each other cannot block one
another.

*All other messages* go over gloo or NCCL. A receive's buffers and a send's tensors are used on the stream
that is current when they are posted, and waits are on that stream too. On GPUs a wait therefore holds up
the stream and not the host, and memory that is freed after the wait is safe to reuse.
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
"""The largest message in bytes that goes over a socket, which has room for a few of them each way."""

Ends: TypeAlias = tuple[int, int, str]
"""The two ranks that a line connects, the lower one first, and the kind of its messages."""

_HEADER = struct.Struct("=QQ")
"""The bytes of a message, and how many messages went before it in the same direction."""
_HELLO = struct.Struct("=QQ")
"""The rank that connects, and the kind of messages."""
_MEETING = 30.0
"""Seconds that a new connection may take to say whose it is."""


class Line:
    """Carries the small messages of one kind between two ranks, in both directions.

    Args:
        connection: the socket between the two ranks.
        peer: the other rank.
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
        """Write a message, or have it written later; ``keep`` then holds it until it has left.

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
        """Write until nothing is left, in a helper thread."""
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
        """Expect a message into these tensors, after all messages that are already expected."""
        ticket = Arriving(self, tensors)
        self._expected.append(ticket)
        return ticket

    def read(self, wanted: Arriving, *, block: bool) -> bool:
        """Read until a message is there, after the earlier ones; returns whether it is.

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
            # Once a message has begun to arrive, the rest of it will come at once.
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
        """End all waits on this line, at both ends; may be called from any thread."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; what was sent can still be read."""
        self._connection.close()


_DONTWAIT = getattr(socket, "MSG_DONTWAIT", 0)


class _Left(Ticket):
    """A message that was written; its tensors may change."""

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        """There is nothing to wait for."""

    def take(self) -> None:
        """Nothing arrives here."""


_LEFT = _Left()


class Leaving(Ticket):
    """A message that found no room and is being written by a helper thread."""

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
    """The memory of contiguous tensors that are not empty."""
    return [
        tensor.numpy()
        if tensor.dtype in _PLAIN
        # NumPy has no bfloat16 and no smaller floating-point types.
        else tensor.view(-1).view(torch.uint8).numpy()
        for tensor in tensors
        if tensor.numel()
    ]


_PLAIN = {torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool}


def _behind(parts: Sequence[Any], done: int) -> list[memoryview]:
    """What is left of a message after its first ``done`` bytes."""
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
    """Connect pairs of ranks that are processes of one machine.

    All ranks of a pipeline call this together, with the same pairs. If a connection cannot be made, as
    between containers that share no folder, there is no line.

    Args:
        rank: this rank.
        wanted: the ends of the lines of all ranks.
        agree: exchanges values between all ranks.

    Returns:
        The lines of this rank, and the ends of the lines that were made by all ranks.
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
    """A socket in a folder that only this user may enter; None if it cannot be made."""
    folder = tempfile.mkdtemp(prefix="penstock-")
    listener = None
    try:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(Path(folder) / "line"))
        listener.listen(socket.SOMAXCONN)
    except (OSError, AttributeError):
        # The path may be too long for a socket, and not every system has Unix sockets.
        if listener is not None:
            listener.close()
        shutil.rmtree(folder, ignore_errors=True)
        return None, ""
    return listener, folder


def _called(folder: str, ends: Ends) -> Line | None:
    """Make a line from the upper rank's end."""
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
    """Accept a line at the lower rank's end."""
    listener.settimeout(_MEETING)
    connection, _ = listener.accept()
    connection.settimeout(_MEETING)
    hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
    connection.settimeout(None)
    peer, kind = _HELLO.unpack(hello)
    return (rank, peer, KINDS[kind]), Line(connection, peer)


# ---- all other messages, over gloo or NCCL


NOBODY = 0x4F
"""The tag of a message that nobody sends, see :func:`break_off`."""
SMALL = 32 * 1024
"""The largest tensor in bytes that is cheaper to copy into a common parcel than to send by itself."""


def connect_all(store: Any, rank: int, ranks: int, wait: float, timeout: float) -> Any:
    """Connect the ranks of a pipeline with each other over gloo; all of them call this together.

    ``new_group`` will not do: for a part of the world it uses the name of an earlier, ended group again,
    and its members then find the addresses of that group.

    Args:
        store: a store that only this set-up uses.
        rank: the rank of this process.
        ranks: the number of ranks.
        wait: seconds that connecting may take.
        timeout: seconds for each operation of the group.

    Returns:
        A ``ProcessGroupGloo``, whose methods torch's stubs do not declare.

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
    """Close the connections of a gloo group. A receive that times out closes all of them.

    It may be from any peer that is not gone: from one that is, the receive is refused and closes nothing.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([torch.zeros(1)], peer, NOBODY).wait(timedelta(milliseconds=1))


class Wire(NamedTuple):
    """How to reach the other end of a channel. Small messages go over the line, if there is one."""

    # A ProcessGroup, or a ProcessGroupGloo, whose methods torch's stubs do not declare.
    group: Any
    peer: int
    tag: int
    line: Line | None = None

    def send(self, tensors: Sequence[Tensor], keep: set[Any]) -> Ticket:
        """Start to send; ``keep`` holds the ticket until it is complete."""
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
    """Sends under way, with their tensors. Gloo shows only in a wait whether they are complete."""

    def __init__(self, works: list[dist.Work], parcels: list[Tensor], keep: set[Any]) -> None:
        self._works = works
        self._parcels = parcels
        self._keep = keep
        keep.add(self)

    def ready(self) -> bool:
        """Whether it was waited for."""
        return not self._works

    def wait(self) -> None:
        """Wait, and drop the tensors."""
        for work in self._works:
            work.wait()
        self._works, self._parcels = [], []
        self._keep.discard(self)

    def take(self) -> None:
        """Wait; nothing arrives here."""
        self.wait()


Packed = tuple[Tensor, list[Tensor]]
"""A parcel, and the tensors that it is for."""


class GlooArrival(Ticket):
    """Receives under way. Gloo shows only in a wait whether they are complete."""

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
    """The tensors that travel together in a parcel, and those that travel alone; empty ones do not travel."""
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
    """Copy out of a parcel, so that the tensors share neither memory nor a version counter."""
    parts: Any = parcel.split([tensor.nbytes for tensor in tensors])
    for part, tensor in zip(parts, tensors, strict=True):
        _bytes_of(tensor).copy_(part)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
