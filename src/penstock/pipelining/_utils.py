"""Errors of this package, placements of stages, descriptions of tensors, and flat arguments."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Protocol

import torch
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
from penstock.parallel import is_sharded, local_part
from penstock.partition import Shared
from penstock.schedule import Edge

# As in ``microbatch``: pytree knows the types that users register as trees.


__all__ = [
    "CallError",
    "ChunkError",
    "CutError",
    "GetMeshCallback",
    "InferenceMode",
    "PathError",
    "PipeInfo",
    "PipeliningMetadataError",
    "PlacementError",
    "RowsError",
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
    found: dict[int, list[int]] = {rank: [] for rank in range(pp_size)}
    for stage, rank in generate_stage_to_rank_mapping(pp_size, num_stages, style).items():
        found[rank].append(stage)
    return found


# ---- the types of torch's arguments, and arguments as lists


class GetMeshCallback(Protocol):
    """The type of a stage's ``get_mesh``."""

    def __call__(self, mesh_dim_names: tuple[str, ...], mesh_layout: Any) -> Any:
        """Returns the mesh of these dimensions."""


class InferenceMode(Enum):
    """How stages learn in torch what travels.

    In Penstock they always agree on it, whatever they were given.
    """

    STATIC = "static"
    DYNAMIC = "dynamic"


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


# ---- descriptions of tensors, for tests and tools
# The engine itself uses ``penstock.values`` and needs none of this.


@dataclass(frozen=True)
class _TensorMeta:
    """A tensor without its data; for a DTensor, its local part.

    Attributes:
        shape: its shape.
        stride: its strides.
        dtype: its type.
        requires_grad: whether a gradient comes back for it. It is not compared, since it depends on the
            call.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def from_tensor(tensor: Tensor) -> _TensorMeta:
        """Describe a plain tensor.

        Raises:
            PipeliningMetadataError: it is a DTensor.
        """
        if is_sharded(tensor):
            raise PipeliningMetadataError(
                "expected a plain tensor, found a DTensor; call extract_tensor_meta, which takes both"
            )
        return _TensorMeta(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)

    def to_tensor(self, device: torch.device | str) -> Tensor:
        """An uninitialised tensor of this description."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        return made.requires_grad_(self.requires_grad and made.is_floating_point())

    def get_diff(self, other: _TensorMeta) -> list[str]:
        """The differences to another description, field by field."""
        if type(self) is not type(other):
            return [f"type mismatch: {type(self).__name__} vs {type(other).__name__}"]
        names = [field.name for field in fields(self) if field.name != "requires_grad"]
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return [f"{name} mismatch: {own} vs {its}" for name, own, its in pairs if own != its]


@dataclass(frozen=True)
class _DTensorMeta(_TensorMeta):
    """A DTensor without its data.

    Attributes:
        global_shape: the shape of the whole tensor.
        global_stride: the strides of the whole tensor.
        placements: its placement along each dimension of the mesh.
        mesh_dim_names: the names of the mesh's dimensions.
        mesh_shape: the sizes of the mesh's dimensions.
    """

    global_shape: torch.Size
    global_stride: tuple[int, ...]
    placements: tuple[Any, ...]
    mesh_dim_names: tuple[str, ...]
    mesh_shape: tuple[int, ...]

    @staticmethod
    def from_dtensor(dtensor: Any) -> _DTensorMeta:
        """Describe a DTensor."""
        local, mesh = local_part(dtensor), dtensor.device_mesh
        return _DTensorMeta(
            local.shape,
            local.stride(),
            dtensor.dtype,
            dtensor.requires_grad,
            dtensor.shape,
            dtensor.stride(),
            tuple(dtensor.placements),
            tuple(mesh.mesh_dim_names or ()),
            tuple(mesh.shape),
        )


TensorMeta = _TensorMeta | _DTensorMeta


def extract_tensor_meta(tensor: Tensor) -> _TensorMeta:
    """Describe a tensor or DTensor."""
    return (
        _DTensorMeta.from_dtensor(tensor) if is_sharded(tensor) else _TensorMeta.from_tensor(tensor)
    )


def extract_tensor_metas(
    tensors: Sequence[Tensor | None] | None, *, allow_none: bool = False
) -> tuple[_TensorMeta | None, ...] | None:
    """Describe several tensors.

    Args:
        tensors: the tensors, or ``None``, which is returned.
        allow_none: whether entries may be None.

    Raises:
        PipeliningMetadataError: one is missing.
    """
    if tensors is None:
        return None
    missing = [place for place, tensor in enumerate(tensors) if not isinstance(tensor, Tensor)]
    if missing and not allow_none:
        raise PipeliningMetadataError(
            f"None values at {missing}; give a tensor for each, or say allow_none=True"
        )
    return tuple(extract_tensor_meta(t) if isinstance(t, Tensor) else None for t in tensors)


