"""What a loss is: a mean or a sum over samples, which is checked, or something over the whole batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import Loss, Microbatches, Pipeline, Replicas, Split
from penstock.errors import ScheduleError, UsageError
from penstock.testing import Case, compare, plain_loop
from tests.catalogue.making import Does
from tests.pipeline.models import X, Y, assert_same, chain, gradients, mean_loss, sum_loss
from tests.processes import in_processes

CLASSES = torch.tensor([0, 1, 2, 3, 3, 3, 3, 1])


def towers() -> nn.Module:
    """Two encoders and a temperature, as in CLIP."""
    torch.manual_seed(0)
    return Does(
        lambda m, left, right: (m.last(m.left(left)), m.right(right), m.scale.exp()),
        left=nn.Linear(4, 4), right=nn.Linear(4, 4), last=nn.Linear(4, 4),
        scale=nn.Parameter(torch.tensor(0.5)),
    ).double()  # fmt: skip


def contrastive(output: tuple[Tensor, Tensor, Tensor], target: Any) -> Tensor:
    left, right, scale = output
    logits = scale * left @ right.T
    return functional.cross_entropy(logits, torch.arange(len(logits)))


def plain(model: nn.Module, loss_fn: Any, target: Any, *args: Any) -> tuple[float, Any]:
    loss = loss_fn(model(*args), target)
    loss.backward()
    return float(loss.detach()), gradients(model)


def contrasts(group: Any = None, ranks: int = 2, microbatches: int = 4) -> None:
    """Two steps, with the numbers of the whole batch."""
    case = Case(towers(), (X, Y), None, Loss(contrastive, over="batch"))
    sizes: dict[str, Any] = {"ranks": ranks, "microbatches": microbatches, "mesh": group}
    verdict = compare(case, schedule="GPipe", steps=2, **sizes)
    verdict.check(1e-12)
    loss, expected = plain_loop(case, 2)
    assert verdict.loss == pytest.approx(loss, rel=1e-12)
    assert_same(verdict.gradients, {name: expected[name] for name in verdict.gradients})


def test_a_loss_over_the_batch_does_not_depend_on_microbatches() -> None:
    for ranks, microbatches in [(1, 1), (1, 4), (2, 2), (3, 3), (2, 8)]:
        contrasts(None, ranks, microbatches)


@in_processes(2)
def test_nor_does_it_between_processes(group: Any) -> None:
    contrasts(group)


def test_a_loss_over_the_batch_has_the_options_of_others() -> None:
    """Sums, accumulation, replicas, ragged batches, rules, metrics."""
    rows, target = X[:7], Y[:7]
    whole = Loss(mean_loss, over="batch")
    for loss_fn in (whole, Loss(sum_loss, over="batch", reduction="sum")):
        case = Case(chain(), (rows,), target, loss_fn)
        compare(case, schedule="GPipe", ranks=3, microbatches=3).check(1e-12)
        halves = piped(loss_fn, schedule="GPipe")
        for part in (slice(0, 4), slice(4, 8)):
            halves.step(X[part], target=Y[part], accumulate=2)
        assert_same(gradients(halves), plain(chain(), loss_fn.function, Y, X)[1])
    two = Replicas(2, lambda numbers: numbers * 2)
    measured = replace(whole, metrics={"largest": lambda output, target: output.max()})
    pipe = Pipeline(chain(), schedule="GPipe", ranks=2, loss_fn=measured, replicas=two)
    assert pipe.step(X, target=Y).loss == pytest.approx(plain(chain(), mean_loss, Y, X)[0])
    turned = Pipeline(
        chain(), schedule="GPipe", ranks=2, microbatches=2,
        loss_fn=Loss(lambda output, target: mean_loss(output, target.T), over="batch"),
        split={"target": Split(1), "output": Split(0)},
    )  # fmt: skip
    assert turned.step(X, target=Y.T).loss == pytest.approx(plain(chain(), mean_loss, Y, X)[0])


def test_a_schedule_that_begins_backward_early_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"use .*GPipe"):
        piped(Loss(mean_loss, over="batch"), schedule="1F1B")


# ---- a loss is checked


def negatives(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output @ target.T, torch.arange(len(output)))


def root(output: Tensor, target: Tensor) -> Tensor:
    return mean_loss(output, target).sqrt()


def piped(loss_fn: Any, **options: Any) -> Pipeline:
    return Pipeline(chain(), **{"ranks": 2, "microbatches": 2, "loss_fn": loss_fn} | options)


@pytest.mark.parametrize("function", [root, negatives])
def test_a_loss_that_is_no_mean_is_refused(function: Any) -> None:
    """For more kinds see test_loss_check.py."""
    for call in ("step", "evaluate"):
        with pytest.raises(UsageError, match="microbatches 0 and 1 together") as caught:
            getattr(piped(function), call)(X, target=Y)
        assert 'over="batch"' in str(caught.value)
    assert piped(Loss(function, check=False)).step(X, target=Y).loss > 0
    whole = piped(Loss(function, over="batch"), schedule="GPipe")
    assert whole.step(X, target=Y).loss == pytest.approx(float(function(chain()(X), Y).detach()))


def by_halves(value: Tensor, sizes: Any) -> list[Tensor]:
    return list(value.split(list(sizes)))


@pytest.mark.parametrize("way", ["Microbatches", "a rule", "a function"])
def test_a_batch_that_the_user_splits_is_checked_too(way: str) -> None:
    rules: dict[str, Any] = {
        "Microbatches": None,
        "a rule": {0: by_halves, "target": by_halves},
        "a function": lambda args, kwargs, target, count: Microbatches(
            args[0].split(4), targets=target.split(4)
        ),
    }

    def run(function: Any) -> float:
        pipe = piped(function, split=rules[way])
        if way == "Microbatches":
            return pipe.step(Microbatches(X.split(4)), target=Y.split(4)).loss
        return pipe.step(X, target=Y).loss

    assert run(mean_loss) == pytest.approx(plain(chain(), mean_loss, Y, X)[0])
    with pytest.raises(UsageError, match="microbatches 0 and 1 together"):
        run(root)


def with_loss(m: Any, x: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Computes its loss in its forward, as models of transformers do."""
    output = m.dropout(m.counting(m.model(x)))
    if m.noise:
        output = output + m.noise * torch.rand_like(output)
    return {"loss": m.loss(output, target), "logits": output}


