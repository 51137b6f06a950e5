"""What a Pipeline does in training: a step is the plain loop's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock import REPLICATE, Pipeline, PipelineStage, Split
from penstock.partition import partition
from penstock.schedule import Action, Op, Placement, Schedule, build, library, register
from penstock.testing import Case, compare
from penstock.values import Rules
from tests.pipeline.models import (
    STAGES,
    WIDTH,
    X,
    Y,
    assert_same,
    chain,
    gradients,
    make,
    mean_loss,
    named,
    sum_loss,
)

# ---- batches, losses, arguments


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
@pytest.mark.parametrize("samples", [1, 3, 4, 5, 7, 8])
@pytest.mark.parametrize(("loss", "reduction"), [(mean_loss, "mean"), (sum_loss, "sum")])
def test_uneven_batches(schedule: str, samples: int, loss: Any, reduction: Any) -> None:
    case = Case(chain(), (X[:samples],), Y[:samples], loss, reduction)
    compare(case, schedule=schedule, ranks=3, microbatches=4).check(1e-12)


def last_first(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then the backwards from the last one on: of no library."""
    placement = Placement(tuple(range(ranks)))
    rows = (
        tuple(Action(rank, Op.F, m) for m in range(microbatches))
        + tuple(Action(rank, Op.B, m) for m in reversed(range(microbatches)))
        for rank in range(ranks)
    )
    return Schedule("last first", placement, microbatches, tuple(rows))


