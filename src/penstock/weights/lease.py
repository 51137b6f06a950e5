"""One writer for a folder: a lock of the system, and a lease that its owner renews.

The system's lock ends with its process, but some file systems have no locks, or keep them on each host. So
the locked file also holds a lease: whose it is, and a count that grows while the owner lives. Where the lock
does not say enough, another process takes the folder only if the count has stood still for some time of its
own clock; clocks of other hosts are not read. An owner looks at the lease before it publishes or removes.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import ClassVar, NamedTuple
from weakref import WeakValueDictionary

from penstock.errors import CheckpointError, UsageError, shortened
from penstock.weights.storage import patiently

try:
    import fcntl
except ImportError:  # on Windows, where the lease alone must do
    fcntl = None  # type: ignore[assignment]

_PLAINLY = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"))
"""Follow no link, whose target would be locked and overwritten; wait for nothing."""
LOCK = ".lock"
RENEWAL = 2.0
"""Seconds between two renewals of a lease."""
PATIENCE = 10.0
"""Seconds without a renewal after which the owner of a lease is taken to have ended."""
_POLL = 0.1
_TEXT = re.compile(r"(.{1,400}), run (\w+) of (\S+), renewed (\d+) times\n")


@cache
def _machine() -> str:
    """This machine, since it was started."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


class _Held(NamedTuple):
    """What a lease says: its owner in words, its run, its machine, and how often it was renewed."""

    owner: str
    run: str
    machine: str
    renewed: str


_NOTHING = _Held("", "", "", "")


class Lease:
    """The right of this process to write into a folder; all writers of the process share it.

    The last one to drop it gives the folder back. It uses ``flock``: a lock of ``lockf`` would be lost as
    soon as anything in this process reads and closes the file.
    """

    _here: ClassVar[WeakValueDictionary[Path, Lease]] = WeakValueDictionary()

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._handle = -1
        self._run = os.urandom(6).hex()
        self._since = f"process {os.getpid()} on {socket.gethostname()}, since {time.ctime()}"
        self._count = 0
        self._busy = threading.Lock()

    @classmethod
    def of(cls, folder: Path, clean: Callable[[], None] = lambda: None) -> Lease:
        """Take a folder, or share this process's lease of it.

        Args:
            folder: the folder.
            clean: removes what an earlier owner has left; called if the folder is newly taken.

        Raises:
            UsageError: another run has it.
            StorageError: the folder cannot be written to.
        """
        folder = folder.resolve()
        shared = cls._here.get(folder)
        if shared is not None and shared.is_ours():
            return shared
        lease = cls(folder)
        lease._take()
        cls._here[folder] = lease
        clean()
        renewing = threading.Thread(target=_renew, args=(weakref.ref(lease),), daemon=True)
        renewing.name = "penstock-lease"
        renewing.start()
        return lease

    # ---- take

    def _take(self) -> None:
        started, seen = time.monotonic(), _NOTHING
        while True:
            lock = patiently("written to", self._path.parent, self._open)
            held = self._read()
            is_due = time.monotonic() - started >= PATIENCE
            if lock is False:
                if is_due:
                    raise self._refusal(held)
            elif held is None or (lock and held.machine == _machine()) or (held == seen and is_due):
                if self._write_first(in_place=lock is True):
                    return
            elif seen not in (_NOTHING, held):
                # It was renewed while this process watched.
                raise self._refusal(held)
            elif seen == _NOTHING:
                started, seen = time.monotonic(), held
            self._close()
            time.sleep(_POLL)

    def _open(self) -> bool | None:
        """Open and lock the file: whether it is locked now, or None if the file system has no locks."""
        self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | _PLAINLY, 0o666)
        status = os.fstat(self._handle)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            self._close()
            raise CheckpointError(
                f"{self._path} is not a file of its own, such as a link; remove it"
            )
        if fcntl is None:
            return None
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            is_held = error.errno in (errno.EAGAIN, errno.EACCES)
            return False if is_held else None
        return True

    def _write_first(self, *, in_place: bool) -> bool:
        """Write the lease; return whether the file of this path is now this process's."""
        if not in_place:
            # Nobody's lock is in the way, so let the earlier owner find another file.
            partial = self._path.with_name(f"{LOCK}-{self._run}")
            self._close()
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _PLAINLY
            self._handle = patiently("written", partial, lambda: os.open(partial, flags, 0o666))
            self._write()
            os.replace(partial, self._path)
            time.sleep(_POLL)
        else:
            os.truncate(self._handle, 0)
            self._write()
        return self.is_ours()

    def _write(self) -> None:
        # Always of one length, so that a reader finds a whole line.
        text = f"{self._since}, run {self._run} of {_machine()}, renewed {self._count:012d} times\n"
        os.lseek(self._handle, 0, os.SEEK_SET)
        os.write(self._handle, text.encode())
        with suppress(OSError):
            os.fsync(self._handle)

    def _refusal(self, held: _Held | None) -> UsageError:
        self._close()
        owner = "it has locked it" if held is None else shortened(held.owner)
        return UsageError(
            f"{self._path.parent}: another run writes here ({owner}); give each run a folder of its own, or "
            "end the other one. If it is a process of this run, give penstock.Checkpoints(group=...) the "
            "group of all its processes"
        )

    # ---- hold

    def _read(self) -> _Held | None:
        """What the file of this path says; None if nobody has the folder."""

        def read() -> bytes:
            # Opened anew, so that file systems between hosts look whether it has changed.
            try:
                handle = os.open(self._path, os.O_RDONLY | _PLAINLY)
            except FileNotFoundError:
                return b""
            try:
                return os.read(handle, 1000)
            finally:
                os.close(handle)

        text = _TEXT.fullmatch(patiently("read", self._path, read).decode(errors="replace"))
        return None if text is None else _Held(*text.groups())

    def is_ours(self) -> bool:
        """Whether the folder is still this process's."""
        if self._handle < 0:
            return False
        held = self._read()
        return held is not None and held.run == self._run

    def check(self) -> None:
        """Check that the folder is still this process's.

        Raises:
            UsageError: another run has taken it.
        """
        if not self.is_ours():
            raise self._refusal(self._read())

    def renew(self) -> None:
        """Let others see that the owner lives."""
        # A failure is not the end of a lease: the owner looks before it changes anything.
        with suppress(OSError), self._busy:
            if self.is_ours():
                self._count += 1
                self._write()

    def release(self, *, remove: bool = False) -> None:
        """Give the folder back.

        Args:
            remove: whether to remove the file.
        """
        with self._busy:
            with suppress(OSError):
                self._give_back(remove=remove)
            self._close()

    def _give_back(self, *, remove: bool) -> None:
        if not self.is_ours():
            return
        if remove:
            self._path.unlink(missing_ok=True)
        os.truncate(self._handle, 0)

    def __del__(self) -> None:
        if os is not None:  # as it is at the end of the process
            self.release()

    def _close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    @classmethod
    def forget(cls) -> None:
        """In a forked child, drop the parent's locks: otherwise they would last as long as the child."""
        for lease in list(cls._here.values()):
            lease._close()


def _renew(reference: weakref.ref[Lease]) -> None:
    """Renew a lease until nothing refers to it."""
    while (lease := reference()) is not None and lease._handle >= 0:
        lease.renew()
        del lease
        time.sleep(RENEWAL)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Lease.forget)
