"""What the author's code keeps besides weights and buffers: a run without data leaves it as it was."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Generator, Tensor, nn

from penstock.partition.names import FakeTensor

CONTAINERS = (list, dict, set, deque)
GENERATORS = (Generator, np.random.Generator, np.random.RandomState)
REGISTRIES = frozenset(vars(nn.Module())) - {"training"}
"""The attributes in which a module keeps its parts and hooks, and not the author's values."""
_DEPTH, _MOST = 4, 1000
"""How deep objects and containers are searched, and how many members of one."""
_LIBRARIES = (
    "torch",
    "penstock",
    "numpy",
    "logging",
    "threading",
    "lightning",
    "pytorch_lightning",
    "accelerate",
)
"""Packages whose objects and code are no state of a model."""
_GONE = object()
_KINDS = WeakKeyDictionary[type, bool]()


class Kept:
    """The attributes, containers, objects and globals that modules' code can reach, as they are now.

    Iterators and generators cannot be put back; a model's code that takes from one between batches does so
    in a run without data too.

    Args:
        modules: the modules.
        others: other functions or objects whose state is kept too.
    """

    def __init__(self, modules: Iterable[nn.Module], others: Iterable[Any] = ()) -> None:
        self._things: dict[int, tuple[Any, Any]] = {}
        self._attribute, self._through = "", dict[int, str]()
        self._names: list[tuple[dict[str, Any], str, Any]] = []
        self._cells: list[tuple[Any, Any]] = []
        self._code: set[int] = set()
        self._generators: list[tuple[Any, Any]] = []
        self._tensors: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._random = random.getstate(), np.random.get_state()
        self.modules = list(modules)
        for module in self.modules:
            state = vars(module)
            tables = [t for name, t in state.items() if name in REGISTRIES and isinstance(t, dict)]
            for table in (state, *tables):
                self._things[id(table)] = table, dict(table)
            for name, value in state.items():
                if name not in REGISTRIES:
                    self._attribute = name
                    self._look(value, 1)
            self._attribute = ""
            for kind in type(module).__mro__:
                if not _is_of_library(kind.__module__):
                    self._look_at_class(kind)
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for hook in hooks.values():
                    self._look(hook, 1)
        for other in others:
            self._look(other, 0)

    def _look(self, value: Any, depth: int) -> None:
        kind = type(value)
        if depth > _DEPTH or id(value) in self._things:
            return
        if isinstance(value, GENERATORS):
            self._generators.append((value, drawn(value)))
            return
        if type(value) is Tensor and depth > 1:
            # Of a module's attribute, at depth 1, a fake tensor is written into instead.
            if not (value.is_meta or value.is_inference()):
                self._tensors[id(value)] = value, value._version, value.detach().clone()
            return
        if isinstance(value, FunctionType):
            self._look_at_code(value, depth)
        elif isinstance(value, MethodType):
            self._look(value.__self__, depth)
            self._look(value.__func__, depth)
        elif isinstance(value, CONTAINERS):
            if len(value) <= _MOST:
                self._things[id(value)] = value, _contents(value)
                self._through[id(value)] = self._attribute
                for member in value.values() if isinstance(value, dict) else value:
                    if not isinstance(member, int | float | str):
                        self._look(member, depth + 1)
        elif isinstance(value, nn.Module):
            if not _is_of_library(kind.__module__):
                for name, member in list(vars(value).items()):
                    if name not in REGISTRIES and not isinstance(member, nn.Module):
                        self._look(member, depth + 1)
        elif (
            hasattr(value, "__dict__")
            and not isinstance(value, type | ModuleType | nn.Module | Tensor | Generator)
            and not _is_of_library(kind.__module__)
        ):
            self._things[id(value)] = value, dict(vars(value))
            self._through[id(value)] = self._attribute
            for member in list(vars(value).values()):
                self._look(member, depth + 1)

    def _look_at_class(self, kind: type) -> None:
        if id(kind) in self._code:
            return
        self._code.add(id(kind))
        for name, value in vars(kind).items():
            if isinstance(value, FunctionType):
                if name != "__init__":
                    self._look_at_code(value, 1)
            elif not name.startswith("__"):
                if isinstance(value, int | float | str | None):
                    self._names.append((_ClassTable(kind), name, value))  # type: ignore[arg-type]
                self._look(value, 1)

    def _look_at_code(self, function: FunctionType, depth: int) -> None:
        """Look at the globals that a function names, and at what it encloses."""
        if id(function) in self._code or _is_of_library(function.__module__ or ""):
            return
        self._code.add(id(function))
        known = function.__globals__
        for name in function.__code__.co_names:
            if name in known:
                self._names.append((known, name, known[name]))
                if not isinstance(known[name], Tensor):
                    self._look(known[name], depth + 1)
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            self._cells.append((cell, value))
            if not isinstance(value, Tensor):
                self._look(value, depth + 1)

    def restore(self, stays: Callable[[Any, Any], bool] = lambda thing, before: False) -> str:
        """Put back what has changed.

        Args:
            stays: whether a container or object, which is given with what it held, is let be for now.

        Returns:
            the name of a module's attribute in whose containers or objects something has changed.
        """
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])
        for generator, state in self._generators:
            draw_from(generator, state)
        for table, name, value in self._names:
            if table.get(name, _GONE) is not value:
                table[name] = value
        for cell, value in self._cells:
            if cell.cell_contents is not value:
                cell.cell_contents = value
        with torch.no_grad():
            for tensor, version, copy in self._tensors.values():
                if tensor._version != version:
                    tensor.copy_(copy)
        moved = ""
        for key, (thing, before) in self._things.items():
            if is_changed(thing, before):
                moved = moved or self._through.get(key, "")
                if not stays(thing, before):
                    put_back(thing, before)
        return moved


