"""The folder of a run's checkpoints: how they are found, appear and go, and who may write there.

A checkpoint is a folder ``step-<number>`` with a table and a file of tensors for each process that wrote. It
is written as ``.writing-…`` beside the others, flushed to disk, and renamed when everything is there: what
has the name of a checkpoint is complete. For the same reason an old one is renamed before it is removed.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from penstock.checkpoint.table import TABLE, read_head, write_table
from penstock.errors import CheckpointError, InputFileError, UsageError

try:
    import fcntl
except ImportError:  # a system without these locks: there a second run is not noticed
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
PATIENCE = 5.0
"""How many seconds to wait for the run before this one to end, as when a launcher restarts all processes."""
_NAME = re.compile(r"step-(\d{1,18})(-\d{1,9})?")


class CheckpointFolder(NamedTuple):
    """A checkpoint in a folder.

    Attributes:
        path: its own folder.
        serial: how many were written before it into the same folder; -1 if its table is damaged.
        step: the step at which it was saved.
    """

    path: Path
    serial: int
    step: int


def find(folder: Path) -> list[CheckpointFolder]:
    """The checkpoints of a folder, the latest first; those with damaged tables come last."""
    checkpoints = []
    for path in folder.iterdir() if folder.is_dir() else ():
        name = _NAME.fullmatch(path.name)
        if name is None or not path.is_dir():
            continue
        try:
            serial, step, _ = read_head(path / TABLE)
            checkpoints.append(CheckpointFolder(path, serial, step))
        except InputFileError:
            checkpoints.append(CheckpointFolder(path, -1, int(name[1])))
    return sorted(checkpoints, key=lambda one: (one.serial, one.step), reverse=True)


class Writer:
    """Makes checkpoints appear in a folder; only one process of a run does.

    Args:
        folder: the folder; it is made if necessary.
        keep: how many checkpoints to keep; None keeps all.
    """

    def __init__(self, folder: Path, keep: int | None) -> None:
        self._folder = folder
        self._keep = keep
        self._lock: Lock | None = None

    def begin(self, step: int) -> Path:
        """Make a new folder for the files of a checkpoint.

        Raises:
            UsageError: another run writes into the folder of checkpoints.
            CheckpointError: it cannot be made.
        """
        self.hold()
        path = self._folder / f".writing-{step}-{os.urandom(6).hex()}"
        try:
            path.mkdir()
        except OSError as error:
            raise _unwritable(self._folder, error) from error
        return path

    def hold(self) -> None:
        """Lock the folder of checkpoints, and remove what killed runs have left there.

        Raises:
            UsageError: another run writes into it.
            CheckpointError: it cannot be written to.
        """
        if self._lock is not None and self._lock.is_in_place():
            return
        self.close()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = Lock.of(self._folder / LOCK)
            for kind in ("writing", "removing") if self._lock.holders == 1 else ():
                for path in self._folder.glob(f".{kind}-*"):
                    shutil.rmtree(path, ignore_errors=True)
        except OSError as error:
            raise _unwritable(self._folder, error) from error

    def publish(self, written: Path, step: int, contents: Mapping[str, Any]) -> Path:
        """Make a checkpoint visible whose other files are all there, and remove old ones.

        Args:
            written: its folder, which :meth:`begin` has made.
            step: its step.
            contents: of its table.

        Returns:
            Its final folder.

        Raises:
            CheckpointError: it cannot be written.
        """
        before = find(self._folder)
        serial = max((one.serial for one in before), default=-1) + 1
        try:
            write_table(written / TABLE, contents, serial, step)
            _sync(written)
            place, count = self._folder / f"step-{step:08d}", 1
            while place.exists():
                count += 1
                place = self._folder / f"step-{step:08d}-{count}"
            written.rename(place)
            _sync(self._folder)
        except OSError as error:
            raise CheckpointError(
                f"{self._folder}: the checkpoint of step {step} cannot be written: {error.strerror or error}"
            ) from error
        # The new one replaces older ones, and one of the same step.
        others = [one for one in before if one.step != step]
        kept = others if self._keep is None else others[: self._keep - 1]
        for one in before:
            if one not in kept:
                _remove(one.path)
        return place

    def close(self) -> None:
        """Let another run write here."""
        lock, self._lock = self._lock, None
        if lock is not None and lock.holders:
            lock.release()


def _unwritable(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{folder} cannot be written to: {error.strerror or error}")


def _remove(path: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that no part of one ever has that name."""
    hidden = path.with_name(f".removing-{path.name}-{os.urandom(4).hex()}")
    with suppress(OSError):
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Lock:
    """The lock of a folder, which the system releases when this process ends, however it does.

    It is one of ``flock``: a lock of ``lockf`` would be lost as soon as anything in this process reads and
    closes the file. Objects of one process share it, and forked children let go of it.
    """

    _held: ClassVar[dict[Path, Lock]] = {}

    def __init__(self, path: Path, handle: int) -> None:
        self._path = path
        self._handle = handle
        self.holders = 1

    @classmethod
    def of(cls, path: Path) -> Lock:
        """Take the lock, or a share of this process's.

        Raises:
            UsageError: another process has it.
            OSError: the file cannot be made.
        """
        path = path.parent.resolve() / path.name
        if path in cls._held and cls._held[path].is_in_place():
            cls._held[path].holders += 1
            return cls._held[path]
        until = time.monotonic() + PATIENCE
        while True:
            lock = cls(path, _open_lock(path))
            # Another one may have put a new file there before this one was locked.
            if (taken := _try_lock(lock._handle)) and lock.is_in_place():
                break
            holder = os.read(lock._handle, 200).decode(errors="replace").strip()
            os.close(lock._handle)
            if not taken and time.monotonic() > until:
                raise UsageError(
                    f"{path.parent}: another run writes its checkpoints here ({holder}); give each run "
                    "a folder of its own, or end the other one. If it is a process of this run, give "
                    "penstock.Checkpoints(group=...) the group of all its processes"
                )
            time.sleep(0.1)
        os.truncate(lock._handle, 0)
        text = f"process {os.getpid()} on {socket.gethostname()}, since {time.ctime()}\n"
        os.write(lock._handle, text.encode())
        cls._held[path] = lock
        return lock

    def is_in_place(self) -> bool:
        """Whether this process has it, and its file is the one that others would lock."""
        try:
            return os.path.samestat(os.fstat(self._handle), os.lstat(self._path))
        except OSError:
            return False

    def release(self) -> None:
        """Give up the lock, if nobody else in this process needs it."""
        self.holders -= 1
        if not self.holders:
            if self._held.get(self._path) is self:
                del self._held[self._path]
            os.close(self._handle)

    @classmethod
    def forget(cls) -> None:
        """In a forked child, let go of the parent's locks: otherwise they would last as long as the child."""
        for lock in cls._held.values():
            os.close(lock._handle)
            lock._handle, lock.holders = -1, 0
        cls._held.clear()


os.register_at_fork(after_in_child=Lock.forget)


def _open_lock(path: Path) -> int:
    """Open the file of a lock, which must be no link: what that leads to would be locked and overwritten."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    # Not a file object, which would warn that it was never closed: it stays open on purpose.
    handle = os.open(path, flags, 0o666)
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(handle)
        raise CheckpointError(f"{path} is not a file of its own, such as a link; remove it")
    return handle


def _try_lock(handle: int) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        pass  # a file system without locks
    return True
