"""Losses beside the plain loop: weights, accumulation, losses of any stage, metrics, the scaler."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from penstock import (
    Loss,
    LossScaler,
    Pipeline,
    Replicas,
    add_loss,
    collect_losses,
)
from penstock._engine.microbatches import MISSING
from penstock.errors import UsageError
from penstock.schedule import Placement, Schedule, parse_action
from penstock.testing import Case, WorkerPool, compare, plain_loop
from tests.catalogue.cases import (
    IGNORED,
    WORDS,
    draw,
    language,
    pipeline,
    token_loss,
    token_sum,
    valid,
)
from tests.catalogue.making import Does
from tests.pipeline.models import WIDTH, assert_same, gradients
from tests.processes import in_processes

LENGTH = 5
X = draw(7, LENGTH)
Y = X.roll(-1, 1)
RAGGED_Y = torch.where(
    torch.arange(LENGTH) < torch.tensor([[1], [5], [0], [0], [2], [4], [1]]), Y, IGNORED
)
"""Its rows have 1, 5, 0, 0, 2, 4 and 1 valid tokens: one of four microbatches has none."""
SIZES = [2, 2, 2, 1]
"""Of four microbatches of seven samples."""


def make(stages: int = 2, **options: Any) -> Pipeline:
    """Of a language model."""
    return pipeline(language(), stages, **({"ranks": 2, "microbatches": 4} | options))


def whole_batch(target: Tensor, steps: int = 1, rows: slice = slice(None)) -> tuple[float, Any]:
    """The plain loop: all samples at once."""
    return plain_loop(language((X[rows],), target[rows]), steps)


# ---- what a microbatch weighs

OF_TOKENS: dict[str, Loss] = {
    "mean": Loss(token_loss, weight=valid),
    "sum": Loss(token_sum, weight=valid, reduction="sum"),
}
WEIGHTS: list[Any] = [
    None,
    [float(valid(part)) for part in RAGGED_Y.split(SIZES)],
    lambda target: int(valid(target)),
    lambda target: valid(target).float()[None],
]
"""The pipeline's own, and others that a step is given."""


@pytest.mark.parametrize("reduction", OF_TOKENS)
def test_unequal_counts_of_tokens(reduction: str) -> None:
    loss, grads = whole_batch(RAGGED_Y)
    for weight in WEIGHTS if reduction == "mean" else WEIGHTS[:1]:
        pipe = make(schedule="ZB-H1", loss_fn=OF_TOKENS[reduction])
        result = pipe.step(X, target=RAGGED_Y, loss_weight=weight)
        assert result.loss == pytest.approx(loss, abs=1e-14)
        assert result.weight == 13
        assert_same(gradients(pipe), grads)
    assert pipe.evaluate(X, target=RAGGED_Y).loss == pytest.approx(loss, abs=1e-14)
    # A number is dealt by samples.
    result = make().step(X, target=Y, loss_weight=14.0)
    assert result.loss == pytest.approx(whole_batch(Y)[0])
    assert result.weight == 14


@pytest.mark.parametrize("reduction", OF_TOKENS)
def test_a_batch_that_weighs_nothing_changes_nothing(reduction: str) -> None:
    pipe = make(loss_fn=replace(OF_TOKENS[reduction], metrics={"accuracy": accuracy}))
    result = pipe.step(X, target=torch.full_like(Y, IGNORED))
    assert (result.loss, result.weight) == (0.0, 0.0)
    pipe.step(X, target=RAGGED_Y, total_weight=0.0)
    assert all(float(grad.abs().max()) == 0.0 for grad in gradients(pipe).values())


# ---- several steps


