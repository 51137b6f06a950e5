"""Nested values: take them apart and put others of the same kind together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from penstock.errors import UsageError


class Opened(NamedTuple):
    """A nested value, taken apart by one level.

    Attributes:
        keys: what its items are found under: positions, keys or the names of fields.
        items: its items.
        made: makes a value of the same kind from others.
        named: whether the items are fields, written with a dot.
    """

    keys: Sequence[Any]
    items: Sequence[Any]
    made: Callable[[Sequence[Any]], Any]
    named: bool = False

    def path(self, where: str, key: Any) -> str:
        """How an item is written, such as ``batch['mask']``."""
        return f"{where}.{key}" if self.named else f"{where}[{key!r}]"


def opened(value: Any) -> Opened | None:
    """Take a value apart: a tuple, list, mapping or dataclass, also of a class of the user's."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, Mapping):
        return Opened(list(value), list(value.values()), lambda items: _mapping(value, items))
    names = getattr(value, "_fields", None)
    if isinstance(value, tuple) and names is not None:
        return Opened(names, value, getattr(type(value), "_make"), named=True)  # noqa: B009 - no type knows it
    if isinstance(value, tuple | list):
        return Opened(range(len(value)), value, type(value))
    if is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    return None


def _fields(value: Any) -> Opened:
    names = [field.name for field in fields(value) if field.init]
    items = [getattr(value, name) for name in names]

    def made(changed: Sequence[Any]) -> Any:
        return replace(value, **dict(zip(names, changed, strict=True)))

    return Opened(names, items, made, named=True)


def _mapping(value: Mapping[Any, Any], items: Sequence[Any]) -> Any:
    pairs = zip(value, items, strict=True)
    if not isinstance(value, MutableMapping):
        try:
            return type(value)(dict(pairs))  # type: ignore[call-arg] # a mapping's class makes one of a dict
        except Exception as error:
            raise UsageError(
                f"a {type(value).__name__} can neither be changed nor made "
                f"from a dict ({error}), so there is none "
                "for each microbatch: give a dict instead"
            ) from error
    # A copy keeps what else a class such as a defaultdict or a tokenizer's batch holds.
    made = copy.copy(value)
    for key, item in list(pairs):
        made[key] = item
    return made


def tensors_of(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in a value, each with where it stands."""
    if isinstance(value, Tensor):
        yield path, value
    elif found := opened(value):
        for key, item in zip(found.keys, found.items, strict=True):
            yield from tensors_of(item, found.path(path, key))


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A value of the same kind with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    found = opened(value)
    if found is None:
        return value
    return found.made([mapped(item, change) for item in found.items])
