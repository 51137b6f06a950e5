"""What ranks of one pipeline must have alike: the batch that several were given, and optimizers' settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from penstock import Checkpoints, Loss, Pipeline
from penstock.errors import AgreementError
from penstock.testing import WorkerPool
from tests.catalogue.making import Does
from tests.pipeline.models import X, Y, logged, mean_loss
from tests.processes import in_processes

Call = tuple[tuple[Any, ...], dict[str, Any]]


def run(m: Any, x: Tensor, scale: Any = 1) -> Any:
    return m.last(torch.tanh(m.middle(torch.tanh(m.first(x))))) * scale


def tied() -> nn.Module:
    """Three layers, of which the first and the last share their weight; only a call shows where to cut."""
    torch.manual_seed(0)
    first, middle, last = (nn.Linear(4, 4) for _ in range(3))
    last.weight = first.weight
    return Does(run, first=first, middle=middle, last=last).double()


def loss_fn(output: Tensor, target: Any) -> Tensor:
    """The loss; the last rank has a target of its own, if the rank was given something else as well."""
    return mean_loss(output, target[0] if isinstance(target, list) else target)


def pipeline(group: Any, model: nn.Module | None = None, **options: Any) -> Pipeline:
    model = tied() if model is None else model
    warns = Loss(loss_fn, nonfinite="warn")
    return Pipeline(model, mesh=group, ranks=2, microbatches=2, loss_fn=warns, **options)


def own(rank: int, *, seed: int = 0, rows: int = 8) -> Tensor:
    """Numbers that each rank draws for itself."""
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed + rank)).double()


# ---- settings and steps


@in_processes(2)
def test_ranks_that_are_made_otherwise_are_told_in_what(group: Any) -> None:
    unlike: dict[str, Any] = {"schedule": ("1F1B", "GPipe"), "microbatches": (2, 4)}
    for name, values in unlike.items():
        options = {"microbatches": 2, name: values[group.rank()]}
        says = rf"ranks differ in .*{name}: {values[0]}.* on .*0, {values[1]}.* on .*1"
        with pytest.raises(AgreementError, match=says):
            Pipeline(tied(), mesh=group, ranks=2, loss_fn=loss_fn, **options)


# ---- batches


DIFFERENT: dict[str, tuple[Callable[[Pipeline, int], Any], str]] = {
    "inputs and target": (
        lambda pipe, rank: pipe.step(own(rank), target=own(rank, seed=9)),
        "argument 0 differs between rank 0 and rank 1, the target",
    ),
    "target": (lambda pipe, rank: pipe.step(X, target=own(rank)), "the target"),
    "by name": (lambda pipe, rank: pipe.step(x=own(rank), target=Y), "argument 'x'"),
    "counts": (
        lambda pipe, rank: pipe.step(X, scale=torch.arange(8)[:, None] + rank, target=Y),
        "'scale'",
    ),
    "evaluated": (lambda pipe, rank: pipe.evaluate(own(rank), target=Y), "argument 0"),
    "predicted": (lambda pipe, rank: pipe.predict(own(rank)), "argument 0"),
    "demanded by one rank of one without": (
        lambda pipe, rank: pipe.predict() if rank else pipe.predict(X, same_batch=True),
        "",
    ),
}


@in_processes(2)
def test_a_batch_of_its_own_on_each_rank_is_refused(group: Any) -> None:
    """After each refusal the pipeline goes on."""
    refused = partial(pytest.raises, AgreementError)
    with pipeline(group) as pipe:
        for name, (call, gist) in DIFFERENT.items():
            with refused(match=f"{gist} differs.*DistributedSampler.*same_batch=False") as caught:
                call(pipe, group.rank())
            text = str(caught.value)
            assert "differs between rank 0 and rank 1" in text
            assert name != "target" or "argument 0 differs" not in text
            assert pipe.job.meet(partial(str, text)) == [text] * 2
        for _ in range(12):
            pipe.step(X, target=Y)
        # Only the first steps, and the first of new shapes, cost a look.
        pipe.step(own(group.rank()), target=Y)
        for rows, same_batch in ((6, None), (8, True)):
            with refused(match="argument 0 differs"):
                pipe.step(own(group.rank(), rows=rows), target=Y[:rows], same_batch=same_batch)
        assert pipe.step(own(group.rank(), rows=4), target=Y[:4], same_batch=False).finite


def infinite(rank: int) -> Tensor:
    """A batch in which some numbers are none, in other bits on each rank."""
    batch = X.clone()
    batch[0, :2] = torch.tensor([-1, (0x7FF8 << 48) + rank]).view(torch.float64)
    batch[1, 0] = torch.inf
    return batch


HARMLESS: dict[str, Callable[[int], Call]] = {
    "the same": lambda rank: ((X,), {"target": Y}),
    "what is no number": lambda rank: ((infinite(rank),), {"target": Y}),
    "inputs on the first alone": lambda rank: ((X,), {}) if rank == 0 else ((), {"target": Y}),
    "no target": lambda rank: ((X,), {"target": Y if rank else None}),
    "an empty target": lambda rank: ((X,), {"target": Y if rank else torch.zeros_like(Y)}),
    "zeros": lambda rank: ((X * (rank == 0),), {"target": Y}),
    "without data": lambda rank: ((X.to("meta") if rank else X,), {"target": Y}),
    "rounded": lambda rank: ((X * (1 + 1e-9 * rank),), {"target": Y}),
    "objects": lambda rank: ((X,), {"target": [Y, object()]}),
}


@in_processes(2)
def test_what_is_the_same_or_missing_is_not_refused(group: Any) -> None:
    with pipeline(group) as pipe:
        for name, of_rank in HARMLESS.items():
            args, kwargs = of_rank(group.rank())
            assert pipe.step(*args, **kwargs), name


@in_processes(4)
def test_each_replica_has_a_batch_of_its_own(group: Any) -> None:
    """Two pipelines of two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    pipe = Pipeline(tied(), mesh=mesh, replicas=mesh["dp"], microbatches=2, loss_fn=loss_fn)
    with pipe:
        loss = pipe.step(own(pipe.replicas.index), target=Y).loss
    expected = mean_loss(tied()(torch.cat([own(0), own(1)])), torch.cat([Y, Y]))
    assert loss == pytest.approx(float(expected.detach()))


