"""The folder of a run's checkpoints: find, publish and remove them, and lock the folder.

A checkpoint is a folder ``step-<number>`` with a table and a file of tensors for each process that wrote. It
is written as ``.writing-…`` next to the others, flushed to disk, and renamed when it is complete, so that
no partial one has a checkpoint's name. For the same reason an old one is renamed before it is removed.
"""

from __future__ import annotations

import fcntl
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
from weakref import WeakValueDictionary

from penstock.checkpoint.table import TABLE, read_head, write_table
from penstock.errors import CheckpointError, InputFileError, UsageError

LOCK = ".lock"
PATIENCE = 5.0
"""Seconds to wait for the previous run to end, as when a launcher restarts all processes."""
_NAME = re.compile(r"step-(\d{1,18})(-\d{1,9})?")


class CheckpointFolder(NamedTuple):
    """A checkpoint's folder, serial number (-1: its table is damaged) and step."""

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
    """Publishes checkpoints in a folder; only one process of a run does so."""

    def __init__(self, folder: Path, keep: int | None) -> None:
        self._folder = folder
        self._keep = keep
        self._lock: Lock | None = None

    def begin(self, step: int) -> Path:
        """Make a new folder for the files of a checkpoint."""
        self.hold()
        path = self._folder / f".writing-{step}-{os.urandom(6).hex()}"
        try:
            path.mkdir()
        except OSError as error:
            raise _unwritable(self._folder, error) from error
        return path

    def hold(self) -> None:
        """Make the folder of checkpoints if necessary, and lock it."""
        if self._lock is None or not self._lock.is_in_place():
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._lock = Lock.of(self._folder.resolve())
            except OSError as error:
                raise _unwritable(self._folder, error) from error

    def publish(self, written: Path, step: int, contents: Mapping[str, Any]) -> Path:
        """Write a checkpoint's table, make the checkpoint visible, and remove old ones.

        Args:
            written: the folder that :meth:`begin` made, with all other files.
            step: the checkpoint's step.
            contents: the contents of its table.

        Returns:
            The checkpoint's final folder.
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
        self._lock = None


def _unwritable(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{folder} cannot be written to: {error.strerror or error}")


def _remove(path: Path) -> None:
    """Remove a checkpoint; rename it first, so that no partial one ever has its name."""
    hidden = path.with_name(f".removing-{path.name}-{os.urandom(4).hex()}")
    with suppress(OSError):
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Lock:
    """A folder's lock, which the system releases when this process ends, however it ends.

    It uses ``flock``: a lock of ``lockf`` would be lost as soon as anything in this process reads and
    closes the file. All writers in this process share the lock, and the last one to drop it releases it.
    """

    _here: ClassVar[WeakValueDictionary[Path, Lock]] = WeakValueDictionary()
    _handle = -1

    def __init__(self, path: Path) -> None:
        self._path = path
        # Follow no link: its target would be locked and overwritten.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._handle = os.open(path, flags, 0o666)
        status = os.fstat(self._handle)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise CheckpointError(f"{path} is not a file of its own, such as a link; remove it")

    @classmethod
    def of(cls, folder: Path) -> Lock:
        """Lock a folder, or share this process's lock; a new lock removes what killed runs left there."""
        shared, until = cls._here.get(folder), time.monotonic() + PATIENCE
        if shared is not None and shared.is_in_place():
            return shared
        while not (lock := cls(folder / LOCK))._take():
            if time.monotonic() > until:
                holder = os.read(lock._handle, 200).decode(errors="replace").strip()
                raise UsageError(
                    f"{folder}: another run writes its checkpoints here ({holder}); give each run a folder "
                    "of its own, or end the other one. If it is a process of this run, give "
                    "penstock.Checkpoints(group=...) the group of all its processes"
                )
            time.sleep(0.1)
        for left in (*folder.glob(".writing-*"), *folder.glob(".removing-*")):
            shutil.rmtree(left, ignore_errors=True)
        cls._here[folder] = lock
        return lock

    def _take(self) -> bool:
        """Try to lock the file; fail if another process has replaced it meanwhile."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:
            pass  # a file system without locks
        os.truncate(self._handle, 0)
        text = f"process {os.getpid()} on {socket.gethostname()}, since {time.ctime()}\n"
        os.write(self._handle, text.encode())
        return self.is_in_place()

    def is_in_place(self) -> bool:
        """Whether this process has the lock, and its file is the one that others would lock."""
        try:
            return os.path.samestat(os.fstat(self._handle), os.lstat(self._path))
        except OSError:
            return False

    def release(self) -> None:
        """Close the file; a forked child has its own copy of the handle."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    __del__ = release

    @classmethod
    def forget(cls) -> None:
        """In a forked child, drop the parent's locks: otherwise they would last as long as the child."""
        for lock in list(cls._here.values()):
            lock.release()


os.register_at_fork(after_in_child=Lock.forget)
