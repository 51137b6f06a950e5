from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from penstock.backward import stage_backward
from penstock.errors import StageError


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape or (4, 3), dtype=torch.float64, requires_grad=True)


def layer() -> nn.Linear:
    return nn.Linear(3, 3, dtype=torch.float64)


def test_loss_needs_no_gradient() -> None:
    x, model = leaf(), layer()
    (expected,) = torch.autograd.grad(model(x).sum(), [x])
    (grad,) = stage_backward(model(x).sum(), None, [x])
    assert grad is not None
    assert torch.equal(grad, expected)
    assert model.weight.grad is not None


def test_inputs_keep_no_gradient_and_lend_none() -> None:
    x = leaf()
    x.grad = torch.full_like(x, 9)
    (grad,) = stage_backward(x * 2, torch.ones_like(x), [x])
    assert grad is not None
    assert torch.equal(grad, torch.full_like(x, 2))
    assert x.grad is None


def test_every_input_has_its_place() -> None:
    x, unused = leaf(), leaf()
    grads = stage_backward(x * 2, torch.ones_like(x), [3, x, torch.zeros(2), None, unused, x])
    assert [grad is not None for grad in grads] == [False, True, False, False, False, True]


def test_positions_select_outputs() -> None:
    x = leaf()
    outputs, grads = [x * 2, x * 3, x * 5], [torch.ones_like(x)] * 3
    (grad,) = stage_backward(outputs, grads, [x], [0, 2])
    assert grad is not None
    assert torch.equal(grad, torch.full_like(x, 7))


def test_a_change_in_place_between_forward_and_backward_is_explained() -> None:
    x, scale = leaf(), torch.ones((), dtype=torch.float64)
    output = x * scale
    scale.mul_(2)
    with pytest.raises(StageError, match="forward of a later microbatch may run before"):
        stage_backward(output, torch.ones_like(output), [x])


def test_failure_inside_autograd_shows_the_values() -> None:
    x = leaf()
    with pytest.raises(StageError, match=r"output=float64\[4, 3\].*gradient=float32\[5\]"):
        stage_backward(x * 2, torch.ones(5), [x])
    assert x.grad is None
