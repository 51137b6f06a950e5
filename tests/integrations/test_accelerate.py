"""Accelerate's loop, on a pipeline and without."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from penstock import Pipeline, PipelineModule
from penstock.checkpoint import export
from penstock.errors import UsageError
from penstock.integrations.accelerate import PipelineAccelerator, share_batches
from penstock.testing import WorkerPool
from tests.integrations.accelerated import data, launched, make, run

pytestmark = pytest.mark.filterwarnings("ignore")


def alone(**options: Any) -> dict[str, Any]:
    with launched(0, 1):
        return run(**options)


@cache
def plain() -> dict[str, Any]:
    return alone()


def assert_equal(found: dict[str, Any], rows: Any) -> None:
    assert [number for row in found["rows"] for number in row] == pytest.approx(
        [number for row in rows for number in row], abs=1e-9
    )
    assert found["outputs"] == [pytest.approx(row, abs=1e-9) for row in plain()["outputs"]]
    assert found["total"] == 1.0


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
def test_in_one_process(schedule: str, tmp_path: Path) -> None:
    assert_equal(alone(save=tmp_path / "state", schedule=schedule, ranks=2), plain()["rows"])
    (file,) = export(tmp_path / "state/penstock", tmp_path / "weights")
    assert load_file(file).keys() == make().state_dict().keys()
    assert_equal(alone(load=tmp_path / "state", schedule="1F1B", ranks=3), plain()["rows"][4:])


def run_and_resume(group: Any, folder: str) -> list[dict[str, Any]]:
    options: dict[str, Any] = {"schedule": "ZB-V", "ranks": 4}
    with launched(group.rank(), 4):
        whole = run(save=Path(folder) / "two", **options)
        return [whole, run(load=Path(folder) / "one", **options)]


@pytest.mark.slow
def test_between_processes(workers: WorkerPool, tmp_path: Path) -> None:
    alone(save=tmp_path / "one", schedule="1F1B", ranks=3)
    task = f"{__name__}:run_and_resume"
    for whole, resumed in workers.run(task, 4, 60.0, folder=str(tmp_path)):
        assert_equal(whole, plain()["rows"])
        assert_equal(resumed, plain()["rows"][4:])
    assert_equal(alone(load=tmp_path / "two", schedule="1F1B", ranks=2), plain()["rows"][4:])


def count(group: Any) -> dict[str, Any]:
    """What a rank of two pipelines of two ranks sees of a step with other numbers in each pipeline."""
    with launched(group.rank(), 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        replica = mesh.get_local_rank("dp")
        loss_fn = nn.functional.cross_entropy
        pipe = Pipeline(make(), mesh=mesh, replicas="dp", microbatches=2, loss_fn=loss_fn)
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


def test_two_pipelines_of_two_ranks_count_as_two_processes(workers: WorkerPool) -> None:
    """A scheduler steps for each, and what is gathered or added up has each pipeline's numbers once."""
    objects = ["of 0", "of 1"]
    expected = {"rate": 0.25, "gathered": [0, 10, 1, 11], "objects": objects, "sum": 3, "mean": 1.5}
    assert workers.run(f"{__name__}:count", 4, 60.0) == [expected] * 4


def tied() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    model[2].weight = model[0].weight
    return model


def test_a_tied_weight_is_saved_once_and_the_plain_loop_runs(tmp_path: Path) -> None:
    """Without loss_fn= the loop computes the loss, as the plain one does."""
    x, target = data().tensors
    losses: list[list[float]] = []
    for cut in (False, True):
        model: Any = tied()
        accelerator: Any = Accelerator(cpu=True)
        if cut:
            pipe = Pipeline(model, ranks=2, microbatches=4)
            accelerator, model = PipelineAccelerator(pipe, cpu=True), PipelineModule(pipe)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = accelerator.prepare(model, optimizer)
        losses.append([])
        for _ in range(3):
            loss = nn.functional.cross_entropy(model(x), target, weight=torch.arange(1.0, 4.0))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    accelerator.save_state(tmp_path / "state")
    # Each process writes its part; a tied weight is saved once, and exported for others.
    (file,) = export(tmp_path / "state/penstock", tmp_path / "weights")
    assert sorted(load_file(file)) == ["0.bias", "0.weight", "2.bias", "4.bias", "4.weight"]
    assert not list((tmp_path / "state").glob("model*"))
    with torch.no_grad():
        model.get_parameter("0.weight").zero_()
    accelerator.load_state(tmp_path / "state")
    assert model.get_parameter("0.weight").any()
    Accelerator(cpu=True).save_state(tmp_path / "plain")
    with pytest.raises(UsageError, match="no folder 'penstock' with a checkpoint"):
        accelerator.load_state(tmp_path / "plain")


def test_the_newest_complete_state_is_loaded(tmp_path: Path) -> None:
    """What a kill has left is put aside, so that its number can be used again."""
    named = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    states = tmp_path / "checkpoints"

    def made() -> tuple[Any, Any]:
        pipe = Pipeline(make(), ranks=2, loss_fn=nn.functional.cross_entropy)
        accelerator: Any = PipelineAccelerator(pipe, cpu=True, project_config=named)
        return accelerator, accelerator.prepare(PipelineModule(pipe))

    accelerator, model = made()
    assert not accelerator.load_state("auto")
    for value in (1.0, 2.0):
        with torch.no_grad():
            model.get_parameter("0.0.weight").fill_(value)
        accelerator.save_state()
    (states / "checkpoint_10").mkdir()
    accelerator, model = made()
    assert accelerator.load_state("auto")
    assert (model.get_parameter("0.0.weight") == 2.0).all()
    names = sorted(path.name for path in states.iterdir())
    assert names == ["checkpoint_0", "checkpoint_1", "incomplete_10"]


@pytest.mark.parametrize("option", [{"dispatch_batches": True}, {"even_batches": False}])
def test_replicas_that_would_share_batches_or_wait_are_refused(option: Any) -> None:
    several = SimpleNamespace(
        replicas=SimpleNamespace(number=2),
        job=SimpleNamespace(ranks=2),
        device=torch.device("cpu"),
    )
    accelerator: Any = SimpleNamespace(
        state=SimpleNamespace(), dataloader_config=DataLoaderConfiguration(**option)
    )
    with pytest.raises(UsageError, match=next(iter(option))):
        share_batches(accelerator, cast("Any", several))


def accelerated() -> tuple[Any, Any]:
    pipe = Pipeline(make(), ranks=2, loss_fn=nn.functional.cross_entropy)
    return PipelineAccelerator(pipe, cpu=True), PipelineModule(pipe)


def test_only_the_module_of_the_pipeline_is_prepared() -> None:
    with pytest.raises(UsageError, match=r"given a Sequential; give it PipelineModule\(pipe\)"):
        accelerated()[0].prepare(make())


def test_clipping_a_part_is_refused() -> None:
    accelerator, model = accelerated()
    accelerator.backward(model(torch.ones(4, 8), target=torch.zeros(4, dtype=torch.int64)))
    with pytest.raises(UsageError, match=r"0\.0\.weight has a gradient.*whole model"):
        accelerator.clip_grad_norm_(list(model.parameters())[2:], 1.0)
