"""The state that a model's modules hold, before and after a run: attributes, counters, iterators."""

from __future__ import annotations

import inspect
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch._subclasses import FakeTensor

_REGISTRIES = frozenset(vars(nn.Module())) - {"training"}
CONTAINERS = (list, dict, set, deque)
"""The types of mutable containers."""
_PLAIN = (int, float, str, bool, type(None))
_DEPTH = 4
"""How deep helper objects and containers are searched."""
_MOST = 1000
"""How many members of a container are searched."""
_LARGE = 10**6
"""The largest tensor in an attribute, in elements, that is copied for the time of a run."""


@dataclass(frozen=True)
class Changed:
    """Something that a run has changed.

    Attributes:
        what: a description, with the module and, if known, the line that assigns to it.
        units: the paths of the units that have it; empty if a module outside of units has it.
        attribute: the module's identity and the attribute's name, if it is an attribute.
    """

    what: str
    units: frozenset[str] = frozenset()
    attribute: tuple[int, str] | None = None


class _Whose(NamedTuple):
    """The owner of something: the unit, if it is in one; words for messages; and the attribute."""

    unit: str
    words: str
    module: nn.Module
    name: str = ""


@dataclass
class _Noted:
    """A container, helper object, class, tensor, array or generator: its contents, and owners by unit."""

    thing: Any
    contents: Any
    places: dict[str, _Whose] = field(default_factory=dict)

    @property
    def is_changed(self) -> bool:
        return not same(self.contents, _read(self.thing))


class _Replayed:
    """Stands for an iterator in a run, and records the items taken from it."""

    def __init__(self, rest: Iterator[Any]) -> None:
        self.rest, self.taken = rest, list[Any]()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.taken.append(next(self.rest))
        return self.taken[-1]


class Snapshot:
    """The state of a model's modules, except parameters and buffers.

    Args:
        model: the model.
        units: its units by path; changes inside a single unit are ignored.
    """

    def __init__(self, model: nn.Module, units: dict[str, nn.Module]) -> None:
        inside = {id(part): path for path, unit in units.items() for part in unit.modules()}
        self._outside = {
            id(module): path or f"the {type(module).__name__}"
            for path, module in model.named_modules()
            if id(module) not in inside
        }
        self._noted: dict[int, _Noted] = {}
        self._iterators: list[tuple[Any, Any, _Replayed]] = []
        for module in model.modules():
            unit, owner = inside.get(id(module), ""), self._outside.get(id(module), "")
            for name, value in attributes_of(module).items():
                words = f"what the attribute {name!r} of {owner} holds"
                self._look(value, _Whose(unit, words, module, name), 0, module, name)
            for kind in _classes(module):
                words = f"an attribute of the class {kind.__name__} of {owner}"
                self._look(kind, _Whose(unit, words, module), 1, None, None)
        # Only now, when the iterators have been replaced.
        self._modules = [(m, attributes_of(m), _registries(m)) for m in model.modules()]

    def look(self, value: Any) -> None:
        """Note what another value holds too."""
        self._look(value, _Whose("", "", self._modules[0][0]), 0, (), None)

    def _look(self, value: Any, place: _Whose, depth: int, holder: Any, name: Any) -> None:
        """Note what containers and helper objects hold, and which units have them."""
        if depth > _DEPTH or isinstance(value, nn.Module | nn.Parameter | str | int | float):
            return
        if _is_iterator(value) and not isinstance(holder, tuple | set):
            twin = _Replayed(value)
            _put(holder, name, twin)
            self._iterators.append((holder, name, twin))
            if id(holder) in self._noted:
                self._noted[id(holder)].contents = _read(holder)
            value = twin
        children: Any = enumerate(value) if isinstance(value, tuple) else ()
        if not isinstance(value, tuple):
            contents = _read(value) if place.unit == "" or not isinstance(value, Tensor) else None
            noted = self._noted.get(id(value)) or _Noted(value, contents)
            if contents is None or place.unit in noted.places:
                return
            self._noted[id(value)] = noted
            noted.places[place.unit] = place
            children = _members(contents)
        for key, child in list(children)[:_MOST]:
            self._look(child, place, depth + 1, value, key)

    def owner(self, module: nn.Module) -> str | None:
        """The name of a module outside of the units; ``None`` for a module inside them."""
        return self._outside.get(id(module))

    def changes(self) -> list[Changed]:
        """The changes outside of the units, or in objects that several units have."""
        changed: list[Changed] = []
        for module, before, _ in self._modules:
            owner, after = self.owner(module), attributes_of(module)
            names = [n for n in {**before, **after} if owner and _differs(before, after, n)]
            for name in names:
                text = f"the attribute {name!r} of {owner}{line_of(module, name)}"
                changed.append(Changed(text, attribute=(id(module), name)))
        for noted in self._noted.values():
            units, place = noted.places.keys(), noted.places.get("")
            draws = isinstance(noted.thing, Generator)
            if not (draws or place or len(units) > 1) or not noted.is_changed:
                continue
            if draws:
                text = "the state of a torch.Generator of the model, from which it draws"
                changed.append(Changed(text))
            elif place is not None:
                changed.append(Changed(place.words + line_of(place.module, place.name)))
            else:
                kind, paths = type(noted.thing).__name__, " and ".join(sorted(units)[:2])
                changed.append(Changed(f"an object (a {kind}) that {paths} have", frozenset(units)))
        return changed

    def has_new_tensors(self, counts: Callable[[Tensor], bool]) -> bool:
        """Whether an attribute, or a member of one, is now another tensor, for which ``counts`` is true."""
        pairs = [(before, attributes_of(m)) for m, before, _ in self._modules if self.owner(m)]
        pairs += [
            (dict(_members(noted.contents)), dict(_members(_read(noted.thing))))
            for noted in self._noted.values()
            if not isinstance(noted.thing, set)
        ]
        return any(
            isinstance(value, Tensor) and before.get(name) is not value and counts(value)
            for before, after in pairs
            for name, value in after.items()
        )

    def restore(self) -> None:
        """Restore everything that was noted."""
        for module, before, registries in self._modules:
            state = vars(module)
            for name in attributes_of(module).keys() - before.keys():
                del state[name]
            state.update(before)
            for name, held in registries.items():
                table = state[name]
                if len(table) != len(held) or any(table[n] is not v for n, v in held.items()):
                    table.clear()
                    table.update(held)
        for noted in self._noted.values():
            if noted.is_changed:
                _write(noted.thing, noted.contents)
        for holder, name, twin in self._iterators:
            _put(holder, name, chain(twin.taken, twin.rest) if twin.taken else twin.rest)


