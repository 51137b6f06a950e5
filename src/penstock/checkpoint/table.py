"""The table of a checkpoint: what its files hold, and everything that is not a tensor.

What many keys have in common stands in it once: types, shapes and places of tensors, and the states that an
optimizer keeps alike for many parameters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any
from zlib import crc32

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from torch import Tensor

from penstock._engine.weights.files import (
    DTYPES,
    Box,
    Entry,
    check_shape,
    entries,
    save_of,
    size_and_checksum,
    whole_box,
)
from penstock._engine.weights.storage import LONGEST_JSON, file_name, parse_json, read_bytes
from penstock._engine.weights.trees import tensor_keys
from penstock.checkpoint.planning import overlap, part_name, tiles
from penstock.errors import CheckpointError, InputFileError, printable, quoted

TABLE = "checkpoint.json"
FORMAT = 5
_HEAD = re.compile(
    rb'\{"crc32": (\d{1,10}), "format": (\d{1,9}), "save": "([0-9a-f]{12})", "step": (\d{1,18})\}\n'
)
"""The first line of a table. The checksum covers all bytes from the number of the format on."""
_OLDER = re.compile(rb'\{"crc32": \d{1,10}, "format": (\d{1,9}), ')
_FILES, _BESIDE = r"states-\d{5,9}\.safetensors", r"(generation_)?config\.json"
"""The names of a checkpoint's files, and of those that ``files_beside`` makes for a model."""

# ---- the contents of a table


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


_Count = Annotated[int, Field(ge=0, lt=1 << 62)]
_Shape = Annotated[list[_Count], Field(max_length=64)]


class _File(_Part):
    """A file of tensors: its size and its checksum."""

    name: Annotated[str, AfterValidator(partial(file_name, form=_FILES))]
    bytes: _Count
    crc32: _Count


class _Piece(_Part):
    """A part of a tensor: the number of its file, and its place in the tensor."""

    file: _Count
    offsets: _Shape
    sizes: _Shape

    @property
    def box(self) -> Box:
        return tuple(self.offsets), tuple(self.sizes)


class _Tensors(_Part):
    """Tensors of one type and shape, whose pieces lie in the same files."""

    dtype: Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]
    shape: _Shape
    pieces: list[_Piece]
    keys: list[str]

    _check_shape = field_validator("shape")(check_shape)

    @model_validator(mode="after")
    def _check_pieces(self) -> _Tensors:
        if not tiles(self.shape, (one.box for one in self.pieces)):
            raise ValueError("the pieces of a tensor do not make it up")
        return self


class _Values(_Part):
    """JSON data that several keys have in common."""

    value: Any
    keys: list[str]


class _Group(_Part):
    settings: dict[str, Any]
    parameters: list[str]


class _RunLayout(_Part):
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
        files: the files of tensors.
        tensors: the tensors.
        values: the JSON data of states, of parameters' optimizer states, and of weights that are not tensors.
        tied: further keys of tied weights, each mapped to the first key.
        groups: the groups of each optimizer.
        extra: the user's JSON data.
        beside: the files that describe the model, by name.
    """

    torch: str
    written: str
    layout: _RunLayout
    kinds: dict[str, str]
    files: list[_File]
    tensors: list[_Tensors]
    values: list[_Values]
    tied: dict[str, str]
    groups: dict[str, list[_Group]]
    extra: Any
    beside: dict[Annotated[str, AfterValidator(partial(file_name, form=_BESIDE))], str] = {}

    @model_validator(mode="after")
    def _check_files(self) -> TableContents:
        if any(piece.file >= len(self.files) for one in self.tensors for piece in one.pieces):
            raise ValueError("a piece is in a file that it does not list")
        return self


# ---- the file


def table_text(contents: Mapping[str, Any], save: str, step: int) -> bytes:
    """The content of a table's file.

    Raises:
        CheckpointError: it could not be read.
    """
    body = json.dumps(contents, allow_nan=False)
    summed = f'{FORMAT}, "save": "{save}", "step": {step}}}\n{body}'.encode()
    text = b'{"crc32": %d, "format": ' % crc32(summed) + summed
    if len(text) > LONGEST_JSON:
        raise CheckpointError(
            f"the table of the checkpoint would have {len(text):,} bytes, and {LONGEST_JSON:,} are the most "
            "that can be read; save fewer objects, or states of fewer parts"
        )
    try:
        _parsed(text, Path(TABLE))
    except InputFileError as error:
        raise CheckpointError(f"the table of the checkpoint could not be read: {error}") from error
    return text


def _parsed(content: bytes, path: Path) -> tuple[str, int, TableContents]:
    """The identifier of a checkpoint's save, its step, and the contents of its table."""
    head = _HEAD.match(content)
    older = _OLDER.match(content)
    if older is not None and int(older[1]) != FORMAT:
        raise InputFileError(
            f"{path} is of format {int(older[1])}, this version of Penstock reads format {FORMAT}; use the "
            "version that wrote it"
        )
    if head is None:
        raise InputFileError(f"{path} is damaged: it does not begin as a checkpoint's table does")
    if crc32(memoryview(content)[head.start(2) :]) != int(head[1]):
        raise InputFileError(f"{path} is damaged: it is not what was written")
    try:
        contents = TableContents.model_validate(parse_json(content[head.end() :], path))
    except ValidationError as error:
        first = error.errors()[0]
        place = "/".join(map(str, first["loc"]))
        problem = printable(f"{place}: {first['msg'].removeprefix('Value error, ')}", "")[:300]
        raise InputFileError(f"{path} is not the table of a checkpoint ({problem})") from error
    return head[3].decode(), int(head[4]), contents


