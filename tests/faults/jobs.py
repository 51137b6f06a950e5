"""Jobs of three ranks over gloo that fail as they are told.

A job runs a :class:`Ring`, which drives the watch by itself. The processes are forked from one that has
imported everything, so that a job takes a second or two.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import platform
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.faults import Activity, Patience, Watch, end_waits, meet, status_of
from penstock.schedule import Action, Op
from penstock.testing import fail_at
from tests.scripts import forked

RANKS = 3
LIMIT = 90.0
"""Seconds until a job is killed and its test fails."""
SLACK = 5.0
"""How much longer than on a quiet machine things may take here, where others run beside."""
SILENT = 2.0
"""Seconds without progress after which the jobs call a rank silent."""


@dataclass(frozen=True)
class Ended:
    """How a rank ended.

    Args:
        status: its process's exit status; below zero the signal; ``None`` if it still ran.
        error: the type of what it raised.
        text: what that said.
        time: when it raised, on the machine's monotonic clock.
        output: all that it printed.
    """

    status: int | None
    error: str
    text: str
    time: float
    output: str


@dataclass(frozen=True)
class Job:
    """What came of a job.

    Args:
        fired: when the fault happened.
        ranks: how each ended.
        folder: what is left of it.
    """

    fired: float
    ranks: tuple[Ended, ...]
    folder: Path

    def heard(self, *culprits: int) -> float:
        """Seconds from the fault until the last of the other ranks raised."""
        return max(e.time for r, e in enumerate(self.ranks) if r not in culprits) - self.fired

    @property
    def report(self) -> dict[str, Any]:
        """The report, ``failure.json``."""
        report: dict[str, Any] = json.loads((self.folder / "failure.json").read_text())
        return report


def run_job(
    folder: Path, *, meddle: Callable[[], None] | None = None, frozen: int = -1, **case: Any
) -> Job:
    """Run one.

    Args:
        folder: an empty one.
        meddle: called when all ranks train.
        frozen: a rank that does not end by itself, as it is stopped or holds the GIL.
        case: ``fault``: arguments of :func:`fail_at`; ``timeout``, ``meeting``, ``steps``; ``apart``: as if
            each rank had a machine of its own; ``spaces``: for each rank its network namespace and the
            device there.
    """
    with started(folder, **case) as processes:
        deadline = time.monotonic() + LIMIT
        if meddle is not None:
            while not all((folder / f"trains-{rank}").exists() for rank in range(RANKS)):
                assert time.monotonic() < deadline
                assert all(p.is_alive() for p in processes)
                time.sleep(0.02)
            (folder / "fired").write_text(str(time.monotonic()))
            meddle()
        for rank, process in enumerate(processes):
            if rank != frozen:
                process.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        ranks = tuple(_ended(folder, rank, p.exitcode) for rank, p in enumerate(processes))
        assert late == ([] if frozen < 0 else [frozen]), [ended.output for ended in ranks]
    fired = folder / "fired"
    return Job(float(fired.read_text()) if fired.exists() else 0.0, ranks, folder)


@contextmanager
def started(folder: Path, **case: Any) -> Iterator[list[Any]]:
    """The processes of a job; all are dead afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (folder / "port").write_text(str(port))
    with forked(_main, ((rank, port, str(folder), case) for rank in range(RANKS))) as processes:
        yield processes


def _ended(folder: Path, rank: int, status: int | None) -> Ended:
    path = folder / f"ended-{rank}"
    record = (
        json.loads(path.read_text()) if path.exists() else {"error": "", "text": "", "time": 0.0}
    )
    return Ended(status, **record, output=(folder / f"out-{rank}").read_text())


def _main(rank: int, port: int, folder: str, case: dict[str, Any]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_ERROR_FILE": str(Path(folder, f"torchrun-{rank}")),
    }
    out = Path(folder, f"out-{rank}").open("w", buffering=1)  # noqa: SIM115 - open to the end
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    sys.stdout = sys.stderr = out
    if case.get("apart"):
        # As if each rank had a machine of its own, whose processes the others cannot see.
        platform.node = lambda: f"machine{rank}"
    if spaces := case.get("spaces"):
        _enter(*spaces[rank])
    sys.exit(work(rank, Path(folder), case))