CALLED: list[int] = []


def counted(m: Any, x: Tensor) -> Any:
    CALLED.append(1)
    m.calls += 1
    return m.layer(x)


def inside(function: Any, **options: Any) -> Pipeline:
    noise, said = options.pop("noise", 0.0), options.pop("said", {})
    loss_fn = Loss(lambda output, _: output["loss"], **said)
    counting = Does(counted, layer=nn.Linear(4, 4), calls=0).double()
    model = Does(
        with_loss,
        model=chain(),
        counting=counting,
        dropout=nn.Dropout(0.5),
        loss=function,
        noise=noise,
    )
    return Pipeline(model, ranks=2, loss_fn=loss_fn, **{"microbatches": 4, **options})


@pytest.mark.parametrize(
    ("function", "remedy"),
    [(sum_loss, 'It looks like a sum: reduction="sum"'), (negatives, 'over="batch"')],
)
def test_a_loss_that_the_forward_computes_is_checked_too(function: Any, remedy: str) -> None:
    for microbatches in (2, 4):
        pipe = inside(function, microbatches=microbatches)
        with pytest.raises(UsageError, match="the loss of the first microbatch is") as caught:
            pipe.step(X, Y, target=None)
        assert remedy in str(caught.value)
    # Some forwards compute their loss in float32, whatever comes in.
    single = inside(lambda output, target: mean_loss(output.float(), target.float()))
    unchecked = inside(function, said={"check": False})
    one_sample = inside(function, microbatches=8)
    for let_be in (single, unchecked, one_sample, inside(function, noise=0.1)):
        assert let_be.step(X, Y, target=None).finite


