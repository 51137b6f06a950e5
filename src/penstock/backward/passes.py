"""One pass of autograd through a stage whose outputs may be nested; errors show their shapes."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward

from penstock.errors import PenstockError, StageError, UsageError

Gradients: TypeAlias = tuple[Tensor | None, ...]

Pair: TypeAlias = tuple[Tensor, Tensor | None]
"""An output and its gradient; None for that stands for 1, for a scalar."""


def backward_to(
    pairs: Sequence[Pair], input_values: Sequence[Any], ends: Sequence[GradientEdge] = ()
) -> Gradients:
    """Runs backward once, and adds to the ``.grad`` of the weights on the way.

    Args:
        pairs: The outputs with their gradients.
        input_values: The inputs of the stage; they need not be leaves, nor tensors.
        ends: The only edges to go to; everywhere by default.

    Returns:
        One gradient of each input's shape, or None if the input needs or gets none. They do not include what
        was in an input's ``.grad`` before; afterwards every ``.grad`` of an input is None.
    """
    inputs = []
    for value in input_values:
        if isinstance(value, Tensor) and value.requires_grad:
            inputs.append(value)
            value.grad = None
            if not value.is_leaf:
                value.retain_grad()
    try:
        run_backward(pairs, ends)
        gradients: list[Tensor | None] = []
        for value in input_values:
            is_wanted = isinstance(value, Tensor) and value.requires_grad
            gradients.append(value.grad if is_wanted else None)
        return tuple(gradients)
    finally:
        for value in inputs:
            value.grad = None


def run_backward(pairs: Sequence[tuple[Any, Any]], ends: Sequence[GradientEdge] = ()) -> None:
    """Runs one pass of autograd that adds to ``.grad``.

    Args:
        pairs: Tensors or edges with their gradients; None stands for 1, for a scalar.
        ends: The only edges to go to; everywhere by default.
    """
    if not pairs:
        return
    outputs, grads = zip(*pairs, strict=True)
    if any(map(operator.is_, grads, repeat(None))):
        torch.autograd.backward(outputs, grads, inputs=ends or None)
        return
    # What `backward` checks before it calls this takes a quarter of a tiny stage's backward pass, and the
    # engine checks the gradients' shapes and types itself. Seen in torch 2.13.
    _engine_run_backward(
        outputs, grads, False, False, tuple(ends), allow_unreachable=True, accumulate_grad=True
    )


# ---- nested outputs and their gradients


def seeds_of(outputs: Any, grads: Any) -> list[Pair]:
    """Returns the outputs that have a gradient, with it.

    Args:
        outputs: A tensor, or nested tuples, lists and dicts of tensors and other values. Tensors that need no
            gradient are skipped.
        grads: The gradients, in the same structure, where tuples and lists may stand for each other. None for
            an output or a container says that it has no gradient. None in place of it all says that every
            output is a scalar, whose gradient is one.

    Raises:
        UsageError: ``grads`` has another structure than ``outputs``.
    """
    if grads is None:
        return [(output, _one(output)) for output in tensors_in(outputs)]
    if type(outputs) is list and type(grads) in (list, tuple) and len(outputs) == len(grads):
        # The fast way for flat lists, which is what a pipeline's stages pass.
        pairs: list[Pair] = []
        for output, grad in zip(outputs, grads, strict=True):
            if not isinstance(output, Tensor) or not isinstance(grad, Tensor | None):
                break
            if grad is not None and output.requires_grad:
                pairs.append((output, grad))
        else:
            return pairs
    return [pair for pair in _pairs(outputs, grads) if pair[1] is not None]


def _one(output: Tensor) -> Tensor | None:
    """Returns the gradient of a loss by itself; None for what autograd refuses as a loss."""
    is_loss = output.numel() == 1 and not output.is_complex()
    return torch.ones_like(output) if is_loss else None


def _pairs(output: Any, gradient: Any, path: str = "output") -> Iterator[Pair]:
    """Yields each tensor in ``output`` that requires a gradient, with the gradient at its place."""
    if isinstance(output, Tensor):
        if not output.requires_grad:
            return
        if not isinstance(gradient, Tensor | None):
            raise UsageError(
                f"{path} is a tensor, but its gradient is a {type(gradient).__name__}; "
                "give a tensor, or None where no gradient flows"
            )
        yield output, gradient
    elif gradient is not None and isinstance(output, Mapping | tuple | list):
        kind = Mapping if isinstance(output, Mapping) else (tuple, list)
        if not isinstance(gradient, kind):
            raise UsageError(
                f"{path} is a {type(output).__name__}, but its gradient is a {type(gradient).__name__}"
            )
        items, gradients = _items(output), _items(gradient)
        if items.keys() != gradients.keys():
            raise UsageError(
                f"{path} has the entries {sorted(map(str, items))}, "
                f"but its gradient has {sorted(map(str, gradients))}"
            )
        for key, value in items.items():
            yield from _pairs(value, gradients[key], f"{path}[{key!r}]")


def _items(value: Any) -> dict[Any, Any]:
    return dict(value) if isinstance(value, Mapping) else dict(enumerate(value))


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors that require a gradient from a nested value, in order."""
    if isinstance(value, Tensor):
        return [value] if value.requires_grad else []
    if isinstance(value, Mapping | tuple | list):
        return [tensor for item in _items(value).values() for tensor in tensors_in(item)]
    return []


# ---- errors


def raise_from(
    error: Exception, call: str, module: nn.Module, outputs: Any = None, grads: Any = None
) -> NoReturn:
    """Raises an error that says what autograd's error means, and shows the values that the call was given.

    Args:
        error: Autograd's error; one of ours is raised as it is.
        call: What failed.
        module: The stage's module. If it changed a tensor in place that backward needs, the message names it.
        outputs: What backward started from.
        grads: Their gradients.
    """
    if isinstance(error, PenstockError):
        raise error
    if names := list(_changed_in_place(module, str(error))):
        raise UsageError(
            f"{call} needs {' or '.join(names)} as forward left it, but it was changed in place since, as by "
            "the forward of a later microbatch; let the module make a new tensor instead of changing the old"
        ) from error
    values = (
        "" if outputs is None else f" for output={describe(outputs)}, gradient={describe(grads)}"
    )
    hint = _CHANGED if "modified by an inplace operation" in str(error) else ""
    raise StageError(f"{call} failed{values}: {error}{hint}") from error


_CHANGED = (
    " In a pipeline the forward of a later microbatch may run before this backward. If a module changes a "
    "buffer in place that it also computes with, let it make a new tensor instead of changing the old one."
)


def _changed_in_place(module: nn.Module, message: str) -> Iterator[str]:
    """Yields what of a module is the tensor that autograd says was changed: its type, shape and version."""
    for path, part in module.named_modules():
        held = {n: t for n, t in (part._buffers | vars(part)).items() if isinstance(t, Tensor)}
        for name, tensor in held.items():
            if (
                f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version};"
                in message
            ):
                yield f"{'.'.join(filter(None, (path, name)))} ({type(part).__name__})"


def describe(value: Any) -> str:
    """Returns a short text for a nested value that shows shapes instead of numbers."""
    if isinstance(value, Tensor):
        grad = ", requires_grad" if value.requires_grad else ""
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{grad}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {describe(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(describe, value)) + ")"
    return type(value).__name__
