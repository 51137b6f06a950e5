"""Imported by the process that others are forked from: what scripts and jobs import is then there already."""

from __future__ import annotations

import torch
from torch import nn

from penstock import Pipeline
from penstock.cli import main, train

__all__ = ["main", "train"]

torch.set_num_threads(1)
# What a first step imports too.
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
Pipeline(model, ranks=2, microbatches=2, loss_fn=nn.functional.mse_loss).eval(
    torch.ones(4, 4), target=torch.ones(4, 4)
)
