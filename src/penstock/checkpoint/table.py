"""The table of a checkpoint: what its files hold, and everything that is not a tensor."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any
from zlib import crc32

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from penstock.checkpoint.planning import part_name, plan_reads
from penstock.errors import InputFileError, printable, quoted
from penstock.weights.files import (
    DTYPES,
    LONGEST_JSON,
    Box,
    Entry,
    entries,
    parse_json,
    read_bytes,
    size_and_checksum,
)

TABLE = "checkpoint.json"
FORMAT = 3
_HEAD = re.compile(
    rb'\{"crc32": (\d{1,10}), "format": (\d{1,9}), "serial": (\d{1,18}), "step": (\d{1,18})\}\n'
)
"""The first line of a table. The checksum covers all bytes from the number of the format on."""

# ---- the contents of a table


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


_Count = Annotated[int, Field(ge=0, lt=1 << 62)]
_Shape = Annotated[list[_Count], Field(max_length=64)]
_Type = Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]


class _File(_Part):
    """The size and the checksum of a file of tensors."""

    bytes: _Count
    crc32: _Count


class _Piece(_Part):
    """A part of a tensor: its file, and its place in the tensor."""

    file: str
    offsets: _Shape
    sizes: _Shape

    @property
    def box(self) -> Box:
        return tuple(self.offsets), tuple(self.sizes)


class _Stored(_Part):
    """A tensor, and the pieces that make it up."""

    dtype: _Type
    shape: _Shape
    pieces: list[_Piece]


class _Group(_Part):
    settings: dict[str, Any]
    parameters: list[str]


class _Layout(_Part):
    """The layout of the run that wrote the table, for information only."""

    replicas: _Count
    processes: _Count
    schedule: str | None = None
    ranks: _Count | None = None
    stages: _Count | None = None


class TableContents(_Part):
    """The contents of a table.

    Attributes:
        torch: the version of torch that wrote it.
        written: the time of writing.
        layout: the layout of the run that wrote it.
        kinds: by label, ``"weights"``, ``"a state"``, or the class of an optimizer.
        files: the files of tensors, by name.
        tensors: the tensors, by key.
        values: the JSON data of states, of parameters' optimizer states, and of weights that are not tensors.
        tied: further keys of tied weights, each mapped to the first key.
        groups: the groups of each optimizer.
        extra: the user's JSON data.
    """

    torch: str
    written: str
    layout: _Layout
    kinds: dict[str, str]
    files: dict[str, _File]
    tensors: dict[str, _Stored]
    values: dict[str, Any]
    tied: dict[str, str]
    groups: dict[str, list[_Group]]
    extra: Any

    @model_validator(mode="after")
    def _check(self) -> TableContents:
        for name in self.files:
            if Path(name).name != name:
                raise ValueError(f"it names {name!r}, which is outside of its folder")
        pieces = (piece for stored in self.tensors.values() for piece in stored.pieces)
        if lost := {piece.file for piece in pieces} - self.files.keys():
            raise ValueError(f"it does not list the file {min(lost)!r}")
        return self


# ---- the file


def read_head(path: Path) -> tuple[int, int, bytes]:
    """Read a checkpoint's serial number, step and JSON text from its table."""
    content = read_bytes(path, LONGEST_JSON)
    head = _HEAD.match(content)
    if head is None:
        raise InputFileError(f"{path} is damaged: it does not begin as a checkpoint's table does")
    if int(head[2]) != FORMAT:
        raise InputFileError(
            f"{path} is of format {int(head[2])}, this version of Penstock reads format {FORMAT}; use the "
            "version that wrote it"
        )
    if crc32(memoryview(content)[head.start(2) :]) != int(head[1]):
        raise InputFileError(f"{path} is damaged: it is not what was written")
    return int(head[3]), int(head[4]), content[head.end() :]


