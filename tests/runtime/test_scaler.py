"""The loss scaler beside torch's own, whose rule it has, and what it adds: all ranks skip together."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from penstock import LossScaler
from penstock._engine.parallel import local_part
from tests.processes import in_processes

OPTIONS: dict[str, Any] = {
    "init_scale": 64.0,
    "growth_factor": 3.0,
    "backoff_factor": 0.3,
    "growth_interval": 2,
}


def torchs_scaler() -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", **OPTIONS)
    scaler.scale(torch.zeros(()))
    return scaler


def history(scaler: Any, steps: list[bool], *, early: bool = False) -> list[Any]:
    """Scales and weights over steps, some of which have gradients that are not finite."""
    weight, rows = nn.Parameter(torch.ones(3)), []
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for index, is_bad in enumerate(steps):
        weight.grad = torch.tensor([1.0, 2.0, 4.0]) * scaler.get_scale()
        if is_bad:
            weight.grad[index % 3] = (float("inf"), float("nan"))[index % 2]
        if early:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        rows.append((scaler.get_scale(), weight.tolist()))
    return rows


@pytest.mark.parametrize("early", [False, True])
def test_its_history_is_that_of_torchs(early: bool) -> None:
    draw = random.Random(0)
    steps = [draw.random() < 0.4 for _ in range(40)]
    theirs, mine = torchs_scaler(), LossScaler(**OPTIONS)
    assert history(mine, steps, early=early) == history(theirs, steps, early=early)
    assert mine.state_dict() == theirs.state_dict()


@in_processes(4)
def test_all_processes_of_a_mesh_skip_together(group: Any) -> None:
    """Only the last one has the share that is not finite."""
    mesh = DeviceMesh("cpu", torch.arange(group.size()))
    weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    scaler, optimizer = LossScaler(8.0), torch.optim.SGD([weight], lr=0.1)
    rows = []
    for worst in (1.0, float("inf")):
        weight.grad = distribute_tensor(
            torch.tensor([8.0, 8.0, 8.0, 8.0 * worst]), mesh, [Shard(0)]
        )
        scaler.step(optimizer)
        scaler.update()
        rows.append([scaler.get_scale(), *local_part(weight).detach().tolist()])
    assert rows == [[8.0, pytest.approx(0.9)], [4.0, pytest.approx(0.9)]]
