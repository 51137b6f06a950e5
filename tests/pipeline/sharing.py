"""Models whose stages share weights, and how they are cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import Pipeline
from penstock.testing import Case
from tests.pipeline.cases import DTYPES, SAMPLES, WIDTH, Block, token_loss

TOKENS = 17


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Looped(nn.Module):
    """Calls one block again and again, as ALBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.embed(tokens)
        for _ in range(5):
            hidden = self.block(hidden)
        return self.head(hidden)


class Fixed(nn.Linear):
    """A head that uses its weight as it is and never trains it."""

    def forward(self, value: Tensor) -> Tensor:
        return functional.linear(value, self.weight.detach(), self.bias)


def tied() -> Tied:
    return Tied()


def looped() -> Looped:
    return Looped()


def half_frozen() -> Tied:
    """Of the two uses of the tied weight one gives no gradient."""
    model = Tied()
    model.head = Fixed(WIDTH, TOKENS)
    model.head.weight = model.embed.weight
    return model


def frozen() -> Tied:
    model = Tied()
    model.embed.weight.requires_grad_(False)
    return model


class Shape(NamedTuple):
    """A model and its cut into 2 and 4 stages."""

    make: Callable[[], nn.Module]
    two: list[list[str]]
    four: list[list[str]]


_TIED = (
    [["embed", "blocks.0", "blocks.1"], ["blocks.2", "head"]],
    [["embed", "blocks.0"], ["blocks.1"], ["blocks.2"], ["head"]],
)
SHAPES = {
    "tied": Shape(tied, *_TIED),
    "half frozen": Shape(half_frozen, *_TIED),
    "frozen": Shape(frozen, *_TIED),
    "looped": Shape(
        looped,
        [["embed", "block", "block"], ["block", "block", "block", "head"]],
        [["embed", "block", "block"], ["block"], ["block"], ["block", "head"]],
    ),
}


def case(shape: str, dtype: torch.dtype = torch.float64) -> Case:
    torch.manual_seed(3)
    model = SHAPES[shape].make().to(dtype)
    tokens = torch.randint(0, TOKENS, (SAMPLES, 5))
    return Case(model, (tokens,), tokens.roll(-1, 1), token_loss)


def cut_of(shape: str, stages: int) -> list[list[str]]:
    return SHAPES[shape].two if stages == 2 else SHAPES[shape].four


def pipeline(of: Case, shape: str, stages: int, **options: Any) -> Pipeline:
    asked: dict[str, Any] = {"microbatches": 8, "loss_fn": of.loss_fn}
    model = copy.deepcopy(of.model)
    return Pipeline(model, stages=cut_of(shape, stages), **(asked | options))


def train(pipe: Pipeline, of: Case, steps: int) -> list[float]:
    """Steps of AdamW with clipping; the norms."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    norms = []
    for _ in range(steps):
        pipe.step(*of.args, target=of.target)
        norms.append(pipe.clip_grad_norm_(0.5))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def train_plain(of: Case, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    model = copy.deepcopy(of.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for _ in range(steps):
        of.loss_fn(model(*of.args), of.target).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


def gap(found: dict[str, Any], expected: dict[str, Tensor]) -> float:
    """The largest difference of two state dicts, of which the first may be a part."""
    return max(float((found[name] - expected[name]).abs().max()) for name in found)


__all__ = ["DTYPES", "SHAPES", "case", "cut_of", "gap", "pipeline", "train", "train_plain"]
