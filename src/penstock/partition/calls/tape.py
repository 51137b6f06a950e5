"""What is noted of a forward: the calls of units, and what happened between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.partition.calls.trees import leaves

# ---- a tensor that is in another stage: it has a shape, a type and a device, and no data


@dataclass(frozen=True)
class Form:
    """What is known of a tensor without its data."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> Form:
        """The form of a tensor."""
        dense = tensor.layout is torch.strided
        strides = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
        return Form(tuple(tensor.shape), tuple(strides), tensor.dtype, tensor.requires_grad)

    def without_data(self) -> Tensor:
        """A tensor of this form on the meta device."""
        made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")
        return made.requires_grad_(self.requires_grad)

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor has this shape and type."""
        return tensor.shape == self.shape and tensor.dtype is self.dtype


_VIEWS = {torch.ops.aten.view.default, torch.ops.aten.alias.default, torch.ops.aten.detach.default}


class Placeholder(Tensor):
    """Stands for a tensor that this stage has not got; whoever asks for its data is told so."""

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
            PartitionError: always, but where only another view of it is wanted.
        """
        if func in _VIEWS and isinstance(args[0], Placeholder):
            made = func(Form.of(args[0]).without_data().detach(), *args[1:], **(kwargs or {}))
            return Placeholder.of(Form.of(made), args[0].device, args[0].label)
        found = [a.label for a in (*args, *(kwargs or {}).values()) if isinstance(a, Placeholder)]
        raise PartitionError(
            f"{func} needs the data of {', '.join(found) or 'a value'}, which is in another stage. Either "
            "the model took another way than it did when it was analysed, or the value reached this place in "
            "a way that no argument shows; cut elsewhere, or use how='traced'"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placeholder({self.label}, {self.dtype}{list(self.shape)})"


# ---- what an author's forward does with values that stages make: the record of one analysed call


NO_VALUE = -1
"""The number of a tensor that every stage has: one of the call's own arguments."""


class Origin(Enum):
    """How a tensor comes to show its memory, which tells whether another stage can make it too."""

    OWN = auto()
    """It is the first that was seen of it."""
    VIEW = auto()
    """A function between the units made it of another that shows it."""
    FOUND = auto()
    """The author's code had it before anything was written into the memory; every stage has it."""
    UNIT = auto()
    """A unit gave it."""


@dataclass(frozen=True)
class Value:
    """A tensor that an event makes.

    A tensor that is changed in place becomes another value, and so does each that shows the same memory.

    Args:
        form: its shape and type.
        name: says what it is, unique in a tape.
        maker: the event's position; for a parameter that is used between the units, ``None``.
        parameter: that parameter's name.
        memory: the first value that was seen of the memory it shows.
        whole: the value that this one is a view of: what is seen first of a memory, in its state by then.
        origin: how it comes to show the memory of another value.
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
        same_as: if the result is one of the arguments itself, which of the leaves among them.
    """

    def __init__(self, value: int, same_as: int | None) -> None:
        self.value = value
        self.same_as = same_as


@dataclass(frozen=True)
class Change:
    """A tensor that an event changes in place.

    Args:
        argument: which of the leaves among the arguments, if it is one.
        old: the number it had, if it was followed.
        new: the number it has from then on.
        base: whether it is what that argument is a view of.
    """

    argument: int | None
    old: int | None
    new: int
    base: bool = False


class Loose(str):
    """The path of a module that holds no weights and is no unit, but has hooks.

    Unlike the functions that others of its kind call it is called as a whole, by one stage, or its hooks
    would be heard in several. Where that is its inputs tell, as for a function.
    """

    __slots__ = ()


@dataclass(frozen=True)
class Event:
    """A call of a unit, or of a function between the units.

    Args:
        what: the function, the class of a custom one, or the path of the unit or of a loose module.
        inputs: the numbers of the values that it uses.
        result: what it returns, with a :class:`Slot` for each tensor.
        changes: what it changes in place.
        random: whether it draws random numbers without using any value.
        answers: whether it returns no tensor, but something that depends on the numbers in them.
        effect: whether it returns no tensor, but does something to a value or with it, such as a hook that
            is set or a loss that is added: for the stage that makes the value, and no other.
        on: that value; ``None`` where it is one of the call's own arguments, or made of them alone.
        draws: how often it draws from torch's own generators; of no account for a unit.
        generators: the others that it draws from, by identity.
        idle: how often the function was called just before without drawing, where it uses no value.
        hooked: the values among its inputs on which a unit sets hooks.
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
        """Where tensors stand in the result."""
        return [leaf for leaf in leaves(self.result) if isinstance(leaf, Slot)]

    @property
    def shows(self) -> bool:
        """Whether some of its results are views of what every stage has."""
        return any(slot.value == NO_VALUE and slot.same_as is None for slot in self.slots)

    @property
    def label(self) -> str:
        """What it is, in words."""
        return self.what if self.is_call else getattr(self.what, "__name__", str(self.what))


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
        events: what happened.
        values: what was made, by number.
        outputs: the numbers of the values in the model's output.
        sure: the values for which a gradient surely comes back, whatever the loss uses of the output.
        regions: what is checkpointed, in the order in which it begins.
        hidden: pairs of units of which the second uses what the first has left in an object.
        output: the model's output, without data.
        output_tensors: how many tensors that holds.
        kept: the classes of objects in it that units fill; they are left out.
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
