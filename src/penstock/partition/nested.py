"""Tensors inside nested values: lists, dictionaries, dataclasses, outputs of transformers and the like."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES

_ATOMS = frozenset({int, float, bool, str, bytes, type(None), torch.dtype, torch.device, slice})


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors inside a value, in order."""
    tensors: list[Tensor] = []
    _collect(value, tensors.append)
    return tensors


def _collect(value: Any, add: Callable[[Tensor], None]) -> None:
    if isinstance(value, Tensor):
        add(value)
        return
    kind = type(value)
    if kind in _ATOMS:
        return
    for child in _children(value, kind) or ():
        _collect(child, add)


def _children(value: Any, kind: type) -> Any:
    if kind is tuple or kind is list or isinstance(value, tuple | list):
        return value
    if isinstance(value, dict):
        return value.values()
    if kind in SUPPORTED_NODES:
        return SUPPORTED_NODES[kind].flatten_fn(value)[0]
    if isinstance(value, UserDict) or (is_dataclass(value) and not isinstance(value, type)):
        return _attributes(value).values()
    return None


def _attributes(value: Any) -> dict[str, Any]:
    if hasattr(value, "__dict__"):
        attributes: dict[str, Any] = vars(value)
        return attributes
    return {field.name: getattr(value, field.name) for field in fields(value)}


Place = tuple[Any, ...]
"""The path to a tensor inside a value: indices, keys or names."""


def located(value: Any) -> dict[Place, Tensor]:
    """The tensors inside a value by their places, in order."""
    return {place: leaf for place, leaf in _leaves(value, ()) if isinstance(leaf, Tensor)}


def plain_in(value: Any) -> list[bool | float | str]:
    """The plain values inside a value, in order."""
    return [leaf for _, leaf in _leaves(value, ()) if type(leaf) in (bool, int, float, str)]


def opaque_in(value: Any) -> dict[Place, Any]:
    """The objects inside a value that are not searched for tensors, such as caches, by their places."""
    return {
        place: leaf
        for place, leaf in _leaves(value, ())
        if not isinstance(leaf, Tensor) and type(leaf) not in _ATOMS
    }


def _leaves(value: Any, at: Place) -> Iterator[tuple[Place, Any]]:
    """The leaves of a value, which cannot be searched further, with their places."""
    kind = type(value)
    is_leaf = isinstance(value, Tensor) or kind in _ATOMS
    children = None if is_leaf else _children(value, kind)
    if children is None:
        yield at, value
        return
    names = value if isinstance(value, dict) else range(len(children))
    for name, child in zip(names, children, strict=True):
        yield from _leaves(child, (*at, name))


def replaced(value: Any, put: Callable[[Tensor], Any]) -> Any:
    """A value with its tensors replaced: containers are new, everything else is the same object."""
    if isinstance(value, Tensor):
        return put(value)
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is list:
        return [replaced(child, put) for child in value]
    if kind is tuple:
        return tuple([replaced(child, put) for child in value])
    if kind is dict:
        return {name: replaced(child, put) for name, child in value.items()}
    return _rebuilt(value, kind, put)


def _rebuilt(value: Any, kind: type, put: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Mapping) and isinstance(value, dict):
        twin: Any = copy.copy(value)
        for name, child in value.items():
            twin[name] = replaced(child, put)
        return twin
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        # This way also for a subclass such as PackedSequence, whose constructor does other things.
        return tuple.__new__(kind, [replaced(child, put) for child in value])
    if kind in SUPPORTED_NODES:
        node = SUPPORTED_NODES[kind]
        children, context = node.flatten_fn(value)
        return node.unflatten_fn([replaced(child, put) for child in children], context)
    if isinstance(value, UserDict) or (is_dataclass(value) and not isinstance(value, type)):
        twin = copy.copy(value)
        for name, child in _attributes(value).items():
            object.__setattr__(twin, name, replaced(child, put))
        return twin
    if isinstance(value, list):
        twin = copy.copy(value)
        twin[:] = [replaced(child, put) for child in value]
        return twin
    return value


def without(value: Any, names: set[Any]) -> Any:
    """A mapping or sequence with ``None`` under some names."""
    if isinstance(value, dict):
        twin = copy.copy(value)
        for name in names & set(twin):
            twin[name] = None
        return twin
    if isinstance(value, tuple | list):
        items = [None if i in names else item for i, item in enumerate(value)]
        return tuple.__new__(type(value), items) if isinstance(value, tuple) else items
    return value
