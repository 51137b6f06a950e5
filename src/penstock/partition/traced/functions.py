"""The functions of torch that do what traced operators do.

A traced graph calls operators; the functions above them are what hooks of torch's function modes, such as
those that let weight gradients wait, know by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_aten = torch.ops.aten


def _embedding(
    weight: Tensor,
    tokens: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    padding = None if padding_idx < 0 else padding_idx
    return functional.embedding(
        tokens, weight, padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse
    )


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    _aten.linear.default: functional.linear,
    _aten.embedding.default: _embedding,
    _aten.matmul.default: torch.matmul,
    _aten.mm.default: torch.mm,
    _aten.bmm.default: torch.bmm,
    _aten.addmm.default: torch.addmm,
    _aten.baddbmm.default: torch.baddbmm,
    _aten.conv1d.default: functional.conv1d,
    _aten.conv2d.default: functional.conv2d,
    _aten.conv3d.default: functional.conv3d,
    _aten.conv1d.padding: functional.conv1d,
    _aten.conv2d.padding: functional.conv2d,
    _aten.conv3d.padding: functional.conv3d,
    _aten.conv_transpose1d.default: functional.conv_transpose1d,
    _aten.conv_transpose2d.input: functional.conv_transpose2d,
    _aten.conv_transpose3d.input: functional.conv_transpose3d,
}


def function_of(target: Any) -> Any:
    """What to call for an operator: the function, or the operator itself."""
    return _FUNCTIONS.get(target, target)
