"""Pipelines with replicas, whose states are whole on each or sharded over them: two by two processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from penstock import Checkpoints, Pipeline, PipelineStage
from penstock.checkpoint import describe
from penstock.errors import PenstockError
from penstock.plan.meter import Meter
from penstock.testing import WorkerPool
from tests.checkpoint.runs import AFTER, BEFORE, Keeps, Run, linear, resumed, saved, stepped
from tests.parallel.bodies import mesh_of
from tests.processes import in_processes

LIMIT = 2e-6


def trained(group: Any, folder: str, how: str, plain: str) -> list[Any]:
    """A worker's task: save, go on, and resume from one's own and from the unsplit model's checkpoint."""
    run = Run("1F1B", 2, how=how)
    assert run.pipe is not None
    replica = run.pipe.replicas.index
    run.train(BEFORE)
    checkpoints = Checkpoints(folder)
    state = {f"loader{replica}": Keeps(torch.arange(replica, 5))}
    checkpoints.save(BEFORE, **state, **run.states)
    after = run.train(AFTER)
    resumed_ones = []
    for source in (folder, plain):
        other, loader = Run("1F1B", 2, how=how), Keeps(replica)
        states = other.states | ({f"loader{replica}": loader} if source == folder else {})
        other.step = Checkpoints(source).load(**states) or 0
        if source == folder:
            assert torch.equal(loader.state, torch.arange(replica, 5))
        resumed_ones.append(other.train(AFTER))
        other.close()
    run.close()
    checkpoints.close()
    return [after, *resumed_ones]


@pytest.mark.parametrize("how", [pytest.param("replicas", marks=pytest.mark.nightly), "fsdp"])
def test_two_by_two_and_back(workers: WorkerPool, tmp_path: Path, how: str) -> None:
    plain, folder = tmp_path / "plain", tmp_path / "mesh"
    expected = saved(plain, "plain", 1)
    answers = workers.run(f"{__name__}:trained", 4, folder=str(folder), how=how, plain=str(plain))
    for after, again, from_plain in answers:
        assert after == pytest.approx(expected, abs=LIMIT)
        assert again == after
        assert from_plain == pytest.approx(expected, abs=LIMIT)
    # All four have written their part, about equally much.
    sizes = [path.stat().st_size for path in folder.glob("step-*/states-*")]
    assert len(sizes) == 4
    assert max(sizes) < 2 * min(sizes)
    assert "in 2 replicas, 1F1B, 2 stages on 2 ranks" in describe(folder)
    # Any other layout goes on from it.
    assert resumed(folder, "plain", 1) == pytest.approx(expected, abs=LIMIT)
    assert resumed(folder, "ZB-V", 4) == pytest.approx(expected, abs=LIMIT)


@in_processes(4)
def test_only_who_writes_holds_the_weights_of_a_sharded_stage(group: Any, tmp_path: Path) -> None:
    """Four weights of 16 KiB a stage, of which each process has a half."""
    mesh = mesh_of("dp", "pp")
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])

    def wrap(module: nn.Module, stage: int) -> None:
        fully_shard(module, mesh=mesh["dp"])

    with Pipeline(model, ranks=2, mesh=mesh, wrap=wrap) as pipe:
        pipe.cut(torch.zeros(2, 64))
        with pytest.MonkeyPatch.context() as patch, Meter() as meter:
            # A model that communicates is not measured so, but a save may be.
            patch.setattr("penstock.plan.meter.COLLECTIVES", ())
            pipe.weights.save(tmp_path)
        assert mesh.get_local_rank("dp") == 0 or meter.peak < 3 * 2**14


class Differs(Keeps):
    """Fails on one rank alone, or has another state there."""

    def state_dict(self) -> Any:
        rank, fails = self.state
        if fails and rank == 1:
            raise OSError("lost its place")
        return rank


class AnotherAdamW(torch.optim.AdamW):
    """An optimizer of another class that keeps the same."""


