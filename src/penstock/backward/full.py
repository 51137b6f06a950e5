"""The full backward pass of a stage, whose output may be nested; errors show its shapes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward

from penstock.errors import PenstockError, StageError, UsageError

Gradients: TypeAlias = tuple[Tensor | None, ...]

Pair: TypeAlias = tuple[Tensor, Tensor | None]
"""An output and its gradient."""


def stage_backward(
    stage_output: Any,
    output_grads: Any,
    input_values: Sequence[Any],
    outputs_with_grads_idxs: Sequence[int] | None = None,
) -> Gradients:
    """Runs backward through a whole stage for one microbatch.

    The weights' gradients are added to their ``.grad``, as by ``backward()``.

    Args:
        stage_output: What the stage returned: a tensor, or nested tuples, lists and dicts of tensors and
            other values. Tensors that need no gradient are skipped.
        output_grads: The outputs' gradients, in the same structure and of the same shapes. None for an
            output or a container says that it has no gradient. None in place of it all says that every
            output is a scalar loss, whose gradient is one.
        input_values: The inputs of the stage; those that are no tensors are allowed.
        outputs_with_grads_idxs: Positions in ``stage_output`` and ``output_grads`` to use alone.

    Returns:
        One gradient of each input's shape, or None if the input needs or gets none. They do not include
        what was in an input's ``.grad`` before; afterwards every ``.grad`` of an input is None.

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


def backward_from(
    outputs: list[Tensor], grads: Sequence[Tensor | None] | None, inputs: Sequence[Any]
) -> Gradients:
    """Does `stage_backward` for a flat list of output tensors, and inputs that have no ``.grad`` yet.

    This is what a pipeline's stage calls for each microbatch, so it checks as little as it can.
    """
    try:
        run_backward(pairs_of(outputs, grads), ())
    except PenstockError:
        raise
    except Exception as error:
        # Checks the arguments more closely, which takes too long while nothing is wrong.
        seeds_of(outputs, grads)
        raise _told("stage_backward", {"output": outputs, "gradient": grads}, error) from error
    return tuple([tensor.grad if tensor.requires_grad else None for tensor in inputs])


def pairs_of(outputs: list[Tensor], grads: Sequence[Tensor | None] | None) -> list[Pair]:
    """Does `seeds_of` for a flat list of output tensors."""
    if grads is None:
        return [(output, None) for output in outputs if output.requires_grad]
    _check_length(outputs, grads, "output")
    return [
        (output, grad)
        for output, grad in zip(outputs, grads, strict=True)
        if grad is not None and output.requires_grad
    ]


def backward_through(
    pairs: Sequence[Pair], input_values: Sequence[Any], ends: Sequence[GradientEdge] = ()
) -> Gradients:
    """Runs backward from outputs with gradients, as `stage_backward` does.

    Args:
        pairs: The outputs with their gradients.
        input_values: The inputs of the stage.
        ends: The only edges to go to; everywhere by default.

    Returns:
        One gradient of each input's shape, or None.
    """
    inputs = [value for value in input_values if needs_gradient(value)]
    for value in inputs:
        _expose_grad(value)
    try:
        run_backward(pairs, ends)
        return tuple(value.grad if needs_gradient(value) else None for value in input_values)
    finally:
        for value in inputs:
            value.grad = None


def seeds_of(stage_output: Any, output_grads: Any) -> list[Pair]:
    """Returns the outputs that have a gradient, with it; None for ``output_grads`` means ones."""
    if output_grads is None:
        return [(output, None) for output in tensors_in(stage_output)]
    pairs = pair_with_gradients(stage_output, output_grads)
    return [(output, gradient) for output, gradient in pairs if gradient is not None]


def needs_gradient(value: Any) -> bool:
    """Says whether a value is a tensor that requires a gradient."""
    return isinstance(value, Tensor) and value.requires_grad


def _expose_grad(value: Tensor) -> None:
    value.grad = None
    if not value.is_leaf:
        value.retain_grad()


