"""One process's file of tensors: written one tensor after the other, read where needed, with checksums.

The files are safetensors, which any reader of that format opens. They are written and read here tensor by
tensor, so that no process holds more than one of them twice; the checksums, of every four megabytes, stand in
the checkpoint's own table. (The safetensors storage of ``torch.distributed.checkpoint`` keeps no checksums
and no states but tensors, and its files are visible before all are there.)
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from penstock.errors import CheckpointError, InputFileError
from penstock.weights.files import DTYPES

BLOCK = 4 << 20
"""Bytes that a checksum is of: what is read at least, and a multiple of every type's size."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""How the format calls the types."""

Region = tuple[tuple[int, ...], tuple[int, ...]]
"""A part of a tensor: where it begins in each dimension, and how long it is there."""


def all_of(shape: Sequence[int]) -> Region:
    """The whole of a tensor."""
    return (0,) * len(shape), tuple(shape)


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write tensors into a new file, and see it onto the disk.

    Args:
        path: the file.
        tensors: by name.

    Returns:
        As JSON data: the file's ``bytes``, the ``header``'s length and checksum, and of each of the
        ``tensors`` where it begins and the checksums of its blocks.

    Raises:
        CheckpointError: it cannot be written.
    """
    # As the format's own writer does: the widest types first, so that each lies at a multiple of its size.
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
        raise CheckpointError(f"{name} is of {tensor.dtype}, which safetensors files cannot hold")
    return NAMES[tensor.dtype]


def _written(file: Any, tensor: Tensor) -> Iterator[memoryview]:
    """Write a tensor block by block, and give each."""
    for block in _blocks(memory_of(tensor.detach().cpu().contiguous())):
        file.write(block)
        yield block


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of the CPU."""
    found: memoryview = (
        tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
    )
    return found


def _blocks(memory: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(memory), BLOCK):
        yield memory[begin : begin + BLOCK]


# ---- reading


@dataclass(frozen=True)
class Stored:
    """A tensor, or a part of one, in a file.

    Args:
        path: the file.
        dtype: of the tensor.
        shape: of what is in the file.
        begin: where its bytes begin in the file.
        sums: the checksums of its blocks.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    sums: Sequence[int]

    def read(self, region: Region) -> Tensor:
        """A part of it, in memory of its own; only the rows in which it lies are read.

        Raises:
            InputFileError: the file is not what was written.
        """
        start, stop = self._range(region)
        first = start // BLOCK * BLOCK
        data = torch.empty(self._end_of_block(stop) - first, dtype=torch.uint8)
        self._filled(memory_of(data), first)
        rows = region[1][0] if self.shape else 1
        found = data[start - first : stop - first].view(self.dtype).reshape(rows, *self.shape[1:])
        for dim, (begin, length) in list(enumerate(zip(*region, strict=True)))[1:]:
            found = found.narrow(dim, begin, length)
        return found.reshape(region[1])

    def verify(self, region: Region, buffer: memoryview) -> None:
        """Read a part and let go of it, to see whether it is what was written.

        Args:
            region: the part.
            buffer: of one block, to read into.

        Raises:
            InputFileError: it is not.
        """
        start, stop = self._range(region)
        last = self._end_of_block(stop)
        for begin in range(start // BLOCK * BLOCK, last, BLOCK):
            self._filled(buffer[: min(BLOCK, last - begin)], begin)

    def _range(self, region: Region) -> tuple[int, int]:
        """The bytes of the rows in which a part lies."""
        if not self.shape:
            return 0, self.dtype.itemsize
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        begin, length = region[0][0], region[1][0]
        return begin * row, (begin + length) * row

    def _end_of_block(self, stop: int) -> int:
        size = math.prod(self.shape) * self.dtype.itemsize
        return min(-(-stop // BLOCK) * BLOCK, size)

    def _filled(self, memory: memoryview, begin: int) -> None:
        """Read from one of the tensor's blocks on, and compare each with its checksum."""
        if not len(memory):
            return
        fill(self.path, memory, self.begin + begin)
        for number, block in enumerate(_blocks(memory), start=begin // BLOCK):
            if number >= len(self.sums) or crc32(block) != self.sums[number]:
                raise InputFileError(
                    f"{self.path} is damaged: bytes from {self.begin + number * BLOCK:,} on are not those "
                    "that were written"
                )


def fill(path: Path, memory: memoryview, begin: int) -> None:
    """Read from a place in a file into memory.

    Raises:
        InputFileError: the file is too short, or cannot be read.
    """
    count, done = 1, 0
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(begin)
            while count and done < len(memory):
                count = file.readinto(memory[done:])
                done += count
    except OSError as error:
        raise InputFileError(f"{path} cannot be read: {error.strerror or error}") from error
    if done < len(memory):
        raise InputFileError(f"{path} is damaged: its end is missing")


def verify_header(path: Path, length: int, told: int, size: int) -> None:
    """Check that a file has its length and begins as it was written.

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
