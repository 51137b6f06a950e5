"""The autograd nodes whose weights' gradients can wait, and how those gradients are computed.

A node is known by its name, and what it has saved by the names in torch's ``derivatives.yaml``; torch's
notes on autograd describe the ``_saved_*`` attributes. The formulas are those of autograd, down to which
matrix is transposed, so that they give the same bits. A node that is not in the table, or lacks one of the
names, is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional

from penstock.backward.nodes import node_type

Gradients: TypeAlias = Sequence[Tensor | None]


@dataclass(frozen=True, eq=False)
class Operation:
    """What a kind of node does with a weight; its output is linear in the weight.

    Args:
        weights: the positions of the edges whose gradients wait, either all or none of them.
        value: the name of the saved tensor that they are computed from.
        gradient: computes them: ``(grad, value, *others, *options)``.
        others: the names of further saved tensors.
        form: the name of a saved tensor of which only shape and strides matter, passed as
            ``(shape, strides)`` after ``others``.
        options: the names of other saved attributes.
        applies: whether all this holds for a particular node; by default it does for all of the kind.
        cost: the multiplications that it takes: ``(value, *others, *options)``; by default many.

    Attributes:
        raw: the name of the attribute that shows hooks on ``value``.
        rest: the names of all attributes that are read besides ``value``.
        read: reads those of a node.
    """

    weights: tuple[int, ...]
    value: str
    gradient: Callable[..., Gradients]
    others: tuple[str, ...] = ()
    form: str | None = None
    options: tuple[str, ...] = ()
    applies: Callable[[Any], bool] | None = None
    cost: Callable[..., int] | None = None
    raw: str = field(init=False)
    rest: tuple[str, ...] = field(init=False)
    read: Callable[[Any], tuple[Any, ...]] = field(init=False)

    def __post_init__(self) -> None:
        forms = () if self.form is None else (self.form,)
        object.__setattr__(self, "raw", f"_raw{self.value}")
        rest = *self.others, *forms, *self.options
        object.__setattr__(self, "rest", rest)
        several = len(rest) > 1
        read = attrgetter(*rest) if several else lambda node: tuple(getattr(node, n) for n in rest)
        object.__setattr__(self, "read", read)


# ---- products
# Each is one function, since it is called for every weight and microbatch.


def _right(
    grad: Tensor, left: Tensor, sizes: Any, strides: Any, alpha: complex = 1
) -> list[Tensor]:
    # For real numbers the call of `conj` alone takes as long as a small product.
    left = left.conj() if left.is_complex() else left
    is_by_columns = strides[0] == 1 and strides[1] == sizes[0]
    product = grad.t().mm(left).t() if is_by_columns else left.t().mm(grad)
    return [product if alpha == 1 else product * alpha.conjugate()]


def _left(
    grad: Tensor, right: Tensor, sizes: Any, strides: Any, alpha: complex = 1
) -> list[Tensor]:
    right = right.conj() if right.is_complex() else right
    is_by_columns = strides[0] == 1 and strides[1] == sizes[0]
    product = right.mm(grad.t()).t() if is_by_columns else grad.mm(right.t())
    return [product if alpha == 1 else product * alpha.conjugate()]


def _batched_right(grad: Tensor, left: Tensor, alpha: complex = 1) -> list[Tensor]:
    left = left.conj() if left.is_complex() else left
    product = left.mT.bmm(grad)
    return [product if alpha == 1 else product * alpha.conjugate()]


def _batched_left(grad: Tensor, right: Tensor, alpha: complex = 1) -> list[Tensor]:
    right = right.conj() if right.is_complex() else right
    product = grad.bmm(right.mT)
    return [product if alpha == 1 else product * alpha.conjugate()]


def _cost_right(left: Tensor, sizes: Any, *_: Any) -> int:
    return left.numel() * int(sizes[1])


def _cost_left(right: Tensor, sizes: Any, *_: Any) -> int:
    return right.numel() * int(sizes[0])


# ---- others


def _convolution(grad: Tensor, value: Tensor, form: Any, *options: Any) -> Gradients:
    return [_convolved(grad, value, form, [0], *options, [False, True, False])[1]]


def _convolution_with_bias(grad: Tensor, value: Tensor, form: Any, *options: Any) -> Gradients:
    # Some kernels compute both at once: alone, the bias would cost as much as both, and have other bits.
    return _convolved(grad, value, form, *options, [False, True, True])[1:]


def _convolved(grad: Tensor, value: Tensor, form: Any, *options: Any) -> tuple[Any, ...]:
    # The weight's numbers are not read, but its strides choose the layout.
    like = torch.empty_strided(*form, dtype=value.dtype, device=value.device)
    gradients = torch.ops.aten.convolution_backward(grad, value, like, *options)
    return cast("tuple[Any, ...]", gradients)


def _embedding(grad: Tensor, tokens: Tensor, count: int, padding: int, *options: Any) -> Gradients:
    # The attribute shows -1 as an unsigned number; seen in torch 2.13.
    padding = padding - 2**64 if padding >= 2**63 else padding
    return [torch.ops.aten.embedding_backward(grad, tokens, count, padding, *options)]


def _grouped(grad: Tensor, value: Tensor, ends: Tensor, sizes: Any, strides: Any) -> Gradients:
    if tuple(strides[-2:]) == (1, sizes[-2]):
        return [functional.grouped_mm(grad.mT, value, offs=ends).mT]
    return [functional.grouped_mm(value.mT, grad, offs=ends)]


def _groups_rows(node: Any) -> bool:
    return (len(node._saved_self_sym_sizes), len(node._saved_mat2_sym_sizes)) == (2, 3)


# ---- the table


def _saved(*names: str) -> tuple[str, ...]:
    return tuple(f"_saved_{name}" for name in names)


def _form(name: str, *more: str) -> tuple[str, ...]:
    return _saved(f"{name}_sym_sizes", f"{name}_sym_strides", *more)


_SIZES = "stride", "padding", "dilation", "transposed", "output_padding", "groups"

_PRODUCTS = {
    "MmBackward0": (
        Operation((1,), "_saved_self", _right, options=_form("mat2"), cost=_cost_right),
        Operation((0,), "_saved_mat2", _left, options=_form("self"), cost=_cost_left),
    ),
    "AddmmBackward0": (
        Operation((2,), "_saved_mat1", _right, options=_form("mat2", "alpha"), cost=_cost_right),
        Operation((1,), "_saved_mat2", _left, options=_form("mat1", "alpha"), cost=_cost_left),
    ),
    "BmmBackward0": (
        Operation((1,), "_saved_self", _batched_right),
        Operation((0,), "_saved_mat2", _batched_left),
    ),
    "BaddbmmBackward0": (
        Operation((2,), "_saved_batch1", _batched_right, options=_saved("alpha")),
        Operation((1,), "_saved_batch2", _batched_left, options=_saved("alpha")),
    ),
}

_OTHERS = {
    "ConvolutionBackward0": (
        Operation(
            (1, 2),
            "_saved_input",
            _convolution_with_bias,
            form="_saved_weight",
            options=_saved("bias_sym_sizes_opt", *_SIZES),
        ),
        Operation(
            (1,), "_saved_input", _convolution, form="_saved_weight", options=_saved(*_SIZES)
        ),
    ),
    "EmbeddingBackward0": (
        Operation(
            (0,),
            "_saved_indices",
            _embedding,
            options=_saved("weight_sym_argsize_0", "padding_idx", "scale_grad_by_freq", "sparse"),
        ),
    ),
    "GroupedMmBackward0": (
        Operation(
            (1,),
            "_saved_self",
            _grouped,
            others=_saved("offs"),
            options=_form("mat2"),
            applies=_groups_rows,
        ),
    ),
}


def _by_type(table: Mapping[str, tuple[Operation, ...]]) -> dict[type, tuple[Operation, ...]]:
    """The part of a table that this version of torch has."""
    kinds = {node_type(name): operations for name, operations in table.items()}
    return {
        kind: tuple(
            one for one in operations if all(hasattr(kind, name) for name in (one.value, *one.rest))
        )
        for kind, operations in kinds.items()
        if kind is not None
    }


PRODUCTS = _by_type(_PRODUCTS)
"""The products, by node type. They may also be a step in computing a weight from other weights."""

OPERATIONS = PRODUCTS | _by_type(_OTHERS)
