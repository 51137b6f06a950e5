from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from penstock.backward import stage_backward_input, stage_backward_weight
from tests.backward.making import linear, x


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_give_all_gradients_in_the_first_half() -> None:
    block = nn.Sequential(linear(), nn.Tanh(), linear())
    model = nn.Sequential(linear(), block, linear())
    leaf, weights = x(), list(model.parameters())
    expected = torch.autograd.grad(model(leaf).square().sum(), [leaf, *weights])
    block.compile(backend="aot_eager")
    (dinput,), groups = stage_backward_input([model(leaf).square().sum()], None, [leaf], weights)
    actual: list[Tensor | None] = [dinput, *stage_backward_weight(weights, groups)]
    torch.testing.assert_close(actual, list(expected), rtol=1e-12, atol=1e-12)
    torch.compiler.reset()
