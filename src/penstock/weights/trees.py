"""Convert states to JSON data and tensors, and back, so that files can hold them without pickle.

What JSON has no word for becomes an object with a mark, ``{"$": kind, "of": JSON data}``.
"""

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

_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)
"""What constructors raise for data that no encoder has made."""
_TENSORS = ("tensor", "array")
"""The marks of objects that stand for a tensor, by its ``key``."""
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "Size": torch.Size,
    "deque": lambda items: deque(items[1:], items[0]),
}
_DICTS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_LEAVES: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "complex": lambda of: complex(*map(float, of)),
    "bytes": lambda of: base64.b64decode(of, validate=True),
    "bytearray": lambda of: bytearray(base64.b64decode(of, validate=True)),
    "number": lambda of: np.frombuffer(base64.b64decode(of[1]), dtype=np.dtype(of[0]))[0],
    "dtype": lambda of: _dtype(of),
    "device": torch.device,
}
"""For each mark, what makes the value of the JSON data."""


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no type of tensors")
    return dtype


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
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if isinstance(value, Tensor):
        return {MARK: "tensor", "key": _add(value, path, tensors)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        tensor = torch.from_numpy(np.ascontiguousarray(value))
        return {MARK: "array", "key": _add(tensor, path, tensors)}
    if kind is list:
        return [encode(one, f"{path}/{i}", tensors) for i, one in enumerate(value)]
    if kind is dict and MARK not in value and all(type(key) is str for key in value):
        return {key: encode(one, f"{path}/{key}", tensors) for key, one in value.items()}
    # The factory of a defaultdict is code, which is not stored: it becomes a dict.
    name = "dict" if kind is defaultdict else kind.__name__
    if kind is defaultdict or kind is _DICTS.get(name):
        items = [
            [encode(key, f"{path}/a key", tensors), encode(one, f"{path}/{key}", tensors)]
            for key, one in value.items()
        ]
        return {MARK: name, "of": items}
    if kind in (tuple, set, frozenset, torch.Size, deque):
        members = sorted(value, key=repr) if kind in (set, frozenset) else list(value)
        encoded = [encode(one, f"{path}/{i}", tensors) for i, one in enumerate(members)]
        return {MARK: name, "of": [value.maxlen, *encoded] if kind is deque else encoded}
    return _encode_leaf(value, path)


def _encode_leaf(value: Any, path: str) -> Any:
    kind = type(value)
    if kind is float:
        return {MARK: "float", "of": str(value)}
    if kind is complex:
        return {MARK: "complex", "of": [repr(value.real), repr(value.imag)]}
    if kind in (bytes, bytearray):
        return {MARK: kind.__name__, "of": base64.b64encode(value).decode()}
    if isinstance(value, (torch.dtype, torch.device)):
        return {MARK: kind.__name__, "of": str(value).removeprefix("torch.")}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        content = base64.b64encode(value.tobytes()).decode()
        return {MARK: "number", "of": [str(value.dtype), content]}
    raise CheckpointError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: "
        "it can hold numbers, strings, bytes, dicts, lists, tuples, sets, tensors and arrays of numbers; "
        "return those from state_dict()"
    )


def _add(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = type(tensor)
        raise CheckpointError(
            f"{path} is a {kind.__module__}.{kind.__qualname__} of layout {tensor.layout}, which a "
            "checkpoint cannot hold; make it dense"
        )
    key, count = path, 1
    while key in tensors:
        key, count = f"{path}~{count}", count + 1
    tensors[key] = tensor.detach()
    return key


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
        return _decode_marked(value[MARK], value, read)
    except InputFileError:
        raise
    except _MALFORMED as error:
        raise _malformed(value) from error


def _decode_marked(kind: str, value: Mapping[str, Any], read: Read) -> Any:
    if kind in _TENSORS:
        tensor = read(value["key"])
        return tensor.numpy() if kind == "array" else tensor
    if kind in _LEAVES:
        return _LEAVES[kind](value["of"])
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]([decode(one, read) for one in value["of"]])
    mapping = _DICTS[kind]()
    # As a dict, since a Counter would count pairs instead of taking them as items.
    mapping.update({decode(key, read): decode(one, read) for key, one in value["of"]})
    return mapping


def _malformed(value: Any) -> InputFileError:
    text = printable(str(value), "")[:200]
    return InputFileError(f"{text} stands for nothing that a checkpoint holds")


def keys_of(value: Any) -> Iterator[str]:
    """The keys of the tensors in an encoded state."""
    if isinstance(value, dict) and value.get(MARK) in _TENSORS:
        yield str(value.get("key"))
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
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
        dtype = str(value.dtype).removeprefix("torch.")
        return {MARK: "setting", "of": value.item(), "dtype": dtype}
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

    Raises:
        InputFileError: it is not what :func:`encode_inline` makes.
    """
    if not isinstance(value, dict) or value.get(MARK) != "setting":
        return decode(value, _no_tensor)
    device = now.device if isinstance(now, Tensor) else None
    try:
        return torch.tensor(value["of"], dtype=_dtype(value["dtype"]), device=device)
    except _MALFORMED as error:
        raise _malformed(value) from error


def _no_tensor(key: str) -> Any:
    raise InputFileError(f"{printable(str(key), '')[:200]} is a tensor where none can be")
