"""Find and replace what stands inside nested values: the arguments and results of an author's modules."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

Change = Callable[[Any], Any]


def leaves(value: Any) -> Iterator[Any]:
    """What stands in tuples, lists, dicts and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from leaves(item)
    elif _is_record(value):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name, None))
    else:
        yield value


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors among the leaves."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def replaced(value: Any, change: Change) -> Any:
    """The value with changed leaves; what holds no changed leaf stays the same object."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return _replaced_items(value, change)
    if isinstance(value, tuple | list):
        items = [replaced(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return _sequence(value, items)
    if _is_record(value):
        return _replaced_fields(value, change)
    return change(value)


def skeleton(value: Any) -> Any:
    """The value's containers without its leaves, to be compared."""
    if isinstance(value, Mapping):
        return type(value), *((key, skeleton(item)) for key, item in value.items())
    if isinstance(value, tuple | list):
        return type(value), *map(skeleton, value)
    if _is_record(value) and not isinstance(value, Tensor):
        fields = dataclasses.fields(value)
        return type(value), *(skeleton(getattr(value, field.name, None)) for field in fields)
    return None


def without(value: Any, kinds: tuple[type, ...]) -> Any:
    """The value with ``None`` for leaves of these classes."""
    return replaced(value, lambda leaf: None if type(leaf) in kinds else leaf) if kinds else value


def tensors_deep_in(value: Any, depth: int = 6) -> Iterator[Tensor]:
    """The tensors that can be reached from any object, but not through modules."""
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, str | int | float | nn.Module | type | None):
        inner: Any = value
        if isinstance(value, Mapping):
            inner = value.values()
        elif not isinstance(value, list | tuple | set):
            inner = getattr(value, "__dict__", {}).values()
        for item in inner:
            yield from tensors_deep_in(item, depth - 1)


def _sequence(like: Any, items: list[Any]) -> Any:
    if hasattr(like, "_fields"):
        return type(like)(*items)
    return type(like)(items)


def _replaced_items(value: Mapping[Any, Any], change: Change) -> Any:
    items = {key: replaced(item, change) for key, item in value.items()}
    if all(new is value[key] for key, new in items.items()):
        return value
    if type(value) is dict:
        return items
    # A mapping of its own kind, such as the outputs of transformers.
    found: Any = copy.copy(value)
    for key, item in items.items():
        if item is not value[key]:
            found[key] = item
    return found


def _replaced_fields(value: Any, change: Change) -> Any:
    found = {
        field.name: replaced(old, change)
        for field in dataclasses.fields(value)
        if (old := getattr(value, field.name, None)) is not None
    }
    changed = {name: new for name, new in found.items() if new is not getattr(value, name)}
    if not changed:
        return value
    made = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(made, name, new)
    return made


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
