"""``replicas=`` alone is data parallelism: two by two processes beside a plain loop over the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from penstock import Loss, Pipeline, PipelineStage, Replicas, add_loss, collect_losses
from penstock._engine.parallel import whole
from penstock._engine.transport import Group
from penstock.errors import AgreementError, NonFiniteError, PenstockError
from penstock.testing import Case, WorkerPool, judge
from tests.catalogue.making import Does
from tests.parallel.bodies import Collectives, Mlp, adamw, half_of, halves_of, mesh_of, wrap

X = torch.linspace(-1, 1, 16 * 4, dtype=torch.float64).reshape(16, 4)
Y = X.flip(0) * torch.linspace(0, 2, 16, dtype=torch.float64)[:, None]
CASES = {"1F1B": ("weighted", "sum", "tied"), "ZB-V": ("plain", "unused", "tied")}


def choice() -> nn.Module:
    """Some weights are used on the first half of the batch only, and one never."""
    choose = lambda m, hidden: (m.low if hidden.sum() < 0 else m.high)(hidden)  # noqa: E731
    return Does(choose, **{name: nn.Linear(4, 4) for name in ("low", "high", "never")})


def model_of(case: str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    first: nn.Module = nn.Linear(4, 4) if case == "tied" else Mlp()
    first, last = choice() if case == "unused" else first, nn.Linear(4, 4)
    if isinstance(first, nn.Linear):
        last.weight = first.weight
    return nn.Sequential(first, Mlp(), Mlp(), last).double()


def weight_of(target: Tensor) -> Tensor:
    """Some samples count more than others, and the halves of the batch differ."""
    return (target.abs() > 0.5).sum() + 1


def piped(mesh: DeviceMesh, model: nn.Module, loss_fn: Any = mse_loss, **options: Any) -> Pipeline:
    """A pipeline with replicas of four microbatches each."""
    defaults: dict[str, Any] = {"microbatches": 4, "replicas": "dp"}
    return Pipeline(model, mesh=mesh, loss_fn=loss_fn, **(defaults | options))


def run_case(case: str, schedule: str, mesh: DeviceMesh) -> tuple[float, int]:
    """Three updates; each replica has other first weights. Also the reductions of a step."""
    loss = {
        "weighted": Loss(mse_loss, weight=weight_of, check=False),
        "sum": Loss(partial(mse_loss, reduction="sum"), reduction="sum"),
        "unused": Loss(mse_loss, check=False),
    }.get(case, Loss(mse_loss))
    cases = halves_of(Case(model_of(case), (X,), Y, loss), X, Y)
    model = model_of(case, seed=mesh.get_local_rank("dp"))
    with piped(mesh, model, loss, schedule=schedule) as pipe:
        gaps = judge(cases, pipe, steps=3, optimizer=adamw).differences()
        with Collectives() as collectives:
            pipe.step(*cases[0].args, target=cases[0].target)
    counts = collectives.counts.items()
    return max(gaps.values()), sum(n for name, n in counts if "allreduce" in name)


def run(group: Any, schedule: str) -> dict[str, tuple[float, int]]:
    """A worker's task."""
    mesh = mesh_of("dp", "pp")
    return {case: run_case(case, schedule, mesh) for case in CASES[schedule]}


@pytest.mark.parametrize("schedule", CASES)
def test_replicas_equal_a_plain_loop_and_reduce_once(workers: WorkerPool, schedule: str) -> None:
    for answer in workers.run(f"{__name__}:run", 4, 60.0, schedule=schedule):
        assert {case: gap for case, (gap, _) in answer.items() if gap > 1e-12} == {}
        # One of all weights of each stage, which are below 25 MB.
        stages = 2 if schedule == "ZB-V" else 1
        assert {reductions for _, reductions in answer.values()} == {stages}


def run_accumulated(group: Any) -> float:
    """A worker's task: two steps that each count half, and the same batch at once."""
    mesh = mesh_of("dp", "pp")
    half = half_of(mesh)
    with piped(mesh, model_of("plain"), schedule="ZB-V") as pipe:
        pipe.step(X[half], target=Y[half])
        whole = {name: p.grad for name, p in pipe.weights.here.named_parameters()}
        pipe.zero_grad()
        for _ in range(2):
            pipe.step(X[half], target=Y[half], accumulate=2)
        parts: list[Any] = [(p.grad, whole[n]) for n, p in pipe.weights.here.named_parameters()]
    return max(float((a - b).abs().max()) for a, b in parts)


