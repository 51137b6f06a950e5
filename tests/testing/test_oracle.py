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
from torch.distributed.device_mesh import init_device_mesh

from penstock import Loss, Microbatches, Pipeline, PipelineStage, add_loss
from penstock.errors import UsageError
from penstock.testing import Case, Refusal, Verdict, compare, judge, plain_loop
from tests.pipeline.models import X, Y, chain, gradients, mean_loss, sum_loss
from tests.processes import in_processes


class Lies(torch.autograd.Function):
    """The identity with a gradient that is a little off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] + 1e-6


class Counting(nn.Module):
    """Has all that a program may have: a buffer, an added loss, a count; and perhaps something wrong."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor] = lambda self, x: x) -> None:
        super().__init__()
        self.change, self.calls = change, 0
        self.layers = chain(2)
        self.register_buffer("seen", torch.zeros(()))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.change(self, self.layers[0](x))
        if self.training:
            self.seen += 1
        self.calls += 1
        add_loss("size", x.square().mean(), weight=0.5)
        out: Tensor = self.layers[1](x)
        return out


def program(
    change: Callable[[Any, Tensor], Tensor] | None = None, metric: float = 0.0, **options: Any
) -> Case:
    most = {"most": lambda output, target: output.max() + metric}
    # A check of the added loss would count the calls of its forward.
    loss = Loss(mean_loss, metrics=most, weight={"size": "microbatch"})
    model = nn.Sequential(Counting() if change is None else Counting(change), *chain(3))
    x = X.clone().requires_grad_()
    counts: Any = lambda model: {"calls": model[0].calls}  # noqa: E731
    return Case(model, (x,), Y, loss, counts=counts, **options)


def more_seen(self: Any, x: Tensor) -> Tensor:
    self.seen += 1
    return x


