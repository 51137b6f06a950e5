"""AdamW with decay on matrices alone, and the learning rate of every step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from penstock.train.config import TrainConfig

FINAL_SHARE = 0.1
"""The cosine ends at this share of the peak learning rate."""


def make_optimizer(
    parameters: Iterable[tuple[str, Tensor]], config: TrainConfig
) -> torch.optim.AdamW:
    """AdamW over named parameters; vectors (the gains of norms) and the embedding do not decay."""
    named = list(parameters)
    decaying = [weight for name, weight in named if _decays(name, weight)]
    rest = [weight for name, weight in named if not _decays(name, weight)]
    groups = [
        {"params": decaying, "weight_decay": config.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use ``rate`` for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of ``step``, counted from 1: linear warm-up, then a cosine down to a tenth."""
    if step <= config.warmup:
        return config.learning_rate * step / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)


def _decays(name: str, weight: Tensor) -> bool:
    return weight.ndim > 1 and not name.startswith("embed.")
