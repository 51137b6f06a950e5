"""One check for every way to compute a stage's gradients: they are those of plain autograd.

A stage runs two microbatches at once, and each way keeps nothing between its halves but what they hand on.
Compared are the outputs, the gradients of inputs and weights, which of them are None, what hooks on weights
see, and the buffers that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from penstock import PipelineStage
from penstock.backward import SplitBackward
from penstock.pipelining._backward import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from tests.backward.graphs import Make, Stage

Gradients: TypeAlias = tuple[Tensor | None, ...]


class Forward(NamedTuple):
    """A microbatch after its forward: the output with random gradients, and the inputs."""

    output: Any
    grads: Any
    inputs: list[Any]


Way = Callable[[Stage, list[Forward]], list[Gradients]]
"""Runs the backward of all microbatches, taking them off the list; returns their inputs' gradients."""


def plain(stage: Stage, forwards: list[Forward]) -> list[Gradients]:
    for output, grads, _ in forwards:
        pairs = zip(tensors_in(output), tensors_in(grads), strict=True)
        used = [(out, grad) for out, grad in pairs if out is not None and grad is not None]
        if used:
            torch.autograd.backward([out for out, _ in used], [grad for _, grad in used])
    return [tuple(getattr(value, "grad", None) for value in one.inputs) for one in forwards]


def flat(forward: Forward) -> tuple[list[Tensor], list[Tensor | None], list[Any]]:
    """A microbatch with its tensors in lists, as `SplitBackward` takes them."""
    pairs = zip(tensors_in(forward.output), tensors_in(forward.grads), strict=True)
    used = [(output, grad) for output, grad in pairs if output is not None]
    return [output for output, _ in used], [grad for _, grad in used], forward.inputs


def full(stage: Stage, forwards: list[Forward]) -> list[Gradients]:
    split = SplitBackward(stage)
    return [split.full(*flat(forwards.pop(0))) for _ in (*forwards,)]


def halves(stage: Stage, forwards: list[Forward], *, last_first: bool = False) -> list[Gradients]:
    """Runs the inputs' half of each microbatch, then the weights'."""
    split = SplitBackward(stage)
    results = [split.input_half(*flat(forwards.pop(0))) for _ in (*forwards,)]
    for _, pending in reversed(results) if last_first else results:
        if stage.waits is not None:
            assert len(pending) == stage.waits
        split.weight_half(pending)
        assert len(pending) == 0
    return [grads for grads, _ in results]


def halves_last_first(stage: Stage, forwards: list[Forward]) -> list[Gradients]:
    return halves(stage, forwards, last_first=True)


def functions(stage: Stage, forwards: list[Forward]) -> list[Gradients]:
    """By the functions of torch's names."""
    weights = list(stage.parameters())
    results = [stage_backward_input(*forwards.pop(0), weights) for _ in (*forwards,)]
    for _, groups in results:
        stage_backward_weight(weights, groups)
    return [grads for grads, _ in results]


def function(stage: Stage, forwards: list[Forward]) -> list[Gradients]:
    return [stage_backward(*forwards.pop(0)) for _ in (*forwards,)]


class Staged:
    """The way of a pipeline's stage, which runs the forwards too.

    Args:
        module: what it runs.
        options: those of `PipelineStage`, such as ``compile=``.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        self.stage = PipelineStage(module, 1, 2, **options)
        self._forwards = 0

    def call(self, *inputs: Any) -> Any:
        self._forwards += 1
        return self.stage.forward(self._forwards, inputs)

    def __call__(self, stage: Stage, forwards: list[Forward]) -> list[Gradients]:
        results = []
        numbers = range(self._forwards - len(forwards) + 1, self._forwards + 1)
        for number in numbers:
            outputs, grads, inputs = flat(forwards.pop(0))
            pairs = zip(outputs, grads, strict=True)
            roots = [grad for output, grad in pairs if output.requires_grad]
            gradients = iter(self.stage.backward_input(number, roots))
            results.append(tuple(next(gradients) if learns(value) else None for value in inputs))
        for number in numbers:
            self.stage.backward_weight(number)
        return results


def learns(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


WAYS: dict[str, Way] = {
    "full": full,
    "halves": halves,
    "functions": functions,
    "function": function,
}


def trained(
    stage: Stage,
    way: Way = plain,
    *,
    seed: int = 0,
    hooks: bool = False,
) -> dict[str, Any]:
    """What two microbatches give, by name, and what hooks on the weights saw."""
    torch.manual_seed(seed)
    microbatches = [stage.inputs(), stage.inputs()]
    before = {name: buffer.clone() for name, buffer in stage.named_buffers()}
    stage.zero_grad()
    calls: dict[str, list[Tensor]] = {}
    handles = list(_watch(stage, calls)) if hooks else []
    call = way.call if isinstance(way, Staged) else stage
    forwards, outputs = [], []
    for index, inputs in enumerate(microbatches):
        output = call(*inputs)
        outputs += [t if t is None else t.detach().clone() for t in tensors_in(output)]
        forwards.append(Forward(output, _grads(stage, output, index), inputs))
        del output
    gradients = way(stage, forwards)
    for handle in handles:
        handle.remove()
    buffers = {name: buffer.clone() for name, buffer in stage.named_buffers()}
    for name, buffer in stage.named_buffers():
        buffer.copy_(before[name])  # for the next way
    weights = {name: parameter.grad for name, parameter in stage.named_parameters()}
    return {
        "outputs": outputs, "inputs": gradients, "weights": weights, "hooks": calls, "buffers": buffers,
    }  # fmt: skip


def check(
    make: Make, way: Way, *, seed: int = 0, hooks: bool = False, tolerance: float = 0.0
) -> None:
    """Compares a way with plain autograd on one stage; every bit, unless there is a tolerance."""
    torch.manual_seed(seed)
    stage = make()
    expected = trained(stage, seed=seed, hooks=hooks)
    actual = trained(stage, way, seed=seed, hooks=hooks)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def _watch(stage: Stage, calls: dict[str, list[Tensor]]) -> Iterator[Any]:
    # Where a gradient ends, a plain backward pass calls hooks too, with None.
    def halve(name: str, grad: Tensor | None) -> Tensor | None:
        if grad is None:
            return None
        calls.setdefault(f"{name} hook", []).append(grad.detach().clone())
        return grad / 2

    def note(name: str, leaf: Tensor) -> None:
        if leaf.grad is not None:
            calls.setdefault(f"{name} after", []).append(leaf.grad.detach().clone())

    for name, parameter in stage.named_parameters():
        if parameter.requires_grad:
            yield parameter.register_hook(partial(halve, name))
            yield parameter.register_post_accumulate_grad_hook(partial(note, name))


def _grads(stage: Stage, output: Any, microbatch: int) -> Any:
    """Random gradients in the structure of the output, None for the unused ones."""
    unused = stage.unused.get(microbatch, ())
    generator = torch.Generator().manual_seed(microbatch)
    positions = count()

    def grad_of(value: Any) -> Any:
        if isinstance(value, Tensor):
            used = next(positions) not in unused and value.requires_grad
            grad = torch.randn(value.shape, dtype=torch.float64, generator=generator)
            return grad.to(value.dtype) if used else None
        if isinstance(value, Mapping):
            return {key: grad_of(item) for key, item in value.items()}
        return [grad_of(item) for item in value] if isinstance(value, (tuple, list)) else None

    return grad_of(output)


def tensors_in(value: Any) -> Iterator[Tensor | None]:
    """Yields the tensors in a nested value, and None for all else."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    else:
        yield value if isinstance(value, Tensor) else None
