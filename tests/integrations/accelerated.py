"""A loop of Accelerate, with a pipeline and without; as a script, what tests launch.

``python -m tests.integrations.accelerated FOLDER`` trains under torchrun, and rank 0 writes what came out
into ``FOLDER/report.json``. With ``FOLDER pipelines``, four processes form two pipelines, and each writes
what it saw into ``FOLDER/report-RANK.json``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from penstock import Pipeline, PipelineModule
from penstock.integrations.accelerate import PipelineAccelerator

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))


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


def count() -> dict[str, Any]:
    """What a rank of two pipelines of two ranks sees of a step with other numbers in each pipeline."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica = mesh.get_local_rank("dp")
    pipe = Pipeline(make(), mesh=mesh, replicas="dp", microbatches=2, loss_fn=cross_entropy)
    accelerator: Any = PipelineAccelerator(pipe, cpu=True)
    optimizer: Any = torch.optim.SGD(pipe.parameters(), lr=1.0)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, schedule = accelerator.prepare(PipelineModule(pipe), optimizer, schedule)
    x, target = (part[16 * replica :][:8] for part in data().tensors)
    accelerator.backward(model(x, target=target))
    optimizer.step()
    schedule.step()
    return {
        "rate": schedule.get_last_lr()[0],
        "gathered": accelerator.gather(torch.tensor([replica, replica + 10])).tolist(),
        "objects": accelerator.gather_for_metrics([f"of {replica}"], use_gather_object=True),
        "sum": accelerator.reduce(torch.tensor(1.0 + replica), "sum").item(),
        "mean": accelerator.reduce(torch.tensor(1.0 + replica), "mean").item(),
    }


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


if __name__ == "__main__":
    to = Path(sys.argv[1])
    if sys.argv[2:] == ["pipelines"]:
        (to / f"report-{os.environ['RANK']}.json").write_text(json.dumps(count()))
        sys.exit()
    options: dict[str, Any] = {"schedule": "ZB-V", "ranks": PROCESSES}
    found = {"whole": run(save=to / "two", **options), "resumed": run(load=to / "one", **options)}
    if os.environ["RANK"] == "0":
        (to / "report.json").write_text(json.dumps(found))