def test_steps_that_accumulate(workers: WorkerPool) -> None:
    assert max(workers.run(f"{__name__}:run_accumulated", 4, 60.0)) < 1e-12


def run_without_sync(group: Any, case: str) -> tuple[float, list[int]]:
    """A worker's task: how far one average of four steps is from four, and the reductions of each step."""
    mesh = mesh_of("dp", "pp")
    half, how = half_of(mesh), case if case in ("ddp", "fsdp") else ""
    options: dict[str, Any] = {"wrap": lambda m, stage: wrap(m, how, mesh)} if how else {}
    with piped(mesh, model_of(case), **options) as pipe:
        gradients, counts = list[dict[str, Tensor]](), list[int]()
        for averaged in ([1, 2, 3, 4], [4]):
            pipe.zero_grad()
            for number in range(1, 5):
                every = nullcontext() if number in averaged else pipe.no_sync()
                with every, Collectives() as collectives:
                    pipe.step(X[half], target=Y[half], accumulate=4)
                counts.append(sum(n for name, n in collectives.counts.items() if "reduce" in name))
            held = [(n, p.grad) for n, p in pipe.weights.here.named_parameters()]
            gradients.append({n: whole(g).clone() for n, g in held if g is not None})
    gaps = [float((gradient - gradients[1][n]).abs().max()) for n, gradient in gradients[0].items()]
    return max(gaps), counts[4:]


@pytest.mark.parametrize("case", ["plain", "tied", "ddp", "fsdp"])
def test_steps_that_accumulate_may_average_once(workers: WorkerPool, case: str) -> None:
    for gap, reductions in workers.run(f"{__name__}:run_without_sync", 4, 60.0, case=case):
        assert gap < 1e-12
        assert reductions == ([1] * 4 if case == "tied" else [0, 0, 0, 1])


def sync_on_one_alone(group: Any) -> str:
    """A worker's task: the error where one replica alone leaves the average out."""
    mesh = mesh_of("dp", "pp")
    with piped(mesh, model_of("plain")) as pipe:
        pipe.step(X, target=Y)
        alone = pipe.no_sync() if mesh.get_local_rank("dp") else nullcontext()
        with alone, pytest.raises(AgreementError) as caught:
            pipe.step(X, target=Y)
        return str(caught.value)


def test_replicas_average_together_or_not_at_all(workers: WorkerPool) -> None:
    for text in workers.run(f"{__name__}:sync_on_one_alone", 4, 60.0):
        assert "inside pipe.no_sync(), and others do not; enter it on every rank" in text


FROZEN: dict[str, tuple[list[str], list[str]]] = {
    "one weight each, of one size": (["0.bias"], ["3.bias"]),
    "one weight": ([], ["1.bias"]),
    "a whole stage": (["2.", "3."], []),
}
"""What each replica freezes."""


def frozen_differently(group: Any) -> dict[str, list[str]]:
    """A worker's task: what a step says, and whether the same ones freeze in the next."""
    mesh, said = mesh_of("dp", "pp"), dict[str, list[str]]()
    half, replica = half_of(mesh), mesh.get_local_rank("dp")
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).double()
    with piped(mesh, model) as pipe:
        for name, frozen in FROZEN.items():
            for freezes in (frozen[replica], [*frozen[0], *frozen[1]]):
                for path, weight in model.named_parameters():
                    weight.requires_grad_(not path.startswith(tuple(freezes)))
                try:
                    pipe.step(X[half], target=Y[half])
                    said.setdefault(name, []).append("")
                except PenstockError as error:
                    said.setdefault(name, []).append(f"{type(error).__name__}: {error}")
    return said


def test_replicas_that_freeze_different_weights_are_told(workers: WorkerPool) -> None:
    """Their gradients would be averaged with those of other weights, or a reduction would break."""
    for answer in workers.run(f"{__name__}:frozen_differently", 4, 90.0):
        assert answer.keys() == FROZEN.keys()
        for name, (first, second) in answer.items():
            assert first.startswith("AgreementError: the replicas train different weights"), name
            assert all(path in first for of in FROZEN[name] for path in of), (name, first)
            assert second == ""


# ---- when the averages start


