"""A loss or gradient that is not finite: every rank hears of it before an optimizer moves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipeline
from penstock.errors import NonFiniteError
from penstock.testing import WorkerPool

X = torch.arange(12.0).reshape(4, 3)
"""Four samples; the last one is the only one with an 11."""


class Passes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Divides(nn.Module):
    """By zero, in the marked sample."""

    def forward(self, x: Tensor) -> Tensor:
        marked = x.device.type != "meta" and bool((x.detach() == 11).any())
        return x / 0 if marked else x


class Roots(nn.Module):
    """Finite forward, but the gradient of a root at 0 is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight - x).abs().sqrt() + x


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()


def pipe(*middle: nn.Module, **options: Any) -> Pipeline:
    stages = nn.Sequential(Passes(), nn.Sequential(Passes(), *middle), Passes())
    return Pipeline(stages, ranks=3, microbatches=4, loss_fn=mean_loss, **options)


def test_a_loss_that_is_not_finite_stops_and_names_where_it_began() -> None:
    made = pipe(Divides())
    made.zero_grad()
    assert made.step(X[:3].repeat(2, 1)[:4], target=X).finite
    with pytest.raises(NonFiniteError, match=r"step 2: the loss is inf; .*find_nonfinite"):
        made.step(X, target=X)
    # All ranks agreed: nothing is torn down, and a good batch goes on.
    made.zero_grad()
    assert made.step(X[:3].repeat(2, 1)[:4], target=X).finite


def test_a_gradient_that_is_not_finite_stops_although_the_loss_is() -> None:
    with pytest.raises(NonFiniteError, match="but gradients are not finite"):
        pipe(Roots()).step(X, target=X)


class RootOfWeight(Passes):
    """Finite forward; the gradient of the weight alone is not."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.scale - 1).abs().sqrt() * x.detach()


def test_a_gradient_of_a_shared_weight_that_is_not_finite_stops() -> None:
    first, last = RootOfWeight(), RootOfWeight()
    last.scale = first.scale
    made = Pipeline(
        nn.Sequential(first, Passes(), last), ranks=3, microbatches=4, loss_fn=mean_loss
    )
    with pytest.raises(NonFiniteError, match="but gradients are not finite"):
        made.step(X, target=X)


@pytest.mark.parametrize("what", ["skip", "warn"])
def test_skipping_drops_the_gradients_and_warning_leaves_them(
    what: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made = pipe(Divides(), nonfinite=what)
    made.randomness.load_state_dict({"seed": 0, "step": 6})
    made.find_nonfinite(X, target=X)
    with caplog.at_level(logging.WARNING, "penstock"):
        assert not made.step(X, target=X).finite
    assert {p.grad is None for p in made.parameters()} == {what == "skip"}
    assert "the loss is inf" in caplog.text
    # Finding it is no step.
    assert "step 7 is not finite" in caplog.text


def test_an_evaluation_may_be_infinite() -> None:
    assert pipe(Divides()).eval(X, target=X).loss == float("inf")


# ---- finding the module


def test_the_module_is_found_and_nothing_changes() -> None:
    made = pipe(Divides(), nonfinite="warn")
    made.step(X[:3].repeat(2, 1)[:4], target=X)
    before = [p.grad.clone() for p in made.parameters() if p.grad is not None]
    found = made.find_nonfinite(X, target=X)
    assert found is not None
    assert (found.stage, found.microbatch, found.action) == (1, 3, "1F3")
    assert found.module == "1.1"
    assert "'1.1'" in str(found)
    after = [p.grad for p in made.parameters() if p.grad is not None]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_nothing_changes_in_weights_that_stages_share() -> None:
    first, last = Passes(), Passes()
    last.scale = first.scale
    made = Pipeline(
        nn.Sequential(first, Passes(), last), ranks=3, microbatches=4, loss_fn=mean_loss
    )
    made.step(X, target=X)
    before = {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}
    assert made.find_nonfinite(X, target=X) is None
    assert len(before) == 2
    assert all(
        torch.equal(p.grad, before[n]) for n, p in made.named_parameters() if p.grad is not None
    )


def test_weights_that_are_not_finite_are_named() -> None:
    made = pipe()
    with torch.no_grad():
        next(made.parameters()).fill_(float("nan"))
    found = made.find_nonfinite(X, target=X)
    assert found is not None
    assert found.weights == ("0.scale",)


# ---- over processes


def stop_everywhere(group: Any) -> list[str]:
    made = pipe(Divides(), group=group)
    said = []
    ways: list[Callable[..., Any]] = [made.step, made.find_nonfinite]
    for run in ways:
        try:
            said.append(str(run(X, target=X)))
        except NonFiniteError as error:
            said.append(str(error))
    made.close()
    return said


def test_every_process_stops_with_one_text(workers: WorkerPool) -> None:
    told = workers.run(f"{__name__}:stop_everywhere", 3, 100.0)
    assert told[0] == told[1] == told[2]
    assert "the loss is inf" in told[0][0]
    assert "'1.1'" in told[0][1]
