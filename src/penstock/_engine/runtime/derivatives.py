"""A loss that differentiates the model's output: refused where that would miss the part of other stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from penstock._engine.values import tensors_in
from penstock.errors import UsageError


class Differentiations(TorchFunctionMode):
    """Refuses a loss that differentiates one output by another where the way leads through other stages.

    Args:
        output: the model's output in the last stage.
        inputs: the values that came from other stages.
        arrived: their leaves.
    """

    def __init__(self, output: Any, inputs: Any, arrived: Sequence[Tensor]) -> None:
        super().__init__()
        self._arrived = arrived
        self._memory = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(inputs)}
        self._outputs = {id(tensor) for tensor in tensors_in(output)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.autograd.grad, Tensor.backward):
            inputs = kwargs.get("inputs", args[1] if func is torch.autograd.grad else ())
            for tensor in tensors_in(inputs):
                self._check(tensor)
        return func(*args, **kwargs)

    def _check(self, tensor: Tensor) -> None:
        if id(tensor) not in self._outputs or not self._arrived:
            return
        ends = _ends_of(tensor)
        whole = any(id(leaf) in ends for leaf in self._arrived)
        if whole and tensor.untyped_storage().data_ptr() not in self._memory:
            return  # it was made in this stage, and so was all that depends on it
        raise UsageError(
            f"loss_fn differentiates by an output of the model, of shape {list(tensor.shape)}, that the last "
            "stage was given, and the derivative would miss what the other stages compute from it. Compute "
            "the derivative in the model's forward, in a module that is placed as a whole, or put all that "
            "depends on this output into one stage: stages="
        )


def _ends_of(tensor: Tensor) -> set[int]:
    """The ids of the leaves that a tensor was computed from."""
    ends, seen = {id(tensor)}, set[Any]()
    waiting = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            ends.add(id(leaf))
        waiting += [after for after, _ in node.next_functions]
    return ends