def run_early(group: Any) -> list[int]:
    """A worker's task: how many averages have started before each stage's last backward, and in all."""
    mesh, counts = mesh_of("dp", "pp"), list[int]()
    pipe = piped(mesh, model_of("plain"), schedule="Interleaved1F1B", microbatches=2)
    with pipe, Collectives() as collectives:

        def count() -> int:
            return sum(n for name, n in collectives.counts.items() if "allreduce" in name)

        for stage in (pipe.rank + 2, pipe.rank):
            pipe.on(f"{stage}B1", before=lambda event: counts.append(count()))
        pipe.step(X[half_of(mesh)], target=Y[half_of(mesh)])
        return [*counts, count()]


def test_a_stages_average_starts_while_other_stages_still_go_backward(workers: WorkerPool) -> None:
    for counts in workers.run(f"{__name__}:run_early", 4, 60.0):
        assert counts == [0, 1, 2]


def run_layer_by_layer(group: Any, schedule: str) -> tuple[float, list[int]]:
    """A worker's task: steps of stages with over 25 MiB, and the averages that have started, microbatch by
    microbatch, when the first layer here gets its gradient.
    """
    mesh, counts = mesh_of("dp", "pp"), list[int]()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(10)]).double()
    x = torch.linspace(-1, 1, 8 * 1024, dtype=torch.float64).reshape(8, 1024)
    cases = halves_of(Case(model, (x,), x.flip(0), mse_loss), x, x.flip(0))
    pipe = piped(mesh, copy.deepcopy(model), schedule=schedule, microbatches=2)
    pipe.cut(x[:1])
    with pipe, Collectives() as collectives:
        gaps = judge(cases, pipe, steps=2, optimizer=adamw).differences()
        collectives.counts.clear()
        first = next(p for _, p in pipe.weights.here.named_parameters() if p.dim() == 2)
        hook = first.register_post_accumulate_grad_hook(
            lambda _: counts.append(
                sum(n for name, n in collectives.counts.items() if "allreduce" in name)
            )
        )
        mine = cases[mesh.get_local_rank("dp")]
        pipe.step(*mine.args, target=mine.target)
        hook.remove()
    return max(gaps.values()), counts


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
def test_layers_are_averaged_while_the_last_backward_of_their_stage_runs(
    workers: WorkerPool, schedule: str
) -> None:
    """The four weights behind the first layer, and what is small in their bucket."""
    for gap, counts in workers.run(f"{__name__}:run_layer_by_layer", 4, 60.0, schedule=schedule):
        assert gap < 1e-12
        assert counts == [0, 5]


def checkpoints_twice(m: Any, hidden: Tensor) -> Any:
    """A backward adds to the weight once for each of two checkpoints, which run backwards of their own."""
    for _ in range(2):
        hidden = checkpoint(m.layer, hidden, use_reentrant=True)
    return hidden


def run_reentrant(group: Any) -> float:
    """A worker's task."""
    mesh = mesh_of("dp", "pp")
    torch.manual_seed(0)
    twice = [Does(checkpoints_twice, layer=nn.Linear(4, 4)) for _ in range(2)]
    model = nn.Sequential(nn.Linear(4, 4), *twice).double()
    with piped(mesh, copy.deepcopy(model), schedule="1F1B") as pipe:
        judged = judge(
            halves_of(Case(model, (X,), Y, mse_loss), X, Y), pipe, steps=3, optimizer=adamw
        )
        return max(judged.differences().values())


def test_a_backward_may_add_to_a_gradient_several_times(workers: WorkerPool) -> None:
    assert max(workers.run(f"{__name__}:run_reentrant", 4, 60.0)) < 1e-12


def run_uneven(group: Any, schedule: str) -> float:
    """A worker's task: one replica has fewer microbatches."""
    mesh, model = mesh_of("dp", "pp"), model_of("plain")
    parts = [slice(0, 14), slice(14, 16)]
    cases = [Case(model, (X[part],), Y[part], mse_loss) for part in parts]
    with piped(mesh, copy.deepcopy(model), schedule=schedule) as pipe:
        return max(judge(cases, pipe, steps=2).differences().values())


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZB-V"])
def test_replicas_may_have_different_numbers_of_microbatches(
    workers: WorkerPool, schedule: str
) -> None:
    assert max(workers.run(f"{__name__}:run_uneven", 4, 60.0, schedule=schedule)) < 1e-12


# ---- losses and metrics go by name


