"""How much each microbatch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.errors import UsageError
from penstock.runtime.loss import Replicas, Scale, count, weigh

TARGETS = [torch.tensor([1, 1, 0]), torch.tensor([1, 0, 0])]


def valid(target: torch.Tensor) -> torch.Tensor:
    return target.sum()


@pytest.mark.parametrize(
    ("weight", "samples", "expected"),
    [
        (None, [3, 1], [3, 1]),
        (None, [0, 0], [1, 1]),
        (valid, [3, 3], [2, 1]),
        (lambda target: int(target.sum()), [3, 3], [2, 1]),
        (lambda target: target.float().sum(0, keepdim=True), [3, 3], [2, 1]),
        (8.0, [3, 1], [6, 2]),
        (8, [0, 0], [4, 4]),
        ([5, 0.5], [3, 1], [5, 0.5]),
    ],
)
def test_counts(weight: Any, samples: list[int], expected: list[float]) -> None:
    assert count(weight, samples, TARGETS) == expected


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        ([1.0], "loss_weight: 1 numbers for 2 microbatches"),
        (lambda _: -1, "loss_weight of microbatch 0 is -1.0"),
        ([1, float("nan")], "loss_weight of microbatch 1 is nan"),
        (lambda _: "many", "loss_weight gave str; it must return a number"),
        (lambda target: target, "loss_weight gave Tensor; it must return a number"),
    ],
)
def test_weights_that_are_none(weight: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        count(weight, [1, 1], TARGETS)


@pytest.mark.parametrize(
    ("reduction", "counts", "weighted", "shares"),
    [
        ("mean", [2, 2], False, [0.5, 0.5]),
        ("mean", [3, 1], False, [0.75, 0.25]),
        ("mean", [3, 1], True, [0.75, 0.25]),
        ("mean", [0, 0], True, [0.0, 0.0]),
        ("sum", [3, 1], False, [1.0, 1.0]),
        ("sum", [3, 1], True, [0.25, 0.25]),
        ("sum", [0, 0], True, [0.0, 0.0]),
    ],
)
def test_shares(reduction: Any, counts: list[float], weighted: bool, shares: list[float]) -> None:
    weights = weigh(reduction, counts, weighted=weighted)
    assert (weights.shares, weights.seeds, weights.total) == (shares, shares, sum(counts))


@pytest.mark.parametrize(
    ("reduction", "scale", "seeds"),
    [
        ("mean", Scale(accumulate=2), [0.375, 0.125]),
        ("mean", Scale(total=8), [0.375, 0.125]),
        ("mean", Scale(total=0), [0.0, 0.0]),
        ("mean", Scale(factor=1024.0), [768.0, 256.0]),
        ("sum", Scale(accumulate=2), [1.0, 1.0]),
        ("sum", Scale(total=8), [0.125, 0.125]),
        ("sum", Scale(total=8, factor=4.0), [0.5, 0.5]),
    ],
)
def test_seeds(reduction: Any, scale: Scale, seeds: list[float]) -> None:
    weights = weigh(reduction, [3, 1], scale=scale)
    assert weights.seeds == seeds
    assert weights.shares == weigh(reduction, [3, 1]).shares, "the loss is the batch's own"


def doubled(values: torch.Tensor) -> torch.Tensor:
    """As if the other replica had the same."""
    return values * 2


@pytest.mark.parametrize(
    ("reduction", "averaged", "shares", "seeds"),
    [
        ("mean", True, [0.375, 0.125], [0.75, 0.25]),
        ("mean", False, [0.375, 0.125], [0.375, 0.125]),
        ("sum", True, [1.0, 1.0], [2.0, 2.0]),
        ("sum", False, [1.0, 1.0], [1.0, 1.0]),
    ],
)
def test_replicas(reduction: Any, averaged: bool, shares: list[float], seeds: list[float]) -> None:
    weights = weigh(reduction, [3, 1], replicas=Replicas(2, doubled, averaged))
    assert (weights.shares, weights.seeds, weights.total) == (shares, seeds, 8)
