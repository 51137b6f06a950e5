"""Encode states as JSON data and tensors, and decode them, so that files hold them without pickle.

A value that JSON cannot express becomes an object with a mark, ``{"$": kind, "of": JSON data}``. A tensor is
the mark alone: its key is the path to it, so that states of one form have the same JSON data.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.errors import CheckpointError, InputFileError, printable

MARK = "$"
"""The key that marks a JSON object as standing for something other than a dict."""
TENSOR = {MARK: "tensor"}
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)
"""The errors of constructors on data that no encoder has made."""


def _pairs(value: dict[Any, Any]) -> list[list[Any]]:
    return [[key, one] for key, one in value.items()]


def _sorted(value: Iterable[Any]) -> list[Any]:
    return sorted(value, key=repr)


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no type of tensors")
    return dtype


def _number(value: np.generic) -> list[str]:
    if value.dtype.kind not in "biufc":
        raise TypeError(f"{value.dtype} is no type of numbers")
    return [str(value.dtype), _text(value.tobytes())]


_KINDS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (tuple, list, tuple),
    "set": (set, _sorted, set),
    "frozenset": (frozenset, _sorted, frozenset),
    "Size": (torch.Size, list, torch.Size),
    "deque": (deque, lambda of: [of.maxlen, *of], lambda of: deque(of[1:], of[0])),
    "dict": (dict, _pairs, dict),
    # The factory of a defaultdict is code, which is not stored.
    "defaultdict": (defaultdict, _pairs, dict),
    "OrderedDict": (OrderedDict, _pairs, OrderedDict),
    # Through a dict, since a Counter would count pairs instead of taking them as items.
    "Counter": (Counter, _pairs, lambda of: Counter(dict(of))),
    "float": (float, str, float),
    "complex": (complex, str, complex),
    "bytes": (bytes, _text, _bytes),
    "bytearray": (bytearray, _text, lambda of: bytearray(_bytes(of))),
    "dtype": (torch.dtype, lambda of: str(of).removeprefix("torch."), _dtype),
    "device": (torch.device, str, torch.device),
    "array": (
        np.ndarray,
        lambda of: torch.from_numpy(np.ascontiguousarray(of)),
        lambda of: of.numpy(),
    ),
    "number": (np.generic, _number, lambda of: np.frombuffer(_bytes(of[1]), np.dtype(of[0]))[0]),
}
"""For each mark: the type, the function that simplifies a value, and the one that rebuilds it."""


def encode(value: Any, path: str, tensors: dict[str, Tensor] | None) -> Any:
    """Encode a state as JSON data.

    Args:
        value: the state: numbers, strings, bytes, dicts and sequences of them, tensors and numpy arrays.
        path: the state's path, for messages and for the keys of its tensors.
        tensors: collects the tensors, by key. With None, only tensors of one number are allowed, such as a
            learning rate; they become part of the JSON data.

    Raises:
        CheckpointError: the state holds something else; the message says what, and where.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if isinstance(value, Tensor):
        return _encode_tensor(value, path, tensors)
    if kind is list:
        return [encode(one, f"{path}/{i}", tensors) for i, one in enumerate(value)]
    if kind is dict and MARK not in value and all(type(key) is str for key in value):
        return {key: encode(one, _below(path, key), tensors) for key, one in value.items()}
    known = np.generic if isinstance(value, np.generic) else kind
    for name, (of, simpler, _) in _KINDS.items():
        if of is known:
            with suppress(TypeError):  # for arrays of anything but numbers
                return {MARK: name, "of": encode(simpler(value), path, tensors)}
    raise CheckpointError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: "
        "it can hold numbers, strings, bytes, dicts, lists, tuples, sets, tensors and arrays of numbers; "
        "return those from state_dict()"
    )


def _encode_tensor(tensor: Tensor, path: str, tensors: dict[str, Tensor] | None) -> Any:
    if tensors is None:
        if tensor.numel() != 1:
            raise CheckpointError(
                f"{path} holds tensors, which can only be saved in an object with a state_dict()"
            )
        return {MARK: "scalar", "of": encode([tensor.item(), tensor.dtype], path, None)}
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = type(tensor)
        raise CheckpointError(
            f"{path} is a {kind.__module__}.{kind.__qualname__} of layout {tensor.layout}, which a "
            "checkpoint cannot hold; make it dense"
        )
    if path in tensors:
        raise CheckpointError(f"two tensors have the path {path}; rename one of them")
    tensors[path] = tensor.detach()
    return TENSOR


def _below(path: str, key: str) -> str:
    """The path to an entry of a dict; no two entries of a state have the same."""
    return f"{path}/{key.replace('~', '~0').replace('/', '~1')}"


def decode(value: Any, read: Callable[[str], Any] | None = None, path: str = "") -> Any:
    """Decode what :func:`encode` returned for a path; ``read`` returns the tensor of a key."""
    if isinstance(value, list):
        return [decode(one, read, f"{path}/{i}") for i, one in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if MARK not in value:
        return {key: decode(one, read, _below(path, key)) for key, one in value.items()}
    try:
        kind = value[MARK]
        if kind == "tensor" and read is not None:
            return read(path)
        of = value["of"]
        if kind == "scalar":
            number, dtype = decode(of)
            return torch.tensor(number, dtype=dtype, device="cpu")
        return _KINDS[kind][2](decode(of, read, path))
    except InputFileError:
        raise
    except _MALFORMED as error:
        text = printable(str(value), "")[:200]
        raise InputFileError(f"{text} stands for nothing that a checkpoint holds") from error


def tensor_keys(value: Any, path: str) -> Iterator[str]:
    """The keys of the tensors in an encoded state of this path."""
    if isinstance(value, list):
        for i, one in enumerate(value):
            yield from tensor_keys(one, f"{path}/{i}")
    elif isinstance(value, dict):
        if value.get(MARK) == "tensor":
            yield path
        elif MARK in value:
            yield from tensor_keys(value.get("of"), path)
        else:
            for key, one in value.items():
                yield from tensor_keys(one, _below(path, key))
