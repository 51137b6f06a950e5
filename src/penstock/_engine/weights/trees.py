"""Encode states as JSON data and tensors, and decode them, so that files hold them without pickle.

A value that JSON cannot express becomes an object with a mark, ``{"$": kind, "of": JSON data}``.
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
        return {key: encode(one, f"{path}/{key}", tensors) for key, one in value.items()}
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
    key, count = path, 1
    while key in tensors:
        key, count = f"{path}~{count}", count + 1
    tensors[key] = tensor.detach()
    return {MARK: "tensor", "of": key}


def decode(value: Any, read: Callable[[str], Any] | None = None) -> Any:
    """Decode what :func:`encode` returned; ``read`` returns the tensor of a key."""
    if isinstance(value, list):
        return [decode(one, read) for one in value]
    if not isinstance(value, dict):
        return value
    if MARK not in value:
        return {key: decode(one, read) for key, one in value.items()}
    try:
        kind, of = value[MARK], value["of"]
        if kind == "tensor" and read is not None:
            return read(of)
        if kind == "scalar":
            number, dtype = decode(of)
            return torch.tensor(number, dtype=dtype, device="cpu")
        return _KINDS[kind][2](decode(of, read))
    except InputFileError:
        raise
    except _MALFORMED as error:
        text = printable(str(value), "")[:200]
        raise InputFileError(f"{text} stands for nothing that a checkpoint holds") from error


def keys_of(value: Any) -> Iterator[str]:
    """The keys of the tensors in an encoded state."""
    if isinstance(value, dict) and value.get(MARK) == "tensor":
        yield str(value.get("of"))
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from keys_of(one)