class Adds(nn.Module):
    """Adds losses under the names that it is given, of its own value times their number."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        self.layer = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Any:
        for number, name in enumerate(self.names, start=1):
            add_loss(name, self.layer(hidden).square().mean() * number, weight=0.5)
        return hidden + self.layer(hidden)


def run_named(group: Any) -> list[Any]:
    """A worker's task: losses and metrics by name, where replicas differ in them, and in their samples."""
    mesh = mesh_of("dp", "pp")
    replica = mesh.get_local_rank("dp")
    mine = ("text", "speech")[replica]
    torch.manual_seed(0)
    names: list[str] = []
    model = nn.Sequential(Adds(names), Mlp(), Adds(names), Mlp()).double()
    metrics = {"mean": lambda o, t: o.mean(), mine: lambda o, t: ((o > 0).sum(), o.numel())}
    pipe = piped(mesh, model, Loss(mse_loss, metrics=metrics), microbatches=2)
    part = slice(0, 12) if replica == 0 else slice(12, 16)
    seen = []
    with pipe:
        # A name of one replica alone, names that differ, one that all have, and none.
        for names[:] in ([mine] if replica else [], ["both", mine], ["both"], [], [mine]):
            result = pipe.step(X[part], target=Y[part])
            seen.append([dict(result.losses), dict(result.metrics), result.loss, result.weight])
        pipe.predict(X[part])
    return seen


def expected_of(replica: int, names: list[str], part: slice) -> Any:
    """Of a plain loop over one replica's samples: named losses, metrics, and the loss with what was added."""
    torch.manual_seed(0)
    mine = ("text", "speech")[replica]
    model = nn.Sequential(Adds(names), Mlp(), Adds(names), Mlp()).double()
    with collect_losses() as losses:
        output = model(X[part]).detach()
    main = float(mse_loss(output, Y[part]))
    named = {name: float(value) for name, value in losses.named().items()}
    counts = {"mean": float(output.mean()), mine: float((output > 0).sum()) / output.numel()}
    return named, counts, main, main + float(losses.total().detach())


def test_losses_and_metrics_of_one_name_are_averaged_over_the_replicas_that_have_it(
    workers: WorkerPool,
) -> None:
    replies = workers.run(f"{__name__}:run_named", 4, 60.0)
    assert all(reply == replies[0] for reply in replies)
    cases = [
        ([], ["speech"]),
        (["both", "text"], ["both", "speech"]),
        (["both"], ["both"]),
        ([], []),
        (["text"], ["speech"]),
    ]
    for (first, second), (losses, metrics, loss, weight) in zip(cases, replies[0], strict=True):
        of_text, text, main, whole = expected_of(0, first, slice(0, 12))
        of_speech, speech, main_too, whole_too = expected_of(1, second, slice(12, 16))
        both = {n: 0.75 * of_text[n] + 0.25 * of_speech[n] for n in of_text if n in of_speech}
        named = {**of_text, **of_speech, **both, "main": 0.75 * main + 0.25 * main_too}
        assert losses == pytest.approx(named, abs=1e-14)
        mean = 0.75 * text["mean"] + 0.25 * speech["mean"]
        assert metrics == pytest.approx({**text, **speech, "mean": mean}, abs=1e-14)
        assert loss == pytest.approx(0.75 * whole + 0.25 * whole_too, abs=1e-14)
        assert weight == 16


def run_adding(group: Any, alike: bool) -> str:
    """A worker's task: replicas of which only sums are known, with a loss of their own name or of one."""
    mesh = mesh_of("dp", "pp")
    circle = Group(mesh.get_group("dp"))
    model = nn.Sequential(
        Adds(["one" if alike else f"of {circle.rank}"]), *[Mlp() for _ in range(3)]
    )
    others = Replicas(2, circle.sum, index=circle.rank)
    try:
        alone: Any = mesh.get_group("pp")
        with piped(alone, model.double(), microbatches=2, replicas=others) as pipe:
            return " ".join(pipe.step(X, target=Y).losses)
    except PenstockError as error:
        return str(error)


@pytest.mark.whole
@pytest.mark.parametrize("alike", [True, False])
def test_replicas_that_only_add_up_must_have_the_same_names(
    workers: WorkerPool, alike: bool
) -> None:
    said = "main one" if alike else "replicas differ in the names of their losses and metrics"
    for reply in workers.run(f"{__name__}:run_adding", 4, 60.0, alike=alike):
        assert said in reply


# ---- beside wrappers


