"""A vision model with batch norms, and its statistics in a plain loop."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock import Pipeline

SIZES = {1: (3,), 2: (3, 5, 5), 3: (3, 2, 3, 3)}
"""What a sample is like, by the dimensions of its norms."""


class Residual(nn.Module):
    """A convolution and a norm, twice; the same norm, if it is shared."""

    def __init__(self, *, shared: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4, momentum=None)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.again = self.norm if shared else nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            found: Tensor = checkpoint(self.body, x, use_reentrant=False)
            return found
        return self.body(x)

    def body(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(x)))
        out: Tensor = x + self.again(self.second(hidden))
        return out


def vision(**options: bool) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        blocks = [Residual(**options) for _ in range(2)]
        head = nn.Sequential(nn.Flatten(), nn.Linear(36, 2), nn.BatchNorm1d(2, affine=False))
        return nn.Sequential(stem, *blocks, head).double()


def images(samples: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, *SIZES[2], generator=generator, dtype=torch.float64)
    return x, torch.randn(samples, 2, generator=generator, dtype=torch.float64)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)


def norms(module: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in module.named_modules() if hasattr(m, "running_mean")}


def trained_plain(
    model: nn.Module, sizes: list[int], steps: int, *, whole: bool = False
) -> dict[str, Tensor]:
    """The state after steps of the unsplit model that runs these microbatches one after the other.

    With ``whole``, statistics come from copies of the norms that see all microbatches' inputs at once.
    """
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    x, y = images(sum(sizes))
    for _ in range(steps):
        optimizer.zero_grad()
        before = copy.deepcopy(norms(model))
        seen = _watched(model, before if whole else {})
        for part, target in zip(x.split(sizes), y.split(sizes), strict=True):
            (loss_fn(model(part), target) * (len(part) / len(x))).backward()
        _take_over(norms(model), before, seen, len(sizes))
        optimizer.step()
    return dict(model.state_dict())


def _watched(model: nn.Module, copies: dict[str, nn.Module]) -> dict[str, list[Tensor]]:
    """What goes into each norm, until its next call in a later step."""
    seen: dict[str, list[Tensor]] = {name: [] for name in copies}
    for name in copies:
        norm: Any = model.get_submodule(name)
        norm._forward_pre_hooks.clear()
        norm.register_forward_pre_hook(
            lambda _, args, name=name: seen[name].append(args[0].detach())
        )
    return seen


def _take_over(
    real: dict[str, nn.Module], copies: dict[str, nn.Module], seen: dict[str, list[Tensor]], m: int
) -> None:
    for name, inputs in seen.items():
        calls = len(inputs) // m
        for call in range(calls):
            copies[name](torch.cat(inputs[call::calls]))
        parameters = dict(real[name].named_parameters())
        state = {k: v for k, v in copies[name].state_dict().items() if k not in parameters}
        real[name].load_state_dict(state, strict=False)


def trained(
    group: Any = None, *, samples: int = 8, steps: int = 5, model: Any = None, **options: Any
) -> dict[str, Any]:
    """The state after steps of a pipeline, as lists; also a worker's task."""
    x, y = images(samples)
    with Pipeline(model or vision(), loss_fn=loss_fn, group=group, **options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), 0.05)
        for _ in range(steps):
            optimizer.zero_grad()
            pipe.step(x, target=y)
            optimizer.step()
        return {name: tensor.tolist() for name, tensor in pipe.state_dict().items()}
