"""Small models, and devices for which their costs are round numbers."""

from __future__ import annotations

from functools import partial
from time import thread_time
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from penstock import Pipeline
from penstock.plan import Device, Profile, UnitCost, UnitCosts, ValueCost, search
from penstock.testing import Case, plain_loop

SLOW = Device("slow", {"float32": 1e9}, 1e6, 1e12, compute_efficiency=1.0, launch=1e-9)
"""A billion operations per second, and memory that is never in the way."""


def unimproved() -> Any:
    """A context in which ``schedule="auto"`` takes the best plan that it lists, and searches no further."""
    return patch("penstock.plan.search", partial(search, seconds=0))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inputs = nn.Linear(width, 4 * width)
        self.outputs = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.outputs(nn.functional.gelu(self.inputs(self.norm(x))))
        return x + hidden


class Spins(nn.Linear):
    """Keeps its thread busy for so many seconds."""

    def __init__(self, seconds: float, width: int = 4) -> None:
        super().__init__(width, width)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        until = thread_time() + self.seconds
        while thread_time() < until:
            pass
        return super().forward(x)


class Tower(nn.Module):
    """Blocks, of which the head is heavier than the rest."""

    def __init__(self, blocks: int = 4, width: int = 16, head: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, head)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.head(x)
        return output


class Skips(nn.Module):
    """What the first block gives is also used at the end."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.Linear(width, width)
        self.middle = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        self.up = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        early = self.down(x)
        late = self.middle(early)
        output: Tensor = self.up(torch.cat([early, late], dim=-1))
        return output


def stepped(model: nn.Module, **options: Any) -> Pipeline:
    """A pipeline after a step, which has given the gradients of the plain model."""
    x, y = torch.randn(64, 16), torch.randn(64, 64)
    case = Case(model, (x,), y, nn.functional.mse_loss)
    model.zero_grad()
    with Pipeline(model, loss_fn=case.loss_fn, **options) as pipe:
        pipe.step(x, target=y)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(gradients, plain_loop(case)[1])
    return pipe


def profile(
    weights: list[float], held: float = 10.0, sizes: tuple[int, ...] = (1, 2, 4)
) -> Profile:
    """Costs of a chain whose units take so long for a sample."""

    def at(samples: int) -> UnitCosts:
        units = tuple(
            UnitCost(
                f"unit{index}", time, time, time, 2 * time,
                held=samples * held, stash=samples * held / 2, parameters=8, trained=8,
            )
            for index, time in enumerate(samples * weight for weight in weights)
        )  # fmt: skip
        values = tuple(
            ValueCost(f"unit{index}", index, (index + 1,), samples * 1.0)
            for index in range(len(weights) - 1)
        )
        return UnitCosts(samples, units, values)

    return Profile("paper", {size: at(size) for size in sizes}, latency=0.01, bandwidth=1e6)
