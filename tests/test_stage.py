"""One stage: forward and the three backwards of a microbatch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import PipelineStage
from penstock.errors import UsageError
from tests.catalogue.making import Does

X = torch.linspace(-1, 1, 6).reshape(2, 3)
ONES = torch.ones(2, 3)
Backward = Callable[[PipelineStage, int, Any], Any]


def learning(x: Tensor = X) -> Tensor:
    return x.clone().requires_grad_()


def linear_stage(count: int = 2, index: int = 0) -> PipelineStage:
    torch.manual_seed(0)
    return PipelineStage(nn.Linear(3, 3), index, count)


def full(stage: PipelineStage, microbatch: int, grads: Any) -> Any:
    return stage.backward(microbatch, grads)


def halves(stage: PipelineStage, microbatch: int, grads: Any) -> Any:
    gradients = stage.backward_input(microbatch, grads)
    stage.backward_weight(microbatch)
    return gradients


@pytest.fixture(params=[full, halves])
def backward(request: pytest.FixtureRequest) -> Any:
    return request.param


def weight(stage: PipelineStage, name: str = "weight") -> nn.Parameter:
    return stage.module.get_parameter(name)


def assert_equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


# ---- what it is


def test_it_knows_its_place() -> None:
    stages = [linear_stage(3, index) for index in range(3)]
    assert [stage.is_first for stage in stages] == [True, False, False]
    assert [stage.is_last for stage in stages] == [False, False, True]
    for index, count in ((-1, 2), (2, 2), (0, 0)):
        with pytest.raises(UsageError, match=f"stage {index} of {count}"):
            linear_stage(count, index)


def test_it_lives_where_its_module_does_or_moves_it() -> None:
    assert linear_stage().device == PipelineStage(nn.Tanh(), 0, 1).device == torch.device("cpu")
    assert PipelineStage(nn.Linear(2, 2, device="meta"), 0, 1).device == torch.device("meta")
    stage = PipelineStage(nn.Linear(2, 2), 0, 1, device="meta")
    assert stage.module.weight.device == stage.device == torch.device("meta")
    # A module that has no memory yet stays as it is, until it is given some.
    partly = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    stage = PipelineStage(partly, 0, 1, device="cpu")
    assert [parameter.is_meta for parameter in stage.module.parameters()] == [False] * 2 + [
        True
    ] * 2
    stage = PipelineStage(nn.Linear(2, 2, device="meta"), 0, 1)
    stage.module.to_empty(device="cpu")
    stage.follow_memory()
    assert stage.device == torch.device("cpu")


# ---- gradients


def test_backward_may_start_from_what_was_computed_of_the_output(backward: Backward) -> None:
    stage, x = linear_stage(), learning()
    output: Tensor = stage.forward(0, (x,))
    stage.start_from(0, output.square().sum())
    (gradient,) = backward(stage, 0, None)
    torch.testing.assert_close(gradient, 2 * stage.module(X) @ weight(stage))


def test_microbatches_are_apart_and_weights_may_come_in_another_order(backward: Backward) -> None:
    stage = linear_stage()
    for microbatch in range(3):
        stage.forward(microbatch, (learning(X * microbatch),))
    assert stage.in_flight == 3
    backward(stage, 1, [ONES])
    stage.backward_input(0, [ONES])
    stage.backward_input(2, [ONES])
    assert stage.in_flight == 2
    stage.backward_weight(2)
    stage.backward_weight(0)
    torch.testing.assert_close(weight(stage).grad, 3 * X.sum(0).expand(3, 3))
    assert stage.in_flight == 0


def test_later_microbatches_leave_a_handed_back_gradient_alone(backward: Backward) -> None:
    """It may still be on its way to another rank while they are added to the weight, whose gradient it is."""
    adds = Does(lambda m, x: x + m.weight, weight=nn.Parameter(torch.zeros(2, 3)))
    stage = PipelineStage(adds, 1, 2)
    grads = [torch.full((2, 3), float(microbatch + 1)) for microbatch in range(3)]
    for microbatch in range(3):
        stage.forward(microbatch, (learning(),))
    inputs = [backward(stage, microbatch, [grads[microbatch]])[0] for microbatch in range(3)]
    assert [gradient[0, 0].item() for gradient in (*inputs, *grads)] == [1, 2, 3] * 2
    assert_equal(weight(stage).grad, ONES * 6)


# ---- what comes in is fresh


def doubling(what: Callable[[Tensor], Any]) -> nn.Module:
    """Does something to its argument; gives its double."""
    return Does(lambda _, x: (what(x), x * 2)[1])


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "relu_": torch.relu_,
    "an item": lambda x: x.__setitem__(0, 5.0),
    "through a view": lambda x: x.view(-1)[:2].mul_(3),
    "out=": lambda x: torch.neg(x.detach(), out=x.detach()),
    "requires_grad_": lambda x: x.requires_grad_(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_in_place_is_seen_by_the_stage_alone(name: str) -> None:
    stage, expected = PipelineStage(doubling(CHANGES[name]), 0, 1), X.clone()
    CHANGES[name](expected)
    for learns in (True, False):
        x = X.clone().requires_grad_(learns)
        for microbatch in range(2):
            assert_equal(stage.forward(microbatch, (x,)), expected * 2)
            assert_equal(x, X)
            assert x.requires_grad == learns


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_change_in_place_without_gradients(mode: Callable[[], Any]) -> None:
    stage = PipelineStage(doubling(torch.relu_), 0, 1)
    with mode():
        x = X.clone()
        assert_equal(stage.forward(0, (x,)), X.relu() * 2)
        assert stage.in_flight == 0
    # Also where the batch was made in that mode, and the step is not.
    assert_equal(stage.forward(0, (x,)), X.relu() * 2)
    assert_equal(x, X)


def test_hooks_of_the_caller_and_of_the_module(backward: Backward) -> None:
    fired: list[Tensor] = []

    def change(x: Tensor) -> None:
        x.register_hook(fired.append)
        x.relu_()

    stage, x, plain = PipelineStage(doubling(change), 0, 1), learning(), learning()
    x.register_hook(pytest.fail)
    (plain.relu() * 2).backward(X)
    for step in range(2):
        for microbatch in range(2):
            stage.forward(microbatch, (x,))
        for microbatch in range(2):
            assert_equal(backward(stage, microbatch, [X]), (plain.grad,))
        assert len(fired) == 2 * (step + 1)
    assert x.grad is None


def test_containers_are_the_stages_own() -> None:
    def appends(_: Any, value: dict[str, Any]) -> Any:
        value["items"].append(value["items"][0])
        value["count"] += 1
        return sum(value["items"])

    value: dict[str, Any] = {"items": [X], "count": 0}
    assert_equal(PipelineStage(Does(appends), 0, 1).forward(0, (value,)), 2 * X)
    assert (len(value["items"]), value["count"]) == (1, 0)


@pytest.mark.parametrize(
    "original",
    [
        pytest.param(torch.rand(3, 2).t(), id="transposed"),
        pytest.param(torch.rand(4, 6)[::2, 1::2], id="sliced"),
        pytest.param(torch.rand(2, 1, 3).expand(2, 4, 3), id="expanded"),
        pytest.param(torch.rand(0, 3).t(), id="empty"),
        pytest.param(torch.arange(5.0).unfold(0, 3, 1), id="overlapping"),
    ],
)
def test_copies_lie_as_their_originals(original: Tensor) -> None:
    seen: list[Tensor] = []
    PipelineStage(doubling(seen.append), 0, 1).forward(0, (original,))
    assert_equal(seen[0], original)
    assert not original.numel() or seen[0].data_ptr() != original.data_ptr()
    assert seen[0].stride() == original.stride()


# ---- what is left


def test_clear_drops_everything() -> None:
    stage = linear_stage()
    stage.forward(0, (learning(),))
    stage.forward(1, (learning(),))
    stage.backward_input(1, [ONES])
    stage.clear()
    assert stage.in_flight == 0


def test_gradients_of_weights_that_others_share_are_collected_apart_until_taken_or_dropped() -> (
    None
):
    stage = linear_stage()
    stage.share_gradients([weight(stage)])
    for drop in (False, True):
        stage.forward(0, (X,))
        stage.backward(0, [ONES])
        if drop:
            stage.clear()
        (share,) = stage.take_shares()
        assert (share is None) == drop
    assert weight(stage).grad is None
    assert weight(stage, "bias").grad is not None


def test_activations_are_freed_with_their_last_use(backward: Backward) -> None:
    """The last layer's output is nobody's once the caller has dropped it: backward does not read it."""
    module, memory = nn.Sequential(nn.Tanh(), nn.Linear(3, 3)), list[Any]()
    for layer in module:
        layer.register_forward_hook(
            lambda *call: memory.append(weakref.ref(call[2].untyped_storage()))
        )
    stage = PipelineStage(module, 0, 2)
    gc.collect()
    gc.disable()
    try:
        output = stage.forward(0, (learning(),))
        assert [one() is not None for one in memory] == [True, True]
        del output
        assert [one() is not None for one in memory] == [True, False]
        backward(stage, 0, [ONES])
        assert [one() is not None for one in memory] == [False, False]
    finally:
        gc.enable()


def test_each_backward_comes_once_after_its_forward() -> None:
    stage = linear_stage()
    for call in (stage.backward, stage.backward_input):
        with pytest.raises(UsageError, match="stage 0: microbatch 0 has no forward"):
            call(0, [None])
    with pytest.raises(UsageError, match="stage 0: microbatch 0 has no backward_input"):
        stage.backward_weight(0)
    stage.forward(0, (X,))
    assert stage.backward(0, [ONES]) == ()
    with pytest.raises(UsageError, match="once for each backward"):
        stage.backward(0, [ONES])