@pytest.mark.parametrize("reduction", OF_TOKENS)
def test_several_steps_equal_one_of_all(reduction: str) -> None:
    """Accumulated, if they weigh alike, or of a known total."""
    loss_fn = OF_TOKENS[reduction]
    alike = make(microbatches=2, loss_fn=replace(loss_fn, weight=None))
    losses = [alike.step(X[i : i + 3], target=Y[i : i + 3], accumulate=2).loss for i in (0, 3)]
    whole, grads = plain_loop(replace(language((X[:6],), Y[:6]), loss_fn=loss_fn.function))
    assert_same(gradients(alike), grads)
    assert sum(losses) / (2 if reduction == "mean" else 1) == pytest.approx(whole)
    pipe, total = make(loss_fn=loss_fn), float(valid(RAGGED_Y))
    steps = [
        pipe.step(X[rows], target=RAGGED_Y[rows], total_weight=total)
        for rows in (slice(0, 4), slice(4, 7))
    ]
    loss, grads = whole_batch(RAGGED_Y)
    assert_same(gradients(pipe), grads)
    assert sum(s.loss * s.weight for s in steps) / total == pytest.approx(loss)


@pytest.mark.parametrize("held", [list, lambda w: {"main": w}, torch.tensor])
def test_weights_that_are_changed_in_place_are_those_of_the_next_step(held: Any) -> None:
    weights = [1.0, 1.0]
    given = held(weights)
    numbers = given["main"] if isinstance(given, dict) else given
    model, rows = nn.Linear(WIDTH, WIDTH), torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    loss_fn = Loss(functional.mse_loss, weight=given, check=False)
    pipe = Pipeline(model, ranks=1, microbatches=2, loss_fn=loss_fn)
    for first in (1.0, 2.0, 6.0):
        numbers[0] = first
        each = [functional.mse_loss(model(half), half).item() for half in rows.chunk(2)]
        expected = (first * each[0] + each[1]) / (first + 1)
        assert pipe.step(rows, target=rows).loss == pytest.approx(expected)


def test_what_a_step_weighs_among_others_must_be_known() -> None:
    pipe = make(loss_fn=Loss(token_loss, weight=valid))
    with pytest.raises(
        UsageError, match=r"accumulate= with weights of the loss.*give total_weight="
    ):
        pipe.step(X, target=Y, accumulate=2)
    assert pipe.step(X, target=Y).loss > 0, "nothing was poisoned"


@pytest.mark.parametrize(
    ("averaged", "reduction", "factor"),
    [(False, "mean", 0.5), (True, "mean", 1.0), (True, "sum", 14.0 * LENGTH)],
)
def test_replicas_weigh_by_what_all_have(averaged: bool, reduction: Any, factor: float) -> None:
    """As if another pipeline had the same batch: its share of the gradient is added by nobody here."""
    others = Replicas(2, lambda values: values * 2, averaged=averaged)
    loss_fn = Loss(token_loss if reduction == "mean" else token_sum, reduction=reduction)
    pipe, (mean, grads) = make(replicas=others, loss_fn=loss_fn), whole_batch(Y)
    result = pipe.step(X, target=Y)
    assert result.loss == pytest.approx(mean * (1 if reduction == "mean" else factor))
    assert result.weight == 14
    assert_same(gradients(pipe), {name: factor * grad for name, grad in grads.items()})


# ---- losses of stages


def chained(function: Callable[[Tensor], Any]) -> nn.Sequential:
    """Calls a function with a value between its layers, such as one that adds a loss."""
    adds = Does(lambda _, x: (function(x), x * 1.0)[1])
    layers = nn.Embedding(WORDS, WIDTH), adds, nn.Linear(WIDTH, WORDS)
    return nn.Sequential(*layers).double()


def test_names_may_come_and_go_and_elsewhere_nothing_happens() -> None:
    add_loss("balance", torch.zeros(()))
    names: list[str] = []
    model = chained(lambda x: list(map(add_loss, names, [x.square().mean()] * len(names))))
    pipe = Pipeline(model, ranks=3, microbatches=4, loss_fn=token_loss)
    for names[:] in ([], ["b"], ["a", "b"], [], ["a"]):
        assert sorted(pipe.step(X, target=Y).losses) == [*names, "main"]
        pipe.predict(X)


def test_a_loss_that_is_none_is_refused() -> None:
    adds: dict[str, Callable[[Tensor], Any]] = {
        "with gradients disabled, so it would": lambda x: torch.no_grad()(add_loss)("a", x.mean()),
        "must be a text other than 'main'": lambda x: add_loss("main", x.mean()),
        r"needs a scalar tensor, not \[2, 5, 4\]": lambda x: add_loss("a", x),
    }
    for says, add in adds.items():
        pipe = Pipeline(chained(add), ranks=2, microbatches=4, loss_fn=token_loss)
        with pytest.raises(UsageError, match=says):
            pipe.step(X, target=Y)


