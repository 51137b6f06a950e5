"""The loss of a batch from the losses of its microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from penstock.errors import UsageError

Reduction = Literal["mean", "sum"]
LossFunction = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Loss:
    """A loss function and how it reduces over the samples of a batch.

    Backward of a microbatch starts from its weight, so that the microbatches add up to the loss of the batch;
    gradients are never rescaled afterwards.

    Args:
        function: ``(output, target) -> scalar``.
        reduction: ``"mean"`` where it averages over the samples, ``"sum"`` where it adds them up.

    Raises:
        UsageError: another reduction.
    """

    function: LossFunction
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        if self.reduction not in get_args(Reduction):
            raise UsageError(f"reduction={self.reduction!r}: must be 'mean' or 'sum'")

    def weights(self, samples: Sequence[int]) -> list[float]:
        """By what each microbatch's loss is scaled, from how many samples each holds."""
        if self.reduction == "sum":
            return [1.0] * len(samples)
        total = sum(samples)
        return [count / total for count in samples] if total else [1 / len(samples)] * len(samples)

    def of_microbatch(self, output: Any, target: Any) -> Tensor:
        """The loss of a microbatch, not scaled.

        Raises:
            UsageError: the function gave no scalar tensor, or one that no gradient leads back from.
        """
        loss = self.function(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(f"loss_fn must give a scalar tensor, not {found}")
        if _requires_grad(output) and torch.is_grad_enabled() and not loss.requires_grad:
            raise UsageError(
                "loss_fn gave a loss that requires no grad for an output that does, so nothing would be "
                "trained; leave out detach(), item() and the like, and for a constant add output.sum() * 0"
            )
        return loss


def _requires_grad(output: Any) -> bool:
    if isinstance(output, tuple | list):
        return any(map(_requires_grad, output))
    if isinstance(output, dict):
        return any(map(_requires_grad, output.values()))
    return isinstance(output, Tensor) and output.requires_grad


def total(losses: Sequence[Tensor], weights: Sequence[float]) -> float:
    """The batch's loss from those of its microbatches, scaled and added in their order in float64."""
    if not losses:
        return 0.0
    stacked = torch.stack([loss.reshape(()) for loss in losses]).double().cpu()
    return float((stacked * torch.tensor(weights, dtype=torch.float64)).sum())
