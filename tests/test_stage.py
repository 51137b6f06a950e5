"""One stage: forward and the three backwards of a microbatch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import PipelineStage
from penstock.errors import UnknownArgumentError, UsageError

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Mixed(nn.Module):
    """Takes and gives tensors with and without gradients, and other values."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.unused = nn.Parameter(torch.ones(1))

    def forward(
        self, pair: tuple[Tensor, Tensor], scale: float, mask: Tensor | None = None
    ) -> dict[str, Any]:
        hidden = self.lin(pair[0]) * scale + pair[1]
        return {"hidden": hidden, "mask": mask, "twice": [hidden * 2, "text"]}


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


BACKWARDS: dict[str, Callable[[PipelineStage, int, Any], Any]] = {"full": full, "halves": halves}


@pytest.fixture(params=sorted(BACKWARDS))
def backward(request: pytest.FixtureRequest) -> Callable[[PipelineStage, int, Any], Any]:
    return BACKWARDS[request.param]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def weight(stage: PipelineStage, name: str = "weight") -> Tensor:
    return stage.module.get_parameter(name)


def grad(stage: PipelineStage, name: str = "weight") -> Tensor:
    gradient = stage.module.get_parameter(name).grad
    assert gradient is not None
    return gradient


Backward = Callable[[PipelineStage, int, Any], Any]


# ---- what it is


@pytest.mark.parametrize(
    ("index", "first", "last"), [(0, True, False), (1, False, False), (2, False, True)]
)
def test_it_knows_its_place(index: int, first: bool, last: bool) -> None:
    stage = linear_stage(3, index)
    assert (stage.is_first, stage.is_last) == (first, last)


@pytest.mark.parametrize(("index", "count"), [(-1, 2), (2, 2), (0, 0)])
def test_a_place_that_is_not_there(index: int, count: int) -> None:
    with pytest.raises(UsageError, match=f"stage {index} of {count}"):
        linear_stage(count, index)


def test_it_lives_where_its_module_does_or_moves_it() -> None:
    assert linear_stage().device == PipelineStage(nn.Tanh(), 0, 1).device == torch.device("cpu")
    assert PipelineStage(nn.Linear(2, 2, device="meta"), 0, 1).device == torch.device("meta")
    stage = PipelineStage(nn.Linear(2, 2), 0, 1, device="meta")
    assert stage.module.weight.device == stage.device == torch.device("meta")


# ---- gradients


def test_gradients_are_those_of_autograd(backward: Backward) -> None:
    stage, x, back = linear_stage(), learning(), torch.randn(2, 3)
    output = stage.forward(0, (x,))
    (gradient,) = backward(stage, 0, [back])
    plain, y = linear_stage().module, learning()
    plain(y).backward(back)
    assert torch.equal(output, plain(y))
    assert y.grad is not None
    assert torch.equal(gradient, y.grad)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(*parameters(stage, plain), strict=True))


def parameters(stage: PipelineStage, plain: nn.Module) -> tuple[list[Any], list[Any]]:
    return list(stage.module.parameters()), list(plain.parameters())


def test_nested_arguments_and_outputs(backward: Backward) -> None:
    stage, a, b = PipelineStage(Mixed(), 0, 2), learning(), learning()
    mask = torch.ones(2).bool()
    output = stage.forward(0, ((a, b), 3.0), {"mask": mask})
    gradients = backward(stage, 0, [torch.ones(2, 3), None])
    expected = torch.ones(2, 3) @ weight(stage, "lin.weight") * 3
    assert torch.equal(output["mask"], mask)
    assert output["twice"][1] == "text"
    assert len(gradients) == 2, "one for each tensor that requires grad"
    assert torch.allclose(gradients[0], expected)
    assert torch.equal(gradients[1], torch.ones(2, 3))
    assert weight(stage, "unused").grad is None


def test_an_input_that_requires_no_grad_has_none(backward: Backward) -> None:
    stage = linear_stage()
    stage.forward(0, (X,))
    assert backward(stage, 0, [torch.ones(2, 3)]) == ()
    assert grad(stage, "bias").tolist() == [2, 2, 2]


