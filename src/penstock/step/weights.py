"""How much each microbatch counts: in the loss that is reported, and in the gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, SupportsFloat

import torch
from torch import Tensor

from penstock.errors import UsageError
from penstock.schedule.placement import whole_number

LossWeight = float | Sequence[float] | Callable[[Any], Any]
"""Of a batch, of each of its microbatches, or a function from a microbatch's target to its weight."""


def count(weight: LossWeight | None, samples: Sequence[int], targets: Sequence[Any]) -> list[float]:
    """The weight of each microbatch.

    Args:
        weight: a number is shared by the microbatches as they share the samples; without one, a
            microbatch counts as many as it has samples.
        samples: how many each has; 0 where nothing is split, and then all count alike.
        targets: of each.

    Raises:
        UsageError: a weight is no number or below 0, or there is not one for each microbatch.
    """
    if callable(weight):
        return _checked(_numbers([weight(target) for target in targets]))
    check_weight("loss_weight", weight)
    if isinstance(weight, Sequence):
        if len(weight) != len(samples):
            raise UsageError(
                f"loss_weight: {len(weight)} numbers for {len(samples)} microbatches; "
                "give one for each, one for the batch, or a function of the target"
            )
        return _checked(_numbers(weight))
    counts = [float(found) for found in samples] if any(samples) else [1.0] * len(samples)
    if weight is None:
        return counts
    whole = sum(counts)
    return _checked([float(weight) * found / whole for found in counts])


def check_weight(name: str, weight: LossWeight | None) -> None:
    """Check that something can say what microbatches weigh.

    Raises:
        UsageError: it is neither a number, nor a list of numbers, nor a function.
    """
    is_number = isinstance(weight, SupportsFloat) and not isinstance(weight, Sequence)
    is_list = isinstance(weight, Sequence) and not isinstance(weight, str | bytes)
    if not (weight is None or callable(weight) or is_number or is_list):
        raise UsageError(
            f"{name}={weight!r}: must be a number for the batch, a list of one for each microbatch, or a "
            "function of the target"
        )


def _numbers(found: Sequence[Any]) -> list[float]:
    """Numbers, and tensors that hold one, brought to the CPU together."""
    if found and all(isinstance(item, Tensor) and item.numel() == 1 for item in found):
        joined: list[float] = torch.stack([item.detach().reshape(()) for item in found]).tolist()
        return [float(item) for item in joined]
    try:
        return [float(item) for item in found]
    except (TypeError, ValueError, RuntimeError) as error:
        kinds = sorted({type(item).__name__ for item in found})
        raise UsageError(f"loss_weight gave {', '.join(kinds)}; it must give a number") from error


def _checked(counts: list[float]) -> list[float]:
    for index, found in enumerate(counts):
        if not 0 <= found < math.inf:
            raise UsageError(
                f"loss_weight of microbatch {index} is {found}; it must be a number of at least 0"
            )
    return counts


@dataclass(frozen=True)
class Replicas:
    """The pipelines that train the same weights on other data.

    Args:
        number: how many there are.
        add: adds a CPU tensor of numbers over them; every rank of every pipeline calls it alike.
        averaged: whether their gradients are averaged, as DDP and FSDP do, and not added up.
    """

    number: int = 1
    add: Callable[[Tensor], Tensor] = torch.clone
    averaged: bool = True

    def added(self, values: Tensor) -> Tensor:
        """The sum of numbers over the replicas."""
        return values if self.number == 1 else self.add(values)


@dataclass(frozen=True)
class Scale:
    """What else the gradients of a step are scaled by.

    Args:
        accumulate: of how many steps the gradients are to equal those of one large batch.
        total: what the loss is divided by, in place of the weight of this batch.
        factor: of a loss scaler.
    """

    accumulate: int = 1
    total: float | None = None
    factor: float = 1.0

    def __post_init__(self) -> None:
        if whole_number("accumulate", self.accumulate) < 1:
            raise UsageError(f"accumulate={self.accumulate}: must be at least 1 step")
        known = self.total is None or isinstance(self.total, SupportsFloat)
        if not known or (self.total is not None and not 0 <= float(self.total) < math.inf):
            raise UsageError(f"total_weight={self.total!r}: must be a number of at least 0")
        if self.total is not None and self.accumulate != 1:
            raise UsageError(
                "give accumulate= or total_weight=, not both: each says what to divide by"
            )


@dataclass(frozen=True)
class Weights:
    """How much each microbatch of a step counts.

    Attributes:
        counts: its weight.
        shares: by what its loss is multiplied in the loss of the batch.
        seeds: by what it is multiplied before backward.
        whole: of all of them, in all replicas.
    """

    counts: Sequence[float] = ()
    shares: Sequence[float] = ()
    seeds: Sequence[float] = ()
    whole: float = 0.0

    @property
    def mark(self) -> float:
        """A number that is another where gradients are scaled in another way."""
        return sum(place * seed for place, seed in enumerate(self.seeds, start=1))


def weigh(
    reduction: Literal["mean", "sum"],
    counts: Sequence[float],
    *,
    given: bool = False,
    scale: Scale | None = None,
    replicas: Replicas | None = None,
) -> Weights:
    """What each microbatch's loss is multiplied by.

    With a mean that is its weight, over the weight of all; a sum is only divided where the user gives
    weights. Where all weigh nothing, loss and gradients are 0.

    Args:
        reduction: ``"mean"`` or ``"sum"``.
        counts: the weight of each microbatch.
        given: whether they are the user's.
        scale: what else gradients are scaled by.
        replicas: the other pipelines, which all call this.
    """
    scale, replicas = scale or Scale(), replicas or Replicas()
    divides = reduction == "mean" or given
    parts = counts if reduction == "mean" else [1.0] * len(counts)
    whole = float(replicas.added(torch.tensor([sum(counts)], dtype=torch.float64)))
    shares = _over(parts, whole if divides else 1.0)
    divisor = scale.total
    if divisor is None:
        divisor = whole * scale.accumulate if divides else 1.0
    factor = scale.factor * (replicas.number if replicas.averaged else 1)
    return Weights(counts, shares, [factor * part for part in _over(parts, divisor)], whole)


def _over(parts: Sequence[float], divisor: float) -> list[float]:
    return [part / divisor if divisor else 0.0 for part in parts]
