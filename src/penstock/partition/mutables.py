"""What code may change besides tensors: containers, objects, arrays, generators and iterators.

A *mutable* is one of them, with what it held when it was looked at.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch._subclasses import FakeTensor

from penstock._engine.values import map_tensors
from penstock.partition.lines import line_of

CONTAINERS = (list, dict, set, deque)
"""The types of mutable containers."""
_PLAIN = (int, float, str, bool, type(None))
_NUMBERS = (Tensor, np.ndarray, Generator)
_DEPTH = 4
"""How deep helper objects and containers are searched."""
_MOST = 1000
"""How many members of a container are searched."""
_LOOPS = ("lightning.", "pytorch_lightning.", "accelerate.", "transformers.trainer")
"""Where training loops come from: their objects, such as a progress bar, are no state of the model."""
_LARGE = 10**6
"""The largest tensor, in elements, that is copied for the time of a run."""

Place = tuple[Any, ...]
"""The path to something inside a value: indices, keys and names of attributes."""


class Old(NamedTuple):
    """Stands for a member that was there before, under its key of that time."""

    key: Any


class Words(NamedTuple):
    """What something is, for messages, and the module that has it."""

    text: str
    module: nn.Module | None = None

    def __str__(self) -> str:
        return self.text if self.module is None else f"{self.text}{line_of(self.module)}"


_UNNAMED = Words("")


@dataclass
class Mutable:
    """A container, object, tensor, array, generator or iterator that may change.

    Attributes:
        value: the container, object, or whatever it is.
        place: a path to it.
        before: what it held.
        owners: for each unit that has it, words for messages; ``""`` stands for the code around the units.
    """

    value: Any
    place: Place
    before: Any
    owners: dict[str, Words] = field(default_factory=dict)

    @property
    def is_changed(self) -> bool:
        """Whether it holds something else than before."""
        return not same(self.before, read(self.value))

    @property
    def is_object(self) -> bool:
        """Whether it is an object of some class."""
        return not isinstance(self.value, (*CONTAINERS, *_NUMBERS, type, Replayed))

    def set_once(self) -> dict[str, Any]:
        """The attributes of an object that are set now, if nothing else is another."""
        now = read(self.value)
        if not self.is_object or now is None:
            return {}
        changed = {
            name: (self.before.get(name, MISSING), now.get(name, MISSING))
            for name in {**self.before, **now}
        }
        changed = {name: pair for name, pair in changed.items() if not is_equal(*pair)}
        # A flag that turns would be put back between microbatches, and turn for each in the same way.
        unset = all(old is None or old is MISSING for old, _ in changed.values())
        if not unset or any(type(new) not in (bool, str) for _, new in changed.values()):
            return {}
        return {name: new for name, (_, new) in changed.items()}

    def change(self) -> Any:
        """What it holds now: its members, with ``Old`` for those that it had before."""
        now = read(self.value)
        if isinstance(self.value, Replayed):
            return len(now)
        old = {id(v): Old(k) for k, v in _members(self.before) if not isinstance(v, _PLAIN)}
        if isinstance(now, dict):
            return {name: old.get(id(value), value) for name, value in now.items()}
        if isinstance(now, set):
            return set(now)
        return None if isinstance(now, _Marked) else [old.get(id(value), value) for value in now]


def change_to(value: Any, change: Any) -> None:
    """Change something as :meth:`Mutable.change` says that it was changed elsewhere."""
    if isinstance(change, int):
        for _ in range(change):
            next(value, None)
        return
    old = dict(_members(read(value)))

    def copied(member: Any) -> Any:
        if isinstance(member, Old):
            return old[member.key]
        if (
            hasattr(member, "__dict__")
            and not isinstance(member, Tensor | nn.Module | type)
            and not callable(member)
        ):
            # Each microbatch has an object of its own.
            member = copy.copy(member)
            vars(member).update({n: map_tensors(v, lambda t: t) for n, v in vars(member).items()})
        return member

    if isinstance(change, dict):
        write(value, {name: copied(member) for name, member in change.items()})
    else:
        write(value, type(change)(copied(member) for member in change))


class Replayed:
    """Stands for an iterator, and records the items taken from it."""

    def __init__(self, rest: Iterator[Any]) -> None:
        self.rest, self.taken = rest, list[Any]()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.taken.append(next(self.rest))
        return self.taken[-1]


class Mutables:
    """Several of them, each found once, with what it holds.

    Args:
        depth: how deep to look.
        numbers: whether tensors, arrays, generators and iterators count.
    """

    def __init__(self, depth: int = _DEPTH, *, numbers: bool = True) -> None:
        self._depth, self._numbers = depth, numbers
        self._mutables: dict[int, Mutable] = {}
        self._iterators: list[tuple[Any, Any, Replayed]] = []
        self._functions: set[tuple[str, int]] = set()

    def look(self, value: Any, owner: str = "", words: Words = _UNNAMED, place: Place = ()) -> None:
        """Note a value and what it holds.

        Args:
            value: anything.
            owner: the unit that has it.
            words: what it is, for messages.
            place: the path to it.
        """
        if len(place) > self._depth or isinstance(
            value, nn.Module | nn.Parameter | str | int | float
        ):
            return
        if isinstance(value, FunctionType | MethodType | partial):
            self._look_at_code(value, owner, place)
            return
        children: Iterable[tuple[Any, Any]] = enumerate(value) if isinstance(value, tuple) else ()
        if not isinstance(value, tuple):
            mutable = self._mutables.get(id(value))
            if mutable is None:
                if any(kind.__module__.startswith(_LOOPS) for kind in type(value).__mro__):
                    return
                before = read(value) if self._numbers or not isinstance(value, _NUMBERS) else None
                if before is None:
                    return
                mutable = self._mutables[id(value)] = Mutable(value, place, before)
            elif owner in mutable.owners:
                return
            mutable.owners[owner] = words
            children = _members(mutable.before)
        for key, child in list(children)[:_MOST]:
            if self._numbers and is_iterator(child) and not isinstance(value, tuple | set):
                child = self.replay(value, key, child)
            self.look(child, owner, words, (*place, key))

    def replay(self, holder: Any, key: Any, iterator: Any) -> Replayed:
        """Put something in the place of an iterator that records what is taken."""
        twin = Replayed(iterator)
        put(holder, key, twin)
        self._iterators.append((holder, key, twin))
        if id(holder) in self._mutables:
            self._mutables[id(holder)].before = read(holder)
        return twin

    def _look_at_code(self, function: Any, owner: str, place: Place) -> None:
        """Note the global containers that a function names, and those that it encloses."""
        while isinstance(function, partial | MethodType):
            function = function.func if isinstance(function, partial) else function.__func__
        if (owner, id(function)) in self._functions or not isinstance(function, FunctionType):
            return
        self._functions.add((owner, id(function)))
        names = {**_globals_of(function), **_enclosed_by(function)}
        for name, value in names.items():
            words = Words(f"{name!r}, which the code of {owner or 'the model'} names,")
            is_near = getattr(value, "__module__", "") == function.__module__
            if isinstance(value, CONTAINERS) or (
                is_near and isinstance(value, type | FunctionType) and not _is_module(value)
            ):
                self.look(value, owner, words, (*place, name))

    def changed(self, owner: str | None = None) -> list[Mutable]:
        """Those that hold something else than before; or only those that one has."""
        every = self._mutables.values()
        return [m for m in every if (owner is None or owner in m.owners) and m.is_changed]

    def common(self) -> list[Mutable]:
        """The objects that several have, the code around the units among them."""
        mutables = [t for t in self._mutables.values() if "" in t.owners and len(t.owners) > 1]
        return [t for t in mutables if t.is_object]

    def __bool__(self) -> bool:
        return bool(self._mutables)

    def tensors(self) -> list[Tensor]:
        """The tensors in them."""
        held = [v for mutable in self._mutables.values() for _, v in _members(mutable.before)]
        return [value for value in held if isinstance(value, Tensor)]

    def within(self, objects: Iterable[Any]) -> Mutables | None:
        """Those that are among these objects, or inside them."""
        ids = {id(one) for one in objects if not isinstance(one, (*CONTAINERS, *_NUMBERS))}
        roots = [mutable.place for key, mutable in self._mutables.items() if key in ids]
        mutables = Mutables()
        mutables._mutables = {
            key: mutable
            for key, mutable in self._mutables.items()
            if any(mutable.place[: len(root)] == root for root in roots)
        }
        return mutables if roots else None

    def rewind(self) -> None:
        """Put back what containers and objects held."""
        for mutable in self.changed():
            write(mutable.value, mutable.before)

    def exchange(self, twin_of: Callable[[Tensor], Tensor]) -> None:
        """Put other tensors into the places of those with data that they have come to hold."""
        known = {id(tensor) for tensor in self.tensors()}
        now = Mutables(self._depth, numbers=False)
        for mutable in self.changed():
            now.look(mutable.value)
        for mutable in now._mutables.values():
            for key, member in [] if isinstance(mutable.value, set) else _members(mutable.before):
                if (
                    isinstance(member, Tensor)
                    and not isinstance(member, FakeTensor)
                    and id(member) not in known
                ):
                    put(mutable.value, key, twin_of(member))

    def give_back(self) -> None:
        """Put the iterators back into their places, advanced."""
        for holder, key, twin in self._iterators:
            if dict(_members(read(holder))).get(key) is twin:
                put(holder, key, twin.rest)

    def restore(self) -> None:
        """Put back what they held, and the iterators."""
        self.rewind()
        for holder, key, twin in self._iterators:
            put(holder, key, chain(twin.taken, twin.rest) if twin.taken else twin.rest)


MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()
"""Stands for an attribute that is not there."""


@contextmanager
def replaced(entries: Iterable[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Put other values into tables, such as a module's attributes, for a while.

    Args:
        entries: tables, names and values; ``MISSING`` takes an entry out.
    """
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for table, name, value in entries:
            before.append((table, name, table.get(name, MISSING)))
            _put_entry(table, name, value)
        yield
    finally:
        for table, name, value in reversed(before):
            _put_entry(table, name, value)


