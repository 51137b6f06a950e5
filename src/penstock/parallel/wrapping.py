"""Wrappers around a stage or around parts of it: names without them, and what a step needs because of them.

A stage is wrapped after the cut, by DistributedDataParallel, torch.compile, a checkpoint wrapper or a module
of the user's. State dicts, seeds and ties use the names of the unsplit model, which has no wrappers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# ---- modules inside wrappers, and their names without them


# By name, since importing the latter two takes longer than everything else in a run without them.
_INSIDE = {
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}
"""The name under which each known wrapper holds the wrapped module."""

_SPREADING = {"DistributedDataParallel": "DistributedDataParallel", "FSDPModule": "fully_shard"}
"""Classes that spread a module over processes, with the name that users know."""


class Part(NamedTuple):
    """A module somewhere inside another.

    Attributes:
        name: its path without wrappers.
        path: its actual path.
        module: the module.
    """

    name: str
    path: str
    module: nn.Module


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside all known wrappers."""
    while (inside := _inside(module)) is not None:
        module = module.get_submodule(inside)
    return module


def alone(module: nn.Module) -> nn.Module:
    """The module inside ``DistributedDataParallel``, whose output is the same, or the module itself.

    A call of ``DistributedDataParallel`` itself would expect a backward that reduces. One with mixed
    precision changes types, and so cannot be left out.
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
    """A module and all modules inside it, each one once for every path.

    Args:
        module: the outermost module.
        own: the module inside it at which names begin. Modules outside of it keep their paths as names.
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
        module: the outermost module.
        own: as for :func:`parts_of`.
        every_name: whether to give a parameter under each of its names, and not only the first.
    """
    seen: set[int] = set()
    for name, _, part in parts_of(module, own):
        for leaf, parameter in part._parameters.items():
            if parameter is not None and (every_name or id(parameter) not in seen):
                seen.add(id(parameter))
                yield _below(name, leaf), parameter


def named_buffers(module: nn.Module, own: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers by all of their names without wrappers."""
    for name, _, part in parts_of(module, own):
        for leaf, buffer in part._buffers.items():
            if buffer is not None:
                yield _below(name, leaf), buffer


def names_without_wrappers(module: nn.Module, own: nn.Module, keys: list[str]) -> dict[str, str]:
    """For each key of the module's state dict, the name without wrappers."""
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
    """The path of the first part that is replicated or sharded, and what does so; None if there is none."""
    for path, part in module.named_modules():
        for kind in type(part).__mro__:
            if kind.__name__ in _SPREADING:
                return path, _SPREADING[kind.__name__]
    return None


# ---- what replicated and sharded stages need around a call


Apart = Callable[[], AbstractContextManager[Any]]


class Adapter:
    """Accompanies a stage through a call. Methods that are not overridden do nothing.

    Attributes:
        whole_backward: whether the graph of a stage's backward must be run in one piece. Reducing gradients
            may still be left to the weights' half.
        casts: whether the wrapper changes the types of the arguments before the module's own code sees them.
    """

    whole_backward = False
    casts = False

    def fits(self, module: nn.Module) -> bool:
        """Whether it still belongs to a stage's module, which the user may have wrapped since."""
        raise NotImplementedError

    def begin(self, microbatches: int, *, trains: bool = True, gathers: bool = True) -> None:
        """A call begins.

        Args:
            microbatches: the number of microbatches.
            trains: whether they go backward.
            gathers: whether to gather parameters now, rather than when the schedule says or when they are
                used.
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
        """Start to gather the parameters."""

    def reshard(self) -> None:
        """Free gathered parameters."""

    def reduce(self) -> None:
        """Start to reduce the gradients, which are complete for this step."""

    def finish(self) -> None:
        """The call is over; when this returns, gradients are reduced."""

    def abandon(self) -> None:
        """The call was interrupted."""


def adapter_of(module: nn.Module, apart: Apart = nullcontext) -> Adapter | None:
    """The adapter of a stage's module, if the module or a part of it is replicated or sharded.

    Args:
        module: of the stage, in its wrapper.
        apart: a context in which gradients that the stage collects beside ``.grad`` are in ``.grad``.
    """
    # FSDP2 takes long to import; as long as nobody has imported it, nothing is sharded.
    if not isinstance(module, DistributedDataParallel) and _SHARDS not in sys.modules:
        return None
    found: Adapter | None = import_module("penstock.parallel.adapters").make_adapter(module, apart)
    return found


_SHARDS = "torch.distributed.fsdp"


def over_replicas(module: nn.Module, mesh: Any, *, shard: bool) -> nn.Module:
    """Spread a stage's module over the replicas of a pipeline.

    Args:
        module: of the stage.
        mesh: with a dimension ``dp``.
        shard: whether each replica holds a part of each weight (FSDP2) or all of it (DDP).
    """
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    if shard:
        made: nn.Module = import_module(_SHARDS).fully_shard(module, mesh=mesh["dp"])
        return made
    return DistributedDataParallel(module, process_group=mesh.get_group("dp"))


_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def path_without_wrappers(path: str) -> str:
    """A path without the names that wrappers such as ``torch.compile`` put into it."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)
