"""Attributes that units set: their own stage may read them, other stages and the loss may not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.errors import PartitionError
from penstock.partition.state import CONTAINERS, Changed, attributes_of, is_equal, line_of, same

_MISSING = object()


class Attribute(NamedTuple):
    """An attribute that a unit has set: its module, its name, and the event that set it."""

    module: nn.Module
    name: str
    event: int


class Kept:
    """Watches the attributes of units in a run.

    Args:
        units: the units by path.
        read: called with an attribute that is read while the unit that set it is not running, and its value.
        changes_again: called with two events, of which the second changes what the first set.

    Attributes:
        between: the changes that code between units made to units' attributes.
    """

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        read: Callable[[Attribute, Any], None],
        changes_again: Callable[[int, int], None],
    ) -> None:
        self._read, self._changes_again = read, changes_again
        self._parts = {path: list(unit.named_modules()) for path, unit in units.items()}
        self._known = {
            id(part): _copied(attributes_of(part))
            for parts in self._parts.values()
            for _, part in parts
        }
        self._set: dict[tuple[int, str], Attribute] = {}
        self._watch = _ReadWatch(self._note)
        self._inside: set[int] = set()
        self.between: list[Changed] = []

    def enter(self, path: str) -> None:
        """Note that a unit is called."""
        for inner, part, name, value in self._changed(path):
            if not isinstance(value, torch.Tensor | nn.Module):
                owner = ".".join(filter(None, (path, inner)))
                self.between.append(
                    Changed(f"the attribute {name!r} of {owner}{line_of(part, name)}")
                )
        self._inside = {id(part) for _, part in self._parts[path]}

    def leave(self, path: str, event: int) -> None:
        """Note that the unit has returned."""
        self._inside = set()
        for _, part, name, _ in self._changed(path):
            before = self._set.get((id(part), name))
            if before is not None:
                self._changes_again(before.event, event)
            self._set[id(part), name] = Attribute(part, name, event)
            self._watch.add(type(part), name)

    def close(self) -> list[Attribute]:
        """Stop watching, and return the attributes that units have set."""
        self._watch.close()
        return list(self._set.values())

    def _changed(self, path: str) -> Iterator[tuple[str, nn.Module, str, Any]]:
        """The attributes of a unit's modules that have changed since the last look."""
        for inner, part in self._parts[path]:
            known, now = self._known[id(part)], attributes_of(part)
            changed = [n for n, value in now.items() if not _is_as(known.get(n, _MISSING), value)]
            for name in changed:
                known[name] = _held(now[name])
                yield inner, part, name, now[name]

    def _note(self, module: nn.Module, name: str, value: Any) -> None:
        attribute = self._set.get((id(module), name))
        if attribute is not None and id(module) not in self._inside:
            self._read(attribute, value)


@contextmanager
def hidden(attributes: Sequence[tuple[nn.Module, str, str]]) -> Iterator[None]:
    """Refuse to read some attributes, given with their units' names: the last stage has other values."""
    units = {(id(module), name): unit for module, name, unit in attributes}

    def refuse(module: nn.Module, name: str, _: Any) -> None:
        if (id(module), name) in units:
            raise PartitionError(
                f"the loss uses the attribute {name!r} of {units[id(module), name]}, which is in another "
                "stage; return it from there, or add it as a loss (penstock.add_loss)"
            )

    watch = _ReadWatch(refuse)
    try:
        for module, name, _ in attributes:
            watch.add(type(module), name)
        yield
    finally:
        watch.close()


_Note = Callable[[nn.Module, str, Any], None]


class _ReadWatch:
    """Calls a function when some attributes of instances are read."""

    def __init__(self, note: _Note) -> None:
        self._note = note
        self._before: dict[tuple[type, str], Any] = {}

    def add(self, kind: type, name: str) -> None:
        """Watch an attribute of all instances of a class."""
        inherited = getattr(kind, name, _MISSING)
        if (kind, name) not in self._before and not hasattr(type(inherited), "__get__"):
            self._before[kind, name] = vars(kind).get(name, _MISSING)
            setattr(kind, name, _Watched(name, inherited, self._note))

    def close(self) -> None:
        """Restore the classes."""
        for (kind, name), before in self._before.items():
            if before is _MISSING:
                delattr(kind, name)
            else:
                setattr(kind, name, before)


class _Watched:
    """The descriptor of a watched attribute."""

    def __init__(self, name: str, default: Any, note: _Note) -> None:
        self._name, self._default, self._note = name, default, note

    def __get__(self, module: nn.Module | None, kind: type) -> Any:
        value = self._default if module is None else vars(module).get(self._name, self._default)
        if value is _MISSING:
            raise AttributeError(self._name)
        if module is not None:
            self._note(module, self._name, value)
        return value

    def __set__(self, module: nn.Module, value: Any) -> None:
        vars(module)[self._name] = value

    def __delete__(self, module: nn.Module) -> None:
        if self._name not in vars(module):
            raise AttributeError(self._name)
        del vars(module)[self._name]


def _copied(attributes: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: _held(value) for name, value in attributes.items()}


def _held(value: Any) -> tuple[Any, Any]:
    return value, value.copy() if isinstance(value, CONTAINERS) else None


def _is_as(known: Any, value: Any) -> bool:
    if known is _MISSING or not is_equal(known[0], value):
        return False
    return known[1] is None or same(known[1], value)
