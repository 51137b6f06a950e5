"""Short words to make stages with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from tests.backward.blocks import Lambda
from tests.backward.oracle import Stage

WIDTH = 6


def x(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns a random input."""
    return torch.randn(*shape or (4, WIDTH), dtype=dtype, requires_grad=grad)


def ids() -> Tensor:
    return torch.randint(0, 11, (2, 5))


def linear(out: int = WIDTH, **options: Any) -> nn.Linear:
    return nn.Linear(WIDTH, out, dtype=torch.float64, **options)


def stage(
    model: nn.Module | Callable[..., Any], inputs: Callable[[], Any] = x, **members: Any
) -> Stage:
    """Returns a stage in float64 of a module, or of a function of members and inputs."""
    module = model if isinstance(model, nn.Module) else Lambda(model, **members)

    def make_inputs() -> list[Any]:
        made = inputs()
        return list(made) if isinstance(made, tuple) else [made]

    return Stage(module.double() if not module_is_complex(module) else module, make_inputs)


def module_is_complex(module: nn.Module) -> bool:
    return any(weight.is_complex() for weight in module.parameters())


def weight(*shape: int) -> Tensor:
    return torch.randn(*shape or (WIDTH, WIDTH), dtype=torch.float64) / 3


def looped(module: Callable[[Any], Any], value: Any, times: int = 3) -> Any:
    for _ in range(times):
        value = module(value)
    return value


def fresh_inputs(made: Stage) -> Stage:
    """Returns the stage with inputs that are no leaves, as a transport delivers them."""
    return Stage(made.model, made.inputs, lambda *inputs: made.model(*(v.clone() for v in inputs)))


def rerun(function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    return checkpoint.checkpoint(function, *inputs, use_reentrant=False, **options)
