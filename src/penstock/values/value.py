"""Specs.

Values without their data, as the shapes and types of their tensors and the structure around them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import SpecError
from penstock.values.structure import (
    DTYPES,
    Structure,
    check,
    difference,
    flatten,
    paths,
    unflatten,
)

# ---- specs of tensors


STRIDED = "strided"
_SPARSE = {
    str(layout).removeprefix("torch."): layout
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)
}
_PLAIN = (Tensor, torch.nn.Parameter)
# They stand for plain tensors while a model is tried; torch has no public names for them.
_STAND_INS = ("FakeTensor", "FunctionalTensor")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its data.

    Args:
        shape: its shape.
        dtype: the name of its type, such as ``float32``.
        requires_grad: whether a gradient comes back for it.
        layout: ``strided``; or a layout that cannot travel, such as ``sparse_coo`` or the name of a
            subclass.
        order: the order of its dimensions in memory, if it is not their own. Specs that differ only in this
            are equal, since the sender brings a tensor into the agreed order.
        optional: whether its gradient may be missing, although it requires grad: the message with gradients
            then tells whether it is there.
    """

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    layout: str = STRIDED
    order: tuple[int, ...] | None = field(default=None, compare=False)
    optional: bool = field(default=False, compare=False)

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        """The spec of a tensor."""
        layout = layout_of(tensor)
        # A nested tensor has no single shape.
        shape = () if layout == "nested" else tuple(tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        order = _order(tensor) if layout == STRIDED else None
        return TensorSpec(shape, dtype, tensor.requires_grad, layout, order)

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        """The type as a ``torch.dtype``."""
        return DTYPES[self.dtype]

    @cached_property
    def packed(self) -> TensorSpec:
        """The spec of what is sent: the same data, with dimensions in the order of memory."""
        if self.order is None:
            return self
        shape = tuple(self.shape[dim] for dim in self.order)
        return TensorSpec(shape, self.dtype, self.requires_grad)

    def pack(self, tensor: Tensor) -> Tensor:
        """Turn a tensor into what is sent: contiguous data, copied only if they are not."""
        return settled(tensor if self.order is None else tensor.detach().permute(self.order))

    def unpack(self, data: Tensor) -> Tensor:
        """Turn what was received into the tensor."""
        if self.order is None:
            return data
        return data.permute([self.order.index(dim) for dim in range(len(self.order))])

    def empty(self, device: torch.device | str) -> Tensor:
        """An uninitialised tensor of this spec, without ``requires_grad``."""
        if self.layout in _SPARSE:
            layout = _SPARSE[self.layout]
            return torch.empty(self.shape, dtype=self.torch_dtype, device=device, layout=layout)
        data = torch.empty(self.packed.shape, dtype=self.torch_dtype, device=device)
        return self.unpack(data)

    def zeros(self, device: torch.device | str) -> Tensor:
        """A tensor of zeros of this spec, without ``requires_grad``."""
        return self.empty(device).zero_()

    def obstacle(self) -> str | None:
        """Why such a tensor cannot travel, and what to do; ``None`` if it can."""
        if self.layout != STRIDED:
            return _OBSTACLES.get(
                self.layout,
                f"a tensor of the class {self.layout} cannot travel; return a plain one, such as its "
                "as_subclass(torch.Tensor)",
            )
        return None

    def fits(self, tensor: Tensor, *, gradients: bool) -> bool:
        """Whether a tensor has this spec, whatever the order of its dimensions in memory."""
        return (
            tensor.dtype is self.torch_dtype
            and layout_of(tensor) == self.layout
            and tensor.shape == self.shape
            and (tensor.requires_grad is self.requires_grad or not gradients)
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data for :meth:`from_json`, without what has its usual value."""
        found: dict[str, Any] = {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "requires_grad": self.requires_grad,
        }
        if self.layout != STRIDED:
            found["layout"] = self.layout
        if self.order is not None:
            found["order"] = list(self.order)
        return found

    @staticmethod
    def from_json(data: dict[str, Any]) -> TensorSpec:
        """Read what :meth:`to_json` has written.

        Raises:
            SpecError: the type is unknown, or the order is not a permutation.
            LookupError, TypeError, ValueError: the data are not a spec.
        """
        shape, dtype = tuple(map(int, data["shape"])), str(data["dtype"])
        if dtype not in DTYPES:
            raise SpecError(f"there is no dtype {dtype!r}")
        order = data.get("order")
        if order is not None and sorted(order) != list(range(len(shape))):
            raise SpecError(f"{order} is not an order of {len(shape)} dimensions")
        layout = str(data.get("layout", STRIDED))
        return TensorSpec(shape, dtype, bool(data["requires_grad"]), layout, order and tuple(order))

    def __str__(self) -> str:
        grad = ", requires grad" if self.requires_grad else ""
        layout = "" if self.layout == STRIDED else f", {self.layout}"
        return f"{self.dtype}{list(self.shape)}{layout}{grad}"


_OBSTACLES = {
    "quantized": "a quantized tensor cannot travel; return its dequantize()",
    "nested": "a nested tensor cannot travel; return a padded one, or its values and offsets",
    "NestedTensor": "a nested tensor cannot travel; return its values() and offsets()",
    "DTensor": "a DTensor cannot travel; return its to_local(), and make it again in the next stage",
} | {name: f"a tensor of layout {name} cannot travel; return its to_dense()" for name in _SPARSE}


def version_of(tensor: Tensor) -> int:
    """The version of a tensor, which counts its in-place changes; 0 for one made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def settled(tensor: Tensor) -> Tensor:
    """The detached tensor with contiguous data, and any pending negation or conjugation carried out."""
    data = tensor.detach()
    # These checks cost a tenth of the calls, which usually do nothing.
    if data.is_neg() or data.is_conj():
        data = data.resolve_neg().resolve_conj()
    return data if data.is_contiguous() else data.contiguous()


def layout_of(tensor: Tensor) -> str:
    """``strided``, the name of another layout, or the name of a tensor's own class."""
    kind = type(tensor)
    if kind not in _PLAIN and kind.__name__ not in _STAND_INS:
        return kind.__name__
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    if tensor.is_nested:
        return "nested"
    return "quantized" if tensor.is_quantized else STRIDED


def _order(tensor: Tensor) -> tuple[int, ...] | None:
    """The order of the dimensions in memory, if the data are contiguous in another order; else None."""
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    return order if tensor.permute(order).is_contiguous() else None


# ---- specs of values


@dataclass(frozen=True)
class ValueSpec:
    """A nested value without its data.

    Args:
        tensors: the specs of its tensors, in order.
        structure: how the value is nested, as JSON data.
    """

    tensors: tuple[TensorSpec, ...]
    structure: Structure

    @staticmethod
    def of(value: Any) -> ValueSpec:
        """The spec of a value.

        Raises:
            SpecError: the value holds something that cannot be described.
        """
        tensors, structure = flatten(value)
        return ValueSpec(tuple(map(TensorSpec.of, tensors)), structure)

    @property
    def differentiable(self) -> tuple[TensorSpec, ...]:
        """The tensors for which a gradient comes back."""
        return tuple(tensor for tensor in self.tensors if tensor.requires_grad)

    def marked(self, sure: Collection[int]) -> ValueSpec:
        """The same spec, in which the gradients of all tensors but the sure ones are marked as optional."""
        tensors = tuple(
            replace(tensor, optional=tensor.requires_grad and index not in sure)
            for index, tensor in enumerate(self.tensors)
        )
        return replace(self, tensors=tensors)

    def fill(self, tensors: Sequence[Any]) -> Any:
        """The value with this structure and the given tensors."""
        return unflatten(self.structure, tensors)

    def without_data(self) -> Any:
        """A value of this spec with tensors on the meta device."""
        return self.fill([t.empty("meta").requires_grad_(t.requires_grad) for t in self.tensors])

    def fits(
        self, tensors: Sequence[Tensor], structure: Structure, *, gradients: bool = True
    ) -> bool:
        """Whether a value that was taken apart has this spec.

        Args:
            tensors: from :func:`penstock.values.flatten`, like ``structure``.
            structure: of the value.
            gradients: whether ``requires_grad`` must agree too.
        """
        if structure is not self.structure and structure != self.structure:
            return False
        # A plain loop, since this runs for every value that travels, usually with one tensor.
        for tensor, spec in zip(tensors, self.tensors, strict=True):
            if not spec.fits(tensor, gradients=gradients):
                return False
        return True

    def check_travels(self, name: str) -> None:
        """Check that such a value can be sent.

        Args:
            name: the name of the value in messages.

        Raises:
            SpecError: one of its tensors cannot be sent; the message says which, and what to do.
        """
        for path, tensor in zip(paths(self.structure), self.tensors, strict=True):
            if obstacle := tensor.obstacle():
                raise SpecError(f"{name}, {path}: {obstacle}")

    def to_json(self) -> dict[str, Any]:
        """Plain data for :meth:`from_json`."""
        return {"tensors": [t.to_json() for t in self.tensors], "structure": self.structure}

    @staticmethod
    def from_json(data: dict[str, Any]) -> ValueSpec:
        """Read what :meth:`to_json` has written, possibly from JSON text.

        Raises:
            SpecError: the data are not a spec, or name a class that this program does not have.
        """
        try:
            tensors = tuple(TensorSpec.from_json(tensor) for tensor in data["tensors"])
            check(data["structure"], len(tensors))
            return ValueSpec(tensors, data["structure"])
        except (
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            RuntimeError,
            RecursionError,
        ) as error:
            if isinstance(error, SpecError):
                raise
            raise SpecError(f"not the spec of a value: {error}") from error

    def digest(self) -> str:
        """A text that is equal for equal specs with the same order of dimensions in memory."""
        return json.dumps(self.to_json(), separators=(",", ":"))

    def kind(self) -> str:
        """A text that is equal for specs that differ only in sizes."""
        tensors = [
            (len(t.shape), t.dtype, t.requires_grad, t.layout, t.order) for t in self.tensors
        ]
        return f"{tensors} {self.structure}"

    def difference(self, other: ValueSpec, *, gradients: bool = True) -> str | None:
        """How ``other`` differs from this spec, in words, or ``None``.

        Args:
            other: what was found.
            gradients: whether ``requires_grad`` must agree too.
        """
        if told := difference(self.structure, other.structure):
            return told
        where = paths(self.structure)
        for path, expected, found in zip(where, self.tensors, other.tensors, strict=True):
            if expected != (found if gradients else _as_trained(found, expected)):
                return f"{path}: expected {expected}, found {found}"
        return None


def _as_trained(found: TensorSpec, expected: TensorSpec) -> TensorSpec:
    return TensorSpec(found.shape, found.dtype, expected.requires_grad, found.layout)


# ---- keyword arguments of modules


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def named_arguments(module: nn.Module) -> tuple[str, ...]:
    """The names of the arguments of a module's forward, in order.

    A module that passes arguments on to others lists them in an attribute ``takes``. One that wraps another
    module, as ``DistributedDataParallel`` and ``torch.compile`` do, takes what that module takes.
    """
    takes = getattr(module, "takes", None)
    if isinstance(takes, tuple):
        return takes
    parameters = inspect.signature(module.forward).parameters.values()
    inner = dict(module.named_children())
    if any(found.kind is inspect.Parameter.VAR_KEYWORD for found in parameters):
        for wrapped in inner.keys() & {"module", "_orig_mod"}:
            return named_arguments(inner[wrapped])
    return tuple(found.name for found in parameters if found.kind in _NAMED)
