"""Small models for the tests of Pipeline."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import Pipeline
from penstock._engine.placeholders import is_placeholder

WIDTH = 4
X = torch.linspace(-1, 1, 8 * WIDTH, dtype=torch.float64).reshape(8, WIDTH)
Y = X.flip(0)


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)


def sum_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target, reduction="sum")


def chain(layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)]
    return nn.Sequential(*blocks).double()


def restless() -> nn.Sequential:
    """Changes itself in training: counters, running means, random numbers."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
    return nn.Sequential(first, nn.Linear(WIDTH, WIDTH)).double()


class Attends(nn.Module):
    """Takes a mask and a scale by name."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        hidden: Tensor = self.lin(x) * scale
        return hidden if mask is None else hidden * mask


class Model(nn.Module):
    """A chain with names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Attends()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        hidden = self.embed(x, **kwargs)
        for block in self.blocks:
            hidden = block(hidden)
        head: Tensor = self.head(hidden)
        return head


STAGES = [["embed", "blocks.0"], ["blocks.1", "head"]]


def named() -> Model:
    torch.manual_seed(0)
    return Model().double()


def make(model: nn.Module | None = None, **options: Any) -> Pipeline:
    """A pipeline of two ranks and four microbatches, but for what is said otherwise."""
    defaults: dict[str, Any] = {"ranks": 2, "microbatches": 4, "loss_fn": mean_loss}
    return Pipeline(model or chain(), **(defaults | options))


def gradients(of: nn.Module | Pipeline) -> dict[str, Tensor]:
    """The gradients that are in this process, by name."""
    named = of.named_parameters()
    return {name: p.grad for name, p in named if p.grad is not None and not is_placeholder(p)}


def assert_same(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    gaps = {name: float((actual[name] - expected[name]).abs().max()) for name in expected}
    assert max(gaps.values()) < 1e-12, gaps


def two_steps(pipe: Any) -> list[Tensor]:
    """Losses and gradients of two steps of a pipeline, which is closed then."""
    with pipe:
        losses = [torch.tensor(pipe.step(X, target=Y).loss) for _ in range(2)]
        gradients = [p.grad.clone() for _, p in pipe.weights.here.named_parameters()]
    return [*losses, *gradients]


def assert_same_bits(numbers: list[Tensor], others: list[Tensor]) -> None:
    assert len(numbers) == len(others)
    assert all(map(torch.equal, numbers, others))


@contextmanager
def logged() -> Iterator[list[str]]:
    """What Penstock logs meanwhile; in a worker's task, where caplog does not reach."""
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("penstock")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