class Words(nn.Module):
    """A gradient that is sparse, and statistics that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4, sparse=True)
        self.blocks = nn.ModuleList([Mlp() for _ in range(2)])
        self.norm = nn.BatchNorm1d(4)

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden)


def run_sparse(group: Any) -> list[Any]:
    """A worker's task: whether gradients and buffers are the same on both replicas, and sparse."""
    mesh = mesh_of("dp", "pp")
    half = half_of(mesh)
    torch.manual_seed(half.start)
    with piped(mesh, Words().double(), microbatches=2) as pipe:
        pipe.step(torch.arange(16)[half], target=Y[half])
        grads = {
            name: p.grad for name, p in pipe.weights.here.named_parameters() if p.grad is not None
        }
        state = pipe.weights.state_dict()
    return [
        sorted(name for name, grad in grads.items() if grad.is_sparse),
        {name: grad.to_dense().sum().item() for name, grad in grads.items()},
        {name: value.double().sum().item() for name, value in state.items()},
    ]


def test_sparse_gradients_and_buffers(workers: WorkerPool) -> None:
    first, last, *others = workers.run(f"{__name__}:run_sparse", 4, 60.0)
    assert others == [first, last]
    assert first[0] == ["embed.weight"]
    assert "norm.running_mean" in last[2]


def wrap_some(module: nn.Module, stage: int, how: str, mesh: DeviceMesh) -> Any:
    """Only the first stage, or a block of it; or each, with tensor parallelism, which knows no replica."""
    if how == "tp":
        wrap(module, "tp", mesh)
    elif stage == 0 and how == "ddp":
        return DistributedDataParallel(module, process_group=mesh.get_group("dp"))
    elif stage == 0 and how == "replicate":
        replicate(module, mesh=mesh["dp"])
    elif stage == 0:
        fully_shard(next(m for m in module.modules() if isinstance(m, Mlp)), mesh=mesh["dp"])
    return None


def run_wrapped(group: Any, how: str) -> float:
    """A worker's task: wrappers reduce some gradients or none."""
    sizes = {"dp": 2, "pp": 1, "tp": 2} if how == "tp" else {"dp": 2, "pp": 2}
    mesh = init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,))
    case = Case(model_of("plain"), (X,), Y, mse_loss)
    with piped(
        mesh, copy.deepcopy(case.model), wrap=lambda m, stage: wrap_some(m, stage, how, mesh)
    ) as pipe:
        return max(judge(halves_of(case, X, Y), pipe, steps=2).differences().values())


@pytest.mark.parametrize("how", ["ddp", "replicate", "block", "tp"])
def test_what_no_wrapper_reduces_is_averaged(workers: WorkerPool, how: str) -> None:
    assert max(workers.run(f"{__name__}:run_wrapped", 4, 60.0, how=how)) < 1e-12


def run_nonfinite(group: Any, sharded: bool) -> str:
    """A worker's task: the gradients of one replica are not finite, though all losses are."""
    mesh = mesh_of("dp", "pp")
    factor = 1.0 - mesh.get_local_rank("dp")
    loss_fn: Callable[..., Tensor] = lambda o, t: (o * t).abs().sqrt().mean()  # noqa: E731
    wrapped: Any = (lambda module, _: wrap(module, "fsdp", mesh)) if sharded else None
    pipe = piped(mesh, model_of("plain"), loss_fn, microbatches=2, wrap=wrapped)
    with pipe, pytest.raises(NonFiniteError) as caught:
        pipe.step(X[:8], target=Y[:8] * factor + 1e-3 * factor)
    return str(caught.value)


@pytest.mark.parametrize("sharded", [False, True])
def test_all_replicas_hear_of_one_that_is_not_finite(workers: WorkerPool, sharded: bool) -> None:
    for said in workers.run(f"{__name__}:run_nonfinite", 4, 30.0, sharded=sharded):
        assert "gradients are not finite" in said


# ---- what is refused


def wrapped_over(mesh: DeviceMesh, name: str, how: str) -> Any:
    if how == "ddp":
        return lambda m, s: DistributedDataParallel(m, process_group=mesh.get_group(name))
    return lambda m, s: fully_shard(m, mesh=mesh[name])


