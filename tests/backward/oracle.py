"""One check for every engine that splits a backward pass: its gradients are those of plain autograd.

A stage is run on two microbatches at once, with the halves in the order I0 I1 W1 W0 and nothing kept
between them but what the engine itself keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from penstock.backward import (
    SplitBackward,
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)

Gradients: TypeAlias = tuple[Tensor | None, ...]

TOLERANCE = 1e-12


@dataclass(frozen=True)
class Stage:
    """A stage of a pipeline and what flows in.

    ``inputs`` makes the leaves that one microbatch brings; ``forward`` runs the model on them, by
    default by calling it. ``unused`` says which output tensors get no gradient in which microbatch.
    """

    model: nn.Module
    inputs: Callable[[], list[Any]]
    forward: Callable[..., Any] | None = None
    unused: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def run(self, inputs: Sequence[Any]) -> Any:
        return (self.forward or self.model)(*inputs)


class Engine(Protocol):
    """A way to split a backward pass."""

    def forward(self, stage: Stage, inputs: Sequence[Any]) -> Any:
        """Runs the stage so that the halves can follow."""

    def input_half(
        self, output: Any, grads: Any, inputs: Sequence[Any], weights: Sequence[Tensor]
    ) -> tuple[Gradients, Any]:
        """Returns the inputs' gradients, and what the other half needs."""

    def weight_half(self, weights: Sequence[Tensor], state: Any) -> None:
        """Adds the weights' gradients to their ``.grad``."""


class GraphEngine:
    """The engine that walks the autograd graph."""

    def forward(self, stage: Stage, inputs: Sequence[Any]) -> Any:
        return stage.run(inputs)

    def input_half(
        self, output: Any, grads: Any, inputs: Sequence[Any], weights: Sequence[Tensor]
    ) -> tuple[Gradients, Any]:
        return stage_backward_input(output, grads, inputs, weights, accumulate_grad=False)

    def weight_half(self, weights: Sequence[Tensor], state: Any) -> None:
        stage_backward_weight(weights, state)


class FullEngine(GraphEngine):
    """No split: all in the first half."""

    def input_half(
        self, output: Any, grads: Any, inputs: Sequence[Any], weights: Sequence[Tensor]
    ) -> tuple[Gradients, Any]:
        return stage_backward(output, grads, inputs), None

    def weight_half(self, weights: Sequence[Tensor], state: Any) -> None:
        pass


class SplitEngine(GraphEngine):
    """The engine that keeps what heavy weights need."""

    def input_half(
        self, output: Any, grads: Any, inputs: Sequence[Any], weights: Sequence[Tensor]
    ) -> tuple[Gradients, Any]:
        split = SplitBackward(nn.ParameterList(weights))
        found, store = split.input_half(output, grads, inputs)
        return found, (split, store)

    def weight_half(self, weights: Sequence[Tensor], state: Any) -> None:
        split, store = state
        split.weight_half(store)


@dataclass(frozen=True)
class Result:
    """The gradients of a step: of each microbatch's inputs, and summed of each weight."""

    inputs: list[Gradients]
    weights: dict[str, Tensor | None]


def run_plain(stage: Stage, microbatches: Sequence[Sequence[Any]], seed: int) -> Result:
    """Trains the stage on all microbatches with `torch.autograd.backward`."""
    stage.model.zero_grad()
    dinputs = []
    for index, inputs in enumerate(microbatches):
        leaves = copies(inputs)
        torch.manual_seed(seed + index)
        output = stage.run(leaves)
        run_backward(output, seeds(stage, output, index))
        dinputs.append(tuple(x.grad if isinstance(x, Tensor) else None for x in leaves))
    return Result(dinputs, weight_grads(stage))


def run_backward(output: Any, grads: Any) -> None:
    """Runs backward from all outputs that have a gradient."""
    pairs = zip(tensors_in(output), tensors_in(grads), strict=True)
    used = [(out, grad) for out, grad in pairs if out is not None and grad is not None]
    if used:
        torch.autograd.backward([out for out, _ in used], [grad for _, grad in used])


