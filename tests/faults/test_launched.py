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

import pytest

from penstock.faults.processes import Process, this_host
from tests.faults.jobs import RANKS, SLACK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SCRIPT = str(Path(__file__).with_name("script.py"))
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
    *("--nproc-per-node", str(RANKS), SCRIPT),
]
START = 120.0
USUAL_START = 5.0
"""Seconds that a job takes to start on a machine of its own: how slow this one is follows from that."""


@contextmanager
def launched(folder: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    """A job under torchrun; nothing of it is alive afterwards."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("GLOO_SOCKET_IFNAME", None)
    with (folder / "output").open("w") as output:
        job = subprocess.Popen(
            [*TORCHRUN, str(folder), how],
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
    try:
        yield job
    finally:
        job.kill()
        job.wait()
        for path in folder.glob("pid-*"):
            if alive(int(path.read_text())):
                os.kill(int(path.read_text()), signal.SIGKILL)


def alive(pid: int) -> bool:
    started = Path(f"/proc/{pid}/stat")
    if not started.exists():
        return False
    fields = started.read_text().rpartition(")")[2].split()
    return Process(this_host(), pid, fields[19]).condition() != "ended"


def pids(folder: Path) -> list[int]:
    """Of all ranks, once each has made its first step."""
    deadline = time.monotonic() + START
    paths = [folder / f"pid-{rank}" for rank in range(RANKS)]
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < deadline, (folder / "output").read_text()
        time.sleep(0.05)
    return [int(path.read_text()) for path in paths]


def all_gone(found: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, found)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def listening(found: list[int]) -> set[str]:
    """The addresses at which these processes listen, as the kernel writes them."""
    sockets = set()
    for pid in found:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(os.readlink(link))
            except FileNotFoundError:
                continue
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                addresses.add(fields[1].split(":")[0])
    return addresses


@pytest.mark.parametrize(
    "how",
    [
        "exception",
        pytest.param("SIGKILL", marks=pytest.mark.nightly),
        pytest.param("SIGSTOP", marks=pytest.mark.nightly),
    ],
)
def test_torchrun_ends_in_time_and_names_the_cause(how: str, tmp_path: Path) -> None:
    began = time.monotonic()
    with launched(tmp_path, how) as job:
        ranks = pids(tmp_path)
        factor = max(SLACK, SLACK * (time.monotonic() - began) / USUAL_START)
        status = job.wait(START)
        ended = time.monotonic()
        output = (tmp_path / "output").read_text()
        assert status == 1, output
        assert all_gone(ranks, 1.0)
    bound = (3.0 if how != "SIGSTOP" else 2.0 + 5.0) * factor
    assert ended - float((tmp_path / "fired").read_text()) < bound
    assert "stopped because rank 1, step 2, stage 1, microbatch 2, action 1F2" in output
    failures = json.loads((tmp_path / "failure.json").read_text())["failures"]
    assert failures[0]["rank"] == 1
    if how == "exception":
        # The culprit's own traceback; torchrun shows its error file once more.
        assert output.count("in _raise\n") == 2
        assert output.index("in _raise") < output.index("stopped because")


def test_torchrun_that_is_killed_takes_its_workers_along(tmp_path: Path) -> None:
    """One is stopped, another holds the GIL."""
    with launched(tmp_path, "frozen") as job:
        ranks = pids(tmp_path)
        # One that every interface of a machine would give reads 00000000; loopback 127.0.0.1 is 0100007F.
        assert listening(ranks) <= {"0100007F", "0000000000000000FFFF00000100007F"}
        job.kill()
        assert all_gone(ranks, 2.0 * SLACK)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_torchrun_ends_all(number: int, tmp_path: Path) -> None:
    with launched(tmp_path, "wait") as job:
        ranks = pids(tmp_path)
        job.send_signal(number)
        assert job.wait(60.0)
        assert all_gone(ranks, 1.0)
