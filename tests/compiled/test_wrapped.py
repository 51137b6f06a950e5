"""Compiled stages in wrappers of torch.distributed, on two processes beside a plain loop."""

from __future__ import annotations

import copy
import logging
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import mse_loss

from penstock import Pipeline
from penstock.backward import PendingGradients, SplitBackward
from penstock.testing import Case, WorkerPool, judge
from tests.parallel.bodies import Mlp, X, Y, halves_of, wrap

# Two processes import a compiler first.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


def run(group: Any, how: str) -> dict[str, Any]:
    """A worker's task: two steps of stages that are compiled and wrapped."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    replicas = None if how == "tp" else "dp"
    of_wrap = (
        DeviceMesh.from_group(mesh.get_group("dp"), "cpu", mesh_dim_names=("tp",))
        if how == "tp"
        else mesh
    )
    log, said = logging.getLogger("penstock"), list[str]()
    records = logging.Handler()
    records.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.setLevel(logging.INFO)
    log.addHandler(records)
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.LayerNorm(4), Mlp()).double() for _ in range(4))
    case = Case(nn.Sequential(*blocks), (X,), Y, mse_loss)
    pipe = Pipeline(
        copy.deepcopy(case.model), schedule="ZB-V", microbatches=4, loss_fn=mse_loss, mesh=mesh,
        compile={"backend": "plain"}, replicas=replicas,
        wrap=lambda module, stage: wrap(module, how, of_wrap),
    )  # fmt: skip
    waited: list[int] = []
    weight_half = SplitBackward.weight_half

    def counted(self: SplitBackward, pending: PendingGradients) -> None:
        waited.append(sum(len(use.edges) for use in pending.uses))
        weight_half(self, pending)

    cases, frames, gaps = halves_of(case) if replicas else [case], list[Any](), list[float]()
    with pipe, patch.object(SplitBackward, "weight_half", counted):
        for _ in range(2):
            pipe.zero_grad()
            gaps += judge(cases, pipe, evaluate=False).differences().values()
            frames.append(dict(torch._dynamo.utils.counters["frames"]))
    log.removeHandler(records)
    return {"gap": max(gaps), "waited": waited, "logged": "\n".join(said), "frames": frames}


@pytest.mark.parametrize(
    "how",
    [
        "fsdp",
        *(
            pytest.param(how, marks=pytest.mark.nightly)
            for how in ("ddp in buckets", "tp", "blocks")
        ),
    ],
)
def test_compiled_stages_in_wrappers_give_the_gradients_of_the_plain_loop(how: str) -> None:
    # A pool of its own: torch counts the groups of a process, and a mesh of some leaves the others behind.
    with WorkerPool(2) as pair:
        answers = pair.run(f"{__name__}:run", 2, timeout=240, how=how)
    for answer in answers:
        assert answer["gap"] < 1e-12
        # The weights of a stage's linear layers, and of norms whose input needs no gradient.
        assert len(answer["waited"]) == 16
        assert set(answer["waited"]) <= ({0} if how == "tp" else {8, 10})
        assert answer["frames"][0] == answer["frames"][1]
        assert "runs without compilation" not in answer["logged"]
        assert ("it handles a type of tensors of its own" in answer["logged"]) == (how == "tp")
