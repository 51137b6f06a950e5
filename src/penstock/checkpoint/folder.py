"""What is on disk: the folder of a run's checkpoints, and the files of tensors in each.

A checkpoint is a folder ``step-<number>`` with a table, ``checkpoint.json``, and a file of tensors for each
process that wrote. It is written as ``.writing-…`` beside the others, flushed to disk, and renamed when
everything is there, so that whatever has the name of a checkpoint is complete. For the same reason an old one
is renamed before it is removed.

The files of tensors are safetensors files, which any reader of that format can open. They are written and
read tensor by tensor, so that no process holds more than one of them twice. The table has a checksum for
every four megabytes. (The safetensors storage of ``torch.distributed.checkpoint`` keeps no checksums, no
states other than tensors, and its files are visible before all of them are there.)
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from zlib import crc32

import torch
from torch import Tensor

from penstock.errors import CheckpointError, InputFileError, UsageError
from penstock.weights.files import DTYPES, fill, raw_bytes

# ---- the folder: how checkpoints are found, appear and go, and who may write


try:
    import fcntl
except ImportError:  # a system without POSIX locks: there the second run is not noticed
    fcntl = None  # type: ignore[assignment]

TABLE = "checkpoint.json"
LOCK = ".lock"
FORMAT = 1
_NAME = re.compile(r"step-(\d+)(-\d+)?")
_HEAD = re.compile(rb'\{"crc32": (\d+), "format": (\d+), "serial": (\d+), "step": (\d+)\}\n')
"""The first line of a table. The checksum is that of all bytes from the number of the format on."""
_WAITS = 5.0
"""How many seconds to wait for the run before this one to end, as when a launcher restarts all processes."""


@dataclass(frozen=True)
class Found:
    """A checkpoint in a folder.

    Args:
        path: its own folder.
        serial: how many were written before it into the same folder.
        step: the step at which it was saved.
    """

    path: Path
    serial: int
    step: int

    def table(self) -> dict[str, Any]:
        """Its table.

        Raises:
            InputFileError: the table is not what was written.
        """
        found: dict[str, Any] = json.loads(_read_table(self.path / TABLE)[1])
        return found

    def file(self, name: str) -> Path:
        """The path of one of its files.

        Raises:
            InputFileError: the name leads out of its folder.
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
    """The checkpoints of a folder, the latest first; those with damaged tables come last."""
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
    """Makes checkpoints appear in a folder; only one process of a run does.

    Args:
        folder: the folder; it is made if necessary.
        keep: how many checkpoints to keep; None keeps all.
    """

    _held: ClassVar[dict[Path, int]] = {}

    def __init__(self, folder: Path, keep: int | None) -> None:
        self._folder = folder
        self._keep = keep
        self._locked = False

    def begin(self, step: int) -> Path:
        """Make a new folder for the files of a checkpoint.

        Raises:
            UsageError: another run writes into the folder of checkpoints.
            CheckpointError: it cannot be made.
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
        """Lock the folder of checkpoints, and remove what killed runs have left there.

        Raises:
            UsageError: another run writes into it.
            CheckpointError: it cannot be written to.
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
        """Make a checkpoint visible whose other files are all there, and remove old ones.

        Args:
            made: its folder, which :meth:`begin` has made.
            step: its step.
            table: its table.

        Returns:
            Its final folder.

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
        """Remove the checkpoints that a new one replaces: older ones, and one of the same step."""
        kept = [one for one in before if one.step != step]
        left = len(kept) if self._keep is None else self._keep - 1
        for one in before:
            if one not in kept[:left]:
                remove(one.path)

    def _sweep(self) -> None:
        """Remove what runs that were killed have left."""
        for path in self._folder.glob(".*-*"):
            if path.name.startswith((".writing-", ".removing-")):
                shutil.rmtree(path, ignore_errors=True)

    def _lock(self) -> None:
        """Hold the folder's lock until this process ends.

        The system releases it when the process ends, however it does: a killed run leaves only a file. Unlike
        a lock of ``flock`` it is not inherited by child processes.
        """
        path = (self._folder / LOCK).resolve()
        if path not in self._held and fcntl is not None:
            # Not a file object, which would warn that it was never closed: it stays open on purpose.
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
    """Flush the names in a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that no part of one ever has that name."""
    hidden = path.with_name(f".removing-{path.name}-{os.urandom(4).hex()}")
    with suppress(OSError):
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


# ---- the file of one process: its tensors are written one after the other


BLOCK = 4 << 20
"""The bytes for one checksum: the least that is read, and a multiple of the size of every type."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""The names of types in the format."""

Region = tuple[tuple[int, ...], tuple[int, ...]]
"""A part of a tensor: where it begins in each dimension, and how long it is there."""


