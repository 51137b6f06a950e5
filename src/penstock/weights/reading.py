"""Read weights from safetensors files, a tensor when it is asked for."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.errors import InputFileError
from penstock.weights.export import INDEX

# ---- read tensors of a safetensors file straight into the memory where they are to live
# The safetensors package maps files into memory, whose pages then count beside the tensors made of them.
# Here a tensor's bytes are read once, into the tensor itself.


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
"""How the format calls the types."""
_LONGEST_HEADER = 100_000_000
"""As the format says."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a file.

    Args:
        path: the file.
        dtype: of the tensor.
        shape: of the tensor.
        begin: where its bytes begin in the file.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    def read(self) -> Tensor:
        """The tensor, in memory of its own."""
        made = torch.empty(self.shape, dtype=self.dtype)
        place = made.reshape(-1).view(torch.uint8).numpy().data if made.numel() else None
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.begin)
            while place:
                count = file.readinto(place)
                if not count:
                    raise InputFileError(
                        f"{self.path}: the file ends in the middle of a tensor; copy the file again"
                    )
                place = place[count:]
        return made


def entries(path: Path) -> dict[str, Entry]:
    """The tensors of a file, by name.

    Raises:
        InputFileError: it is no safetensors file, or a broken one.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                raise InputFileError(f"{path}: not a safetensors file (a header of {length} bytes)")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {name: _entry(path, about, 8 + length, size) for name, about in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InputFileError):
            raise
        raise InputFileError(f"{path}: not a safetensors file ({error})") from error


def _entry(path: Path, about: Any, start: int, size: int) -> Entry:
    dtype, shape = DTYPES[about["dtype"]], tuple(map(int, about["shape"]))
    begin, end = map(int, about["data_offsets"])
    bytes_of_one = torch.empty(0, dtype=dtype).element_size()
    if min((0, *shape)) < 0 or not 0 <= begin <= end <= size - start:
        raise InputFileError(
            f"{path}: a tensor lies beyond the end of the file; copy the file again"
        )
    if end - begin != math.prod(shape) * bytes_of_one:
        raise InputFileError(f"{path}: a tensor of {list(shape)} has {end - begin} bytes")
    return Entry(path, dtype, shape, start + begin)


# ---- read weights from safetensors files, one tensor at a time


class WeightFiles(Mapping[str, Tensor]):
    """The tensors of a folder by name, each read when it is asked for.

    Args:
        files: by the name of each tensor the file that holds it.
        tied: further names, each with the one under which the tensor is in a file.
    """

    def __init__(self, files: Mapping[str, Path], tied: Mapping[str, str]) -> None:
        self._files = dict(files)
        self._tied = {name: first for name, first in tied.items() if first in files}
        self._open: dict[Path, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        first = name if name in self._files else self._tied[name]
        path = self._files[first]
        if path not in self._open:
            self._open[path] = _opened(path)
        found: Tensor = self._open[path].get_tensor(first)
        return found

    def __iter__(self) -> Iterator[str]:
        yield from self._files
        yield from (name for name in self._tied if name not in self._files)

    def __len__(self) -> int:
        return len(self._files.keys() | self._tied.keys())


def read_weights(folder: str | os.PathLike[str]) -> Mapping[str, Tensor]:
    """The weights in a folder of safetensors files, under all their names.

    ``model.load_state_dict(penstock.read_weights(folder))`` fills the unsplit model.

    Args:
        folder: one that :meth:`penstock.Pipeline.save` or transformers wrote, or a single file.

    Raises:
        InputFileError: it holds no such files, or they cannot be read.
    """
    path = Path(folder)
    if path.is_file():
        return _of_file(path)
    if (path / INDEX).is_file():
        return _of_index(path)
    if (path / "model.safetensors").is_file():
        return _of_file(path / "model.safetensors")
    raise _nothing_in(path)


def weight_files(path: Path) -> dict[Path, set[str] | None]:
    """The files of a folder, or the single file, each with the names wanted of it; ``None`` for all.

    Raises:
        InputFileError: there are none, or the index leads elsewhere.
    """
    if path.is_file():
        return {path: None}
    if (path / INDEX).is_file():
        found: dict[Path, set[str] | None] = {}
        for name, file in _read_index(path)[0].items():
            found[file] = {*(found.get(file) or ()), name}
        return found
    if (path / "model.safetensors").is_file():
        return {path / "model.safetensors": None}
    raise _nothing_in(path)


def _nothing_in(path: Path) -> InputFileError:
    return InputFileError(
        f"{path}: it holds neither {INDEX} nor model.safetensors; give a folder that Pipeline.save or "
        "transformers has written"
    )


def _of_file(path: Path) -> WeightFiles:
    return WeightFiles(dict.fromkeys(_opened(path).keys(), path), {})


def _of_index(folder: Path) -> WeightFiles:
    return WeightFiles(*_read_index(folder))


def _read_index(folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """The file of each tensor, and further names with the one in a file."""
    try:
        index = json.loads((folder / INDEX).read_text())
        files = {
            str(name): folder / _inside(folder, file) for name, file in index["weight_map"].items()
        }
        tied = dict(index.get("metadata", {}).get("tied", {}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InputFileError):
            raise
        raise InputFileError(
            f"{folder / INDEX}: not an index of weights ({type(error).__name__}: {error}); write it again"
        ) from error
    lacking = sorted({path.name for path in files.values() if not path.is_file()})
    if lacking:
        raise InputFileError(
            f"{folder}: the index names {', '.join(lacking)}, which are missing; copy the whole folder"
        )
    return files, tied


def _inside(folder: Path, file: str) -> Path:
    """A path that an index names, which must stay in its folder."""
    path = Path(file)
    if path.is_absolute() or ".." in path.parts:
        raise InputFileError(
            f"{folder / INDEX}: it names {file!r}, which is outside of its folder; do not trust this index"
        )
    return path


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise InputFileError(f"{path}: not a safetensors file ({error})") from error