# ---- optimizers that measure all weights


class Adapts(torch.optim.Optimizer):
    """Gradient descent whose rate follows sums over all weights, as in D-Adaptation and Prodigy."""

    def __init__(self, params: Any, total: Callable[[Mapping[Any, Tensor]], Tensor]) -> None:
        super().__init__(params, {"lr": 1.0, "d": 0.01, "numerator": 0.0})
        self._total = total

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # it takes none
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for weight in weights:
                self.state[weight].setdefault("start", weight.clone())
            sums = {w: self._sums(w) for w in weights}
            numerator, denominator = self._total(sums).tolist()
            group["numerator"] += 10 * numerator
            group["d"] = max(group["d"], group["numerator"] / denominator)
            for weight in weights:
                weight.sub_(weight.grad, alpha=group["d"] * group["lr"])

    def _sums(self, weight: Any) -> Tensor:
        moved = self.state[weight]["start"] - weight
        return torch.stack([(weight.grad * moved).sum(), weight.grad.abs().sum()])


def here(sums: Mapping[Any, Tensor]) -> Tensor:
    """The sum that an optimizer takes that knows of no other ranks."""
    return torch.stack(list(sums.values())).sum(0)


def adapted(group: Any, path: str, whole: bool) -> list[Any]:
    """Losses and d of five steps, the error that ended them, and what a save says."""
    model = tied()
    with logged() as said, pipeline(group, model) as pipe:
        optimizer = Adapts(model.parameters(), pipe.weights.sum if whole else here)
        losses, text = [], ""
        for _ in range(5):
            try:
                losses.append(pipe.step(X, target=Y).loss)
            except AgreementError as error:
                text = str(error)
                break
            optimizer.step()
            pipe.zero_grad()
        checkpoints = Checkpoints(path)
        checkpoints.save(len(losses), pipe=pipe, optimizer=optimizer)
        checkpoints.wait()
        pipe.weights.optimizer_state_dict(optimizer, full=True)
    said = [message for message in said if "different values" in message]
    return [losses, optimizer.param_groups[0]["d"], text, said]


def test_a_sum_over_the_weights_of_one_rank_is_named(workers: WorkerPool, tmp_path: Path) -> None:
    first, second = workers.run(f"{__name__}:adapted", 2, path=str(tmp_path), whole=False)
    assert first[2] == second[2]
    assert "'d' of Adapts (5 weights from 'first.weight') is " in first[2]
    assert "pipe.weights.sum" in first[2]
    # A checkpoint is kept nonetheless, and so is a state dict; both say it, once.
    assert len([one for one in first[3] if one.startswith("penstock: 'd' of Adapts")]) == 2
    assert second[3] == []


def test_the_sum_over_all_weights_is_that_of_one_process(
    workers: WorkerPool, tmp_path: Path
) -> None:
    model = tied()
    optimizer, losses = Adapts(model.parameters(), here), []
    for _ in range(5):
        loss = mean_loss(model(X), Y)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.param_groups[0]["d"] > 0.01
    for ran in workers.run(f"{__name__}:adapted", 2, path=str(tmp_path), whole=True):
        assert ran[0] == pytest.approx(losses)
        assert ran[1] == pytest.approx(optimizer.param_groups[0]["d"])
        assert ran[2:] == ["", []]


@in_processes(2)
def test_groups_that_differ_by_what_is_in_them_are_not_refused(group: Any) -> None:
    """Groups of one rank's weights, and of both ranks', whose rates differ from each other."""
    model = tied()
    with pipeline(group, model) as pipe:
        by_layer = [
            {"params": [weight], "lr": 0.01 / (place + 1)}
            for place, weight in enumerate(pipe.parameters())
        ]
        optimizers = [torch.optim.SGD(by_layer), torch.optim.SGD(model.parameters(), lr=0.02)]
        pipe.step(X, target=Y)
        # Only those of this rank, of which others know nothing.
        mine = [weight for stage in pipe.stages for _, weight in stage.named_parameters()]
        optimizers.append(torch.optim.SGD(mine, lr=0.01 * (1 + pipe.rank)))
        for _ in range(3):
            pipe.step(X, target=Y)
            for optimizer in optimizers:
                optimizer.step()
