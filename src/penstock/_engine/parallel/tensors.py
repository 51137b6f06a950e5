"""Plain tensors and DTensors alike: local parts, whole tensors, norms, and transfers.

Torch needs half a second to import its part for DTensors, so the import waits for the first DTensor.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeGuard
from weakref import WeakSet

import torch
from torch import Tensor, nn

from penstock.errors import MicrobatchError, SpecError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

_TORCH_PART = "torch.distributed.tensor"


def _dtensors() -> Any:
    return import_module(_TORCH_PART)


def is_sharded(value: Any) -> TypeGuard[DTensor]:
    """Tell whether a value is a DTensor."""
    return type(value) is not Tensor and hasattr(value, "to_local")


# ---- local parts and whole tensors


def local_part(tensor: Tensor) -> Tensor:
    """The local part of a DTensor, or a plain tensor itself; detached."""
    return (tensor.to_local() if is_sharded(tensor) else tensor).detach()


def with_local(like: Tensor, part: Tensor) -> Tensor:
    """A tensor that is placed like ``like`` and has this local part."""
    return _placed_as(like, part, like.shape) if is_sharded(like) else part


def _placed_as(like: DTensor, part: Tensor, shape: Sequence[int]) -> DTensor:
    return _assembled(part, like.device_mesh, like.placements, shape, like.stride())


def _assembled(
    part: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int] | None = None,
    stride: tuple[int, ...] | None = None,
) -> DTensor:
    size = None if shape is None else torch.Size(shape)
    tensor: DTensor = _dtensors().DTensor.from_local(
        part, mesh, placements, run_check=False, shape=size, stride=stride
    )
    return tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, detached. Every process of a DTensor's mesh must call this together."""
    return (tensor.full_tensor() if is_sharded(tensor) else tensor).detach()


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor as a plain one; gradients flow through, unlike :func:`whole`."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def spread(like: Tensor, value: Tensor) -> Tensor:
    """A whole tensor, which every process has, placed like ``like``."""
    if not is_sharded(like) or is_sharded(value):
        return value
    mesh, placements = like.device_mesh, like.placements
    tensor: Tensor = _dtensors().distribute_tensor(
        value.to(like.device), mesh, placements, src_data_rank=None
    )
    return tensor


def replicated_like(like: Tensor, value: Tensor) -> Tensor:
    """A whole tensor, which every process has, replicated on the mesh of ``like``."""
    if not is_sharded(like):
        return value
    mesh = like.device_mesh
    return _assembled(value.to(like.device), mesh, [_dtensors().Replicate()] * mesh.ndim)


