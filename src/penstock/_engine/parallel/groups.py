"""Process groups and device meshes: which processes run a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock._engine.devices import use
from penstock._engine.faults import Members, Patience, Timeout
from penstock.errors import UsageError

DIMENSION = "pp"
"""The mesh dimension along which a pipeline runs."""


def group_of(mesh: Any) -> Any:
    """The process group that ``mesh=`` means; for a mesh, the group of its pipeline dimension.

    Args:
        mesh: a mesh with a dimension for the pipeline, or of a single dimension of any name; or a process
            group, or None for all processes.

    Raises:
        UsageError: the mesh has no pipeline dimension, or is neither a mesh nor a group.
    """
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim == 1:
            return mesh.get_group()
        names = mesh.mesh_dim_names or ()
        if DIMENSION not in names:
            raise UsageError(
                f"the mesh has the dimensions {names or mesh.ndim}; the one along which the pipeline runs "
                f"must be named {DIMENSION!r}, or pass mesh=mesh[name]"
            )
        return mesh.get_group(DIMENSION)
    if mesh is not None and not _is_group(mesh):
        raise UsageError(
            f"mesh={mesh!r}: must be a DeviceMesh with a dimension {DIMENSION!r}, or a process group"
        )
    return mesh


def _is_group(group: Any) -> bool:
    outside = dist.is_available() and group == dist.GroupMember.NON_GROUP_MEMBER
    return outside or callable(getattr(group, "allgather", None))


def group_across(replicas: Any, mesh: Any) -> Any:
    """The process group that ``replicas=`` means: of a mesh's dimension, by itself or by its name.

    Args:
        replicas: a mesh of one dimension, the name of a dimension of ``mesh``, several such names, or a
            process group.
        mesh: the mesh of the pipeline.

    Raises:
        UsageError: it is none of these.
    """
    if isinstance(replicas, str | tuple | list):
        names = (isinstance(mesh, DeviceMesh) and mesh.mesh_dim_names) or ()
        wanted = (replicas,) if isinstance(replicas, str) else tuple(replicas)
        if not wanted or not {*wanted} <= {*names} - {DIMENSION}:
            raise UsageError(
                f"replicas={replicas!r}: must name dimensions of mesh= that lie across the pipeline; "
                + (f"the mesh has {', '.join(names)}" if names else "there is no mesh with names")
            )
        if len(wanted) == 1:
            return mesh.get_group(wanted[0])
        # Torch slices a mesh in the order of its dimensions; no public name flattens one. Of torch 2.13:
        # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/device_mesh.py#L1268
        return mesh[tuple(name for name in names if name in wanted)]._flatten().get_group()
    if isinstance(replicas, DeviceMesh):
        if replicas.ndim != 1:
            raise UsageError(
                f"replicas= has the dimensions {replicas.mesh_dim_names or replicas.ndim}; give the "
                "dimension of the replicas alone, by its name"
            )
        return replicas.get_group()
    if not _is_group(replicas):
        raise UsageError(
            f"replicas={replicas!r}: must be the name of a dimension of mesh=, a process group of the ranks "
            "at this place in each pipeline, or penstock.Replicas"
        )
    return replicas


def members_of(mesh: Any, replicas: Any) -> Members | None:
    """The processes of the job.

    Those of the whole mesh that ``mesh=`` or ``replicas=`` is a part of. Without a mesh, those of the group,
    or the default group if there are replicas.

    Args:
        mesh: a mesh or a process group, as for :func:`group_of`.
        replicas: the process group of the ranks at this place in each pipeline, if any.

    Returns:
        None if there are no process groups yet, or this process is not in the one that was given.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    chosen = group_of(mesh)
    if chosen == dist.GroupMember.NON_GROUP_MEMBER:
        return None
    pipeline = tuple(dist.get_process_group_ranks(chosen))
    if isinstance(mesh, DeviceMesh):
        # Only this private name leads from a part to the mesh that it was taken from. Of torch 2.13:
        # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/device_mesh.py#L634
        whole = mesh._get_root_mesh()
        names = whole.mesh_dim_names or ()
        name = DIMENSION if mesh.ndim > 1 else (mesh.mesh_dim_names or ("",))[0]
        if name in names:
            rows = whole.mesh.movedim(names.index(name), -1).reshape(-1, len(pipeline)).tolist()
            place = pipeline.index(dist.get_rank())
            every = sorted(rank for row in rows for rank in row)
            return Members(tuple(every), pipeline, tuple(row[place] for row in rows))
    beside = (dist.get_rank(),) if replicas is None else tuple(sorted(ranks_in(replicas)))
    if len(beside) > 1 and {*beside}.isdisjoint({*pipeline} - {dist.get_rank()}):
        return Members(tuple(range(dist.get_world_size())), pipeline, beside)
    return Members(pipeline, pipeline, (dist.get_rank(),))


def ranks_in(group: Any) -> set[int]:
    """The processes of a group, as global ranks."""
    return {*dist.get_process_group_ranks(group)}


def seat(group: Any) -> tuple[int, int]:
    """This process's rank in a group, and the size of the group; 0 and 1 without any process group."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


# ---- several pipelines side by side


def groups_beside(mesh: Any, replicas: Any) -> tuple[Any, ...]:
    """For each dimension of pipelines side by side, the process group of the ranks at the same position.

    Args:
        mesh: a mesh with a dimension for the pipeline, and others.
        replicas: the ``penstock.Replicas`` of this pipeline.
    """
    groups = []
    if isinstance(mesh, DeviceMesh) and mesh.ndim > 1:
        names = mesh.mesh_dim_names or ()
        groups += [mesh.get_group(name) for name in names if name != DIMENSION]
    if replicas.group is not None:
        groups.append(replicas.group)
    # Replicas are usually a dimension of the mesh as well, which must not count twice.
    known = {tuple(dist.get_process_group_ranks(group)): group for group in groups}
    return tuple(group for group in known.values() if group.size() > 1)


def replicated_mesh(
    device: torch.device | str,
    replicas: int,
    ranks: int,
    names: tuple[str, str] = ("dp", DIMENSION),
) -> DeviceMesh:
    """A mesh of all processes, with dimensions ``dp`` for replicas and ``pp`` for the ranks of a pipeline."""
    home = torch.device(device)
    # Else torch would choose one itself.
    use(home)
    return init_device_mesh(home.type, (replicas, ranks), mesh_dim_names=names)


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


def side_by_side(device: torch.device | str, processes: int, ranks: int) -> dict[str, Any]:
    """Pipeline options with which all processes form pipelines of this many ranks, as replicas.

    Raises:
        UsageError: the number of pipelines is not whole.
    """
    mesh = replicated_mesh(device, pipelines_in(processes, ranks), ranks)
    return {"mesh": mesh, "replicas": "dp" if processes > ranks else None}


@contextmanager
def meeting_in_time(timeout: Timeout, later: timedelta | None) -> Iterator[timedelta]:
    """A context in which a library starts the default process group; gives the time to come together.

    torch has one limit for coming together and for each operation. Without this, the others would wait half
    an hour for a process that has died on its way.

    Args:
        timeout: as for a Pipeline.
        later: the library's limit for an operation of the group.
    """
    yield timedelta(seconds=Patience(timeout).rendezvous)
    world: Any = dist.group.WORLD
    if world is not None and later is not None:
        world.set_timeout(later)
