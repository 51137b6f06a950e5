"""Errors of this package, placements of stages, descriptions of tensors, and flat arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from penstock.errors import (
    InputFileError,
    MicrobatchError,
    PartitionError,
    ScheduleError,
    SpecError,
    UsageError,
)
from penstock.partition import Shared
from penstock.schedule import Edge

# As in ``microbatch``: pytree knows the types that users register as trees.


__all__ = [
    "CallError",
    "ChunkError",
    "CutError",
    "GetMeshCallback",
    "PathError",
    "PipeInfo",
    "PipeliningMetadataError",
    "PlacementError",
    "RowsError",
    "flatten_args",
    "flatten_args_detach",
    "generate_rank_to_stage_mapping",
    "generate_stage_to_rank_mapping",
    "validate_and_normalize_to_tuple",
]

# ---- the errors of this package: each is also of the class that code written for torch catches


class ChunkError(MicrobatchError, AssertionError):
    """Arguments that cannot be split as asked, or outputs that cannot be merged."""


class PlacementError(ScheduleError, RuntimeError, AssertionError):
    """Stages that are not where the schedule needs them, or actions that form no schedule."""


class CallError(UsageError, RuntimeError, AssertionError):
    """A method was called at the wrong time."""


class CutError(PartitionError, RuntimeError):
    """A model that cannot be traced, or cannot be cut where it was asked to be."""


class RowsError(InputFileError, RuntimeError):
    """A file that holds no schedule."""


class PathError(PartitionError, AttributeError):
    """A path at which the model has no module."""


class PipeliningMetadataError(SpecError, RuntimeError):
    """Tensors that differ from their descriptions."""


# ---- placements of stages


def generate_stage_to_rank_mapping(
    pp_size: int, num_stages: int, style: str = "loop"
) -> dict[int, int]:
    """The rank of each stage.

    Args:
        pp_size: the number of ranks.
        num_stages: the number of stages.
        style: ``"loop"`` goes round and round, ``"v"`` there and back.

    Raises:
        UsageError: the style is unknown, or the stages do not fill a V.
    """
    if style not in ("loop", "v"):
        raise UsageError(f"style={style!r}: must be 'loop' or 'v'")
    if style == "v" and num_stages % pp_size:
        raise UsageError(f"{num_stages} stages on {pp_size} ranks do not fill a V; take a multiple")

    def rank(stage: int) -> int:
        turn, place = divmod(stage, pp_size)
        return pp_size - 1 - place if style == "v" and turn % 2 else place

    return {stage: rank(stage) for stage in range(num_stages)}


def generate_rank_to_stage_mapping(
    pp_size: int, num_stages: int, style: str = "loop"
) -> dict[int, list[int]]:
    """The stages of each rank; the arguments are those of :func:`generate_stage_to_rank_mapping`."""
    stages: dict[int, list[int]] = {rank: [] for rank in range(pp_size)}
    for stage, rank in generate_stage_to_rank_mapping(pp_size, num_stages, style).items():
        stages[rank].append(stage)
    return stages


# ---- the types of torch's arguments, and arguments as lists


class GetMeshCallback(Protocol):
    """The type of a stage's ``get_mesh``."""

    def __call__(self, mesh_dim_names: tuple[str, ...], mesh_layout: Any) -> Any:
        """Returns the mesh of these dimensions."""


@dataclass(frozen=True)
class PipeInfo:
    """What :func:`penstock.pipelining.build_stage` needs to know of a pipe.

    Args:
        graph: the graph of the whole model.
        num_stages: the number of stages.
        has_loss_and_backward: always false, since the loss belongs to the schedule.
        shared: the weights that stages share.
        edges: which values travel between the stages; None if each stage feeds the next.
    """

    graph: fx.Graph
    num_stages: int
    has_loss_and_backward: bool = False
    shared: tuple[Shared, ...] = ()
    edges: tuple[Edge, ...] | None = None


def flatten_args(args: Any, *, detach: bool = False) -> Any:
    """The values in nested arguments, as a list.

    Args:
        args: tuples, lists and dicts of values.
        detach: whether to detach tensors from their graph, keeping ``requires_grad``.

    Returns:
        The list; with ``detach``, the nested arguments with the detached values, and the list of those.
    """
    leaves, tree = pytree.tree_flatten(args)
    if not detach:
        return leaves
    apart = [_detached(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(apart, tree), apart


def flatten_args_detach(args: Any) -> tuple[Any, list[Any]]:
    """:func:`flatten_args` with ``detach``."""
    again, leaves = flatten_args(args, detach=True)
    return again, leaves


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def validate_and_normalize_to_tuple(args: Any, allow_none: bool = False) -> tuple[Any, ...] | None:
    """Tensors as a tuple.

    Args:
        args: a tensor, a tuple or list of tensors, or ``None``, which is returned.
        allow_none: whether entries may be None.

    Raises:
        PipeliningMetadataError: something is not a tensor.
    """
    if args is None:
        return None
    if isinstance(args, Tensor):
        return (args,)
    if not isinstance(args, tuple | list):
        raise PipeliningMetadataError(
            f"expected a tensor, or a tuple or list of tensors, found {type(args).__name__}"
        )
    for place, value in enumerate(args):
        if not (isinstance(value, Tensor) or (value is None and allow_none)):
            kind = "None" if value is None else f"type {type(value).__name__}"
            raise PipeliningMetadataError(
                f"Stage arg[{place}] is {kind}: a tensor is needed; pass other values by name"
            )
    return tuple(args)
