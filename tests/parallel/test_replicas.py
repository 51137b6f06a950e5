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

from penstock import Loss, Pipeline, PipelineStage, Replicas, StepResult, add_loss, collect_losses
from penstock._engine.parallel import whole
from penstock._engine.transport import Group
from penstock.errors import AgreementError, NonFiniteError, PeerFailed, PenstockError, UsageError
from penstock.testing import Case, WorkerPool, judge
from tests.catalogue.making import Does
from tests.parallel.bodies import Collectives, Mlp, adamw, half_of, halves_of, mesh_of, wrap
from tests.processes import in_processes

X = torch.linspace(-1, 1, 16 * 4, dtype=torch.float64).reshape(16, 4)
Y = X.flip(0) * torch.linspace(0, 2, 16, dtype=torch.float64)[:, None]


def chooses(m: Any, hidden: Tensor) -> Any:
    """Uses some weights on the first half of the batch only, and one never."""
    return (m.low if hidden.sum() < 0 else m.high)(hidden)


def checkpoints_twice(m: Any, hidden: Tensor) -> Any:
    """A backward adds to the weight once for each of two checkpoints, which run backwards of their own."""
    for _ in range(2):
        hidden = checkpoint(m.layer, hidden, use_reentrant=True)
    return hidden


FIRST: dict[str, Callable[[], nn.Module]] = {
    "tied": lambda: nn.Linear(4, 4),
    "unused": lambda: Does(chooses, **{n: nn.Linear(4, 4) for n in ("low", "high", "never")}),
    "reentrant": lambda: nn.Sequential(
        nn.Linear(4, 4), Does(checkpoints_twice, layer=nn.Linear(4, 4))
    ),
}
"""The first layer of models of which that is of interest."""


def model_of(name: str = "plain", seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    first, last = FIRST.get(name, Mlp)(), nn.Linear(4, 4)
    if name == "tied":
        last.weight = first.weight  # type: ignore[assignment] # a Linear's
    return nn.Sequential(first, Mlp(), Mlp(), last).double()


def weight_of(target: Tensor) -> Tensor:
    """Some samples count more than others, and the halves of the batch differ."""
    return (target.abs() > 0.5).sum() + 1


def piped(mesh: DeviceMesh, model: nn.Module, loss_fn: Any = mse_loss, **options: Any) -> Pipeline:
    """A pipeline with replicas of four microbatches each."""
    defaults: dict[str, Any] = {"microbatches": 4, "replicas": "dp"}
    return Pipeline(model, mesh=mesh, loss_fn=loss_fn, **(defaults | options))


LOSSES: dict[str, Loss] = {
    "weighted": Loss(mse_loss, weight=weight_of, check=False),
    "sum": Loss(partial(mse_loss, reduction="sum"), reduction="sum"),
    "unused": Loss(mse_loss, check=False),
}
WRAPPED = ("ddp", "replicate", "block", "tp")
"""What wraps some stages: their gradients are reduced by it, and the others by the pipeline."""
UNEVEN = [slice(0, 14), slice(14, 16)]
PROGRAMS: dict[str, list[str]] = {
    "1F1B": ["weighted", "sum", "tied", "reentrant", *WRAPPED],
    "ZB-V": ["plain", "unused", "tied", "uneven"],
    "Interleaved1F1B": ["uneven"],
}


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


def run_program(name: str, schedule: str) -> tuple[float, int]:
    """Three updates; each replica has other first weights, unless it is wrapped. Also a step's reductions."""
    sizes = {"dp": 2, "pp": 1, "tp": 2} if name == "tp" else {"dp": 2, "pp": 2}
    mesh = init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,))
    loss = LOSSES.get(name, Loss(mse_loss))
    parts = UNEVEN if name == "uneven" else [slice(0, 8), slice(8, 16)]
    cases = [Case(model_of(name), (X[part],), Y[part], loss) for part in parts]
    model, options = model_of(name, seed=mesh.get_local_rank("dp")), dict[str, Any]()
    if name in WRAPPED:
        model = model_of(name)
        options["wrap"] = lambda module, stage: wrap_some(module, stage, name, mesh)
    with piped(mesh, model, loss, schedule=schedule, **options) as pipe:
        if name in WRAPPED:
            pipe.cut(X[:4])
        gaps = judge(cases, pipe, steps=3, optimizer=adamw).differences()
        with Collectives() as collectives:
            pipe.step(*cases[0].args, target=cases[0].target)
    counts = collectives.counts.items()
    return max(gaps.values()), sum(n for name, n in counts if "allreduce" in name)


