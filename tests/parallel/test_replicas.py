"""``replicas=`` alone is data parallelism: two by two processes beside one process on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
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

from penstock import Pipeline, PipelineStage
from penstock.errors import NonFiniteError, PenstockError
from penstock.testing import WorkerPool
from tests.parallel.bodies import Collectives, Mlp, gap_of, half_of, mesh_of, wrap

X = torch.linspace(-1, 1, 16 * 4, dtype=torch.float64).reshape(16, 4)
Y = X.flip(0) * torch.linspace(0, 2, 16, dtype=torch.float64)[:, None]
CASES = ("plain", "weighted", "accumulated", "sum", "tied", "unused")


class Choice(nn.Module):
    """Some weights are used on the first half of the batch only, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Any:
        return (self.low if hidden.sum() < 0 else self.high)(hidden)


class Tied(nn.Module):
    """The first and the last unit have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList([Mlp() for _ in range(2)])
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, hidden: Tensor) -> Any:
        hidden = self.first(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)


def model_of(case: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    if case == "tied":
        return Tied().double()
    first = Choice() if case == "unused" else Mlp()
    return nn.Sequential(first, *[Mlp() for _ in range(3)]).double()


def weight_of(target: Tensor) -> Tensor:
    """Some samples count more than others, and the halves of the batch differ."""
    return (target.abs() > 0.5).sum() + 1


def run_case(case: str, schedule: str, mesh: DeviceMesh) -> dict[str, Any]:
    """Two updates, beside the same in one process; each replica has other first weights."""
    replica, half = mesh.get_local_rank("dp"), half_of(mesh)
    whole, total = model_of(case), case == "sum"
    reduction: Any = "sum" if total else "mean"
    loss_fn = partial(mse_loss, reduction=reduction)
    options: dict[str, Any] = {"loss_weight": weight_of} if case == "weighted" else {}
    pipe = Pipeline(
        model_of(case, seed=replica), schedule=schedule, microbatches=4, mesh=mesh,
        replicas=mesh["dp"], loss_fn=loss_fn, reduction=reduction, **options,
    )  # fmt: skip
    accumulate = 2 if case == "accumulated" else 1
    gap, missing = 0.0, []
    with pipe:
        optimizers = [
            torch.optim.SGD(m.parameters(), 0.001 if total else 0.1) for m in (pipe, whole)
        ]
        for _ in range(2):
            for turn in range(accumulate):
                x, y = X.roll(turn, 1), Y.roll(turn, 1)
                result = pipe.step(x[half], target=y[half], accumulate=accumulate)
                loss = loss_of(case, whole, loss_fn, x, y) / accumulate
                loss.backward()
                gap = max(gap, abs(result.loss / accumulate - float(loss)))
            norm = nn.utils.get_total_norm(
                [p.grad for p in whole.parameters() if p.grad is not None]
            )
            gap = max(gap, abs(pipe.grad_norm() - float(norm)))
            pairs = [(p, whole.get_parameter(name)) for name, p in pipe.named_parameters()]
            grads = [
                (p.grad, q.grad) for p, q in pairs if p.grad is not None and q.grad is not None
            ]
            missing.append(len(grads) < sum(q.grad is not None for _, q in pairs))
            missing.append(len(grads) < sum(p.grad is not None for p, _ in pairs))
            for optimizer in optimizers:
                optimizer.step()
            gap = max([gap, *(float((a - b).abs().max()) for a, b in (*grads, *pairs))])
            for optimizer in optimizers:
                optimizer.zero_grad()
        with Collectives() as collectives:
            pipe.step(X[half], target=Y[half])
    reductions = sum(n for name, n in collectives.counts.items() if "allreduce" in name)
    return {"gap": gap, "missing": any(missing), "reductions": reductions}


def loss_of(case: str, whole: nn.Module, loss_fn: Any, x: Tensor, y: Tensor) -> Any:
    """The loss of the whole batch; where its parts matter, from the microbatches of the replicas."""
    if case not in ("weighted", "unused"):
        return loss_fn(whole(x), y)
    parts = list(zip(x.chunk(8), y.chunk(8), strict=True))
    weights = [weight_of(b) if case == "weighted" else torch.ones(()) for _, b in parts]
    losses = [loss_fn(whole(a), b) * w for (a, b), w in zip(parts, weights, strict=True)]
    return torch.stack(losses).sum() / torch.stack(weights).sum()


def run(group: Any, schedule: str) -> dict[str, dict[str, Any]]:
    """A worker's task."""
    mesh = mesh_of("dp", "pp")
    return {case: run_case(case, schedule, mesh) for case in CASES}


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
def test_replicas_equal_one_process_on_the_whole_batch(workers: WorkerPool, schedule: str) -> None:
    for answer in workers.run(f"{__name__}:run", 4, 60.0, schedule=schedule):
        wrong = {case: of for case, of in answer.items() if of["gap"] > 1e-12 or of["missing"]}
        assert wrong == {}
        # One of all weights of a rank, which are below 25 MB.
        assert {of["reductions"] for of in answer.values()} == {1}


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
    pipe = Pipeline(
        Words().double(), microbatches=2, mesh=mesh, replicas=mesh["dp"], loss_fn=mse_loss
    )
    with pipe:
        pipe.step(torch.arange(16)[half], target=Y[half])
        grads = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
        state = pipe.state_dict()
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
    """A worker's task: how far gradients are from one process, where wrappers reduce some or none."""
    sizes = {"dp": 2, "pp": 1, "tp": 2} if how == "tp" else {"dp": 2, "pp": 2}
    mesh = init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,))
    half, whole = half_of(mesh), model_of("plain")
    pipe = Pipeline(
        copy.deepcopy(whole), microbatches=4, mesh=mesh, replicas=mesh["dp"], loss_fn=mse_loss,
        wrap=lambda module, stage: wrap_some(module, stage, how, mesh),
    )  # fmt: skip
    with pipe:
        for _ in range(2):
            pipe.step(X[half], target=Y[half])
            mse_loss(whole(X), Y).backward()
        return gap_of(pipe.named_parameters(), whole)


