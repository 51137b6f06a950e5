"""The loss of a batch from the losses of its microbatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import UsageError
from penstock.step import Loss, total

MEAN = Loss(nn.functional.mse_loss)
SUM = Loss(lambda output, target: nn.functional.mse_loss(output, target, reduction="sum"), "sum")


@pytest.mark.parametrize(
    ("loss", "samples", "weights"),
    [
        (MEAN, [2, 2], [0.5, 0.5]),
        (MEAN, [3, 1], [0.75, 0.25]),
        (MEAN, [0, 0], [0.5, 0.5]),
        (SUM, [3, 1], [1.0, 1.0]),
    ],
)
def test_weights(loss: Loss, samples: list[int], weights: list[float]) -> None:
    assert loss.weights(samples) == weights


@pytest.mark.parametrize("loss", [MEAN, SUM], ids=lambda loss: loss.reduction)
def test_the_parts_add_up_to_the_loss_of_the_batch(loss: Loss) -> None:
    output, target = torch.randn(7, 2), torch.randn(7, 2)
    sizes = [3, 3, 1]
    parts = zip(output.split(sizes), target.split(sizes), strict=True)
    found = total([loss.of_microbatch(*part) for part in parts], loss.weights(sizes))
    assert found == pytest.approx(float(loss.function(output, target)))


def test_nothing_adds_up_to_zero() -> None:
    assert total([], [1.0]) == 0.0


def test_parts_are_added_in_double_precision() -> None:
    parts = [torch.tensor(1.0), torch.tensor([1e-12])]
    assert total(parts, [1.0, 1.0]) == 1.0 + float(torch.tensor(1e-12))


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

    with pytest.raises(UsageError, match=f"must give a scalar tensor, not {says}"):
        Loss(function).of_microbatch(0, 0)


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(UsageError, match="reduction='none': must be 'mean' or 'sum'"):
        Loss(nn.functional.mse_loss, "none")  # type: ignore[arg-type] # the mistake under test