def look_ahead(m: Any, tokens: Tensor, labels: Tensor) -> Any:
    """Predicts labels, and early on those one place further."""
    hidden = m.embed(tokens)
    early = m.early(hidden)
    add_loss("ahead", token_loss(early[:, :-1], labels[:, 1:]), weight=0.5)
    return m.head(hidden.tanh())


def looking_ahead() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, WORDS)
    return Does(look_ahead, **dict(zip(("embed", "early", "head"), layers, strict=True))).double()


def valid_ahead(labels: Tensor) -> Tensor:
    return valid(labels[:, 1:])


BY_NAME = {"main": valid, "ahead": valid_ahead}
"""Of the last microbatch, whose added loss is a mean over nothing, the second is 0."""


AHEAD = Case(looking_ahead(), (X, RAGGED_Y), RAGGED_Y, Loss(token_loss, weight=BY_NAME))


def ahead(weight: Any = None, **options: Any) -> Pipeline:
    loss_fn = Loss(token_loss, weight=weight)
    return Pipeline(looking_ahead(), ranks=2, microbatches=4, loss_fn=loss_fn, **options)


@in_processes(2)
def test_an_added_loss_counts_by_a_weight_of_its_own(group: Any) -> None:
    """A step has the numbers of the whole batch."""
    loss, grads = plain_loop(AHEAD)
    with collect_losses() as added:
        AHEAD.model(X, RAGGED_Y)
    with ahead(BY_NAME, mesh=group) as pipe:
        result = pipe.step(X, RAGGED_Y, target=RAGGED_Y)
        here = gradients(pipe)
    assert result.loss == pytest.approx(loss, abs=1e-14)
    assert result.losses["ahead"] == pytest.approx(float(added.named()["ahead"]), abs=1e-14)
    assert_same(here, {name: grads[name] for name in here})


def test_steps_of_a_larger_batch_divide_each_loss_by_its_own_total() -> None:
    pipe = Pipeline(looking_ahead(), ranks=2, microbatches=2, loss_fn=AHEAD.loss_fn)
    totals = {name: float(count(RAGGED_Y)) for name, count in BY_NAME.items()}
    for rows in (slice(0, 4), slice(4, 7)):
        pipe.step(X[rows], RAGGED_Y[rows], target=RAGGED_Y[rows], total_weight=totals)
    assert_same(gradients(pipe), plain_loop(AHEAD)[1])
    with pytest.raises(UsageError, match=r"total_weight= a dict with a number for each"):
        pipe.step(X, RAGGED_Y, target=RAGGED_Y, total_weight=13.0)


LABELS = RAGGED_Y.index_put((torch.tensor(6), torch.tensor(1)), torch.tensor(0))
"""Each microbatch has both losses."""


def test_weights_by_name_are_checked(caplog: pytest.LogCaptureFixture) -> None:
    def said(pipe: Pipeline, weight: Any = None) -> list[str]:
        caplog.clear()
        pipe.step(X, LABELS, target=LABELS, loss_weight=weight)
        return [record.getMessage() for record in caplog.records]

    # One of no loss is named; one that counts something else is a warning, once.
    pipe, misspelt = ahead(), {"main": valid, "haed": valid, "ahead": "microbatch"}
    assert ["names haed, and no such loss was added" in one for one in said(pipe, misspelt)] == [
        True
    ]
    pipe = ahead(valid)
    assert ["weight={'main': ..., 'ahead': a function" in one for one in said(pipe, valid)] == [
        True
    ]
    assert said(pipe, valid) == said(pipe, {"ahead": "microbatch"}) == []
    assert said(ahead({"main": valid, "ahead": "microbatch"})) == said(ahead(BY_NAME)) == []
    wrong: Any = {"main": valid, "ahead": valid}
    with pytest.raises(UsageError, match=r"the weight of 'ahead' does not count"):
        said(ahead(wrong))
    with pytest.raises(
        UsageError, match=r"weight\['ahead'\]='tokens' of the loss: must be a number"
    ):
        said(ahead(wrong), wrong | {"ahead": "tokens"})
    # Numbers may come in a list or in a tensor.
    counts = [float(valid(part)) for part in LABELS.tensor_split(4)]
    losses = {
        ahead()
        .step(X, LABELS, target=LABELS, loss_weight={"main": main, "ahead": "microbatch"})
        .loss
        for main in (counts, torch.tensor(counts))
    }
    assert len(losses) == 1


