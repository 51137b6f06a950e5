"""The loss scaler beside torch's own, on gradients with infinities put in."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from penstock import LossScaler
from penstock.errors import UsageError
from penstock.parallel import local_part
from penstock.testing import WorkerPool

OPTIONS: dict[str, Any] = {
    "init_scale": 64.0,
    "growth_factor": 3.0,
    "backoff_factor": 0.3,
    "growth_interval": 2,
}


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


def bad_steps(seed: int, steps: int = 40) -> Iterator[bool]:
    draw = random.Random(seed)
    return (draw.random() < 0.4 for _ in range(steps))


def history(scaler: Any, bad: Iterator[bool], *, early: bool) -> list[tuple[float, list[float]]]:
    """Scales and weights over steps, some of which have gradients that are not finite."""
    weight, found = parameter(), []
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for index, is_bad in enumerate(bad):
        weight.grad = torch.tensor([1.0, 2.0, 4.0]) * scaler.get_scale()
        if is_bad:
            weight.grad[index % 3] = (float("inf"), float("nan"))[index % 2]
        if early:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        found.append((scaler.get_scale(), weight.tolist()))
    return found


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_its_history_is_that_of_torchs(seed: int, early: bool) -> None:
    theirs = torch.amp.GradScaler("cpu", **OPTIONS)
    theirs.scale(torch.zeros(()))
    expected = history(theirs, bad_steps(seed), early=early)
    mine = LossScaler(**OPTIONS)
    assert history(mine, bad_steps(seed), early=early) == expected
    assert mine.state_dict() == theirs.state_dict()


def test_its_defaults_are_those_of_torchs() -> None:
    assert LossScaler().state_dict() == torch.amp.GradScaler("cpu").state_dict()


def test_a_state_goes_on_where_it_was() -> None:
    whole = history(LossScaler(**OPTIONS), iter([False] * 3 + [True] * 2), early=False)
    first, second = LossScaler(**OPTIONS), LossScaler()
    history(first, iter([False] * 3), early=False)
    second.load_state_dict(first.state_dict())
    found = history(second, iter([True] * 2), early=False)
    assert [scale for scale, _ in found] == [scale for scale, _ in whole[3:]]


def test_it_takes_up_the_state_of_torchs() -> None:
    theirs = torch.amp.GradScaler("cpu", **OPTIONS)
    theirs.scale(torch.zeros(()))
    history(theirs, iter([False] * 3), early=False)
    mine = LossScaler()
    mine.load_state_dict(theirs.state_dict())
    assert mine.state_dict() == theirs.state_dict()


def test_a_scale_that_would_be_infinite_does_not_grow() -> None:
    scaler = LossScaler(init_scale=2.0**127, growth_interval=1)
    scaler.step(torch.optim.SGD([parameter()], lr=0.1))
    scaler.update()
    assert scaler.get_scale() == 2.0**127


def test_all_skip_what_one_rank_must() -> None:
    scaler, weight = LossScaler(**OPTIONS), parameter()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    told: list[bool] = []
    scaler.attach(lambda found: told.append(found) or True)  # type: ignore[func-returns-value]
    weight.grad = torch.ones(3)
    assert scaler.step(optimizer) is None
    scaler.update()
    assert told == [False]
    assert weight.tolist() == [1.0] * 3
    assert scaler.get_scale() < 64.0


def test_without_being_enabled_it_does_nothing() -> None:
    scaler, weight = LossScaler(enabled=False), parameter()
    optimizer = torch.optim.SGD([weight], lr=0.5)
    weight.grad = torch.ones(3)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.get_scale(), weight.tolist(), scaler.state_dict()) == (1.0, [0.5] * 3, {})
    scaler.load_state_dict({})


def test_one_scale_for_several_optimizers() -> None:
    scaler, weights = LossScaler(**OPTIONS), [parameter(), parameter()]
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    for weight, value in zip(weights, (64.0, float("inf")), strict=True):
        weight.grad = torch.full((3,), value)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [weight.tolist() for weight in weights] == [[0.0] * 3, [1.0] * 3]
    assert scaler.get_scale() == pytest.approx(64.0 * 0.3)


def test_sparse_gradients() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    scaler = LossScaler(init_scale=2.0)
    optimizer = torch.optim.SparseAdam(table.parameters())
    (table(torch.tensor([1, 1])).sum() * 2).backward()
    scaler.unscale_(optimizer)
    assert table.weight.grad is not None
    assert table.weight.grad.to_dense()[1].tolist() == [2.0, 2.0]


def misuse(name: str) -> None:
    scaler, weight = LossScaler(), parameter()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    if name == "update":
        scaler.update()
    elif name == "float16":
        weight = nn.Parameter(torch.ones(3, dtype=torch.float16))
        weight.grad = torch.ones_like(weight)
        scaler.unscale_(torch.optim.SGD([weight], lr=0.1))
    else:
        getattr(scaler, name)(optimizer)
        getattr(scaler, name)(optimizer)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("unscale_", r"unscale_\(\) was already called"),
        ("step", r"step\(\) was already called"),
        ("update", r"update\(\) comes after step"),
        ("float16", "gradients in float16 cannot be unscaled"),
    ],
)
def test_misuse_is_refused(name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        misuse(name)


def test_numbers_that_do_not_scale_are_refused() -> None:
    with pytest.raises(UsageError, match=r"growth_factor=1\.0 must be above 1"):
        LossScaler(growth_factor=1.0)
    with pytest.raises(UsageError, match=r"\['scale'\] are missing"):
        LossScaler().load_state_dict(
            {k: v for k, v in LossScaler().state_dict().items() if k != "scale"}
        )


# ---- sharded gradients


def sharded(group: Any) -> dict[str, Any]:
    """A worker's task: only the last process has the share that is not finite."""
    mesh = DeviceMesh("cpu", torch.arange(group.size()))
    weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    scaler, optimizer = LossScaler(8.0), torch.optim.SGD([weight], lr=0.1)
    found = []
    for worst in (1.0, float("inf")):
        weight.grad = distribute_tensor(
            torch.tensor([8.0, 8.0, 8.0, 8.0 * worst]), mesh, [Shard(0)]
        )
        scaler.step(optimizer)
        scaler.update()
        found.append([scaler.get_scale(), *local_part(weight).detach().tolist()])
    return {"found": found}


def test_all_processes_of_a_mesh_skip_together(workers: WorkerPool) -> None:
    for answer in workers.run(f"{__name__}:sharded", 4, 60.0):
        assert answer["found"] == [[8.0, pytest.approx(0.9)], [4.0, pytest.approx(0.9)]]