def run(group: Any, schedule: str) -> dict[str, tuple[float, int]]:
    """A worker's task."""
    return {name: run_program(name, schedule) for name in PROGRAMS[schedule]}


@pytest.mark.parametrize("schedule", PROGRAMS)
def test_replicas_equal_a_plain_loop_and_reduce_once(workers: WorkerPool, schedule: str) -> None:
    for answer in workers.run(f"{__name__}:run", 4, 100.0, schedule=schedule):
        assert {name: gap for name, (gap, _) in answer.items() if gap > 1e-12} == {}
        # One of all weights of each stage, which are below 25 MB.
        stages = 1 if schedule == "1F1B" else 2
        assert {n for name, (_, n) in answer.items() if name not in WRAPPED} == {stages}


@in_processes(4)
def test_steps_that_accumulate(group: Any) -> None:
    """Two that each count half, and the same batch at once."""
    mesh = mesh_of("dp", "pp")
    half = half_of(mesh)
    with piped(mesh, model_of("plain"), schedule="ZB-V") as pipe:
        pipe.step(X[half], target=Y[half])
        whole = {name: p.grad for name, p in pipe.weights.here.named_parameters()}
        pipe.zero_grad()
        for _ in range(2):
            pipe.step(X[half], target=Y[half], accumulate=2)
        parts = {name: p.grad for name, p in pipe.weights.here.named_parameters()}
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)


@in_processes(4)
def test_steps_that_accumulate_may_average_once(group: Any) -> None:
    mesh = mesh_of("dp", "pp")
    for name in ("plain", "tied", "ddp", "fsdp"):
        how = name if name in ("ddp", "fsdp") else ""
        options: dict[str, Any] = {"wrap": lambda m, _, how=how: wrap(m, how, mesh)} if how else {}
        with piped(mesh, model_of(name), **options) as pipe:
            four, _ = accumulated(pipe, half_of(mesh), averaged=[1, 2, 3, 4])
            one, reductions = accumulated(pipe, half_of(mesh), averaged=[4])
        torch.testing.assert_close(one, four, rtol=0, atol=1e-12)
        assert reductions == ([1] * 4 if name == "tied" else [0, 0, 0, 1]), name


@in_processes(4)
def test_gradients_of_one_replica_are_not_clipped(group: Any) -> None:
    """Each replica would have a norm of its own, and scale by it."""
    mesh = mesh_of("dp", "pp")
    half = half_of(mesh)
    for how in ("", "ddp", "fsdp"):
        options: dict[str, Any] = {"wrap": lambda m, _, how=how: wrap(m, how, mesh)} if how else {}
        with piped(mesh, model_of("plain"), **options) as pipe:
            pipe.cut(X[half])
            with pipe.no_sync():
                pipe.step(X[half], target=Y[half])
            for measure in (partial(pipe.clip_grad_norm_, 1.0), pipe.weights.grad_norms):
                with pytest.raises(
                    UsageError, match=r"inside pipe.no_sync\(\).*after a step outside"
                ):
                    measure()
            pipe.step(X[half], target=Y[half])
            norms = [torch.empty((), dtype=torch.float64) for _ in range(4)]
            dist.all_gather(norms, torch.tensor(pipe.clip_grad_norm_(0.1), dtype=torch.float64))
            assert len({*map(float, norms)}) == 1


@in_processes(4)
def test_gradients_that_wait_for_an_average_can_be_dropped(group: Any) -> None:
    """As at the end of an epoch; ``fully_shard`` keeps them apart from ``.grad``."""
    mesh = mesh_of("dp", "pp")
    half = half_of(mesh)
    for how in ("ddp", "fsdp", "mixed"):
        with piped(mesh, model_of("plain"), wrap=lambda m, _, how=how: wrap(m, how, mesh)) as pipe:
            pipe.cut(X[half])
            pipe.step(X[half], target=Y[half])
            expected = gradients_of(pipe)
            pipe.zero_grad()
            with pipe.no_sync():
                pipe.step(Y[half], target=X[half])
            refused = pytest.raises(UsageError, match=r"find_nonfinite .* pipe\.zero_grad\(\)")
            with nullcontext() if how == "ddp" else refused:
                pipe.find_nonfinite(X[half], target=Y[half])
            pipe.zero_grad()
            assert pipe.find_nonfinite(X[half], target=Y[half]) is None
            pipe.step(X[half], target=Y[half])
            torch.testing.assert_close(gradients_of(pipe), expected, rtol=0, atol=1e-12)