@contextmanager
def restored(value: Any) -> Iterator[None]:
    """A context that restores what an object holds."""
    contents = _read(value)
    try:
        yield
    finally:
        if contents is not None and not same(contents, _read(value)):
            _write(value, contents)


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The author's attributes of a module, without parameters, buffers, modules and hooks."""
    return {n: v for n, v in vars(module).items() if n not in _REGISTRIES}


def _registries(module: nn.Module) -> dict[str, dict[str, Any]]:
    state = vars(module)
    return {name: dict(state[name]) for name in _REGISTRIES if isinstance(state.get(name), dict)}


def _classes(module: nn.Module) -> list[type]:
    """The classes of a module that the author wrote."""
    kinds = type(module).__mro__
    return [k for k in kinds if not k.__module__.startswith(("torch.", "builtins", "penstock."))]


def _is_iterator(value: Any) -> bool:
    """Whether a value is an iterator without a visible position."""
    return hasattr(type(value), "__next__") and not hasattr(value, "__dict__")


def _read(value: Any) -> Any:
    """A copy of what a container, helper object, array or tensor holds; or ``None``."""
    if isinstance(value, CONTAINERS):
        return value.copy()
    if isinstance(value, Tensor):
        if isinstance(value, FakeTensor) or value.is_meta or value.is_inference():
            return None
        kept = value.detach().clone() if value.numel() <= _LARGE else value
        return _Numbers(value._version, kept)
    if isinstance(value, np.ndarray):
        return _Numbers(value.tobytes() if value.size <= _LARGE else b"", value.copy())
    if isinstance(value, Generator):
        return _Numbers(bytes(value.get_state().tolist()), value.get_state())
    if isinstance(value, _Replayed):
        return list(value.taken)
    if isinstance(value, type):
        return {
            n: v
            for n, v in vars(value).items()
            if not n.startswith("__") and isinstance(v, (*_PLAIN, *CONTAINERS))
        }
    if inspect.isroutine(value) or isinstance(value, ModuleType):
        return None
    slots = [n for kind in type(value).__mro__ for n in getattr(kind, "__slots__", ())]
    attributes = {n: getattr(value, n) for n in slots if hasattr(value, n)}
    attributes |= getattr(value, "__dict__", {})
    return attributes or (None if not hasattr(value, "__dict__") else attributes)


