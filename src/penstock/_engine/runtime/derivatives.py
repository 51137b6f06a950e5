"""A loss that differentiates the model's output: refused where that would miss the part of other stages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from penstock._engine.values import tensors_in
from penstock.errors import UsageError


def derivatives_checked(
    output: Any, inputs: Any, arrived: Sequence[Tensor]
) -> AbstractContextManager[Any]:
    """Return a context that refuses derivatives by outputs from which other stages compute as well.

    Args:
        output: the model's output in the last stage.
        inputs: the values that came from other stages.
        arrived: their leaves.
    """
    given = {*map(_memory_of, tensors_in(inputs))}
    leaves = {id(leaf) for leaf in arrived}

    def is_made_here(tensor: Tensor) -> bool:
        """Return whether it was made in this stage, and so was all that depends on it."""
        return _memory_of(tensor) not in given and not leaves.isdisjoint(_ends_of(tensor))

    others = {id(tensor) for tensor in tensors_in(output) if leaves and not is_made_here(tensor)}
    return _Refusing(others) if others else nullcontext()


class _Refusing(TorchFunctionMode):
    """Refuses derivatives by some tensors, given by their ids."""

    def __init__(self, tensors: Collection[int]) -> None:
        super().__init__()
        self._tensors = tensors

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.autograd.grad, Tensor.backward):
            inputs = kwargs.get("inputs", args[1] if func is torch.autograd.grad else ())
            for tensor in tensors_in(inputs):
                if id(tensor) in self._tensors:
                    raise UsageError(
                        f"loss_fn differentiates by an output of the model, of shape {list(tensor.shape)}, "
                        "that the last stage was given, and the derivative would miss what the other stages "
                        "compute from it. Compute the derivative in the model's forward, in a module that is "
                        "placed as a whole, or put all that depends on this output into one stage: stages="
                    )
        return func(*args, **kwargs)


def _memory_of(tensor: Tensor) -> int:
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    return tensor.untyped_storage().data_ptr() if is_plain else id(tensor)


def _ends_of(tensor: Tensor) -> set[int]:
    """Return the ids of the leaves that a tensor was computed from."""
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
