"""Which modules may draw random numbers, and under which names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

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
_HARMLESS = ("torch.nn.modules.", "penstock.partition.chain")


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
    return bool(
        module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    ) or is_compiled(module)


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
