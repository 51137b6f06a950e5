"""Notice each operation of PyTorch that draws random numbers, at no cost to all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Generator, Tensor
from torch._ops import OpOverload

Told = Callable[[Generator | None], None]
"""Who is told when an operation has drawn: from a generator that it was given, or from torch's own."""

_told: list[Told] = []
_kept: list[dict[int, tuple[Generator, Tensor]]] = []

# A key of torch's dispatcher that stands before all others, that nothing but torch's own tests use, and that
# costs nothing while it is off. A mode, the public way, would see every operation, each for some
# microseconds. Like all that is private here, seen in torch 2.13.
_NAME = "TESTING_ONLY_GenericMode"
_KEY: Any = torch._C._dispatch_key_parse(_NAME)


@contextmanager
def noticed(told: Told) -> Iterator[None]:
    """Tell of what draws in this thread while the context lasts; of contexts that overlap the latest is told.

    An operation that is made of others tells once. One that has nothing to draw, such as dropout with a
    probability of 0, does not tell.
    """
    with _listed(_told, told):
        yield


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put the generators that operations are given in this context back afterwards to where they were."""
    states: dict[int, tuple[Generator, Tensor]] = {}
    try:
        with _listed(_kept, states):
            yield
    finally:
        for generator, state in states.values():
            generator.set_state(state)


@contextmanager
def _listed(items: list[Any], item: Any) -> Iterator[None]:
    _library()
    items.append(item)
    _switch(True)
    try:
        yield
    finally:
        del items[[other is item for other in items].index(True)]
        _switch(bool(_told or _kept))


def _switch(on: bool) -> None:
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, on)


@cache
def _library() -> tuple[torch.library.Library, ...]:
    """What torch is told to do under the key, for as long as this is held."""
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, _NAME)
    drawing = torch.library.Library("aten", "IMPL")
    for operation in _all_that_draw():
        drawing.impl(operation, _seeing(operation), _NAME)
    # Operators that are given functions, such as flex_attention, have no such default: those there are, and
    # those to come.
    for operator in torch._ops._higher_order_ops.values():
        operator.fallthrough(_KEY)
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(_KEY)
    return others, drawing


def _all_that_draw() -> Iterator[OpOverload]:
    for full in torch._C._dispatch_get_all_op_names():
        space, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        # Without making objects of all the thousands of operations.
        found = (
            torch._C._get_operation_overload(f"aten::{name}", overload) if space == "aten" else None
        )
        if found is not None and torch.Tag.nondeterministic_seeded in found[2]:
            operation = getattr(getattr(torch.ops.aten, name), overload or "default")
            if can_draw(operation):
                yield operation


def can_draw(operation: OpOverload) -> bool:
    """Whether an operation may draw random numbers in a forward pass."""
    name = operation._schema.name
    # The former's numbers are the forward's, the latter chooses how to compute something.
    if name.endswith("_backward") or name == "aten::_fused_sdp_choice":
        return False
    return torch.Tag.nondeterministic_seeded in operation.tags


def has_drawn(operation: OpOverload, args: Any, kwargs: Any) -> bool:
    """Whether a call of an operation that can draw did: in evaluation, or with probability 0, none does."""
    return all(
        args[index] if index < len(args) else kwargs.get(name, default)
        for index, name, default in _conditions(operation)
    )


@cache
def _conditions(operation: OpOverload) -> list[tuple[int, str, Any]]:
    """The arguments that must not be 0 or False, by position and name, with their defaults."""
    names = {"train", "training", "dropout", "dropout_p"}
    if "dropout" in operation._schema.name:
        names.add("p")
    arguments = enumerate(operation._schema.arguments)
    return [(index, a.name, a.default_value) for index, a in arguments if a.name in names]


def _seeing(operation: OpOverload) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        generator = _given(args, kwargs)
        if generator is not None:
            for states in _kept:
                states.setdefault(identity(generator), (generator, generator.get_state()))
        _switch(False)
        try:
            result = operation(*args, **kwargs)
        finally:
            _switch(True)
        if _told and has_drawn(operation, args, kwargs):
            _told[-1](generator)
        return result

    return run


def _given(args: Any, kwargs: Any) -> Generator | None:
    """The generator among the arguments, if it is not torch's own."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Generator):
            return None if _is_default(value) else value
    return None


def _is_default(generator: Generator) -> bool:
    defaults: Any = [torch.default_generator]
    if generator.device.type != "cpu":
        defaults = torch.get_device_module(generator.device).default_generators
    return identity(generator) in map(identity, defaults)


def identity(generator: Any) -> int:
    """The same for the same generator, whose object on Python's side is another for each operation."""
    number: int = generator._cdata
    return number
