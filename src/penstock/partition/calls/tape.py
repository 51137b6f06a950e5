"""The record of a forward: the calls of units, and what happened between them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.values import Form

# ---- what stands inside nested values: the arguments and results of an author's modules


def leaves(value: Any) -> Iterator[Any]:
    """What tuples, lists, dicts and dataclasses hold, at any depth, in order."""
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


def replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with changed leaves; a container without any stays the same object."""
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
    """The value's containers without its leaves, in a form that can be compared."""
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


def _replaced_items(value: Mapping[Any, Any], change: Callable[[Any], Any]) -> Any:
    items = {key: replaced(item, change) for key, item in value.items()}
    if all(new is value[key] for key, new in items.items()):
        return value
    if type(value) is dict:
        return items
    # A mapping of another class, such as the outputs of transformers.
    found: Any = copy.copy(value)
    for key, item in items.items():
        if item is not value[key]:
            found[key] = item
    return found


def _replaced_fields(value: Any, change: Callable[[Any], Any]) -> Any:
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


# ---- a tensor that is in another stage: here it has a shape, a type and a device, but no data


def form_of(tensor: Tensor) -> Form:
    """The form of a tensor; that of a sparse one is as if it were dense."""
    if tensor.layout is torch.strided:
        return Form.of(tensor)
    plain = Form.of(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
    return plain._replace(device=tensor.device, requires_grad=tensor.requires_grad)


_VIEWS = {torch.ops.aten.view.default, torch.ops.aten.alias.default, torch.ops.aten.detach.default}


class Placeholder(Tensor):
    """Stands for a tensor that this stage does not have, and refuses to give its data."""

    label: str

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(form: Form, device: torch.device, label: str) -> Placeholder:
        """A placeholder of a form; ``label`` says in errors what it stands for."""
        make = cast("Callable[..., Placeholder]", Tensor._make_wrapper_subclass)
        made = make(
            Placeholder,
            form.shape,
            strides=form.strides,
            dtype=form.dtype,
            device=device,
            requires_grad=form.requires_grad,
        )
        made.label = label
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Placeholder:
        """Refuse whatever needs the data.

        Raises:
            PartitionError: always, except for another view of it.
        """
        if func in _VIEWS and isinstance(args[0], Placeholder):
            made = func(form_of(args[0]).empty("meta").detach(), *args[1:], **(kwargs or {}))
            return Placeholder.of(form_of(made), args[0].device, args[0].label)
        found = [a.label for a in (*args, *(kwargs or {}).values()) if isinstance(a, Placeholder)]
        raise PartitionError(
            f"{func} needs the data of {', '.join(found) or 'a value'}, which is in another stage. Either "
            "the model took another way than it did when it was analysed, or the value got here in a way "
            "that no argument shows; cut elsewhere, or use how='traced'"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placeholder({self.label}, {self.dtype}{list(self.shape)})"


# ---- what an author's forward does with values that stages make: the record of one analysed call


def name_of(what: Any) -> str:
    """The name of what an event is a call of: a unit's path, or a function's name."""
    return getattr(what, "__name__", None) or str(what)


NO_VALUE = -1
"""The number of a tensor that every stage has: one of the call's own arguments."""


class Origin(Enum):
    """How a tensor comes to share its memory, which tells whether another stage can make it too."""

    OWN = auto()
    """It was the first to be seen."""
    VIEW = auto()
    """A function between the units made it as a view of another."""
    FOUND = auto()
    """The author's code had it before anything was written into the memory: every stage has it."""
    UNIT = auto()
    """A unit returned it."""


@dataclass(frozen=True)
class Value:
    """A tensor that an event makes.

    A tensor that is changed in place becomes another value, and so does each that shares its memory.

    Args:
        form: its shape and type.
        name: says what it is; unique in a tape.
        maker: the position of the event that makes it; ``None`` for a parameter that is used between units.
        parameter: that parameter's name.
        memory: the number of the first value that was seen of its memory.
        whole: the number of the value that this one is a view of: the current one of the tensor that was
            the first to be seen of their memory.
        origin: how it comes to share the memory of another value.
    """

    form: Form
    name: str
    maker: int | None
    parameter: str | None
    memory: int
    whole: int | None
    origin: Origin


class Slot:
    """Stands in a recorded result where a tensor stood.

    Args:
        value: the tensor's number; :data:`NO_VALUE` where every stage has it, or can make it.
        same_as: the index among the leaves of the arguments, if the result is one of these itself.
    """

    def __init__(self, value: int, same_as: int | None) -> None:
        self.value = value
        self.same_as = same_as


@dataclass(frozen=True)
class Change:
    """A tensor that an event changes in place.

    Args:
        argument: its index among the leaves of the arguments, if it is one.
        old: the number it had, if it was followed.
        new: the number it has from then on.
        base: whether it is not the argument itself, but the tensor that this is a view of.
    """

    argument: int | None
    old: int | None
    new: int
    base: bool = False


class Loose(str):
    """The path of a module that holds no weights and is no unit, but has hooks.

    Without hooks, only the functions that such a module calls are events. With hooks it is called as a whole,
    by one stage, as otherwise several stages would run the hooks. Its inputs decide which stage, as they do
    for a function.
    """

    __slots__ = ()


@dataclass(frozen=True)
class Event:
    """A call of a unit, or of a function between the units.

    Args:
        what: the function, the class of a custom one, or the path of a unit or of a loose module.
        inputs: the numbers of the values that it uses.
        result: what it returns, with a :class:`Slot` for each tensor.
        changes: what it changes in place.
        random: whether it draws random numbers without using any value.
        answers: whether it returns no tensor, but something that depends on the numbers in tensors.
        effect: whether it returns nothing, but sets a hook on a value, or adds a loss, which is for the
            stage that makes the value, and no other.
        on: that value; ``None`` where it is one of the call's own arguments, or made of these alone.
        draws: how often it draws from torch's own generators; not used for a unit.
        generators: the other generators that it draws from, by identity.
        idle: how often the function was called just before without drawing, where it uses no value.
        hooked: those of its inputs on which a unit sets hooks.
    """

    what: Any
    inputs: tuple[int, ...]
    result: Any
    changes: tuple[Change, ...] = ()
    random: bool = False
    answers: bool = False
    effect: bool = False
    on: int | None = None
    draws: int = 0
    generators: tuple[int, ...] = ()
    idle: int = 0
    hooked: tuple[int, ...] = ()

    @property
    def is_call(self) -> bool:
        """Whether a unit is called."""
        return isinstance(self.what, str) and not isinstance(self.what, Loose)

    @property
    def slots(self) -> list[Slot]:
        """The places of tensors in the result."""
        return [leaf for leaf in leaves(self.result) if isinstance(leaf, Slot)]

    @property
    def shows(self) -> bool:
        """Whether some of its results are views of tensors that every stage has."""
        return any(slot.value == NO_VALUE and slot.same_as is None for slot in self.slots)

    @property
    def label(self) -> str:
        """What it is, in words."""
        return name_of(self.what)


@dataclass(frozen=True)
class Region:
    """A part of the forward that the author has checkpointed, between the units.

    Args:
        start: its first event.
        stop: the event after its last.
        results: the numbers of the tensors that it gives.
        inner: how many regions it contains.
    """

    start: int
    stop: int
    results: tuple[int | None, ...]
    inner: int


@dataclass
class Tape:
    """The events of a call, in order.

    Attributes:
        events: what happened, in order.
        values: the values that were made, by number.
        outputs: the numbers of the values in the model's output.
        sure: the values that certainly get a gradient, whichever part of the output the loss uses.
        regions: what is checkpointed, in the order in which it begins.
        hidden: pairs of units, where the second uses what the first has left in an object.
        output: the model's output, without data.
        output_tensors: how many tensors it holds.
        kept: the classes of objects in it that units fill, such as caches; these are left out.
        written: the buffers that are changed between the units, by name.
    """

    events: list[Event] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    outputs: tuple[int, ...] = ()
    sure: frozenset[int] = frozenset()
    regions: list[Region | None] = field(default_factory=list)
    hidden: dict[tuple[str, str], None] = field(default_factory=dict)
    output: Any = None
    output_tensors: int = 0
    kept: tuple[type, ...] = ()
    written: tuple[str, ...] = ()


def paths_of(model: nn.Module, units: Sequence[str]) -> dict[nn.Module, str]:
    """The units of a model, each with its first path."""
    found: dict[nn.Module, str] = {}
    for path in units:
        found.setdefault(model.get_submodule(path), path)
    return found
