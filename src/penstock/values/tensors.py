"""What a tensor is: its shape, its type, and how its data lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.errors import SpecError
from penstock.values.constants import DTYPES

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

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type, as torch's object."""
        return DTYPES[self.dtype]

    @property
    def packed(self) -> TensorSpec:
        """The spec of what travels: the same data with the dimensions in the order of memory."""
        if self.order is None:
            return self
        shape = tuple(self.shape[dim] for dim in self.order)
        return TensorSpec(shape, self.dtype, self.requires_grad)

    def pack(self, tensor: Tensor) -> Tensor:
        """Make what travels of a tensor: its data in one piece, without copying where they are that."""
        data = tensor.detach()
        if self.order is not None:
            data = data.permute(self.order)
        return data.resolve_neg().resolve_conj().contiguous()

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
            tensor.dtype is DTYPES[self.dtype]
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
            raise SpecError(f"unknown dtypes {[dtype]}")
        order = data.get("order")
        if order is not None and sorted(order) != list(range(len(shape))):
            raise SpecError(f"{order} is no order of {len(shape)} dimensions")
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
