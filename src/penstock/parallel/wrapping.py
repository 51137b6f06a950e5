"""Wrappers around a stage or parts of it: what is inside, and its names without them.

A stage is wrapped after the cut, by DistributedDataParallel, torch.compile, a checkpoint wrapper or a module
of the user's. State dicts, seeds and ties know the names of the unsplit model, which has no wrappers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

# By name: to import them takes longer than a run without them needs.
_INSIDE = {
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}
"""Under which name each known wrapper holds what it wraps."""

_SPREADING = {"DistributedDataParallel": "DistributedDataParallel", "FSDPModule": "fully_shard"}
"""What spreads a module over processes, and how a user calls that."""


class Part(NamedTuple):
    """A module somewhere inside another.

    Attributes:
        name: its path without wrappers.
        path: its path as it is.
        module: the module.
    """

    name: str
    path: str
    module: nn.Module


def unwrapped(module: nn.Module) -> nn.Module:
    """What is inside of the known wrappers around a module."""
    while (inside := _inside(module)) is not None:
        module = module.get_submodule(inside)
    return module


def alone(module: nn.Module) -> nn.Module:
    """A module as it is without its replicas: what it gives for its arguments is the same.

    A call of ``DistributedDataParallel`` by itself would expect a backward that reduces.
    """
    replicated = _inside(module) == "module"
    return module.get_submodule("module") if replicated and not _casts(module) else module


def _casts(module: Any) -> bool:
    return module.mixed_precision is not None


def _inside(module: nn.Module) -> str | None:
    for kind in type(module).__mro__:
        if kind.__name__ in _INSIDE:
            return _INSIDE[kind.__name__]
    return None


def parts_of(module: nn.Module, own: nn.Module) -> Iterator[Part]:
    """A module and all below, each as often as it has paths.

    Args:
        module: the outermost.
        own: the one inside of it that names begin at. What is outside of it keeps its path as its name.
    """
    yield from _parts(Part("", "", module), own)


def _parts(part: Part, own: nn.Module) -> Iterator[Part]:
    if part.module is own:
        part = part._replace(name="")
    yield part
    inside = _inside(part.module)
    for child, module in part.module._modules.items():
        if module is not None:
            name = part.name if child == inside else _below(part.name, child)
            yield from _parts(Part(name, _below(part.path, child), module), own)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def named_parameters(
    module: nn.Module, own: nn.Module, *, every_name: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by their names without wrappers, in the order of ``nn.Module.named_parameters``.

    Args:
        module: the outermost.
        own: as for :func:`parts_of`.
        every_name: whether to give one under each of its names, and not only the first.
    """
    seen: set[int] = set()
    for name, _, part in parts_of(module, own):
        for leaf, parameter in part._parameters.items():
            if parameter is not None and (every_name or id(parameter) not in seen):
                seen.add(id(parameter))
                yield _below(name, leaf), parameter


def named_buffers(module: nn.Module, own: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers under each of their names without wrappers."""
    for name, _, part in parts_of(module, own):
        for leaf, buffer in part._buffers.items():
            if buffer is not None:
                yield _below(name, leaf), buffer


def names_without_wrappers(module: nn.Module, own: nn.Module, keys: list[str]) -> dict[str, str]:
    """For each key of the module's state dict the name without wrappers."""
    known = {part.path: part.name for part in parts_of(module, own)}
    return {key: _renamed(known, key) for key in keys}


def _renamed(known: dict[str, str], key: str) -> str:
    head, rest = key, ""
    while head:
        head, _, leaf = head.rpartition(".")
        rest = _below(leaf, rest) if rest else leaf
        if head in known:
            return _below(known[head], rest)
    return key


def spreads_over_processes(module: nn.Module) -> tuple[str, str] | None:
    """The first part of a module that is replicated or sharded already: its path, and by what."""
    for path, part in module.named_modules():
        for kind in type(part).__mro__:
            if kind.__name__ in _SPREADING:
                return path, _SPREADING[kind.__name__]
    return None
