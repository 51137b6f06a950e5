"""All that is known of DTensor; ``tensors.py`` imports it once there is one, for torch's part takes long."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from penstock.errors import MicrobatchError, SpecError
from penstock.values import register_type

# ---- their parts, their wholes and their norms


_Sharding = tuple[DeviceMesh, tuple[bool, ...]]
"""A mesh, and for each of its dimensions whether a tensor is cut along it."""


def with_local(like: DTensor, part: Tensor) -> DTensor:
    """A tensor that is spread as ``like`` is and has this part here."""
    return _spread_as(like, part, like.shape)


def _spread_as(like: DTensor, part: Tensor, shape: Sequence[int]) -> DTensor:
    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=like.stride(),
    )


def _resized(shape: Sequence[int], dim: int, size: int) -> list[int]:
    found = list(shape)
    found[dim] = size
    return found


def split(tensor: DTensor, count: int, dim: int) -> list[Tensor]:
    """Each process's own share in parts along a dimension; nothing is gathered."""
    shares = torch.tensor_split(tensor.to_local(), count, dim)
    sizes = [len(part) for part in torch.arange(tensor.shape[dim]).tensor_split(count)]
    return [
        _spread_as(tensor, share, _resized(tensor.shape, dim, size))
        for share, size in zip(shares, sizes, strict=True)
    ]


def merge(parts: Sequence[DTensor], dim: int) -> Tensor:
    """Parts put together along a dimension, each process its own share."""
    first = parts[0]
    mesh, placements = first.device_mesh, first.placements
    for part in parts:
        if (part.device_mesh, part.placements) != (mesh, placements):
            raise MicrobatchError(
                f"microbatches gave DTensors placed as {placements} on {mesh} and as {part.placements} on "
                f"{part.device_mesh}; give one placement on one mesh"
            )
    share = torch.cat([part.to_local() for part in parts], dim=dim)
    return _spread_as(first, share, _resized(first.shape, dim, sum(p.shape[dim] for p in parts)))


def replicated(tensor: DTensor) -> DTensor:
    """The same, whole on every process of the mesh; gradients go through."""
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


def spread(like: DTensor, value: Tensor) -> Tensor:
    """A whole tensor, which every process has, cut as ``like`` is."""
    if isinstance(value, DTensor):
        return value
    moved = value.to(like.device)
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)


def replicated_like(like: DTensor, value: Tensor) -> Tensor:
    """A whole tensor, which every process of a mesh has, as one of that mesh."""
    mesh = like.device_mesh
    return DTensor.from_local(
        value.to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False
    )


