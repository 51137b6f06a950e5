"""A small run to save and resume: dropout, AdamW with two groups, a scheduler, in any layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from penstock import Checkpoints, Pipeline, randomness
from penstock._engine.rng import Randomness

WIDTH, SAMPLES, MICROBATCHES = 6, 8, 4
BEFORE, AFTER = 2, 3


class Keeps:
    """Any object with a state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def linear(width: int = 3, **options: Any) -> nn.Linear:
    torch.manual_seed(width)
    return nn.Linear(width, 2, **options)


def stepped(model: nn.Module, kind: str = "AdamW", steps: int = 2, **options: Any) -> Any:
    """An optimizer that has something to keep."""
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return optimizer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = hidden + self.drop(torch.tanh(self.mix(self.norm(hidden))))
        return mixed


def model() -> nn.Sequential:
    """Its first and last module share a weight."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, 11, bias=False)
    whole = nn.Sequential(nn.Embedding(11, WIDTH), *[Block() for _ in range(8)], head)
    head.weight = whole[0].weight  # type: ignore[assignment] # nn.Sequential's items are any module
    return whole


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 11, (SAMPLES, 3), generator=torch.Generator().manual_seed(step))
    return tokens, tokens.roll(-1, 1)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def optimizer_of(named: Iterator[tuple[str, Tensor]]) -> torch.optim.AdamW:
    parameters = list(named)
    groups = [
        {"params": [p for _, p in parameters if p.dim() > 1], "weight_decay": 0.1, "lr": 0.02},
        {"params": [p for _, p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


class Run:
    """A run in some layout: ``"plain"`` is the unsplit model's own loop."""

    def __init__(self, schedule: str, ranks: int = 1, group: Any = None, how: str = "") -> None:
        self.model = model()
        mesh = None
        if how:
            mesh, group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")), None
        self.pipe: Pipeline | None = None
        self.randomness = Randomness(7)
        if schedule != "plain":
            self.pipe = Pipeline(
                self.model,
                schedule=schedule,
                ranks=ranks,
                microbatches=MICROBATCHES,
                loss_fn=loss_fn,
                seed=7,
                mesh=group if mesh is None else mesh,
                replicas=None if mesh is None else "dp",
            )
            if mesh is not None and how == "fsdp":
                for stage in self.pipe.stages:
                    fully_shard(stage.module, mesh=mesh["dp"])
        named = self.model.named_parameters() if self.pipe is None else self.pipe.named_parameters()
        self.optimizer = optimizer_of(named)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.step = 0

    @property
    def states(self) -> dict[str, Any]:
        of = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        if self.pipe is not None:
            return {"pipe": self.pipe, **of}
        return {"model": self.model, "randomness": self.randomness, **of}

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            tokens, target = batch(self.step)
            losses.append(
                self._plain(tokens, target) if self.pipe is None else self._piped(tokens, target)
            )
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.step += 1
        return losses

    def _piped(self, tokens: Tensor, target: Tensor) -> float:
        assert self.pipe is not None
        loss = self.pipe.step(tokens, target=target).loss
        self.pipe.clip_grad_norm_(0.5)
        return loss

    def _plain(self, tokens: Tensor, target: Tensor) -> float:
        total = 0.0
        for index, (one, other) in enumerate(
            zip(tokens.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
        ):
            with randomness(self.model, seed=7, step=self.randomness.step, microbatch=index):
                loss = loss_fn(self.model(one), other) / MICROBATCHES
                loss.backward()
            total += float(loss.detach())
        self.randomness.advance()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        return total

    def save(self, folder: Path, **options: Any) -> None:
        with Checkpoints(folder, **options) as checkpoints:
            checkpoints.save(self.step, extra={"seen": self.step}, **self.states)

    def load(self, folder: Path, **options: Any) -> int | None:
        step = Checkpoints(folder, group=options.pop("group", None)).load(**options, **self.states)
        self.step = step or 0
        return step

    def close(self) -> None:
        if self.pipe is not None:
            self.pipe.close()


def saved(folder: Path, schedule: str, ranks: int, group: Any = None) -> list[float]:
    """The losses after a checkpoint was saved."""
    run = Run(schedule, ranks, group)
    run.train(BEFORE)
    run.save(folder)
    after = run.train(AFTER)
    run.close()
    return after


def resumed(folder: Path, schedule: str, ranks: int, group: Any = None) -> list[float]:
    """The losses of a run that goes on from a checkpoint."""
    run = Run(schedule, ranks, group)
    run.train(1)  # what a run has kept before it loads must leave no trace
    assert run.load(folder) == BEFORE
    after = run.train(AFTER)
    run.close()
    return after


def in_processes(
    group: Any, folder: str, schedule: str, ranks_of: int, sources: list[str]
) -> list[Any]:
    """A worker's task: save, go on, and resume from checkpoints of other layouts."""
    after = saved(Path(folder), schedule, ranks_of, group)
    return [after, [resumed(Path(one), schedule, ranks_of, group) for one in [folder, *sources]]]