def outcome(call: Callable[..., object], *args: Any, **states: Any) -> str:
    """The error of a call; empty if there is none."""
    try:
        call(*args, **states)
    except (PenstockError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def parted(group: Any, folder: str) -> list[str]:
    """A worker's task: what one rank fails at, or has another state or class of; then it saves."""
    mesh = DeviceMesh.from_group(group, "cpu")
    module, rank = nn.Module(), mesh.get_rank()
    module.weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    checkpoints, model = Checkpoints(folder, group=group), linear()
    optimizer, other = stepped(model), stepped(model)
    other.__class__ = AnotherAdamW if rank else torch.optim.AdamW
    cases: list[dict[str, Any]] = [
        {"model": module, "keeps": Differs([rank, True])},
        {"model": module, "keeps": Differs([rank, False])},
        {"model": model, "optimizer": other},
        {"model": module, "keeps": Keeps(2)},
        {"model": model, "optimizer": optimizer},
    ]
    return [outcome(checkpoints.save, step, **case) for step, case in enumerate(cases)]


def test_a_failure_on_one_rank_is_an_error_on_all(workers: WorkerPool, tmp_path: Path) -> None:
    first, second = workers.run(f"{__name__}:parted", 2, folder=str(tmp_path))
    assert (first[0], second[0]) == (
        "CheckpointError: rank 1 cannot save: lost its place",
        "OSError: lost its place",
    )
    assert first[1:] == second[1:]
    assert "keeps= has another state on rank 1 than on rank 0; give what differs" in first[1]
    assert "optimizer= is of the classes AdamW, AnotherAdamW on different ranks" in first[2]
    # What is saved after it is whole.
    assert first[3:] == ["", ""]
    whole, model = nn.Module(), linear()
    whole.weight = nn.Parameter(torch.zeros(4, 2))
    optimizer = stepped(model, steps=0)
    assert Checkpoints(tmp_path).load(3, model=whole) == 3
    assert torch.equal(whole.weight, torch.ones(4, 2))
    assert Checkpoints(tmp_path).load(model=model, optimizer=optimizer) == 4
    assert all(state["step"] == 2 for state in optimizer.state.values())
    assert list(tmp_path.glob(".writing*")) == []


@in_processes(2)
def test_a_failure_beside_the_training_is_an_error_on_all(group: Any, tmp_path: Path) -> None:
    """One rank's disk is full while the training goes on; then it is not any more."""
    run, fsync, outcomes = Run("1F1B", 2, group), os.fsync, []

    def full(handle: Any) -> None:
        raise OSError(28, "No space left on device")

    with Checkpoints(tmp_path, asynchronous=True) as checkpoints:
        for step in range(1, 4):
            os.fsync = cast("Any", full if step == 2 and group.rank() == 1 else fsync)
            run.train(1)
            checkpoints.save(step, **run.states)
            outcomes.append(outcome(checkpoints.wait))
            os.fsync = fsync
    run.close()
    first, failed, last = outcomes
    assert (first, last) == ("", "")
    assert "No space left on device" in failed
    assert group.rank() == 1 or "rank 1 cannot save: " in failed
    assert {*os.listdir(tmp_path)} == {"step-00000001", "step-00000003"}


@in_processes(2)
def test_a_rank_that_writes_slowly_beside_the_training_is_not_silent(
    group: Any, tmp_path: Path
) -> None:
    """All wait while it writes for longer than a rank may make no progress."""
    model, fsync = nn.Sequential(linear(), nn.Linear(2, 2)), os.fsync

    def slowly(handle: Any) -> None:
        time.sleep(1.3)
        fsync(handle)

    with (
        pytest.MonkeyPatch.context() as patch,
        Checkpoints(tmp_path, asynchronous=True) as checkpoints,
        Pipeline(model, ranks=2, mesh=group, timeout=1.0) as pipe,
    ):
        pipe.cut(torch.ones(2, 3))
        if pipe.rank == 1:
            patch.setattr(os, "fsync", slowly)
        checkpoints.save(1, pipe=pipe)
        checkpoints.wait()
    assert Checkpoints(tmp_path).steps() == [1]


def on_one_alone(group: Any, folder: str) -> str:
    """A worker's task: the leading rank saves, the other one goes on."""
    run = Run("1F1B", 2, group)
    assert run.pipe is not None
    run.train(1)
    text = outcome(run.save, Path(folder)) if run.pipe.is_main_process else outcome(run.train, 1)
    run.close()
    return text


def test_a_call_on_one_rank_alone(workers: WorkerPool, tmp_path: Path) -> None:
    first, second = workers.run(f"{__name__}:on_one_alone", 2, folder=str(tmp_path))
    # Whichever of the two sees it first names it; the other one may have heard of that by then.
    assert "called on one rank only" in first or "rank 0 stopped because rank 1" in first
    parts = "the ranks called different collective methods", "rank 1 stopped because rank 0"
    assert any(part in second for part in parts), second
    assert list(tmp_path.glob("[!.]*")) == []


@in_processes(2)
def test_different_weights_of_one_name_on_two_ranks(group: Any, tmp_path: Path) -> None:
    """Of stages that call their weights alike, which are not the same ones."""
    stage = PipelineStage(nn.Sequential(nn.Linear(3, 3)), group.rank(), 2)
    with Pipeline.from_stages([stage], schedule="GPipe", mesh=group) as pipe:
        torch.manual_seed(0)
        with Checkpoints(tmp_path / "one", group=group) as checkpoints:
            checkpoints.save(1, model=nn.Sequential(nn.Linear(3, 3)))
        optimizer = torch.optim.SGD(pipe.parameters())
        for call in (
            lambda: Checkpoints(tmp_path / "two").save(1, pipe=pipe),
            lambda: Checkpoints(tmp_path / "one").load(pipe=pipe),
            lambda: pipe.weights.optimizer_state_dict(optimizer, full=True),
        ):
            with pytest.raises(PenstockError, match=r"several stages have weights named 0\."):
                call()
