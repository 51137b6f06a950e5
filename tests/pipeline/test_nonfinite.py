"""A loss or gradient that is not finite: every rank hears of it before an optimizer moves."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Loss, Pipeline
from penstock.errors import NonFiniteError
from tests.catalogue.making import Does
from tests.processes import in_processes

X = torch.arange(12.0).reshape(4, 3)
"""Four samples; the last one is the only one with an 11."""
GOOD = X[:3].repeat(2, 1)[:4]
Function = Callable[[Tensor, Tensor], Tensor]


def part(function: Function = torch.mul) -> Any:
    """A function of a value and a weight of 1."""
    return Does(lambda m, x: function(x, m.scale), scale=nn.Parameter(torch.ones(1)))


def divides(x: Tensor, scale: Tensor) -> Tensor:
    """By zero, in the marked sample."""
    marked = x.device.type != "meta" and bool((x.detach() == 11).any())
    return x * scale / (0 if marked else 1)


def roots(x: Tensor, scale: Tensor) -> Tensor:
    """Finite forward, but the gradient of a root at 0 is not."""
    return (x * scale - x).abs().sqrt() + x


def root_of_weight(x: Tensor, scale: Tensor) -> Tensor:
    """Finite forward; the gradient of the weight alone is not."""
    return x + (scale - 1).abs().sqrt() * x.detach()


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()


def pipe(
    *functions: Function, tied: bool = False, nonfinite: Any = "stop", **options: Any
) -> Pipeline:
    """Three stages, the second one of two modules at least; the first and the last may share their weight."""
    ends = part(*functions[:tied]), part(*functions[:tied])
    if tied:
        ends[1].scale = ends[0].scale
    middle = nn.Sequential(part(), *map(part, functions[tied:]))
    model = nn.Sequential(ends[0], middle, ends[1])
    return Pipeline(
        model, ranks=3, microbatches=4, loss_fn=Loss(mean_loss, nonfinite=nonfinite), **options
    )


def test_a_loss_that_is_not_finite_stops_and_a_good_batch_goes_on() -> None:
    made = pipe(divides)
    assert made.step(GOOD, target=X).finite
    with pytest.raises(NonFiniteError, match=r"step 2: the loss is inf; .*find_nonfinite"):
        made.step(X, target=X)
    made.zero_grad()
    assert made.step(GOOD, target=X).finite
    assert made.evaluate(X, target=X).loss == float("inf"), "an evaluation may be"


@pytest.mark.parametrize("what", ["skip", "warn"])
def test_skipping_drops_the_gradients_and_warning_leaves_them(
    what: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made = pipe(divides, nonfinite=what)
    made.randomness.load_state_dict({"seed": 0, "step": 6})
    made.find_nonfinite(X, target=X)
    with caplog.at_level(logging.WARNING, "penstock"):
        assert not made.step(X, target=X).finite
    assert {p.grad is None for p in made.parameters()} == {what == "skip"}
    # Finding it is no step.
    assert "step 7 is not finite" in caplog.text
    assert "the loss is inf" in caplog.text


FINDINGS: dict[str, tuple[Callable[[], Pipeline], float, str, str]] = {
    "an output": (lambda: pipe(divides), 1, "the loss is inf",
        r"output of microbatch 3 in stage 1, rank 1, action 1F3, .* module '1.1' from finite"),
    "a loss": (pipe, 1e30, "the loss is inf", "the loss of microbatch 0 in stage 2, rank 2"),
    "inputs": (lambda: pipe(roots), 1, "but gradients are not finite",
        "the gradient of the inputs of microbatch 0 in stage 1, rank 1"),
    "inputs of two stages": (lambda: pipe(roots, tied=True), 1, "but gradients are not finite",
        "the gradient of the inputs of microbatch 0 in stage 2, rank 2"),
    "weights": (lambda: pipe(root_of_weight), 1, "but gradients are not finite",
        "the gradients of the weights of stage 1, rank 1"),
    "shared weights": (lambda: pipe(root_of_weight, tied=True), 1, "but gradients are not finite",
        "the gradients of the weights of stage 2, rank 2"),
}  # fmt: skip
"""How to make it, by what the batch is scaled, what the step says, and what is found."""


@pytest.mark.parametrize("what", FINDINGS)
def test_what_is_not_finite_is_found(what: str) -> None:
    make, factor, raises, says = FINDINGS[what]
    made, x = make(), X * factor
    with pytest.raises(NonFiniteError, match=raises):
        made.step(x, target=x)
    if what in ("an output", "a loss"):
        assert made.find_nonfinite(GOOD, target=GOOD) is None, "what the step left is not looked at"
    made.zero_grad()
    finding = made.find_nonfinite(x, target=x)
    assert finding is not None
    assert re.search(says, str(finding)), finding


def test_finite_gradients_in_float16_may_have_a_norm_beyond_it() -> None:
    halves = (nn.Parameter(torch.full((256,), 0.5, dtype=torch.float16)) for _ in range(2))
    scales = [Does(lambda m, x: x * m.scale, scale=half) for half in halves]
    made = Pipeline(
        nn.Sequential(*scales), ranks=2, microbatches=2,
        loss_fn=Loss(lambda output, target: (output.float() * target).sum(), reduction="sum"),
    )  # fmt: skip
    made.step(torch.ones(4, 256, dtype=torch.float16), target=torch.full((4, 1), 3e3))
    gradients = [p.grad for p in made.parameters() if p.grad is not None]
    assert {float(gradient.abs().max()) for gradient in gradients} == {6e3}
    norm = 6e3 * (2 * 256) ** 0.5
    assert made.clip_grad_norm_(1.0, error_if_nonfinite=True) == pytest.approx(norm)
    assert made.weights.grad_norm() == pytest.approx(1.0, rel=1e-3)


def test_sparse_gradients_are_looked_at() -> None:
    root = Does(lambda _, found: (found - found.detach()).abs().sqrt() + found.detach())
    model = nn.Sequential(nn.Sequential(nn.Embedding(4, 3, sparse=True), root), nn.Identity())
    made = Pipeline(model, ranks=2, microbatches=2, loss_fn=mean_loss)
    with pytest.raises(NonFiniteError, match="but gradients are not finite"):
        made.step(torch.arange(4), target=X)


@pytest.mark.parametrize("is_first", [True, False])
def test_finding_changes_nothing_and_names_weights(is_first: bool) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(3)
    model = nn.Sequential(part(), norm, nn.Linear(3, 3), part())
    model[3].scale = model[0].scale
    made = Pipeline(model, ranks=2, microbatches=2, loss_fn=mean_loss)
    if not is_first:
        made.step(X, target=X)

    def held() -> dict[str, Tensor]:
        grads = {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}
        return grads | {name: buffer.clone() for name, buffer in norm.named_buffers()}

    before = held()
    assert made.find_nonfinite(X, target=X) is None
    torch.testing.assert_close(held(), before, rtol=0, atol=0)
    with torch.no_grad():
        next(made.parameters()).fill_(float("nan"))
    finding = made.find_nonfinite(X, target=X)
    assert finding is not None
    assert finding.weights == ("0.scale", "3.scale")


@in_processes(3)
def test_every_process_stops_with_one_text(group: Any) -> None:
    with pipe(divides, mesh=group) as made:
        with pytest.raises(NonFiniteError, match="the loss is inf") as caught:
            made.step(X, target=X)
        finding = made.find_nonfinite(X, target=X)
        told = made.job.meet(lambda: [str(caught.value), str(finding)])
    assert "'1.1'" in str(finding)
    assert told == told[:1] * 3
