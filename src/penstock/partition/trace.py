"""The record of one run of an author's forward: its events, in order, and the values that they make.

An *event* is a call of a unit, or of a PyTorch function on tensors that come from units or parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from penstock._engine.values import Place
from penstock.partition.functions import METADATA, SET_HOOKS
from penstock.partition.held import Changed
from penstock.partition.mutables import Mutables
from penstock.partition.private import Attribute
from penstock.partition.seen import Door

OVERWRITTEN = (
    "what units gave was written into a tensor, and is read through another that was made of it before and "
    "shares its memory; write into a clone"
)

READ = "read"
"""The first part of the place of a value that an event reads though it is no argument."""
DIRECT = 2
"""The length of the place of an argument; what lies in a container has a longer one."""


@dataclass(eq=False)
class Value:
    """A tensor that events make or use.

    Attributes:
        name: unique in the trace.
        root: the number of the first value that the same tensor was, before events changed it.
        event: the index of the event that made or changed it; ``None`` for a parameter or a unit's buffer.
        tensor: the fake tensor, without its graph: the placeholder in stages without the value.
        requires_grad: whether it requires a gradient.
        parameter: its name in the model, if it is a parameter or buffer.
        is_buffer: whether it is a unit's buffer, or a tensor in an attribute of a unit.
        unit: the unit that has it in an attribute.
        belongs: whether its memory belongs to a module, which may write into it later.
    """

    name: str
    root: int
    event: int | None
    tensor: Tensor
    requires_grad: bool
    parameter: str | None = None
    is_buffer: bool = False
    unit: str = ""
    belongs: bool = False


@dataclass(eq=False)
class Change:
    """A tensor that an event changed: its value before and after, and its place among the arguments.

    It has no place if it only shares the memory of an argument that was changed.
    """

    old: int | None
    new: int
    argument: Place | None


@dataclass(eq=False)
class Event:
    """One event.

    Attributes:
        what: the function, or the unit's path.
        name: its name in messages.
        number: for a unit, the number of its call.
        inputs: the values among its arguments, each with its place in ``(args, kwargs)``.
        result: what it returned, with fake tensors.
        left: what its arguments (lists, dictionaries and objects) held after a unit changed them, by place.
        slots: for each tensor of the result and of ``left``, its value, or the place of the argument that it
            is.
        changes: the tensors that it changed in place.
        reads: the events whose tensors it used, though they were not arguments.
        generators: the model's generators from which it draws.
        needs_data: whether the result depends on the numbers in a tensor.
        varies: whether numbers may decide the shapes of the result: it needs data, or an input does.
        where: the module and line of the author's code.
        module: the path of that module, of an event between units.
        call: its arguments, ``(args, kwargs)``.
        objects: what caches and other objects among a unit's arguments held before the call.
        mutable: whether there are lists, dictionaries or objects among a unit's arguments.
        shares: whether a tensor of the result shares memory with an argument.
        work: its operations, see :class:`Work`.
        nbytes: the bytes that it made.
    """

    what: Any
    name: str
    where: str
    number: int = 0
    inputs: list[tuple[Place, int]] = field(default_factory=list)
    result: Any = None
    slots: list[int | Place] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    reads: set[int] = field(default_factory=set)
    generators: list[torch.Generator] = field(default_factory=list)
    needs_data: bool = False
    varies: bool = False
    module: str = ""
    call: tuple[Any, Any] = ((), {})
    objects: Mutables | None = None
    mutable: bool = False
    left: dict[Place, Any] = field(default_factory=dict)
    shares: bool = False
    work: float = 0.0
    nbytes: float = 0.0

    @property
    def sets_hook(self) -> bool:
        """Whether it sets a hook on a tensor, or may set one on the tensor's node."""
        return self.what in SET_HOOKS

    @property
    def changes_arguments(self) -> bool:
        """Whether it writes into tensors among its arguments."""
        return any(change.argument is not None for change in self.changes)

    @property
    def is_unit(self) -> bool:
        """Whether it is a call of a unit."""
        return isinstance(self.what, str)


@dataclass(eq=False)
class Region:
    """One of the author's checkpoints around units: the events in it, and the values that it returns."""

    first: int
    stop: int = 0
    slots: list[int | None] = field(default_factory=list)


@dataclass(eq=False)
class Trace:
    """The record of one run of a model without data.

    Attributes:
        doors: the doors of the modules whose calls are events.
        events: the events in order.
        values: the values by number.
        output: what the model returned.
        slots: for each tensor of the output its value, or ``None`` if it depends on the arguments alone.
        regions: the author's checkpoints around units.
        metadata: functions that return no tensor, such as ``Tensor.size``.
        direct: the units whose ``forward`` was called without the module.
        changed_arguments: the positions of the model's arguments that its code changed.
        mode: the mode of the fake tensors.
        state: the changes that the run made outside of units, or to objects that several units have.
        settled: the attributes around units that are set once, by module and name, with their values.
        tables: the buffers around units that are set once, by module and name.
        set_in: the attributes that code around units sets once in objects, with the object and the value.
        written: the attributes around units that are made from data in every call.
        inner: the values inside an object that the model returned.
        outer: the units that change containers outside of the model, which cannot run twice.
        has_custom: whether a custom function was applied between units.
        foreign: parameters of other models, such as a frozen teacher's, by their identity.
        kept: the attributes that units have set.
        resets: the attributes of units that code between units has reset for good, and to what.
        decides: whether the code between units read numbers, such as those of the model's arguments.
        work: the operations of modules inside units, by the identity of the module, if they were counted.
        flops: the floating-point operations of the whole run.
        for_any_homes: whether the run would have been the same wherever the units are placed.
        has_context: whether the model's code keeps containers in context variables.
    """

    mode: FakeTensorMode
    device: torch.device
    doors: Sequence[Door]
    events: list[Event] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    output: Any = None
    slots: list[int | None] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    metadata: set[Any] = field(default_factory=lambda: set(METADATA))
    direct: set[str] = field(default_factory=set)
    changed_arguments: set[int] = field(default_factory=set)
    state: list[Changed] = field(default_factory=list)
    settled: dict[tuple[int, str], Any] = field(default_factory=dict)
    tables: list[tuple[nn.Module, str]] = field(default_factory=list)
    set_in: list[tuple[Any, str, Any]] = field(default_factory=list)
    written: list[tuple[nn.Module, str]] = field(default_factory=list)
    inner: list[int] = field(default_factory=list)
    outer: set[str] = field(default_factory=set)
    has_custom: bool = False
    foreign: dict[int, Tensor] = field(default_factory=dict)
    kept: list[Attribute] = field(default_factory=list)
    resets: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    decides: bool = False
    work: dict[int, float] = field(default_factory=dict)
    flops: float = 0.0
    for_any_homes: bool = True
    has_context: bool = False

    def calls(self) -> list[str]:
        """The paths of the units in the order of their calls."""
        return [event.what for event in self.events if event.is_unit]

    @functools.cached_property
    def returned(self) -> list[int | None]:
        """For each tensor of the output its root, or ``None`` if it depends on the arguments alone."""
        return [None if slot is None else self.values[slot].root for slot in self.slots]

    @functools.cached_property
    def placeholders(self) -> dict[int, int]:
        """The root of each value by the identity of its placeholder."""
        return {id(value.tensor): value.root for value in self.values}


Homes = Mapping[str, Sequence[int]]
"""The stages of each unit by path, and of each parameter and each unit's buffer by name.

If a unit is in several stages, its first calls are in the first of them, and so on.
"""
