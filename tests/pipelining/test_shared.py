"""Weights that stages share under torch's names: synchronised when asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from penstock.partition import Shared
from penstock.pipelining import PipelineStage, ScheduleGPipe
from penstock.testing import WorkerPool

TOKENS = torch.arange(24).reshape(8, 3) % 7
TABLE = (Shared(("0.weight", "1.weight"), ((0, "weight"), (1, "weight"))),)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def modules() -> list[nn.Module]:
    torch.manual_seed(0)
    embed, head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
    head.weight = embed.weight
    return [embed, head]


def plain(steps: int) -> Tensor:
    made = nn.Sequential(*modules())
    optimizer = torch.optim.AdamW(made.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn(made(TOKENS), TOKENS.roll(1)).backward()
        optimizer.step()
    return next(made.parameters()).detach()


def train(group: Any, asked: bool) -> list[list[float]]:
    rank = dist.get_rank(group)
    stage = PipelineStage(modules()[rank], rank, 2, "cpu", group=group)
    stage.shared = TABLE if asked else ()
    schedule = ScheduleGPipe(stage, 4, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(TOKENS)
        else:
            schedule.step(target=TOKENS.roll(1))
        optimizer.step()
    found: list[list[float]] = stage.submod.weight.tolist()
    return found


@pytest.mark.parametrize("asked", [True, False])
def test_over_processes(workers: WorkerPool, asked: bool) -> None:
    first, last = workers.run(f"{__name__}:train", 2, 60.0, asked=asked)
    assert (first == last) is asked
    if asked:
        torch.testing.assert_close(torch.tensor(first), plain(5))
