"""Five steps: a ragged language model weighed by tokens, and a mixture of experts with its balance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Microbatches, Pipeline, collect_losses
from penstock.testing import WorkerPool
from tests.pipeline.test_losses import (
    SCHEDULES,
    draw,
    experts,
    make,
    plain_model,
    token_loss,
    valid,
)

MODELS = {"ragged": plain_model, "experts": experts}
STEPS = 5


def batches() -> Iterator[list[Tensor]]:
    """Other lengths, other numbers of rows and other numbers of microbatches in every step."""
    for step in range(STEPS):
        count = 4 + step % 3
        yield [draw(1 + i % 2, 2 + (step + 3 * i) % 5, seed=10 * step + i) for i in range(count)]


def targets_of(parts: list[Tensor]) -> list[Tensor]:
    """Part of each row counts; of one microbatch nothing does."""
    found = [part.roll(-1, 1).masked_fill(part == 3, -100) for part in parts]
    return [*found[:-1], torch.full_like(parts[-1], -100)]


def optimizer_of(owner: nn.Module | Pipeline) -> torch.optim.Optimizer:
    return torch.optim.AdamW(owner.parameters(), lr=0.05)


def plain(name: str) -> tuple[list[float], dict[str, Tensor]]:
    model = MODELS[name]()
    optimizer, losses = optimizer_of(model), []
    for parts in batches():
        losses.append(plain_step(model, parts))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def plain_step(model: nn.Module, parts: list[Tensor]) -> float:
    targets, total = targets_of(parts), 0.0
    whole = sum(float(valid(target)) for target in targets)
    for part, target in zip(parts, targets, strict=True):
        if count := float(valid(target)):
            with collect_losses() as added:
                main = token_loss(model(part), target)
            loss = (main + added.total()) * (count / whole)
            loss.backward()
            total += float(loss.detach())
    return total


def trained(pipe: Pipeline) -> list[float]:
    losses, optimizer = [], optimizer_of(pipe)
    for parts in batches():
        losses.append(pipe.step(Microbatches(parts), target=targets_of(parts)).loss)
        optimizer.step()
        pipe.zero_grad()
    return losses


def gaps(name: str, pipe: Pipeline) -> list[float]:
    """How far losses and weights are from the plain loop's."""
    losses, weights = plain(name)
    found = [abs(a - b) for a, b in zip(trained(pipe), losses, strict=True)]
    own = dict(pipe.named_parameters())
    return found + [float((p.detach() - weights[n]).abs().max()) for n, p in own.items()]


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("name", sorted(MODELS))
def test_in_one_process(name: str, schedule: str) -> None:
    assert max(gaps(name, make(MODELS[name](), schedule, loss_weight=valid))) < 1e-10


def in_processes(group: Any, name: str, schedule: str) -> float:
    """A worker's task."""
    pipe = make(MODELS[name](), schedule, loss_weight=valid, ranks=None, group=group)
    return max(gaps(name, pipe))


@pytest.mark.parametrize(
    ("name", "schedule"), [("ragged", "1F1B"), ("ragged", "ZB-V"), ("experts", "Interleaved1F1B")]
)
def test_over_processes(workers: WorkerPool, name: str, schedule: str) -> None:
    task = f"{__name__}:in_processes"
    assert max(workers.run(task, 2, 60.0, name=name, schedule=schedule)) < 1e-10
