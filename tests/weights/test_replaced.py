"""A folder of weights is replaced as a whole, has one writer, and says when a file system fails."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock import Checkpoints, Pipeline, read_weights
from penstock._engine.weights import files, lease
from penstock.checkpoint import export
from penstock.errors import CheckpointError, StorageError, UsageError
from tests.checkpoint.runs import linear
from tests.checkpoint.test_kills import kill_at
from tests.processes import Job, in_child


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEWAL", 0.05)
    monkeypatch.setattr(lease, "PATIENCE", 0.5)
    monkeypatch.setattr("penstock._engine.weights.storage.PATIENCE", 0.2)


def pipe_at(number: int) -> Pipeline:
    torch.manual_seed(number)
    return Pipeline(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), ranks=2)


def values(folder: Path) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in read_weights(folder).items()}


@pytest.mark.usefixtures("quick")
def test_a_save_that_is_killed_leaves_the_old_weights_or_the_new(tmp_path: Path) -> None:
    expected = [values_of(pipe_at(number)) for number in range(50)]
    pipe_at(0).weights.save(tmp_path)
    loaded, number = set(), 0
    status: int | None = -1
    while status:
        number += 1

        def save(number: int = number) -> None:
            pipe = pipe_at(number)
            kill_at(4 * number)
            pipe.weights.save(tmp_path)

        status = in_child(save).status
        assert status in (0, -signal.SIGKILL)
        there = expected.index(values(tmp_path))
        loaded.add(there)
        assert there <= number
    assert number > 8
    assert number in loaded
    # What the killed ones have left is gone with the next one.
    assert len([*tmp_path.iterdir()]) == 3


def values_of(pipe: Pipeline) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in pipe.weights.state_dict().items()}


@pytest.mark.usefixtures("quick")
def test_an_export_that_is_killed_leaves_nothing_or_all(tmp_path: Path) -> None:
    model, out = nn.Sequential(linear(), nn.Linear(2, 2)), tmp_path / "out"
    Checkpoints(tmp_path / "run").save(1, model=model)
    kills = 0

    def write() -> None:
        kill_at(5 * kills + 1)
        export(tmp_path / "run", out)

    while in_child(write).status:
        kills += 1
        assert not (out / "model.safetensors.index.json").exists() or len(values(out)) == 4
        if (out / "model.safetensors.index.json").exists():
            (out / "model.safetensors.index.json").unlink()
    assert kills > 4
    assert values(out) == {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def test_what_lies_beside_the_weights_may_lie_in_folders(tmp_path: Path) -> None:
    class Processor:
        def save_pretrained(self, folder: str) -> None:
            Path(folder, "parts").mkdir()
            Path(folder, "parts", "one.json").write_text("{}")

    pipe_at(0).weights.save(tmp_path, Processor())
    assert (tmp_path / "parts" / "one.json").read_text() == "{}"


# ---- one writer


def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS without its lock daemon, where names cannot be exchanged either."""

    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    # Its place differs from version to version.
    parts = [module for name, module in sys.modules.items() if name.startswith("filelock")]
    exchanging = [module for module in parts if "_rename_call" in vars(module)]
    assert exchanging
    for module in exchanging:
        monkeypatch.setattr(module, "_rename_call", lambda: None)


def other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks stay on each host, and the clocks of the others are an hour off."""
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    monkeypatch.setattr(socket, "gethostname", lambda: f"host{os.getpid()}")
    clock, utime, here = time.time, os.utime, os.getpid()

    def shifted() -> float:
        return clock() + (os.getpid() != here) * 3600

    monkeypatch.setattr(time, "time", shifted)
    monkeypatch.setattr(os, "utime", lambda file, times=None, **_: utime(file, (shifted(),) * 2))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("fault", [no_locks, other_host], ids=lambda fault: fault.__name__)
def test_two_runs_where_locks_do_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any], None]
) -> None:
    fault(monkeypatch)

    def refused() -> None:
        with pytest.raises(UsageError, match=f"another run writes here .process {os.getppid()} on"):
            Checkpoints(tmp_path, keep=1).save(2, model=linear())

    def killed() -> None:
        Checkpoints(tmp_path / "killed").save(1, model=linear())
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patient:
        # A living owner may be slow to show it; the other one waits no longer than it has to.
        patient.setattr(lease, "PATIENCE", 60.0)
        checkpoints = Checkpoints(tmp_path, keep=1)
        checkpoints.save(1, model=linear())
        assert in_child(refused).status == 0
        checkpoints.save(3, model=linear())
        assert checkpoints.steps() == [3]
    # One that was killed gives way, once it has been silent for long enough.
    assert in_child(killed).status == -signal.SIGKILL
    Checkpoints(tmp_path / "killed").save(2, model=linear())
    assert Checkpoints(tmp_path / "killed").steps() == [2, 1]


@pytest.mark.usefixtures("quick")
def test_a_run_whose_folder_was_taken_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was silent for so long, as a machine is that was stopped, that another run has begun to save."""

    waiting, going = os.pipe()

    def take() -> None:
        os.read(waiting, 1)
        (tmp_path / ".lock").unlink()
        taken = Checkpoints(tmp_path)
        taken.save(2, model=linear())
        sys.stdout.write("saved\n")
        signal.pause()

    def write_late(*args: Any) -> Any:
        os.write(going, b"!")
        other.until(lambda: other.ended[0].out)
        return write(*args)

    with Job(take, here=True) as other:
        write, checkpoints = files.write_file, Checkpoints(tmp_path, keep=1)
        checkpoints.save(1, model=linear())
        monkeypatch.setattr("penstock.checkpoint.saving.write_file", write_late)
        says = f"another run writes here .process {other.pids[0]} on"
        with pytest.raises(UsageError, match=says):
            checkpoints.save(3, model=linear())
    assert Checkpoints(tmp_path).steps() == [2, 1]


