"""Losses beside the plain loop: weights, accumulation, losses of any stage, metrics, the scaler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock import (
    LossScaler,
    Pipeline,
    Replicas,
    StepResult,
    add_loss,
    collect_losses,
)
from penstock.errors import StageError, UsageError
from penstock.schedule import Placement, Schedule, parse_action
from penstock.testing import Case, WorkerPool, compare
from penstock.values import MISSING
from tests.pipeline.models import assert_same, gradients

SCHEDULES = {"1F1B": 2, "Interleaved1F1B": 4, "ZB-V": 4, "DualPipeV": 4, "GPipe": 2}
"""Their names, and how many stages they have on two ranks."""
WIDTH, WORDS, LENGTH, IGNORED = 4, 7, 5, -100


class Router(nn.Module):
    """A block with two experts, each token going to both by its gate, and a loss that balances them."""

    def __init__(self, name: str = "balance", recompute: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.name = name
        self.recompute = recompute

    def forward(self, hidden: Tensor) -> Tensor:
        if self.recompute:
            found: Tensor = checkpoint(self.mixed, hidden, use_reentrant=False)
            return found
        return self.mixed(hidden)

    def mixed(self, hidden: Tensor) -> Tensor:
        gates = self.gate(hidden).softmax(-1)
        add_loss(self.name, gates.mean((0, 1)).square().sum(), weight=0.25)
        outputs = [expert(hidden).tanh() for expert in self.experts]
        first, second = (g * out for g, out in zip(gates.split(1, -1), outputs, strict=True))
        mixed: Tensor = hidden + first + second
        return mixed


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.lin(hidden + hidden.cumsum(1))
        return hidden + mixed.tanh()


def plain_model() -> nn.Sequential:
    torch.manual_seed(2)
    blocks = [Mix() for _ in range(4)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS)).double()


def experts(recompute: bool = False) -> nn.Sequential:
    """Losses are added in the first stage, in middle ones and in the last."""
    torch.manual_seed(2)
    embed = nn.Sequential(nn.Embedding(WORDS, WIDTH), Router("first"))
    blocks = [Router(recompute=recompute), Mix(), Router(), Router(recompute=recompute)]
    return nn.Sequential(embed, *blocks, nn.Linear(WIDTH, WORDS)).double()


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten(), ignore_index=IGNORED)


def token_sum(logits: Tensor, target: Tensor) -> Tensor:
    flat = logits.flatten(0, -2)
    return functional.cross_entropy(flat, target.flatten(), ignore_index=IGNORED, reduction="sum")


def valid(target: Tensor) -> Tensor:
    return (target != IGNORED).sum()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, WORDS, shape, generator=torch.Generator().manual_seed(seed))


X = draw(7, LENGTH)
Y = X.roll(-1, 1)
RAGGED_Y = torch.where(
    torch.arange(LENGTH) < torch.tensor([[1], [5], [0], [0], [2], [4], [1]]), Y, IGNORED
)
"""Its rows have 1, 5, 0, 0, 2, 4 and 1 valid tokens: one of four microbatches has none."""
SIZES = [2, 2, 2, 1]
"""Of four microbatches of seven samples."""


def make(model: nn.Module, schedule: str = "1F1B", **options: Any) -> Pipeline:
    usual: dict[str, Any] = {"ranks": 2, "stages": SCHEDULES[schedule], "microbatches": 4}
    usual |= {"loss_fn": token_loss, "schedule": schedule}
    return Pipeline(model, **(usual | options))


def whole_batch(target: Tensor, loss: Any = token_loss, factor: float = 1.0) -> tuple[float, Any]:
    """The plain loop: all samples at once."""
    model = plain_model()
    found = loss(model(X), target) * factor
    found.backward()
    return float(found.detach()), gradients(model)


# ---- what a microbatch weighs

OF_TOKENS = [
    (token_loss, {"loss_weight": valid}),
    (token_sum, {"loss_weight": valid, "reduction": "sum"}),
]


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize(("loss", "options"), OF_TOKENS, ids=["mean", "sum"])
def test_unequal_counts_of_tokens(schedule: str, loss: Any, options: dict[str, Any]) -> None:
    pipe = make(plain_model(), schedule, loss_fn=loss, **options)
    expected, grads = whole_batch(RAGGED_Y)
    result = pipe.step(X, target=RAGGED_Y)
    assert result.loss == pytest.approx(expected, abs=1e-14)
    assert result.weight == 13
    assert_same(gradients(pipe), grads)
    assert pipe.eval(X, target=RAGGED_Y).loss == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize(("loss", "reduction"), [(token_loss, "mean"), (token_sum, "sum")])
def test_seven_samples_in_four(schedule: str, loss: Any, reduction: Any) -> None:
    case = Case(plain_model(), (X,), Y, loss, reduction)
    stages = SCHEDULES[schedule]
    compare(case, schedule=schedule, ranks=2, stages=stages, microbatches=4, steps=2).check(1e-12)


@pytest.mark.parametrize(("loss", "options"), OF_TOKENS, ids=["mean", "sum"])
def test_a_batch_that_weighs_nothing_changes_nothing(loss: Any, options: dict[str, Any]) -> None:
    pipe = make(plain_model(), loss_fn=loss, metrics={"accuracy": accuracy}, **options)
    result = pipe.step(X, target=torch.full_like(Y, IGNORED))
    assert (result.loss, result.weight) == (0.0, 0.0)
    assert all(float(grad.abs().max()) == 0.0 for grad in gradients(pipe).values())


def test_weights_of_one_step() -> None:
    counts = [float(valid(part)) for part in RAGGED_Y.split(SIZES)]
    pipe, (loss, grads) = make(plain_model()), whole_batch(RAGGED_Y)
    assert pipe.step(X, target=RAGGED_Y, loss_weight=counts).loss == pytest.approx(loss)
    assert_same(gradients(pipe), grads)


def test_a_function_that_fails_is_told() -> None:
    with pytest.raises(
        StageError, match="loss_weight, called with a target, raised AttributeError"
    ):
        make(plain_model(), loss_weight=lambda target: target.tokens).step(X, target=Y)


# ---- several steps


def test_two_steps_add_up() -> None:
    pipe = make(plain_model(), loss_weight=valid)
    for _ in range(2):
        pipe.step(X, target=RAGGED_Y)
    assert_same(gradients(pipe), whole_batch(RAGGED_Y, factor=2.0)[1])


@pytest.mark.parametrize(("loss", "reduction"), [(token_loss, "mean"), (token_sum, "sum")])
def test_accumulated_steps_equal_one_of_all(loss: Any, reduction: Any) -> None:
    pipe = make(plain_model(), loss_fn=loss, reduction=reduction, accumulate=2, microbatches=2)
    losses = [pipe.step(X[i : i + 3], target=Y[i : i + 3]).loss for i in (0, 3)]
    model = plain_model()
    whole = loss(model(X[:6]), Y[:6])
    whole.backward()
    assert_same(gradients(pipe), gradients(model))
    assert sum(losses) / (2 if reduction == "mean" else 1) == pytest.approx(float(whole.detach()))


@pytest.mark.parametrize(("loss", "options"), OF_TOKENS, ids=["mean", "sum"])
def test_steps_of_a_known_total_equal_one_of_all(loss: Any, options: dict[str, Any]) -> None:
    pipe, total = make(plain_model(), loss_fn=loss, **options), float(valid(RAGGED_Y))
    steps = [
        pipe.step(X[rows], target=RAGGED_Y[rows], total_weight=total)
        for rows in (slice(0, 4), slice(4, 7))
    ]
    expected, grads = whole_batch(RAGGED_Y)
    assert_same(gradients(pipe), grads)
    assert sum(s.loss * s.weight for s in steps) / total == pytest.approx(expected)


def test_what_a_step_weighs_among_others_must_be_known() -> None:
    pipe = make(plain_model(), loss_weight=valid, accumulate=2)
    with pytest.raises(UsageError, match="give total_weight="):
        pipe.step(X, target=Y)
    assert pipe.step(X, target=Y, accumulate=1).loss > 0, "nothing was poisoned"


def test_replicas_weigh_by_what_all_have() -> None:
    """As if another pipeline had the same batch: its share of the gradient is added by nobody here."""
    others = Replicas(2, lambda values: values * 2, averaged=False)
    pipe, (loss, grads) = make(plain_model(), replicas=others), whole_batch(Y, factor=0.5)
    result = pipe.step(X, target=Y)
    assert result.loss == pytest.approx(loss * 2)
    assert result.weight == 14
    assert_same(gradients(pipe), grads)


# ---- losses of stages


def plain_experts(sizes: Sequence[int] = SIZES) -> tuple[dict[str, float], dict[str, Tensor]]:
    """A plain loop over the microbatches, with what the model adds."""
    model, named = experts(), {"main": 0.0, "first": 0.0, "balance": 0.0}
    for x, y in zip(X.split(list(sizes)), Y.split(list(sizes)), strict=True):
        share = len(x) / len(X)
        with collect_losses() as losses:
            main = token_loss(model(x), y)
        ((main + losses.total()) * share).backward()
        for name, value in {"main": main, **losses.named()}.items():
            named[name] += float(value.detach()) * share
    return named, gradients(model)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_losses_of_all_stages(schedule: str, recompute: bool) -> None:
    pipe = make(experts(recompute), schedule)
    named, grads = plain_experts()
    for _ in range(2):
        pipe.zero_grad()
        result = pipe.step(X, target=Y)
        assert dict(result.losses) == pytest.approx(named, abs=1e-14)
        weighed = named["main"] + 0.25 * (named["first"] + named["balance"])
        assert result.loss == pytest.approx(weighed, abs=1e-14)
        assert_same(gradients(pipe), grads)


def test_backward_in_halves_knows_them() -> None:
    pipe = make(experts(), "ZB-V")
    pipe.step(X, target=Y)
    assert_same(gradients(pipe), plain_experts()[1])


def test_they_are_part_of_an_evaluation() -> None:
    result = make(experts()).eval(X, target=Y)
    assert dict(result.losses) == pytest.approx(plain_experts()[0])


class Aside(nn.Module):
    """Its second layer only adds a loss: nobody uses what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.aside, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.aside.register_forward_hook(lambda *call: add_loss("size", call[2].square().mean()))

    def forward(self, x: Tensor) -> Tensor:
        self.aside(self.first(x))
        hidden: Tensor = self.last(x)
        return hidden


