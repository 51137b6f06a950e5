"""The folder of a run's checkpoints: what is whole in it, how one appears, how old ones go, who writes.

A checkpoint is a folder ``step-<number>`` with a table, ``checkpoint.json``, and a file of tensors for each
process that wrote. It is written as ``.writing-…`` beside the others, seen onto the disk, and renamed when
everything is there, so that what has the name of a checkpoint is a whole one. An old one is renamed before it
is taken away, for the same reason.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from zlib import crc32

from penstock.errors import CheckpointError, InputFileError, UsageError

try:
    import fcntl
except ImportError:  # a system without POSIX locks: there the second run is not noticed
    fcntl = None  # type: ignore[assignment]

TABLE = "checkpoint.json"
LOCK = ".lock"
FORMAT = 1
_NAME = re.compile(r"step-(\d+)(-\d+)?")
_HEAD = re.compile(rb'\{"crc32": (\d+), "format": (\d+), "serial": (\d+), "step": (\d+)\}\n')
"""The first line of a table. Its checksum is of all bytes after it, from the format's number on."""
_WAITS = 5.0
"""Seconds for the run before this one to end, as when a launcher starts all processes anew."""


@dataclass(frozen=True)
class Found:
    """A checkpoint in a folder.

    Args:
        path: its own folder.
        serial: how many had been written before it into the same folder.
        step: at which it was saved.
    """

    path: Path
    serial: int
    step: int

    def table(self) -> dict[str, Any]:
        """What is in it.

        Raises:
            InputFileError: its table is not what was written.
        """
        found: dict[str, Any] = json.loads(_read_table(self.path / TABLE)[1])
        return found

    def file(self, name: str) -> Path:
        """The path of one of its files.

        Raises:
            InputFileError: it leads elsewhere.
        """
        if Path(name).name != name:
            raise InputFileError(
                f"{self.path / TABLE} names {name!r}, which is outside of its folder; do not trust "
                "this checkpoint"
            )
        return self.path / name


def _read_table(path: Path) -> tuple[re.Match[bytes], bytes]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputFileError(f"{path} cannot be read: {error.strerror or error}") from error
    head = _HEAD.match(content)
    if head is None:
        raise InputFileError(f"{path} is damaged: it does not begin as a checkpoint's table does")
    if int(head[2]) != FORMAT:
        raise InputFileError(
            f"{path} is of format {int(head[2])}, this version of Penstock reads format {FORMAT}; use the "
            "version that wrote it"
        )
    if crc32(content[head.start(2) :]) != int(head[1]):
        raise InputFileError(f"{path} is damaged: it is not what was written")
    return head, content[head.end() :]


