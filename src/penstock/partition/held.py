"""What a model's code holds besides weights and buffers, compared before and after the run without data."""

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

from penstock.errors import PartitionError
from penstock.partition.settings import REGISTRIES
from penstock.values import map_tensors

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
class Thing:
    """A container, object, tensor, array, generator or iterator that may change.

    Attributes:
        value: the thing.
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
        """What it holds now: its members, with `Old` for those that it had before."""
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
    """Change something as :meth:`Thing.change` says that it was changed elsewhere."""
    if isinstance(change, int):
        for _ in range(change):
            next(value, None)
        return
    old = dict(_members(read(value)))

    def own(member: Any) -> Any:
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
        write(value, {name: own(member) for name, member in change.items()})
    else:
        write(value, type(change)(own(member) for member in change))


class Replayed:
    """Stands for an iterator, and records the items taken from it."""

    def __init__(self, rest: Iterator[Any]) -> None:
        self.rest, self.taken = rest, list[Any]()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.taken.append(next(self.rest))
        return self.taken[-1]


class Things:
    """Things that may change, with what they hold.

    Args:
        depth: how deep to look.
        numbers: whether tensors, arrays, generators and iterators count.
    """

    def __init__(self, depth: int = _DEPTH, *, numbers: bool = True) -> None:
        self._depth, self._numbers = depth, numbers
        self._things: dict[int, Thing] = {}
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
            thing = self._things.get(id(value))
            if thing is None:
                if any(kind.__module__.startswith(_LOOPS) for kind in type(value).__mro__):
                    return
                before = read(value) if self._numbers or not isinstance(value, _NUMBERS) else None
                if before is None:
                    return
                thing = self._things[id(value)] = Thing(value, place, before)
            elif owner in thing.owners:
                return
            thing.owners[owner] = words
            children = _members(thing.before)
        for key, child in list(children)[:_MOST]:
            if self._numbers and is_iterator(child) and not isinstance(value, tuple | set):
                child = self.replay(value, key, child)
            self.look(child, owner, words, (*place, key))

    def replay(self, holder: Any, key: Any, iterator: Any) -> Replayed:
        """Put something in the place of an iterator that records what is taken."""
        twin = Replayed(iterator)
        put(holder, key, twin)
        self._iterators.append((holder, key, twin))
        if id(holder) in self._things:
            self._things[id(holder)].before = read(holder)
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
            told = Words(f"{name!r}, which the code of {owner or 'the model'} names,")
            is_near = getattr(value, "__module__", "") == function.__module__
            if isinstance(value, CONTAINERS) or (
                is_near and isinstance(value, type | FunctionType) and not _is_module(value)
            ):
                self.look(value, owner, told, (*place, name))

    def changed(self) -> list[Thing]:
        """The things that hold something else than before."""
        return [thing for thing in self._things.values() if thing.is_changed]

    def common(self) -> list[Thing]:
        """The objects that several have, the code around the units among them."""
        things = [t for t in self._things.values() if "" in t.owners and len(t.owners) > 1]
        return [t for t in things if t.is_object]

    def __bool__(self) -> bool:
        return bool(self._things)

    def tensors(self) -> list[Tensor]:
        """The tensors that the things hold."""
        held = [v for thing in self._things.values() for _, v in _members(thing.before)]
        return [value for value in held if isinstance(value, Tensor)]

    def within(self, objects: Iterable[Any]) -> Things | None:
        """Those that are among these objects, or inside them."""
        ids = {id(one) for one in objects if not isinstance(one, (*CONTAINERS, *_NUMBERS))}
        roots = [thing.place for key, thing in self._things.items() if key in ids]
        things = Things()
        things._things = {
            key: thing
            for key, thing in self._things.items()
            if any(thing.place[: len(root)] == root for root in roots)
        }
        return things if roots else None

    def rewind(self) -> None:
        """Put back what containers and objects held."""
        for thing in self.changed():
            write(thing.value, thing.before)

    def exchange(self, twin_of: Callable[[Tensor], Tensor]) -> None:
        """Put other tensors into the places of those with data that the things have come to hold."""
        known = {id(tensor) for tensor in self.tensors()}
        now = Things(self._depth, numbers=False)
        for thing in self.changed():
            now.look(thing.value)
        for thing in now._things.values():
            for key, member in [] if isinstance(thing.value, set) else _members(thing.before):
                if (
                    isinstance(member, Tensor)
                    and not isinstance(member, FakeTensor)
                    and id(member) not in known
                ):
                    put(thing.value, key, twin_of(member))

    def give_back(self) -> None:
        """Put the iterators back into their places, advanced."""
        for holder, key, twin in self._iterators:
            if dict(_members(read(holder))).get(key) is twin:
                put(holder, key, twin.rest)

    def restore(self) -> None:
        """Put back what the things held."""
        for thing in self.changed():
            write(thing.value, thing.before)
        for holder, key, twin in self._iterators:
            put(holder, key, chain(twin.taken, twin.rest) if twin.taken else twin.rest)


class Changed(NamedTuple):
    """Something outside of parameters and buffers that a run has changed.

    Attributes:
        what: a description for messages.
        units: the paths of the units that have it; empty if code around the units has it.
    """

    what: str
    units: frozenset[str] = frozenset()


class Held:
    """What a model's modules hold, before a run.

    Args:
        model: the model.
        units: its units by path.

    Attributes:
        outside: the modules around the units, with their names for messages.
    """

    def __init__(self, model: nn.Module, units: Mapping[str, nn.Module]) -> None:
        inside = {id(part): path for path, unit in units.items() for part in unit.modules()}
        self._things = Things()
        self._common: list[Thing] | None = None
        self._early: set[int] = set()
        self.outside: list[tuple[nn.Module, str]] = []
        for path, module in model.named_modules():
            name = path or f"the {type(module).__name__}"
            if id(module) not in inside:
                self.outside.append((module, name))
            self._look_at(module, inside.get(id(module), ""), name)
        # Only now, when the iterators have been replaced.
        self._modules = [(m, attributes_of(m), _registries(m)) for m in model.modules()]

    def _look_at(self, module: nn.Module, unit: str, name: str) -> None:
        things = self._things
        for attribute, value in attributes_of(module).items():
            if is_iterator(value):
                value = things.replay(module, attribute, value)
            if unit == "" or not isinstance(value, Tensor):
                words = f"what the attribute {attribute!r} of {name} holds"
                things.look(value, unit, Words(words, module))
        for kind in _classes(module):
            words = f"an attribute of the class {kind.__name__} of {name}"
            things.look(kind, unit, Words(words, module), ("",))
            for method in filter(inspect.isfunction, vars(kind).values()):
                if method.__name__ != "__init__":
                    things.look(method, unit, Words(f"the code of {name}"), ("", ""))
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            # What only hooks have is put back, and is nobody's.
            things.look(hook, _HOOKS, Words(f"a hook of {name}"), ("",))

    def changes(self) -> list[Changed]:
        """The changes of things that code around the units has, or that several units have."""
        changed, once = [], {id(thing) for thing, _, _ in self.set_once()}
        for thing in self._things.changed():
            units = thing.owners.keys() - {"", _HOOKS}
            if id(thing.value) in once:
                continue
            if isinstance(thing.value, Generator):
                changed.append(
                    Changed("the state of a torch.Generator of the model, from which it draws")
                )
            elif "" in thing.owners and not _is_set_once(thing.before, read(thing.value)):
                changed.append(Changed(str(thing.owners[""])))
            elif len(units) > 1:
                kind, paths = type(thing.value).__name__, " and ".join(sorted(units)[:2])
                changed.append(Changed(f"an object (a {kind}) that {paths} have", frozenset(units)))
        return changed

    def set_once(self) -> list[tuple[Any, str, Any]]:
        """The attributes that code around the units sets once in objects: object, name and value."""
        things = [thing for thing in self._things.changed() if "" in thing.owners]
        return [
            (thing.value, *one)
            for thing in things
            if id(thing.value) not in self._early
            for one in thing.set_once().items()
        ]

    def after_unit(self) -> bool:
        """Note which objects that a unit and the code around have are others before the last unit's end."""
        if self._common is None:
            self._common = self._things.common()
        self._early.update(id(thing.value) for thing in self._common if thing.is_changed)
        return bool(self._early)

    def outer(self) -> set[str]:
        """The units whose code changes global or enclosing containers."""
        return {
            unit
            for thing in self._things.changed()
            for unit, words in thing.owners.items()
            if words.module is None and unit not in ("", _HOOKS)
        }

    def attributes(self) -> Iterator[tuple[nn.Module, str, str, Any, Any]]:
        """The attributes around the units that are others now: module, its name, attribute, before, now."""
        names = {id(module): name for module, name in self.outside}
        for module, before, _ in self._modules:
            now = attributes_of(module)
            for name in {**before, **now} if id(module) in names else ():
                old, new = before.get(name, MISSING), now.get(name, MISSING)
                alike = type(old) is type(new) and isinstance(new, (*CONTAINERS, tuple))
                if not (same(old, new) if alike else is_equal(old, new)):
                    yield module, names[id(module)], name, old, new

    def restore(self) -> None:
        """Put back everything."""
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
        self._things.restore()


