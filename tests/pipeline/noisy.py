"""A model that draws random numbers in every way there is, and what it gives in a plain loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import penstock
from penstock import Pipeline

WIDTH = 6
SAMPLES = 8
SEED = 11
MICROBATCHES = 4


class Block(nn.Module):
    """Drops in modules, between them, and before the first of them."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        self.first = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.4)
        self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.RReLU())

    def forward(self, x: Tensor) -> Tensor:
        if not self.recompute:
            return self.mixed(x)
        kept = self.recompute == "kept"
        found: Tensor = checkpoint(self.mixed, x, use_reentrant=False, preserve_rng_state=kept)
        return found

    def mixed(self, x: Tensor) -> Tensor:
        hidden = self.drop(functional.silu(self.first(x)))
        hidden = functional.dropout(hidden, 0.2, self.training)
        hidden = self.drop(hidden)
        mixed: Tensor = x + hidden * self.last(hidden) + torch.rand_like(x)
        return mixed


def model(recompute: str = "") -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        blocks = [Block(recompute) for _ in range(3)]
        shared = nn.Dropout(0.5)
        head = nn.Linear(WIDTH, 3)
        layers = [nn.Dropout(0.1), blocks[0], shared, blocks[1], shared, blocks[2], nn.Tanh(), head]
        return nn.Sequential(*layers)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, WIDTH, generator=generator)
    return x, torch.randn(SAMPLES, 3, generator=generator)


def noisy_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output + 0.1 * torch.randn_like(output), target)


def bits(named: Any) -> dict[str, str]:
    return {name: p.grad.numpy().tobytes().hex() for name, p in named if p.grad is not None}


def plain(recompute: str, steps: int = 2, first: int = 0) -> dict[str, Any]:
    """Gradients and losses of the unsplit model that runs the same microbatches."""
    net, (x, y) = model(recompute), batch()
    losses = []
    for step in range(first, first + steps):
        total = 0.0
        for index, (part, target) in enumerate(
            zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)
        ):
            with penstock.randomness(net, seed=SEED, step=step, microbatch=index):
                loss = noisy_loss(net(part), target)
                (loss * (1 / MICROBATCHES)).backward()
            total += float(loss.detach()) / MICROBATCHES
        losses.append(total)
    return {"losses": losses, "gradients": bits(net.named_parameters())}


def piped(group: Any = None, *, schedule: str, recompute: str, **options: Any) -> dict[str, Any]:
    """The same of a pipeline; also a worker's task."""
    steps, first = options.pop("steps", 2), options.pop("first", 0)
    x, y = batch()
    pipe = Pipeline(
        options.pop("net", None) or model(recompute),
        schedule=schedule,
        microbatches=MICROBATCHES,
        loss_fn=noisy_loss,
        seed=SEED,
        group=group,
        **options,
    )
    with pipe:
        pipe.randomness.load_state_dict({"seed": SEED, "step": first})
        losses = [pipe.step(x, target=y).loss for _ in range(steps)]
        return {"losses": losses, "gradients": bits(pipe.named_parameters())}


def seed_by_rank(group: Any) -> Any:
    """A worker's task: the seed that a pipeline takes where each rank's torch has another."""
    with torch.random.fork_rng():
        torch.manual_seed(100 + torch.distributed.get_rank(group))
        with Pipeline(model(), schedule="GPipe", loss_fn=noisy_loss, group=group) as pipe:
            return pipe.randomness.seed
