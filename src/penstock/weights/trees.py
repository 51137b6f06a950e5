"""Convert states to JSON data and tensors, and back, so that files can hold them without pickle."""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.errors import CheckpointError, InputFileError, printable

MARK = "$"
"""The key that marks a JSON object as standing for something other than a dict."""

Read = Callable[[str], Any]
"""Returns the tensor of a key."""

_PLAIN = (bool, int, str, type(None))
_DICTS: tuple[type, ...] = (dict, OrderedDict, Counter, defaultdict)
_SEQUENCES: dict[str, type] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
}
_TENSORS = ("tensor", "array")
"""The marks of objects that stand for a tensor, by its ``key``."""


def encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Encode a state as JSON data.

    Args:
        value: the state: numbers, strings, bytes, dicts and sequences of them, tensors and numpy arrays.
        path: its path, for messages and for the keys of its tensors.
        tensors: the tensors are added to this, by key.

    Raises:
        CheckpointError: it holds something else; the message says what, and where.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else {MARK: "float", "of": str(value)}
    if isinstance(value, Tensor):
        return _tensor(value, path, tensors)
    if kind is list:
        return [encode(one, f"{path}/{i}", tensors) for i, one in enumerate(value)]
    if kind in _DICTS:
        return _mapping(value, path, tensors)
    if kind is deque:
        items = [encode(one, f"{path}/{i}", tensors) for i, one in enumerate(value)]
        return {MARK: "deque", "of": items, "longest": value.maxlen}
    for name, of in _SEQUENCES.items():
        if kind is of:
            members = sorted(value, key=repr) if "set" in name else value
            return {MARK: name, "of": encode(list(members), path, tensors)}
    return _leaf(value, path, tensors)


def _mapping(value: Mapping[Any, Any], path: str, tensors: dict[str, Tensor]) -> Any:
    if type(value) is dict and all(type(key) is str for key in value) and MARK not in value:
        return {key: encode(one, f"{path}/{key}", tensors) for key, one in value.items()}
    items = [
        [encode(key, f"{path}/a key", tensors), encode(one, f"{path}/{key}", tensors)]
        for key, one in value.items()
    ]
    # A defaultdict's factory is code, which is not stored: it becomes a dict.
    name = "dict" if isinstance(value, defaultdict) else type(value).__name__
    return {MARK: name, "of": items}


def _leaf(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, (bytes, bytearray)):
        return {MARK: type(value).__name__, "of": base64.b64encode(value).decode()}
    if type(value) is complex:
        return {MARK: "complex", "of": [repr(value.real), repr(value.imag)]}
    if isinstance(value, (torch.dtype, torch.device)):
        return {MARK: type(value).__name__, "of": str(value).removeprefix("torch.")}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        content = base64.b64encode(value.tobytes()).decode()
        return {MARK: "number", "dtype": str(value.dtype), "of": content}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        tensor = torch.from_numpy(np.ascontiguousarray(value))
        return {**_tensor(tensor, path, tensors), MARK: "array"}
    raise CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: "
        "it can hold numbers, strings, bytes, dicts, lists, tuples, sets, tensors and arrays of numbers; "
        "return those from state_dict()"
    )


def _tensor(value: Tensor, path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        raise CheckpointError(
            f"{path} is a tensor of layout {value.layout}, which a checkpoint cannot hold; make it dense"
        )
    key, count = path, 1
    while key in tensors:
        key, count = f"{path}~{count}", count + 1
    tensors[key] = value.detach()
    return {MARK: "tensor", "key": key}


def decode(value: Any, read: Read) -> Any:
    """Decode a state that :func:`encode` has encoded.

    Args:
        value: JSON data.
        read: returns the tensors.

    Raises:
        InputFileError: it is not what :func:`encode` makes.
    """
    if isinstance(value, list):
        return [decode(one, read) for one in value]
    if not isinstance(value, dict):
        return value
    if MARK not in value:
        return {key: decode(one, read) for key, one in value.items()}
    try:
        return _decoded(value[MARK], value, read)
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        if isinstance(error, InputFileError):
            raise
        text = printable(str(value), "")[:200]
        raise InputFileError(f"{text} stands for nothing that a checkpoint holds") from error


def _decoded(kind: str, value: Mapping[str, Any], read: Read) -> Any:
    if kind == "tensor":
        return read(value["key"])
    if kind == "array":
        return read(value["key"]).numpy()
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(value["of"], read))
    if kind in ("dict", "OrderedDict", "Counter"):
        mapping: Any = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}[kind]()
        # As a dict, since a Counter would count pairs instead of taking them as items.
        mapping.update({decode(key, read): decode(one, read) for key, one in value["of"]})
        return mapping
    if kind == "deque":
        return deque(decode(value["of"], read), value["longest"])
    return _scalar(kind, value["of"], value)


def _scalar(kind: str, of: Any, value: Mapping[str, Any]) -> Any:
    if kind == "float":
        return float(of)
    if kind == "complex":
        return complex(*map(float, of))
    if kind in ("bytes", "bytearray"):
        return base64.b64decode(of) if kind == "bytes" else bytearray(base64.b64decode(of))
    if kind == "number":
        return np.frombuffer(base64.b64decode(of), dtype=np.dtype(value["dtype"]))[0]
    if kind == "dtype" and isinstance(getattr(torch, of, None), torch.dtype):
        return getattr(torch, of)
    if kind == "device":
        return torch.device(of)
    raise InputFileError(f"{kind!r} is nothing that a checkpoint holds")


def keys_of(value: Any) -> Iterator[str]:
    """The keys of the tensors in an encoded state."""
    if isinstance(value, list):
        for one in value:
            yield from keys_of(one)
    elif isinstance(value, dict):
        if value.get(MARK) in _TENSORS:
            yield str(value.get("key"))
        else:
            for one in value.values():
                yield from keys_of(one)


def with_keys(value: Any, change: Callable[[str], str]) -> Any:
    """An encoded state, with other keys for its tensors."""
    if isinstance(value, list):
        return [with_keys(one, change) for one in value]
    if not isinstance(value, dict):
        return value
    if value.get(MARK) in _TENSORS:
        return {**value, "key": change(value["key"])}
    return {key: with_keys(one, change) for key, one in value.items()}


# ---- settings: plain values, or tensors of one number


def encode_inline(value: Any, path: str) -> Any:
    """Encode a setting; a tensor of one number, such as a learning rate, becomes the number and its type."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return {
            MARK: "setting",
            "of": value.item(),
            "dtype": str(value.dtype).removeprefix("torch."),
        }
    tensors: dict[str, Tensor] = {}
    encoded = encode(value, path, tensors)
    if tensors:
        raise CheckpointError(
            f"{path} holds tensors, which can only be saved in an object with a state_dict()"
        )
    return encoded


def decode_inline(value: Any, now: Any) -> Any:
    """Decode a setting that :func:`encode_inline` has encoded.

    Args:
        value: JSON data.
        now: the current setting; if it is a tensor, the result is on the same device.
    """
    if not isinstance(value, dict) or value.get(MARK) != "setting":
        return decode(value, _no_tensor)
    device = now.device if isinstance(now, Tensor) else None
    try:
        return torch.tensor(value["of"], dtype=getattr(torch, value["dtype"]), device=device)
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        text = printable(str(value), "")[:200]
        raise InputFileError(f"{text} is no setting of an optimizer") from error


def _no_tensor(key: str) -> Any:
    raise InputFileError(f"{key} is a tensor where none can be")
