"""A model that is cut by calls draws, and begins with, what it does uncut."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock import Pipeline
from penstock.partition import partition
from tests.pipeline.noisy import MICROBATCHES, SEED, WIDTH, Block, batch, bits, noisy_loss


class Inner(nn.Module):
    """Drops before its first block, between blocks, and by one module that it calls many times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block("") for _ in range(4)])
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(x, 0.2)
        for block in self.blocks:
            x = functional.dropout(self.drop(block(x)), 0.1)
        found: Tensor = self.drop(x)
        return found


class Top(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Inner()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(functional.dropout(self.model(x), 0.1))
        return found


def made() -> Top:
    model = Top()
    penstock.init_weights(model, 0)
    return model


def plain() -> dict[str, str]:
    model, (x, y) = made(), batch()
    pairs = zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)
    for index, (part, target) in enumerate(pairs):
        with penstock.randomness(model, seed=SEED, microbatch=index):
            (noisy_loss(model(part), target) / MICROBATCHES).backward()
    return bits(model.named_parameters())


CUTS = [
    (1, "GPipe", 1),
    (2, "1F1B", 2),
    (4, "ZB-V", 2),
    (["model.blocks.1", "model.blocks.2", "head"], "Interleaved1F1B", 2),
]


@pytest.mark.parametrize(("stages", "schedule", "ranks"), CUTS)
def test_cut_by_calls(stages: Any, schedule: str, ranks: int) -> None:
    model, (x, y) = made(), batch()
    cut = partition(model, stages, how="calls", example=((x[:2],), {}))
    options: dict[str, Any] = {"microbatches": MICROBATCHES, "loss_fn": noisy_loss, "seed": SEED}
    with Pipeline(model, schedule=schedule, ranks=ranks, stages=cut, **options) as pipe:
        pipe.step(x, target=y)
        assert bits(pipe.named_parameters()) == plain()
        whole = copy.deepcopy(made())
        penstock.init_weights(whole, 1)
        penstock.init_weights(pipe, 1)
        found = pipe.state_dict()
        assert all(torch.equal(found[name], value) for name, value in whole.state_dict().items())
