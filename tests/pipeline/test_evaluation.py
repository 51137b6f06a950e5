"""Evaluation and prediction: right, on every rank, and without a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipeline
from penstock.testing import WorkerPool
from tests.pipeline.models import WIDTH, X, Y, chain, make, mean_loss, restless

CALLS: dict[str, Callable[[Pipeline], Any]] = {
    "eval": lambda pipe: pipe.eval(X, target=Y).loss,
    "eval with outputs": lambda pipe: pipe.eval(X, target=Y, outputs=True).outputs,
    "predict": lambda pipe: pipe.predict(X),
}


def expected(name: str, model: nn.Module) -> Any:
    with torch.no_grad():
        output = model.eval()(X)
        return float(mean_loss(output, Y)) if name == "eval" else output


def state(pipe: Pipeline) -> dict[str, Any]:
    return {
        "tensors": {name: tensor.tolist() for name, tensor in pipe.state_dict().items()},
        "modes": [m.training for stage in pipe.stages for m in stage.module.modules()],
        "grads": [p.grad for p in pipe.parameters()],
        "rng": torch.get_rng_state().tolist(),
        "in flight": [stage.in_flight for stage in pipe.stages],
        "grad mode": torch.is_grad_enabled(),
    }


@pytest.mark.parametrize("model", [chain, restless])
@pytest.mark.parametrize("name", sorted(CALLS))
def test_it_gives_what_the_model_does(name: str, model: Callable[[], nn.Module]) -> None:
    found = CALLS[name](make(model()))
    torch.testing.assert_close(found, expected(name, model()))


@pytest.mark.parametrize("name", sorted(CALLS))
def test_it_leaves_no_trace(name: str) -> None:
    pipe = make(restless())
    pipe.stages[1].module.eval()
    before = state(pipe)
    CALLS[name](pipe)
    assert state(pipe) == before


@pytest.mark.parametrize("name", sorted(CALLS))
def test_it_does_not_disturb_training(name: str) -> None:
    losses = []
    for disturbed in (False, True):
        pipe = make(restless())
        pipe.step(X, target=Y)
        if disturbed:
            CALLS[name](pipe)
        torch.manual_seed(1)
        losses.append(pipe.step(X, target=Y).loss)
    assert losses[0] == losses[1]


def test_batches_may_be_smaller_than_in_training() -> None:
    pipe = make()
    for samples in (1, 2, 3, 8):
        batch = X[:samples]
        torch.testing.assert_close(pipe.predict(batch), chain()(batch).detach())
        loss = float(mean_loss(chain()(batch), Y[:samples]).detach())
        assert pipe.eval(batch, target=Y[:samples]).loss == pytest.approx(loss)


def test_a_sum_is_a_sum_in_evaluation_too() -> None:
    pipe = make(loss_fn=lambda output, target: output.sum(), reduction="sum")
    assert pipe.eval(X[:7], target=Y[:7]).loss == pytest.approx(
        float(chain()(X[:7]).sum().detach())
    )


def test_a_result_without_outputs_has_none_and_a_prediction_needs_no_loss_and_no_gradient() -> None:
    assert make().eval(X, target=Y).outputs is None
    assert make().step(X, target=Y).outputs is None
    prediction = make(loss_fn=None).predict(X)
    assert prediction.shape == (8, WIDTH)
    assert not prediction.requires_grad


class Count(nn.Module):
    def forward(self, upto: int) -> Tensor:
        return torch.arange(upto)


def test_without_split_arguments_there_is_one_microbatch() -> None:
    assert make(nn.Sequential(Count(), nn.Identity())).predict(5).tolist() == [0, 1, 2, 3, 4]


class Nested(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"logits": (x, x.sum(1)), "mean": x.mean(), "name": "nested", "hidden": None}


def test_nested_outputs_are_merged() -> None:
    found = make(nn.Sequential(chain(), Nested())).predict(X)
    assert found["logits"][0].shape == (8, WIDTH)
    assert found["logits"][1].shape == (8,)
    assert found["mean"].shape == (4,)
    assert (found["name"], found["hidden"]) == ("nested", None)


class TrainsDifferently(nn.Module):
    """Gives another value and another type in evaluation, as auxiliary heads do."""

    def forward(self, x: Tensor) -> Any:
        return (x, x * 2) if self.training else x.float()


class Takes(nn.Module):
    def forward(self, x: Any) -> Tensor:
        whole: Tensor = x[0] + x[1] if isinstance(x, tuple) else x.double()
        return whole


def test_a_model_may_give_other_values_in_evaluation() -> None:
    pipe = make(nn.Sequential(chain(), TrainsDifferently(), Takes(), nn.Identity()))
    for _ in range(2):
        assert pipe.step(X, target=Y).loss > 0
        torch.testing.assert_close(pipe.predict(X), chain()(X).detach(), atol=1e-6, rtol=0)


# ---- random numbers


def test_finding_shapes_uses_no_random_numbers() -> None:
    """The first step agrees on shapes, the second does not: both draw the same masks."""
    pipe, losses = make(restless(), seed="off"), []
    for _ in range(2):
        torch.manual_seed(3)
        losses.append(pipe.step(X, target=Y).loss)
    assert losses[0] == losses[1]


# ---- over processes


def evaluate(group: Any) -> dict[str, Any]:
    pipe = make(restless(), group=group)
    before = state(pipe)
    found = {name: call(pipe) for name, call in CALLS.items()}
    return {
        "loss": found["eval"],
        "outputs": found["eval with outputs"].tolist(),
        "prediction": found["predict"].tolist(),
        "same": state(pipe) == before,
    }


def test_every_rank_gets_the_results(workers: WorkerPool) -> None:
    output = expected("predict", restless())
    for answer in workers.run(f"{__name__}:evaluate", 2, 100.0):
        assert answer["same"]
        assert answer["loss"] == pytest.approx(expected("eval", restless()))
        torch.testing.assert_close(torch.tensor(answer["outputs"]).double(), output)
        torch.testing.assert_close(torch.tensor(answer["prediction"]).double(), output)


def test_a_model_made_in_inference_mode_predicts() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        expected = model(torch.ones(4, 4))
    for _ in range(2):
        pipe = Pipeline(model, ranks=2, microbatches=2)
        assert torch.equal(pipe.predict(torch.ones(4, 4)), expected)
