"""Operations whose weight gradient can wait: how each is run, and each gradient by itself.

The formulas are those of autograd, down to which matrix is transposed, so that their bits are too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional


def _same(grad: Tensor, *_: Any) -> Tensor:
    """Returns the gradient for what was added; autograd sums it to the shape that it needs."""
    return grad


@dataclass(frozen=True)
class Operation:
    """An operation that is linear in a weight, for `register_function` and `register_module`.

    All functions get the ``options`` of the call as their last arguments.

    Args:
        run: ``(input, weight, bias, *options)``, the forward pass; ``bias`` may be None.
        input_gradient: ``(grad, input, weight, *options)``, made of differentiable operations if it
            is to be differentiated twice.
        weight_gradient: ``(grad, input, weight, *options)``; of ``weight`` it may read shape,
            strides and dtype, but no numbers: those may be gone or changed by then.
        bias_gradient: ``(grad, input, *options)``; a result that is too large is summed.
        autocast: Whether autocast runs it in the lower precision.
        by_rows: Whether inputs of several microbatches can be put together along all but their last
            dimension, and the output likewise.
        product: ``(grad, input)``, two matrices whose product is the weight's gradient, if there are.
    """

    run: Callable[..., Tensor]
    input_gradient: Callable[..., Tensor]
    weight_gradient: Callable[..., Tensor]
    bias_gradient: Callable[..., Tensor] = _same
    autocast: bool = True
    by_rows: bool = False
    product: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None


class Call(NamedTuple):
    """An operation and what it is applied to."""

    operation: Operation
    input: Tensor
    weight: Tensor
    bias: Tensor | None = None
    options: tuple[Any, ...] = ()


def rows(tensor: Tensor) -> Tensor:
    """Returns a matrix of the tensor's last dimension."""
    return tensor if tensor.dim() == 2 else tensor.flatten(0, -2)


def left_gradient(grad: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Returns the gradient of ``left`` in ``left @ right``."""
    if _by_columns(left):
        return (right.conj() @ grad.mT).mT
    return grad @ right.mH


def right_gradient(grad: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Returns the gradient of ``right`` in ``left @ right``."""
    if _by_columns(right):
        return (grad.mT @ left.conj()).mT
    return left.mH @ grad


def _by_columns(matrix: Tensor) -> bool:
    return matrix.dim() == 2 and matrix.stride() == (1, matrix.shape[0])


# ---- linear and products


def _linear_input(grad: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    if value.is_contiguous():
        weight = weight.conj() if weight.is_complex() else weight
        return grad @ weight if grad.is_contiguous() else _by_rows(grad, weight)
    return left_gradient(rows(grad), rows(value), weight.mT).view(value.shape)


def _by_rows(left: Tensor, right: Tensor) -> Tensor:
    return (rows(left) @ right).view(*left.shape[:-1], right.shape[-1])


def _linear_weight(grad: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    if weight.is_contiguous():
        value = value.conj() if value.is_complex() else value
        return rows(grad).t().mm(rows(value))
    return right_gradient(rows(grad), rows(value), weight.mT).mT


def _linear_bias(grad: Tensor, *_: Any) -> Tensor:
    return rows(grad)


def _product(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return left @ right
    return torch.addmm(bias, left, right) if left.dim() == 2 else torch.baddbmm(bias, left, right)


def _left_is_weight(value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _product(weight, value, bias)


def _left_input(grad: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    return right_gradient(grad, weight, value)


def _left_weight(grad: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    return left_gradient(grad, weight, value)


def _folded_input(grad: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    return left_gradient(rows(grad), rows(value), weight).view(value.shape)


def _folded_weight(grad: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    return right_gradient(rows(grad), rows(value), weight)


def _linear_product(grad: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return rows(grad).t(), rows(value).conj()


def _folded_product(grad: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return rows(value).mH, rows(grad)


LINEAR = Operation(
    functional.linear,
    _linear_input,
    _linear_weight,
    _linear_bias,
    by_rows=True,
    product=_linear_product,
)
RIGHT = Operation(_product, left_gradient, right_gradient)
LEFT = Operation(_left_is_weight, _left_input, _left_weight)
FOLDED = Operation(_product, _folded_input, _folded_weight, by_rows=True, product=_folded_product)


# ---- convolution


def _convolution_backward(
    grad: Tensor, value: Tensor, weight: Tensor, options: tuple[Any, ...], mask: list[bool]
) -> tuple[Any, ...]:
    found = torch.ops.aten.convolution_backward(grad, value, weight, None, *options, mask)
    return cast("tuple[Any, ...]", found)


def _convolution_input(grad: Tensor, value: Tensor, weight: Tensor, *options: Any) -> Tensor:
    found = _convolution_backward(grad, value, weight, options, [True, False, False])
    return cast("Tensor", found[0])


def _convolution_weight(grad: Tensor, value: Tensor, weight: Tensor, *options: Any) -> Tensor:
    like = value.new_empty(()).expand(weight.shape) if weight.is_meta else weight
    found = _convolution_backward(grad, value, like, options, [False, True, False])
    return cast("Tensor", found[1])


def _convolution_bias(grad: Tensor, *_: Any) -> Tensor:
    return grad.sum([0, *range(2, grad.dim())])


CONVOLUTION = Operation(
    torch.convolution, _convolution_input, _convolution_weight, _convolution_bias
)


# ---- embedding


def _embed(tokens: Tensor, weight: Tensor, bias: None, padding: int, *options: bool) -> Tensor:
    return torch.embedding(weight, tokens, padding, *options)


def _no_input(grad: Tensor, *_: Any) -> Tensor:
    return torch.zeros_like(grad)


def _embedding_weight(grad: Tensor, tokens: Tensor, weight: Tensor, *options: Any) -> Tensor:
    found = torch.ops.aten.embedding_backward(grad, tokens, weight.shape[0], *options)
    return cast("Tensor", found)


EMBEDDING = Operation(_embed, _no_input, _embedding_weight, autocast=False)


# ---- experts


def _grouped(value: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    return functional.grouped_mm(value, weight, offs=ends, bias=bias)


def _grouped_input(grad: Tensor, value: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return functional.grouped_mm(grad, weight.mT, offs=ends)


def _grouped_weight(grad: Tensor, value: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if weight.stride()[-2:] == (1, weight.shape[-2]):
        return functional.grouped_mm(grad.mT, value, offs=ends).mT
    return functional.grouped_mm(value.mT, grad, offs=ends)


GROUPED = Operation(_grouped, _grouped_input, _grouped_weight)
