"""What goes wrong is named in time, and changes nothing: locks, failures at the end, tables of any kind."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import pytest
import torch

from campaigns.kills import flips, rewrite_table
from penstock import Checkpoints
from penstock.checkpoint import describe
from penstock.errors import CheckpointError, InputFileError, StateDictError, UsageError
from tests.checkpoint.runs import Keeps, linear, stepped
from tests.processes import Job, in_child, run_program

# ---- one run writes into a folder


def try_to_save(folder: Path) -> str:
    """What another process is told that saves there; empty if it may."""

    def save() -> None:
        try:
            with Checkpoints(folder) as checkpoints:
                checkpoints.save(9, model=linear())
        except (UsageError, CheckpointError) as error:
            sys.stdout.write(str(error))

    ended = in_child(save)
    assert ended.status == 0, ended
    return ended.out


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock._engine.weights.lease.RENEWAL", 0.05)
    monkeypatch.setattr("penstock._engine.weights.lease.PATIENCE", 0.5)


ACTS: dict[str, Callable[[Path, Checkpoints], object]] = {
    "read the lock": lambda folder, _: (folder / ".lock").read_text(),
    "load beside": lambda folder, _: load_beside(folder),
    "save beside and close": lambda folder, _: save_beside(folder),
    "fork and end": lambda _, checkpoints: in_child(checkpoints.close),
    "replace and save": lambda folder, checkpoints: replace_and_save(folder, checkpoints),
}


def replace_and_save(folder: Path, checkpoints: Checkpoints) -> None:
    (folder / ".lock").unlink()
    checkpoints.save(2, model=linear())


def load_beside(folder: Path) -> None:
    with Checkpoints(folder) as other:
        other.load(model=linear())


def save_beside(folder: Path) -> None:
    with Checkpoints(folder) as other:
        other.save(2, model=linear())


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("act", ACTS)
def test_a_lock_is_kept(tmp_path: Path, act: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, model=linear())
    ACTS[act](tmp_path, checkpoints)
    text = f"another run writes here (process {os.getpid()} on"
    assert text in try_to_save(tmp_path)
    checkpoints.close()
    assert try_to_save(tmp_path) == ""


def test_a_load_removes_what_a_run_left_that_was_killed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    folder = tmp_path / "run"

    def killed() -> None:
        checkpoints = Checkpoints(folder)
        checkpoints.save(7, model=linear())
        (folder / ".writing-9-abc").mkdir()
        (folder / ".removing-step-1").symlink_to(elsewhere)
        (folder / ".shared-abc").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(killed).status == -signal.SIGKILL
    assert (folder / ".lock").exists()
    assert Checkpoints(folder).load(model=linear()) == 7
    assert [path.name for path in folder.iterdir()] == ["step-00000007"]
    assert (elsewhere / "file").exists()
    # Of a run that lives, nothing is removed.
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(8, model=linear())
        (folder / ".writing-9-abc").mkdir()
        assert in_child(partial(load_beside, folder)).status == 0
        assert (folder / ".writing-9-abc").exists()


@pytest.mark.usefixtures("impatient")
def test_a_killed_run_leaves_no_lock_even_if_its_children_live(tmp_path: Path) -> None:

    def run() -> None:
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(7, model=linear())
        # Both live until the test ends, or this one is killed.
        if child := os.fork():
            sys.stdout.write(f"{child}\n")
        signal.pause()

    with Job(run, here=True) as job:
        job.until(lambda: job.ended[0].out)
        held = try_to_save(tmp_path)
        os.kill(job.pids[0], signal.SIGKILL)
        job.wait()
        (tmp_path / ".writing-9-abc").mkdir()
        free = try_to_save(tmp_path)
        os.kill(int(job.ended[0].out), 0)
    assert f"(process {job.pids[0]} on" in held
    assert free == ""
    assert list(tmp_path.glob(".writing*")) == []


@pytest.mark.usefixtures("impatient")
def test_a_lock_that_is_a_link_or_a_pipe_is_replaced(tmp_path: Path) -> None:
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
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(1, model=linear())
            assert "host=" in (folder / ".lock").read_text()
    assert precious.read_text() == "mine"
    with pytest.raises(CheckpointError, match=r"precious/run cannot be made on the host .*ENOTDIR"):
        Checkpoints(precious / "run").save(1, model=linear())


# ---- a disk that is full


def disk_that_is_full_at(monkeypatch: pytest.MonkeyPatch, moment: int) -> list[int]:
    """From the moment at which it was waited for so often; returns how often until then."""
    fsync, left = os.fsync, [moment]

    def full(handle: int) -> None:
        left[0] -= 1
        if left[0] <= 0:
            raise OSError(28, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    return left


def save_whole(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save(step, model=linear())
    checkpoints.wait()


@pytest.mark.parametrize(("moment", "asynchronous"), [(1, True), (3, False), (5, True), (7, False)])
def test_a_full_disk_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int, asynchronous: bool
) -> None:
    """The disk is full at one of the moments at which a saving waits for it: files, folders, the table."""
    checkpoints = Checkpoints(tmp_path, keep=1, asynchronous=asynchronous)
    save_whole(checkpoints, 1)
    with monkeypatch.context() as patched:
        left = disk_that_is_full_at(patched, moment)
        text = ""
        try:
            save_whole(checkpoints, 2)
        except CheckpointError as error:
            text = str(error)
    # After the last moment of the new one's saving nothing can fail any more.
    assert ("No space left on device" in text) == (left[0] <= 0)
    if moment < 4:
        assert text
        assert checkpoints.steps() == [1]
    assert list(tmp_path.glob(".writing*")) == []
    save_whole(checkpoints, 3)
    assert checkpoints.steps() == [3]


@pytest.mark.parametrize("call", ["save", "load", "wait", "close"])
def test_a_failure_beside_the_training_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    checkpoints = Checkpoints(tmp_path, asynchronous=True)
    with monkeypatch.context() as patched:
        disk_that_is_full_at(patched, 1)
        checkpoints.save(1, model=linear())
        options: dict[str, Any] = {
            "save": {"step": 2, "model": linear()},
            "load": {"model": linear()},
        }
        with pytest.raises(CheckpointError, match="No space left on device"):
            getattr(checkpoints, call)(**options.get(call, {}))
    checkpoints.close()
    assert list(tmp_path.glob("[!.]*")) == []


# ---- the end of a process

ENDS = {
    "failure": (70, "No space left on device"),
    "slow": (0, ""),
    "hanging": (70, "it was not complete"),
    "dying": (70, "it was not complete"),
}


def end_while_saving(case: str, folder: Path) -> None:
    """In a process of its own: begin to save, and end."""
    fsync = os.fsync

    def fault(handle: Any) -> None:
        if threading.current_thread().name == "penstock-checkpoint":
            if case == "failure":
                raise OSError(28, "No space left on device")
            if case == "slow":
                threading.main_thread().join()
            else:
                for written in (folder / case).glob(".writing-*"):
                    (written / "vanished").symlink_to("nowhere")  # listed, and not there
                threading.Event().wait()
        fsync(handle)

    os.fsync = cast("Any", fault)
    if case in ("hanging", "dying"):
        pytest.MonkeyPatch().setattr("penstock.checkpoint.saving.AT_EXIT", 1.0)
    Checkpoints(folder / case, asynchronous=True).save(1, model=linear())
    if case == "dying":
        raise RuntimeError("dies")


def test_the_end_of_a_process_that_is_saving(tmp_path: Path) -> None:
    """It completes what it writes, or says what was lost, and does not wait for long."""
    code = f"from {__name__} import main; from pathlib import Path; main(Path({str(tmp_path)!r}))"
    ended = run_program(sys.executable, "-W", "always::ResourceWarning", "-c", code)
    statuses = dict(zip(ENDS, map(int, ended.out.split()), strict=True))
    for name, (status, text) in ENDS.items():
        printed = (tmp_path / f"{name}.txt").read_text()
        assert statuses[name] == status, printed
        assert ("the checkpoint of step 1 was lost" in printed) == bool(text)
        assert text in printed
        assert "ResourceWarning" not in printed
        assert Checkpoints(tmp_path / name).steps() == ([] if text else [1])


def main(folder: Path) -> None:
    """Let a process end in each way, all side by side, and print their statuses."""
    gc.freeze()  # else each child's end looks at all that was imported
    children = []
    for case in ENDS:
        children.append(os.fork())
        if not children[-1]:
            os.dup2(os.open(folder / f"{case}.txt", os.O_CREAT | os.O_WRONLY), 2)
            end_while_saving(case, folder)
            return
    for child in children:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.write(f"{status} ")


# ---- tables of any kind


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


def nested(levels: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        rewrite_table(path.parent, lambda table: table | {"extra": "DEEP"})
        content = path.read_bytes().replace(b'"DEEP"', b"[" * levels + b"]" * levels)
        start = content.index(b'"format": ') + len(b'"format": ')
        path.write_bytes(b'{"crc32": %d, "format": ' % crc32(content[start:]) + content[start:])

    return change


def changed(**fields: Any) -> Callable[[Path], None]:
    return lambda path: rewrite_table(path.parent, lambda table: table | fields)


def fewer_bytes(path: Path) -> None:
    def change(table: Any) -> Any:
        table["files"][0]["bytes"] -= 1
        return table

    rewrite_table(path.parent, change)


def pieces(*of_weight: list[Any]) -> Callable[[Path], None]:
    """The weight, of [2, 3], is in these pieces of the first file."""
    listed = [{"file": 0, "offsets": offsets, "sizes": sizes} for offsets, sizes in of_weight]

    def divide(table: Any) -> Any:
        next(one for one in table["tensors"] if "model/weight" in one["keys"])["pieces"] = listed
        return table

    return lambda path: rewrite_table(path.parent, divide)


NAMES = ("../x.json", "/tmp/x/config.json", ".config.json", "train.py")
FILE = {"name": "states-00001.safetensors", "bytes": 1, "crc32": 1}
ODD_TABLES: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (pipe_instead, "not a regular file"),
    "fewer bytes": (fewer_bytes, "were written"),
    "device": (device_instead, "not a regular file"),
    "huge": (huge, "more than 256,000,000 bytes"),
    "deep": (nested(150), "deeper than 100"),
    "very deep": (nested(100_000), "is not JSON"),
    "unknown field": (changed(more=1), "more"),
    "outside": (changed(files=[FILE | {"name": "../x"}], tensors=[]), "files/0/name"),
    "no such file": (changed(files=[]), "a piece is in a file that it does not list"),
    "no piece": (pieces(), "do not make it up"),
    "a hole": (pieces([[0, 0], [1, 3]], [[1, 0], [1, 2]]), "do not make it up"),
    "over the edge": (pieces([[0, 0], [1, 3]], [[1, 0], [2, 3]]), "do not make it up"),
    "crossed": (pieces([[0, 0], [2, 2]], [[0, 1], [2, 2]]), "do not make it up"),
    "beyond memory": (
        changed(
            tensors=[{"dtype": "F32", "shape": [0, 1 << 61, 1 << 61], "pieces": [], "keys": []}]
        ),
        "no tensor",
    ),
    **{
        f"beside: {name}": (changed(beside={name: ""}), "no file that belongs beside it")
        for name in NAMES
    },
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ODD_TABLES)
def test_an_odd_table_is_one_error_and_changes_nothing(tmp_path: Path, name: str) -> None:
    spoil, text = ODD_TABLES[name]
    model = linear()
    path = Checkpoints(tmp_path).save(1, model=model).path
    assert path is not None
    spoil(path / "checkpoint.json")
    with torch.no_grad():
        model.weight.fill_(5)
    with pytest.raises(InputFileError) as raised:
        Checkpoints(tmp_path).load(model=model)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)
    assert bool((model.weight == 5).all())
    assert "DAMAGED" in describe(tmp_path, check=True)


def test_a_state_gets_its_own_tensors_whatever_a_table_says(tmp_path: Path) -> None:
    states = {"a": Keeps([torch.ones(9)]), "b": Keeps([torch.zeros(9)])}
    path = Checkpoints(tmp_path).save(1, **states).path
    assert path is not None
    table = path / "checkpoint.json"
    changed(values=[{"value": [{"$": "tensor", "of": "b/0"}], "keys": ["a"]}])(table)
    assert Checkpoints(tmp_path).load(a=states["a"]) == 1
    assert states["a"].state[0].equal(torch.ones(9))
    changed(values=[{"value": [{"$": "tensor"}] * 2, "keys": ["a"]}])(table)
    with pytest.raises(InputFileError, match='names the tensor "a/1", which it does not have'):
        Checkpoints(tmp_path).load(a=states["a"])


@pytest.mark.parametrize(
    "settings", [{"betas": [0.9]}, {"params": []}, {"lr": "x"}, {"lr": 10**400}], ids=str
)
def test_settings_that_are_none_are_named_before_anything_is_changed(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    model = linear()
    optimizer = stepped(model)
    path = Checkpoints(tmp_path).save(1, model=model, optimizer=optimizer).path
    assert path is not None

    def spoil(table: Any) -> Any:
        table["groups"]["optimizer"][0]["settings"] |= settings
        return table

    rewrite_table(path, spoil)
    optimizer.param_groups[0]["eps"] = 0.25
    states: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with pytest.raises(
        StateDictError, match=rf"optimizer: group 0: {next(iter(settings))}=.* was saved"
    ):
        Checkpoints(tmp_path).load(**states)
    assert optimizer.param_groups[0]["eps"] == 0.25
    # What fits of the rest is loaded if that is asked for, and the optimizer works.
    assert Checkpoints(tmp_path).load(strict=False, **states) == 1
    assert optimizer.param_groups[0]["eps"] != 0.25
    assert len(optimizer.param_groups[0]["params"]) == 2
    optimizer.step()


def test_bytes_that_were_flipped() -> None:
    assert flips(10) == {"damaged": 10, "named": 10, "the one before was taken": 10}
