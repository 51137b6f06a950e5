"""This package's errors, stage placements, flattened arguments, and tensor metadata."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from penstock._engine.parallel import is_sharded
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


# ---- types of torch's arguments, and flattened arguments


class GetMeshCallback(Protocol):
    """The type of a stage's ``get_mesh``."""

    def __call__(self, mesh_dim_names: tuple[str, ...], mesh_layout: Any) -> Any:
        """Return the mesh of these dimensions."""


class InferenceMode(Enum):
    """How torch's stages learn what travels: from examples or a run. Penstock's always ask each other."""

    STATIC = "static"
    DYNAMIC = "dynamic"

    @classmethod
    def needs_dynamic(cls, meta: Any, stage_has_backward: bool) -> bool:
        """Whether a stage's examples leave open what travels.

        Args:
            meta: metadata of the examples: tuples ``inputs``, ``outputs``, ``input_grads`` and
                ``output_grads``, each of which may be ``None``.
            stage_has_backward: whether gradients travel, too.
        """
        if meta.inputs is None or meta.outputs is None:
            return True
        # The gradient of a plain tensor looks like it; that of a DTensor may be placed otherwise.
        sharded = any(isinstance(one, _DTensorMeta) for one in (*meta.inputs, *meta.outputs))
        return sharded and stage_has_backward and None in (meta.input_grads, meta.output_grads)


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


def flatten_args(args: Any, *, detach: bool = False) -> Any:
    """Return the leaves of nested arguments; with ``detach``, both arguments and leaves, detached."""
    # Unlike other pytrees, it includes the types that users register.
    leaves, tree = pytree.tree_flatten(args)
    if not detach:
        return leaves
    fresh = [
        x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves
    ]
    return pytree.tree_unflatten(fresh, tree), fresh


def to_local_if_dtensor(tensor: Tensor, detach: bool = False) -> Tensor:
    """Return the local part of a DTensor, or a plain tensor itself; with ``detach``, outside of its graph."""
    whole: Any = tensor.detach() if detach else tensor
    part: Tensor = whole.to_local() if is_sharded(whole) else whole
    return part


def validate_and_normalize_to_tuple(args: Any, allow_none: bool = False) -> tuple[Any, ...] | None:
    """Tensors as a tuple; None stays None.

    Raises:
        PipeliningMetadataError: a value is neither a tensor nor, with ``allow_none``, None.
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


# ---- tensor metadata


@dataclass(frozen=True)
class _TensorMeta:
    """A tensor without its data; for a DTensor, the part that this process holds."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def from_tensor(tensor: Tensor) -> _TensorMeta:
        """Describe a plain tensor.

        Raises:
            PipeliningMetadataError: the tensor is a DTensor.
        """
        if is_sharded(tensor):
            raise PipeliningMetadataError("this is a DTensor; use _DTensorMeta.from_dtensor")
        return _TensorMeta(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)

    def to_tensor(self, device: torch.device | str) -> Tensor:
        """Allocate a tensor of this description."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        return self._learning(tensor)

    def _learning(self, tensor: Tensor) -> Tensor:
        may = self.dtype.is_floating_point or self.dtype.is_complex
        return tensor.requires_grad_(self.requires_grad and may)

    def get_diff(self, other: _TensorMeta) -> list[str]:
        """List the differences, except in ``requires_grad``, which depends on whether there is a backward."""
        if type(self) is not type(other):
            return [f"type mismatch: {type(self).__name__} vs {type(other).__name__}"]
        names = [field.name for field in fields(self) if field.name != "requires_grad"]
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return [f"{name} mismatch: {a} vs {b}" for name, a, b in pairs if a != b]


@dataclass(frozen=True)
class _DTensorMeta(_TensorMeta):
    """A DTensor without its data; of its mesh, only the dimensions' names, sizes and strides."""

    global_shape: torch.Size
    global_stride: tuple[int, ...]
    placements: tuple[Any, ...]
    mesh_dim_names: tuple[str, ...]
    mesh_layout: Any

    @staticmethod
    def from_dtensor(dtensor: Any) -> _DTensorMeta:
        """Describe a DTensor."""
        part, mesh = dtensor.detach().to_local(), dtensor.device_mesh
        return _DTensorMeta(
            part.shape,
            part.stride(),
            dtensor.dtype,
            dtensor.requires_grad,
            dtensor.shape,
            dtensor.stride(),
            tuple(dtensor.placements),
            tuple(mesh.mesh_dim_names or ()),
            mesh._layout,  # it has no public name in torch 2.13
        )

    @property
    def mesh_cache_key(self) -> tuple[tuple[str, ...], Any]:
        """The arguments for a ``get_mesh``."""
        return self.mesh_dim_names, self.mesh_layout

    def to_dtensor(self, device: torch.device | str, mesh: Any) -> Any:
        """Allocate a DTensor of this description on a mesh, with its local part on a device."""
        part = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        shape, stride = self.global_shape, self.global_stride
        dtensor = DTensor.from_local(
            part, mesh, self.placements, run_check=False, shape=shape, stride=stride
        )
        return self._learning(dtensor)


