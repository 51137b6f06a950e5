"""The same under torchrun: whatever ends, nothing is left, and the cause is named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.jobs import SLACK, run_rank
from tests.scripts import forked, free_port, run_script

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.on_cpu("jobs end, whatever they compute on"),
]

RANKS = 2
START = 150.0
"""Seconds that a job may take, on a machine where others run beside."""


@contextmanager
def launched(folder: Path, **case: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A job under torchrun; nothing of it is alive afterwards."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(RANKS), "-m", "tests.faults.jobs", str(folder)]
    command += [json.dumps(case | {"shape": (1, RANKS)})]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment["OMP_NUM_THREADS"] = "1"
    environment.pop("GLOO_SOCKET_IFNAME", None)
    with (folder / "output").open("wb") as output:
        job = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    with nothing_left(folder):
        try:
            yield job
        finally:
            job.kill()
            job.wait()


@contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """Kill the ranks of a job that are alive in the end."""
    try:
        yield
    finally:
        for path in folder.glob("pid-*"):
            if alive(int(path.read_text())):
                os.kill(int(path.read_text()), signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def pids(folder: Path) -> list[int]:
    """Of all ranks, once each has made two steps."""
    deadline = time.monotonic() + START
    while not all((folder / f"trains-{rank}").exists() for rank in range(RANKS)):
        assert time.monotonic() < deadline, list(folder.iterdir())
        time.sleep(0.05)
    return [int((folder / f"pid-{rank}").read_text()) for rank in range(RANKS)]


def all_gone(ranks: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, ranks)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, ranks))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("exception", "InjectedError: injected by fail_at"),
        pytest.param("SIGKILL", "", marks=pytest.mark.nightly),
        pytest.param("SIGSTOP", "is stopped by a signal", marks=pytest.mark.nightly),
    ],
)
def test_torchrun_ends_and_names_the_cause(how: str, says: str, tmp_path: Path) -> None:
    fault = {"rank": 1, "step": 3, "action": "1F2", "how": how}
    with launched(tmp_path, fault=fault) as job:
        ranks = pids(tmp_path)
        assert job.wait(START) == 1
        output = (tmp_path / "output").read_text()
        assert all_gone(ranks, SLACK)
    if how == "SIGKILL":
        # Torchrun sees it at once, and may end the others before they can say so.
        assert "Signal 9 (SIGKILL) received by PID" in output
        return
    assert "stopped because rank 1" in output
    assert says in output
    assert json.loads((tmp_path / "failure.json").read_text())["failures"][0]["rank"] == 1
    if how == "exception":
        # The culprit's own traceback; torchrun shows its error file once more, as the root cause.
        assert "in _raise" in output
        assert "action 1F2: InjectedError" in output[output.index("Root Cause") :]


def launch(folder: str, port: int, case: dict[str, Any]) -> None:
    """Start the ranks as torchrun does, and wait for them."""
    os.environ["TORCHELASTIC_RUN_ID"] = "a launcher"
    for rank in range(RANKS):
        if not os.fork():
            try:
                run_rank(rank, port, folder, case)
            finally:
                os._exit(0)
    os.wait()


def test_a_launcher_that_is_killed_takes_its_workers_along(tmp_path: Path) -> None:
    fault = {"rank": 1, "step": 3, "action": "1F2", "how": "sleep"}
    case = {"fault": fault, "timeout": 60.0, "shape": (1, RANKS)}
    with nothing_left(tmp_path), forked(launch, [(str(tmp_path), free_port(), case)]) as (job,):
        ranks = pids(tmp_path)
        while not (tmp_path / "fired").exists():
            time.sleep(0.02)
        assert all(map(alive, ranks))
        job.kill()
        assert all_gone(ranks, 2.0 * SLACK)


CAUGHT = """
import atexit, os, sys
os.environ["TORCHELASTIC_ERROR_FILE"] = sys.argv[2] + os.environ["RANK"]
import torch
from torch import nn
from penstock import Pipeline

def train():
    x = torch.ones(4, 2)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    loss_fn = lambda output, target: (output - target).square().mean()
    try:
        Pipeline(model, stages=["nowhere"], loss_fn=loss_fn)
    except ValueError as error:
        print("caught:", error)
    with Pipeline(model, microbatches=2, loss_fn=loss_fn) as pipe:
        pipe.step(x, target=x)
        if sys.argv[1] == "in a step" and pipe.rank == 1:
            pipe.on("*F1", before=lambda event: [].pop())
        pipe.step(x, target=x)
    if pipe.rank == 1:
        raise KeyError("the cause")

try:
    train()
except BaseException as error:
    # What the interpreter does at its end, and a child of multiprocessing does not.
    sys.last_value = error
    atexit._run_exitfuncs()
"""


@pytest.mark.parametrize(
    ("where", "cause"),
    [("in a step", "pop from empty list"), ("elsewhere", "KeyError: 'the cause'")],
)
def test_torchrun_s_error_file_has_the_error_that_ends_the_program(
    where: str, cause: str, tmp_path: Path
) -> None:
    """Not one that was caught; and torchrun takes the earliest for the cause."""
    (tmp_path / "program.py").write_text(CAUGHT)
    ran = run_script(str(tmp_path / "program.py"), where, f"{tmp_path}/error-", processes=2)
    assert all("caught:" in one.out for one in ran)
    of_cause, *of_others = [
        json.loads((tmp_path / f"error-{rank}").read_text())["message"]
        for rank in (1, 0)
        if (tmp_path / f"error-{rank}").exists()
    ]
    assert cause in of_cause["message"]
    assert "Traceback" in of_cause["extraInfo"]["py_callstack"]
    for other in of_others:
        assert "stopped because rank 1" in other["message"]
        times = [int(one["extraInfo"]["timestamp"]) for one in (of_cause, other)]
        assert times[0] < times[1]
