"""Safetensors files: one writer and one reader, for weights and checkpoints alike.

The safetensors package maps files into memory. The mapped pages count in addition to the tensors made of
them, and truncating a mapped file kills the process. So this module reads a tensor's bytes straight into the
tensor, and writes them block by block with their checksum. The file format is the same.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from penstock._engine.weights.storage import (
    BLOCK,
    open_regular,
    parse_json,
    patiently,
    write_blocks,
)
from penstock.errors import (
    CheckpointError,
    InputFileError,
    quoted,
    shortened,
)

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""The format's names for types."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LONGEST_HEADER = 100_000_000
"""The limit that the format sets, in bytes."""
_MOST_DIMS, _MOST_NUMBERS = 64, 1 << 60
"""The most dimensions of a tensor, and the most numbers; sizes of 0 count as 1."""


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    if not tensor.numel():
        return memoryview(bytearray())
    memory: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return memory


def digest(tensor: Tensor) -> str:
    """A digest of a tensor's data; empty on the meta device."""
    if tensor.is_meta:
        return ""
    return hashlib.sha256(raw_bytes(tensor.cpu().contiguous())).hexdigest()


def fill(path: Path, memory: memoryview, begin: int) -> None:
    """Fill memory from a file, starting at an offset."""

    def read() -> int:
        with open_regular(path) as file:
            file.seek(begin)
            return file.readinto(memory)

    if patiently("read", path, read) < len(memory):
        raise InputFileError(f"{path} is damaged: its end is missing")


# ---- write


SAVE = "penstock save"
"""The key of a file's metadata under which it holds the identifier of its save."""


def write_file(path: Path, tensors: Mapping[str, Tensor], save: str) -> tuple[int, int]:
    """Write tensors into a new safetensors file, one after the other, and flush it to disk.

    Args:
        path: the file.
        tensors: the tensors, by name.
        save: the identifier that all files of a save carry.

    Returns:
        The file's size in bytes, and its CRC-32.

    Raises:
        StorageError: the file cannot be written.
        CheckpointError: the format has no name for a tensor's type.
    """
    # The widest types first, like the format's own writer, so that each is aligned to its size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    about: dict[str, Any] = {"__metadata__": {"format": "pt", SAVE: save}}
    end = 0
    for name in order:
        tensor, begin = tensors[name], end
        if tensor.dtype not in NAMES:
            raise CheckpointError(
                f"{name} has the type {tensor.dtype}, which safetensors files cannot hold"
            )
        end += tensor.nbytes
        shape = list(tensor.shape)
        about[name] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(about).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text

    def content() -> Iterator[bytes | memoryview]:
        yield head
        for name in order:
            yield raw_bytes(tensors[name].detach().cpu().contiguous())

    return len(head) + end, write_blocks(path, content)


# ---- read


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A part of a tensor: its offsets and its sizes."""


def whole_box(shape: Sequence[int]) -> Box:
    """The part that is a whole tensor."""
    return (0,) * len(shape), tuple(shape)


@dataclass(frozen=True)
class Entry:
    """A tensor in a file, and the offset of its bytes."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        """The number of its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, box: Box | None = None) -> Tensor:
        """The tensor, or a box of it, in new memory; only the rows that contain the box are read."""
        offsets, sizes = box or whole_box(self.shape)
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        rows = torch.empty((*sizes[:1], *self.shape[1:]), dtype=self.dtype, device="cpu")
        fill(self.path, raw_bytes(rows), self.begin + (offsets[0] * row if offsets else 0))
        for dim in range(1, len(sizes)):
            rows = rows.narrow(dim, offsets[dim], sizes[dim])
        return rows


def size_and_checksum(path: Path) -> tuple[int, int]:
    """The size of a file in bytes, and its CRC-32."""

    def read() -> tuple[int, int]:
        buffer, size, summed = memoryview(bytearray(BLOCK)), 0, 0
        with open_regular(path) as file:
            while count := file.readinto(buffer):
                size, summed = size + count, crc32(buffer[:count], summed)
        return size, summed

    return patiently("read", path, read)


