"""Compiled stages in wrappers of torch.distributed, on two processes beside one."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from penstock import Pipeline
from penstock.backward import PendingGradients, SplitBackward
from penstock.testing import WorkerPool
from tests.parallel.bodies import Mlp, X, Y

# Two processes import a compiler first.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


def wrap(module: Any, how: str, mesh: DeviceMesh) -> Any:
    blocks = [part for part in module.modules() if isinstance(part, Mlp)]
    if how == "ddp":
        # Dynamo would cut a graph of several buckets.
        options: dict[str, Any] = {"bucket_cap_mb": 0.0001}
        return DistributedDataParallel(module, process_group=mesh.get_group("dp"), **options)
    for block in blocks:
        if how == "tp":
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["dp"], plan)
        elif how == "blocks":
            fully_shard(block, mesh=mesh["dp"])
    return None if how == "tp" else fully_shard(module, mesh=mesh["dp"])


class Records(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += f"{record.getMessage()}\n"


def run(group: Any, how: str) -> dict[str, Any]:
    """A worker's task: two steps of stages that are compiled and wrapped, beside one process."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    log, records = logging.getLogger("penstock"), Records()
    log.setLevel(logging.INFO)
    log.addHandler(records)
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.LayerNorm(4), Mlp()).double() for _ in range(4))
    model = nn.Sequential(*blocks)
    whole = copy.deepcopy(model)
    pipe = Pipeline(
        model,
        schedule="ZB-V",
        microbatches=4,
        loss_fn=mse_loss,
        mesh=mesh,
        compile={"backend": "plain"},
        wrap=lambda module, stage: wrap(module, how, mesh),
        replicas=None if how == "tp" else mesh["dp"],
    )
    replica = mesh.get_local_rank("dp")
    half = slice(None) if how == "tp" else slice(8 * replica, 8 * replica + 8)
    waited: list[int] = []
    weight_half = SplitBackward.weight_half

    def counted(self: SplitBackward, pending: PendingGradients) -> None:
        waited.append(sum(len(use.edges) for use in pending.uses))
        weight_half(self, pending)

    gap, frames = 0.0, []
    with pipe, patch.object(SplitBackward, "weight_half", counted):
        for _ in range(2):
            result = pipe.step(X[half], target=Y[half])
            loss = mse_loss(whole(X), Y)
            loss.backward()
            gap = max(gap, abs(result.loss - float(loss)))
            theirs: dict[str, Any] = dict(whole.named_parameters())
            for name, weight in pipe.weights.here.named_parameters():
                grad: Any = weight.grad
                actual = grad.full_tensor() if isinstance(grad, DTensor) else grad
                gap = max(gap, float((actual - theirs[name].grad).abs().max()))
            frames.append(dict(torch._dynamo.utils.counters["frames"]))
    log.removeHandler(records)
    return {"gap": gap, "waited": waited, "logged": records.text, "frames": frames}


@pytest.fixture(scope="module")
def pair() -> Iterator[WorkerPool]:
    """Of their own: torch counts the groups of a process, and a mesh of some leaves the others behind."""
    with WorkerPool(2) as pool:
        yield pool


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("ddp", marks=pytest.mark.nightly),
        "fsdp",
        pytest.param("tp", marks=pytest.mark.nightly),
        pytest.param("blocks", marks=pytest.mark.nightly),
    ],
)
def test_compiled_stages_in_wrappers_give_the_gradients_of_one_process(
    pair: WorkerPool, how: str
) -> None:
    for answer in pair.run("tests.compiled.test_wrapped:run", 2, timeout=240, how=how):
        assert answer["gap"] < 1e-12
        # The weights of a stage's linear layers, and of norms whose input needs no gradient.
        assert len(answer["waited"]) == 16
        assert set(answer["waited"]) <= ({0} if how == "tp" else {8, 10})
        assert answer["frames"][0] == answer["frames"][1]
        assert "runs without compilation" not in answer["logged"]
        assert ("it handles a type of tensors of its own" in answer["logged"]) == (how == "tp")
