"""What a value is: the shapes and types of its tensors and the structure around them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import SpecError
from penstock.specs.structure import Structure, flatten, paths, unflatten

_DTYPES = {
    str(found).removeprefix("torch."): found
    for found in vars(torch).values()
    if isinstance(found, torch.dtype)
}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its data.

    Args:
        shape: its size in each dimension.
        dtype: the name of its type, such as ``float32``.
        requires_grad: whether a gradient comes back for it.
    """

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        """The spec of a tensor."""
        return TensorSpec(
            tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type, as torch's object."""
        return _DTYPES[self.dtype]

    def empty(self, device: torch.device | str) -> Tensor:
        """An uninitialised tensor to receive into, without ``requires_grad``."""
        return torch.empty(self.shape, dtype=self.torch_dtype, device=device)

    def __str__(self) -> str:
        grad = ", requires grad" if self.requires_grad else ""
        return f"{self.dtype}{list(self.shape)}{grad}"


@dataclass(frozen=True)
class ValueSpec:
    """A nested value without its data.

    Args:
        tensors: the specs of its tensors, in order.
        structure: JSON data, see :mod:`penstock.specs.structure`.
    """

    tensors: tuple[TensorSpec, ...]
    structure: Structure

    @staticmethod
    def of(value: Any) -> ValueSpec:
        """The spec of a value.

        Raises:
            SpecError: the value holds something that cannot travel.
        """
        tensors, structure = flatten(value)
        return ValueSpec(tuple(map(TensorSpec.of, tensors)), structure)

    @property
    def differentiable(self) -> tuple[TensorSpec, ...]:
        """The tensors for which a gradient comes back."""
        return tuple(tensor for tensor in self.tensors if tensor.requires_grad)

    def fill(self, tensors: Sequence[Any]) -> Any:
        """The value of this structure with these tensors."""
        return unflatten(self.structure, tensors)

    def fits(
        self, tensors: Sequence[Tensor], structure: Structure, *, gradients: bool = True
    ) -> bool:
        """Whether a value that was taken apart is of this spec.

        Args:
            tensors: from :func:`penstock.specs.flatten`, like ``structure``.
            structure: of the value.
            gradients: whether ``requires_grad`` must agree too.
        """
        return structure == self.structure and all(
            tensor.shape == spec.shape
            and tensor.dtype is _DTYPES[spec.dtype]
            and (tensor.requires_grad is spec.requires_grad or not gradients)
            for tensor, spec in zip(tensors, self.tensors, strict=True)
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data for :meth:`from_json`."""
        return {"tensors": [asdict(t) for t in self.tensors], "structure": self.structure}

    @staticmethod
    def from_json(data: dict[str, Any]) -> ValueSpec:
        """Read what :meth:`to_json` gave, after a way through JSON text.

        Raises:
            SpecError: the data is not a spec.
        """
        try:
            tensors = tuple(
                TensorSpec(tuple(map(int, t["shape"])), t["dtype"], bool(t["requires_grad"]))
                for t in data["tensors"]
            )
            unknown = [t.dtype for t in tensors if t.dtype not in _DTYPES]
            if unknown:
                raise SpecError(f"unknown dtypes {unknown}")
            unflatten(data["structure"], tensors)
            return ValueSpec(tensors, data["structure"])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise SpecError(f"not the spec of a value: {error}") from error

    def digest(self) -> str:
        """A text that is equal for equal specs."""
        return json.dumps(self.to_json(), separators=(",", ":"))

    def difference(self, other: ValueSpec) -> str | None:
        """How ``other`` differs from this spec, in words, or ``None``."""
        if other.structure != self.structure:
            return f"expected the structure {self.structure}, found {other.structure}"
        where = paths(self.structure)
        for path, expected, found in zip(where, self.tensors, other.tensors, strict=True):
            if expected != found:
                return f"{path}: expected {expected}, found {found}"
        return None
