"""The work of operations, counted where they run without data: by it, stages are made equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

_ATEN = torch.ops.aten
_KNOWN_AS = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: (
        _ATEN._scaled_dot_product_flash_attention_backward
    ),
}
"""Kernels of the CPU, whose operations PyTorch does not count, and their GPU twins, which it counts."""
_FORMULAS: dict[Any, Callable[..., Any] | None] = {}


def formula_of(operation: Any) -> Callable[..., Any] | None:
    """Return what counts the floating-point operations of a product, convolution or attention."""
    if operation not in _FORMULAS:
        # Operators that call functions, such as FlexAttention, have no overloads.
        packet = getattr(operation, "_overloadpacket", operation)
        _FORMULAS[operation] = cast("Any", flop_registry).get(_KNOWN_AS.get(packet, packet))
    return _FORMULAS[operation]


class Work:
    """A running count of what operations have cost.

    Attributes:
        flops: the floating-point operations of products, convolutions and attention.
        elements: the elements that all other operations have made: what a module without products counts.
        nbytes: the bytes of what was made while gradients were enabled, which a backward may need.
    """

    __slots__ = ("elements", "flops", "nbytes")

    def __init__(self) -> None:
        self.flops = self.elements = self.nbytes = 0.0

    @property
    def total(self) -> float:
        """The operations, of which one makes an element."""
        return self.flops + self.elements

    @property
    def counts(self) -> tuple[float, float, float]:
        """All operations, the floating-point operations among them, and the bytes."""
        return self.total, self.flops, self.nbytes

    def add(
        self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """Count an operation that has run."""
        formula = formula_of(operation)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=output)
        elif getattr(operation, "is_view", False):
            return
        results = [output] if isinstance(output, Tensor) else output
        for tensor in results if isinstance(results, list | tuple) else ():
            if isinstance(tensor, Tensor):
                self.elements += 0.0 if formula else tensor.numel()
                # What a sparse tensor holds is not asked for: an upper bound serves.
                nbytes = tensor.numel() * tensor.element_size()
                self.nbytes += nbytes if torch.is_grad_enabled() else 0