@pytest.mark.parametrize("schedule", [last_first, "Last-First"])
def test_a_schedule_of_ones_own_takes_a_short_last_batch(
    schedule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "RECIPES", dict(library.RECIPES))
    register("last-first", last_first)
    case = Case(chain(), (X[:3],), Y[:3], mean_loss)
    compare(case, schedule=schedule, ranks=3, microbatches=4).check(1e-12)


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_what_was_made_in_inference_mode_is_a_batch(schedule: str, microbatches: int) -> None:
    def product(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return (output * target["y"]).mean()

    with torch.inference_mode():
        made, wanted = X.clone(), Y.clone()
    pipe, expected = (
        make(schedule=schedule, microbatches=microbatches, loss_fn=product) for _ in "ab"
    )
    pipe.step(made, target={"y": wanted})
    expected.step(X, target={"y": Y})
    assert_same(gradients(pipe), gradients(expected))
    assert pipe.eval(made, target={"y": wanted}).loss == expected.eval(X, target={"y": Y}).loss


def test_steps_accumulate() -> None:
    compare(Case(chain(), (X,), Y, mean_loss), schedule="1F1B", ranks=3, steps=3).check(1e-12)


class Arguments(NamedTuple):
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rules: Rules | None


MASK = (X > 0).double()
ARGUMENTS = {
    "by position": Arguments((X,), {}, None),
    "by name": Arguments((), {"x": X}, None),
    "a split mask": Arguments((X,), {"mask": MASK}, {"mask": Split()}),
    "a whole mask": Arguments((X,), {"mask": MASK[0]}, {"mask": REPLICATE}),
    "a plain value": Arguments((X,), {"scale": 3.0}, None),
    "nothing in its place": Arguments((X,), {"mask": None}, None),
}


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_arguments(name: str) -> None:
    args, kwargs, rules = ARGUMENTS[name]
    case = Case(named(), args, Y, mean_loss, kwargs=kwargs, rules=rules)
    compare(case, schedule="1F1B", stages=STAGES, microbatches=3).check(1e-12)


def test_samples_along_another_dimension() -> None:
    first = nn.Sequential(Transpose(), nn.Linear(WIDTH, WIDTH)).double()
    case = Case(nn.Sequential(first, chain()), (X.t(),), Y, mean_loss, rules={0: Split(1)})
    compare(case, schedule="1F1B", ranks=2, microbatches=4).check(1e-12)


class Transpose(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.t()


def test_nested_targets() -> None:
    def loss(output: Tensor, target: dict[str, Any]) -> Tensor:
        scale: float = target["scale"]
        return mean_loss(output, target["values"][0]) * scale

    target = {"values": (Y,), "scale": 2.0}
    compare(Case(chain(), (X,), target, loss), schedule="GPipe", ranks=2).check(1e-12)


def test_a_loss_without_a_target() -> None:
    def loss(output: Tensor, target: None) -> Tensor:
        assert target is None
        return output.square().mean()

    compare(Case(chain(), (X,), None, loss), schedule="GPipe", ranks=2).check(1e-12)


# ---- models


def reused_activation() -> nn.Module:
    act = nn.Tanh()
    lin = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    return nn.Sequential(lin[0], act, lin[1], act, lin[2], act).double()


def partly_frozen() -> nn.Module:
    model = chain()
    model[0].requires_grad_(False)
    return model


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2).add_(1)


class Two(nn.Module):
    """Takes a tensor or a pair, gives a pair."""

    def forward(self, x: Any) -> tuple[Tensor, dict[str, Any]]:
        if isinstance(x, tuple):
            x = x[0] + x[1]["deep"][0]
        return x.sin(), {"deep": [x.cos(), None, "text"], "mask": x.detach() > 0}


class One(nn.Module):
    def forward(self, pair: tuple[Tensor, dict[str, Any]]) -> Tensor:
        deep: Tensor = pair[1]["deep"][0]
        mask: Tensor = pair[1]["mask"]
        return pair[0] * deep * mask


class Lookup(nn.Module):
    """Reads data, so that its shapes are found by a real run."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(float(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        index = int((x.detach().sum() > 1e9).item())
        return x + self.table[index]


class Rows(nn.Module):
    """The number of each sample, as an index."""

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, 0] > 0).long()


class Checkpoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(lambda x: self.lin(x).tanh(), x, use_reentrant=False)
        return found


class Turn(nn.Module):
    """Gives a complex tensor that is conjugated in name only."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(self.lin(x), x).conj()


class Straighten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.lin(x.imag * x.real)
        return found


def doubles(module: nn.Module, given: Any, _: Any) -> Any:
    return (given[0] * 2,)


def hooked() -> nn.Module:
    """On modules and on parameters; all change gradients."""
    model = chain()
    for layer in list(model)[1:]:
        layer.register_full_backward_hook(doubles)
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad * 3)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "one module at several places": reused_activation,
    "frozen layers": partly_frozen,
    "in place at the start of a stage": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), InPlace(), nn.Linear(WIDTH, WIDTH), InPlace()
    ).double(),
    "nested values between stages": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Two(), Two(), One(), nn.Linear(WIDTH, WIDTH)
    ).double(),
    "a tuple that is one argument": lambda: nn.Sequential(
        nn.LSTM(WIDTH, WIDTH), nn.Sequential(First(), nn.Linear(WIDTH, WIDTH))
    ).double(),
    "data-dependent": lambda: nn.Sequential(
        Lookup(), nn.Linear(WIDTH, WIDTH), Lookup(), nn.Linear(WIDTH, WIDTH)
    ).double(),
    "sparse gradients": lambda: nn.Sequential(
        Rows(), nn.Embedding(8, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)
    ).double(),
    "a checkpoint": lambda: nn.Sequential(Checkpoint(), Checkpoint()).double(),
    "hooks": hooked,
    "complex numbers": lambda: nn.Sequential(Turn(), Straighten()).double(),
    "no parameters at the end": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double(),
    "no parameters at all": lambda: nn.Sequential(nn.Tanh(), nn.Tanh()),
}


class First(nn.Module):
    def forward(self, both: tuple[Tensor, Any]) -> Tensor:
        return both[0]


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
@pytest.mark.parametrize("name", sorted(set(MODELS) - {"no parameters at all"}))
def test_models(name: str, schedule: str) -> None:
    batch = X.reshape(8, 1, WIDTH) if "tuple" in name else X
    target = Y.reshape(batch.shape)
    rules: Rules = {0: Split(0)}
    case = Case(MODELS[name](), (batch,), target, mean_loss, rules=rules)
    microbatches = 1 if "tuple" in name else 3
    compare(case, schedule=schedule, ranks=2, microbatches=microbatches).check(1e-12)


def test_a_model_without_parameters_has_a_loss_and_nothing_to_learn() -> None:
    pipe = make(MODELS["no parameters at all"]())
    assert pipe.step(X, target=Y).loss == pytest.approx(float(mean_loss(X.tanh().tanh(), Y)))
    assert list(pipe.parameters()) == []
    assert pipe.clip_grad_norm_(1.0) == 0.0


def test_any_model_runs_on_one_rank() -> None:
    case = Case(named(), (X,), Y, mean_loss)
    compare(case, schedule="1F1B", ranks=1, microbatches=2).check(1e-12)


