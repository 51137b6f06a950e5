"""A loop of Accelerate, with a pipeline and without, and the setting in which a worker runs it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from penstock import Pipeline, PipelineModule
from penstock.integrations.accelerate import PipelineAccelerator


def make() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.0)) for _ in range(7)]
    return nn.Sequential(*blocks, nn.Linear(8, 3))


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(32, 8, generator=draw), torch.randint(3, (32,), generator=draw)
    )


def run(load: Any = None, save: Any = None, **options: Any) -> dict[str, Any]:
    """Losses, norms and learning rates of two epochs, saved after the first, or of one that resumes."""
    set_seed(0)
    model: Any = make()
    settings: dict[str, Any] = {"cpu": True, "gradient_accumulation_steps": 2}
    if options:
        pipe = Pipeline(model, loss_fn=cross_entropy, microbatches=4, **options)
        accelerator, model = PipelineAccelerator(pipe, **settings), PipelineModule(pipe)
    else:
        accelerator = Accelerator(**settings)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader: Any = DataLoader(data(), batch_size=8, shuffle=True)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    if load is not None:
        accelerator.load_state(load)
    rows = []
    for epoch in range(1 if load is not None else 2):
        for x, target in loader:
            with accelerator.accumulate(model):
                loss = model(x, target=target) if options else cross_entropy(model(x), target)
                accelerator.backward(loss)
                clips = accelerator.sync_gradients
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.1) if clips else 0.0
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            rows.append([float(loss), float(norm), schedule.get_last_lr()[0]])
        if save is not None and epoch == 0:
            accelerator.save_state(save)
    model.eval()
    with torch.no_grad():
        gathered = accelerator.gather_for_metrics(model(data().tensors[0]))
    total = accelerator.reduce(torch.ones(1), "sum")
    return {"rows": rows, "outputs": gathered.tolist(), "total": float(total)}


@contextmanager
def launched(rank: int, processes: int) -> Iterator[None]:
    """What a launcher says in the environment, and what libraries keep for a whole process."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    before = {name: os.environ.get(name) for name in names}
    if processes > 1:
        values = (rank, rank, processes, processes)
        os.environ |= {name: str(value) for name, value in zip(names, values, strict=True)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