def masks(m: Any, x: Tensor, mask: Tensor) -> Any:
    """Adds a mean over those samples that a mask leaves."""
    hidden = m.first(x)
    add_loss("kept", (hidden.square().mean(1) * mask).sum() / mask.sum())
    return m.last(hidden.tanh())


def test_a_mean_over_nothing_does_not_reach_the_gradients() -> None:
    x = torch.linspace(-1, 1, 6 * WIDTH).double().reshape(6, WIDTH)
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0]).double()
    weight = {"kept": lambda target: target[:, 0].sum()}
    loss_fn = Loss(lambda output, _: output.square().mean(), weight=weight)
    layers = {name: nn.Linear(WIDTH, WIDTH) for name in ("first", "last")}
    model = Does(masks, **layers).double()
    expected = plain_loop(Case(model, (x, mask), mask[:, None], loss_fn))[1]
    pipe = Pipeline(model, ranks=2, microbatches=3, loss_fn=loss_fn)
    pipe.step(x, mask, target=mask[:, None])
    assert_same(gradients(pipe), expected)


# ---- what else comes back


def accuracy(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """How many valid tokens are right, and how many there are."""
    return (logits.argmax(-1) == target).sum(), valid(target)


def highest(logits: Tensor, target: Tensor) -> float:
    return float(logits.mean())


METRICS = {"accuracy": accuracy, "highest": highest}


def test_metrics() -> None:
    loss_fn = Loss(token_loss, weight=valid, metrics=METRICS)
    case = language((X,), RAGGED_Y, loss_fn=loss_fn)
    verdict = compare(case, schedule="1F1B", ranks=2, microbatches=4)
    verdict.check(1e-12)
    right, count = accuracy(case.model(X), RAGGED_Y)
    assert verdict.actual["metrics: accuracy"] == pytest.approx(int(right) / int(count))


# ---- the scaler


def test_a_scaler_scales_the_loss_and_decides_about_one_that_is_not_finite() -> None:
    model, scaler, times = language().model, LossScaler(64.0), [1.0]
    options: dict[str, Any] = {"ranks": 2, "microbatches": 4}
    pipe = Pipeline(model, loss_fn=lambda x, y: token_loss(x, y) * times[0], **options)
    optimizer, (loss, grads) = torch.optim.SGD(model.parameters(), lr=0.1), whole_batch(Y)
    assert pipe.step(X, target=Y, scaler=scaler).loss == pytest.approx(loss)
    assert_same(gradients(pipe), {name: 64 * grad for name, grad in grads.items()})
    pipe.zero_grad()
    times[0], before = math.inf, copy.deepcopy(model.state_dict())
    result = pipe.step(X, target=Y, scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    assert (result.loss, result.finite, scaler.get_scale()) == (math.inf, True, 32.0)
    assert_same(model.state_dict(), before)


# ---- over processes


def everything(group: Any, schedule: str, everywhere: bool) -> list[Any]:
    """A worker's task: the target is given to all, or to the rank that needs it and rank 1."""
    stages = group.size() if schedule == "1F1B" else 2 * group.size()
    loss_fn = Loss(token_loss, weight=valid, metrics=METRICS)
    case = language((X,), RAGGED_Y, loss_fn=loss_fn, adds="balance")
    pipe = pipeline(case, stages, schedule=schedule, microbatches=6, mesh=group)
    last = stages - 1 in pipe.schedule.placement.stages_on(group.rank())
    target = RAGGED_Y if everywhere or last or group.rank() == 1 else MISSING
    result = pipe.step(X, target=target, outputs=True)
    evaluated = pipe.evaluate(X[:3], target=target[:3] if target is not MISSING else MISSING)
    numbers = [[r.loss, dict(r.losses), dict(r.metrics), r.weight] for r in (result, evaluated)]
    return [numbers, result.outputs.tolist()]


@pytest.mark.parametrize(
    ("schedule", "ranks", "everywhere"), [("ZB-V", 3, False), ("1F1B", 2, True)]
)
def test_every_rank_has_the_same_numbers(
    workers: WorkerPool, schedule: str, ranks: int, everywhere: bool
) -> None:
    task = f"{__name__}:everything"
    answers = workers.run(task, ranks, 100.0, schedule=schedule, everywhere=everywhere)
    assert all(answer == answers[0] for answer in answers)
    (numbers, *_), outputs = answers[0]
    assert (numbers[1].keys(), numbers[3]) == ({"main", "balance"}, 13)
    actual = torch.tensor(outputs, dtype=torch.float64)
    torch.testing.assert_close(actual, language(adds="balance").model(X).detach())


@in_processes(4)
def test_all_ranks_and_replicas_measure_and_skip_a_step_together(group: Any) -> None:
    """Of two pipelines of two ranks, one rank has a gradient of NaN in the second step."""
    rows = (slice(0, 4), slice(4, 7))[group.rank() // 2]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    loss_fn = Loss(token_loss, weight=valid, metrics=METRICS)
    pipe = make(ranks=None, mesh=mesh, replicas="dp", loss_fn=loss_fn)
    scaler = LossScaler(64.0, growth_interval=1)
    optimizer, moved, scales, rights = torch.optim.SGD(pipe.parameters(), lr=0.1), [], [], []
    for step in range(3):
        result = pipe.step(X[rows], target=RAGGED_Y[rows], scaler=scaler)
        if step == 1 and group.rank() == 3:
            _, parameter = next(pipe.weights.here.named_parameters())
            assert parameter.grad is not None
            parameter.grad.view(-1)[0] = float("nan")
        held = [p for _, p in pipe.weights.here.named_parameters()]
        before = [p.detach().clone() for p in held]
        scaler.step(optimizer)
        scaler.update()
        pipe.zero_grad()
        scales.append(scaler.get_scale())
        rights.append(result.metrics["accuracy"])
        moved.append(not all(map(torch.equal, before, held)))
    assert (moved, scales) == ([True, False, True], [128.0, 64.0, 128.0])
    right, count = accuracy(language().model(X).detach(), RAGGED_Y)
    assert rights[0] == pytest.approx(int(right) / int(count))


# ---- losses that use weights


def with_head() -> nn.Sequential:
    """Its last module has a weight for the loss alone."""
    torch.manual_seed(0)
    unused = nn.Identity()
    unused.weight = nn.Parameter(torch.randn(WORDS, WIDTH))
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), unused).double()


def loss_with(model: nn.Sequential, others: Sequence[str]) -> Any:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        scores = functional.linear(output, model.get_parameter("3.weight"))
        penalties = [model.get_parameter(name).norm() for name in others]
        return functional.cross_entropy(scores, target) + 0.1 * sum(penalties, torch.zeros(()))

    return loss


OWN = Schedule(
    "own", Placement((0, 1)), 2,
    tuple(
        tuple(map(parse_action, row.split()))
        for row in ("0F0 0F1 0B0 0B1", "1F0 1F1 1I1 1W1 1B0")
    ),
)  # fmt: skip
"""Microbatches end out of order."""


@pytest.mark.parametrize("schedule", ["ZB-H1", "DualPipeV", OWN])
def test_a_loss_may_use_weights(schedule: Any) -> None:
    torch.manual_seed(1)
    value, target = torch.randn(8, WIDTH, dtype=torch.float64), torch.randint(0, WORDS, (8,))
    for others in ([], ["0.weight"], ["2.weight", "3.weight"]):
        plain, model = with_head(), with_head()
        loss_with(plain, others)(plain(value), target).backward()
        options = {"schedule": schedule, "microbatches": 2 if schedule is OWN else 4}
        pipe = Pipeline(model, ranks=2, loss_fn=loss_with(model, others), **options)
        pipe.step(value, target=target)
        assert_same(gradients(model), gradients(plain))