_HOOKS = ":hooks"
MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()
"""Stands for an attribute that is not there."""


def _is_set_once(before: Any, after: Any) -> bool:
    """Whether a dictionary only has more tensors, not made from data, as a cache of tables."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return False
    new = [value for name, value in after.items() if name not in before]
    kept = all(name in after and is_equal(value, after[name]) for name, value in before.items())
    tensors = [value for value in new if isinstance(value, Tensor)]
    return kept and len(tensors) == len(new) and not any(isinstance(t, FakeTensor) for t in tensors)


def may_be_set(old: Any, new: Any) -> bool:
    """Whether an attribute may become this once: it was not set, and is not a count."""
    if type(new) in (int, float) or new is MISSING:
        return False
    return old is MISSING or old is None or type(old) is bool or _is_converted(old, new)


def _is_converted(old: Any, new: Any) -> bool:
    """Whether a list of tensors, such as of anchors, has become one of the same in another type."""
    if not (type(old) is type(new) is list and len(old) == len(new) > 0):
        return False
    return all(
        isinstance(was, Tensor)
        and isinstance(now, Tensor)
        and was.shape == now.shape
        and (was.dtype, was.device) != (now.dtype, now.device)
        for was, now in zip(old, new, strict=True)
    )


@contextmanager
def restored(value: Any) -> Iterator[None]:
    """A context that puts back what an object holds."""
    things = Things()
    things.look(value)
    try:
        yield
    finally:
        things.restore()


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The author's attributes of a module, without parameters, buffers, modules and hooks."""
    return {n: v for n, v in vars(module).items() if n not in REGISTRIES}


