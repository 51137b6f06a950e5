"""What modules and their code keep besides weights: noted before a run, and put back after it.

A forward may change what it keeps: running statistics, a codebook, counters, lists, globals. A run that the
author did not ask for must leave all that as it was. A unit that is recomputed must begin with the state with
which its first run began, and leave what that left.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Generator, Tensor, nn

from penstock._engine.values import map_tensors
from penstock.partition.names import FakeTensor

REGISTRIES = frozenset(vars(nn.Module())) - {"training"}
"""The attributes in which a module keeps its parts and hooks, and not the author's values."""
_CONTAINERS = (list, dict, set, deque)
_GENERATORS = (Generator, np.random.Generator, np.random.RandomState, random.Random)
_SHARED_GENERATORS = [cast("Any", get).__self__ for get in (random.getstate, np.random.get_state)]
"""Those behind the functions of ``random`` and ``numpy.random``."""
_DEPTH, _MOST = 6, 1000
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
    "builtins",
    "typing",
    "abc",
)
"""Packages whose objects and code are no state of a model."""
_KINDS = WeakKeyDictionary[type, bool]()
MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()
"""Stands for an attribute that is not there."""


class Snapshot:
    """What modules keep now: attributes and buffers, and the containers, objects and generators in these.

    Iterators cannot be put back.

    Args:
        modules: the modules, each for itself.
        others: other objects or functions.
        code: whether to note also what the code of classes, hooks and functions reaches: globals, attributes
            of classes, enclosed variables, and the random numbers of Python and NumPy.
        data: whether to copy the modules' own tensors, but for parameters; otherwise fakes stand in for them.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        others: Iterable[Any] = (),
        *,
        code: bool = False,
        data: bool = True,
    ) -> None:
        self._code, self._data, self._attribute = code, data, ""
        self._things: dict[int, tuple[Any, Any]] = {}
        self._reached_by: dict[int, str] = {}
        self._tensors: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._entries: list[tuple[Any, str, Any]] = []
        self._generators: dict[int, tuple[Any, Any]] = {}
        self._searched: set[int] = set()
        self._written: set[int] = set()
        for module in modules:
            self._look_at_module(module)
        for thing in [*others, *(_SHARED_GENERATORS if code else ())]:
            self._look(thing, 0)

    # ---- what is there

    def _look_at_module(self, module: nn.Module) -> None:
        state, kind = vars(module), type(module)
        if self._data:
            if isinstance(module._buffers, dict):
                self._note(module._buffers, 0)
            else:  # a scripted module's
                for buffer in module._buffers.values():
                    self._note_tensor(buffer)
        if self._code:
            for name in REGISTRIES & state.keys():
                if isinstance(state[name], dict):
                    self._things[id(state[name])] = state[name], dict(state[name])
            for base in kind.__mro__:
                self._look_at_class(base)
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for hook in hooks.values():
                    self._look(hook, 1)
        if self._code or not is_of_library(kind):
            self._things[id(state)] = state, dict(state)
            for name, value in state.items():
                if name not in REGISTRIES:
                    self._attribute = name
                    self._look(value, 1)
            self._attribute = ""

    def _look(self, value: Any, depth: int) -> None:
        if depth > _DEPTH or id(value) in self._things:
            return
        if isinstance(value, Tensor):
            if self._data or (depth > 1 and type(value) is Tensor):
                self._note_tensor(value)
        elif isinstance(value, _GENERATORS):
            self._generators[id(value)] = value, drawn(value)
        elif isinstance(value, FunctionType | MethodType):
            if self._code:
                self._look_at_code(value, depth)
        elif isinstance(value, (tuple, *_CONTAINERS)):
            self._note(value, depth)
        elif isinstance(value, nn.Module):
            for name, member in vars(value).items() if not is_of_library(type(value)) else ():
                if name not in REGISTRIES and not isinstance(member, nn.Module):
                    self._look(member, depth + 1)
        elif hasattr(value, "__dict__") and not (
            isinstance(value, type | ModuleType) or is_of_library(type(value))
        ):
            self._note(value, depth)

    def _note(self, thing: Any, depth: int) -> None:
        """Note what a container or object holds, and what is in that."""
        members = thing
        if not isinstance(thing, tuple):
            members = _contents(thing)
            self._things[id(thing)] = thing, members
            self._reached_by[id(thing)] = self._attribute
        if len(members) <= _MOST:
            for member in members.values() if isinstance(members, dict) else members:
                if not isinstance(member, int | float | str):
                    self._look(member, depth + 1)

    def _note_tensor(self, tensor: Tensor) -> None:
        without = isinstance(tensor, nn.Parameter | FakeTensor) or tensor.is_meta
        if not (without or id(tensor) in self._tensors):
            self._tensors[id(tensor)] = tensor, _version(tensor), tensor.detach().clone()

    def _look_at_class(self, kind: type) -> None:
        if id(kind) in self._searched or _is_of_library(kind.__module__):
            return
        self._searched.add(id(kind))
        for name, value in vars(kind).items():
            if isinstance(value, FunctionType):
                if name != "__init__":
                    self._look_at_code(value, 1)
            elif not name.startswith("__"):
                if isinstance(value, int | float | str | None):
                    self._entries.append((_Attributes(kind), name, value))
                self._look(value, 1)

    def _look_at_code(self, function: FunctionType | MethodType, depth: int) -> None:
        """Look at the globals that a function names, and at what it encloses."""
        if isinstance(function, MethodType):
            self._look(function.__self__, depth)
            self._look(function.__func__, depth)
            return
        if id(function) in self._searched or _is_of_library(function.__module__ or ""):
            return
        self._searched.add(id(function))
        known = function.__globals__
        entries = [
            (known, name, known[name]) for name in function.__code__.co_names if name in known
        ]
        for cell in function.__closure__ or ():
            table = _Attributes(cell)
            if (value := table.get("cell_contents", MISSING)) is not MISSING:
                entries.append((cast("Any", table), "cell_contents", value))
        self._entries += entries
        for _, _, value in entries:
            if not isinstance(value, Tensor):
                self._look(value, depth + 1)

    # ---- what was there

    def restore(self, stays: Callable[[Any, Any], bool] = lambda thing, before: False) -> str:
        """Put back what has changed; containers, objects and tensors stay the same ones.

        Args:
            stays: whether a container or object, which is given with what it held, is let be for now.

        Returns:
            the name of a module's attribute in whose containers or objects something has changed.
        """
        for generator, state in self._generators.values():
            draw_from(generator, state)
        for table, name, value in self._entries:
            if table.get(name, MISSING) is not value:
                table[name] = value
        for tensor, version, before in self._tensors.values():
            if _has_moved(tensor, version, before):
                tensor.data.copy_(before)
        moved = ""
        for key, (thing, contents) in self._things.items():
            if is_changed(thing, contents):
                moved = moved or self._reached_by.get(key, "")
                if not stays(thing, contents):
                    put_back(thing, contents)
        return moved

    def note_written(self) -> None:
        """Note which tensors have been written into since, as a run :meth:`again` will do."""
        self._written = {key for key, of in self._tensors.items() if _has_moved(*of)}

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context in which all is as it was noted; afterwards it is again as it is now.

        Other tensors stand in for those that were changed in place: a backward may need these as they are.
        """
        twins = {
            key: of[2].clone()
            for key, of in self._tensors.items()
            if key in self._written or _has_moved(*of)
        }

        def twin(value: Any) -> Any:
            if isinstance(value, tuple):
                return map_tensors(value, twin) if any(map(is_moved, value)) else value
            return twins.get(id(value), value)

        def is_moved(value: Any) -> bool:
            return any(map(is_moved, value)) if isinstance(value, tuple) else id(value) in twins

        now = [(thing, _contents(thing)) for thing, _ in self._things.values()]
        drawn_now = [(generator, drawn(generator)) for generator, _ in self._generators.values()]
        try:
            for thing, contents in self._things.values():
                if isinstance(contents, dict):
                    then: Any = {name: twin(value) for name, value in contents.items()}
                else:
                    then = type(contents)(map(twin, contents))
                if is_changed(thing, then):
                    put_back(thing, then)
            for generator, state in self._generators.values():
                draw_from(generator, state)
            yield
        finally:
            for thing, contents in now:
                if is_changed(thing, contents):
                    put_back(thing, contents)
            for generator, state in drawn_now:
                draw_from(generator, state)


