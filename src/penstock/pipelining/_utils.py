"""This package's errors, stage placements, and descriptions of pipes and tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from penstock._engine.values import TensorLayout, layout_of
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

# ---- this package's errors: each also derives from the class that code written for torch catches


class ChunkError(MicrobatchError, AssertionError):
    """Arguments that cannot be split as requested, or outputs that cannot be merged."""


class PlacementError(ScheduleError, RuntimeError, AssertionError):
    """Stages that are not where the schedule needs them, or actions that form no schedule."""


class CallError(UsageError, RuntimeError, AssertionError):
    """A method was called at the wrong time."""


class CutError(PartitionError, RuntimeError):
    """A model that cannot be traced, or cannot be cut as requested."""


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
    """Map each stage to its rank.

    Args:
        pp_size: the number of ranks.
        num_stages: the number of stages.
        style: ``"loop"`` places stages round-robin, ``"v"`` back and forth.

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
    """Map each rank to its stages; takes the arguments of :func:`generate_stage_to_rank_mapping`."""
    stages: dict[int, list[int]] = {rank: [] for rank in range(pp_size)}
    for stage, rank in generate_stage_to_rank_mapping(pp_size, num_stages, style).items():
        stages[rank].append(stage)
    return stages


# ---- what a pipe says of itself, and what tensors look like


@dataclass(frozen=True)
class PipeInfo:
    """The part of a pipe that :func:`penstock.pipelining.build_stage` needs.

    Args:
        graph: the graph of the whole model.
        num_stages: the number of stages.
        has_loss_and_backward: always false, since the loss belongs to the schedule.
        shared: the weights that stages share.
        edges: the values that travel between stages; None if each stage feeds only the next.
    """

    graph: fx.Graph
    num_stages: int
    has_loss_and_backward: bool = False
    shared: tuple[Shared, ...] = ()
    edges: tuple[Edge, ...] | None = None


def extract_tensor_metas(
    tensors: Any, *, allow_none: bool = False
) -> tuple[TensorLayout | None, ...] | None:
    """Describe a tensor, or a tuple or list of them, without their data; None stays None.

    Raises:
        PipeliningMetadataError: a value is neither a tensor nor, with ``allow_none``, None.
    """
    if tensors is None:
        return None
    values = (tensors,) if isinstance(tensors, Tensor) else tensors
    if not isinstance(values, tuple | list):
        raise PipeliningMetadataError(
            f"expected a tensor, or a tuple or list of tensors, found {type(values).__name__}"
        )
    for place, value in enumerate(values):
        if not isinstance(value, Tensor) and not (value is None and allow_none):
            kind = "None" if value is None else f"type {type(value).__name__}"
            raise PipeliningMetadataError(
                f"Stage arg[{place}] is {kind}: a tensor is needed; pass other values by name"
            )
    return tuple(None if value is None else layout_of(value) for value in values)