def _registries(module: nn.Module) -> dict[str, dict[str, Any]]:
    state = vars(module)
    return {name: dict(state[name]) for name in REGISTRIES if isinstance(state.get(name), dict)}


def _classes(module: nn.Module) -> list[type]:
    """The classes of a module that the author wrote."""
    kinds = type(module).__mro__
    return [k for k in kinds if not k.__module__.startswith(("torch.", "builtins", "penstock."))]


def _is_module(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _globals_of(function: FunctionType) -> dict[str, Any]:
    known = function.__globals__
    return {name: known[name] for name in function.__code__.co_names if name in known}


def _enclosed_by(function: FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):  # a cell that nothing has been put into yet
            found[name] = cell.cell_contents
    return found


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


def line_of(module: nn.Module) -> str:
    """The file and line of a module's forward, in brackets; nothing for a module of PyTorch."""
    if type(module).__module__.startswith("torch."):
        return ""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None:
        return ""
    file = code.co_filename.replace("\\", "/").rpartition("/")[2]
    return f" (its forward: {file}:{code.co_firstlineno})"


def look_at_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Things:
    """The lists, dictionaries and objects in a unit's arguments."""
    things = Things(numbers=False)
    for key, value in enumerate(args):
        things.look(value, place=(0, key))
    for name, value in kwargs.items():
        things.look(value, place=(1, name))
    return things


# ---- other tensors in a call's arguments, for a while


def swapped(value: Any, put: Callable[[Tensor], Tensor], undo: list[tuple[Any, Any, Any]]) -> Any:
    """Like `map_tensors`, but lists and dictionaries, of any class, stay the same objects.

    Args:
        value: the value.
        put: what to put in the place of a tensor.
        undo: gets what `put_back` needs.
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
    """Put what `swapped` has replaced back into lists and dictionaries, wherever it is there now."""
    for container, twin, child in undo:
        for name, value in _members(container):
            if value is twin:
                container[name] = child


# ---- attributes that units set: their own stage may read them, other stages and the loss may not


Refuse = Callable[[], Exception]
_ACTS = (
    "bool len iter next call contains getitem setitem delitem eq ne lt le gt ge hash index int float complex "
    "round array enter exit add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow "
    "matmul rmatmul and rand or ror xor rxor neg pos abs invert iadd isub imul itruediv str format"
)


class NotHere:
    """Stands for what another stage has set: whatever uses it is refused."""

    def __init__(self, refuse: Refuse) -> None:
        self.__dict__["refuse"] = refuse

    def __getattr__(self, name: str) -> Any:
        raise self.refuse()


def _used(self: Any, *_: Any) -> Any:
    raise self.refuse()


for _name in _ACTS.split():
    setattr(NotHere, f"__{_name}__", _used)


class Attribute(NamedTuple):
    """An attribute that a unit has set: its module, its name, its value, the unit and the event."""

    module: nn.Module
    name: str
    value: Any
    unit: str
    event: int


@contextmanager
def reads_noted(attributes: Sequence[Attribute], note: Callable[[int], None]) -> Iterator[None]:
    """Note the event that has set an attribute whenever one is read before it is set."""
    events: dict[int, dict[str, int]] = {}
    for one in attributes:
        events.setdefault(id(one.module), {})[one.name] = one.event
    modules = {id(one.module): one.module for one in attributes}
    kinds = {key: type(module) for key, module in modules.items()}
    for key, module in modules.items():
        module.__class__ = _noting(kinds[key], events[key], note)
    try:
        yield
    finally:
        for key, module in modules.items():
            module.__class__ = kinds[key]


def _noting(kind: Any, events: dict[str, int], note: Callable[[int], None]) -> Any:
    """A module's class that notes what is read, see :func:`reads_noted`."""

    def read(self: Any, name: str) -> Any:
        if name in events:
            note(events[name])
        return kind.__getattribute__(self, name)

    def write(self: Any, name: str, value: Any) -> None:
        events.pop(name, None)
        kind.__setattr__(self, name, value)

    return type(
        kind.__name__,
        (kind,),
        {"__getattribute__": read, "__setattr__": write, "__module__": kind.__module__},
    )


@contextmanager
def hidden(attributes: Sequence[tuple[nn.Module, str, str]]) -> Iterator[None]:
    """Refuse to use some attributes, given with their units' names: the last stage has other values."""

    def refusal(name: str, unit: str) -> Exception:
        return PartitionError(
            f"the loss uses the attribute {name!r} of {unit}, which is in another stage; return it from "
            "there, or add it as a loss (penstock.add_loss)"
        )

    before = [
        (vars(module), name, vars(module).get(name, MISSING)) for module, name, _ in attributes
    ]
    for module, name, unit in attributes:
        vars(module)[name] = NotHere(partial(refusal, name, unit))
    try:
        yield
    finally:
        for state, name, value in before:
            if value is MISSING:
                del state[name]
            else:
                state[name] = value


class Private:
    """Hides the attributes that units set from code of other stages, in a run.

    Args:
        units: the units by path.
        together: whether two units are in one stage.
        refuse: makes the error for an attribute that is used elsewhere.

    Attributes:
        between: the changes that code between units made to units' attributes.
    """

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        together: Callable[[str, str], bool],
        refuse: Callable[[Attribute], Exception],
    ) -> None:
        self._together, self._refuse = together, refuse
        self._parts = {path: list(unit.named_modules()) for path, unit in units.items()}
        self._known = {
            id(part): _copied(part) for parts in self._parts.values() for _, part in parts
        }
        self._left: dict[tuple[int, str], Attribute] = {}
        self._resets: dict[tuple[int, str], tuple[nn.Module, str]] = {}
        self.between: list[Changed] = []

    @property
    def left(self) -> list[Attribute]:
        """The attributes that units have set."""
        return list(self._left.values())

    def enter(self, path: str) -> list[Attribute]:
        """Note that a unit is called, and return the attributes that earlier calls left and it may read."""
        left = self._left.values()
        reset = {one.unit for one in left if _is_reset(vars(one.module).get(one.name))}
        for unit in reset | {path}:
            self._note_between(unit)
        near = [one for one in self._left.values() if self._together(one.unit, path)]
        for one in near:
            vars(one.module)[one.name] = one.value
        return near

    def leave(self, path: str, event: int) -> None:
        """Note that the unit has returned."""
        for key, one in self._left.items():
            now = vars(one.module).get(one.name)
            if self._together(one.unit, path):
                self._left[key] = one._replace(value=now)
            elif not isinstance(now, NotHere):
                raise self._refuse(one)
        changed = [(part, name, value) for _, part, name, value in self._changed(path)]
        changed = [one for one in changed if not isinstance(one[2], nn.Module | NotHere)]
        for part, name, value in changed:
            self._left[id(part), name] = Attribute(part, name, value, path, event)
        for one in self._left.values():
            vars(one.module)[one.name] = NotHere(partial(self._refuse, one))

    def _note_between(self, path: str) -> None:
        """Note what code between units, which every stage runs, has done to attributes of a unit.

        It may reset them, such as a cache to None.
        """
        for inner, part, name, value in self._changed(path):
            if _is_reset(value):
                self._left.pop((id(part), name), None)
                self._resets[id(part), name] = part, name
            elif not isinstance(value, Tensor | nn.Module | NotHere):
                owner = ".".join(filter(None, (path, inner)))
                self.between.append(Changed(f"the attribute {name!r} of {owner}{line_of(part)}"))

    def end(self) -> list[tuple[nn.Module, str, Any]]:
        """The attributes that code between units has reset for good: module, name and value."""
        for path in self._parts:
            self._note_between(path)
        now = [(part, name, vars(part).get(name)) for part, name in self._resets.values()]
        return [one for one in now if _is_reset(one[2])]

    def _changed(self, path: str) -> Iterator[tuple[str, nn.Module, str, Any]]:
        """The attributes of a unit's modules that have changed since the last look."""
        for inner, part in self._parts[path]:
            known, now = self._known[id(part)], attributes_of(part)
            for name, value in now.items():
                old = known.get(name, (MISSING, None))
                changed = not is_equal(old[0], value)
                if not changed and old[1] is not None:
                    changed = not same(old[1], read(value))
                if changed and not isinstance(value, NotHere):
                    known[name] = value, read(value) if isinstance(value, CONTAINERS) else None
                    yield inner, part, name, value


def _is_reset(value: Any) -> bool:
    """Whether code between units may give this to an attribute of a unit: it is no count."""
    return value is None or type(value) in (bool, str)


def _copied(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    return {
        name: (value, value.copy() if isinstance(value, CONTAINERS) else None)
        for name, value in attributes_of(module).items()
    }