@pytest.mark.parametrize("how", ["ddp", "replicate", "block", "tp"])
def test_what_no_wrapper_reduces_is_averaged(workers: WorkerPool, how: str) -> None:
    assert max(workers.run(f"{__name__}:run_wrapped", 4, 60.0, how=how)) < 1e-12


def run_nonfinite(group: Any, sharded: bool) -> str:
    """A worker's task: the gradients of one replica are not finite, though all losses are."""
    mesh = mesh_of("dp", "pp")
    factor = 1.0 - mesh.get_local_rank("dp")
    loss_fn: Callable[..., Tensor] = lambda o, t: (o * t).abs().sqrt().mean()  # noqa: E731
    pipe = Pipeline(
        model_of("plain"), mesh=mesh, microbatches=2, replicas=mesh["dp"], loss_fn=loss_fn,
        wrap=(lambda module, _: wrap(module, "fsdp", mesh)) if sharded else None,
    )  # fmt: skip
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
    dp, weight = {"replicas": mesh["dp"]}, {"loss_weight": weight_of}
    wrap = {"wrap": wrapped_over(mesh, "dp", "ddp")}
    cases: dict[str, dict[str, Any]] = {
        "a name": {"replicas": "dp"},
        "own dimension": {"replicas": mesh["pp"]},
        "fsdp over pp": {**dp, "wrap": wrapped_over(mesh, "pp", "fsdp")},
        "ddp over others": {**dp, "wrap": lambda m, s: DistributedDataParallel(m, process_group=alone[0])},
        "ddp, weighted": {**wrap, **weight},
        "ddp, weighted later": wrap,
        "tied, ddp on one": {**dp, "wrap": lambda m, s: wrap_some(m, s, "ddp", mesh)},
    }  # fmt: skip
    model = model_of("tied" if name.startswith("tied") else "plain")
    try:
        pipe = Pipeline(model, mesh=mesh, microbatches=2, loss_fn=mse_loss, **cases[name])
        with pipe:
            pipe.step(X, target=Y, loss_weight=weight_of if name.endswith("later") else None)
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


REFUSED = {
    "a name": ["replicas='dp'", "mesh['dp']"],
    "own dimension": ["this pipeline itself runs on", 'mesh["dp"]'],
    "fsdp over pp": ["stage", "fully_shard over the processes", "ranks of this pipeline"],
    "ddp over others": ["DistributedDataParallel over the processes", "but replicas= holds"],
    "ddp, weighted": ["loss_weight=", "without replicas=", "DistributedDataParallel"],
    "ddp, weighted later": ["loss_weight=", "without replicas=", "DistributedDataParallel"],
    "tied, ddp on one": ["stages [0, 1] share 'first.weight'", "in stages [0] only"],
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
            pipe.step(X, target=Y)
    except PenstockError as error:
        return str(error)
    return ""


def test_beside_another_pipeline_ranks_have_their_global_rank_too(workers: WorkerPool) -> None:
    first, second, failed, stopped = workers.run(f"{__name__}:run_failing", 4, 60.0)
    assert (first, second) == ("", "")
    assert failed.startswith("rank 0 (global rank 2), stage 0, microbatch 1, action 0F1")
    assert stopped.startswith(
        "rank 1 (global rank 3) stopped because rank 0 (global rank 2), step 1"
    )


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
        stages, schedule="Interleaved1F1B", microbatches=4, mesh=mesh, replicas=mesh["dp"],
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