def write_table(path: Path, contents: Mapping[str, Any], serial: int, step: int) -> None:
    """Write a table, and flush it to disk."""
    body = json.dumps(contents, allow_nan=False)
    summed = f'{FORMAT}, "serial": {serial}, "step": {step}}}\n{body}'.encode()
    with path.open("xb") as file:
        file.write(b'{"crc32": %d, "format": ' % crc32(summed) + summed)
        file.flush()
        os.fsync(file.fileno())


class CheckpointTable:
    """A checkpoint's table, and access to the tensors in its files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        file = path / TABLE
        _, self.step, text = read_head(file)
        try:
            self.contents = TableContents.model_validate(parse_json(text, file))
        except ValidationError as error:
            first = error.errors()[0]
            place = "/".join(map(str, first["loc"]))
            problem = printable(f"{place}: {first['msg']}", "")[:300]
            raise InputFileError(f"{file} is not the table of a checkpoint ({problem})") from error
        self._entries: dict[str, dict[str, Entry]] = {}

    def tensors_of(self, label: str) -> list[str]:
        """Return the keys of a label's tensors."""
        return [key for key in self.contents.tensors if key.startswith(f"{label}/")]

    def verify(self, process: int = 0, processes: int = 1) -> None:
        """Check the sizes and checksums of the files; of several processes, each reads some files."""
        for name, about in list(self.contents.files.items())[process::processes]:
            path = self.path / name
            size, summed = size_and_checksum(path)
            if size != about.bytes:
                raise InputFileError(
                    f"{path} is damaged: it has {size:,} bytes, {about.bytes:,} were written"
                )
            if summed != about.crc32:
                raise InputFileError(
                    f"{path} is damaged: its bytes are not those that were written"
                )

    def _stored(self, key: str) -> _Stored:
        if key not in self.contents.tensors:
            raise InputFileError(
                f"{self.path / TABLE} names the tensor {quoted([str(key)])}, which it does not have"
            )
        return self.contents.tensors[key]

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._stored(key).shape)

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return DTYPES[self._stored(key).dtype]

    def reads(self, key: str, box: Box) -> list[tuple[Entry, Box, Box]]:
        """Plan the reads for a part of a tensor: entries, boxes in them, and their places in the part."""
        shape, pieces = self.shape(key), self._stored(key).pieces
        wrong = f"{self.path / TABLE}: the pieces of {quoted([key])} do not make it up"
        if any(not len(one.offsets) == len(one.sizes) == len(shape) for one in pieces):
            raise InputFileError(wrong)
        reads = []
        for index, source, target in plan_reads(shape, [one.box for one in pieces], box):
            piece = pieces[index]
            path = self.path / piece.file
            if piece.file not in self._entries:
                self._entries[piece.file] = entries(path)
            entry = self._entries[piece.file].get(part_name(key, shape, piece.box))
            if entry is None or (entry.dtype, entry.shape) != (self.dtype(key), piece.box[1]):
                raise InputFileError(f"{path} does not hold {quoted([key])}, as the table says")
            reads.append((entry, source, target))
        targets = [target for _, _, target in reads]
        covered = sum(math.prod(sizes) for _, sizes in targets)
        if covered != math.prod(box[1]) or any(_overlap(*two) for two in combinations(targets, 2)):
            raise InputFileError(wrong)
        return reads

    def read(self, key: str, box: Box | None = None) -> Tensor:
        """Read a tensor, or a part of it, into new memory."""
        shape = self.shape(key)
        reads = self.reads(key, box or ((0,) * len(shape), shape))
        part = torch.empty(box[1] if box else shape, dtype=self.dtype(key))
        for entry, source, target in reads:
            place = tuple(slice(begin, begin + size) for begin, size in zip(*target, strict=True))
            part[place] = entry.read(source)
        return part


def _overlap(one: Box, other: Box) -> bool:
    return all(a < b + t and b < a + s for a, s, b, t in zip(*one, *other, strict=True))