@in_processes(4)
def test_shared_weights_that_are_sharded_cannot_wait_for_a_later_average(group: Any) -> None:
    mesh = mesh_of("dp", "pp")
    half = half_of(mesh)
    with piped(mesh, model_of("tied"), stages=2, wrap=lambda m, _: wrap(m, "fsdp", mesh)) as pipe:
        pipe.cut(X[half])
        with pipe.no_sync(), pytest.raises(UsageError, match="weights that stages share"):
            pipe.step(X[half], target=Y[half])
        # It was refused before anything ran.
        assert pipe.step(X[half], target=Y[half]).finite


@in_processes(4)
def test_what_is_frozen_after_no_sync_is_still_averaged(group: Any) -> None:
    mesh = mesh_of("dp", "pp")
    half = half_of(mesh)
    for name in ("plain", "ddp"):
        options: dict[str, Any] = {}
        if name == "ddp":
            options = {"wrap": lambda m, _: wrap(m, "ddp", mesh)}
        with piped(mesh, model_of("plain"), **options) as pipe:
            with pipe.no_sync():
                pipe.step(X[half], target=Y[half])
            weights = dict(pipe.weights.here.named_parameters())
            for weight_name, weight in weights.items():
                weight.requires_grad_("bias" not in weight_name)
            pipe.step(X[half], target=Y[half])
            for weight in weights.values():
                assert weight.grad is not None
                parts = [torch.empty_like(weight.grad) for _ in range(2)]
                dist.all_gather(parts, weight.grad, group=mesh.get_group("dp"))
                torch.testing.assert_close(parts[0], parts[1], rtol=0, atol=1e-12)


def accumulated(
    pipe: Pipeline, half: slice, averaged: list[int]
) -> tuple[dict[str, Any], list[int]]:
    """The gradients of four steps, some of them in ``no_sync``, and how often each reduced gradients."""
    pipe.zero_grad()
    counts = []
    for number in range(1, 5):
        every = nullcontext() if number in averaged else pipe.no_sync()
        with every, Collectives() as collectives:
            pipe.step(X[half], target=Y[half], accumulate=4)
        counts.append(sum(n for name, n in collectives.counts.items() if "reduce" in name))
    return gradients_of(pipe), counts


def gradients_of(pipe: Pipeline) -> dict[str, Tensor]:
    named = pipe.weights.here.named_parameters()
    return {name: whole(p.grad).clone() for name, p in named if p.grad is not None}


@in_processes(4)
def test_replicas_average_together_or_not_at_all(group: Any) -> None:
    mesh = mesh_of("dp", "pp")
    with piped(mesh, model_of("plain")) as pipe:
        pipe.step(X, target=Y)
        alone = pipe.no_sync() if mesh.get_local_rank("dp") else nullcontext()
        text = r"inside pipe.no_sync\(\), and others do not; enter it on every rank"
        with alone, pytest.raises(AgreementError, match=text):
            pipe.step(X, target=Y)


FROZEN: dict[str, tuple[list[str], list[str]]] = {
    "one weight each, of one size": (["0.bias"], ["3.bias"]),
    "one weight": ([], ["1.bias"]),
    "a whole stage": (["2.", "3."], []),
}
"""What each replica freezes."""


@in_processes(4, 90.0)
def test_replicas_that_freeze_different_weights_are_told(group: Any) -> None:
    """Their gradients would be averaged with those of other weights, or a reduction would break."""
    mesh = mesh_of("dp", "pp")
    half, replica = half_of(mesh), mesh.get_local_rank("dp")
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).double()
    with piped(mesh, model) as pipe:
        for name, frozen in FROZEN.items():
            for freezes in (frozen[replica], [*frozen[0], *frozen[1]]):
                for path, weight in model.named_parameters():
                    weight.requires_grad_(not path.startswith(tuple(freezes)))
                refused = pytest.raises(
                    AgreementError, match="the replicas train different weights"
                )
                with refused if freezes is frozen[replica] else nullcontext() as caught:
                    pipe.step(X[half], target=Y[half])
                text = str(caught and caught.value)
                assert all(path in text for of in frozen for path in of) or not caught, (name, text)


