"""The cut waits for the first batch: what is asked before it, what it does, and what refuses it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import penstock
from penstock import Checkpoints, Pipeline
from penstock._engine.placeholders import is_placeholder
from penstock._engine.weights import init_weights, parameters_on_meta
from penstock.errors import PartitionError, StageError, UsageError
from penstock.partition import partition
from penstock.testing import Case, compare, judge, plain_loop
from tests.catalogue.making import Does
from tests.pipeline.models import WIDTH, X, Y, assert_same, gradients, mean_loss
from tests.processes import in_processes


class Backwards(nn.Module):
    """Holds its modules in another order than it calls them, and is told to fail or to branch."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.head: nn.Module = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.zeros(WIDTH), persistent=False)
        self.shift: Tensor

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(getattr(module, "scale", None), nn.Parameter):
            module.get_parameter("scale").fill_(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) + self.shift
        if self.fails and float(x.sum()) > 0:
            x = -x
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return self.head(x * self.scale)  # type: ignore[no-any-return]


def model() -> Backwards:
    torch.manual_seed(0)
    return Backwards().double()


def make(module: nn.Module | None = None, **options: Any) -> Pipeline:
    usual: dict[str, Any] = {"ranks": 2, "microbatches": 4, "loss_fn": mean_loss}
    return Pipeline(model() if module is None else module, **(usual | options))


def trained(owner: Any, step: Callable[[], Any], optimizer: Any, count: int = 2) -> dict[str, Any]:
    for _ in range(count):
        optimizer.zero_grad()
        step()
        optimizer.step()
    named = owner.named_parameters()
    return {name: p.detach().clone() for name, p in named if not is_placeholder(p)}


def plain() -> dict[str, Any]:
    """The weights after two steps of a plain loop."""
    whole = model()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.1)
    return trained(whole, lambda: mean_loss(whole(X), Y).backward(), optimizer)


SGD = partial(torch.optim.SGD, lr=0.1)


FIRST: dict[str, Callable[[Pipeline], Any]] = {
    "step": lambda pipe: None,
    "eval": lambda pipe: pipe.evaluate(X, target=Y),
    "predict": lambda pipe: pipe.predict(X),
    "cut": lambda pipe: pipe.cut(X),
}


@pytest.mark.parametrize("first", FIRST)
def test_an_optimizer_made_before_the_cut_trains(first: str) -> None:
    pipe = make(schedule="ZB-V")
    listed = dict(pipe.named_parameters())
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    FIRST[first](pipe)
    assert pipe.is_cut == (first != "step")
    weights = trained(pipe, lambda: pipe.step(X, target=Y), optimizer)
    assert_same(weights, plain())
    assert all(parameter is listed[name] for name, parameter in pipe.named_parameters())
    assert all(module.training for stage in pipe.stages for module in stage.called_modules())
    assert all(stage.code.training for stage in pipe.stages)


def test_what_is_asked_before_the_cut(tmp_path: Path) -> None:
    other = model()
    with torch.no_grad():
        other.scale.fill_(3)
    pipe = make()
    assert "not cut yet" in repr(pipe)
    with pytest.raises(UsageError, match=r"no stages yet.*call pipe\.cut"):
        _ = pipe.stages
    assert pipe.weights.grad_norm() == pipe.clip_grad_norm_(1.0) == 0
    pipe.weights.load_state_dict(other.state_dict())
    for state in (pipe.weights.state_dict(), pipe.weights.state_dict(full=True)):
        assert_same(state, other.state_dict())
    pipe.weights.save(tmp_path / "weights")
    optimizer = torch.optim.AdamW(pipe.parameters())
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(0, pipe=pipe, optimizer=optimizer)
    again = make()
    again.weights.load(tmp_path / "weights")
    assert_same(again.weights.state_dict(), other.state_dict())
    again = make()
    with Checkpoints(tmp_path / "run") as checkpoints:
        assert checkpoints.load(pipe=again, optimizer=torch.optim.AdamW(again.parameters())) == 0
    assert not again.is_cut
    assert again.step(X, target=Y).loss == pytest.approx(float(mean_loss(other(X), Y).detach()))