def _enter(space: str, device: str) -> None:
    """Live in a network namespace, with a machine of its own."""
    with Path("/run/netns", space).open() as file:
        assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
    platform.node = lambda: space
    # Of a network that is this test's own: nobody else can hold the port.
    os.environ |= {"MASTER_ADDR": "10.213.0.1", "MASTER_PORT": "29533"}
    os.environ["GLOO_SOCKET_IFNAME"] = device


def work(rank: int, folder: Path, case: dict[str, Any]) -> int:
    """Run one rank; returns its exit status."""
    # Where the tests run in the background, a shell has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Where it hangs, if it does.
    faulthandler.dump_traceback_later(LIMIT - 10.0)
    torch.set_num_threads(1)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    fired = folder / "fired"
    error: BaseException | None = None
    with fail_at(**case["fault"], before=lambda: fired.write_text(str(time.monotonic()))) as fault:
        try:
            ring = Ring(folder, case)
            ring.train(fault.over(range(1, case.get("steps", 4) + 1), rank))
            ring.watch.close()
            ring.meeting.close()
        except BaseException as caught:
            error = caught
            traceback.print_exc()
    record = {"error": type(error).__name__, "text": str(error), "time": time.monotonic()}
    (folder / f"ended-{rank}").write_text(json.dumps(record))
    return 0 if error is None else status_of(error)


class Ring:
    """One rank of a program in which forwards go up and backwards come down, watched as a pipeline is.

    Args:
        folder: where it notes what happens.
        case: the settings of the job.
    """

    def __init__(self, folder: Path, case: dict[str, Any]) -> None:
        patience = Patience(
            (case.get("first", 60.0), case.get("timeout", SILENT)), case.get("meeting", 60.0)
        )
        self.meeting = meet(patience=patience)
        self.rank, self.last = self.meeting.rank, self.meeting.ranks - 1
        self.activity = Activity(self.rank)
        self.watch = Watch(self.activity, self.meeting, patience)
        self.watch.protect(self.abort)
        self.watch.keep_in(folder)
        self.folder = folder

    def abort(self) -> None:
        end_waits(self.meeting.group)

    def train(self, steps: Iterator[int]) -> None:
        try:
            self.activity.prepare("builds its stage")
            self.activity.wait("all ranks", None)
            dist.barrier()
            self.watch.made()
            for step in steps:
                self.step(step)
                if step == 2:
                    (self.folder / f"trains-{self.rank}").touch()
        except BaseException as error:
            cause = self.watch.failed(error)
            if cause is error:
                raise
            raise cause from None

    def step(self, step: int) -> None:
        self.activity.begin(step)
        for microbatch in range(3):
            self.act(Op.F, microbatch, self.rank - 1, self.rank + 1)
        for microbatch in range(3):
            self.act(Op.B, microbatch, self.rank + 1, self.rank - 1)
        self.activity.act(None)
        self.activity.wait("the sum of the step", None)
        dist.all_reduce(torch.zeros(1))
        self.activity.rest()

    def act(self, op: Op, microbatch: int, source: int, target: int) -> None:
        self.watch.check()
        if 0 <= source <= self.last:
            self.activity.wait(f"{self.rank}RECV_{op}{microbatch}", source)
            dist.recv(torch.zeros(4), source)
        self.activity.act(Action(self.rank, op, microbatch))
        if 0 <= target <= self.last:
            self.activity.wait(f"{self.rank}SEND_{op}{microbatch}", target)
            dist.send(torch.zeros(4), target)


if __name__ == "__main__":
    sys.exit(work(int(os.environ["RANK"]), Path(sys.argv[1]), json.loads(sys.argv[2])))
