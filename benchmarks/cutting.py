"""What it costs to cut a model by calls: once, for each kind of call, in each stage's forward, in memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from penstock.partition import Partition, partition
from penstock.values import ValueSpec

BLOCKS, WIDTH, STAGES = 48, 64, 4


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add to the input."""
        found: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return found


class Deep(nn.Module):
    """Many blocks between an embedding and a head."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


def compare(rounds: int) -> dict[str, Any]:
    """Cut, analyse and run a model of 48 blocks; cut a large one without data."""
    model, tokens = Deep(BLOCKS, WIDTH), torch.zeros(2, 16, dtype=torch.long)
    call = ValueSpec.of(((tokens,), {}))
    cut, cutting = _timed(lambda: partition(model, STAGES))
    _, analysing = _timed(lambda: _describe(cut, call))
    with torch.no_grad():
        plain = min(_timed(lambda: model(tokens))[1] for _ in range(rounds))
        staged = min(_timed(lambda: _run(cut, call, tokens))[1] for _ in range(rounds))
    found = {
        "cut_seconds": cutting,
        "analysis_seconds": analysing,
        "overhead_per_stage_call_seconds": (staged - plain) / STAGES,
        "meta_cut_megabytes": _meta_cut(),
    }
    for name, figure in found.items():
        print(f"{name:>34}: {figure:.4f}")
    return found


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    found = work()
    return found, time.perf_counter() - start


def _describe(cut: Partition, call: ValueSpec) -> Any:
    assert cut.describe is not None
    return cut.describe(call, torch.is_grad_enabled())


def _run(cut: Partition, call: ValueSpec, tokens: Tensor) -> Any:
    """All stages in order, as one process would run them."""
    edges = _describe(cut, call).edges
    values: dict[str, Any] = {}
    output: Any = None
    for index, stage in enumerate(cut.modules):
        mine = {edge.value: values[edge.value] for edge in edges if index in edge.targets}
        output = stage(mine, (tokens,), {})
        values |= output if isinstance(output, dict) else {}
    return output


def _meta_cut() -> float:
    """By how much the peak of the process grows when a model of 2.4 billion weights is cut."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.device("meta"):
        model = Deep(BLOCKS, 2048)
    cut = partition(model, STAGES)
    _describe(cut, ValueSpec.of(((torch.zeros(1, 16, dtype=torch.long),), {})))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