@pytest.mark.parametrize("how", ["load", "init", "both"])
def test_a_model_on_the_meta_device_gets_its_weights_with_the_cut(how: str, tmp_path: Path) -> None:
    expected = model()
    make(expected).weights.save(tmp_path)
    with parameters_on_meta():
        empty = Backwards().double()
    pipe = make(empty)
    if how != "load":
        init_weights(pipe, 7)
    if how == "init":
        init_weights(expected, 7)
    else:
        assert pipe.weights.load(tmp_path) == ([], [])
    with pytest.raises(UsageError, match=r"when the model is cut.*call pipe\.cut"):
        pipe.weights.state_dict()
    judge(Case(expected, (X,), Y, mean_loss), pipe, steps=2, optimizer=SGD).check(1e-12)


def test_a_model_without_memory_is_refused_and_may_get_it() -> None:
    with parameters_on_meta():
        empty = Backwards().double()
    pipe = make(empty)
    with pytest.raises(UsageError, match=r"on the meta device.*init_weights"):
        pipe.step(X, target=Y)
    assert not pipe.is_cut
    init_weights(pipe, 0)
    assert pipe.step(X, target=Y).loss > 0


def test_a_first_call_that_fails_leaves_the_model_whole_and_it_may_change() -> None:
    whole = model()
    pipe = make(whole)
    whole.fails = True
    with pytest.raises(PartitionError, match=r"test_cut\.py.*needs numbers of a tensor"):
        pipe.step(X, target=Y)
    with pytest.raises(StageError, match="before the first microbatch"):
        pipe.step(X[:, :2], target=Y)
    assert not pipe.is_cut
    whole.fails = False
    whole.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
    judge(Case(copy.deepcopy(whole), (X,), Y, mean_loss), pipe).check(1e-12)
    whole.head = nn.Linear(WIDTH, WIDTH).double()
    with pytest.raises(UsageError, match="'head' was replaced"):
        pipe.step(X, target=Y)


def test_a_wrapper_that_replaces_weights_needs_a_cut_before_the_optimizer() -> None:
    def replace(stage: nn.Module, index: int) -> None:
        for part in stage.modules():
            for name, weight in part._parameters.items():
                assert weight is not None
                part._parameters[name] = nn.Parameter(weight.detach())

    with pytest.raises(UsageError, match=r"wrap= has replaced .*cut the model by pipe\.cut"):
        make(wrap=replace).step(X, target=Y)
    pipe = make(wrap=replace)
    pipe.cut(X)
    assert pipe.step(X, target=Y).loss > 0


# ---- numbers that the model's code needs


def looks(m: Any, tokens: Tensor) -> Any:
    """Goes on only if its input holds a two, as a model does that looks for its image tokens."""
    if not (tokens == 2).any():
        raise ValueError("no token is a two")
    return m.last(m.embed(tokens))


def test_the_numbers_of_the_batch_are_used_where_ones_do_not_do() -> None:
    torch.manual_seed(0)
    tokens = torch.tensor([[2, 0], [3, 2], [1, 2], [2, 2]])
    model = Does(looks, embed=nn.Embedding(4, WIDTH), last=nn.Linear(WIDTH, WIDTH))
    case = Case(model.double(), (tokens,), None, lambda output, _: output.mean())
    compare(case, schedule="1F1B", ranks=2, microbatches=2).check(1e-12)


# ---- stages of equal work


def vision() -> nn.Module:
    """A plain container holds nearly all of the work."""
    layers = [nn.Conv2d(16 if i else 3, 16, 3, padding=1) for i in range(8)]
    return Does(
        lambda m, x: m.classifier(m.features(x).flatten(1)),
        features=nn.Sequential(*layers), classifier=nn.Linear(16 * 64, 40),
    )  # fmt: skip


def test_a_container_is_taken_apart_unless_it_is_named() -> None:
    options: dict[str, Any] = {"microbatches": 2, "loss_fn": lambda output, _: output.mean()}
    pipe = Pipeline(vision(), ranks=4, **options)
    named = Pipeline(vision(), stages=[["features"], ["classifier"]], **options)
    for one in (pipe, named):
        one.step(torch.randn(4, 3, 8, 8))
    shares = [line.rpartition(" - ")[2].partition("%")[0] for line in repr(pipe).split("\n")[1:]]
    assert len(shares) == 4
    assert max(map(float, shares)) <= 35
    assert "'features' holds 9" in repr(named)
    assert "name its children in stages=" in repr(named)


# ---- between processes