def region_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The part of a tensor that lies in this process: its offsets and its sizes.

    None if that is not a single box, as for a pending sum.
    """
    if not is_sharded(tensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    if any(placement.is_partial() for placement in tensor.placements):
        return None
    # The method that torch's own checkpoints use.
    chunks = tensor.__create_chunk_list__()
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(tensor.to_local().shape):
        return None
    return tuple(chunks[0].offsets), tuple(chunks[0].sizes)


def split_sharded(tensor: Any, count: int, dim: int) -> list[Tensor]:
    """Split a DTensor along a dimension: each process splits its local part, and nothing is gathered.

    Args:
        tensor: the DTensor.
        count: the number of parts; their sizes differ by at most one.
        dim: the dimension.
    """
    shares = torch.tensor_split(tensor.to_local(), count, dim)
    sizes = [
        len(part) for part in torch.arange(tensor.shape[dim], device="cpu").tensor_split(count)
    ]
    return [
        _placed_as(tensor, share, _resized(tensor.shape, dim, size))
        for share, size in zip(shares, sizes, strict=True)
    ]


def merge_sharded(parts: Sequence[Any], dim: int) -> Tensor:
    """Concatenate DTensors along a dimension: each process joins its local parts.

    Raises:
        MicrobatchError: the parts are placed differently.
    """
    first = parts[0]
    mesh, placements = first.device_mesh, first.placements
    for part in parts:
        if (part.device_mesh, part.placements) != (mesh, placements):
            raise MicrobatchError(
                f"microbatches gave DTensors placed as {placements} on {mesh} and as {part.placements} on "
                f"{part.device_mesh}; give one placement on one mesh"
            )
    share = torch.cat([part.to_local() for part in parts], dim=dim)
    return _placed_as(first, share, _resized(first.shape, dim, sum(p.shape[dim] for p in parts)))


def _resized(shape: Sequence[int], dim: int, size: int) -> list[int]:
    sizes = list(shape)
    sizes[dim] = size
    return sizes


# ---- norms


def global_norms(tensors: Sequence[Tensor], order: float, *, apart: bool = False) -> Tensor:
    """Norms, in float64 on the CPU: one of each plain tensor, and one of all DTensors that are placed alike.

    Every process of the mesh of a DTensor must call this together, with the tensors in the same order.

    Args:
        tensors: the tensors.
        order: as for :func:`torch.linalg.vector_norm`.
        apart: whether each DTensor has a norm of its own too.
    """
    alike: dict[object, list[Tensor]] = {}
    for index, tensor in enumerate(tensors):
        if is_sharded(tensor):
            whole_sum = _summed(tensor)
            # A norm of norms of order 0 would count tensors.
            together = order and not apart
            key = (whole_sum.device_mesh, whole_sum.placements) if together else index
            alike.setdefault(key, []).append(whole_sum)
        else:
            dense = tensor.coalesce().values() if tensor.is_sparse else tensor
            alike[index] = [dense]
    totals = [_total(members, order) for members in alike.values()]
    # Brought to the CPU in one go, since each transfer waits for the accelerator.
    device = totals[0].device if totals else None
    return (
        torch.stack([one.to(device) for one in totals]).cpu()
        if totals
        else torch.zeros(0, device="cpu").double()
    )


def _total(tensors: Sequence[Tensor], order: float) -> Tensor:
    if is_sharded(tensors[0]) and order == math.inf:
        # Torch cannot take this norm of an empty shard.
        local = _total([tensor.to_local() for tensor in tensors if is_sharded(tensor)], order)
        like, replicate = tensors[0], _dtensors().Replicate
        places = [
            p if isinstance(p, replicate) else _dtensors().Partial("max") for p in like.placements
        ]
        return _assembled(local, like.device_mesh, places).full_tensor().double()
    # Nor norms of orders below 0, which are rarely needed: these are taken of the gathered tensors.
    norms = [_norm(whole(tensor) if order < 0 else tensor, order) for tensor in tensors]
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), order)
    return gathered(total).double()


def _norm(tensor: Tensor, order: float) -> Tensor:
    if not tensor.numel():
        return torch.tensor(math.inf if order < 0 else 0.0, device=tensor.device)
    narrow = tensor.dtype in (torch.float16, torch.bfloat16)
    norm: Tensor = torch.linalg.vector_norm(tensor, order, dtype=torch.float32 if narrow else None)
    return norm


def _summed(tensor: DTensor) -> DTensor:
    """The tensor with pending (Partial) sums carried out."""
    if not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    replicate = _dtensors().Replicate()
    return tensor.redistribute(
        placements=[replicate if one.is_partial() else one for one in tensor.placements]
    )


# ---- DTensors that travel between stages: each process sends its local part to its counterpart
#
# Meshes are not sent. The receiver uses its own mesh with the same dimension names: the mesh of one of its
# parameters, one that it has seen on a value, or the one that its ``get_mesh`` returns.


GetMesh = Callable[..., Any]
_Names = tuple[str, ...]
_MESHES: dict[_Names, DeviceMesh] = {}
_CALLBACKS: list[GetMesh] = []
_MODULES: WeakSet[nn.Module] = WeakSet()


def let_cross(modules: Iterable[nn.Module], get_mesh: GetMesh | None = None) -> None:
    """Prepare this process to exchange DTensors between its stages and others.

    Args:
        modules: the modules of its stages, whose parameters may have meshes.
        get_mesh: ``(dimension names, None) -> DeviceMesh``, for other meshes.
    """
    # Until torch's part is imported, there are no DTensors.
    if _TORCH_PART not in sys.modules and get_mesh is None:
        return
    if get_mesh is not None and get_mesh not in _CALLBACKS:
        _CALLBACKS.append(get_mesh)
    new = [module for module in modules if module not in _MODULES]
    _MODULES.update(new)
    # Noted again for every new module, since a later mesh may have the names of an earlier one.
    _note_meshes_of(new)


def _dimensions_of(mesh: DeviceMesh) -> _Names:
    names = tuple(mesh.mesh_dim_names or ())
    if not names:
        raise SpecError(
            "a DTensor on a mesh without dimension names cannot travel, as the receiver could not find its "
            "own mesh; pass mesh_dim_names to init_device_mesh"
        )
    _MESHES[names] = mesh
    return names


def _note_meshes_of(modules: Iterable[nn.Module]) -> None:
    for parameter in (p for module in modules for p in module.parameters()):
        if is_sharded(parameter) and parameter.device_mesh.mesh_dim_names:
            _dimensions_of(parameter.device_mesh)


def _mesh(names: _Names) -> DeviceMesh:
    """The mesh of these names: one seen before, a parameter's, or the one that a user's callback returns."""
    if names not in _MESHES:
        _note_meshes_of(list(_MODULES))
    for callback in _CALLBACKS:
        if names not in _MESHES and (mesh := callback(names, None)) is not None:
            _MESHES[names] = mesh
    if names not in _MESHES:
        raise SpecError(
            f"a DTensor arrives on a mesh of the dimensions {names}, but this process knows only "
            f"{sorted(_MESHES)}; pass get_mesh= to PipelineStage"
        )
    return _MESHES[names]


def arrived(tensor: Tensor) -> Tensor:
    """The tensor, once the collective that computes it is done."""
    wait = getattr(tensor, "trigger_wait", None)  # of torch's AsyncCollectiveTensor
    value: Tensor = tensor if wait is None else wait()
    return value


def take_apart(tensor: Tensor, earlier: Any = None) -> tuple[Tensor, Any]:
    """The local part of a DTensor, and its placement as JSON data; for a plain tensor, itself and None.

    Args:
        tensor: the tensor.
        earlier: the placement of an earlier tensor, to which the DTensor is redistributed first.
    """
    if not is_sharded(tensor):
        return tensor, None
    if earlier is not None:
        placements = [_placement_of(text) for text in earlier["placements"]]
        if placements != list(tensor.placements):
            tensor = tensor.redistribute(placements=placements)
    sharding = {
        "mesh": list(_dimensions_of(tensor.device_mesh)),
        "placements": [_described(placement) for placement in tensor.placements],
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
    }
    return local_part(tensor.detach()), sharding


def put_together(part: Tensor, sharding: Any) -> Tensor:
    """The DTensor with this local part, placed as :func:`take_apart` described it."""
    places = [_placement_of(text) for text in sharding["placements"]]
    mesh = _mesh(tuple(sharding["mesh"]))
    return _assembled(part, mesh, places, sharding["shape"], tuple(sharding["stride"]))


def _described(placement: Any) -> list[Any]:
    """A placement as JSON data."""
    kinds = _dtensors()
    if type(placement) is kinds.Shard:
        return ["shard", placement.dim]
    if type(placement) is kinds.Replicate:
        return ["replicate"]
    if type(placement) is kinds.Partial:
        return ["partial", placement.reduce_op]
    raise SpecError(
        f"a DTensor with the placement {placement} cannot travel; redistribute it to Shard, Replicate or "
        "Partial"
    )


def _placement_of(text: list[Any]) -> Placement:
    kind, *rest = text
    kinds: Any = {"shard": "Shard", "partial": "Partial", "replicate": "Replicate"}
    placement: Placement = getattr(_dtensors(), kinds[kind])(*rest)
    return placement
