"""The table of a checkpoint: what its files hold, and everything that is no tensor."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any
from zlib import crc32

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from penstock.checkpoint.planning import Box, plan_reads
from penstock.errors import InputFileError, printable
from penstock.weights.files import (
    DTYPES,
    LONGEST_JSON,
    Entry,
    checksum,
    open_regular,
    parse_json,
    quoted,
    read_bytes,
)

TABLE = "checkpoint.json"
FORMAT = 2
_HEAD = re.compile(
    rb'\{"crc32": (\d{1,10}), "format": (\d{1,9}), "serial": (\d{1,18}), "step": (\d{1,18})\}\n'
)
"""The first line of a table. The checksum is that of all bytes from the number of the format on."""

# ---- what a table says


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


_Count = Annotated[int, Field(ge=0, lt=1 << 62)]
_Shape = Annotated[list[_Count], Field(max_length=64)]
_Json = Any


class _File(_Part):
    """A file of tensors: its size, and the length and checksum of its header."""

    bytes: _Count
    header: Annotated[list[_Count], Field(min_length=2, max_length=2)]


class _Piece(_Part):
    """A part of a tensor: where it lies in the tensor, and where in which file."""

    file: str
    offsets: _Shape
    sizes: _Shape
    begin: _Count
    crc32: _Count

    @property
    def box(self) -> Box:
        return tuple(self.offsets), tuple(self.sizes)


class _Stored(_Part):
    """A tensor and its pieces, which together are all of it."""

    dtype: str
    shape: _Shape
    pieces: list[_Piece]

    @model_validator(mode="after")
    def _check(self) -> _Stored:
        if self.dtype not in DTYPES:
            raise ValueError("its type is unknown")
        for piece in self.pieces:
            if not len(piece.offsets) == len(piece.sizes) == len(self.shape) or any(
                o + s > d
                for (o, s), d in zip(zip(*piece.box, strict=True), self.shape, strict=True)
            ):
                raise ValueError("a piece lies outside of the tensor")
        covered = sum(math.prod(piece.sizes) for piece in self.pieces)
        if covered != math.prod(self.shape) or any(
            _overlaps(a.box, b.box) for a, b in combinations(self.pieces, 2)
        ):
            raise ValueError("its pieces do not make up the tensor")
        return self


def _overlaps(one: Box, other: Box) -> bool:
    return all(a < b + t and b < a + s for a, s, b, t in zip(*one, *other, strict=True))


class _Weights(_Part):
    """Further names of tied weights, each with the first; and what a state dict has besides tensors."""

    tied: dict[str, str]
    others: dict[str, _Json]


class _Group(_Part):
    settings: dict[str, _Json]
    parameters: list[str]


class _Optimizer(_Part):
    """The class of an optimizer, its groups, and what it keeps for parameters and besides."""

    kind: str
    groups: list[_Group]
    states: dict[str, dict[str, _Json]]
    rest: dict[str, _Json]


class _State(_Part):
    """The states of an object, and which of them each process had (-1: none)."""

    of: list[Annotated[int, Field(ge=-1)]]
    variants: Annotated[list[_Json], Field(min_length=1)]

    @model_validator(mode="after")
    def _check(self) -> _State:
        if any(number >= len(self.variants) for number in self.of):
            raise ValueError("a process has a state that is not there")
        return self


class _Layout(_Part):
    """By whom it was written. Schedule, ranks and stages are information: nothing depends on them."""

    replicas: _Count
    processes: _Count
    schedule: str | None = None
    ranks: _Count | None = None
    stages: _Count | None = None


class TableContents(_Part):
    """Everything that a table says."""

    torch: str
    written: str
    layout: _Layout
    files: dict[str, _File]
    tensors: dict[str, _Stored]
    weights: dict[str, _Weights]
    optimizers: dict[str, _Optimizer]
    states: dict[str, _State]
    extra: _Json

    @model_validator(mode="after")
    def _check(self) -> TableContents:
        for name in self.files:
            if Path(name).name != name:
                raise ValueError(f"it names {name!r}, which is outside of its folder")
        for stored in self.tensors.values():
            for piece in stored.pieces:
                size = math.prod(piece.sizes) * DTYPES[stored.dtype].itemsize
                file = self.files.get(piece.file)
                if file is None or piece.begin + size > file.bytes:
                    raise ValueError(f"a piece lies outside of the file {piece.file!r}")
        return self


# ---- the file


def read_head(path: Path) -> tuple[int, int, bytes]:
    """The serial number and the step of a checkpoint, and its table's JSON text.

    Args:
        path: the table.

    Raises:
        InputFileError: the table is not what was written.
    """
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
    """A checkpoint's table, and through it the tensors in its files.

    Args:
        path: the checkpoint's folder.

    Raises:
        InputFileError: the table is damaged, or is none.
    """

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
        self._verified: set[tuple[str, int]] = set()

    @property
    def labels(self) -> list[str]:
        """The labels of everything that was saved."""
        return [*self.contents.weights, *self.contents.optimizers, *self.contents.states]

    def _stored(self, key: str) -> _Stored:
        if key not in self.contents.tensors:
            raise InputFileError(
                f"{self.path / TABLE} names the tensor {quoted([key])}, which it does not have"
            )
        return self.contents.tensors[key]

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._stored(key).shape)

    def dtype(self, key: str) -> torch.dtype:
        """The type of a tensor."""
        return DTYPES[self._stored(key).dtype]

    def read(self, key: str, box: Box | None = None) -> Tensor:
        """A part of a tensor, or all of it, in new memory."""
        stored, shape = self._stored(key), self.shape(key)
        wanted = box or ((0,) * len(shape), shape)
        part = torch.empty(wanted[1], dtype=self.dtype(key))
        for read in plan_reads(shape, [piece.box for piece in stored.pieces], wanted):
            target = part
            for dim, (begin, size) in enumerate(zip(read.offsets, read.source[1], strict=True)):
                target = target.narrow(dim, begin, size)
            target.copy_(self._entry(stored, read.piece).read(*read.source))
        return part

    def _entry(self, stored: _Stored, number: int) -> Entry:
        piece = stored.pieces[number]
        return Entry(self.path / piece.file, DTYPES[stored.dtype], tuple(piece.sizes), piece.begin)

    def verify(self, needs: Iterable[tuple[str, Box | None]]) -> None:
        """Read the pieces of these parts of tensors, to check that they are what was written.

        Raises:
            InputFileError: one is not; the message names the file.
        """
        for key, box in needs:
            stored, shape = self._stored(key), self.shape(key)
            boxes = [piece.box for piece in stored.pieces]
            for read in plan_reads(shape, boxes, box or ((0,) * len(shape), shape)):
                piece, entry = stored.pieces[read.piece], self._entry(stored, read.piece)
                place = piece.file, piece.begin
                if place in self._verified:
                    continue
                self._verify_header(piece.file)
                if entry.checksum() != piece.crc32:
                    raise InputFileError(
                        f"{entry.path} is damaged: {entry.nbytes:,} bytes from {piece.begin:,} on are not "
                        "those that were written"
                    )
                self._verified.add(place)

    def _verify_header(self, name: str) -> None:
        if (name, -1) in self._verified:
            return
        path, about = self.path / name, self.contents.files[name]
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
        if size != about.bytes:
            raise InputFileError(
                f"{path} is damaged: it has {size:,} bytes, {about.bytes:,} were written"
            )
        if checksum(path, 0, about.header[0]) != about.header[1]:
            raise InputFileError(f"{path} is damaged: its header is not the one that was written")
        self._verified.add((name, -1))

    def verify_all(self) -> None:
        """Like :meth:`verify`, for everything."""
        for name in self.contents.files:
            self._verify_header(name)
        self.verify([(key, None) for key in self.contents.tensors])


def join_pieces(
    shares: Sequence[Sequence[Any]], descriptions: Mapping[str, Any], written: Sequence[Any]
) -> dict[str, Any]:
    """What a table says about tensors.

    Args:
        shares: what each process wrote, as from :func:`penstock.checkpoint.planning.plan_writes`.
        descriptions: type and shape of each tensor by key, first in a list of any length.
        written: for each process its file, and there the offset and checksum of each part by name.
    """
    tensors = {
        key: {"dtype": dtype, "shape": shape, "pieces": []}
        for key, (dtype, shape, *_) in descriptions.items()
    }
    for (file, places), of in zip(written, shares, strict=True):
        for key, (offsets, sizes), name in of:
            begin, summed = places[name]
            piece = {"file": file, "offsets": offsets, "sizes": sizes, "begin": begin}
            tensors[key]["pieces"].append({**piece, "crc32": summed})
    return tensors
