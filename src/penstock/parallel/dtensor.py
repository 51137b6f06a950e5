"""Everything that needs DTensor. ``tensors.py`` imports it once there is one, since torch takes long to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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

# ---- local parts, whole tensors, and norms


def with_local(like: DTensor, part: Tensor) -> DTensor:
    """A DTensor that is placed like ``like`` and has this local part."""
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
    """Split each process's local part along a dimension; nothing is gathered."""
    shares = torch.tensor_split(tensor.to_local(), count, dim)
    sizes = [len(part) for part in torch.arange(tensor.shape[dim]).tensor_split(count)]
    return [
        _spread_as(tensor, share, _resized(tensor.shape, dim, size))
        for share, size in zip(shares, sizes, strict=True)
    ]


def merge(parts: Sequence[DTensor], dim: int) -> Tensor:
    """Concatenate along a dimension, each process its local parts."""
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
    """The tensor replicated on every process of its mesh; gradients flow through."""
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


def spread(like: DTensor, value: Tensor) -> Tensor:
    """A whole tensor, which every process has, placed like ``like``."""
    if isinstance(value, DTensor):
        return value
    moved = value.to(like.device)
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)


def replicated_like(like: DTensor, value: Tensor) -> Tensor:
    """A whole tensor, which every process of the mesh of ``like`` has, as a DTensor of that mesh."""
    mesh = like.device_mesh
    return DTensor.from_local(
        value.to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False
    )


def region_of(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The offsets and sizes of the local part within the whole; None if it is not a single box."""
    if any(map(_is_partial, tensor.placements)):
        return None
    # The method that torch's own checkpoints use.
    chunks = tensor.__create_chunk_list__()
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(tensor.to_local().shape):
        return None
    return tuple(chunks[0].offsets), tuple(chunks[0].sizes)


def settled(tensor: Tensor) -> Tensor:
    """The tensor with pending (Partial) sums carried out."""
    if not isinstance(tensor, DTensor) or not any(map(_is_partial, tensor.placements)):
        return tensor
    summed = [Replicate() if _is_partial(one) else one for one in tensor.placements]
    return tensor.redistribute(placements=summed)


def _is_partial(placement: object) -> bool:
    return isinstance(placement, Partial)


def largest(like: DTensor, value: Tensor) -> Tensor:
    """The largest of numbers on the processes among which ``like`` is cut."""
    placements = [p if isinstance(p, Replicate) else Partial("max") for p in like.placements]
    return DTensor.from_local(value, like.device_mesh, placements, run_check=False).full_tensor()


# ---- DTensors that travel between stages: each process sends its local part to its counterpart # A mesh
# does not travel. The receiver uses its own mesh of the same dimension names: the mesh of a parameter of
# its stages, one that it has seen on a value, or the one that its ``get_mesh`` returns.


_Names = tuple[str, ...]
_MESHES: dict[_Names, DeviceMesh] = {}
_CALLBACKS: list[Callable[..., Any]] = []
_MODULES: WeakSet[nn.Module] = WeakSet()


def prepare(modules: Iterable[nn.Module], get_mesh: Callable[..., Any] | None) -> None:
    """Remember modules whose parameters have meshes."""
    if get_mesh is not None and get_mesh not in _CALLBACKS:
        _CALLBACKS.append(get_mesh)
    new = [module for module in modules if module not in _MODULES]
    _MODULES.update(new)
    # Noted again for every new module, since a later mesh may have the names of an earlier one.
    _note_meshes_of(new)


def _note(mesh: DeviceMesh) -> _Names:
    names = tuple(mesh.mesh_dim_names or ())
    if not names:
        raise SpecError(
            "a DTensor on a mesh without dimension names cannot travel, as the receiver could not find its "
            "own mesh; pass mesh_dim_names to init_device_mesh"
        )
    _MESHES[names] = mesh
    return names


def take_apart(tensor: DTensor, earlier: Any = None) -> tuple[Tensor, dict[str, Any]]:
    """The local part of a DTensor, placed as an earlier one if there was one; and its placement, in JSON."""
    if earlier is not None:
        placements = [_read(text) for text in earlier["placements"]]
        if placements != list(tensor.placements):
            tensor = tensor.redistribute(placements=placements)
    sharding = {
        "mesh": list(_note(tensor.device_mesh)),
        "placements": [_described(placement) for placement in tensor.placements],
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
    }
    part: Any = tensor.detach()
    return part.to_local(), sharding


def put_together(part: Tensor, sharding: dict[str, Any]) -> DTensor:
    """The DTensor with this local part."""
    tensor: DTensor = DTensor.from_local(
        part,
        _mesh(tuple(sharding["mesh"])),
        [_read(text) for text in sharding["placements"]],
        run_check=False,
        shape=torch.Size(sharding["shape"]),
        stride=tuple(sharding["stride"]),
    )
    return tensor


def _mesh(names: _Names) -> DeviceMesh:
    if names not in _MESHES:
        _look_for_meshes(names)
    if names not in _MESHES:
        raise SpecError(
            f"a DTensor arrives on a mesh of the dimensions {names}, but this process knows only "
            f"{sorted(_MESHES)}; pass get_mesh= to PipelineStage"
        )
    return _MESHES[names]


def _look_for_meshes(names: _Names) -> None:
    """Look for a mesh in the parameters of this process's stages, then ask the users' functions."""
    _note_meshes_of(list(_MODULES))
    for callback in _CALLBACKS:
        if names not in _MESHES and (found := callback(names, None)) is not None:
            _MESHES[names] = found


def _note_meshes_of(modules: Iterable[nn.Module]) -> None:
    for parameter in (p for module in modules for p in module.parameters()):
        if isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names:
            _note(parameter.device_mesh)


def _described(placement: Placement) -> list[Any]:
    """A placement as JSON data."""
    if isinstance(placement, Shard) and type(placement) is Shard:
        return ["shard", placement.dim]
    if isinstance(placement, Replicate):
        return ["replicate"]
    if isinstance(placement, Partial) and type(placement) is Partial:
        return ["partial", placement.reduce_op]
    raise SpecError(
        f"a DTensor with the placement {placement} cannot travel; redistribute it to Shard, Replicate "
        "or Partial"
    )


def _read(text: list[Any]) -> Placement:
    kind, *rest = text
    if kind == "shard":
        return Shard(int(rest[0]))
    return Partial(str(rest[0])) if kind == "partial" else Replicate()
