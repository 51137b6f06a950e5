"""Which calls have a weight whose gradient can wait, and which operand it is.

A finder takes the arguments of a call and returns a `Call`, or None if the call is to run as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.backward.operations import (
    CONVOLUTION,
    EMBEDDING,
    FOLDED,
    GROUPED,
    LEFT,
    LINEAR,
    RIGHT,
    Call,
)
from penstock.backward.weights import is_weight
from penstock.errors import UsageError

Finder: TypeAlias = Callable[..., Call | None]

_FUNCTIONS: dict[Any, Finder] = {}
_MODULES: dict[Any, Finder] = {}


def register_function(function: Callable[..., Any], finder: Finder) -> None:
    """Lets the weight gradient of a function of your own wait.

    Args:
        function: What a model calls: an operator under ``torch.ops``, or a function that asks
            ``torch.overrides.has_torch_function``.
        finder: Called with the arguments of each call. Returns an `Operation` with its operands, or
            None for a call that is to run as it is.

    Raises:
        UsageError: Something is registered for the function already.
    """
    _register(_FUNCTIONS, function, finder)


def register_module(kind: type[nn.Module], finder: Finder) -> None:
    """Lets the weight gradient of a module of your own wait.

    Args:
        kind: The module's class. Subclasses that do not override ``forward`` are included.
        finder: Called with the module and the arguments of each call, as for `register_function`.

    Raises:
        UsageError: Something is registered for the class's ``forward`` already.
    """
    _register(_MODULES, kind.forward, finder)


def function_finder(function: Any) -> Finder | None:
    """Returns the finder for a function, if it has one."""
    return _FUNCTIONS.get(function)


def module_finder(module: nn.Module) -> Finder | None:
    """Returns the finder for a module whose ``forward`` nothing has replaced, if it has one."""
    return None if "forward" in vars(module) else _MODULES.get(type(module).forward)


def _register(table: dict[Any, Finder], key: Any, finder: Finder) -> None:
    if key in table:
        raise UsageError(f"{key} is registered already")
    table[key] = finder


# ---- functions


def _linear(value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call | None:
    return Call(LINEAR, value, weight, bias) if weight.dim() == 2 <= value.dim() else None


def _product(left: Tensor, right: Any, bias: Tensor | None = None, **options: Any) -> Call | None:
    if options or not isinstance(right, Tensor) or min(left.dim(), right.dim()) < 2:
        return None
    if is_weight(right):
        return _right_weight(left, right, bias)
    if is_weight(left) and left.dim() == right.dim() <= 3 and left.shape[:-2] == right.shape[:-2]:
        return Call(LEFT, right, left, bias)
    return None


def _right_weight(left: Tensor, right: Tensor, bias: Tensor | None) -> Call | None:
    # A product of two weights is a weight itself, and the use of that one waits.
    if is_weight(left):
        return None
    if right.dim() == 2 < left.dim():
        return Call(FOLDED, left, right) if bias is None else None
    if left.dim() != right.dim() or left.dim() > 3 or left.shape[:-2] != right.shape[:-2]:
        return None
    return Call(RIGHT, left, right, bias)


def _matmul(self: Tensor, other: Any = None, **named: Any) -> Call | None:
    return _product(self, named.pop("mat2", other), **named)


def _reversed(self: Tensor, other: Any) -> Call | None:
    return _product(other, self) if isinstance(other, Tensor) else None


def _with_bias(bias: Tensor, left: Tensor, right: Tensor, **options: Any) -> Call | None:
    return _product(left, right, bias, **options)


def _embedding(tokens: Tensor, weight: Tensor, *args: Any, **named: Any) -> Call | None:
    names = "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"
    given = dict(zip(names, args, strict=False)) | named
    if given.get("max_norm") is not None:
        return None
    return _embedded(tokens, weight, **given)


def _embedded(
    tokens: Tensor,
    weight: Tensor,
    *,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    **_: Any,
) -> Call:
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return Call(EMBEDDING, tokens, weight, options=(padding, scale_grad_by_freq, sparse))


def _grouped(
    value: Tensor,
    weight: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    **options: Any,
) -> Call | None:
    given = [option for option in (bias, *options.values()) if option is not None]
    if offs is None or given or (value.dim(), weight.dim()) != (2, 3):
        return None
    return Call(GROUPED, value, weight, options=(offs,))


_CONVOLVED = "input", "weight", "bias", "stride", "padding", "dilation", "groups"
_TRANSPOSED = "input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"


def _convolution(dims: int, *, transposed: bool) -> Finder:
    names = _TRANSPOSED if transposed else _CONVOLVED

    def per_dim(value: int | tuple[int, ...]) -> list[int]:
        return [value] * dims if isinstance(value, int) else list(value) * (dims // len(value))

    def found(*args: Any, **named: Any) -> Call | None:
        given = dict(zip(names, args, strict=False)) | named
        value, weight = given["input"], given["weight"]
        padding = given.get("padding", 0)
        if not value.dim() == weight.dim() == dims + 2 or value.is_complex():
            return None
        if isinstance(padding, str):
            return None
        stride, dilation = (per_dim(given.get(name, 1)) for name in ("stride", "dilation"))
        output_padding = per_dim(given.get("output_padding", 0))
        sizes = stride, per_dim(padding), dilation, transposed, output_padding
        options = (*sizes, given.get("groups", 1))
        return Call(CONVOLUTION, value, weight, given.get("bias"), options)

    return found


_OF_TORCH: dict[Any, Finder] = {
    functional.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.mm: _matmul,
    torch.bmm: _matmul,
    Tensor.bmm: _matmul,
    Tensor.__rmatmul__: _reversed,
    torch.addmm: _with_bias,
    Tensor.addmm: _with_bias,
    torch.baddbmm: _with_bias,
    Tensor.baddbmm: _with_bias,
    functional.embedding: _embedding,
    # What functional.grouped_mm calls; that one asks for no mode. Seen in torch 2.13.
    torch._grouped_mm: _grouped,
    functional.conv1d: _convolution(1, transposed=False),
    functional.conv2d: _convolution(2, transposed=False),
    functional.conv3d: _convolution(3, transposed=False),
    functional.conv_transpose1d: _convolution(1, transposed=True),
    functional.conv_transpose2d: _convolution(2, transposed=True),
    functional.conv_transpose3d: _convolution(3, transposed=True),
}
_FUNCTIONS.update(_OF_TORCH)


# ---- modules


def _linear_module(module: nn.Linear, value: Tensor) -> Call | None:
    return Call(LINEAR, value, module.weight, module.bias) if value.dim() > 1 else None


def _embedding_module(module: nn.Embedding, tokens: Tensor) -> Call | None:
    if module.max_norm is not None:
        return None
    return _embedded(
        tokens,
        module.weight,
        padding_idx=module.padding_idx,
        scale_grad_by_freq=module.scale_grad_by_freq,
        sparse=module.sparse,
    )


def _convolution_module(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, value: Tensor) -> Call | None:
    plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    if not plain or value.dim() != len(module.kernel_size) + 2 or value.is_complex():
        return None
    sizes = module.stride, module.padding, module.dilation, False, module.output_padding
    return Call(CONVOLUTION, value, module.weight, module.bias, (*sizes, module.groups))


register_module(nn.Linear, _linear_module)
register_module(nn.Embedding, _embedding_module)
for _kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    register_module(_kind, _convolution_module)
