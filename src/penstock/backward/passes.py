"""One pass of autograd through a stage; errors show the shapes of what it was given."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward

from penstock.backward.nodes import edge_of
from penstock.errors import PenstockError, StageError, UsageError

Gradients: TypeAlias = tuple[Tensor | None, ...]


def seeds_of(outputs: Any, grads: Any) -> tuple[list[GradientEdge], list[Tensor | None]]:
    """The edges of outputs that have a gradient, and their gradients; None for one stands for 1.

    Args:
        outputs: a tensor or an edge, or a list or tuple of them. Those that need no gradient are skipped.
        grads: a gradient or None for each of them; None in place of it all says that every output is a
            scalar, whose gradient is one.
    """
    if isinstance(outputs, _ENDS):
        outputs, grads = (outputs,), None if grads is None else (grads,)
    edges: list[GradientEdge] = []
    seeds: list[Tensor | None] = []
    for output, grad in zip(outputs, outputs if grads is None else grads, strict=True):
        if grad is None:
            continue
        if type(output) is GradientEdge:
            edges.append(output)
            seeds.append(None if grads is None else grad)
        elif output.requires_grad:
            edges.append(edge_of(output))
            seeds.append(_one(output) if grads is None else grad)
    return edges, seeds


_ENDS = (GradientEdge, Tensor)


def _one(output: Tensor) -> Tensor | None:
    """The gradient of a loss by itself; None for what autograd refuses as a loss."""
    is_loss = output.numel() == 1 and not output.is_complex()
    return torch.ones_like(output) if is_loss else None


def backward_to(
    roots: Sequence[GradientEdge],
    seeds: Sequence[Tensor | None],
    input_values: Sequence[Any] = (),
    ends: Sequence[GradientEdge] = (),
) -> Gradients:
    """Run one pass of autograd, and add to the ``.grad`` of the weights on the way.

    Args:
        roots: the edges that it starts from.
        seeds: their gradients; None stands for 1, for a scalar.
        input_values: the inputs of the stage; they need not be leaves, nor tensors.
        ends: the only edges to go to; everywhere by default.

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
        if any(map(operator.is_, seeds, repeat(None))):
            torch.autograd.backward(roots, seeds, inputs=ends or None)
        elif roots:
            # What `backward` checks before it calls this takes a quarter of a tiny stage's backward pass, and
            # the engine checks the gradients' shapes and types itself. Of torch 2.13:
            # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/autograd/__init__.py#L255
            _engine_run_backward(
                tuple(roots),
                tuple(seeds),
                False,
                False,
                tuple(ends),
                allow_unreachable=True,
                accumulate_grad=True,
            )
        if len(inputs) == len(input_values):
            return tuple(map(_GRAD, inputs))
        return tuple(
            [
                value.grad if isinstance(value, Tensor) and value.requires_grad else None
                for value in input_values
            ]
        )
    finally:
        for value in inputs:
            value.grad = None


_GRAD = attrgetter("grad")


# ---- errors


def raise_from(
    error: Exception, call: str, module: nn.Module, outputs: Any = None, grads: Any = None
) -> NoReturn:
    """Raise an error that says what autograd's error means, and shows the values that the call was given.

    Args:
        error: autograd's error; one of ours is raised as it is.
        call: what failed.
        module: the stage's module. If it changed a tensor in place that backward needs, the message names it.
        outputs: what backward started from.
        grads: their gradients.
    """
    if not isinstance(error, PenstockError) and outputs is not None:
        _check_seeds(outputs, grads)
    if names := _changed_in_place(module, str(error)):
        raise UsageError(
            f"{call} needs {' or '.join(names)} as forward left it, but it was changed in place since, as by "
            "the forward of a later microbatch; let the module make a new tensor instead of changing the old"
        ) from error
    if isinstance(error, PenstockError):
        raise error
    values = (
        ""
        if outputs is None
        else f" for output={shapes_text(outputs)}, gradient={shapes_text(grads)}"
    )
    hint = _CHANGED if "modified by an inplace operation" in str(error) else ""
    raise StageError(f"{call} failed{values}: {error}{hint}") from error


def _check_seeds(outputs: Any, grads: Any) -> None:
    """Check that outputs are flat, and that the gradients are one for each of them.

    Raises:
        UsageError: they are not.
    """
    values = {"outputs": outputs} if grads is None else {"outputs": outputs, "gradients": grads}
    if isinstance(outputs, _ENDS):
        values = {name: [value] for name, value in values.items()}
    for what, listed in values.items():
        kinds = _ENDS if what == "outputs" else (Tensor, type(None))
        if not isinstance(listed, list | tuple):
            raise UsageError(f"{what}: a {type(listed).__name__}; give a tensor, {_FLAT}")
        for place, value in enumerate(listed):
            if not isinstance(value, kinds):
                raise UsageError(
                    f"{what}[{place}] is a {type(value).__name__}; give a tensor, {_FLAT}"
                )
    if len({*map(len, values.values())}) > 1:
        raise UsageError(
            f"{len(outputs)} outputs, but {len(grads)} gradients; give one, or None, for each"
        )


_FLAT = "or a flat list of tensors: of a nested value, list the tensors in it"

_CHANGED = (
    " In a pipeline the forward of a later microbatch may run before this backward. If a module changes a "
    "buffer in place that it also computes with, let it make a new tensor instead of changing the old one."
)


def _changed_in_place(module: nn.Module, message: str) -> list[str]:
    """Return what of a module may be the tensor that autograd says was changed: its type, shape and version.

    If none has its shape, a view of any of the same type and version may be it.
    """
    if "is at version" not in message:
        return []
    named: list[tuple[str, Tensor]] = []
    for path, part in module.named_modules():
        held = {n: t for n, t in (part._buffers | vars(part)).items() if isinstance(t, Tensor)}
        kind = type(part).__name__
        named += [(f"{'.'.join(filter(None, (path, n)))} ({kind})", t) for n, t in held.items()]
    same = [
        (name, tensor)
        for name, tensor in named
        if f"[{tensor.type()} [" in message and f"] is at version {tensor._version};" in message
    ]
    exact = [name for name, tensor in same if f" {list(tensor.shape)}] is" in message]
    return exact or [f"a view of {name}" for name, _ in same]


def shapes_text(value: Any) -> str:
    """A short text for a value that shows shapes instead of numbers."""
    if isinstance(value, Tensor):
        grad = ", requires_grad" if value.requires_grad else ""
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{grad}"
    if isinstance(value, GradientEdge):
        return f"what {value.node.name()} gave"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(shapes_text, value)) + ")"
    return type(value).__name__