def test_the_check_of_a_forward_runs_the_first_microbatch_whole_and_in_halves() -> None:
    pipe = inside(mean_loss, microbatches=4)
    model: Any = pipe.model
    state, torchs = pipe.randomness.state_dict(), torch.get_rng_state()
    CALLED.clear()
    for steps, calls in ((1, 4 + 3), (2, 4 + 3 + 4)):
        pipe.step(X, Y, target=None)
        assert len(CALLED) == calls
        assert model.counting.calls == 4 * steps, "what a module counts is that of the steps"
    assert model.dropout.training
    assert torch.equal(torchs, torch.get_rng_state())
    assert pipe.randomness.state_dict() == {**state, "step": 2}


@in_processes(2)
def test_a_forward_is_checked_between_processes(group: Any) -> None:
    with inside(negatives, mesh=group) as pipe:
        with pytest.raises(UsageError, match="the loss of the first microbatch is"):
            pipe.step(X, Y, target=None)
        pipe.zero_grad()
        assert pipe.evaluate(X, Y, target=None).loss > 0


class Counts(nn.Module):
    """A loss with a state of its own, which draws no numbers."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, list[float]()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = mean_loss(output, target)
        self.norm(output.detach())
        self.calls += 1
        self.seen.append(float(loss.detach()))
        self.mean.lerp_(loss.detach(), 0.5)
        return loss


@pytest.mark.parametrize("check", [True, False])
def test_the_first_step_calls_the_loss_four_times_more(
    check: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is put back, and nothing is compared later; ``check=False`` leaves the calls out."""
    caplog.set_level("INFO")
    counts, alone = Counts(), Counts()
    pipe = piped(Loss(counts, check=check), microbatches=4)
    before = torch.get_rng_state()
    results = [pipe.step(X, target=Y) for _ in range(12)]
    assert torch.equal(before, torch.get_rng_state())
    for x, y in zip(X.split(2), Y.split(2), strict=True):
        alone(chain()(x), y)
    assert counts.calls == 12 * 4 + 4 * check
    assert results[0].loss == pytest.approx(sum(alone.seen) / 4)
    assert counts.seen[-4:] == pytest.approx(alone.seen)
    said = ["in four calls" in record.getMessage() for record in caplog.records]
    assert said.count(True) == check


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_comparison_compiles_nothing() -> None:
    graphs = list[int]()

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(inputs))
        return graph

    compiled: Any = torch.compile(mean_loss, backend=backend)
    pipe = piped(compiled, microbatches=4)
    for _ in range(2):
        assert pipe.step(X, target=Y).loss == pytest.approx(plain(chain(), mean_loss, Y, X)[0])
    assert len(graphs) == 1


def test_a_comparison_is_of_few_numbers() -> None:
    """Of one large row, some tokens all along."""
    sizes, classes = list[int](), 40_000

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            sizes.append(output.numel())
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())

    x = torch.linspace(-1, 1, 2 * 128 * 4).reshape(2, 128, 4)
    target = torch.arange(256).reshape(2, 128).masked_fill(torch.arange(128) < 40, -100)
    target[1, 60:] = -100
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, classes))
    for over, fits in [("tokens", True), ("samples", False)]:
        loss = Loss(loss_fn, over=cast("Any", over))
        pipe = Pipeline(model, ranks=2, microbatches=2, loss_fn=loss)
        if fits:
            expected = float(loss_fn(model(x), target).detach())
            assert pipe.step(x, target=target).loss == pytest.approx(expected, rel=1e-5)
        else:
            with pytest.raises(UsageError, match=r"over=\"tokens\""):
                pipe.step(x, target=target)
    assert 0 < max(sizes[:4]) <= 2**22 < classes * 128


def keeps_its_scale(m: Any, x: Tensor) -> Any:
    m.kept = x.detach().abs().mean()
    return m.layer(x)


def test_a_loss_that_reads_what_a_module_kept_of_the_last_call_is_let_be() -> None:
    """Of two microbatches together it says nothing: what was kept is that of the second one by then."""
    last: Any = Does(keeps_its_scale, layer=nn.Linear(4, 4)).double()
    model = nn.Sequential(nn.Linear(4, 4).double(), last)

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        return mean_loss(output, target) * last.kept

    assert Pipeline(model, ranks=2, microbatches=2, loss_fn=loss_fn).step(X, target=Y).loss > 0