@contextmanager
def state_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context after which modules keep what they kept before."""
    snapshot = Snapshot(modules)
    try:
        yield
    finally:
        snapshot.restore()


class _Attributes:
    """The attributes of a class or of a cell, as a table."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def get(self, name: str, default: Any) -> Any:
        try:
            return getattr(self._of, name, default)
        except ValueError:  # a cell that nothing has been put into yet
            return default

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._of, name, value)


def drawn(generator: Any) -> Any:
    """The state of a generator of random numbers, of torch, NumPy or Python."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def draw_from(generator: Any, state: Any) -> None:
    """Let a generator draw from a state on."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The author's attributes of a module, without parameters, buffers, modules and hooks."""
    return {name: value for name, value in vars(module).items() if name not in REGISTRIES}


def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


def is_of_library(kind: type) -> bool:
    """Tell whether a class, with all of its bases, is of a package whose objects are no state of a model."""
    if kind not in _KINDS:
        _KINDS[kind] = all(_is_of_library(base.__module__) for base in kind.__mro__)
    return _KINDS[kind]


def _contents(thing: Any) -> Any:
    inside = _inside(thing)
    if isinstance(inside, dict):
        return dict(dict.items(inside))
    return set(inside) if isinstance(inside, set) else list(inside)


def _inside(thing: Any) -> Any:
    return thing if isinstance(thing, _CONTAINERS) else vars(thing)


def is_changed(thing: Any, before: Any) -> bool:
    """Tell whether a container or object holds other members than before."""
    now = _inside(thing)
    if len(now) != len(before):
        return True
    if isinstance(now, set):
        return bool(now != before)
    if isinstance(now, dict):
        return not (
            all(map(is_, dict.values(now), before.values()))
            and all(map(is_, dict.keys(now), before))
        )
    return not all(map(is_, now, before))


def _has_moved(tensor: Tensor, version: int, before: Tensor) -> bool:
    """Tell whether a tensor may have been written into."""
    if _version(tensor) != version or tensor.layout is not torch.strided:
        return True
    # What is written through ``.data`` moves no version. To compare on a GPU would wait for it.
    return tensor.device.type != "cpu" or not torch.equal(tensor, before)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


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
    """Tell whether a value is a fake tensor or has one inside."""
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
