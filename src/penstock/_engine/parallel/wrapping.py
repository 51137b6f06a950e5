"""Wrappers around a stage or around parts of it, and names without wrappers.

A stage is wrapped after the cut, by DistributedDataParallel, torch.compile, a checkpoint wrapper or a user's
module. State dicts, seeds and ties use the names of the unsplit model, which has no wrappers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock._engine.parallel.groups import ranks_in


class _Wrapper(NamedTuple):
    """A kind of wrapper: its attribute for the module, and its name to users if it spreads the module."""

    inside: str = ""  # empty if it changes the module in place
    spreads: str = ""


# By name, since importing most of them takes longer than the rest of a run that has none.
_WRAPPERS = {
    "DistributedDataParallel": _Wrapper("module", "DistributedDataParallel"),
    "FSDPModule": _Wrapper(spreads="fully_shard"),
    "OptimizedModule": _Wrapper("_orig_mod"),
    "CheckpointWrapper": _Wrapper("_checkpoint_wrapped_module"),
}


def _wrapper_of(module: nn.Module) -> _Wrapper:
    kind: Any = type(module)
    return _wrapper_of_class(kind)


@cache
def _wrapper_of_class(kind: Any) -> _Wrapper:
    bases = [base.__name__ for base in kind.__mro__ if base.__name__ in _WRAPPERS]
    return _WRAPPERS[bases[0]] if bases else _Wrapper()


# ---- modules inside wrappers, and their names without them


class Member(NamedTuple):
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
    while inside := _wrapper_of(module).inside:
        module = module.get_submodule(inside)
    return module


def may_cast(module: nn.Module, inner: nn.Module) -> bool:
    """Tell whether wrappers may change the types of what a stage is given and gives.

    Mixed precision does, and a module of the user's around the stage may.

    Args:
        module: the outermost module.
        inner: the stage's own module inside it.
    """
    around = module
    while around is not inner and (inside := _wrapper_of(around).inside):
        around = around.get_submodule(inside)
    return around is not inner or any(_casts(part.module) for part in spread_parts(module))


def _casts(module: Any) -> bool:
    """Tell whether a module that is spread over processes computes with mixed precision."""
    if isinstance(module, DistributedDataParallel):
        return module.mixed_precision is not None
    # There is no public way to read a module's policy. Of torch 2.13:
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_state.py#L117
    policy = module._get_fsdp_state()._mp_policy
    return policy.param_dtype is not None or policy.output_dtype is not None


def parts_of(module: nn.Module, inner: nn.Module) -> Iterator[Member]:
    """A module and all modules inside it, once for every path.

    Args:
        module: the outermost module.
        inner: the module inside it at which names begin. Modules outside of it keep their paths as names.
    """
    yield from _parts(Member("", "", module), inner)


def _parts(part: Member, inner: nn.Module) -> Iterator[Member]:
    if part.module is inner:
        part = part._replace(name="")
    yield part
    inside = _wrapper_of(part.module).inside
    for child, module in part.module._modules.items():
        if module is not None:
            name = part.name if child == inside else _below(part.name, child)
            yield from _parts(Member(name, _below(part.path, child), module), inner)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def named_parameters(
    module: nn.Module, inner: nn.Module, *, every_name: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by their names without wrappers, in the order of ``nn.Module.named_parameters``.

    Args:
        module: the outermost module.
        inner: as for :func:`parts_of`.
        every_name: whether to yield a parameter under each of its names, not only the first.
    """
    seen: set[int] = set()
    for name, _, part in parts_of(module, inner):
        for leaf, parameter in part._parameters.items():
            if parameter is not None and (every_name or id(parameter) not in seen):
                seen.add(id(parameter))
                yield _below(name, leaf), parameter


def named_buffers(module: nn.Module, inner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers by all of their names without wrappers."""
    for name, _, part in parts_of(module, inner):
        for leaf, buffer in part._buffers.items():
            if buffer is not None:
                yield _below(name, leaf), buffer


def names_without_wrappers(module: nn.Module, inner: nn.Module, keys: list[str]) -> dict[str, str]:
    """For each key of the module's state dict, its name without wrappers."""
    known = {part.path: part.name for part in parts_of(module, inner)}
    return {key: _renamed(known, key) for key in keys}


def _renamed(known: dict[str, str], key: str) -> str:
    head, rest = key, ""
    while head:
        head, _, leaf = head.rpartition(".")
        rest = _below(leaf, rest) if rest else leaf
        if head in known:
            return _below(known[head], rest)
    return key


_HIDDEN = {
    "_fsdp_wrapped_module",
    *(of.inside for of in _WRAPPERS.values() if of.inside[:1] == "_"),
}


def path_without_wrappers(path: str) -> str:
    """A path without the names that wrappers such as ``torch.compile`` insert."""
    return ".".join(part for part in path.split(".") if part not in _HIDDEN)


# ---- wrappers that spread a module over processes


class Spread(NamedTuple):
    """A part of a stage that is replicated or sharded over processes, by a wrapper.

    Attributes:
        path: the part's path.
        how: the wrapper's name to users.
        module: the part, in its wrapper.
    """

    path: str
    how: str
    module: Any

    @property
    def ranks(self) -> set[int]:
        """The processes over which gradients are reduced, as global ranks; empty without weights."""
        if isinstance(self.module, DistributedDataParallel):
            return ranks_in(self.module.process_group)
        return {rank for group in self._groups for rank in mesh_ranks(group.mesh_info.mesh)}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients the wrapper reduces."""
        if isinstance(self.module, DistributedDataParallel):
            named = self.module.module.named_parameters()
            return [p for name, p in named if name not in self.module.parameters_to_ignore]
        return [one.sharded_param for group in self._groups for one in group.fsdp_params]

    @property
    def _groups(self) -> list[Any]:
        # There is no public way to the groups of parameters. Of torch 2.13:
        # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_state.py#L67
        groups: list[Any] = self.module._get_fsdp_state()._fsdp_param_groups
        return groups


def mesh_ranks(mesh: Any) -> set[int]:
    """The processes of a mesh, as global ranks."""
    return {*mesh.mesh.flatten().tolist()}


def spread_parts(module: nn.Module) -> list[Spread]:
    """The parts of a module that a wrapper replicates or shards over processes, from the outside in."""
    return [
        Spread(path, how, part)
        for path, part in module.named_modules()
        if (how := _wrapper_of(part).spreads)
    ]


def shard(module: nn.Module, mesh: Any) -> nn.Module:
    """A module under FSDP2, where each process holds a part of each weight; unchanged if it trains none.

    Args:
        module: a stage's module.
        mesh: a one-dimensional mesh, over which the weights are sharded.
    """
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    sharded: nn.Module = import_module("torch.distributed.fsdp").fully_shard(module, mesh=mesh)
    return sharded