def entries(path: Path, save: str | None = None) -> dict[str, Entry]:
    """The tensors of a safetensors file, by name.

    Args:
        path: the file.
        save: the identifier of the save to which the file must belong; None for any.
    """
    header, start, size = _header(path)
    of = _save_in(header)
    if save not in (None, of):
        raise InputFileError(
            f"{path} is of another save ({shortened(str(of))}) than its index ({shortened(str(save))}): "
            "the folder holds parts of two; copy the whole folder again"
        )
    try:
        tensors = {
            name: _entry(path, about, start, size)
            for name, about in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        text = shortened(str(error), 300)
        raise InputFileError(f"{path}: not a safetensors file ({text})") from error
    _check_apart(path, tensors.values())
    return tensors


def save_of(path: Path) -> str | None:
    """The identifier of the save that wrote a file; None if the file says none."""
    try:
        return _save_in(_header(path)[0])
    except InputFileError:
        return None


def _save_in(header: Mapping[str, Any]) -> str | None:
    about = header.get("__metadata__")
    save = about.get(SAVE) if isinstance(about, dict) else None
    return save if isinstance(save, str) else None


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Return what a safetensors file says of its tensors, where their bytes begin, and the file's size."""

    def look() -> tuple[int, int]:
        with open_regular(path) as file:
            return os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")

    size, length = patiently("read", path, look)
    if not 2 <= length <= min(LONGEST_HEADER, size - 8):
        raise InputFileError(f"{path}: not a safetensors file (a header of {length} bytes)")
    content = bytearray(length)
    fill(path, memoryview(content), 8)
    header = parse_json(bytes(content), path)
    if not isinstance(header, dict):
        raise InputFileError(f"{path}: not a safetensors file (its header is no object)")
    return header, 8 + length, size


def check_shape(shape: Sequence[int]) -> Sequence[int]:
    """Return a shape that a file gives to a tensor, if a tensor can have it.

    Raises:
        InputFileError: it cannot, whatever memory there is.
    """
    if len(shape) > _MOST_DIMS or math.prod(size or 1 for size in shape) >= _MOST_NUMBERS:
        raise InputFileError(f"no tensor has the shape {shortened(str(list(shape)))}")
    return shape


def _check_apart(path: Path, tensors: Iterable[Entry]) -> None:
    """Check that each byte is of one tensor, so that all of them take no more memory than the file's size."""
    end = 0
    for one in sorted(tensors, key=lambda one: one.begin):
        if one.nbytes and one.begin < end:
            raise InputFileError(f"{path}: two tensors have bytes in common; copy the file again")
        end = max(end, one.begin + one.nbytes)


def _entry(path: Path, about: Any, start: int, size: int) -> Entry:
    begin, end = map(int, about["data_offsets"])
    shape = tuple(map(int, about["shape"]))
    check_shape(shape)
    entry = Entry(path, DTYPES[about["dtype"]], shape, start + begin)
    if min((0, *shape)) < 0 or not 0 <= begin <= end <= size - start:
        raise InputFileError("a tensor lies beyond the end of the file; copy the file again")
    if end - begin != entry.nbytes:
        raise InputFileError(f"a tensor of {list(shape)} has {end - begin} bytes")
    return entry


class WeightFiles(Mapping[str, Tensor]):
    """The tensors of a folder by name, each read on access.

    Args:
        files: for each tensor by name, the file that holds it.
        tied: each further name of a tensor, with its name in its file.
        save: the identifier that all the files carry, if their index has one.
    """

    def __init__(
        self, files: Mapping[str, Path], tied: Mapping[str, str], save: str | None = None
    ) -> None:
        self._files = dict(files)
        self._save = save
        self._tied = {name: first for name, first in tied.items() if first in files}
        self._entries: dict[Path, dict[str, Entry]] = {}

    def entry(self, name: str) -> Entry:
        """The entry of a tensor in its file."""
        first = name if name in self._files else self._tied[name]
        path = self._files[first]
        if path not in self._entries:
            self._entries[path] = entries(path, self._save)
        if first not in self._entries[path]:
            raise InputFileError(
                f"{path} does not hold {quoted([first])}, as its index says; copy the whole folder again"
            )
        return self._entries[path][first]

    def __getitem__(self, name: str) -> Tensor:
        return self.entry(name).read()

    def __contains__(self, name: object) -> bool:
        # Without this, Mapping would read the tensor to find out.
        return name in self._files or name in self._tied

    def __iter__(self) -> Iterator[str]:
        yield from self._files
        yield from (name for name in self._tied if name not in self._files)

    def __len__(self) -> int:
        return len(self._files.keys() | self._tied.keys())