def test_a_run_that_loses_its_folder_while_it_writes_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, checkpoints = files.write_file, Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, model=linear())

    def write_and_lose(*args: Any) -> Any:
        written = write(*args)
        (tmp_path / ".lock").unlink()
        return written

    monkeypatch.setattr("penstock.checkpoint.saving.write_file", write_and_lose)
    with pytest.raises(UsageError, match=r"another run writes here .its \.lock is gone"):
        checkpoints.save(3, model=linear())
    assert Checkpoints(tmp_path).steps() == [1]


# ---- file systems that fail


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("what", "number"),
    [
        ("open", errno.EMFILE),
        ("fsync", errno.EIO),
        ("replace", errno.ESTALE),
        ("scandir", errno.ESTALE),
        ("mkdir", errno.EIO),
    ],
)
def test_an_error_of_a_file_system_is_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, number: int
) -> None:
    """Once, it is tried again; for good, it is told, nothing older is taken, and nothing is lost."""
    real, left = getattr(os, what), [0]

    def failing(*args: Any, **options: Any) -> Any:
        ours = what == "fsync" or str(tmp_path) in str(args[0])
        if ours and left[0] and ".lock" not in str(args[0]):
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return real(*args, **options)

    monkeypatch.setattr(os, what, failing)
    run, weights = tmp_path / "run", tmp_path / "weights"
    checkpoints, model, pipe = Checkpoints(run, keep=2), linear(), pipe_at(1)
    for step in (1, 2):
        checkpoints.save(step, model=model)
    pipe.weights.save(weights)
    before = values(weights)
    calls: list[Callable[[], object]] = [
        lambda: checkpoints.save(3, model=model),
        lambda: Checkpoints(run).load(model=model, resume="auto"),
        lambda: pipe_at(2).weights.save(weights),
        lambda: pipe.weights.load(weights),
    ]
    for call in calls:
        left[0] = 1
        call()
    errors = []
    for call in calls:
        left[0] = 1 << 30
        try:
            call()
        except StorageError as error:
            errors.append(f"{error} {error.errno}")
        left[0] = 0
    assert errors
    for text in errors:
        assert {str(number), errno.errorcode[number], "on the host"} <= {
            *re.findall(r"[0-9]+|E[A-Z]+|on the host", text)
        }
    assert Checkpoints(run).load(model=model) == 3
    assert checkpoints.steps() == [3, 2]
    pipe.weights.load(weights)
    assert values(weights) != before


@pytest.mark.usefixtures("quick")
def test_a_disk_that_fails_once_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a file or a folder has got its name."""
    fsync, left = os.fsync, [0]

    def failing(handle: int) -> None:
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", failing)
    checkpoints, pipe = Checkpoints(tmp_path / "run", keep=1), pipe_at(1)
    for moment in range(1, 8):
        left[0] = moment
        checkpoints.save(moment, model=linear())
        left[0] = moment
        pipe.weights.save(tmp_path / "weights")
    assert checkpoints.load(model=linear()) == 7
    assert values(tmp_path / "weights") == values_of(pipe)


@pytest.mark.usefixtures("quick")
def test_a_file_that_is_missing_is_told_and_nothing_older_is_taken(tmp_path: Path) -> None:
    """As on a host that does not see the files of others."""
    checkpoints, model = Checkpoints(tmp_path), linear()
    for step in (1, 2):
        checkpoints.save(step, model=model)
    (tmp_path / "step-00000002" / "states-00001.safetensors").unlink()
    with pytest.raises(StorageError, match=r"states-00001.safetensors cannot be read .*ENOENT"):
        checkpoints.load(model=model, resume="auto")
    assert checkpoints.load(1, model=model) == 1


def test_a_table_that_could_not_be_read_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, model=linear())
    deep: Any = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(CheckpointError, match=r"could not be read: .*deeper than 100"):
        checkpoints.save(2, model=linear(), extra=deep)
    monkeypatch.setattr("penstock.checkpoint.table.LONGEST_JSON", 100)
    with pytest.raises(CheckpointError, match="100 are the most that can be read"):
        checkpoints.save(2, model=linear())
    monkeypatch.undo()
    assert checkpoints.steps() == [1]
    assert checkpoints.load(model=linear()) == 1
