"""A weight that several ranks share is the same on all of them, and whoever had another one is named."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from penstock import Pipeline
from penstock.testing import WorkerPool
from tests.pipeline.models import logged


def tied(seed: int) -> nn.Sequential:
    """Three layers with one weight."""
    torch.manual_seed(seed)
    layers = [nn.Linear(3, 3) for _ in range(3)]
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    return nn.Sequential(*layers)


def shared(group: Any, odd: int) -> tuple[list[str], list[float]]:
    """A worker's task: what the log says where one rank has made another model, and its first weights."""
    with logged() as lines, Pipeline(tied(group.rank() == odd), ranks=3, mesh=group) as pipe:
        pipe.cut(torch.ones(2, 3))
        (stage,) = pipe.stages
        weight = next(p for p in stage.module.parameters() if p.dim() == 2)
    return [line for line in lines if "differed" in line], weight.flatten().tolist()


def test_only_the_ranks_with_another_weight_are_named(workers: WorkerPool) -> None:
    expected = tied(0)[0].get_parameter("weight").flatten().tolist()
    for odd in (-1, 2):
        answers = workers.run(f"{__name__}:shared", 3, 60.0, odd=odd)
        assert [weight for _, weight in answers] == [expected] * 3
        lines = [line for of_rank, _ in answers for line in of_rank]
        text = "'0.weight' differed between the ranks that share it: ranks [2] got that of rank 0"
        assert lines == ([] if odd < 0 else [text])
