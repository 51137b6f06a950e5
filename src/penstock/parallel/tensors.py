"""Plain tensors and DTensors alike: local parts, whole tensors, norms, and how they travel.

The code for DTensor is in ``dtensor.py``, which is imported once there is one: torch needs half a second to
import its own part of it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(value: Any) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor."""
    return hasattr(value, "to_local")


def local_part(tensor: Tensor) -> Tensor:
    """The local part of a DTensor, or a plain tensor itself; detached."""
    return (tensor.to_local() if is_sharded(tensor) else tensor).detach()


def with_local(like: Tensor, part: Tensor) -> Tensor:
    """A tensor that is placed like ``like`` and has this local part."""
    found: Tensor = _dtensor().with_local(like, part) if is_sharded(like) else part
    return found


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, detached. Every process of a DTensor's mesh must call this together."""
    return gathered(tensor).detach()


def replicated(tensor: Tensor) -> Tensor:
    """A DTensor replicated over its mesh, or a plain tensor itself; gradients flow through."""
    found: Tensor = _dtensor().replicated(tensor) if is_sharded(tensor) else tensor
    return found


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor as a plain one; gradients flow through, unlike :func:`whole`."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def spread(like: Tensor, value: Tensor) -> Tensor:
    """A whole tensor, which every process has, placed like ``like``."""
    found: Tensor = _dtensor().spread(like, value) if is_sharded(like) else value
    return found


def replicated_like(like: Tensor, value: Tensor) -> Tensor:
    """A whole tensor, which every process has, replicated on the mesh of ``like``."""
    found: Tensor = _dtensor().replicated_like(like, value) if is_sharded(like) else value
    return found


def region_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The part of a tensor that lies in this process: its offsets and its sizes.

    None if that is not a single box, as for a pending sum.
    """
    if is_sharded(tensor):
        found: tuple[tuple[int, ...], tuple[int, ...]] | None = _dtensor().region_of(tensor)
        return found
    return (0,) * tensor.dim(), tuple(tensor.shape)


def split_sharded(tensor: Tensor, count: int, dim: int) -> list[Tensor]:
    """Split a DTensor along a dimension, each process its local part; nothing is gathered.

    Args:
        tensor: what to split.
        count: the number of parts; their sizes differ by at most one.
        dim: the dimension.
    """
    found: list[Tensor] = _dtensor().split(tensor, count, dim)
    return found


def merge_sharded(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate DTensors along a dimension, each process its local parts.

    Raises:
        MicrobatchError: they are placed differently.
    """
    found: Tensor = _dtensor().merge(parts, dim)
    return found


def global_norms(tensors: Sequence[Tensor], order: float) -> Tensor:
    """The norms of tensors, in float64 on the CPU: of each plain one, and of all DTensors that are cut alike.

    Every process of the mesh of a DTensor must call this together, with the tensors in the same order.

    Args:
        tensors: the tensors.
        order: as for :func:`torch.linalg.vector_norm`.
    """
    alike: dict[object, list[Tensor]] = {}
    for index, tensor in enumerate(tensors):
        if is_sharded(tensor):
            whole_sum = _dtensor().settled(tensor)
            # torch's norm of order 0 counts tensors.
            key = (whole_sum.device_mesh, whole_sum.placements) if order else index
            alike.setdefault(key, []).append(whole_sum)
        else:
            dense = tensor.coalesce().values() if tensor.is_sparse else tensor
            alike[index] = [dense]
    totals = [_total(members, order) for members in alike.values()]
    # Brought to the CPU in one go, since each transfer waits for the accelerator.
    device = totals[0].device if totals else None
    return (
        torch.stack([one.to(device) for one in totals]).cpu() if totals else torch.zeros(0).double()
    )


def _total(tensors: Sequence[Tensor], order: float) -> Tensor:
    if is_sharded(tensors[0]) and order == math.inf:
        # Of an empty shard torch does not know this norm.
        local = _total([tensor.to_local() for tensor in tensors if is_sharded(tensor)], order)
        largest: Tensor = _dtensor().largest(tensors[0], local)
        return largest.double()
    # Nor those below 0, which hardly anybody needs: they are taken of the gathered tensors.
    norms = [_norm(whole(tensor) if order < 0 else tensor, order) for tensor in tensors]
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), order)
    return gathered(total).double()


def _norm(tensor: Tensor, order: float) -> Tensor:
    if not tensor.numel():
        return torch.tensor(math.inf if order < 0 else 0.0, device=tensor.device)
    narrow = tensor.dtype in (torch.float16, torch.bfloat16)
    norm: Tensor = torch.linalg.vector_norm(tensor, order, dtype=torch.float32 if narrow else None)
    return norm


def _dtensor() -> Any:
    return import_module("penstock.parallel.dtensor")


# ---- DTensors between stages


GetMesh = Callable[..., Any]
_TORCH_PART = "torch.distributed.tensor"


def let_cross(modules: Iterable[nn.Module], get_mesh: GetMesh | None = None) -> None:
    """Prepare this process for DTensors that travel between its stages and others.

    Args:
        modules: of its stages, whose parameters may show their meshes.
        get_mesh: ``(dimension names, layout) -> DeviceMesh``, for other meshes.
    """
    # Importing DTensor takes half a second; as long as nobody has imported it, there are none.
    if _TORCH_PART in sys.modules or get_mesh is not None:
        _dtensor().prepare(modules, get_mesh)


def arrived(tensor: Tensor) -> Tensor:
    """The tensor, once a collective that makes it is done."""
    wait = getattr(tensor, "trigger_wait", None)  # of torch's AsyncCollectiveTensor
    value: Tensor = tensor if wait is None else wait()
    return value


def take_apart(tensor: Tensor, sharding: Any = None) -> tuple[Tensor, Any]:
    """The local part of a DTensor, and how it is placed, in JSON; of another tensor, itself and None.

    Args:
        tensor: the tensor.
        sharding: how an earlier one was placed; the DTensor is brought to that first.
    """
    return _dtensor().take_apart(tensor, sharding) if is_sharded(tensor) else (tensor, None)


def put_together(part: Tensor, sharding: Any) -> Tensor:
    """The DTensor with this local part, placed as :func:`take_apart` told."""
    tensor: Tensor = _dtensor().put_together(part, sharding)
    return tensor