def run_split(
    engine: Engine,
    stage: Stage,
    microbatches: Sequence[Sequence[Any]],
    seed: int,
    *,
    in_order: bool = False,
) -> Result:
    """Trains the stage on all microbatches: every F, every I, every W, by default from the last."""
    stage.model.zero_grad()
    weights = list(stage.model.parameters())
    flight = []
    for index, inputs in enumerate(microbatches):
        leaves = copies(inputs)
        torch.manual_seed(seed + index)
        output = engine.forward(stage, leaves)
        flight.append((output, seeds(stage, output, index), leaves))
        del output
    halves = []
    while flight:
        halves.append(engine.input_half(*flight.pop(0), weights))
    for _, state in halves if in_order else reversed(halves):
        engine.weight_half(weights, state)
    return Result([dinputs for dinputs, _ in halves], weight_grads(stage))


def check(engines: Mapping[str, Engine], make_stage: Callable[[], Stage], seed: int) -> None:
    """Compares engines with plain autograd on one fresh stage and two microbatches."""
    torch.manual_seed(seed)
    stage = make_stage()
    microbatches = [stage.inputs(), stage.inputs()]
    expected = run_plain(stage, microbatches, seed)
    for name, engine in engines.items():
        actual = run_split(engine, stage, microbatches, seed)
        for mine, plain in zip(actual.inputs, expected.inputs, strict=True):
            for index, pair in enumerate(zip(mine, plain, strict=True)):
                check_equal(*pair, f"{name}: input {index}")
        for weight, plain_grad in expected.weights.items():
            check_equal(actual.weights[weight], plain_grad, f"{name}: {weight}")


def check_bits(engine: Engine, make_stage: Callable[[], Stage], seed: int) -> None:
    """Like `check` with the W in microbatch order, and every bit the same."""
    torch.manual_seed(seed)
    stage = make_stage()
    microbatches = [stage.inputs(), stage.inputs()]
    expected = run_plain(stage, microbatches, seed)
    actual = run_split(engine, stage, microbatches, seed, in_order=True)
    torch.testing.assert_close(actual.inputs, expected.inputs, rtol=0, atol=0)
    torch.testing.assert_close(actual.weights, expected.weights, rtol=0, atol=0)


def check_equal(actual: Tensor | None, expected: Tensor | None, name: str) -> None:
    """Fails unless both are missing, or equal to 1e-12."""
    if actual is None or expected is None:
        assert actual is expected, f"{name}: {actual} where plain autograd has {expected}"
        return
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    difference = (actual.to_dense() - expected.to_dense()).abs().max().item()
    scale = max(1.0, expected.to_dense().abs().max().item())
    assert difference <= TOLERANCE * scale, f"{name} differs by {difference}"


def copies(inputs: Sequence[Any]) -> list[Any]:
    """Returns the inputs with fresh leaves in place of tensors."""
    return [
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for x in inputs
    ]


def seeds(stage: Stage, output: Any, microbatch: int) -> Any:
    """Returns random gradients in the structure of ``output``, None for the unused ones."""
    unused = stage.unused.get(microbatch, frozenset())
    generator = torch.Generator().manual_seed(microbatch)
    positions = iter(range(10**6))

    def seed(value: Any) -> Any:
        if isinstance(value, Tensor):
            used = next(positions) not in unused and value.requires_grad
            grad = torch.randn(value.shape, dtype=value.real.dtype, generator=generator)
            return grad.to(value.dtype) if used else None
        if isinstance(value, Mapping):
            return {key: seed(item) for key, item in value.items()}
        return [seed(item) for item in value] if isinstance(value, (tuple, list)) else None

    return seed(output)


def tensors_in(value: Any) -> Iterator[Tensor | None]:
    """Yields the tensors in a nested value, and None for all else."""
    if isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    else:
        yield value if isinstance(value, Tensor) else None


def weight_grads(stage: Stage) -> dict[str, Tensor | None]:
    """Returns each parameter's ``.grad`` by name."""
    return {name: weight.grad for name, weight in stage.model.named_parameters()}
