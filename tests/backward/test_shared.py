"""Gradients collected beside ``.grad``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from penstock.backward import SharedGradients, SplitBackward


def parameter() -> nn.Parameter:
    made = nn.Parameter(torch.ones(2))
    made.grad = torch.full((2,), 5.0)
    return made


def test_what_is_collected_does_not_touch_grad() -> None:
    one = parameter()
    before = one.grad
    apart = SharedGradients([one])
    for _ in range(2):
        with apart:
            (2 * one).sum().backward()
        assert one.grad is before
    (share,) = apart.take()
    assert share is not None
    assert share.tolist() == [4.0, 4.0]
    assert before is not None
    assert before.tolist() == [5.0, 5.0]
    assert apart.take() == [None]


def test_an_error_leaves_grad_as_it_was() -> None:
    one = parameter()
    before = one.grad
    with pytest.raises(RuntimeError, match="oops"), SharedGradients([one]):
        raise RuntimeError("oops")
    assert one.grad is before


def run(split: SplitBackward, shared: SharedGradients, loss: Tensor, *, halves: bool) -> None:
    if not halves:
        with shared:
            split.full([loss], None, [])
        return
    with shared:
        _, pending = split.input_half([loss], None, [])
    with shared:
        split.weight_half(pending)


@pytest.mark.parametrize("halves", [False, True])
def test_two_stages_with_one_weight(halves: bool) -> None:
    """Each has the share that it would have as the only user."""
    layer = nn.Linear(3, 3).double()
    x = torch.randn(2, 3, dtype=torch.float64)
    stages = [(SplitBackward(layer), SharedGradients([layer.weight])) for _ in range(2)]
    for scale, (split, shared) in enumerate(stages, start=1):
        for _ in range(2):
            run(split, shared, layer(x * scale).sum(), halves=halves)
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    alone = 2 * x.sum(0).expand(3, 3)
    for scale, (_, shared) in enumerate(stages, start=1):
        torch.testing.assert_close(shared.take(), [alone * scale])