def test_a_loss_is_where_backward_starts(backward: Backward) -> None:
    stage, x = linear_stage(), learning()
    output = stage.forward(0, (x,), loss=lambda output: output.sum())
    (gradient,) = backward(stage, 0, None)
    assert output.shape == (2, 3)
    assert torch.allclose(gradient, weight(stage).sum(0).expand(2, 3))


def test_microbatches_are_apart(backward: Backward) -> None:
    stage = linear_stage()
    for microbatch in range(3):
        stage.forward(microbatch, (learning(X * microbatch),))
    assert stage.in_flight == 3
    for microbatch in (1, 2, 0):
        backward(stage, microbatch, [torch.ones(2, 3)])
    expected = 3 * X.sum(0).expand(3, 3)
    assert torch.allclose(grad(stage), expected, atol=1e-6)
    assert stage.in_flight == 0


class AddsAWeight(nn.Module):
    """Input and weight get the very same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


def test_later_microbatches_leave_a_handed_back_gradient_alone(backward: Backward) -> None:
    """It may still be on its way to another rank while they are added to the weight."""
    stage = PipelineStage(AddsAWeight(), 1, 2)
    grads = [torch.full((2, 3), float(microbatch + 1)) for microbatch in range(3)]
    for microbatch in range(3):
        stage.forward(microbatch, (learning(),))
    inputs = [backward(stage, microbatch, [grads[microbatch]])[0] for microbatch in range(3)]
    assert [gradient[0, 0].item() for gradient in inputs] == [1, 2, 3]
    assert [gradient[0, 0].item() for gradient in grads] == [1, 2, 3]
    assert grad(stage)[0, 0].item() == 6


def test_weights_may_come_in_another_order() -> None:
    stage = linear_stage()
    for microbatch in range(2):
        stage.forward(microbatch, (learning(),))
        stage.backward_input(microbatch, [torch.ones(2, 3)])
    assert weight(stage).grad is None
    assert stage.in_flight == 2
    stage.backward_weight(1)
    stage.backward_weight(0)
    assert torch.allclose(grad(stage), 2 * X.sum(0).expand(3, 3), atol=1e-6)


# ---- what comes in is fresh


class Does(nn.Module):
    """Does something to its first argument; gives a sum of all."""

    def __init__(self, what: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        self.what(x)
        return x * 2


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "relu_": torch.relu_,
    "an item": lambda x: x.__setitem__(0, 5.0),
    "through a view": lambda x: x.view(-1)[:2].mul_(3),
    "out=": lambda x: torch.neg(x.detach(), out=x.detach()),
}


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_change_in_place_is_seen_by_the_stage_alone(name: str, learns: bool) -> None:
    stage, expected = PipelineStage(Does(CHANGES[name]), 0, 1), X.clone()
    CHANGES[name](expected)
    x = X.clone().requires_grad_(learns)
    for microbatch in range(2):
        assert torch.equal(stage.forward(microbatch, (x,)), expected * 2)
        assert torch.equal(x, X)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_change_in_place_without_gradients(mode: Callable[[], Any]) -> None:
    stage = PipelineStage(Does(torch.relu_), 0, 1)
    with mode():
        x = X.clone()
        assert torch.equal(stage.forward(0, (x,)), X.relu() * 2)
    # Also where the batch was made in that mode, and the step is not.
    assert torch.equal(stage.forward(0, (x,)), X.relu() * 2)
    assert torch.equal(x, X)


def test_what_arrives_may_be_changed_in_place(backward: Backward) -> None:
    stage, x, plain = PipelineStage(Does(torch.relu_), 1, 2), learning(), learning()
    stage.forward(0, (x,))
    (gradient,) = backward(stage, 0, [X])
    (plain.relu() * 2).backward(X)
    assert plain.grad is not None
    assert torch.equal(gradient, plain.grad)


def test_the_callers_tensor_and_its_hooks_are_left_alone(backward: Backward) -> None:
    stage, x = linear_stage(), learning()
    x.register_hook(pytest.fail)
    stage.forward(0, (x,))
    backward(stage, 0, [torch.ones(2, 3)])
    assert x.grad is None


def test_a_hook_of_the_modules_fires_once_a_microbatch(backward: Backward) -> None:
    fired: list[Tensor] = []
    stage = PipelineStage(Does(lambda x: x.register_hook(fired.append)), 0, 1)
    x = learning()
    for step in range(2):
        for microbatch in range(2):
            stage.forward(microbatch, (x,))
        for microbatch in range(2):
            backward(stage, microbatch, [X])
        assert len(fired) == 2 * (step + 1)


def test_what_a_module_asks_of_a_tensor_is_asked_of_no_other() -> None:
    stage = PipelineStage(Does(lambda x: x.requires_grad_()), 0, 1)
    stage.forward(0, (X,))
    assert not X.requires_grad


def test_containers_are_the_stages_own() -> None:
    class Appends(nn.Module):
        def forward(self, value: dict[str, Any]) -> Any:
            value["items"].append(value["items"][0])
            value["count"] += 1
            return sum(value["items"])

    value: dict[str, Any] = {"items": [X], "count": 0}
    assert torch.equal(PipelineStage(Appends(), 0, 1).forward(0, (value,)), 2 * X)
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
    PipelineStage(Does(seen.append), 0, 1).forward(0, (original,))
    assert torch.equal(seen[0], original)
    assert not original.numel() or seen[0].data_ptr() != original.data_ptr()
    assert seen[0].stride() == original.stride()


# ---- what is left


def test_without_gradients_nothing_is_left() -> None:
    stage = linear_stage()
    with torch.no_grad():
        stage.forward(0, (learning(),))
    assert stage.in_flight == 0


def test_clear_drops_everything() -> None:
    stage = linear_stage()
    stage.forward(0, (learning(),))
    stage.forward(1, (learning(),))
    stage.backward_input(1, [torch.ones(2, 3)])
    stage.clear()
    assert stage.in_flight == 0


@pytest.mark.usefixtures("no_collector")
def test_activations_are_freed_with_their_last_use(backward: Backward) -> None:
    stage, alive = linear_stage(), []
    stage.module.register_forward_hook(lambda *call: alive.append(weakref.ref(call[2])))
    stage.forward(0, (learning(),))
    assert alive[0]() is not None
    backward(stage, 0, [torch.ones(2, 3)])
    assert alive[0]() is None


CALLS: dict[str, tuple[Callable[[PipelineStage], Any], str]] = {
    "backward": (lambda stage: stage.backward(0, [None]), "microbatch 0 has no forward"),
    "input": (lambda stage: stage.backward_input(0, [None]), "microbatch 0 has no forward"),
    "weight": (lambda stage: stage.backward_weight(0), "microbatch 0 has no backward_input"),
}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_backward_comes_after_forward(name: str) -> None:
    call, says = CALLS[name]
    with pytest.raises(UsageError, match=f"stage 0: {says}"):
        call(linear_stage())


def test_there_is_one_backward_for_each_forward() -> None:
    stage = linear_stage()
    stage.forward(0, (learning(),))
    stage.backward(0, [torch.ones(2, 3)])
    with pytest.raises(UsageError, match="once for each backward"):
        stage.backward(0, [torch.ones(2, 3)])


def test_what_is_no_gradient_is_refused_by_its_place() -> None:
    stage = PipelineStage(nn.Linear(3, 2), 0, 2)
    stage.forward(0, (X,))
    with pytest.raises(UsageError, match="is a tensor, but its gradient is a float"):
        stage.backward(0, [1.0])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("name", "says"),
    [("engine", "one way to cut backward in two"), ("devise", "did you mean device=")],
)
def test_arguments_that_there_are_not(name: str, says: str) -> None:
    options: dict[str, Any] = {name: "split"}
    with pytest.raises(UnknownArgumentError, match=f"no argument {name}=; .*{says}"):
        PipelineStage(nn.Linear(3, 3), 0, 1, **options)
