"""The full backward pass of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from penstock.backward.structure import Pair, explained, pair_with_gradients, tensors_in

Gradients: TypeAlias = tuple[Tensor | None, ...]


def stage_backward(
    stage_output: Any,
    output_grads: Any,
    input_values: Sequence[Any],
    outputs_with_grads_idxs: Sequence[int] | None = None,
) -> Gradients:
    """Runs backward through a whole stage for one microbatch.

    The weights' gradients are added to their ``.grad``, as by ``backward()``.

    Args:
        stage_output: What the stage returned: a tensor, or nested tuples, lists and dicts of
            tensors and other values. Tensors that need no gradient are skipped.
        output_grads: The outputs' gradients, in the same structure and of the same shapes. None
            for an output or a container says that it has no gradient. None in place of it all
            says that every output is a scalar loss, whose gradient is one.
        input_values: The inputs of the stage; those that are no tensors are allowed.
        outputs_with_grads_idxs: Positions in ``stage_output`` and ``output_grads`` to use alone.

    Returns:
        One gradient of each input's shape, or None where it needs or gets none. They do not
        contain what stood in an input's ``.grad``, and every ``.grad`` of an input is None then.

    Raises:
        UsageError: ``output_grads`` has another structure than ``stage_output``.
        StageError: Autograd failed; the cause is chained.
    """
    if outputs_with_grads_idxs is not None:
        stage_output = [stage_output[i] for i in outputs_with_grads_idxs]
        output_grads = [output_grads[i] for i in outputs_with_grads_idxs]
    pairs = seeds_of(stage_output, output_grads)
    with explained("stage_backward", output=stage_output, gradient=output_grads):
        return backward_through(pairs, input_values)


def backward_through(
    pairs: Sequence[Pair], input_values: Sequence[Any], ends: Sequence[GradientEdge] = ()
) -> Gradients:
    """Runs backward from outputs with gradients, as `stage_backward` does.

    Args:
        pairs: The outputs with their gradients.
        input_values: The inputs of the stage.
        ends: Where to go, and nowhere else; everywhere by default.

    Returns:
        One gradient of each input's shape, or None.
    """
    inputs = [value for value in input_values if _needs_gradient(value)]
    for value in inputs:
        _expose_grad(value)
    try:
        _run_backward(pairs, ends)
        return tuple(value.grad if _needs_gradient(value) else None for value in input_values)
    finally:
        for value in inputs:
            value.grad = None


def seeds_of(stage_output: Any, output_grads: Any) -> list[Pair]:
    """Returns the outputs that have a gradient, with it; None for ``output_grads`` means ones."""
    if output_grads is None:
        return [(output, None) for output in tensors_in(stage_output)]
    pairs = pair_with_gradients(stage_output, output_grads)
    return [(output, gradient) for output, gradient in pairs if gradient is not None]


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _expose_grad(value: Tensor) -> None:
    value.grad = None
    if not value.is_leaf:
        value.retain_grad()


def _run_backward(pairs: Sequence[Pair], ends: Sequence[GradientEdge]) -> None:
    if pairs:
        outputs, grads = zip(*pairs, strict=True)
        torch.autograd.backward(outputs, grads, inputs=ends or None)
