"""Imported by the process that others are forked from: what scripts and jobs import is then there already."""

from __future__ import annotations

import contextlib
import gc
from importlib import import_module

import torch
from torch import nn

from penstock import Pipeline
from tests.device import switch

for name in (
    "penstock.checkpoint",
    "penstock.cli.main",
    "penstock.train.trainer",
    "penstock.pipelining",
    "pytest",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
):
    import_module(name)
# Of the integrations, as far as they are installed: else each process of each script imports them anew.
for name in ("lightning.pytorch", "peft", "torchmetrics", "transformers.trainer"):
    with contextlib.suppress(ImportError):
        import_module(name)

torch.set_num_threads(1)
# What a first step imports too.
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
Pipeline(model, ranks=2, microbatches=2, loss_fn=nn.functional.mse_loss).evaluate(
    torch.ones(4, 4), target=torch.ones(4, 4)
)
# Shared by all that are forked from here, and no collection touches it.
gc.collect()
gc.freeze()
# Not before: a process that has used a GPU cannot be forked.
switch()
