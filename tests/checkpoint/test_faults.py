"""What goes wrong is named in time, and changes nothing: locks, failures at the end, tables of any kind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import nn

from penstock import Checkpoints
from penstock.checkpoint import describe
from penstock.errors import CheckpointError, InputFileError, UsageError
from tests.checkpoint.campaign import GRACE, disk, flips, kills, rewrite_table, tables


def linear(**options: Any) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(3, 2, **options)


# ---- one run writes into a folder


def try_to_save(folder: Path) -> str:
    """What another process is told that saves there; empty if it may."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            with Checkpoints(folder) as checkpoints:
                checkpoints.save(9, model=linear())
            text = ""
        except (UsageError, CheckpointError) as error:
            text = str(error)
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(child, 0)
    return text


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.checkpoint.folder.PATIENCE", 0.0)


def read_lock(folder: Path, _: Checkpoints) -> None:
    (folder / ".lock").read_text()


def load_beside(folder: Path, _: Checkpoints) -> None:
    with Checkpoints(folder) as other:
        other.load(model=linear())


def save_beside_and_close(folder: Path, _: Checkpoints) -> None:
    with Checkpoints(folder) as other:
        other.save(2, model=linear())


def fork_and_end(folder: Path, checkpoints: Checkpoints) -> None:
    child = os.fork()
    if not child:
        checkpoints.close()
        os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "act", [read_lock, load_beside, save_beside_and_close, fork_and_end], ids=lambda a: a.__name__
)
def test_a_lock_is_kept(tmp_path: Path, act: Callable[[Path, Checkpoints], None]) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, model=linear())
    act(tmp_path, checkpoints)
    assert f"another run writes its checkpoints here (process {os.getpid()} on" in try_to_save(
        tmp_path
    )
    checkpoints.close()
    assert try_to_save(tmp_path) == ""


@pytest.mark.usefixtures("impatient")
def test_a_killed_run_leaves_no_lock_even_if_its_children_live(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    run = os.fork()
    if not run:
        Checkpoints(tmp_path).save(7, model=linear())
        if not os.fork():
            time.sleep(30)
            os._exit(0)
        os.write(writing, b"saved")
        signal.pause()
    assert os.read(reading, 5) == b"saved"
    assert f"(process {run} on" in try_to_save(tmp_path)
    os.kill(run, signal.SIGKILL)
    os.waitpid(run, 0)
    (tmp_path / ".writing-9-abc").mkdir()
    assert try_to_save(tmp_path) == ""
    assert list(tmp_path.glob(".writing*")) == []


@pytest.mark.usefixtures("impatient")
def test_a_lock_that_is_a_link_or_a_pipe_is_refused(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    plants: list[Callable[[Path], None]] = [
        lambda lock: lock.symlink_to(precious),
        lambda lock: os.link(precious, lock),
        os.mkfifo,
    ]
    for number, plant in enumerate(plants):
        folder = tmp_path / str(number)
        folder.mkdir()
        plant(folder / ".lock")
        with pytest.raises(CheckpointError, match=r"\.lock|cannot be written"):
            Checkpoints(folder).save(1, model=linear())
    assert precious.read_text() == "mine"


@pytest.mark.usefixtures("impatient")
def test_a_lock_whose_file_was_replaced_is_taken_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, model=linear())
    (tmp_path / ".lock").unlink()
    checkpoints.save(2, model=linear())
    assert "another run writes" in try_to_save(tmp_path)


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/run cannot be written to"):
        Checkpoints(tmp_path / "file" / "run").save(1, model=linear())


# ---- what fails beside the training


def fail_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)


@pytest.mark.parametrize("call", ["save", "load", "wait", "close"])
def test_a_failure_beside_the_training_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    model = linear()
    checkpoints = Checkpoints(tmp_path, asynchronous=True)
    with monkeypatch.context() as patched:
        fail_to_write(patched)
        checkpoints.save(1, model=model)
        arguments: dict[str, Any] = {"save": {"step": 2, "model": model}, "load": {"model": model}}
        with pytest.raises(CheckpointError, match="No space left on device"):
            getattr(checkpoints, call)(**arguments.get(call, {}))
    checkpoints.close()
    assert list(tmp_path.glob("[!.]*")) == []


PROGRAM = """
import os, sys, time, torch
from penstock import Checkpoints
checkpoints = Checkpoints(sys.argv[1], asynchronous=True)
model = torch.nn.Linear({width}, {width})
fsync = os.fsync
def fault(handle):
    {fault}
os.fsync = fault
checkpoints.save(1, model=model)
{end}
"""


def run_to_end(folder: Path, fault: str, end: str = "", width: int = 3) -> tuple[int, str]:
    """Run a program that saves beside its training and ends: its status and its words."""
    program = PROGRAM.format(fault=fault, end=end, width=width)
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stderr


def test_a_failure_that_no_call_raises_is_the_status_of_the_process(tmp_path: Path) -> None:
    status, text = run_to_end(tmp_path, 'raise OSError(28, "No space left on device")')
    assert status == 70
    assert "the checkpoint of step 1 was lost: " in text
    assert "No space left on device" in text


