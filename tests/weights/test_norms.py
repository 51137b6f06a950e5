"""Norms and clipping, against torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from penstock.errors import NonFiniteError, UsageError
from penstock.weights import gradient_norms, scale_gradients, total_norm

ORDERS = (2.0, 1.0, 3.0, 0.5, math.inf, -math.inf, 0.0)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Three with a gradient of norm 3, 4 and 0, and one without."""
    grads = [torch.full((9,), 1.0), torch.full((2, 2), 2.0), torch.zeros(3), None]
    weights = [nn.Parameter(torch.zeros(1 if g is None else g.shape, dtype=dtype)) for g in grads]
    for parameter, grad in zip(weights, grads, strict=True):
        parameter.grad = None if grad is None else grad.to(dtype)
    return weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_there_is_a_norm_for_each_gradient(dtype: torch.dtype) -> None:
    norms = gradient_norms(parameters(dtype))
    assert norms.tolist() == [3.0, 4.0, 0.0]
    assert norms.dtype is torch.float64


def test_no_parameters_have_no_norms() -> None:
    assert total_norm(gradient_norms([])) == 0.0


@pytest.mark.parametrize("order", ORDERS)
def test_the_total_is_torchs(order: float) -> None:
    expected = torch.nn.utils.clip_grad_norm_(parameters(), 1.0, norm_type=order)
    assert total_norm(gradient_norms(parameters(), order), order) == pytest.approx(float(expected))


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_no_number_can_be_an_error(value: float, order: float) -> None:
    weights = parameters()
    assert weights[0].grad is not None
    weights[0].grad[2] = value
    norms = gradient_norms(weights, order)
    assert not math.isfinite(total_norm(norms, order))
    with pytest.raises(NonFiniteError, match=r"^after step 3: .* cannot be clipped; look for"):
        total_norm(norms, order, error_if_nonfinite=True, steps=3)


@pytest.mark.parametrize("largest", [0.0, 1.0, 5.0, 100.0, float("inf")])
def test_clipping_is_torchs(largest: float) -> None:
    mine, expected = parameters(), parameters()
    scale_gradients(mine, 5.0, largest)
    torch.nn.utils.clip_grad_norm_(expected, largest)
    for one, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("largest", [-1.0, math.nan])
def test_no_limit_below_zero(largest: float) -> None:
    with pytest.raises(UsageError, match="max_norm"):
        scale_gradients(parameters(), 5.0, largest)
