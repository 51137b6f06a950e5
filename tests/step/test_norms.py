"""Norms and clipping, against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from penstock.step import scale_gradients, squared_norms


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Three with a gradient of norm 3, 4 and 0, and one without."""
    grads = [torch.full((9,), 1.0), torch.full((2, 2), 2.0), torch.zeros(3), None]
    made = [nn.Parameter(torch.zeros(1 if g is None else g.shape, dtype=dtype)) for g in grads]
    for parameter, grad in zip(made, grads, strict=True):
        parameter.grad = None if grad is None else grad.to(dtype)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_squared_norms(dtype: torch.dtype) -> None:
    found = squared_norms(parameters(dtype))
    assert found.tolist() == [9.0, 16.0, 0.0, 0.0]
    assert found.dtype is torch.float64


def test_no_parameters_have_no_norms() -> None:
    assert squared_norms([]).shape == (0,)


@pytest.mark.parametrize("largest", [0.0, 1.0, 5.0, 100.0, float("inf")])
def test_clipping_is_torchs(largest: float) -> None:
    mine, expected = parameters(), parameters()
    scale_gradients(mine, 5.0, largest)
    torch.nn.utils.clip_grad_norm_(expected, largest)
    assert all(torch.allclose(g(a), g(b)) for a, b in zip(mine, expected, strict=True))


def g(parameter: nn.Parameter) -> Tensor:
    return torch.zeros(()) if parameter.grad is None else parameter.grad


def test_clipping_happens_in_place() -> None:
    made = parameters()
    before = made[0].grad
    scale_gradients(made, 5.0, 1.0)
    assert made[0].grad is before