def drawn(generator: Any) -> Any:
    """The state of a generator of random numbers, of torch or numpy."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def draw_from(generator: Any, state: Any) -> None:
    """Let a generator draw from a state on."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The author's attributes of a module, without parameters, buffers, modules and hooks."""
    return {name: value for name, value in vars(module).items() if name not in REGISTRIES}


class _ClassTable:
    """The attributes of a class, as a table."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def get(self, name: str, default: Any) -> Any:
        return vars(self._kind).get(name, default)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._kind, name, value)


def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES or module == "builtins"


def is_of_library(kind: type) -> bool:
    """Whether a class, with all of its bases, is of a package whose objects are no state of a model."""
    if kind not in _KINDS:
        _KINDS[kind] = all(_is_of_library(base.__module__) for base in kind.__mro__)
    return _KINDS[kind]


def _contents(thing: Any) -> Any:
    if isinstance(thing, dict):
        return dict(dict.items(thing))
    return set(thing) if isinstance(thing, set) else list(thing)


def _inside(thing: Any) -> Any:
    return thing if isinstance(thing, CONTAINERS) else vars(thing)


def is_changed(thing: Any, before: Any) -> bool:
    """Whether a container or object holds other members than before."""
    now = _inside(thing)
    if len(now) != len(before):
        return True
    if isinstance(now, dict):
        return any(dict.get(now, key, _GONE) is not value for key, value in before.items())
    if isinstance(now, set):
        return bool(now != before)
    return any(one is not other for one, other in zip(now, before, strict=True))


def put_back(thing: Any, before: Any) -> None:
    """Let a container or object hold what it held before."""
    now = _inside(thing)
    if isinstance(now, dict):
        kind: Any = OrderedDict if isinstance(now, OrderedDict) else dict
        kind.clear(now)
        kind.update(now, before)
    elif isinstance(now, list):
        now[:] = before
    else:
        now.clear()
        (now.update if isinstance(now, set) else now.extend)(before)


def holds_fakes(value: Any, depth: int = 3) -> bool:
    """Whether a value is a fake tensor or has one inside."""
    if isinstance(value, FakeTensor):
        return True
    if not depth or isinstance(value, nn.Module | Tensor):
        return False
    if isinstance(value, dict):
        return any(holds_fakes(one, depth - 1) for one in dict.values(value))
    if isinstance(value, list | tuple | set | deque):
        return len(value) <= _MOST and any(holds_fakes(one, depth - 1) for one in value)
    inside = getattr(value, "__dict__", None)
    return isinstance(inside, dict) and any(holds_fakes(x, depth - 1) for x in inside.values())


# ---- other things in tables, for a while

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()
"""Stands for an attribute that is not there."""


@contextmanager
def replaced(entries: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Put other values into tables, such as a module's attributes, for a while.

    Args:
        entries: tables, names and values; ``MISSING`` takes an entry out.
    """
    before: list[tuple[Any, str, Any]] = []
    try:
        for table, name, value in entries:
            before.append((table, name, table.get(name, MISSING)))
            _put_entry(table, name, value)
        yield
    finally:
        for table, name, value in reversed(before):
            _put_entry(table, name, value)


def _put_entry(table: Any, name: str, value: Any) -> None:
    if value is MISSING:
        table.pop(name, None)
    else:
        table[name] = value
