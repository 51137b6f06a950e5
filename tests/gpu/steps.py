"""Steps on a device, and the same microbatches in a plain loop; the tests here compare the two."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock import Pipeline

SEED = 5
WIDTH, TOKENS = 8, 16
Numbers = dict[str, Any]
"""A loss, and gradients by name as lists, which travel as JSON."""


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


def model_and_batch(device: str) -> tuple[nn.Module, Tensor, Tensor]:
    """The same weights and tokens in every process."""
    torch.manual_seed(0)
    tokens = torch.randint(0, TOKENS, (16, 6))
    return Tied().double().to(device), tokens.to(device), tokens.roll(1).to(device)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def plain(device: str, units: list[str], microbatches: int = 8) -> Numbers:
    """A loop over the microbatches, with the random numbers of a pipeline that has these units."""
    model, tokens, target = model_and_batch(device)
    total = 0.0
    parts = zip(tokens.chunk(microbatches), target.chunk(microbatches), strict=True)
    for index, (part, goal) in enumerate(parts):
        with penstock.randomness(model, seed=SEED, microbatch=index, units=units):
            loss = loss_fn(model(part), goal) / microbatches
        loss.backward()
        total += loss.item()
    return {"loss": total, "gradients": gradients(model)}


def gradients(of: Any) -> dict[str, Any]:
    module = of.weights.here if isinstance(of, Pipeline) else of
    return {
        name: weight.grad.tolist()
        for name, weight in module.named_parameters()
        if weight.grad is not None
    }


def pipelined(
    group: Any = None, *, device: str, schedule: str, ranks: int = 2, backend: str | None = None
) -> Numbers:
    """A step of a pipeline; also a worker's task, with a group of its own if it names a backend."""
    device = device.format(rank=0 if group is None else dist.get_rank(group))
    if backend is not None:
        group = dist.new_group(backend=backend)
    model, tokens, target = model_and_batch(device)
    with Pipeline(
        model, schedule=schedule, ranks=ranks, microbatches=8, loss_fn=loss_fn,
        device=device, seed=SEED, group=group,
    ) as pipe:  # fmt: skip
        result = pipe.step(tokens, target=target)
        first = {"loss": result.loss, "gradients": gradients(pipe)}
        # Once more, now that every rank knows what arrives and receives it ahead.
        for weight in pipe.parameters():
            weight.grad = None
        pipe.randomness.step = 0
        again = {"loss": pipe.step(tokens, target=target).loss, "gradients": gradients(pipe)}
        torch.testing.assert_close(again, first)
    if backend is not None:
        dist.destroy_process_group(group)
    return first | {"units": pipe.units}
