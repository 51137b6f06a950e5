"""Where stages are, what tensors are, and arguments as lists, under torch's names."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from torch import Tensor, fx

# As in ``microbatch``: types that users register as trees.
from torch.utils import _pytree as pytree

from penstock.partition import Shared
from penstock.pipelining.metadata import ShardedMeta as _DTensorMeta
from penstock.pipelining.metadata import TensorMeta as _TensorMeta
from penstock.pipelining.metadata import (
    extract_tensor_meta,
    extract_tensor_metas,
    to_local_if_dtensor,
    validate_and_normalize_to_tuple,
    validate_metadata,
    validate_static_arg_grad_correspondence,
    validate_tensors_metadata,
)
from penstock.pipelining.refusals import PipeliningMetadataError
from penstock.pipelining.rows.orders import rank_to_stages as generate_rank_to_stage_mapping
from penstock.pipelining.rows.orders import stage_to_rank as generate_stage_to_rank_mapping

__all__ = [
    "GetMeshCallback",
    "InferenceMode",
    "PipeInfo",
    "PipeliningMetadataError",
    "TensorMeta",
    "extract_tensor_meta",
    "extract_tensor_metas",
    "flatten_args",
    "flatten_args_detach",
    "generate_rank_to_stage_mapping",
    "generate_stage_to_rank_mapping",
    "to_local_if_dtensor",
    "validate_and_normalize_to_tuple",
    "validate_metadata",
    "validate_static_arg_grad_correspondence",
    "validate_tensors_metadata",
]

TensorMeta = _TensorMeta | _DTensorMeta


class GetMeshCallback(Protocol):
    """What ``get_mesh`` of a stage may be."""

    def __call__(self, mesh_dim_names: tuple[str, ...], mesh_layout: Any) -> Any:
        """The mesh of these dimensions."""


class InferenceMode(Enum):
    """How stages learn in torch what travels; here they agree on it whatever they were given."""

    STATIC = "static"
    DYNAMIC = "dynamic"


@dataclass(frozen=True)
class PipeInfo:
    """What :func:`penstock.pipelining.build_stage` needs to know of a pipe.

    Args:
        graph: the model's graph, uncut.
        num_stages: how many stages there are.
        has_loss_and_backward: always false: the loss belongs to the schedule.
        shared: the weights that stages share.
    """

    graph: fx.Graph
    num_stages: int
    has_loss_and_backward: bool = False
    shared: tuple[Shared, ...] = ()


def flatten_args(args: Any, *, detach: bool = False) -> Any:
    """The values in nested arguments, as a list.

    Args:
        args: tuples, lists and dicts of values.
        detach: whether tensors are to leave the graph they were made in, and keep ``requires_grad``.

    Returns:
        The list; with ``detach`` the nested arguments with the detached values, and the list of these.
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
