"""Models and batches for the oracle, and the oracle as a task for workers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.testing import Case, compare

SAMPLES = 8
WIDTH = 12


class Block(nn.Module):
    """A pre-norm residual block with dropout-free attention over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(hidden)).chunk(3, -1)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.out(attended)
        return hidden + mixed


def sequence_model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Embedding(17, WIDTH), Block(), Block(), Block(), nn.Linear(WIDTH, 17)]
    return nn.Sequential(*layers).to(dtype)


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def sequence_case(dtype: torch.dtype = torch.float64) -> Case:
    model = sequence_model(dtype)
    tokens = torch.randint(0, 17, (SAMPLES, 6))
    return Case(model, (tokens,), tokens.roll(-1, 1), token_loss)


DTYPES = {"float64": torch.float64, "float32": torch.float32}


def run_oracle(
    group: Any, schedule: str, microbatches: int, dtype: str, stages: int
) -> dict[str, Any]:
    """A worker's task: the differences from the unsplit model, and a digest of the bits."""
    verdict = compare(
        sequence_case(DTYPES[dtype]),
        schedule=schedule,
        microbatches=microbatches,
        stages=stages,
        group=group,
    )
    return {"differences": verdict.differences(), "digest": verdict.digest()}


def deep_case(dtype: torch.dtype = torch.float64) -> Case:
    """Eight modules, so that four ranks can hold two stages each."""
    torch.manual_seed(1)
    blocks = [Block() for _ in range(6)]
    model = nn.Sequential(nn.Embedding(17, WIDTH), *blocks, nn.Linear(WIDTH, 17)).to(dtype)
    tokens = torch.randint(0, 17, (SAMPLES, 4))
    return Case(model, (tokens,), tokens.roll(-1, 1), token_loss)


def run_deep(group: Any, schedule: str, stages: int, microbatches: int) -> dict[str, Any]:
    """A worker's task: float64 differences, and a digest of the float32 bits."""
    asked = {"schedule": schedule, "stages": stages, "microbatches": microbatches, "group": group}
    exact = compare(deep_case(), **asked)
    return {
        "differences": exact.differences(),
        "digest": compare(deep_case(torch.float32), **asked).digest(),
    }