# ---- when the averages start


@in_processes(4)
def test_a_stages_average_starts_while_other_stages_still_go_backward(group: Any) -> None:
    mesh, counts = mesh_of("dp", "pp"), list[int]()
    pipe = piped(mesh, model_of("plain"), schedule="Interleaved1F1B", microbatches=2)
    with pipe, Collectives() as collectives:

        def count() -> int:
            return sum(n for name, n in collectives.counts.items() if "allreduce" in name)

        for stage in (pipe.rank + 2, pipe.rank):
            pipe.on(f"{stage}B1", before=lambda event: counts.append(count()))
        pipe.step(X[half_of(mesh)], target=Y[half_of(mesh)])
        # Before each stage's last backward, and in all.
        assert [*counts, count()] == [0, 1, 2]


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
@in_processes(4)
def test_layers_are_averaged_while_the_last_backward_of_their_stage_runs(
    group: Any, schedule: str
) -> None:
    """Of stages with over 25 MiB: the averages that have started when the first layer gets its gradient."""
    mesh, counts = mesh_of("dp", "pp"), list[int]()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(10)]).double()
    x = torch.linspace(-1, 1, 8 * 1024, dtype=torch.float64).reshape(8, 1024)
    cases = halves_of(Case(model, (x,), x.flip(0), mse_loss), x, x.flip(0))
    pipe = piped(mesh, copy.deepcopy(model), schedule=schedule, microbatches=2)
    pipe.cut(x[:1])
    with pipe, Collectives() as collectives:
        judge(cases, pipe, steps=2, optimizer=adamw).check(1e-12)
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
    # In each microbatch: the four weights behind the first layer, and what is small in their bucket.
    assert counts == [0, 5]


# ---- losses and metrics go by name


def adds(names: list[str], m: Any, hidden: Tensor) -> Any:
    """Adds losses under the names that it is given, of its own value times their number."""
    for number, name in enumerate(names, start=1):
        add_loss(name, m.layer(hidden).square().mean() * number, weight=0.5)
    return hidden + m.layer(hidden)


def adding(names: list[str]) -> nn.Sequential:
    """Of four layers the first and the third add losses under these names."""
    torch.manual_seed(0)
    first, third = (Does(partial(adds, names), layer=nn.Linear(4, 4)) for _ in range(2))
    return nn.Sequential(first, Mlp(), third, Mlp()).double()


NAMES = [
    ([], ["speech"]),
    (["both", "text"], ["both", "speech"]),
    (["both"], ["both"]),
    ([], []),
    (["text"], ["speech"]),
]
"""Of each replica: one has a name alone, the names differ, all have one, or none."""


@in_processes(4)
def test_losses_and_metrics_of_one_name_are_averaged_over_the_replicas_that_have_it(
    group: Any,
) -> None:
    """The replicas differ in their samples, too."""
    mesh = mesh_of("dp", "pp")
    replica = mesh.get_local_rank("dp")
    mine = ("text", "speech")[replica]
    names: list[str] = []
    model = adding(names)
    metrics = {"mean": lambda o, t: o.mean(), mine: lambda o, t: ((o > 0).sum(), o.numel())}
    pipe = piped(mesh, model, Loss(mse_loss, metrics=metrics), microbatches=2)
    part = slice(0, 12) if replica == 0 else slice(12, 16)
    with pipe:
        for both in NAMES:
            names[:] = both[replica]
            check_named(pipe.step(X[part], target=Y[part]), *both)
        pipe.predict(X[part])


def check_named(result: StepResult, first: list[str], second: list[str]) -> None:
    of_text, text, main, whole = expected_of(0, first, slice(0, 12))
    of_speech, speech, main_too, whole_too = expected_of(1, second, slice(12, 16))
    both = {n: 0.75 * of_text[n] + 0.25 * of_speech[n] for n in of_text if n in of_speech}
    named = {**of_text, **of_speech, **both, "main": 0.75 * main + 0.25 * main_too}
    assert result.losses == pytest.approx(named, abs=1e-14)
    mean = 0.75 * text["mean"] + 0.25 * speech["mean"]
    assert result.metrics == pytest.approx({**text, **speech, "mean": mean}, abs=1e-14)
    assert result.loss == pytest.approx(0.75 * whole + 0.25 * whole_too, abs=1e-14)
    assert result.weight == 16


