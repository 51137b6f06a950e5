"""With a process a rank: the same numbers, and each process keeps the data of its own stages only."""

from __future__ import annotations

from typing import Any

import torch

from penstock import Pipeline
from penstock.testing import Case, WorkerPool, compare
from tests.partition.calls.models import Residual

TOKENS = torch.arange(20).reshape(4, 5) % 10


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def model() -> Residual:
    torch.manual_seed(0)
    return Residual().double()


def train(group: Any) -> dict[str, float]:
    case = Case(model(), (TOKENS,), torch.ones(4, 5, 10, dtype=torch.float64), loss)
    return compare(
        case, schedule="Interleaved1F1B", stages=4, microbatches=2, group=group, steps=2
    ).differences()


def hold(group: Any) -> list[list[str]]:
    whole = model()
    pipe = Pipeline(whole, schedule="1F1B", loss_fn=loss, microbatches=2, group=group)
    held = sorted(name for name, _ in pipe.named_parameters())
    there = sorted(name for name, p in whole.named_parameters() if not p.is_meta)
    return [held, there]


def test_the_numbers_are_the_plain_loops(workers: WorkerPool) -> None:
    for found in workers.run(f"{__name__}:train", 2, 60.0):
        assert max(found.values()) < 1e-12


def test_a_process_keeps_its_own_weights_only(workers: WorkerPool) -> None:
    (first, mine), (second, theirs) = workers.run(f"{__name__}:hold", 2, 60.0)
    assert first == mine
    assert second == theirs
    assert not set(first) & set(second)
    assert len(first) + len(second) == len(list(model().parameters()))