def extract_tensor_meta(tensor: Tensor) -> _TensorMeta:
    """Describe a tensor or a DTensor."""
    make = _DTensorMeta.from_dtensor if is_sharded(tensor) else _TensorMeta.from_tensor
    return make(tensor)


def extract_tensor_metas(
    tensors: Tensor | Sequence[Tensor | None] | None, *, allow_none: bool = False
) -> tuple[_TensorMeta | None, ...] | None:
    """Describe tensors.

    Raises:
        PipeliningMetadataError: one is None, and ``allow_none`` is not set.
    """
    checked = validate_and_normalize_to_tuple(tensors, allow_none)
    return checked and tuple(None if x is None else extract_tensor_meta(x) for x in checked)


def validate_metadata(
    desc: str,
    expected: _TensorMeta | None,
    actual: Tensor | _TensorMeta | None,
    *,
    raise_on_mismatch: bool = False,
    warn_on_mismatch: bool = False,
) -> list[str]:
    """List how a tensor differs from its expected metadata; ``desc`` names it in messages.

    Raises:
        PipeliningMetadataError: the tensor differs, and ``raise_on_mismatch`` is set.
    """
    meta = extract_tensor_meta(actual) if isinstance(actual, Tensor) else actual
    if expected is None or meta is None:
        kinds = ["None" if one is None else "a tensor" for one in (expected, meta)]
        unlike = [] if expected is meta else [f"expected {kinds[0]}, got {kinds[1]}"]
    else:
        unlike = expected.get_diff(meta)
    return _reported(desc, unlike, refuse=raise_on_mismatch, warn=warn_on_mismatch)


def validate_tensors_metadata(
    desc: str,
    expected: Sequence[_TensorMeta | None],
    actual: Sequence[Tensor | _TensorMeta | None],
    *,
    raise_on_mismatch: bool = True,
    warn_on_mismatch: bool = False,
) -> list[str]:
    """List how tensors differ from their expected metadata, one by one; see :func:`validate_metadata`."""
    if len(expected) != len(actual):
        unlike = [f"expected {len(expected)} tensors, got {len(actual)}"]
        return _reported(desc, unlike, refuse=raise_on_mismatch, warn=warn_on_mismatch)
    check = partial(
        validate_metadata, raise_on_mismatch=raise_on_mismatch, warn_on_mismatch=warn_on_mismatch
    )
    pairs = enumerate(zip(expected, actual, strict=True))
    return [one for place, pair in pairs for one in check(f"{desc}[{place}]", *pair)]


def _reported(desc: str, unlike: list[str], *, refuse: bool, warn: bool) -> list[str]:
    if unlike and refuse:
        raise PipeliningMetadataError(f"{desc}: {'; '.join(unlike)}")
    if unlike and warn:
        warnings.warn(
            f"{desc}: Metadata mismatch between the example and what the step gives: {'; '.join(unlike)}. "
            "The step runs with what it gives; correct the example, or leave it out",
            stacklevel=3,
        )
    return unlike