def test_a_process_that_ends_completes_what_it_writes(tmp_path: Path) -> None:
    status, text = run_to_end(tmp_path, "time.sleep(0.5); fsync(handle)")
    assert (status, text) == (0, "")
    assert Checkpoints(tmp_path).steps() == [1]


@pytest.mark.parametrize(
    "end", ["", pytest.param("raise RuntimeError('of its own')", marks=pytest.mark.nightly)]
)
def test_a_disk_that_hangs_keeps_no_ending_process_for_long(tmp_path: Path, end: str) -> None:
    status, text = run_to_end(tmp_path, "time.sleep(1000)", end)
    assert status == (1 if end else 70)
    assert "the checkpoint of step 1 was lost: it was not complete" in text


# ---- tables of any kind


def saved(folder: Path) -> Path:
    """A checkpoint's table."""
    path = Checkpoints(folder).save(1, model=linear()).path
    assert path is not None
    return path / "checkpoint.json"


def huge(path: Path) -> None:
    path.unlink()
    with path.open("wb") as file:
        file.truncate(257_000_000)


def pipe_instead(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device_instead(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def deep(path: Path) -> None:
    value: Any = 1
    for _ in range(150):
        value = [value]
    rewrite_table(path.parent, lambda table: table | {"extra": value})


def deeper_than_json(path: Path) -> None:
    rewrite_table(path.parent, lambda table: table | {"extra": "DEEP"})
    content = path.read_bytes().replace(b'"DEEP"', b"[" * 100_000 + b"]" * 100_000)
    start = content.index(b'"format": ') + len(b'"format": ')
    path.write_bytes(b'{"crc32": %d, "format": ' % crc32(content[start:]) + content[start:])


def changed(**fields: Any) -> Callable[[Path], None]:
    return lambda path: rewrite_table(path.parent, lambda table: table | fields)


ODD_TABLES: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (pipe_instead, "not a regular file"),
    "device": (device_instead, "not a regular file"),
    "huge": (huge, "more than 256,000,000 bytes"),
    "deep": (deep, "deeper than 100"),
    "very deep": (deeper_than_json, "is not JSON"),
    "wrong type": (changed(tensors=[1]), "tensors"),
    "unknown field": (changed(more=1), "more"),
    "no number": (changed(layout={"replicas": "1", "processes": 1}), "layout/replicas"),
    "outside": (
        changed(files={"../x": {"bytes": 1, "crc32": 1}}, tensors={}),
        "outside of its folder",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ODD_TABLES)
def test_an_odd_table_is_one_error_and_changes_nothing(tmp_path: Path, name: str) -> None:
    spoil, text = ODD_TABLES[name]
    spoil(saved(tmp_path))
    model = linear()
    with torch.no_grad():
        model.weight.fill_(5)
    with pytest.raises(InputFileError) as raised:
        Checkpoints(tmp_path).load(model=model)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)
    assert bool((model.weight == 5).all())
    assert "DAMAGED" in describe(tmp_path)


def test_crafted_tables_with_right_checksums() -> None:
    found = tables(40)
    assert found["problems"] == []
    assert found["outcomes"]["InputFileError"] > 20


def test_bytes_that_were_flipped() -> None:
    assert flips(10) == {"damaged": 10, "named": 10, "the one before was taken": 10}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [4, pytest.param(12, marks=pytest.mark.nightly)])
def test_ranks_and_launchers_that_are_killed(count: int) -> None:
    found = kills(count)
    assert found["problems"] == []
    assert found["longest end in seconds"] < GRACE


def test_a_disk_that_is_full() -> None:
    found = disk()
    if found == {"tried": False}:
        pytest.skip("this process may not mount a disk")
    assert "No space left" in found.pop("error")
    assert found == {"loaded": True, "left over": 0, "damaged": False}


# ---- casts where not all must fit


def test_states_are_cast_with_their_weights(tmp_path: Path, caplog: Any) -> None:
    """What is kept in the weight's type is cast with it; what is kept in another type stays."""
    model = linear(dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.state[model.weight]["exp_avg_sq"] = optimizer.state[model.weight][
        "exp_avg_sq"
    ].double()
    Checkpoints(tmp_path).save(1, model=model, optimizer=optimizer)
    other = linear()
    resumed = torch.optim.AdamW(other.parameters())
    with caplog.at_level(logging.WARNING):
        assert Checkpoints(tmp_path).load(strict=False, model=other, optimizer=resumed) == 1
    assert "of another type: model/weight: torch.bfloat16 was saved" in caplog.text
    state = resumed.state[other.weight]
    assert other.weight.dtype is state["exp_avg"].dtype is torch.float32
    assert state["exp_avg_sq"].dtype is torch.float64
    assert torch.equal(state["exp_avg"].bfloat16(), optimizer.state[model.weight]["exp_avg"])
