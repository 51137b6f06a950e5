"""What draws random numbers: modules, and operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch._ops import OpOverload

# ---- which modules may draw random numbers, and under which names


# What torch offers draws nothing itself, but for these. Of a user's class one cannot know.
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
    """A hook of ours on a user's module; where the user copies the module in a step, it is not copied."""

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _nothing


def _nothing(*_: Any, **__: Any) -> None:
    """Is there in place of a hook."""


def may_draw(module: nn.Module) -> bool:
    """Whether calling the module, without the modules that it calls, may draw random numbers."""
    if not type(module).__module__.startswith(_HARMLESS) or _is_changed(module):
        return True
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0
    return isinstance(module, _DRAWING)


def _is_changed(module: nn.Module) -> bool:
    """Whether somebody has put code of his own into the module."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    own = any(not isinstance(hook, OwnHook) for hook in hooks)
    return own or "forward" in vars(module) or is_compiled(module)


def is_compiled(module: nn.Module) -> bool:
    """Whether what happens inside the module cannot be seen."""
    kinds = {kind.__name__ for kind in type(module).__mro__}
    return bool(kinds & {"OptimizedModule", "ScriptModule"}) or bool(module._compiled_call_impl)


def visible(root: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
    """Every module of a tree and its paths in it, but for what is inside compiled modules.

    A wrapper has the name of what it wraps, so that names do not depend on wrappers. For a module that
    ``stands_for`` another, which is what is called, there is that one.
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
    """Of these the modules that may draw, and those that such modules are called by, but for the root."""
    modules = visible(root)
    drawing = {path for module, paths in modules.items() if may_draw(module) for path in paths}
    around = {path[:end] for path in drawing for end, letter in enumerate(path) if letter == "."}
    return {
        module: paths
        for module, paths in modules.items()
        if "" not in paths and not (drawing | around).isdisjoint(paths)
    }


def unwrapped(path: str) -> str:
    """A path as it is without wrappers."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


# ---- notice each operation of PyTorch that draws random numbers, at no cost to all others


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