def test_a_unit_whose_result_nobody_uses_may_add_one() -> None:
    torch.manual_seed(0)
    x, target = torch.randn(2, 4, WIDTH).double()
    case = Case(Aside().double(), (x,), target, functional.mse_loss)
    verdict = compare(case, schedule="GPipe", ranks=2, microbatches=2, stages=["aside"])
    verdict.check(1e-12)
    assert verdict.gradients["first.weight"] is not None


def test_without_any_there_is_the_main_one() -> None:
    result = make(plain_model()).step(X, target=Y)
    assert dict(result.losses) == {"main": result.loss}


class Sometimes(nn.Module):
    """Adds a loss in some steps only, under a name that comes late."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            add_loss(name, x.square().mean())
        return x * 1.0


def test_names_may_come_and_go() -> None:
    late = Sometimes()
    pipe = make(nn.Sequential(plain_model()[:3], late, plain_model()[3:]), stages=3, ranks=3)
    found = []
    for names in ([], ["b"], ["a", "b"], [], ["a"]):
        late.names = names
        found.append(sorted(pipe.step(X, target=Y).losses))
    assert found == [["main"], ["b", "main"], ["a", "b", "main"], ["main"], ["a", "main"]]


def test_elsewhere_nothing_happens() -> None:
    add_loss("balance", torch.zeros(()))
    make(experts()).predict(X)


class Wrong(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "no_grad":
            with torch.no_grad():
                add_loss("a", x.mean())
        elif self.kind == "main":
            add_loss("main", x.mean())
        else:
            add_loss("a", x)
        return x


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("no_grad", "with gradients disabled, so it would train nothing"),
        ("main", "must be a text other than 'main'"),
        ("shape", r"needs a scalar tensor, not \[2, 5, 4\]"),
    ],
)
def test_a_loss_that_is_none_is_refused(kind: str, says: str) -> None:
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Wrong(kind), nn.Linear(WIDTH, WORDS)).double()
    with pytest.raises(UsageError, match=says):
        make(model).step(X, target=Y)


# ---- what else comes back


def accuracy(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """How many valid tokens are right, and how many there are."""
    return (logits.argmax(-1) == target).sum(), valid(target)


def highest(logits: Tensor, target: Tensor) -> float:
    return float(logits.mean())


METRICS = {"accuracy": accuracy, "highest": highest}


@pytest.mark.parametrize("call", ["step", "eval"])
def test_metrics(call: str) -> None:
    pipe = make(plain_model(), metrics=METRICS)
    found = getattr(pipe, call)(X, target=RAGGED_Y, loss_weight=valid) if call == "step" else None
    found = found or pipe.eval(X, target=Y)
    target = RAGGED_Y if call == "step" else Y
    logits = plain_model()(X).detach()
    right, count = accuracy(logits, target)
    weights = [float(valid(t)) if call == "step" else len(t) for t in target.split(SIZES)]
    means = [float(part.mean()) for part in logits.split(SIZES)]
    weighed = sum(w * m for w, m in zip(weights, means, strict=True)) / sum(weights)
    assert dict(found.metrics) == pytest.approx(
        {"accuracy": int(right) / int(count), "highest": weighed}
    )


def test_a_metric_must_give_numbers() -> None:
    pipe = make(plain_model(), metrics={"all": lambda output, target: output})
    with pytest.raises(
        UsageError, match=r"the metric 'all' must return a number .* not \[2, 5, 7\]"
    ):
        pipe.step(X, target=Y)


def test_outputs_of_a_step() -> None:
    result = make(plain_model()).step(X, target=Y, outputs=True)
    torch.testing.assert_close(result.outputs, plain_model()(X).detach())
    assert not result.outputs.requires_grad


def test_another_batch_is_evaluated_between_steps() -> None:
    pipe = make(experts(), loss_weight=valid)
    pipe.step(X, target=Y)
    before = {name: grad.clone() for name, grad in gradients(pipe).items()}
    pipe.eval(draw(3, 9), target=draw(3, 9, seed=1))
    pipe.predict(draw(11, 2))
    assert_same(gradients(pipe), before)


# ---- the scaler


def trained(scaled: bool, bad: Sequence[int]) -> tuple[list[float], dict[str, Tensor]]:
    """Scales and weights of a pipeline, or of a plain loop with torch's scaler; some steps overflow."""
    model = plain_model()
    pipe = make(model) if scaled else None
    scaler: Any = (
        LossScaler(64.0, growth_interval=2)
        if scaled
        else torch.amp.GradScaler("cpu", 64.0, growth_interval=2)
    )
    optimizer, scales = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for index in range(8):
        if pipe is not None:
            pipe.step(X, target=Y, scaler=scaler)
        else:
            scaler.scale(token_loss(model(X), Y)).backward()
        if index in bad:
            grad = model.get_parameter("1.lin.bias").grad
            assert grad is not None
            grad[0] = float("inf")
        scaler.unscale_(optimizer)
        norm = pipe.clip_grad_norm_(1.0) if pipe else clip(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales += [scaler.get_scale(), norm]
    return scales, {name: p.detach() for name, p in model.named_parameters()}


def clip(model: nn.Module) -> float:
    return float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def test_a_scaled_run_is_that_of_torchs_scaler() -> None:
    found, expected = trained(True, (2, 3, 6)), trained(False, (2, 3, 6))
    assert found[0] == pytest.approx(expected[0])
    assert_same(found[1], expected[1])


# ---- over processes


def summary(result: StepResult) -> dict[str, Any]:
    return {
        "loss": result.loss,
        "losses": dict(result.losses),
        "metrics": dict(result.metrics),
        "weight": result.weight,
        "outputs": None if result.outputs is None else result.outputs.tolist(),
    }


def everything(group: Any, schedule: str, everywhere: bool) -> dict[str, Any]:
    """A worker's task: the target is given to all, or to the rank alone that needs it."""
    ranks = group.size()
    stages = ranks if SCHEDULES[schedule] == 2 else 2 * ranks
    options: dict[str, Any] = {"ranks": None, "stages": stages, "group": group, "microbatches": 6}
    pipe = make(experts(), schedule, loss_weight=valid, metrics=METRICS, **options)
    last = any(stage.is_last for stage in pipe.stages)
    target = RAGGED_Y if everywhere or last else MISSING
    result = pipe.step(X, target=target, outputs=True)
    found = gradients(pipe)
    evaluated = pipe.eval(X[:3], target=RAGGED_Y[:3] if everywhere or last else MISSING)
    expected = weighed_experts([2, 1, 1, 1, 1, 1])
    return {
        "gap": max(float((found[name] - expected[name]).abs().max()) for name in found),
        "step": summary(result),
        "eval": summary(evaluated),
    }


def weighed_experts(sizes: Sequence[int]) -> dict[str, Tensor]:
    model = experts()
    for x, y in zip(X.split(list(sizes)), RAGGED_Y.split(list(sizes)), strict=True):
        share = float(valid(y)) / float(valid(RAGGED_Y))
        with collect_losses() as losses:
            output = model(x)
            main = token_loss(output, y) if share else output.sum() * 0
        ((main + losses.total()) * share).backward()
    return gradients(model)


@pytest.mark.parametrize(
    ("schedule", "ranks", "everywhere"),
    [("1F1B", 3, True), ("1F1B", 2, False), ("ZB-V", 3, False), ("DualPipeV", 2, True)],
)
def test_every_rank_has_the_same_numbers(
    workers: WorkerPool, schedule: str, ranks: int, everywhere: bool
) -> None:
    task = f"{__name__}:everything"
    first, *rest = workers.run(task, ranks, 60.0, schedule=schedule, everywhere=everywhere)
    assert max(answer["gap"] for answer in (first, *rest)) < 1e-12
    for answer in rest:
        assert answer["step"] == first["step"]
        assert answer["eval"] == first["eval"]
    assert first["step"]["losses"].keys() == {"main", "first", "balance"}
    assert first["step"]["weight"] == 13
    torch.testing.assert_close(
        torch.tensor(first["step"]["outputs"], dtype=torch.float64), experts()(X).detach()
    )


def overflowing(group: Any) -> dict[str, Any]:
    """A worker's task: only one rank has a gradient that is not finite, and only in the second step."""
    pipe, scaler = make(plain_model(), group=group), LossScaler(64.0, growth_interval=1)
    optimizer, weights, scales = torch.optim.SGD(pipe.parameters(), lr=0.1), [], []
    for step in range(3):
        pipe.step(X, target=Y, scaler=scaler)
        if step == 1 and group.rank() == 1:
            parameter = next(pipe.parameters())
            assert parameter.grad is not None
            parameter.grad.view(-1)[0] = float("nan")
        before = [p.detach().clone() for p in pipe.parameters()]
        scaler.step(optimizer)
        scaler.update()
        pipe.zero_grad()
        scales.append(scaler.get_scale())
        moved = zip(before, pipe.parameters(), strict=True)
        weights.append(any(not torch.equal(old, new) for old, new in moved))
    return {"scales": scales, "moved": weights}


def test_all_ranks_skip_a_step_together(workers: WorkerPool) -> None:
    answers = workers.run(f"{__name__}:overflowing", 2, 60.0)
    assert answers == [{"scales": [128.0, 64.0, 128.0], "moved": [True, False, True]}] * 2


def replica(group: Any) -> dict[str, float]:
    """A worker's task: two pipelines of two ranks, each on its own part of the batch."""
    number = group.rank() // 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    rows = (slice(0, 4), slice(4, 7))[number]
    options: dict[str, Any] = {"loss_weight": valid, "replicas": mesh["dp"], "metrics": METRICS}
    pipe = make(plain_model(), mesh=mesh, **options)
    scaler = LossScaler(64.0)
    result = pipe.step(X[rows], target=RAGGED_Y[rows], scaler=scaler)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scaler.unscale_(optimizer)
    found = gradients(pipe)
    for grad in found.values():
        dist.all_reduce(grad, group=mesh.get_group("dp"))
        grad /= 2
    loss, expected = whole_batch(RAGGED_Y)
    gaps = [float((found[name] - expected[name]).abs().max()) for name in found]
    right, count = accuracy(plain_model()(X).detach(), RAGGED_Y)
    if group.rank() == 3:
        next(iter(found.values())).view(-1)[0] = float("inf")
    scaler.update()
    scaler.unscale_(optimizer)
    scaler.update()
    return {
        "gradients": max(gaps),
        "loss": abs(result.loss - loss),
        "accuracy": abs(result.metrics["accuracy"] - int(right) / int(count)),
        "scale": abs(scaler.get_scale() - 32.0),
    }


def test_replicas_together_have_the_gradient_of_the_whole_batch(workers: WorkerPool) -> None:
    for answer in workers.run(f"{__name__}:replica", 4, 90.0):
        assert max(answer.values()) < 1e-12


# ---- losses that use weights


class Unused(nn.Module):
    """Has a weight for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH, dtype=torch.float64))

    def forward(self, value: Tensor) -> Tensor:
        return value


def with_head() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), Unused()
    return nn.Sequential(*layers).double()


def loss_with(model: nn.Sequential, others: Sequence[str]) -> Any:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        scores = functional.linear(output, model.get_parameter("3.weight"))
        penalties = [model.get_parameter(name).norm() for name in others]
        return functional.cross_entropy(scores, target) + 0.1 * sum(penalties, torch.zeros(()))

    return loss


@pytest.mark.parametrize("others", [[], ["3.weight"], ["0.weight"], ["2.weight", "3.weight"]])
@pytest.mark.parametrize("schedule", [*sorted(SCHEDULES), "ZB-H1"])
def test_a_loss_may_use_weights(schedule: str, others: list[str]) -> None:
    torch.manual_seed(1)
    value, target = torch.randn(8, WIDTH, dtype=torch.float64), torch.randint(0, WORDS, (8,))
    plain, model = with_head(), with_head()
    loss_with(plain, others)(plain(value), target).backward()
    stages = SCHEDULES.get(schedule, 2)
    pipe = Pipeline(
        model, stages=stages, schedule=schedule, microbatches=4, loss_fn=loss_with(model, others)
    )
    pipe.step(value, target=target)
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert len(expected) == 5
    assert_same(gradients(pipe), expected)


def test_a_loss_may_use_weights_in_microbatches_out_of_order() -> None:
    torch.manual_seed(1)
    value, target = torch.randn(8, WIDTH, dtype=torch.float64), torch.randint(0, WORDS, (8,))
    plain, model = with_head(), with_head()
    others = ["0.weight", "3.weight"]
    loss_with(plain, others)(plain(value), target).backward()
    rows = "0F0 0F1 0B0 0B1", "1F0 1F1 1I1 1W1 1B0"
    orders = tuple(tuple(parse_action(action) for action in row.split()) for row in rows)
    own = Schedule("own", Placement((0, 1)), 2, orders)
    pipe = Pipeline(model, schedule=own, microbatches=2, loss_fn=loss_with(model, others))
    pipe.step(value, target=target)
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert_same(gradients(pipe), expected)
