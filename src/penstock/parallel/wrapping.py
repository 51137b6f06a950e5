"""What is wrapped around a stage or parts of it: its names without that, and what a step needs around it.

A stage is wrapped after the cut, by DistributedDataParallel, torch.compile, a checkpoint wrapper or a module
of the user's. State dicts, seeds and ties know the names of the unsplit model, which has no wrappers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# ---- what is inside of wrappers, and its names without them


# By name: to import the latter two takes longer than a run without them needs.
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


# ---- what a replicated or sharded stage needs around a step, and which stages need it


Apart = Callable[[], AbstractContextManager[Any]]


class Adapter:
    """Goes along with a stage through a call; a method that is not overridden does nothing.

    Attributes:
        whole_backward: whether the graph of a stage's backward must be run in one piece. Gradients of weights
            may be left to the weights' half all the same.
        casts: whether the module changes the types of its arguments before its own code sees them.
    """

    whole_backward = False
    casts = False

    def fits(self, module: nn.Module) -> bool:
        """Whether it is still the one for a stage's module, which a user may have wrapped since."""
        raise NotImplementedError

    def begin(self, microbatches: int, *, trains: bool = True, gathers: bool = True) -> None:
        """A call of so many microbatches begins.

        Args:
            microbatches: how many.
            trains: whether they go backward.
            gathers: whether parameters are to be gathered now; else the schedule says when, or their use.
        """

    def forward(self, microbatch: int) -> None:
        """A microbatch's forward begins."""

    def loss(self, microbatch: int) -> None:
        """Its loss begins, on the last stage."""

    def backward(self, microbatch: int) -> None:
        """Its backward begins, or a half of it."""

    def done(self, microbatch: int) -> None:
        """Its backward is over."""

    def unshard(self) -> None:
        """Gather the parameters, to be there when they are needed."""

    def reshard(self) -> None:
        """Let go of gathered parameters."""

    def reduce(self) -> None:
        """Start to reduce the gradients: all of the step are there."""

    def finish(self) -> None:
        """The call is over: gradients are reduced when this returns."""

    def abandon(self) -> None:
        """The call was interrupted."""


def adapter_of(module: nn.Module, apart: Apart = nullcontext) -> Adapter | None:
    """The adapter of a stage's module, where it or a part of it is replicated or sharded.

    Args:
        module: of the stage, in its wrapper.
        apart: a context in which those gradients that the stage collects apart are the parameters' ``.grad``.
    """
    # torch's part that shards takes long to import; where nobody has imported it, nothing is sharded.
    if not isinstance(module, DistributedDataParallel) and _SHARDS not in sys.modules:
        return None
    found: Adapter | None = import_module("penstock.parallel.adapters").make_adapter(module, apart)
    return found


_SHARDS = "torch.distributed.fsdp"


def over_replicas(module: nn.Module, mesh: Any, *, shard: bool) -> nn.Module:
    """A stage's module spread over the replicas of a pipeline, in the usual way.

    Args:
        module: of the stage.
        mesh: with a dimension ``dp``.
        shard: whether each replica holds a part of each weight, by FSDP2, or all of it.
    """
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    if shard:
        made: nn.Module = import_module(_SHARDS).fully_shard(module, mesh=mesh["dp"])
        return made
    return DistributedDataParallel(module, process_group=mesh.get_group("dp"))