@dataclass
class _Numbers:
    """The contents of a tensor, array or generator: a mark that differs after a change, and a copy."""

    mark: Any
    copy: Any

    def put_back(self, value: Any) -> None:
        """Write the copy back into ``value``."""
        if isinstance(value, Generator):
            value.set_state(self.copy)
            return
        with torch.no_grad():
            value[...] = self.copy


def _write(value: Any, contents: Any) -> None:
    """Write its former contents back into a container, object, array or tensor."""
    if isinstance(contents, _Numbers):
        contents.put_back(value)
    elif isinstance(value, list | deque):
        value.clear()
        value.extend(contents)
    elif isinstance(value, dict | set):
        value.clear()
        value.update(contents)
    elif not isinstance(value, _Replayed):
        for name in (_read(value) or {}).keys() - contents.keys():
            delattr(value, name)
        for name, member in contents.items():
            if getattr(value, name, None) is not member:
                _put(value, name, member)


def _put(holder: Any, name: Any, value: Any) -> None:
    """Set a member of a container or an attribute."""
    if isinstance(holder, nn.Module):
        vars(holder)[name] = value
    elif isinstance(holder, list | dict | deque):
        holder[name] = value
    elif isinstance(holder, type):
        setattr(holder, name, value)
    else:
        object.__setattr__(holder, name, value)


def _members(contents: Any) -> list[tuple[Any, Any]]:
    if isinstance(contents, _Numbers) or contents is None:
        return []
    return list(contents.items() if isinstance(contents, dict) else enumerate(contents))


def _differs(before: dict[str, Any], after: dict[str, Any], name: str) -> bool:
    if name not in before or name not in after:
        return True
    return not is_equal(before[name], after[name])


def is_equal(old: Any, new: Any) -> bool:
    """Whether two values are the same, or plain and equal."""
    plain = isinstance(old, int | float | str | bool)
    return old is new or (plain and type(old) is type(new) and bool(old == new))


def same(before: Any, after: Any) -> bool:
    """Whether two copies of what something holds are equal."""
    if isinstance(before, _Numbers):
        return isinstance(after, _Numbers) and bool(before.mark == after.mark)
    if after is None or len(before) != len(after):
        return False
    if isinstance(before, set):
        return bool(before == after)
    if isinstance(before, dict):
        return list(before) == list(after) and all(is_equal(before[n], after[n]) for n in before)
    return all(map(is_equal, before, after))


def line_of(module: nn.Module, name: str = "") -> str:
    """The line in a module's methods that sets or changes an attribute, else its forward's line."""
    pattern = re.compile(
        rf"\.{name}\b(\[.*\])?(\.\w+)*\s*([-+*/|&%@]|//|\*\*)?=(?!=)|\.{name}\b(\.\w+)*\.\w+\("
        rf"|\bnext\(.*\.{name}\b|\bdel .*\.{name}\b"
    )
    otherwise = ""
    for method, file, start, lines in _methods(module):
        numbers = [n for n, line in enumerate(lines, start) if pattern.search(line)]
        if name and numbers and method != "__init__":
            return f" ({file}:{numbers[0]})"
        if method == "forward":
            otherwise = otherwise or f" (its forward: {file}:{start})"
    return otherwise


def _methods(module: nn.Module) -> Iterator[tuple[str, str, int, list[str]]]:
    """The author's methods of a module: name, file, first line, and all lines."""
    for kind in _classes(module):
        for method in filter(inspect.isfunction, vars(kind).values()):
            # Not the lines of the class: a class that was typed in has none.
            with suppress(OSError, TypeError):
                lines, start = inspect.getsourcelines(method)
                file = method.__code__.co_filename.replace("\\", "/").rpartition("/")[2]
                yield method.__name__, file, start, lines
