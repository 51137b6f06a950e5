"""Gradients collected beside ``.grad``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from penstock import PipelineStage
from penstock.backward import SharedGradients


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


@pytest.mark.parametrize("halves", [False, True])
def test_two_stages_with_one_weight(halves: bool) -> None:
    """Each has the share that it would have as the only user."""
    shared = nn.Linear(3, 3).double()
    x = torch.randn(2, 3, dtype=torch.float64)
    stages = [PipelineStage(shared, i, 2) for i in range(2)]
    for scale, stage in enumerate(stages, start=1):
        stage.keep_apart([shared.weight])
        for microbatch in range(2):
            stage.forward(microbatch, [x * scale], loss=Tensor.sum)
    for stage in stages:
        for microbatch in range(2):
            if halves:
                stage.backward_input(microbatch, None)
                stage.backward_weight(microbatch)
            else:
                stage.backward(microbatch, None)
    assert shared.weight.grad is None
    assert shared.bias.grad is not None
    alone = 2 * x.sum(0).expand(3, 3)
    for scale, stage in enumerate(stages, start=1):
        (share,) = stage.take_shares()
        torch.testing.assert_close(share, alone * scale)


def test_clearing_a_stage_drops_its_shares() -> None:
    shared = nn.Linear(3, 3)
    stage = PipelineStage(shared, 0, 1)
    stage.keep_apart(list(shared.parameters()))
    stage.forward(0, [torch.ones(1, 3)], loss=Tensor.sum)
    stage.backward(0, None)
    stage.clear()
    assert stage.take_shares() == [None, None]