def test_layers_may_be_frozen_and_thawed_between_steps() -> None:
    model = chain()
    pipe = make(model, ranks=3)
    for frozen in (False, True, False):
        model[0].requires_grad_(not frozen)
        pipe.zero_grad()
        pipe.step(X, target=Y)
        pipe.clip_grad_norm_(1e9)
        assert ("0.0.weight" in gradients(pipe)) is not frozen


def test_shapes_may_change_from_step_to_step() -> None:
    pipe = make()
    for batch in (X, X.reshape(4, 2, WIDTH), X[:6], X):
        plain = chain()
        expected = mean_loss(plain(batch), batch)
        expected.backward()
        pipe.zero_grad()
        assert pipe.step(batch, target=batch).loss == pytest.approx(float(expected.detach()))
        assert_same(gradients(pipe), gradients(plain))


# ---- ways to make one


def assert_trains(pipe: Pipeline, model: nn.Module) -> None:
    loss = mean_loss(model(X), Y)
    loss.backward()
    assert pipe.step(X, target=Y).loss == pytest.approx(float(loss.detach()))
    assert_same(gradients(pipe), gradients(model))


WAYS: dict[str, Callable[[], Pipeline]] = {
    "paths": lambda: make(named(), stages=STAGES),
    "a partition": lambda: partitioned(),
    "a schedule": lambda: make(
        named(), stages=STAGES, schedule=build("GPipe", ranks=2, microbatches=4)
    ),
    "ranks from the stages": lambda: make(named(), stages=STAGES, ranks=None),
    "microbatches by default": lambda: make(named(), stages=STAGES, microbatches=None),
    "on a device": lambda: make(named(), stages=STAGES, device="cpu"),
    "a schedule that says everything": lambda: make(
        named(),
        stages=STAGES,
        schedule=build("1F1B", ranks=2, microbatches=3),
        ranks=None,
        microbatches=None,
    ),
}


def partitioned() -> Pipeline:
    model = named()
    return make(model, stages=partition(model, STAGES))


@pytest.mark.parametrize("name", sorted(WAYS))
def test_ways_to_say_the_same(name: str) -> None:
    assert_trains(WAYS[name](), named())


def hand_placed(model: nn.Module) -> list[PipelineStage]:
    parts = partition(model, STAGES).modules
    return [PipelineStage(part, index, 2) for index, part in enumerate(parts)]


@pytest.mark.parametrize("order", [1, -1])
def test_stages_placed_by_hand(order: int) -> None:
    stages = hand_placed(named())[::order]
    pipe = Pipeline.from_stages(stages, schedule="ZB-H1", microbatches=4, loss_fn=mean_loss)
    assert_trains(pipe, named())


def test_the_number_of_stages_alone() -> None:
    pipe = make(stages=3, ranks=None)
    assert [stage.index for stage in pipe.stages] == [0, 1, 2]
    assert_trains(pipe, chain())


# ---- gradients


@pytest.mark.parametrize("largest", [1e-3, 1.0, 1e9])
def test_clipping_is_torchs(largest: float) -> None:
    plain, pipe = chain(), make(ranks=3)
    mean_loss(plain(X), Y).backward()
    pipe.step(X, target=Y)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), largest)
    assert pipe.clip_grad_norm_(largest) == pytest.approx(float(expected), abs=1e-15)
    assert_same(gradients(pipe), gradients(plain))


def test_zero_grad() -> None:
    pipe = make()
    pipe.step(X, target=Y)
    pipe.zero_grad()
    assert gradients(pipe) == {}


def test_an_optimizer_trains_the_users_model() -> None:
    model, plain = chain(), chain()
    pipe = make(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (pipe, plain)]
    for _ in range(3):
        pipe.step(X, target=Y)
        mean_loss(plain(X), Y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model.state_dict(), plain.state_dict())


def test_it_shows_its_ranks_stages_and_modules() -> None:
    model = nn.Sequential(nn.Linear(4, 4), *[nn.Tanh() for _ in range(3)], nn.Linear(4, 4))
    shown = repr(Pipeline(model, schedule="ZB-V", ranks=1, microbatches=2, stages=["2"]))
    assert shown.splitlines() == [
        "Pipeline(ZB-V, 1 ranks, 2 stages, 2 microbatches, on cpu)",
        "  rank 0, stage 0: 0 (Linear), 1 (Tanh)",
        "  rank 0, stage 1: 2 to 3 (Tanh), 4 (Linear)",
    ]