def more_calls(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return x


def draws(self: Any, x: Tensor) -> Tensor:
    return nn.functional.dropout(x, 0.5, self.training)


WRONG: dict[str, Any] = {
    "gradient: 0.layers.0.0.weight": lambda self, x: cast("Any", Lies).apply(x),
    "gradient of the argument 0": lambda self, x: cast("Any", Lies).apply(x),
    "output 3": lambda self, x: x + 1e-6,
    "losses: size": lambda self, x: x + 1e-6,
    "loss": lambda self, x: x * float("nan"),
    "gradient: 0.layers.0.0.bias": lambda self, x: x.detach(),
    "buffer: 0.seen": more_seen,
    "count: calls": more_calls,
    "evaluation: output 0": lambda self, x: x if self.training else x + 1e-6,
    "metrics: most": 1e-6,
}
"""What is wrong, and how the model of the pipeline differs from that of the program."""


def off(verdict: Verdict) -> set[str]:
    return {name for name, gap in verdict.differences().items() if not gap <= 1e-12}


@pytest.mark.whole
@pytest.mark.parametrize("name", WRONG)
def test_each_value_that_is_wrong_is_named(name: str) -> None:
    change = WRONG[name]
    verdict = judged(program(metric=change) if isinstance(change, float) else program(change))
    assert name in off(verdict)
    with pytest.raises(AssertionError, match=f"differs from .* by more than 1e-12.*{name}"):
        verdict.check(1e-12)


def judged(other: Case) -> Verdict:
    """The verdict on a pipeline of a model that may be another than that of the program."""
    with Pipeline(copy.deepcopy(other.model), ranks=2, microbatches=4, loss_fn=other.loss) as pipe:
        return judge(program(), pipe, steps=2)


def test_nothing_is_named_where_all_is_right() -> None:
    verdict = judged(program())
    assert verdict.actual.keys() >= WRONG.keys()
    verdict.check(1e-12)


def test_random_numbers_are_those_of_the_plain_loop_and_others_are_left_alone() -> None:
    noisy = program(draws)
    compare(noisy, schedule="ZB-V", ranks=2, microbatches=4, steps=2).check(1e-12)
    with Pipeline(copy.deepcopy(noisy.model), ranks=2, loss_fn=noisy.loss) as pipe:
        pipe.on_step(lambda event: torch.rand(1))
        assert off(judge(noisy, pipe)) == {"random numbers"}


def test_what_a_split_batch_changes_is_named() -> None:
    """A pipeline and a loop over microbatches agree, but the batch as a whole gives another loss."""

    class Centers(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    model = nn.Sequential(Centers(4, 4), nn.Linear(4, 4)).double()
    plain = Case(model, (X,), Y, mean_loss)
    names = off(compare(plain, schedule="1F1B", ranks=2, microbatches=4))
    assert names == {
        f"{name}, whole batch"
        for name in ("loss", "losses: main", "gradient: 0.weight", "gradient: 1.weight")
    }
    said = replace(plain, loss_fn=Loss(mean_loss, check=False))
    compare(said, schedule="1F1B", ranks=2, microbatches=4).check(1e-12)


def test_refusals_are_what_a_program_says() -> None:
    refused = replace(case(loss_fn=sum_loss), refused=Refusal(UsageError, 'reduction="sum"'))
    run(refused).check(1e-12)
    with pytest.raises(AssertionError, match=r"'another' does not match: .*looks like a sum"):
        run(replace(refused, refused=Refusal(UsageError, "another"))).check(1e-12)
    with pytest.raises(AssertionError, match="was not refused by UsageError: gist"):
        run(replace(case(), refused=Refusal(UsageError, "gist"))).check(1e-12)


class OnlyTrains(nn.Sequential):
    def forward(self, input: Any) -> Any:
        if not self.training:
            raise UsageError("it only trains")
        for module in self:
            input = module(input)
        return input


def test_a_refusal_of_the_evaluation_alone_is_not_the_one_that_a_case_expects() -> None:
    model = OnlyTrains(*chain()).double()
    refused = replace(case(), model=model, refused=Refusal(UsageError, "only trains"))
    with pytest.raises(AssertionError, match="was not refused by UsageError"):
        run(refused).check(1e-12)


@in_processes(4)
def test_over_replicas(group: Any) -> None:
    """Two pipelines of two ranks, with a part of the batch each."""
    parts = [Case(chain(2), (X[rows],), Y[rows], mean_loss) for rows in (slice(6), slice(6, 8))]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    of = parts[mesh.get_local_rank("dp")]
    options: Any = {"mesh": mesh, "replicas": "dp", "microbatches": 2, "loss_fn": mean_loss}
    with Pipeline(copy.deepcopy(of.model), **options) as pipe:
        verdict = judge(parts, pipe)
        verdict.check(1e-12)
        names = pipe.job.meet(lambda: [*verdict.differences()])
    wanted = {"loss", "output 0", "gradient: 0.0.weight", "gradient: 1.0.weight"}
    assert wanted <= {name for of in names for name in of}


def case(**options: Any) -> Case:
    return Case(chain(2), (X,), Y, options.pop("loss_fn", mean_loss), **options)


def run(of: Case, **options: Any) -> Verdict:
    return compare(of, schedule="1F1B", ranks=2, microbatches=4, **options)


def test_a_pipeline_is_judged_with_the_random_numbers_of_its_next_steps() -> None:
    model = nn.Sequential(*chain(2), nn.Dropout(0.5))
    noisy = Case(model, [Microbatches(X.split(2))], Y.split(2), mean_loss)
    with Pipeline(copy.deepcopy(model), ranks=2, loss_fn=mean_loss, seed=3) as pipe:
        pipe.step(*noisy.args, target=noisy.target)
        pipe.zero_grad()
        judge(noisy, pipe, steps=2).check(1e-12)
    stages = [PipelineStage(part, index, 2) for index, part in enumerate(chain(2))]
    by_hand = Pipeline.from_stages(stages, schedule="1F1B", loss_fn=mean_loss)
    with pytest.raises(UsageError, match=r"no parameter 0\.bias, 0\.weight; let the pipeline"):
        judge(case(), by_hand)


def test_the_model_is_left_alone() -> None:
    plain = case()
    before = {name: t.clone() for name, t in plain.model.state_dict().items()}
    run(plain, steps=2)
    assert gradients(plain.model) == {}
    assert all(torch.equal(t, before[name]) for name, t in plain.model.state_dict().items())


# ---- verdicts


def verdict(actual: Tensor | None, expected: Tensor | None, loss: float = 1.0) -> Verdict:
    name = "gradient: w"
    return Verdict({"loss": loss, name: actual}, {"loss": 1.0, name: expected})


A = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    ("actual", "expected", "gap"),
    [
        (A, A / 2, 1.0),
        (A, A * 100, 0.99),
        (A * float("nan"), A * float("nan"), 0.0),
        (A, A[:1], float("inf")),
        (None, None, 0.0),
        (A, None, float("inf")),
        (None, A, float("inf")),
        (torch.zeros(0), torch.zeros(0), 0.0),
    ],
)
def test_differences(actual: Tensor | None, expected: Tensor | None, gap: float) -> None:
    assert verdict(actual, expected).differences() == {"loss": 0.0, "gradient: w": gap}


def test_what_one_side_lacks_differs() -> None:
    both = Verdict({"loss": 1.0, "output 0": A}, {"loss": 1.0, "output 1": A})
    infinite = float("inf")
    assert both.differences() == {"loss": 0.0, "output 0": infinite, "output 1": infinite}


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
    assert verdict.expected["loss"] < loss


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
