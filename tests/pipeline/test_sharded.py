"""Norms and state dicts of stages whose parameters are DTensors: two pipelines of two ranks."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from penstock import Pipeline
from penstock.testing import WorkerPool
from tests.pipeline.cases import LANGUAGE, pipeline

ORDERS = (2.0, 1.0, math.inf)


def spread(pipe: Pipeline, plain: nn.Module, mesh: DeviceMesh) -> None:
    """Cut matrices along their first dimension and copy vectors; with the plain model's gradients."""
    for stage in pipe.stages:
        for name, parameter in list(stage.module.named_parameters()):
            cut = [Shard(0) if parameter.dim() > 1 else Replicate()]
            made = nn.Parameter(distribute_tensor(parameter.detach(), mesh, cut))
            grad = plain.get_parameter(name).grad
            made.grad = None if grad is None else distribute_tensor(grad.clone(), mesh, cut)
            path, _, leaf = name.rpartition(".")
            setattr(stage.module.get_submodule(path), leaf, made)


def run_sharded(group: Any) -> dict[str, Any]:
    """A worker's task."""
    of = LANGUAGE["tied"]()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    pipe = pipeline(of, 2, schedule="1F1B", group=mesh["pp"])
    plain = copy.deepcopy(of.model)
    of.loss_fn(plain(*of.args), of.target).backward()
    spread(pipe, plain, mesh["dp"])
    grads = [p.grad for p in plain.parameters() if p.grad is not None]
    with pipe:
        full = pipe.state_dict(full=True)
        pipe.load_state_dict({name: tensor + 1 for name, tensor in plain.state_dict().items()})
        moved = pipe.state_dict(full=True)
        norms = [pipe.grad_norm(order) for order in ORDERS]
        clipped = [pipe.clip_grad_norm_(0.1), pipe.grad_norm()]
    return {
        "norms": norms,
        "plain": [float(nn.utils.get_total_norm(grads, order)) for order in ORDERS],
        "clipped": clipped,
        "full": {n: bool(torch.equal(t, plain.state_dict()[n])) for n, t in full.items()},
        "moved": {n: bool(torch.equal(t, plain.state_dict()[n] + 1)) for n, t in moved.items()},
    }


def test_stages_of_dtensors(workers: WorkerPool) -> None:
    names = LANGUAGE["tied"]().model.state_dict().keys()
    for process, answer in enumerate(workers.run(f"{__name__}:run_sharded", 4, 100.0)):
        assert answer["norms"] == pytest.approx(answer["plain"], rel=1e-6)
        assert answer["clipped"] == pytest.approx([answer["plain"][0], 0.1], rel=1e-4)
        # Even processes are rank 0 of their pipeline.
        assert answer["full"].keys() == answer["moved"].keys() == (set() if process % 2 else names)
        assert all([*answer["full"].values(), *answer["moved"].values()])