def all_of(shape: Sequence[int]) -> Region:
    """The whole of a tensor."""
    return (0,) * len(shape), tuple(shape)


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write tensors into a new file, and flush it to disk.

    Args:
        path: the file.
        tensors: the tensors by name.

    Returns:
        As JSON data: the file's ``bytes``, the length and checksum of its ``header``, and for each of the
        ``tensors`` where it begins and the checksums of its blocks.

    Raises:
        CheckpointError: it cannot be written.
    """
    # The widest types first, like the format's own writer, so that each is aligned to its size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, begin, places = {}, 0, {}
    for name in order:
        places[name], end = begin, begin + tensors[name].nbytes
        about = {"dtype": _name_of(tensors[name], name), "shape": list(tensors[name].shape)}
        header[name] = {**about, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    sums = {}
    try:
        with path.open("xb", buffering=1 << 20) as file:
            file.write(head)
            for name in order:
                sums[name] = [crc32(block) for block in _written(file, tensors[name])]
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error
    return {
        "bytes": len(head) + begin,
        "header": [len(head), crc32(head)],
        "tensors": {name: [len(head) + places[name], sums[name]] for name in order},
    }


def _name_of(tensor: Tensor, name: str) -> str:
    if tensor.dtype not in NAMES:
        raise CheckpointError(
            f"{name} has the type {tensor.dtype}, which safetensors files cannot hold"
        )
    return NAMES[tensor.dtype]


def _written(file: Any, tensor: Tensor) -> Iterator[memoryview]:
    """Write a tensor block by block, and yield each block."""
    for block in _blocks(raw_bytes(tensor.detach().cpu().contiguous())):
        file.write(block)
        yield block


def _blocks(memory: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(memory), BLOCK):
        yield memory[begin : begin + BLOCK]


# ---- reading, with checks


@dataclass(frozen=True)
class Stored:
    """A tensor, or a part of one, in a file.

    Args:
        path: the file.
        dtype: the type of the tensor.
        shape: the shape of what is in the file.
        begin: where its bytes begin in the file.
        sums: the checksums of its blocks.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    sums: Sequence[int]

    def read(self, region: Region) -> Tensor:
        """A part of it, in memory of its own; only the rows that contain the part are read.

        Raises:
            InputFileError: the file is not what was written.
        """
        start, stop = self._range(region)
        first = start // BLOCK * BLOCK
        data = torch.empty(self._end_of_block(stop) - first, dtype=torch.uint8)
        self._filled(raw_bytes(data), first)
        rows = region[1][0] if self.shape else 1
        found = data[start - first : stop - first].view(self.dtype).reshape(rows, *self.shape[1:])
        for dim, (begin, length) in list(enumerate(zip(*region, strict=True)))[1:]:
            found = found.narrow(dim, begin, length)
        return found.reshape(region[1])

    def verify(self, region: Region, buffer: memoryview) -> None:
        """Read a part only to check that it is what was written.

        Args:
            region: the part.
            buffer: memory of one block to read into.

        Raises:
            InputFileError: it is not.
        """
        start, stop = self._range(region)
        last = self._end_of_block(stop)
        for begin in range(start // BLOCK * BLOCK, last, BLOCK):
            self._filled(buffer[: min(BLOCK, last - begin)], begin)

    def _range(self, region: Region) -> tuple[int, int]:
        """The range of bytes of the rows that contain a part."""
        if not self.shape:
            return 0, self.dtype.itemsize
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        begin, length = region[0][0], region[1][0]
        return begin * row, (begin + length) * row

    def _end_of_block(self, stop: int) -> int:
        size = math.prod(self.shape) * self.dtype.itemsize
        return min(-(-stop // BLOCK) * BLOCK, size)

    def _filled(self, memory: memoryview, begin: int) -> None:
        """Read from the beginning of a block on, and compare each block with its checksum."""
        if not len(memory):
            return
        fill(self.path, memory, self.begin + begin)
        for number, block in enumerate(_blocks(memory), start=begin // BLOCK):
            if number >= len(self.sums) or crc32(block) != self.sums[number]:
                raise InputFileError(
                    f"{self.path} is damaged: bytes from {self.begin + number * BLOCK:,} on are not those "
                    "that were written"
                )


def verify_header(path: Path, length: int, told: int, size: int) -> None:
    """Check that a file has the length and the header with which it was written.

    Raises:
        InputFileError: it does not.
    """
    try:
        found = path.stat().st_size
    except OSError as error:
        raise InputFileError(f"{path} cannot be read: {error.strerror or error}") from error
    if found != size:
        raise InputFileError(f"{path} is damaged: it has {found:,} bytes, {size:,} were written")
    memory = memoryview(bytearray(length))
    fill(path, memory, 0)
    if crc32(memory) != told:
        raise InputFileError(f"{path} is damaged: its header is not the one that was written")
