"""What a value is: the shapes and types of its tensors, and the structure around them."""

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

# ---- what a tensor is: its shape, its type, and how its data lie


STRIDED = "strided"
_SPARSE = {
    str(layout).removeprefix("torch."): layout
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)
}
_PLAIN = (Tensor, torch.nn.Parameter)
# What stands for a plain tensor while a model is looked at; torch has no public name for them.
_STAND_INS = ("FakeTensor", "FunctionalTensor")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its data.

    Args:
        shape: its size in each dimension.
        dtype: the name of its type, such as ``float32``.
        requires_grad: whether a gradient comes back for it.
        layout: how its data lie: ``strided``, or what cannot travel, such as ``sparse_coo`` or the name of a
            tensor's own class.
        order: its dimensions as they lie in memory, where that is another order than theirs. Two specs that
            differ in nothing else are equal: whoever sends brings a tensor into the order agreed on.
        optional: whether its gradient may be missing, also where it requires grad: what travels back then
            tells whether there is one.
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
        # A nested tensor has no shape to tell.
        shape = () if layout == "nested" else tuple(tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        order = _order(tensor) if layout == STRIDED else None
        return TensorSpec(shape, dtype, tensor.requires_grad, layout, order)

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        """The type, as torch's object."""
        return DTYPES[self.dtype]

    @cached_property
    def packed(self) -> TensorSpec:
        """The spec of what travels: the same data with the dimensions in the order of memory."""
        if self.order is None:
            return self
        shape = tuple(self.shape[dim] for dim in self.order)
        return TensorSpec(shape, self.dtype, self.requires_grad)

    def pack(self, tensor: Tensor) -> Tensor:
        """Make what travels of a tensor: its data in one piece, without copying where they are that."""
        return settled(tensor if self.order is None else tensor.detach().permute(self.order))

    def unpack(self, data: Tensor) -> Tensor:
        """Make the tensor of what has travelled."""
        if self.order is None:
            return data
        return data.permute([self.order.index(dim) for dim in range(len(self.order))])

    def empty(self, device: torch.device | str) -> Tensor:
        """An uninitialised tensor to receive into, without ``requires_grad``."""
        if self.layout in _SPARSE:
            layout = _SPARSE[self.layout]
            return torch.empty(self.shape, dtype=self.torch_dtype, device=device, layout=layout)
        data = torch.empty(self.packed.shape, dtype=self.torch_dtype, device=device)
        return self.unpack(data)

    def zeros(self, device: torch.device | str) -> Tensor:
        """The same, with zeros in it."""
        return self.empty(device).zero_()

    def obstacle(self) -> str | None:
        """Why such a tensor cannot travel, and what to do; ``None`` where it can."""
        if self.layout != STRIDED:
            return _OBSTACLES.get(
                self.layout,
                f"a tensor of the class {self.layout} cannot travel; give a plain one, such as its "
                "as_subclass(torch.Tensor)",
            )
        return None

    def fits(self, tensor: Tensor, *, gradients: bool) -> bool:
        """Whether a tensor is of this spec, in whatever order its data lie."""
        return (
            tensor.dtype is self.torch_dtype
            and layout_of(tensor) == self.layout
            and tensor.shape == self.shape
            and (tensor.requires_grad is self.requires_grad or not gradients)
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data for :meth:`from_json`; only what is out of the ordinary is told."""
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
        """Read what :meth:`to_json` gave.

        Raises:
            SpecError: an unknown type, or an order that is none.
            LookupError, TypeError, ValueError: other data.
        """
        shape, dtype = tuple(map(int, data["shape"])), str(data["dtype"])
        if dtype not in DTYPES:
            raise SpecError(f"there are no such dtypes: {[dtype]}")
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
    "quantized": "a quantized tensor cannot travel; give its dequantize()",
    "nested": "a nested tensor cannot travel; give a padded one, or its values and offsets",
    "NestedTensor": "a nested tensor cannot travel; give its values() and offsets()",
    "DTensor": "a DTensor cannot travel; give its to_local(), and make it again in the next stage",
} | {name: f"a tensor of layout {name} cannot travel; give its to_dense()" for name in _SPARSE}


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; nobody counts that of one made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def settled(tensor: Tensor) -> Tensor:
    """The tensor with its elements in order in memory, and negated or conjugated where only marked so."""
    data = tensor.detach()
    # Asking costs a tenth of the calls that do nothing.
    if data.is_neg() or data.is_conj():
        data = data.resolve_neg().resolve_conj()
    return data if data.is_contiguous() else data.contiguous()


def layout_of(tensor: Tensor) -> str:
    """``strided``, another layout, or the name of a class of tensors that are more than their data."""
    kind = type(tensor)
    if kind not in _PLAIN and kind.__name__ not in _STAND_INS:
        return kind.__name__
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    if tensor.is_nested:
        return "nested"
    return "quantized" if tensor.is_quantized else STRIDED


def _order(tensor: Tensor) -> tuple[int, ...] | None:
    """The order of the dimensions in memory, if all data lie in one piece in another than theirs."""
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    return order if tensor.permute(order).is_contiguous() else None


# ---- what a value is: the shapes and types of its tensors and the structure around them


@dataclass(frozen=True)
class ValueSpec:
    """A nested value without its data.

    Args:
        tensors: the specs of its tensors, in order.
        structure: JSON data that says how the value is nested.
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
        """The same, with a mark on the tensors whose gradient may be missing: all but the sure ones."""
        tensors = tuple(
            replace(tensor, optional=tensor.requires_grad and index not in sure)
            for index, tensor in enumerate(self.tensors)
        )
        return replace(self, tensors=tensors)

    def fill(self, tensors: Sequence[Any]) -> Any:
        """The value of this structure with these tensors."""
        return unflatten(self.structure, tensors)

    def without_data(self) -> Any:
        """A value of this spec whose tensors have no memory: they are on the meta device."""
        return self.fill([t.empty("meta").requires_grad_(t.requires_grad) for t in self.tensors])

    def fits(
        self, tensors: Sequence[Tensor], structure: Structure, *, gradients: bool = True
    ) -> bool:
        """Whether a value that was taken apart is of this spec.

        Args:
            tensors: from :func:`penstock.values.flatten`, like ``structure``.
            structure: of the value.
            gradients: whether ``requires_grad`` must agree too.
        """
        if structure is not self.structure and structure != self.structure:
            return False
        # A loop, since it is run for every value that travels, and mostly for one tensor.
        for tensor, spec in zip(tensors, self.tensors, strict=True):
            if not spec.fits(tensor, gradients=gradients):
                return False
        return True

    def check_travels(self, name: str) -> None:
        """Check that such a value can be sent.

        Args:
            name: what it is called in the message.

        Raises:
            SpecError: one of its tensors cannot; the message says which and what to do.
        """
        for path, tensor in zip(paths(self.structure), self.tensors, strict=True):
            if obstacle := tensor.obstacle():
                raise SpecError(f"{name}, {path}: {obstacle}")

    def to_json(self) -> dict[str, Any]:
        """Plain data for :meth:`from_json`."""
        return {"tensors": [t.to_json() for t in self.tensors], "structure": self.structure}

    @staticmethod
    def from_json(data: dict[str, Any]) -> ValueSpec:
        """Read what :meth:`to_json` gave, after a way through JSON text.

        Raises:
            SpecError: the data is not a spec, or of a class that this program does not have.
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
        """A text that is equal for equal specs."""
        return json.dumps(self.to_json(), separators=(",", ":"))

    def kind(self) -> str:
        """A text that is equal for specs that differ in nothing but sizes."""
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


# ---- which arguments a module takes by name


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def named_arguments(module: nn.Module) -> tuple[str, ...]:
    """The arguments that a module's forward names, in its order.

    A module that leads arguments on to others says so itself, by an attribute ``takes``; one that wraps
    another, as ``DistributedDataParallel`` and ``torch.compile`` do, takes what that one takes.
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
