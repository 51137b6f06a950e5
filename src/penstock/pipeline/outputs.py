"""The outputs of microbatches, and a backward that starts from their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from penstock._engine.microbatches import Rule, Ways, merge
from penstock._engine.values import tensors_in


class Outputs(NamedTuple):
    """The outputs of a call's microbatches.

    Attributes:
        parts: one for each microbatch.
        rule: how they are put together.
        ways: see :func:`penstock._engine.microbatches.merge`; None if the user has split the batch.
    """

    parts: list[Any]
    rule: Rule | None
    ways: Ways | None

    def joined(self, parts: list[Any], rule: Rule | None) -> Any:
        """These parts put together by a rule; a list of them if the user has split the batch.

        Raises:
            MicrobatchError: they cannot be put together.
        """
        return parts if self.ways is None else merge(parts, rule, self.ways)


def product(output: Any, gradients: Sequence[Tensor | None]) -> Tensor:
    """A loss from which backward gives the outputs of a microbatch these gradients."""
    outputs = tensors_in(output)
    pairs = [
        (tensor, gradient.reshape(tensor.shape))
        for tensor, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None and tensor.requires_grad
    ]
    if not pairs:
        return sum(
            (t.sum() * 0.0 for t in outputs if t.requires_grad), torch.zeros((), device="cpu")
        )
    tensors, arriving = zip(*pairs, strict=True)
    loss: Tensor = cast("Any", _From).apply(arriving, *tensors)
    return loss


class _From(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *seeds: Any) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        return None, *(gradient * seeds[0].to(gradient.dtype) for gradient in gradients)