def region_of(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Which part of the whole lies in this process: its offsets and sizes; None where it is no one box."""
    if any(map(_is_partial, tensor.placements)):
        return None
    # What torch's own checkpoints ask.
    chunks = tensor.__create_chunk_list__()
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(tensor.to_local().shape):
        return None
    return tuple(chunks[0].offsets), tuple(chunks[0].sizes)


def settled(tensor: Tensor) -> Tensor:
    """A tensor without sums that are still to be made."""
    if not isinstance(tensor, DTensor) or not any(map(_is_partial, tensor.placements)):
        return tensor
    summed = [Replicate() if _is_partial(one) else one for one in tensor.placements]
    return tensor.redistribute(placements=summed)


def _is_partial(placement: object) -> bool:
    return isinstance(placement, Partial)


def of_wholes(norms: Tensor, tensors: Sequence[Tensor], order: float) -> Tensor:
    """The norms of whole tensors from those of the parts here.

    They are combined over the dimensions of the mesh along which a tensor is cut, and over no others, in one
    reduction for all tensors that are cut alike.
    """
    cut: dict[_Sharding, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor):
            cut.setdefault(_sharding(tensor), []).append(index)
    for sharding, indices in cut.items():
        if any(sharding[1]):
            norms[indices] = _combined(norms[indices], sharding, order)
    return norms


def _sharding(tensor: DTensor) -> _Sharding:
    # Whatever is neither whole nor a sum is cut, in one way or another.
    cut = (not isinstance(placement, Replicate) for placement in tensor.placements)
    return tensor.device_mesh, tuple(cut)


def _combined(norms: Tensor, sharding: _Sharding, order: float) -> Tensor:
    if math.isinf(order):
        return _reduced(norms, sharding, "max" if order > 0 else "min")
    if order == 0:
        return _reduced(norms, sharding, "sum")
    largest = _reduced(norms, sharding, "max")
    # Relative to the largest, so that powers neither overflow nor vanish.
    scale = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    powers = _reduced((norms / scale).pow(order), sharding, "sum")
    return powers.pow(1.0 / order) * scale


def _reduced(values: Tensor, sharding: _Sharding, operation: str) -> Tensor:
    mesh, cut = sharding
    placements = [Partial(operation) if here else Replicate() for here in cut]
    moved = values.to(mesh.device_type)
    spread = DTensor.from_local(moved, mesh, placements, run_check=False)
    return spread.redistribute(placements=[Replicate()] * len(cut)).to_local().cpu()


# ---- DTensors that cross from stage to stage: each process sends its own share to its counterpart
#
# A mesh does not travel. The receiver puts a share on its own mesh with the same names of dimensions: that of
# a parameter of its stages, one that it has seen on a value, or what its ``get_mesh`` gives.


_Names = tuple[str, ...]
_MESHES: dict[_Names, DeviceMesh] = {}
_CALLBACKS: list[Callable[..., Any]] = []
_MODULES: WeakSet[nn.Module] = WeakSet()


def prepare(modules: Iterable[nn.Module], get_mesh: Callable[..., Any] | None) -> None:
    """Register DTensors as values that come apart, and remember whose parameters may have meshes."""
    _register()
    if get_mesh is not None and get_mesh not in _CALLBACKS:
        _CALLBACKS.append(get_mesh)
    new = [module for module in modules if module not in _MODULES]
    _MODULES.update(new)
    # A process may have several meshes of the same names one after the other.
    _note_meshes_of(new)


@cache
def _register() -> None:
    register_type(DTensor, _take_apart, _put_together)


def _note(mesh: DeviceMesh) -> _Names:
    names = tuple(mesh.mesh_dim_names or ())
    if not names:
        raise SpecError(
            "a DTensor on a mesh without names of dimensions cannot travel: the receiver could not tell "
            "its own mesh; give init_device_mesh mesh_dim_names"
        )
    _MESHES[names] = mesh
    return names


def _take_apart(tensor: DTensor) -> dict[str, Any]:
    return {
        "share": tensor.to_local(),
        "mesh": list(_note(tensor.device_mesh)),
        "placements": [_told(placement) for placement in tensor.placements],
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
    }


def _put_together(parts: dict[str, Any]) -> DTensor:
    found: DTensor = DTensor.from_local(
        parts["share"],
        _mesh(tuple(parts["mesh"])),
        [_read(text) for text in parts["placements"]],
        run_check=False,
        shape=torch.Size(parts["shape"]),
        stride=tuple(parts["stride"]),
    )
    return found


def _mesh(names: _Names) -> DeviceMesh:
    if names not in _MESHES:
        _look_for_meshes(names)
    if names not in _MESHES:
        raise SpecError(
            f"a DTensor on a mesh of the dimensions {names} arrives, but this process knows only "
            f"{sorted(_MESHES)}; give PipelineStage get_mesh="
        )
    return _MESHES[names]


def _look_for_meshes(names: _Names) -> None:
    """In the parameters of this process's stages, then at what the users' functions give."""
    _note_meshes_of(list(_MODULES))
    for callback in _CALLBACKS:
        if names not in _MESHES and (found := callback(names, None)) is not None:
            _MESHES[names] = found


def _note_meshes_of(modules: Iterable[nn.Module]) -> None:
    for parameter in (p for module in modules for p in module.parameters()):
        if isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names:
            _note(parameter.device_mesh)


def _told(placement: Placement) -> list[Any]:
    """A placement as JSON data."""
    if isinstance(placement, Shard) and type(placement) is Shard:
        return ["shard", placement.dim]
    if isinstance(placement, Replicate):
        return ["replicate"]
    if isinstance(placement, Partial) and type(placement) is Partial:
        return ["partial", placement.reduce_op]
    raise SpecError(
        f"a DTensor placed as {placement} cannot travel; redistribute it to Shard, Replicate or Partial"
    )


def _read(told: list[Any]) -> Placement:
    kind, *rest = told
    if kind == "shard":
        return Shard(int(rest[0]))
    return Partial(str(rest[0])) if kind == "partial" else Replicate()
