"""Norms and clipping of a pipeline, against torch's own on the same parameters."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from penstock import Pipeline
from penstock.errors import NonFiniteError, UsageError


def pipeline(dtype: torch.dtype = torch.float32) -> tuple[Pipeline, list[nn.Parameter]]:
    """A pipeline with gradients of norm 3, 4 and 0, one parameter without, and copies of them all."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(dtype)
    same = copy.deepcopy(model)
    grads = [torch.full((3, 3), 1.0), torch.tensor([4.0, 0.0, 0.0]), torch.zeros(3, 3), None]
    for module in (model, same):
        for parameter, grad in zip(module.parameters(), grads, strict=True):
            parameter.grad = None if grad is None else grad.to(dtype, copy=True)
    return Pipeline(model, ranks=2), list(same.parameters())


@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, 0.5, math.inf, -math.inf, 0.0])
def test_the_norm_is_torchs(order: float) -> None:
    pipe, same = pipeline(torch.bfloat16 if order == 2.0 else torch.float32)
    expected = nn.utils.get_total_norm([p.grad.double() for p in same if p.grad is not None], order)
    assert pipe.weights.grad_norm(order) == pytest.approx(float(expected), rel=1e-6)
    if order in (2.0, math.inf, 0.0):
        norms = [float(torch.linalg.vector_norm(p.grad, order)) for p in same if p.grad is not None]
        names = ("0.weight", "0.bias", "1.weight")
        assert pipe.weights.grad_norms(order) == pytest.approx(dict(zip(names, norms, strict=True)))


@pytest.mark.parametrize("largest", [0.0, 1.0, 5.0, 100.0, float("inf")])
def test_clipping_is_torchs(largest: float) -> None:
    pipe, same = pipeline()
    assert pipe.clip_grad_norm_(largest) == pytest.approx(5.0)
    nn.utils.clip_grad_norm_(same, largest)
    for one, other in zip(pipe.parameters(), same, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize(("value", "order"), [(math.inf, 2.0), (math.nan, math.inf)])
def test_what_is_no_number_can_be_an_error(value: float, order: float) -> None:
    pipe, _ = pipeline()
    first = next(pipe.parameters())
    assert first.grad is not None
    first.grad[2] = value
    assert not math.isfinite(pipe.weights.grad_norm(order))
    with pytest.raises(NonFiniteError, match=r"^after step 0: .* cannot be clipped; look for"):
        pipe.clip_grad_norm_(1.0, order, error_if_nonfinite=True)
    assert first.grad[0, 0] == 1


def test_no_gradients_have_no_norm_and_no_limit_is_below_zero() -> None:
    pipe, _ = pipeline()
    for largest in (-1.0, math.nan):
        with pytest.raises(UsageError, match="max_norm"):
            pipe.clip_grad_norm_(largest)
    pipe.zero_grad()
    assert pipe.weights.grad_norm() == 0.0
    assert pipe.weights.grad_norms() == {}


def test_a_sum_over_weights_counts_what_it_was_given() -> None:
    pipe, others = pipeline()
    first, *rest = pipe.parameters()
    assert first.grad is not None
    pair = torch.stack([first.grad.sum(), first.detach().sum()])
    assert pipe.weights.sum({first: pair}).tolist() == pytest.approx(pair.tolist())
    assert pipe.weights.sum(dict.fromkeys(rest, 2)) == 6
    assert pipe.weights.sum({}) == 0
    with pytest.raises(UsageError, match="one that is not the model's"):
        pipe.weights.sum({others[0]: 1.0})