def _put_entry(table: dict[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        table.pop(name, None)
    else:
        table[name] = value


@contextmanager
def restored(value: Any) -> Iterator[None]:
    """A context that puts back what an object holds."""
    mutables = Mutables()
    mutables.look(value)
    try:
        yield
    finally:
        mutables.restore()


# ---- what functions name


def _is_module(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _globals_of(function: FunctionType) -> dict[str, Any]:
    known = function.__globals__
    return {name: known[name] for name in function.__code__.co_names if name in known}


def _enclosed_by(function: FunctionType) -> dict[str, Any]:
    enclosed = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):  # a cell that nothing has been put into yet
            enclosed[name] = cell.cell_contents
    return enclosed


# ---- one level of what is held


def is_iterator(value: Any) -> bool:
    """Whether a value is an iterator without a visible position."""
    return hasattr(type(value), "__next__") and not hasattr(value, "__dict__")


def read(value: Any) -> Any:
    """A copy of what a container, object, array or tensor holds; ``None`` if it holds nothing."""
    if isinstance(value, dict):
        # One of the author's class may make something else of what it holds, as that of activations does.
        return dict(dict.items(value))
    if isinstance(value, CONTAINERS):
        return value.copy()
    if isinstance(value, Tensor):
        if isinstance(value, FakeTensor) or value.is_meta or value.is_inference():
            return None
        kept = value.detach().clone() if value.numel() <= _LARGE else value
        return _Marked(value._version, kept)
    if isinstance(value, np.ndarray):
        return _Marked(value.tobytes() if value.size <= _LARGE else b"", value.copy())
    if isinstance(value, Generator):
        return _Marked(bytes(value.get_state().tolist()), value.get_state())
    if isinstance(value, Replayed):
        return list(value.taken)
    if isinstance(value, type):
        kinds = (*_PLAIN, *CONTAINERS)
        return {n: v for n, v in vars(value).items() if n[:2] != "__" and isinstance(v, kinds)}
    if inspect.isroutine(value) or isinstance(value, ModuleType):
        return None
    slots = [n for kind in type(value).__mro__ for n in getattr(kind, "__slots__", ())]
    attributes = {n: getattr(value, n) for n in slots if hasattr(value, n)}
    attributes |= getattr(value, "__dict__", {})
    return attributes or (None if not hasattr(value, "__dict__") else attributes)


@dataclass
class _Marked:
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


def write(value: Any, contents: Any) -> None:
    """Write contents into a container, object, array or tensor."""
    if isinstance(contents, _Marked):
        contents.put_back(value)
    elif isinstance(value, list | deque):
        value.clear()
        value.extend(contents)
    elif isinstance(value, dict | set):
        value.clear()
        value.update(contents)
    elif not isinstance(value, Replayed):
        for name in (read(value) or {}).keys() - contents.keys():
            delattr(value, name)
        for name, member in contents.items():
            if getattr(value, name, MISSING) is not member:
                put(value, name, member)


def put(holder: Any, name: Any, value: Any) -> None:
    """Set a member of a container or an attribute."""
    if isinstance(holder, nn.Module):
        vars(holder)[name] = value
    elif isinstance(holder, list | dict | deque):
        holder[name] = value
    elif isinstance(holder, type):
        setattr(holder, name, value)
    else:
        object.__setattr__(holder, name, value)


def at(value: Any, place: Sequence[Any]) -> Any:
    """What lies at a place inside a value."""
    for key in place:
        is_container = isinstance(value, list | tuple | dict | deque)
        value = value[key] if is_container else getattr(value, key)
    return value


def _members(contents: Any) -> list[tuple[Any, Any]]:
    if isinstance(contents, _Marked) or contents is None:
        return []
    return list(contents.items() if isinstance(contents, Mapping) else enumerate(contents))


def is_equal(old: Any, new: Any) -> bool:
    """Whether two values are the same, or plain and equal."""
    plain = isinstance(old, int | float | str | bool)
    return old is new or (plain and type(old) is type(new) and bool(old == new))


def same(before: Any, after: Any) -> bool:
    """Whether two copies of what something holds are equal."""
    if isinstance(before, _Marked):
        return isinstance(after, _Marked) and bool(before.mark == after.mark)
    if after is None or len(before) != len(after):
        return False
    if isinstance(before, set):
        return bool(before == after)
    if isinstance(before, dict):
        return list(before) == list(after) and all(map(is_equal, before.values(), after.values()))
    return all(map(is_equal, before, after))


def look_at_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mutables:
    """The lists, dictionaries and objects in a unit's arguments."""
    mutables = Mutables(numbers=False)
    for key, value in enumerate(args):
        mutables.look(value, place=(0, key))
    for name, value in kwargs.items():
        mutables.look(value, place=(1, name))
    return mutables


# ---- other tensors in a call's arguments, for a while


def swapped(value: Any, put: Callable[[Tensor], Tensor], undo: list[tuple[Any, Any, Any]]) -> Any:
    """Like ``map_tensors``, but lists and dictionaries, of any class, stay the same objects.

    Args:
        value: the value.
        put: what to put in the place of a tensor.
        undo: gets what ``put_back`` needs.
    """
    kind = type(value)
    if kind is tuple:
        return tuple([swapped(child, put, undo) for child in value])
    if not isinstance(value, list | MutableMapping):
        return map_tensors(value, put)
    for name, child in _members(value):
        twin = swapped(child, put, undo)
        if twin is not child:
            value[name] = twin
            undo.append((value, twin, child))
    return value


def put_back(undo: list[tuple[Any, Any, Any]]) -> None:
    """Put what ``swapped`` has replaced back into lists and dictionaries, wherever it is there now."""
    for container, twin, child in undo:
        for name, value in _members(container):
            if value is twin:
                container[name] = child
