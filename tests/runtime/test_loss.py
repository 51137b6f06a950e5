"""The loss of a microbatch, and what it is refused for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import UsageError
from penstock.runtime.loss import Loss, zero_loss

MEAN = Loss(nn.functional.mse_loss)
SUM = Loss(lambda output, target: nn.functional.mse_loss(output, target, reduction="sum"), "sum")


@pytest.mark.parametrize("loss", [MEAN, SUM], ids=lambda loss: loss.reduction)
def test_the_parts_add_up_to_the_loss_of_the_batch(loss: Loss) -> None:
    output, target = torch.randn(7, 2), torch.randn(7, 2)
    sizes = [3, 3, 1]
    parts = zip(output.split(sizes), target.split(sizes), strict=True)
    shares = loss.weights(loss.counts(sizes, ())).shares
    total = sum(
        share * float(loss.of_microbatch(*part)) for share, part in zip(shares, parts, strict=True)
    )
    assert total == pytest.approx(float(loss.function(output, target)))


def test_a_loss_is_given_as_it_is() -> None:
    scalar = torch.tensor(3.0)
    assert Loss(lambda *_: scalar).of_microbatch(0, 0) is scalar


@pytest.mark.parametrize(
    ("result", "says"),
    [(torch.zeros(2, 1), r"\[2, 1\]"), (1.5, "float"), (None, "NoneType")],
)
def test_a_loss_must_be_a_scalar_tensor(result: Any, says: str) -> None:
    def function(output: Any, target: Any) -> Tensor:
        return result  # type: ignore[no-any-return] # the mistake under test

    with pytest.raises(UsageError, match=f"must return a scalar tensor, not {says}"):
        Loss(function).of_microbatch(0, 0)


@dataclass
class Output:
    logits: Tensor


@pytest.mark.parametrize("kind", [lambda t: t, lambda t: {"a": (t,)}, Output])
def test_a_loss_without_gradient_is_refused(kind: Any) -> None:
    output = kind(torch.ones(2, requires_grad=True))
    with pytest.raises(UsageError, match="requires no grad for an output that does"):
        Loss(lambda *_: torch.zeros(())).of_microbatch(output, 0)


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(UsageError, match="reduction='none': must be 'mean' or 'sum'"):
        Loss(nn.functional.mse_loss, "none")  # type: ignore[arg-type] # the mistake under test


# ---- nothing


def test_nothing_has_a_gradient_of_zero_whatever_the_output_holds() -> None:
    output = {"a": torch.full((2,), torch.nan, requires_grad=True), "b": torch.ones(1)}
    loss = zero_loss(output)
    assert (float(loss.detach()), loss.shape) == (0.0, ())
    loss.backward()
    assert output["a"].grad is not None
    assert output["a"].grad.tolist() == [0.0, 0.0]


def test_nothing_of_no_tensors_is_zero() -> None:
    assert float(zero_loss({"a": None})) == 0.0


# ---- what a step may say


def test_a_step_has_its_own_weights() -> None:
    assert MEAN.weighed(None) is MEAN
    assert MEAN.weighed(2.0).weight == 2.0


def test_a_step_says_what_it_accumulates() -> None:
    usual = Loss(nn.functional.mse_loss, accumulate=4)
    assert usual.scale(None, None, 1.0).accumulate == 4
    assert usual.scale(2, None, 1.0).accumulate == 2
    assert usual.scale(None, 7.0, 3.0).total == 7.0
    assert usual.scale(None, 7.0, 3.0).factor == 3.0


@pytest.mark.parametrize(
    ("loss", "accumulate", "total", "says"),
    [
        (MEAN, 0, None, "accumulate=0: must be at least 1 step"),
        (MEAN, None, -1.0, "total_weight=-1.0: must be a number of at least 0"),
        (MEAN, None, float("nan"), "total_weight=nan"),
        (MEAN, 2, 3.0, "not both: each says what the loss is divided by"),
        (MEAN.weighed(1.0), 2, None, "accumulate= with loss_weight=.*give total_weight="),
    ],
)
def test_what_contradicts_itself_is_refused(
    loss: Loss, accumulate: int | None, total: float | None, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        loss.scale(accumulate, total, 1.0)
