"""The faster ways to add up weight gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.backward import DeferredBackward
from penstock.errors import UsageError
from penstock.stage import PipelineStage
from tests.backward.blocks import Lambda, TransformerBlock
from tests.backward.making import linear, looped, weight, x
from tests.backward.probes import OperationCounter

MODELS: dict[str, Callable[[], nn.Module]] = {
    "block": lambda: TransformerBlock(6).double(),
    "looped": lambda: Lambda(lambda m, v: looped(m.layer, v), layer=linear()),
    "matrix": lambda: Lambda(lambda m, v: v @ m.w, w=weight()),
    "tied": lambda: Lambda(
        lambda m, v: (v + m.table(torch.tensor([0, 1, 2]))) @ m.table.weight.t(),
        table=nn.Embedding(6, 6, dtype=torch.float64),
    ),
    "both ways": lambda: Lambda(lambda m, v: m.layer(v) @ m.layer.weight.exp(), layer=linear()),
}


def train(model: nn.Module, values: list[Tensor], **options: Any) -> None:
    """Runs F and I of all microbatches, and then their W."""
    split = DeferredBackward(model, **options)
    stores = []
    for value in values:
        output = model(value)
        stores.append(split.input_half(output, torch.ones_like(output), [value])[1])
    for store in stores:
        split.weight_half(store)
    split.flush()


@pytest.mark.parametrize("options", [{"fused": True}, {"joined": 2}, {"fused": True, "joined": 4}])
@pytest.mark.parametrize("name", MODELS)
def test_options_change_no_more_than_bits(name: str, options: dict[str, Any]) -> None:
    model = MODELS[name]()
    values = [x(2, 3, 6) for _ in range(5)]
    train(model, values)
    expected = {key: parameter.grad for key, parameter in model.named_parameters()}
    model.zero_grad()
    train(model, values, **options)
    actual = {key: parameter.grad for key, parameter in model.named_parameters()}
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device_type", [torch.float32, torch.bfloat16])
def test_fused_sums_are_in_the_type_of_grad(device_type: torch.dtype) -> None:
    model = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    model.weight.grad_dtype = device_type
    values = [x(64, 8, dtype=torch.bfloat16) for _ in range(4)]
    train(model, values, fused=True)
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == device_type
    exact = sum(value.detach().double().sum(0) for value in values)
    error = (model.weight.grad[0].double() - exact).abs().max()
    assert error < (0.1 if device_type == torch.float32 else 1)


def test_fused_makes_no_tensor_of_the_weights_size() -> None:
    model = linear(bias=False)
    train(model, [x()])
    with OperationCounter() as counter:
        train(model, [x()], fused=True)
    assert counter.counts["addmm_"] == 1
    assert counter.counts["mm"] == 2


def test_fused_leaves_weights_with_hooks_to_their_accumulator() -> None:
    model, calls = linear(bias=False), list[Tensor]()
    model.weight.register_post_accumulate_grad_hook(calls.append)
    train(model, [x(), x()], fused=True)
    assert len(calls) == 2


def test_joined_runs_one_product_and_one_accumulation() -> None:
    model, calls = linear(bias=False), list[Tensor]()
    model.weight.register_post_accumulate_grad_hook(calls.append)
    with OperationCounter() as counter:
        train(model, [x() for _ in range(3)], joined=3)
    assert len(calls) == 1
    assert counter.counts["mm"] == 3 + 3 + 1


def test_nothing_can_be_joined() -> None:
    with pytest.raises(UsageError, match="joined=0"):
        DeferredBackward(linear(), joined=0)


def test_a_stage_takes_the_options_and_finishes_by_itself() -> None:
    model = linear(bias=False)
    stage = PipelineStage(model, 0, 1, engine="deferred", joined=4)
    for microbatch in 0, 1:
        stage.forward(microbatch, [x()], loss=torch.sum)
    for microbatch in 0, 1:
        stage.backward_input(microbatch, None)
    stage.backward_weight(0)
    assert model.weight.grad is None
    stage.backward_weight(1)
    assert model.weight.grad is not None
    with pytest.raises(UsageError, match="no option fuse"):
        PipelineStage(model, 0, 1, fuse=True)