def expected_of(replica: int, names: list[str], part: slice) -> Any:
    """Of a plain loop over one replica's samples: named losses, metrics, and the loss with what was added."""
    mine = ("text", "speech")[replica]
    with collect_losses() as losses:
        output = adding(names)(X[part]).detach()
    main = float(mse_loss(output, Y[part]))
    named = {name: float(value) for name, value in losses.named().items()}
    counts = {"mean": float(output.mean()), mine: float((output > 0).sum()) / output.numel()}
    return named, counts, main, main + float(losses.total().detach())


@pytest.mark.whole
@pytest.mark.parametrize("alike", [True, False])
@in_processes(4)
def test_replicas_that_only_add_up_must_have_the_same_names(group: Any, alike: bool) -> None:
    mesh = mesh_of("dp", "pp")
    circle = Group(mesh.get_group("dp"))
    model = adding(["one" if alike else f"of {circle.rank}"])
    others = Replicas(2, circle.sum, index=circle.rank)
    alone: Any = mesh.get_group("pp")
    says = "replicas differ in the names of their losses and metrics"
    with (
        piped(alone, model, microbatches=2, replicas=others) as pipe,
        nullcontext() if alike else pytest.raises(PenstockError, match=says),
    ):
        assert [*pipe.step(X, target=Y).losses] == ["main", "one"]


# ---- beside wrappers


def run_sparse(group: Any) -> list[Any]:
    """A worker's task: whether gradients and buffers are the same on both replicas, and sparse."""
    mesh = mesh_of("dp", "pp")
    half = half_of(mesh)
    torch.manual_seed(half.start)
    embed = nn.Embedding(16, 4, sparse=True)
    model = nn.Sequential(embed, Mlp(), Mlp(), nn.BatchNorm1d(4)).double()
    with piped(mesh, model, microbatches=2) as pipe:
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
    assert first[0] == ["0.weight"]
    assert "3.running_mean" in last[2]


@pytest.mark.parametrize("sharded", [False, True])
@in_processes(4)
def test_all_replicas_hear_of_one_that_is_not_finite(group: Any, sharded: bool) -> None:
    """In its gradients, though all losses are."""
    mesh = mesh_of("dp", "pp")
    factor = 1.0 - mesh.get_local_rank("dp")
    loss_fn: Callable[..., Tensor] = lambda o, t: (o * t).abs().sqrt().mean()  # noqa: E731
    wrapped: Any = (lambda module, _: wrap(module, "fsdp", mesh)) if sharded else None
    pipe = piped(mesh, model_of("plain"), loss_fn, microbatches=2, wrap=wrapped)
    with pipe, pytest.raises(NonFiniteError, match="gradients are not finite"):
        pipe.step(X[:8], target=Y[:8] * factor + 1e-3 * factor)


# ---- what is refused


def wrapped_over(mesh: DeviceMesh, name: str, how: str) -> Any:
    if how == "ddp":
        return lambda m, s: DistributedDataParallel(m, process_group=mesh.get_group(name))
    return lambda m, s: fully_shard(m, mesh=mesh[name])


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
@in_processes(4)
def test_what_contradicts_replicas_is_refused(group: Any, name: str) -> None:
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
    options = {"microbatches": 2, "loss_fn": mse_loss, **cases[name]}
    later = weight_of if name.endswith("later") else None
    with (
        pytest.raises((UsageError, PeerFailed)) as caught,
        Pipeline(model, mesh=mesh, **options) as pipe,
    ):
        pipe.step(X, target=Y, loss_weight=later)
    assert [part for part in REFUSED[name] if part not in str(caught.value)] == []


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


@in_processes(4)
def test_stages_placed_by_hand(group: Any) -> None:
    """Of which only those of one rank share a weight."""
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
    for index in (rank, rank + 2):
        wanted = modules[0][index].weight.grad
        torch.testing.assert_close(mine[index].weight.grad, wanted, rtol=0, atol=1e-12)
