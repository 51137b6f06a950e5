"""The oracle itself: silent where all is right, loud where anything is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from penstock import Loss, Microbatches, Pipeline, PipelineStage
from penstock.errors import UsageError
from penstock.testing import Case, Verdict, compare, judge, plain_loop
from tests.pipeline.models import X, Y, chain, gradients, mean_loss, sum_loss


class Lies(torch.autograd.Function):
    """The identity with a gradient that is a little off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] + 1e-6


class WrongAfterASplit(nn.Module):
    """Right for the whole batch, wrong for a microbatch: what a pipeline must not hide."""

    def __init__(self, wrong: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.wrong = wrong
        self.bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.bias
        return x if len(x) == len(X) else self.wrong(x)


def case(wrong: Callable[[Tensor], Tensor] | None = None, **options: Any) -> Case:
    layers = [*chain(2), *([WrongAfterASplit(wrong)] if wrong else [])]
    return Case(nn.Sequential(*layers), (X,), Y, options.pop("loss_fn", mean_loss), **options)


def run(of: Case, **options: Any) -> Verdict:
    return compare(of, schedule="1F1B", ranks=2, microbatches=4, **options)


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "gradient": cast("Any", Lies).apply,
    "loss": lambda x: x + 1e-6,
    "missing gradient": torch.Tensor.detach,
    "not a number": lambda x: x * float("nan"),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_it_is_loud_where_something_is_wrong(name: str) -> None:
    run(case()).check(1e-12)
    verdict = run(case(WRONG[name]))
    with pytest.raises(AssertionError, match="differs from the unsplit model by more than 1e-12"):
        verdict.check(1e-12)
    if name == "gradient":
        gaps = verdict.differences()
        assert (gaps["0.0.weight"] > 1e-7, gaps["loss"] < 1e-12) == (True, True)


def test_the_wrong_reduction_is_found() -> None:
    # The pipeline asks the loss before any numbers could be compared.
    with pytest.raises(UsageError, match='It looks like a sum: reduction="sum"'):
        run(case(loss_fn=sum_loss))
    with pytest.raises(UsageError, match='It looks like a mean: reduction="mean"'):
        run(case(loss_fn=Loss(mean_loss, reduction="sum")))
    run(case(loss_fn=Loss(sum_loss, reduction="sum"))).check(1e-12)


def test_a_pipeline_is_judged_with_the_random_numbers_of_its_next_steps() -> None:
    model = nn.Sequential(*chain(2), nn.Dropout(0.5))
    noisy = Case(model, [Microbatches(X.split(2))], Y.split(2), mean_loss)
    with Pipeline(copy.deepcopy(model), ranks=2, loss_fn=mean_loss, seed=3) as pipe:
        pipe.step(*noisy.args, target=noisy.target)
        pipe.zero_grad()
        judge(pipe, noisy, steps=2).check(1e-12)
    stages = [PipelineStage(part, index, 2) for index, part in enumerate(chain(2))]
    by_hand = Pipeline.from_stages(stages, schedule="1F1B", loss_fn=mean_loss)
    with pytest.raises(UsageError, match=r"no parameter 0\.bias, 0\.weight; let the pipeline"):
        judge(by_hand, case())


def test_the_model_is_left_alone() -> None:
    plain = case()
    before = {name: t.clone() for name, t in plain.model.state_dict().items()}
    run(plain, steps=2)
    assert gradients(plain.model) == {}
    assert all(torch.equal(t, before[name]) for name, t in plain.model.state_dict().items())


# ---- verdicts


def verdict(actual: Tensor | None, expected: Tensor | None, loss: float = 1.0) -> Verdict:
    return Verdict(loss, 1.0, {"w": actual}, {"w": expected})


A = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    ("actual", "expected", "gap"),
    [
        (A, A + 0.5, 0.5),
        (None, None, 0.0),
        (A, None, float("inf")),
        (None, A, float("inf")),
        (torch.zeros(0), torch.zeros(0), 0.0),
    ],
)
def test_differences(actual: Tensor | None, expected: Tensor | None, gap: float) -> None:
    assert verdict(actual, expected).differences() == {"loss": 0.0, "w": gap}


def test_digests_are_equal_for_equal_bits_alone() -> None:
    same = [verdict(A, A).digest(), verdict(A.clone(), A).digest()]
    other = [
        verdict(A + 1e-6, A).digest(),
        verdict(None, A).digest(),
        verdict(A, A, loss=1.0 + 2**-52).digest(),
        verdict(torch.tensor([0.0]), A).digest(),
        verdict(torch.tensor([-0.0]), A).digest(),
    ]
    assert same[0] == same[1]
    assert len({str(digest) for digest in [same[0], *other]}) == 6


# ---- the plain loop


def test_the_plain_loop_accumulates_or_trains_between_steps() -> None:
    (loss, one), (again, two) = plain_loop(case()), plain_loop(case(), steps=2)
    assert loss == again
    torch.testing.assert_close([*two.values()], [2 * g for g in one.values() if g is not None])
    verdict = run(case(), steps=3, optimizer=partial(torch.optim.SGD, lr=0.5))
    verdict.check(1e-12)
    assert verdict.expected_loss < loss


def test_microbatches_are_run_one_by_one_and_weighed() -> None:
    whole, ready = case(), case()
    parts = Microbatches(X.split([3, 2, 2, 1]))
    split = replace(ready, args=[parts], target=Y.split([3, 2, 2, 1]))
    assert plain_loop(split)[0] == pytest.approx(plain_loop(whole)[0])
    run(split).check(1e-12)
    one_counts = replace(
        split, loss_fn=Loss(mean_loss, weight=lambda target: float(len(target) == 3))
    )
    assert plain_loop(one_counts)[0] == plain_loop(replace(whole, args=[X[:3]], target=Y[:3]))[0]
    added: dict[str, Any] = {"loss_fn": Loss(sum_loss, reduction="sum")}
    (summed, _), (of_all, _) = plain_loop(replace(split, **added)), plain_loop(case(**added))
    assert summed == pytest.approx(of_all)
    run(replace(split, **added)).check(1e-12)
    # Weights that are not those of the loss: the pipeline sees that, whoever splits the batch.
    for wrong in (whole, split):
        with pytest.raises(UsageError, match="as a mean weighted by 1 and 2"):
            run(replace(wrong, loss_fn=Loss(mean_loss, weight=[1, 2, 3, 1])))
    noisy = Case(nn.Sequential(chain(1), nn.Dropout(0.5)), [parts], split.target, mean_loss)
    run(noisy, steps=2).check(1e-12)
