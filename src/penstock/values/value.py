"""What a value is: the shapes and types of its tensors and the structure around them."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from penstock.errors import SpecError
from penstock.values.constants import Structure
from penstock.values.structure import check, difference, flatten, paths, unflatten
from penstock.values.tensors import TensorSpec


@dataclass(frozen=True)
class ValueSpec:
    """A nested value without its data.

    Args:
        tensors: the specs of its tensors, in order.
        structure: JSON data, see :mod:`penstock.values.structure`.
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
        return structure == self.structure and all(
            spec.fits(tensor, gradients=gradients)
            for tensor, spec in zip(tensors, self.tensors, strict=True)
        )

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
