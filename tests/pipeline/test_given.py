"""Who is given what: ranks without the batch, arguments by name, edges and wired stages by hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock import LossScaler, Pipeline, PipelineStage
from penstock.errors import PenstockError
from penstock.partition import Description, Partition
from penstock.schedule import Edge
from penstock.testing import WorkerPool
from penstock.values import ValueSpec

WIDTH = 3
X = torch.linspace(-1, 1, 7 * WIDTH, dtype=torch.float64).reshape(7, WIDTH)
Y = X.flip(0)
MASK = torch.arange(7) % 3 > 0
SCHEDULES = ["GPipe", "1F1B", "ZB-H1", "Interleaved1F1B", "ZB-V", "DualPipeV"]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.lin(hidden))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, hidden: Tensor, mask: Tensor) -> Any:
        return self.layer(hidden) * mask[:, None]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, hidden: Tensor, *, scale: float = 1.0) -> Any:
        return self.layer(hidden) * scale


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Layer(), Masked(), Scaled(), Masked()]


def plain(modules: Sequence[nn.Module], scale: float = 1.0) -> float:
    a, b, c, d = modules
    found = loss(d(c(b(a(X), mask=MASK), scale=scale), mask=MASK), Y)
    found.backward()
    return float(found.detach())


def gradients(modules: Sequence[nn.Module]) -> list[Tensor | None]:
    return [p.grad for module in modules for p in module.parameters()]


# ---- arguments by name


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_arguments_by_name_go_to_the_stages_that_take_them(schedule: str) -> None:
    modules, expected = layers(), layers()
    stages = [PipelineStage(module, i, 4) for i, module in enumerate(modules)]
    pipe = Pipeline.from_stages(stages, schedule=schedule, microbatches=6, loss_fn=loss)
    found = pipe.step(X, mask=MASK, scale=0.5, target=Y)
    assert found.loss == pytest.approx(plain(expected, 0.5), abs=1e-14)
    torch.testing.assert_close(gradients(modules), gradients(expected), rtol=0, atol=1e-12)


def test_so_do_they_in_a_chain_of_modules() -> None:
    model = nn.Sequential(*layers())
    pipe = Pipeline(
        model, schedule="1F1B", stages=[["0", "1"], ["2", "3"]], microbatches=2, loss_fn=loss
    )
    assert pipe.step(X, mask=MASK, scale=2.0, target=Y).loss == pytest.approx(plain(layers(), 2.0))


# ---- ranks that are given less


def step_with_what_is_needed(group: Any) -> Any:
    rank = torch.distributed.get_rank()
    modules, expected = layers(), layers()
    held = [PipelineStage(modules[i], i, 4) for i in (rank, rank + 2)]
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    pipe = Pipeline.from_stages(
        held, schedule="Interleaved1F1B", microbatches=2, loss_fn=loss, mesh=mesh
    )
    losses = []
    for _ in range(2):
        result = pipe.step(X) if rank == 0 else pipe.step(mask=MASK, target=Y)
        losses.append(result.loss)
    plain(expected)
    plain(expected)
    mine = gradients([modules[rank], modules[rank + 2]])
    theirs = gradients([expected[rank], expected[rank + 2]])
    gap = max(
        float((a - b).abs().max())
        for a, b in zip(mine, theirs, strict=True)
        if a is not None and b is not None
    )
    return [losses, gap]


def test_ranks_need_only_what_their_stages_take(workers: WorkerPool) -> None:
    answers = workers.run(f"{__name__}:step_with_what_is_needed", 2, 30.0)
    assert answers[0][0] == answers[1][0] == [pytest.approx(plain(layers()))] * 2
    assert max(gap for _, gap in answers) < 1e-12


def told(run: Callable[[], Any]) -> list[str]:
    try:
        run()
    except PenstockError as error:
        return [type(error).__name__, str(error)]
    return []


def chain_pipe(group: Any) -> Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    return Pipeline(model, schedule="1F1B", microbatches=2, loss_fn=loss, group=group)


def step_with_less(group: Any, name: str) -> list[str]:
    return told(lambda: LESS[name][0](chain_pipe(group), torch.distributed.get_rank()))


LESS: dict[str, tuple[Callable[[Pipeline, int], Any], str]] = {
    "no batch": (
        lambda pipe, rank: pipe.step(target=Y),
        r"UsageError step\(\) was given no batch; call it with the model's arguments",
    ),
    "no target": (
        lambda pipe, rank: pipe.step(X, target=Y) if rank == 0 else pipe.step(X),
        "UsageError rank 1, which has the last stage, was given no target",
    ),
    "the wrong rank": (
        lambda pipe, rank: pipe.step() if rank == 0 else pipe.step(X, target=Y),
        r"UsageError rank 0 was not given the arguments \[0\], which stage 0 takes",
    ),
    "nothing": (lambda pipe, rank: pipe.step(), r"UsageError step\(\) was given no batch"),
    "other numbers": (
        lambda pipe, rank: pipe.step(X, target=Y, microbatches=2 + rank),
        "AgreementError ranks differ in the number of microbatches: rank 0: 2; rank 1: 3",
    ),
    "other things to do": (
        lambda pipe, rank: (pipe.eval if rank else pipe.step)(X, target=Y),
        "AgreementError ranks differ in what they do: rank 0: train .*; rank 1: evaluate",
    ),
    "other samples": (
        lambda pipe, rank: pipe.step(X) if rank == 0 else pipe.step(target=Y[:6]),
        "AgreementError ranks differ in the samples of the microbatches",
    ),
    "another divisor": (
        lambda pipe, rank: pipe.step(X, target=Y, total_weight=2.0 + 2 * rank),
        r"AgreementError ranks differ in the weights of the loss: rank 0: in all 7, gradients times up to 2; "
        "rank 1: in all 7, gradients times up to 1; give every rank the same loss_weight",
    ),
    "other weights": (
        lambda pipe, rank: pipe.step(X, target=Y, loss_weight=[1.0, 2.0 + rank]),
        "AgreementError ranks differ in the weights of the loss: rank 0: in all 3, .* rank 1: in all 4, ",
    ),
    "no scaler": (
        lambda pipe, rank: pipe.step(X, target=Y, scaler=LossScaler() if rank else None),
        "AgreementError ranks differ in the weights of the loss",
    ),
}


@pytest.mark.parametrize("name", sorted(LESS))
def test_every_rank_hears_what_is_missing(workers: WorkerPool, name: str) -> None:
    answers = workers.run(f"{__name__}:step_with_less", 2, 30.0, name=name)
    assert answers[0] == answers[1]
    assert answers[0], "nobody noticed"
    assert re.match(LESS[name][1], " ".join(answers[0])), answers[0]


# ---- the number of microbatches


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_number_of_microbatches_may_differ_per_step(schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(4)))
    expected = loss(model(X), Y)
    pipe = Pipeline(model, schedule=schedule, stages=4, microbatches=8, loss_fn=loss)
    found = {m: pipe.step(X, target=Y, microbatches=m).loss for m in (4, 7, 6, 4)}
    assert found == {m: pytest.approx(float(expected.detach())) for m in found}


# ---- edges by hand


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, hidden: Tensor) -> dict[str, Tensor]:
        made = self.layer(hidden)
        return {"main": made, "skip": made.sin()}


FORK = (Edge("main", 0, (1,)), Edge("skip", 0, (2, 3)), Edge("a", 1, (2,)), Edge("b", 2, (3,)))


class MeetOn(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.layer = Layer()

    def forward(self, **values: Tensor) -> Any:
        return self.layer(values[self.name]) + values["skip"]


def forked() -> list[nn.Module]:
    torch.manual_seed(1)
    return [Fork(), Layer(), MeetOn("a"), MeetOn("b")]


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZB-V", "DualPipeV", "LoopedBFS"])
def test_a_value_for_several_later_stages(schedule: str) -> None:
    modules, expected = forked(), forked()
    stages = [PipelineStage(module, i, 4) for i, module in enumerate(modules)]
    pipe = Pipeline.from_stages(stages, schedule=schedule, microbatches=6, loss_fn=loss, edges=FORK)
    made = expected[0](X)
    a = expected[1](made["main"])
    b = expected[2](a=a, skip=made["skip"])
    whole = loss(expected[3](b=b, skip=made["skip"]), Y)
    whole.backward()
    assert pipe.step(X, target=Y).loss == pytest.approx(float(whole.detach()), abs=1e-14)
    torch.testing.assert_close(gradients(modules), gradients(expected), rtol=0, atol=1e-12)


# ---- wired stages


class Wired(nn.Module):
    """Uses the named values and the batch's mask, and gives one value or the output."""

    wired = True

    def __init__(self, uses: str | None, gives: str | None) -> None:
        super().__init__()
        self.layer = Layer()
        self.uses, self.gives = uses, gives

    def forward(self, values: dict[str, Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        hidden = self.layer(values[self.uses] if self.uses else args[0])
        if self.gives is None:
            return hidden * kwargs["mask"][:, None]
        return {self.gives: hidden}


def describe(call: ValueSpec, training: bool) -> Description:
    hidden = call.tensors[0]
    spec = ValueSpec.of(torch.empty(hidden.shape, dtype=torch.float64, requires_grad=training))
    edges = (Edge("one", 0, (1,)), Edge("two", 1, (2,)), Edge("three", 2, (3,)))
    return Description(edges, {edge.value: spec for edge in edges} | {"output": spec})


NAMES = [None, "one", "two", "three", None]


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.parts = nn.ModuleList(Wired(NAMES[i], NAMES[i + 1]) for i in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        values: dict[str, Any] = {}
        for part in self.parts:
            found = part(values, (x,), {"mask": mask})
            values = found if isinstance(found, dict) else values
        return found


def wired_pipe(model: Whole, schedule: str, group: Any = None) -> Pipeline:
    partition = Partition(tuple(model.parts), describe=describe)
    return Pipeline(
        model,
        schedule=schedule,
        stages=partition,
        ranks=2,
        microbatches=4,
        loss_fn=loss,
        group=group,
    )


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZB-V"])
def test_wired_stages(schedule: str) -> None:
    model, expected = Whole(), Whole()
    pipe = wired_pipe(model, schedule)
    whole = loss(expected(X, mask=MASK), Y)
    whole.backward()
    assert pipe.step(X, mask=MASK, target=Y).loss == pytest.approx(float(whole.detach()))
    torch.testing.assert_close(gradients([model]), gradients([expected]), rtol=0, atol=1e-12)
    torch.testing.assert_close(pipe.predict(X, mask=MASK), expected(X, MASK))


def step_wired(group: Any) -> float:
    pipe = wired_pipe(Whole(), "Interleaved1F1B", group)
    if torch.distributed.get_rank():
        return pipe.step(mask=MASK, target=Y).loss
    return pipe.step(X).loss


def test_wired_stages_find_absent_arguments_on_the_meta_device(workers: WorkerPool) -> None:
    expected = float(loss(Whole()(X, MASK), Y).detach())
    assert workers.run(f"{__name__}:step_wired", 2, 30.0) == [pytest.approx(expected)] * 2