def test_what_cannot_be_compared_is_let_be() -> None:
    """A loss with random numbers, and outputs that cannot be put together."""
    drawn = piped(lambda output, y: (functional.dropout(output, 0.5) - y).abs().mean())
    assert drawn.step(X, target=Y).loss > 0
    # Of 3 and 2 samples: each has 6 rows, so that nobody knows which belong to a sample.
    six = nn.Sequential(nn.Linear(4, 4), Does(lambda _, x: x.repeat(6 // len(x), 1))).double()
    pipe = Pipeline(
        six, ranks=2, microbatches=2,
        loss_fn=lambda output, target: (output.mean() - target.mean()).square(),
    )  # fmt: skip
    assert pipe.step(X[:5], target=Y[:5]).loss > 0


# ---- a loss that differentiates the model


def bounded() -> nn.Module:
    """It gives u = x (1 - x) net(x), and x."""
    torch.manual_seed(0)
    return Does(
        lambda m, x: (x * (1 - x) * m.second(m.first(x).tanh()), x),
        first=nn.Linear(4, 8), second=nn.Linear(8, 4),
    ).double()  # fmt: skip


def residual(output: tuple[Tensor, Tensor], target: Any) -> Tensor:
    u, x = output
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    return (slope**2).mean()


def slope_of_output(output: tuple[Tensor, Tensor], target: Any) -> Tensor:
    u, _ = output
    (slope,) = torch.autograd.grad((u**2).sum(), u, create_graph=True)
    return (slope**2).mean()


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_derivative_through_other_stages_is_refused() -> None:
    x = X.clone().requires_grad_()
    pipe = Pipeline(bounded(), ranks=2, microbatches=2, loss_fn=residual)
    with pytest.raises(UsageError, match="differentiates by an output of the model"):
        pipe.step(x, target=None)
    expected = plain(bounded(), residual, None, x)[0]
    whole = Pipeline(bounded(), ranks=1, microbatches=2, loss_fn=residual)
    assert whole.step(x, target=None).loss == pytest.approx(expected)
    local = Pipeline(bounded(), ranks=2, microbatches=2, loss_fn=slope_of_output)
    expected = plain(bounded(), slope_of_output, None, x)[0]
    assert local.step(x, target=None).loss == pytest.approx(expected)


def test_a_batch_norm_in_training_is_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    for evaluates in (False, True):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
        model[1].train(not evaluates)
        pipe = Pipeline(model, ranks=2, microbatches=2, loss_fn=mean_loss)
        for _ in range(2):
            pipe.step(X, target=Y)
    texts = [record.getMessage() for record in caplog.records]
    assert ["1 normalises each of the 2 microbatches" in text for text in texts] == [True]


def pooled(m: Any, nodes: Tensor, graph: Tensor) -> Tensor:
    """One output for each graph, from the nodes of all graphs of a microbatch."""
    hidden = m.second(m.first(nodes).tanh())
    return torch.zeros(2, 4, dtype=hidden.dtype).index_add(0, graph, hidden)


def test_a_microbatch_of_graphs_weighs_its_targets() -> None:
    sizes = [(1, 1), (2, 4)]
    calls = [
        (X[: sum(of)], torch.repeat_interleave(torch.arange(2), torch.tensor(of))) for of in sizes
    ]
    targets = [Y[:2], Y[2:4]]
    model = Does(pooled, first=nn.Linear(4, 4), second=nn.Linear(4, 4)).double()
    one, two = (
        float(mean_loss(model(*call), y).detach()) for call, y in zip(calls, targets, strict=True)
    )
    pipe = Pipeline(model, ranks=2, loss_fn=mean_loss)
    result = pipe.step(Microbatches(calls), target=targets)
    assert result.loss == pytest.approx((one + two) / 2)
    assert result.weight == 4
    weighed = pipe.step(Microbatches(calls, samples=[1, 3]), target=targets)
    assert weighed.loss == pytest.approx((one + 3 * two) / 4)
