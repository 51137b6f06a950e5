"""What a user measures beside the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from penstock.errors import UsageError

Metric = Callable[[Any, Any], Any]
"""``(output, target) -> number``, or a pair of a sum and how many things it is over."""
Number = float | Tensor


def measured(name: str, found: Any, weight: float) -> tuple[Number, Number, float]:
    """What a metric gave for a microbatch: what to add up, over how many, and by what to multiply.

    A number is averaged over the microbatches by their weights, like a loss that is a mean. Of pairs the
    sums are added up, and divided by how many things they are over.

    Raises:
        UsageError: the metric gave neither a number nor a pair of numbers.
    """
    if isinstance(found, tuple) and len(found) == 2 and all(map(_is_number, found)):
        return found[0], found[1], 1.0
    if _is_number(found):
        return found, 1.0, weight
    shown = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
    raise UsageError(f"the metric {name!r} must give a number or a pair of numbers, not {shown}")


def _is_number(found: Any) -> bool:
    return found.numel() == 1 if isinstance(found, Tensor) else isinstance(found, int | float)
