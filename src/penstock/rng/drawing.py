"""Which modules and operations draw random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch._ops import OpOverload

# ---- modules


# The modules of torch that draw random numbers. A user's class may always draw.
_DRAWING = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.RReLU,
    nn.MultiheadAttention,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
_HARMLESS = ("torch.nn.modules.", "penstock.partition.entry")


class OwnHook(partial[Any]):
    """One of our hooks on a user's module. If the user copies the module during a step, it is left out."""

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _nothing


def _nothing(*_: Any, **__: Any) -> None:
    """Stands for a hook in a copied module."""


def may_draw(module: nn.Module) -> bool:
    """Whether a call of the module itself, not counting modules that it calls, may draw random numbers."""
    if not type(module).__module__.startswith(_HARMLESS) or _is_changed(module):
        return True
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0
    return isinstance(module, _DRAWING)


def _is_changed(module: nn.Module) -> bool:
    """Whether a user has added code to the module, such as a hook."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    own = any(not isinstance(hook, OwnHook) for hook in hooks)
    return own or "forward" in vars(module) or is_compiled(module)


def is_compiled(module: nn.Module) -> bool:
    """Whether the module is compiled, so that calls inside it cannot be seen."""
    kinds = {kind.__name__ for kind in type(module).__mro__}
    return bool(kinds & {"OptimizedModule", "ScriptModule"}) or bool(module._compiled_call_impl)


def visible(root: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
    """Every module of a tree with its paths, except those inside compiled modules.

    A wrapper has the path of what it wraps, so that paths do not depend on wrappers. If a module
    ``stands_for`` another one, which is the one that is called, that one is listed in its place.
    """
    hidden = {
        inner
        for module in root.modules()
        if is_compiled(module)
        for inner in module.modules()
        if inner is not module
    }
    found: dict[nn.Module, tuple[str, ...]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        if module not in hidden:
            called = getattr(module, "stands_for", module)
            found[called] = (*found.get(called, ()), unwrapped(path))
    return found


def called_to_draw(root: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
    """The visible modules that may draw, and the modules around them, without the root."""
    modules = visible(root)
    drawing = {path for module, paths in modules.items() if may_draw(module) for path in paths}
    around = {path[:end] for path in drawing for end, letter in enumerate(path) if letter == "."}
    return {
        module: paths
        for module, paths in modules.items()
        if "" not in paths and not (drawing | around).isdisjoint(paths)
    }


def unwrapped(path: str) -> str:
    """A path without wrappers."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


# ---- operations: notice each one that draws random numbers, at no cost to all others


Told = Callable[[Generator | None], None]
"""Called when an operation has drawn: with the generator that it was given, or None for torch's own."""

_told: list[Told] = []
_kept: list[dict[int, tuple[Generator, Tensor]]] = []

# A key of torch's dispatcher that comes before all others, is used by nothing but torch's own tests, and
# costs nothing while it is off. A mode, which is the public way, would see every operation, at the cost of
# some microseconds each. Like everything private here, seen in torch 2.13.
_NAME = "TESTING_ONLY_GenericMode"
_KEY: Any = torch._C._dispatch_key_parse(_NAME)


@contextmanager
def noticed(told: Told) -> Iterator[None]:
    """Call ``told`` for each operation that draws in this thread; of nested contexts, only the innermost.

    An operation that is composed of others counts once. One that has nothing to draw, such as dropout with a
    probability of 0, does not count.
    """
    with _listed(_told, told):
        yield


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore, afterwards, all generators that operations are given in this context."""
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
    """Register what torch does under the key. The registration lasts as long as the result is held."""
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, _NAME)
    drawing = torch.library.Library("aten", "IMPL")
    for operation in _all_that_draw():
        drawing.impl(operation, _seeing(operation), _NAME)
    # Higher-order operators, such as flex_attention, do not use the fallback: set it for the existing ones,
    # and for those to come.
    for operator in torch._ops._higher_order_ops.values():
        operator.fallthrough(_KEY)
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(_KEY)
    return others, drawing


def _all_that_draw() -> Iterator[OpOverload]:
    for full in torch._C._dispatch_get_all_op_names():
        space, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        # Looked up this way, no Python objects are made for thousands of other operations.
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
    # The former reuse the forward's numbers; the latter only chooses a kernel.
    if name.endswith("_backward") or name == "aten::_fused_sdp_choice":
        return False
    return torch.Tag.nondeterministic_seeded in operation.tags


def has_drawn(operation: OpOverload, args: Any, kwargs: Any) -> bool:
    """Whether a call of an operation that can draw has drawn: not in evaluation, nor with probability 0."""
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
    """The generator among the arguments, unless it is torch's own."""
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
    """A number that identifies a generator, whose Python object is a different one for each operation."""
    number: int = generator._cdata
    return number