def to_local_if_dtensor(tensor: Tensor, detach: bool = False) -> Tensor:
    """The local part of a DTensor, or the tensor itself; in its graph, or detached."""
    given: Any = tensor.detach() if detach else tensor
    found: Tensor = given.to_local() if is_sharded(given) else given
    return found


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
            found = "None" if value is None else f"type {type(value).__name__}"
            raise PipeliningMetadataError(
                f"Stage arg[{place}] is {found}: a tensor is needed; pass other values by name"
            )
    return tuple(args)


def validate_metadata(
    desc: str,
    expected: _TensorMeta,
    actual: Tensor | _TensorMeta,
    *,
    raise_on_mismatch: bool = False,
    warn_on_mismatch: bool = False,
) -> list[str]:
    """Compare a tensor with a description.

    Args:
        desc: the name of the tensor in messages.
        expected: the expected description.
        actual: the tensor, or its description.
        raise_on_mismatch: whether to raise if they differ.
        warn_on_mismatch: whether to warn if they differ.

    Returns:
        The differences.

    Raises:
        PipeliningMetadataError: they differ.
    """
    found = extract_tensor_meta(actual) if isinstance(actual, Tensor) else actual
    differences = expected.get_diff(found)
    _tell(desc, differences, raise_on_mismatch, warn_on_mismatch)
    return differences


def _tell(desc: str, differences: list[str], refuse: bool, warn: bool) -> None:
    said = f"{desc}: {'; '.join(differences)}"
    if differences and refuse:
        raise PipeliningMetadataError(said)
    if differences and warn:
        warnings.warn(said, UserWarning, stacklevel=3)


def validate_tensors_metadata(
    desc: str,
    expected: Sequence[_TensorMeta | None],
    actual: Sequence[Tensor | _TensorMeta | None],
    *,
    raise_on_mismatch: bool = True,
    warn_on_mismatch: bool = False,
) -> list[str]:
    """Compare tensors one by one with descriptions; the arguments are those of :func:`validate_metadata`."""
    refuse, warn = raise_on_mismatch, warn_on_mismatch
    if len(expected) != len(actual):
        differences = [f"{desc}: expected {len(expected)} tensors, got {len(actual)}"]
        _tell(desc, differences, refuse, warn)
        return differences
    differences = []
    for place, (said, found) in enumerate(zip(expected, actual, strict=True)):
        name = f"{desc}[{place}]"
        if said is not None and found is not None:
            differences += validate_metadata(
                name, said, found, raise_on_mismatch=refuse, warn_on_mismatch=warn
            )
        elif said is not found:
            missing = [f"{name}: {'no tensor' if said is None else 'a tensor'} was expected"]
            _tell(desc, missing, refuse, warn)
            differences += missing
    return differences


def validate_static_arg_grad_correspondence(
    stage_index: int, args: Sequence[Tensor], grads: Sequence[Tensor | None], is_input: bool
) -> None:
    """Check that example gradients fit the example values that they belong to.

    Args:
        stage_index: the stage of both.
        args: the example values.
        grads: their gradients, ``None`` for values without one.
        is_input: whether the values are inputs, for the message.

    Raises:
        PipeliningMetadataError: there are more or fewer gradients, a gradient belongs to a value that
            requires none, or a plain gradient to a DTensor.
    """
    kind = "input" if is_input else "output"
    if len(args) != len(grads):
        raise PipeliningMetadataError(
            f"Stage {stage_index}: {len(grads)} {kind}_grads for {len(args)} {kind}_args; give one for "
            "each, None where there is no gradient"
        )
    for place, (arg, grad) in enumerate(zip(args, grads, strict=True)):
        name = f"Stage {stage_index}: {kind}_args[{place}] has requires_grad={arg.requires_grad}"
        if grad is None:
            if arg.requires_grad:
                warnings.warn(f"{name}, but {kind}_grads[{place}] is None", stacklevel=2)
        elif not arg.requires_grad:
            raise PipeliningMetadataError(f"{name}, but there is a gradient; give None for it")
        elif is_sharded(arg) and not is_sharded(grad):
            raise PipeliningMetadataError(
                f"{name} and is a DTensor, but its gradient is a plain tensor; give a DTensor"
            )