def find(folder: Path) -> list[Found]:
    """The checkpoints of a folder, the latest first; also those whose table is damaged, as the oldest."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        name = _NAME.fullmatch(path.name)
        if name is None or not path.is_dir():
            continue
        try:
            head, _ = _read_table(path / TABLE)
            found.append(Found(path, int(head[3]), int(head[4])))
        except InputFileError:
            found.append(Found(path, -1, int(name[1])))
    return sorted(found, key=lambda one: (one.serial, one.step), reverse=True)


class Writer:
    """The one process of a run that makes checkpoints appear in a folder.

    Args:
        folder: where; it is made where it is not there.
        keep: how many are left there; None leaves all.
    """

    _held: ClassVar[dict[Path, int]] = {}

    def __init__(self, folder: Path, keep: int | None) -> None:
        self._folder = folder
        self._keep = keep
        self._locked = False

    def begin(self, step: int) -> Path:
        """A new folder to write a checkpoint into.

        Raises:
            UsageError: another run writes into the folder of checkpoints.
            CheckpointError: it cannot be written.
        """
        self.hold()
        try:
            made = self._folder / f".writing-{step}-{os.urandom(6).hex()}"
            made.mkdir()
        except OSError as error:
            raise CheckpointError(
                f"{self._folder} cannot be written to: {error.strerror or error}"
            ) from error
        return made

    def hold(self) -> None:
        """Take hold of the folder of checkpoints, and tidy up in it.

        Raises:
            UsageError: another run writes into it.
            CheckpointError: it cannot be written.
        """
        if self._locked:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock()
            self._sweep()
        except OSError as error:
            raise CheckpointError(
                f"{self._folder} cannot be written to: {error.strerror or error}"
            ) from error

    def publish(self, made: Path, step: int, table: Mapping[str, Any]) -> Path:
        """Make a checkpoint visible whose other files are all there, and take old ones away.

        Args:
            made: its folder, as :meth:`begin` gave it.
            step: its step.
            table: what is in it.

        Returns:
            Its folder.

        Raises:
            CheckpointError: it cannot be written.
        """
        before = find(self._folder)
        serial = max((one.serial for one in before), default=-1) + 1
        try:
            _write_table(made / TABLE, table, serial, step)
            _sync(made)
            place = self._free(step)
            made.rename(place)
            _sync(self._folder)
        except OSError as error:
            raise CheckpointError(
                f"{self._folder}: the checkpoint of step {step} cannot be written: {error.strerror or error}"
            ) from error
        self._remove_old(before, step)
        return place

    def _free(self, step: int) -> Path:
        place, count = self._folder / f"step-{step:08d}", 1
        while place.exists():
            count += 1
            place = self._folder / f"step-{step:08d}-{count}"
        return place

    def _remove_old(self, before: list[Found], step: int) -> None:
        """Take away what a new checkpoint makes superfluous: the older ones, and one of the same step."""
        kept = [one for one in before if one.step != step]
        left = len(kept) if self._keep is None else self._keep - 1
        for one in before:
            if one not in kept[:left]:
                remove(one.path)

    def _sweep(self) -> None:
        """Take away what runs that were killed have left."""
        for path in self._folder.glob(".*-*"):
            if path.name.startswith((".writing-", ".removing-")):
                shutil.rmtree(path, ignore_errors=True)

    def _lock(self) -> None:
        """Hold the folder's lock until this process ends.

        The system gives it back when the process is gone, however it ended: what a killed run has left is
        only a file. A child does not inherit it, unlike a lock of ``flock``.
        """
        path = (self._folder / LOCK).resolve()
        if path not in self._held and fcntl is not None:
            # Not a file object: it stays open for the rest of the process, and nobody is to blame for that.
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            until = time.monotonic() + _WAITS
            while not _locked(handle):
                if time.monotonic() > until:
                    holder = os.read(handle, 200).decode(errors="replace").strip()
                    os.close(handle)
                    raise UsageError(
                        f"{self._folder}: another run writes its checkpoints here ({holder}); give each run "
                        "a folder of its own, or end the other one. If it is a process of this run, give "
                        "penstock.Checkpoints(group=...) the group of all its processes"
                    )
                time.sleep(0.1)
            os.truncate(handle, 0)
            os.write(
                handle,
                f"process {os.getpid()} on {socket.gethostname()}, since {time.ctime()}\n".encode(),
            )
            self._held[path] = handle
        self._locked = True

    def close(self) -> None:
        """Let another run write here."""
        handle = self._held.pop((self._folder / LOCK).resolve(), None)
        if handle is not None:
            os.close(handle)
        self._locked = False


def _locked(handle: int) -> bool:
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        # A file system without locks.
        return True
    return True


def _write_table(path: Path, table: Mapping[str, Any], serial: int, step: int) -> None:
    body = json.dumps(table, allow_nan=False)
    summed = f'{FORMAT}, "serial": {serial}, "step": {step}}}\n{body}'.encode()
    with path.open("xb") as file:
        file.write(b'{"crc32": %d, "format": ' % crc32(summed) + summed)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """See the names in a folder onto the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Take a checkpoint away: first its name, so that a part of one never has it."""
    hidden = path.with_name(f".removing-{path.name}-{os.urandom(4).hex()}")
    with suppress(OSError):
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
