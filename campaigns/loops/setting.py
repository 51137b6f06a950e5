"""Where a program runs, what it hands back, and the list of all programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock import Pipeline
from penstock._engine.parallel import side_by_side

STEPS = 20
RANKS = 2


@dataclass
class Outcome:
    """What a program hands back to be held against the unmodified one."""

    losses: list[float]
    metrics: dict[str, float] = field(default_factory=dict)
    weights: Mapping[str, Tensor] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """It as numbers and tensors that can be saved."""
        return {
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "metrics": {name: float(value) for name, value in self.metrics.items()},
            "weights": {
                name.removeprefix("module."): value.detach().cpu().clone()
                for name, value in self.weights.items()
                if isinstance(value, Tensor) and value.is_floating_point()
            },
        }


@dataclass
class Setting:
    """One way to run a program: unmodified, or as a pipeline in so many processes.

    Attributes:
        cut: whether the model is a pipeline.
        processes: how many there are.
        replicas: how many pipelines they form.
        index: the number of this process's replica.
        folder: for files, the same for all processes.
    """

    cut: bool
    processes: int
    replicas: int
    index: int
    folder: Path

    @property
    def each(self) -> int:
        """The samples of a batch of one replica."""
        return 8 // self.replicas

    def options(self, **more: Any) -> dict[str, Any]:
        """Options of a pipeline for the integrations, which know the processes."""
        return {"ranks": RANKS, "microbatches": 2, **more}

    def pipeline(self, model: nn.Module, **more: Any) -> Pipeline:
        """A pipeline for a loop of one's own."""
        options = self.options(**more)
        if self.processes > 1:
            options |= side_by_side("cpu", self.processes, RANKS)
        return Pipeline(model, **options)

    def part(self, batch: Tensor) -> Tensor:
        """This replica's part of a batch; all of it without a pipeline."""
        return batch if not self.cut else batch.tensor_split(self.replicas)[self.index]


Program = Callable[[Setting], Outcome]
PROGRAMS: dict[str, Program] = {}
"""All programs, by kind and name."""


def program(kind: str, name: str) -> Callable[[Program], Program]:
    """Add a program to the list."""

    def add(function: Program) -> Program:
        PROGRAMS[f"{kind}: {name}"] = function
        return function

    return add
