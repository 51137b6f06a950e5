"""Small messages between processes of one machine, over the pipeline's own sockets.

Gloo hands every message to another thread and back, which for a small message costs many times as much as
the message itself; tiny stages would spend most of a step on it. Here, the thread that runs the program
writes a small message straight into the other process's socket and goes on: the system buffers it until it
is read. If the socket has no room, the rest is copied, and a helper thread writes it. So a send never waits
for the receiver, and two ranks that send to each other cannot block one another.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import struct
import tempfile
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

from penstock.errors import MessageError

SMALL = 64 * 1024
"""The largest message in bytes that goes over a socket, which has room for a few of them each way."""
_FRAME = struct.Struct("=qq")  # the tag of a message, and its bytes
_HELLO = struct.Struct("=q")  # the rank that connects
_CONNECTING = 30.0  # seconds that a new connection may take to send its rank
_OPEN: weakref.WeakSet[Line] = weakref.WeakSet()


class Line:
    """Carries small messages between two ranks, in both directions; messages of one tag stay in order.

    Args:
        connection: the socket between the two ranks.
        peer: the other rank.
    """

    def __init__(self, connection: socket.socket, peer: int) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._peer = peer
        self._unsent = bytearray()
        self._lock = threading.Lock()
        self._buffer = bytearray(4 * SMALL)
        self._start = self._end = 0
        self._inbox: defaultdict[int, deque[bytes]] = defaultdict(deque)
        _OPEN.add(self)

    def send(self, tag: int, parts: Sequence[Any], size: int) -> None:
        """Write a message, or as much as there is room for; the rest is written later.

        Args:
            tag: the tag of the message.
            parts: its bytes, in buffers.
            size: the number of bytes.

        Raises:
            MessageError: the other end has gone.
        """
        message = [_FRAME.pack(tag, size), *parts]
        with self._lock:
            written = 0
            if not self._unsent:
                try:
                    written = self._connection.sendmsg(message)
                except BlockingIOError:
                    pass
                except OSError as error:
                    raise self._broken(error) from error
            if written < size + _FRAME.size:
                is_idle = not self._unsent
                self._unsent += b"".join(message)[written:]
                if is_idle:
                    threading.Thread(target=self._write, name="penstock send", daemon=True).start()

    def _write(self) -> None:
        """Write the bytes that did not fit, in a helper thread, until none are left."""
        poll = select.poll()
        with suppress(OSError, ValueError):  # a reader reports a broken connection
            poll.register(self._connection, select.POLLOUT)
            while self._unsent:
                poll.poll()
                with self._lock, suppress(BlockingIOError):
                    del self._unsent[: self._connection.send(self._unsent)]

    def receive(self, tag: int) -> bytes | memoryview:
        """Wait for the next message of a tag. The bytes are valid until the next call.

        Raises:
            MessageError: the other end has gone.
        """
        waiting = self._inbox.get(tag)
        if waiting:
            return waiting.popleft()
        while True:
            frame = self._next_frame()
            if frame is None:
                self._wait()
            elif frame[0] == tag:
                return frame[1]
            else:
                self._inbox[frame[0]].append(bytes(frame[1]))

    def _next_frame(self) -> tuple[int, memoryview] | None:
        """A message that has arrived, with its tag; None if none is complete."""
        have = self._end - self._start
        if have < _FRAME.size:
            return None
        tag, size = _FRAME.unpack_from(self._buffer, self._start)
        if have < _FRAME.size + size:
            return None
        begin = self._start + _FRAME.size
        self._start = begin + size
        return tag, memoryview(self._buffer)[begin : self._start]

    def _wait(self) -> None:
        """Wait until something can be read, and read it."""
        while not self._read():
            poll = select.poll()
            try:
                poll.register(self._connection, select.POLLIN)
                poll.poll()
            except (OSError, ValueError) as error:
                raise self._broken(error) from error

    def _read(self) -> bool:
        if self._start:
            # No message is larger than a quarter of the buffer, so moving what is left makes enough room.
            self._buffer[: self._end - self._start] = self._buffer[self._start : self._end]
            self._start, self._end = 0, self._end - self._start
        try:
            count = self._connection.recv_into(memoryview(self._buffer)[self._end :])
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._broken(error) from error
        if not count:
            raise self._broken(None)
        self._end += count
        return True

    def _broken(self, error: Exception | None) -> MessageError:
        reason = f": {error}" if error else ""
        return MessageError(f"the connection to rank {self._peer} is closed{reason}")

    def abort(self) -> None:
        """End all waits on this line, at both ends; may be called from any thread."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end."""
        self._connection.close()


def connect_lines(
    rank: int, ranks: int, exchange: Callable[[Any], list[Any]], most: int = 16
) -> dict[int, Line]:
    """Connect all pairs of ranks, if all are processes of one machine.

    All ranks call this together. If any pair cannot be connected, as between machines or containers that
    share no folder, there are no lines at all; nor with more than ``most`` ranks.

    Args:
        rank: this rank.
        ranks: the number of ranks.
        exchange: exchanges JSON values between all ranks.
        most: the largest number of ranks that are connected.

    Returns:
        This rank's lines, by the rank at the other end.
    """
    if not 1 < ranks <= most:
        return {}
    listener, folder = _listen()
    try:
        folders = exchange(folder)
        lines = {peer: line for peer in range(rank) if (line := _call(folders[peer], rank, peer))}
        connected = {
            (peer, upper) for upper, row in enumerate(exchange(list(lines))) for peer in row
        }
        for _ in [pair for pair in connected if pair[0] == rank]:
            lines.update([_accept(listener)])
    finally:
        if listener is not None:
            listener.close()
            shutil.rmtree(folder, ignore_errors=True)
    if not connected.issuperset(combinations(range(ranks), 2)):
        # Collectives use lines among all ranks, or none.
        for line in lines.values():
            line.close()
        return {}
    return lines


def _listen() -> tuple[Any, str]:
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


def _call(folder: str, rank: int, peer: int) -> Line | None:
    """Make a line from the upper rank's end; None if that fails."""
    connection = None
    try:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(Path(folder) / "line"))
        connection.sendall(_HELLO.pack(rank))
    except (OSError, AttributeError):
        if connection is not None:
            connection.close()
        return None
    return Line(connection, peer)


def _accept(listener: Any) -> tuple[int, Line]:
    """Accept a line at the lower rank's end."""
    listener.settimeout(_CONNECTING)
    connection, _ = listener.accept()
    connection.settimeout(_CONNECTING)
    (peer,) = _HELLO.unpack(connection.recv(_HELLO.size, socket.MSG_WAITALL))
    return peer, Line(connection, peer)


def _close_all() -> None:
    for line in list(_OPEN):
        line.close()


if hasattr(os, "register_at_fork"):
    # In a forked process, an end that stayed open would hide the death of the rank.
    os.register_at_fork(after_in_child=_close_all)
