"""The same under torchrun: whatever ends, nothing is left, and the cause is named."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.jobs import SLACK, run_rank
from tests.processes import Job, end_of, free_port, run_script, torchrun, variables

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.on_cpu("jobs end, whatever they compute on"),
]

RANKS = 2
START = 150.0
"""Seconds that a job may take, on a machine where others run beside."""


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


def test_torchrun_ends_and_names_the_cause(tmp_path: Path) -> None:
    fault = {"rank": 1, "step": 3, "action": "1F2", "how": "exception"}
    case = json.dumps({"fault": fault, "shape": (1, RANKS)})
    arguments = ("-m", "tests.faults.jobs", str(tmp_path), case)
    with nothing_left(tmp_path), torchrun(*arguments, processes=RANKS) as job:
        ranks = pids(tmp_path)
        ended = end_of(job, START)
        assert all_gone(ranks, SLACK)
    assert ended.status == 1
    output = ended.out + ended.err
    assert "stopped because rank 1" in output
    assert json.loads((tmp_path / "failure.json").read_text())["failures"][0]["rank"] == 1
    # The culprit's own traceback; torchrun shows its error file once more, as the root cause.
    assert "in _raise" in output
    assert "action 1F2: InjectedError: injected by fail_at" in output[output.index("Root Cause") :]


def launch(folder: str, case: dict[str, Any]) -> None:
    """Start the ranks as torchrun does, and wait for them."""
    os.environ["TORCHELASTIC_RUN_ID"] = "a launcher"
    port = free_port()
    for rank in range(RANKS):
        if not os.fork():
            try:
                os.environ |= variables(rank, RANKS, port)
                run_rank(rank, folder, case)
            finally:
                os._exit(0)
    os.wait()


def test_a_launcher_that_is_killed_takes_its_workers_along(tmp_path: Path) -> None:
    fault = {"rank": 1, "step": 3, "action": "1F2", "how": "sleep"}
    case = {"fault": fault, "timeout": 60.0, "shape": (1, RANKS)}
    with Job(launch, [(str(tmp_path), case)]) as job:
        ranks = pids(tmp_path)
        job.until((tmp_path / "fired").exists)
        assert all(map(alive, ranks))
        os.kill(job.pids[0], signal.SIGKILL)
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
        # An error that was raised again, so that its causes run in a circle.
        error, around = KeyError("the cause"), RuntimeError()
        error.__context__, around.__cause__ = around, error
        raise error

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