def run_refused(group: Any, name: str) -> str:
    """A worker's task: what is said of arguments that contradict each other."""
    mesh = mesh_of("dp", "pp")
    alone = [[dist.new_group([rank]) for rank in range(4)][dist.get_rank()]]
    dp, weight = {"replicas": "dp"}, {"loss_fn": Loss(mse_loss, weight=weight_of)}
    wrap = {"wrap": wrapped_over(mesh, "dp", "ddp")}
    cases: dict[str, dict[str, Any]] = {
        "a name": {"replicas": "tp"},
        "own dimension": {"replicas": mesh["pp"]},
        "fsdp over pp": {**dp, "wrap": wrapped_over(mesh, "pp", "fsdp")},
        "ddp over others": {**dp, "wrap": lambda m, s: DistributedDataParallel(m, process_group=alone[0])},
        "ddp, weighted": {**wrap, **weight},
        "ddp, weighted later": wrap,
        "tied, ddp on one": {**dp, "wrap": lambda m, s: wrap_some(m, s, "ddp", mesh)},
    }  # fmt: skip
    model = model_of("tied" if name.startswith("tied") else "plain")
    try:
        pipe = Pipeline(model, mesh=mesh, microbatches=2, **{"loss_fn": mse_loss, **cases[name]})
        with pipe:
            pipe.step(X, target=Y, loss_weight=weight_of if name.endswith("later") else None)
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


REFUSED = {
    "a name": ["replicas='tp'", "the mesh has dp, pp"],
    "own dimension": ["this pipeline itself runs on", 'replicas="dp"'],
    "fsdp over pp": ["stage", "fully_shard over the processes", "ranks of this pipeline"],
    "ddp over others": ["DistributedDataParallel over the processes", "but replicas= holds"],
    "ddp, weighted": ["the loss has weights", "without replicas=", "DistributedDataParallel"],
    "ddp, weighted later": ["the loss has weights", "without replicas=", "DistributedDataParallel"],
    "tied, ddp on one": ["stages [0, 1] share '0.weight'", "in stages [0] only"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_contradicts_replicas_is_refused(workers: WorkerPool, name: str) -> None:
    for said in workers.run(f"{__name__}:run_refused", 4, 30.0, name=name):
        assert said.startswith(("UsageError", "PeerFailed"))
        assert [part for part in REFUSED[name] if part not in said] == []


def run_failing(group: Any) -> str:
    """A worker's task: of two pipelines side by side, the second fails."""
    mesh = mesh_of("dp", "pp")
    pipe = Pipeline(model_of("plain"), mesh=mesh, microbatches=2, loss_fn=mse_loss)
    if mesh.get_local_rank("dp") and not pipe.rank:
        pipe.on("0F1", before=lambda event: [].pop())
    try:
        with pipe:
            # The other pipeline may have ended a first step before this one fails in it.
            for _ in range(1000):
                pipe.step(X, target=Y)
    except PenstockError as error:
        return str(error)
    return ""


def test_a_failure_in_one_pipeline_is_named_in_all(workers: WorkerPool) -> None:
    first, second, failed, stopped = workers.run(f"{__name__}:run_failing", 4, 60.0)
    culprit = "replica 1, rank 0, global rank 2"
    assert failed.startswith(f"{culprit}, stage 0, microbatch 1, action 0F1")
    for process, text in ((0, first), (1, second), (3, stopped)):
        name = f"replica {process // 2}, rank {process % 2}, global rank {process}"
        assert text.startswith(f"{name} stopped because {culprit}, step 1")


def run_by_hand(group: Any) -> list[float]:
    """A worker's task: stages placed by hand, of which only those of one rank share a weight."""
    mesh = mesh_of("dp", "pp")
    replica, rank = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    modules = []
    for seed in (0, replica):
        torch.manual_seed(seed)
        parts = [nn.Linear(4, 4).double() for _ in range(4)]
        parts[2].weight = parts[0].weight
        modules.append(parts)
    whole, mine = nn.Sequential(*modules[0]), modules[1]
    stages = [PipelineStage(mine[index], index, 4) for index in (rank, rank + 2)]
    half = half_of(mesh)
    pipe = Pipeline.from_stages(
        stages, schedule="Interleaved1F1B", microbatches=4, mesh=mesh, replicas="dp",
        loss_fn=mse_loss,
    )  # fmt: skip
    with pipe:
        pipe.step(X[half], target=Y[half])
    mse_loss(whole(X), Y).backward()
    grads = [(mine[i].weight.grad, modules[0][i].weight.grad) for i in (rank, rank + 2)]
    return [float((a - b).abs().max()) for a, b in grads if a is not None and b is not None]


def test_stages_placed_by_hand(workers: WorkerPool) -> None:
    for gaps in workers.run(f"{__name__}:run_by_hand", 4, 60.0):
        assert len(gaps) == 2
        assert max(gaps) < 1e-12
