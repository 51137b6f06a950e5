"""A weight gradient that is still to be computed, and faster ways to do so that change its bits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.backward.operations import Operation, rows
from penstock.errors import StageError


@dataclass(eq=False, slots=True)
class Pending:
    """The input and the output gradient of an operation with a weight."""

    operation: Operation
    options: tuple[Any, ...]
    like: Tensor
    grad: Tensor
    value: Tensor
    version: int

    def __call__(self) -> tuple[Tensor]:
        """Returns the gradient of the weight."""
        self.check()
        return (self.operation.weight_gradient(self.grad, self.value, self.like, *self.options),)

    def check(self) -> None:
        """Raises StageError if the input has changed since the inputs' half."""
        if self.value._version != self.version:
            raise StageError(
                "an input of an operation with a weight was changed in place between the inputs' half "
                f"and the weights' half of backward; its shape is {tuple(self.value.shape)}"
            )


def join(all_pending: Iterable[Pending]) -> list[Pending]:
    """Puts together what can be one larger matrix product, in the order of the first of each."""
    alike: dict[Any, list[Pending]] = {}
    for pending in all_pending:
        key = (pending.operation, pending.options) if pending.operation.by_rows else id(pending)
        alike.setdefault(key, []).append(pending)
    return [_one(group) for group in alike.values()]


def _one(group: list[Pending]) -> Pending:
    if len(group) == 1:
        return group[0]
    for pending in group:
        pending.check()
    first = group[0]
    grad = torch.cat([rows(pending.grad) for pending in group])
    value = torch.cat([rows(pending.value) for pending in group])
    return Pending(first.operation, first.options, first.like, grad, value, value._version)


def add_to_grad(pending: Pending, weight: nn.Parameter) -> bool:
    """Multiplies straight into ``weight.grad``; returns whether that was possible."""
    product = pending.operation.product
    grad = weight.grad
    if product is None or grad is None or not grad.is_contiguous() or is_hooked(weight):
        return False
    pending.check()
    left, right = product(pending.grad, pending.value)
    grad.addmm_(left.to(grad.dtype), right.to(grad.dtype))
    return True


def is_hooked(weight: Any) -> bool:
    """Says whether hooks wait for the gradient of a parameter."""
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)
