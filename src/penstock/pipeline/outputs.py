"""A backward that starts from gradients of a pipeline's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from penstock.errors import UsageError
from penstock.microbatches import Batch
from penstock.values import tensors_in


def gradients_by_part(
    gradients: Sequence[Tensor | None], batch: Batch, dim: int
) -> list[list[Tensor | None]]:
    """The gradients of each microbatch's outputs, from those of the whole batch's outputs.

    Raises:
        UsageError: the size of a gradient in the dimension ``dim`` is not the number of samples.
    """
    sizes = list(batch.samples or ())
    count = len(sizes)
    if batch.presplit:  # the outputs were not merged either
        each = len(gradients) // count
        return [list(gradients[index * each :][:each]) for index in range(count)]
    columns: list[Sequence[Tensor | None]] = []
    for gradient in gradients:
        if gradient is None:
            columns.append([None] * count)
        elif gradient.dim() > dim and gradient.shape[dim] == sum(sizes):
            columns.append(gradient.split(sizes, dim))
        elif (
            batch.dim is not None
            and gradient.dim() > dim
            and gradient.shape[dim] == sum(sizes) - count
        ):
            # Losses of single labels lack that of the first token of each microbatch.
            columns.append(gradient.split([size - 1 for size in sizes], dim))
        elif gradient.dim() == 1 and len(gradient) == count:
            # Numbers without dimensions, one of each microbatch, which were stacked.
            columns.append(gradient.unbind())
        else:
            raise UsageError(
                f"a gradient of shape {list(gradient.shape)} arrived at an output of a pipeline whose batch "
                f"has {sum(sizes)} samples, so it cannot be divided among microbatches; return outputs whose "
                f"dimension {dim} counts the samples, or compute the loss in loss_fn"
            )
    return [list(row) for row in zip(*columns, strict=True)] or [[] for _ in sizes]


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
