"""The user's default device concerns the user's tensors, not those that Penstock makes for itself.

The default is ``meta`` here, which every machine has: a tensor of Penstock's that lay there would have
no data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Checkpoints, LossScaler, Pipeline, add_loss
from penstock.testing import WorkerPool
from tests.catalogue.making import Does

DIMS = 6


def gated(m: Any, x: Tensor) -> Any:
    """A layer with noise, and a term of the loss."""
    y = m.drop(torch.tanh(m.layer(x)))
    add_loss("size", y.square().mean(), 0.1)
    return x + y


def trained(
    default: str, schedule: str, folder: str, group: Any = None
) -> tuple[list[float], list[float]]:
    """Losses and evaluations of two steps, with a save between them that is loaded again."""
    with torch.device("cpu"):
        torch.manual_seed(0)
        model = nn.Sequential(
            *(Does(gated, layer=nn.Linear(DIMS, DIMS), drop=nn.Dropout(0.2)) for _ in range(4))
        )
        x, y = torch.randn(8, DIMS), torch.randn(8, DIMS)
    with torch.device(default):
        # Replaced by the loads below, if these leave anything out.
        return losses(Pipeline(
            model, schedule=schedule, ranks=2, microbatches=4, mesh=group, seed=3,
            loss_fn=nn.functional.mse_loss,
        ), x, y, Path(folder))  # fmt: skip


def losses(pipe: Pipeline, x: Tensor, y: Tensor, folder: Path) -> tuple[list[float], list[float]]:
    scaler = LossScaler(2.0**4)
    seen, evaluated = list[float](), list[float]()
    with pipe, Checkpoints(folder) as checkpoints:
        opt = torch.optim.AdamW(pipe.parameters(), lr=0.1)
        for step in range(3):
            result = pipe.step(x, target=y, scaler=scaler, record=True)
            scaler.unscale_(opt)
            seen += [result.loss, result.losses["size"], pipe.clip_grad_norm_(1.0)]
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            if step == 1:
                checkpoints.save(step, pipe=pipe, optimizer=opt)
            evaluated.append(pipe.evaluate(x, target=y).loss)
        assert checkpoints.load(pipe=pipe, optimizer=opt) == 1
        evaluated.append(pipe.evaluate(x, target=y).loss)
        pipe.weights.save(folder / "weights")
        pipe.weights.load(folder / "weights")
        evaluated.append(pipe.evaluate(x, target=y).loss)
    return seen, evaluated


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
@pytest.mark.parametrize("processes", [1, 2])
def test_tensors_of_the_library_ignore_the_default_device(
    workers: WorkerPool, tmp_path: Path, processes: int, schedule: str
) -> None:
    expected = trained("cpu", schedule, str(tmp_path / "expected"))
    assert expected[1][1] == expected[1][-1] == expected[1][-2] != expected[1][2]
    if processes == 1:
        assert trained("meta", schedule, str(tmp_path)) == expected
        return
    for actual in workers.run(
        "tests.gpu.test_default:trained", 2, 60.0,
        default="meta", schedule=schedule, folder=str(tmp_path),
    ):  # fmt: skip
        assert tuple(actual) == expected