@in_processes(2, 100.0)
def test_ranks_cut_by_one_description(group: Any) -> None:
    """Only the first rank has the arguments and the target."""
    pipe = make(model(), ranks=None, schedule="ZB-V", mesh=group)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    everywhere = len(list(pipe.parameters()))
    held = sum(not is_placeholder(p) for p in pipe.parameters())
    call: Any = () if group.rank() else (X,)
    target: Any = {} if group.rank() else {"target": Y}
    pipe.evaluate(*call, **target)
    weights = trained(pipe, lambda: pipe.step(*call, **target), optimizer)
    assert_same(weights, {name: plain()[name] for name in weights})
    assert len(list(pipe.parameters())) == everywhere
    assert all(not is_placeholder(p) for p in optimizer.state)
    counts = pipe.job.meet(lambda: len(weights))
    pipe.close()
    assert max(counts) < held == everywhere == sum(counts)


@in_processes(2, 100.0)
def test_a_refused_cut_is_raised_on_all_ranks(group: Any, tmp_path: Path) -> None:
    """States are there before the cut, and the same pipeline goes on."""
    whole = model()
    pipe = make(whole, ranks=None, mesh=group)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    whole.fails = True
    calls: dict[str, Callable[[], Any]] = {
        "needs numbers of a tensor": lambda: pipe.step(X, target=Y),
        "different shapes": lambda: pipe.step(X if group.rank() else X[:, :2], target=Y),
        "0 microbatches": lambda: pipe.step(X, target=Y, microbatches=0 if group.rank() else None),
    }
    for says, call in calls.items():
        with pytest.raises(penstock.errors.PenstockError, match=says):
            call()
    whole.fails = False
    assert not pipe.is_cut
    weight = next(whole.parameters())
    with torch.no_grad():
        same = weight.clone()
        weight.fill_(group.rank())
        with pytest.raises(UsageError, match="different weights"):
            pipe.weights.state_dict(full=True)
        weight.copy_(same)
    state = pipe.weights.state_dict(full=True)
    assert len(state) == (0 if group.rank() else len(whole.state_dict()))
    pipe.weights.save(tmp_path / "weights")
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(3, pipe=pipe, optimizer=optimizer)
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.zero_()
        assert checkpoints.load(pipe=pipe, optimizer=optimizer) == 3
    weights = trained(pipe, lambda: pipe.step(X, target=Y), optimizer)
    assert_same(weights, {name: plain()[name] for name in weights})
    pipe.close()


@in_processes(4, 100.0)
def test_replicas_are_cut_alike(group: Any) -> None:
    """Two pipelines of two ranks, whose first batches have other sizes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    with make(model(), ranks=None, mesh=mesh, replicas="dp", microbatches=2) as pipe:
        part = slice(0, 6) if mesh.get_local_rank("dp") == 0 else slice(6, 8)
        pipe.step(X[part], target=Y[part])
        found, expected = gradients(pipe), plain_loop(Case(model(), (X,), Y, mean_loss))[1]
        assert_same(found, {name: expected[name] for name in found})
        assert pipe.is_main_process == (group.rank() == 0)
        mine, others = pipe.job.meet(lambda: sorted(found), among=pipe.job.pipeline)
    assert sorted(mine + others) == sorted(name for name, _ in model().named_parameters())


def attends(m: Any, x: Tensor) -> Tensor:
    query = m.query(x)
    return nn.functional.scaled_dot_product_attention(query, query, x)


def in_turn(m: Any, x: Tensor) -> Tensor:
    """Attention, whose share of the work grows with the length of the sequences, and layers."""
    h = m.attention(x)
    for layer in m.layers:
        h = layer(h).tanh() + h
    return h.mean(1)  # type: ignore[no-any-return]


def attending() -> nn.Module:
    torch.manual_seed(0)
    attention = Does(attends, query=nn.Linear(WIDTH, WIDTH))
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
    return Does(in_turn, attention=attention, layers=layers).double()


@in_processes(4, 100.0)
def test_replicas_whose_batches_ask_for_other_cuts_are_cut_as_the_first_is(group: Any) -> None:
    batches = [torch.linspace(-1, 1, 4 * n * WIDTH).double().view(4, n, WIDTH) for n in (2, 64)]
    parts = [partition(attending(), 2, example=((batch[:2],), {})).modules for batch in batches]
    first, second = ([len(list(stage.parameters())) for stage in stages] for stages in parts)
    assert first != second
    cases = [Case(attending(), (batch,), Y[:4], mean_loss, evaluates=False) for batch in batches]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    with make(attending(), ranks=None, mesh=mesh, replicas="dp", microbatches=2) as pipe:
        judge(cases, pipe).check(1e-12)
        here = pipe.job.meet(lambda: len(list(pipe.stages[0].module.parameters())))
    assert here == [*first, *first]