def run_backward(
    pairs: Sequence[tuple[Any, Any]], ends: Sequence[GradientEdge], *, again: bool = False
) -> None:
    """Runs one pass of autograd that adds to ``.grad``.

    Args:
        pairs: Tensors or edges with their gradients; None stands for 1, for a scalar.
        ends: The only edges to go to; everywhere by default.
        again: Whether to keep the graph for another pass.
    """
    if not pairs:
        return
    outputs, grads = zip(*pairs, strict=True)
    if any(grad is None for grad in grads):
        torch.autograd.backward(outputs, grads, again, inputs=ends or None)
    else:
        # What `backward` checks before it calls this takes a quarter of a tiny stage's backward pass, and the
        # engine checks the gradients' shapes and types itself. Seen in torch 2.13.
        _engine_run_backward(
            outputs, grads, again, False, tuple(ends), allow_unreachable=True, accumulate_grad=True
        )


# ---- nested outputs


def pair_with_gradients(output: Any, gradient: Any, path: str = "output") -> Iterator[Pair]:
    """Yields each tensor in ``output`` that requires a gradient, with the gradient at its place.

    Args:
        output: A tensor, or tuples, lists and dicts of tensors and other values, nested.
        gradient: The same structure. None in place of a tensor or of a whole container says that no
            gradient flows there. Tuples and lists may stand for each other.
        path: How messages call ``output``.

    Raises:
        UsageError: The structures differ; the message names the place.
    """
    if isinstance(output, Tensor):
        yield from _pair_tensor(output, gradient, path)
    elif gradient is None:
        return
    elif isinstance(output, Mapping):
        _check_keys(output, gradient, path)
        for key, value in output.items():
            yield from pair_with_gradients(value, gradient[key], f"{path}[{key!r}]")
    elif isinstance(output, (tuple, list)):
        _check_length(output, gradient, path)
        for index, value in enumerate(output):
            yield from pair_with_gradients(value, gradient[index], f"{path}[{index}]")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors that require a gradient from a nested value, in order."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


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


def explained(call: str, **values: Any) -> contextlib.AbstractContextManager[None]:
    """Turns what autograd raises inside into a StageError that shows the values of the call."""
    return _Explained(call, values)


class _Explained:
    def __init__(self, call: str, values: dict[str, Any]) -> None:
        self._call = call
        self._values = values

    def __enter__(self) -> None:
        """Nothing to do before something fails."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, PenstockError):
            raise _told(self._call, self._values, error) from error


def _told(call: str, values: Mapping[str, Any], error: Exception) -> StageError:
    shown = ", ".join(f"{name}={describe(value)}" for name, value in values.items())
    hint = _CHANGED if "modified by an inplace operation" in str(error) else ""
    return StageError(f"{call} failed for {shown}: {error}{hint}")


_CHANGED = (
    " In a pipeline the forward of a later microbatch may run before this backward. If a module changes a "
    "buffer in place that it also computes with, let it make a new tensor instead of changing the old one."
)


def _pair_tensor(output: Tensor, gradient: Any, path: str) -> Iterator[Pair]:
    if not output.requires_grad:
        return
    if not isinstance(gradient, Tensor | None):
        raise UsageError(
            f"{path} is a tensor, but its gradient is a {type(gradient).__name__}; "
            "give a tensor, or None where no gradient flows"
        )
    yield output, gradient


def _check_keys(output: Mapping[Any, Any], gradient: Any, path: str) -> None:
    if not isinstance(gradient, Mapping):
        raise UsageError(f"{path} is a dict, but its gradient is a {type(gradient).__name__}")
    if output.keys() != gradient.keys():
        raise UsageError(
            f"{path} has the keys {sorted(map(str, output))}, "
            f"but its gradient has {sorted(map(str, gradient))}"
        )


def _check_length(output: tuple[Any, ...] | list[Any], gradient: Any, path: str) -> None:
    if not isinstance(gradient, (tuple, list)):
        raise UsageError(
            f"{path} is a {type(output).__name__}, but its gradient is a {type(gradient).__name__}"
        )
    if len(output) != len(gradient):
        raise UsageError(f"{path} has {len(output)} entries, but its gradient has {len(gradient)}")
