"""Process groups and device meshes: which processes run a pipeline."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import UsageError

DIMENSION = "pp"
"""The mesh dimension along which a pipeline runs."""


class Seat(NamedTuple):
    """This process's place among those that run a pipeline."""

    rank: int
    size: int


def group_of(group: Any) -> Any:
    """The process group that is meant: a mesh stands for the one of its pipeline dimension.

    Raises:
        UsageError: a mesh without such a dimension.
    """
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim == 1:
        return group.get_group()
    names = group.mesh_dim_names or ()
    if DIMENSION not in names:
        raise UsageError(
            f"the mesh has the dimensions {names or group.ndim}; one named {DIMENSION!r} must say along "
            f"which the pipeline runs, or pass mesh[name]"
        )
    return group.get_group(DIMENSION)


def seat(group: Any) -> Seat:
    """This process's place in a group; alone where there is no process group at all."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return Seat(0, 1)
    return Seat(dist.get_rank(group), dist.get_world_size(group))
