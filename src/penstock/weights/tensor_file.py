"""Read tensors of a safetensors file straight into the memory where they are to live.

The safetensors package maps files into memory, whose pages then count beside the tensors made of them. Here a
tensor's bytes are read once, into the tensor itself.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import InputFileError

_DTYPES = {
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
                        f"{self.path}: the file ends within a tensor; copy it anew"
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
                raise InputFileError(f"{path}: no safetensors file (a header of {length} bytes)")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {name: _entry(path, about, 8 + length, size) for name, about in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InputFileError):
            raise
        raise InputFileError(f"{path}: no safetensors file ({error})") from error


def _entry(path: Path, about: Any, start: int, size: int) -> Entry:
    dtype, shape = _DTYPES[about["dtype"]], tuple(map(int, about["shape"]))
    begin, end = map(int, about["data_offsets"])
    bytes_of_one = torch.empty(0, dtype=dtype).element_size()
    if min((0, *shape)) < 0 or not 0 <= begin <= end <= size - start:
        raise InputFileError(f"{path}: a tensor lies outside of the file; copy it anew")
    if end - begin != math.prod(shape) * bytes_of_one:
        raise InputFileError(f"{path}: a tensor of {list(shape)} has {end - begin} bytes")
    return Entry(path, dtype, shape, start + begin)
