"""Split and merge DTensors, each process its own share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.errors import MicrobatchError


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Whether a value is a tensor spread over a mesh."""
    return isinstance(value, DTensor)


def split_dtensor(tensor: DTensor, count: int, dim: int) -> list[Tensor]:
    """Split each process's own share along a dimension; nothing is gathered.

    Args:
        tensor: what to split.
        count: into how many parts.
        dim: along which dimension.
    """
    shares = torch.tensor_split(tensor.to_local(), count, dim)
    sizes = [len(part) for part in torch.arange(tensor.shape[dim]).tensor_split(count)]
    return [_part(tensor, share, dim, size) for share, size in zip(shares, sizes, strict=True)]


def _part(whole: DTensor, share: Tensor, dim: int, size: int) -> Tensor:
    shape = list(whole.shape)
    shape[dim] = size
    part: Tensor = DTensor.from_local(
        share,
        whole.device_mesh,
        whole.placements,
        shape=torch.Size(shape),
        stride=whole.stride(),
        run_check=False,
    )
    return part


def merge_dtensors(parts: Sequence[DTensor], dim: int) -> Tensor:
    """Put parts together along a dimension, each process its own share.

    Raises:
        MicrobatchError: they are placed differently.
    """
    first = parts[0]
    others = [part.placements for part in parts if part.placements != first.placements]
    if others:
        raise MicrobatchError(
            f"microbatches gave DTensors placed as {first.placements} and as {others[0]}; give one placement"
        )
    shape = list(first.shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    merged: Tensor = DTensor.from_local(
        torch.cat([part.to_local() for part in parts], dim=dim),
        first.device_mesh,
        first.placements,
        shape=torch.Size(shape),
        stride=first.stride(),
        run_check=False,
    )
    return merged
