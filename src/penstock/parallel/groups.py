"""Process groups and device meshes: which processes run a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.errors import UsageError

DIMENSION = "pp"
"""The mesh dimension along which a pipeline runs."""


def group_of(group: Any, mesh: Any = None) -> Any:
    """The process group that ``group=`` or ``mesh=`` means; for a mesh, the group of its pipeline dimension.

    Args:
        group: a process group, or a mesh; a mesh of a single dimension may have any name.
        mesh: a mesh with a dimension for the pipeline, in place of a group.

    Raises:
        UsageError: the mesh has no pipeline dimension or is not a mesh, or both arguments were given.
    """
    if mesh is not None:
        if group is not None:
            raise UsageError(
                "give group= or mesh=, not both: each says which processes run the pipeline"
            )
        if not isinstance(mesh, DeviceMesh):
            raise UsageError(f"mesh={mesh!r}: must be a DeviceMesh with a dimension {DIMENSION!r}")
        return _along_pipeline(mesh)
    if not isinstance(group, DeviceMesh):
        return group
    return group.get_group() if group.ndim == 1 else _along_pipeline(group)


def _along_pipeline(mesh: DeviceMesh) -> Any:
    names = mesh.mesh_dim_names or ()
    if DIMENSION not in names:
        raise UsageError(
            f"the mesh has the dimensions {names or mesh.ndim}; the one along which the pipeline runs must "
            f"be named {DIMENSION!r}, or pass group=mesh[name]"
        )
    return mesh.get_group(DIMENSION)


def group_across(mesh: Any) -> Any:
    """The process group of a one-dimensional mesh, such as that of replicas; anything else unchanged.

    Raises:
        UsageError: the mesh has several dimensions.
    """
    if not isinstance(mesh, DeviceMesh):
        return mesh
    if mesh.ndim != 1:
        raise UsageError(
            f"the mesh has the dimensions {mesh.mesh_dim_names or mesh.ndim}; give the dimension of the "
            "replicas alone, as mesh[name]"
        )
    return mesh.get_group()


def ranks_in(group: Any) -> set[int]:
    """The processes of a group, as global ranks."""
    return {*dist.get_process_group_ranks(group)}


def seat(group: Any) -> tuple[int, int]:
    """This process's rank in a group, and the size of the group; 0 and 1 without any process group."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


# ---- several pipelines side by side


class Siblings(NamedTuple):
    """The pipelines side by side with this one that have the same stages, or shards of them.

    Attributes:
        first: whether this is the pipeline that writes for all.
        wait: a barrier over all of them.
        groups: for each dimension of pipelines, the process group of the ranks at the same position.
    """

    first: bool = True
    wait: Callable[[], None] = lambda: None
    groups: tuple[Any, ...] = ()


def siblings_of(mesh: Any, replicas: Any) -> Siblings:
    """The siblings of this pipeline, from a mesh or a group of replicas.

    Args:
        mesh: a mesh with a dimension for the pipeline, and others.
        replicas: the ``penstock.Replicas`` of this pipeline.
    """
    groups = []
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or ()
        groups += [mesh.get_group(name) for name in names if name != DIMENSION]
    if replicas.group is not None:
        groups.append(replicas.group)
    # Replicas are usually a dimension of the mesh as well, which must not count twice.
    known = {tuple(dist.get_process_group_ranks(group)): group for group in groups}
    groups = [group for group in known.values() if group.size() > 1]

    def wait() -> None:
        for group in groups:
            group.barrier().wait()

    first = replicas.index == 0 and all(group.rank() == 0 for group in groups)
    return Siblings(first, wait, tuple(groups))


def replicated_mesh(
    device: str, replicas: int, ranks: int, names: tuple[str, str] = ("dp", DIMENSION)
) -> DeviceMesh:
    """A mesh of all processes, with dimensions ``dp`` for replicas and ``pp`` for the ranks of a pipeline."""
    return init_device_mesh(device, (replicas, ranks), mesh_dim_names=names)


def pipelines_in(processes: int, ranks: int) -> int:
    """The number of pipelines of this many ranks that the processes form.

    Raises:
        UsageError: the number is not whole.
    """
    if processes % ranks:
        raise UsageError(
            f"{processes} processes were started, which are no whole number of pipelines of ranks={ranks}; "
            "start a multiple of that, or one process for all ranks"
        )
    return processes // ranks


def side_by_side(device: str, processes: int, ranks: int) -> dict[str, Any]:
    """Pipeline options with which all processes form pipelines of this many ranks, as replicas.

    Raises:
        UsageError: the number of pipelines is not whole.
    """
    mesh = replicated_mesh(device, pipelines_in(processes, ranks), ranks)
    return {"mesh": mesh, "replicas": mesh["dp"] if processes > ranks else None}