class CheckpointTable:
    """A checkpoint's table, and access to the tensors in its files.

    Args:
        path: the checkpoint's folder.

    Attributes:
        tensors: what the table says of tensors, by key.
        values: the encoded JSON data, by key; what is not there is a tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.save, self.step, self.contents = _parsed(read_bytes(path / TABLE), path / TABLE)
        self.tensors = {key: one for one in self.contents.tensors for key in one.keys}
        self.values = {key: one.value for one in self.contents.values for key in one.keys}
        self._entries: dict[str, dict[str, Entry]] = {}

    @cached_property
    def names(self) -> set[str]:
        """The keys of weights, and of the parameters of optimizers."""
        contents = self.contents
        weights = {label for label, kind in contents.kinds.items() if kind == "weights"}
        names = {key for key in (*self.tensors, *self.values) if key.partition("/")[0] in weights}
        names.difference_update(*(tensor_keys(self.values[k], k) for k in names & {*self.values}))
        return names | {
            f"{label}/{name}"
            for label, groups in contents.groups.items()
            for group in groups
            for name in group.parameters
        }

    def tensors_of(self, label: str) -> list[str]:
        """Return the keys of a label's tensors."""
        return [key for key in self.tensors if key.startswith(f"{label}/")]

    def check_files(self, share: slice = slice(None)) -> None:
        """Compare the files, or a share of them, with their sizes and checksums.

        Raises:
            InputFileError: a file is not what was written.
        """
        for about in self.contents.files[share]:
            path = self.path / about.name
            size, summed = size_and_checksum(path)
            if summed != about.crc32 and save_of(path) not in (None, self.save):
                raise InputFileError(
                    f"{path} is of another save than its table: copy the whole checkpoint again"
                )
            if size != about.bytes:
                text = f"it has {size:,} bytes, {about.bytes:,} were written"
                raise InputFileError(f"{path} is damaged: {text}")
            if summed != about.crc32:
                raise InputFileError(
                    f"{path} is damaged: its bytes are not those that were written"
                )

    def _stored(self, key: str) -> _Tensors:
        if key not in self.tensors:
            raise InputFileError(
                f"{self.path / TABLE} names the tensor {quoted([key])}, which it does not have"
            )
        return self.tensors[key]

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._stored(key).shape)

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return DTYPES[self._stored(key).dtype]

    def reads(self, key: str, box: Box) -> list[tuple[Entry, Box, Box]]:
        """Plan the reads for a part of a tensor: entries, boxes in them, and their places in the part."""
        shape, dtype, reads = self.shape(key), self.dtype(key), []
        for piece in self._stored(key).pieces:
            shared = overlap(piece.box, box)
            if shared is None:
                continue
            name = self.contents.files[piece.file].name
            path = self.path / name
            if name not in self._entries:
                self._entries[name] = entries(path, self.save)
            entry = self._entries[name].get(part_name(key, shape, piece.box))
            if entry is None or (entry.dtype, entry.shape) != (dtype, piece.box[1]):
                raise InputFileError(f"{path} does not hold {quoted([key])}, as the table says")
            reads.append((entry, _within(shared, piece.box), _within(shared, box)))
        return reads

    def read(self, key: str, box: Box | None = None) -> Tensor:
        """Read a tensor, or a part of it, into new memory."""
        shape = self.shape(key)
        box = box or whole_box(shape)
        reads = self.reads(key, box)
        part = torch.empty(box[1], dtype=self.dtype(key), device="cpu")
        for entry, source, target in reads:
            place = tuple(slice(begin, begin + size) for begin, size in zip(*target, strict=True))
            part[place] = entry.read(source)
        return part


def _within(box: Box, outer: Box) -> Box:
    """The place of a box in another one."""
    return tuple(a - b for a, b in zip(box[0], outer[0], strict=True)), box[1]
