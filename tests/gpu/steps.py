"""Steps of a pipeline on a device, held against the same microbatches in a plain loop there."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from penstock import Microbatches, Pipeline
from penstock.testing import Case, judge

WIDTH, TOKENS, MICROBATCHES = 8, 16, 8


class Tied(nn.Module):
    """Dropout between layers, and a weight that the first and the last stage share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.5)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = functional.dropout(block(hidden), 0.1, self.training) + hidden
        logits: Tensor = self.head(hidden)
        return logits


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def case_on(device: str) -> Case:
    """The same weights and tokens in every process."""
    torch.manual_seed(0)
    tokens = torch.randint(0, TOKENS, (16, 6)).to(device)
    parts, targets = tokens.chunk(MICROBATCHES), tokens.roll(1).chunk(MICROBATCHES)
    return Case(Tied().double().to(device), [Microbatches(parts)], targets, loss_fn)


def differences(
    group: Any = None, *, device: str, schedule: str, backend: str | None = None
) -> dict[str, float]:
    """How far a pipeline is from a plain loop after two steps, by what lives in this process.

    In the second step every rank knows what arrives, and receives it ahead. This is a worker's task too, with
    a group of its own if it names a backend.
    """
    device = device.format(rank=0 if group is None else dist.get_rank(group))
    if backend is not None:
        group = dist.new_group(backend=backend)
    case = case_on(device)
    with Pipeline(
        copy.deepcopy(case.model), schedule=schedule, ranks=2, loss_fn=loss_fn, device=device, seed=5,
        mesh=group,
    ) as pipe:  # fmt: skip
        gaps = judge(case, pipe, steps=2).differences()
    if backend is not None:
        dist.destroy_process_group(group)
    return gaps
