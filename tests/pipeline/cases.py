"""Models and batches for the oracle, and the oracle as a task for workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import Pipeline
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


# ---- models whose gradients have the same bits in every schedule


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


class Skipping(nn.Module):
    """What the embedding gives is used by every block and by the head, over edges that skip stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, 17)

    def forward(self, tokens: Tensor) -> Tensor:
        first = hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden + first)
        logits: Tensor = self.head(hidden * first)
        return logits


def dropping() -> nn.Sequential:
    blocks = [layer for _ in range(4) for layer in (Block(), nn.Dropout(0.3))]
    return nn.Sequential(nn.Embedding(17, WIDTH), *blocks, nn.Linear(WIDTH, 17))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "chain": lambda: sequence_model(torch.float32),
    "skip edges": Skipping,
    "tied weights": Tied,
    "dropout": dropping,
}


def run_bits(group: Any = None, *, schedule: str, model: str, **options: Any) -> dict[str, str]:
    """The losses and gradients of two steps in float32, as bits; also a worker's task."""
    torch.manual_seed(3)
    tokens = torch.randint(0, 17, (SAMPLES, 4))
    pipe = Pipeline(
        MODELS[model](), schedule=schedule, microbatches=4, loss_fn=token_loss, seed=7, group=group,
        **options,
    )  # fmt: skip
    with pipe:
        losses = [pipe.step(tokens, target=tokens.roll(-1, 1)).loss.hex() for _ in range(2)]
        gradients = {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}
        return {n: g.numpy().tobytes().hex() for n, g in gradients.items()} | {
            "losses": str(losses)
        }
