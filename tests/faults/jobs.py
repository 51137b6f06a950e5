"""Jobs of a few processes over gloo that train, and fail as they are told.

The processes are forked from one that has imported everything, so that a job takes a second or two.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import gc
import json
import os
import platform
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock import Pipeline
from penstock.faults import status_of
from penstock.faults.board import SharedBoard
from penstock.testing import Fault, InjectedError, fail_at
from tests.scripts import forked

RANKS = 3
LIMIT = 90.0
"""Seconds until a job is killed and its test fails."""
SLACK = 3.0
"""How much longer than on a machine of its own things may take here, where others run beside."""
FIRST = 60.0
"""Seconds for a first step."""
SILENT = 2.0
"""Seconds without progress after which the jobs call a rank silent."""

X = torch.arange(32.0).reshape(8, 4) / 32


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Picky(nn.Module):
    """A linear layer whose backward can be told to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x)
        return found


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Picky() for _ in range(RANKS)))


@dataclass(frozen=True)
class Ended:
    """How a rank ended.

    Args:
        status: its process's exit status; below zero the signal.
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
        gone: when the last process had ended.
        folder: what is left of it.
    """

    fired: float
    ranks: tuple[Ended, ...]
    gone: float
    folder: Path

    def heard(self, *culprits: int) -> float:
        """Seconds from the fault until the last of the other ranks raised."""
        return max(e.time for r, e in enumerate(self.ranks) if r not in culprits) - self.fired


def run_job(folder: Path, **case: Any) -> Job:
    """Run one.

    Args:
        folder: an empty one.
        case: ``fault``: arguments of :func:`fail_at`; ``job``: which function below; ``apart``: as if each
            rank had a machine of its own; ``spaces``: for each rank its network namespace and the device
            there; ``cut``: called when all ranks train; more is up to the job.
    """
    cut = case.pop("cut", None)
    with started(folder, **case) as processes:
        deadline = time.monotonic() + LIMIT
        if cut is not None:
            while not all((folder / f"trains-{rank}").exists() for rank in range(RANKS)):
                assert time.monotonic() < deadline
                assert all(p.is_alive() for p in processes)
                time.sleep(0.02)
            (folder / "fired").write_text(str(time.monotonic()))
            cut()
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        gone = time.monotonic()
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        outputs = [(folder / f"out-{rank}").read_text() for rank in range(RANKS)]
        assert not late, f"ranks {late} still ran after {LIMIT} s\n" + "\n".join(outputs)
        ranks = tuple(_ended(folder, rank, p.exitcode) for rank, p in enumerate(processes))
    fired = folder / "fired"
    return Job(float(fired.read_text()) if fired.exists() else 0.0, ranks, gone, folder)


@contextmanager
def started(folder: Path, **case: Any) -> Iterator[list[Any]]:
    """The processes of a job; all are dead afterwards."""
    port = _free_port()
    with forked(_main, ((rank, port, str(folder), case) for rank in range(RANKS))) as processes:
        yield processes


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _ended(folder: Path, rank: int, status: int | None) -> Ended:
    path = folder / f"ended-{rank}"
    told = json.loads(path.read_text()) if path.exists() else {"error": "", "text": "", "time": 0.0}
    return Ended(status, **told, output=(folder / f"out-{rank}").read_text())


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
    # Where the tests run in the background, a shell has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Where it hangs, if it does.
    faulthandler.dump_traceback_later(LIMIT - 10.0)
    torch.set_num_threads(1)
    if case.get("apart"):
        # As if each rank had a machine of its own: no memory is shared, no process is looked at.
        platform.node = lambda: f"machine{rank}"
    if spaces := case.get("spaces"):
        _enter(*spaces[rank])
    if case.get("no room"):
        SharedBoard.make = _no_room  # type: ignore[method-assign]
    fired = Path(folder, "fired")
    with fail_at(**case["fault"], before=lambda: fired.write_text(str(time.monotonic()))) as fault:
        sys.exit(_status(rank, Path(folder), fault, case))


def _enter(space: str, device: str) -> None:
    """Live in a network namespace, with a machine of its own."""
    with Path("/run/netns", space).open() as file:
        assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
    platform.node = lambda: space
    # Of a network that is this test's own: nobody else can hold the port.
    os.environ |= {"MASTER_ADDR": "10.213.0.1", "MASTER_PORT": "29533"}
    os.environ["GLOO_SOCKET_IFNAME"] = device


def _no_room(ranks: int) -> Path:
    raise OSError(errno.ENOSPC, "No space left on device")


def _status(rank: int, folder: Path, fault: Fault, case: dict[str, Any]) -> int:
    error: BaseException | None = None
    try:
        JOBS[case.get("job", "train")](rank, folder, fault, case)
    except BaseException as caught:
        error = caught
        traceback.print_exc()
    told = {"error": type(error).__name__, "text": str(error), "time": time.monotonic()}
    Path(folder, f"ended-{rank}").write_text(json.dumps(told))
    return 0 if error is None else status_of(error)


# ---- what the jobs do


def make(case: dict[str, Any], **options: Any) -> Pipeline:
    silent = case.get("silent", SILENT)
    return Pipeline(
        options.pop("model", None) or model(),
        schedule=case.get("schedule", "1F1B"),
        microbatches=4,
        loss_fn=mean_loss,
        timeout=(FIRST, silent),
        rendezvous_timeout=case.get("meeting", FIRST),
        **options,
    )


def train(rank: int, folder: Path, fault: Fault, case: dict[str, Any]) -> None:
    """Some steps of training, with whatever fault there is."""
    pipe = make(case)
    pipe.report_failures_to(Path(case.get("story", folder)))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for step in fault.over(range(case.get("steps", 4)), rank):
        pipe.step(X, target=X)
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            (folder / f"trains-{rank}").touch()
    if case.get("close", True):
        pipe.close()


def fail_outside(rank: int, folder: Path, fault: Fault, case: dict[str, Any]) -> None:
    """One rank's optimizer raises between two steps."""
    with make(case) as pipe:
        for step in range(3):
            pipe.step(X, target=X)
            if rank == 1 and step == 1:
                (folder / "fired").write_text(str(time.monotonic()))
                raise InjectedError("the optimizer")


def try_again(rank: int, folder: Path, fault: Fault, case: dict[str, Any]) -> None:
    """A failed step, then another."""
    pipe = make(case)
    for _ in range(2):
        try:
            pipe.step(X, target=X)
        except Exception:
            traceback.print_exc()
    pipe.step(X, target=X)


def straggle(rank: int, folder: Path, fault: Fault, case: dict[str, Any]) -> None:
    """Stage 1 takes its time; nobody stops."""
    pipe = make(case | {"silent": 30.0})
    if rank == 1:
        pipe.stages[0].module.register_forward_pre_hook(lambda *_: time.sleep(0.05))
    for _ in range(14):
        pipe.step(X, target=X)
    pipe.close()


def differ(rank: int, folder: Path, fault: Fault, case: dict[str, Any]) -> None:
    """One rank was given another model."""
    stages = model()
    if rank == 2:
        stages[1] = nn.Linear(4, 4, bias=False)
    (folder / "fired").write_text(str(time.monotonic()))
    Pipeline(stages, microbatches=4, loss_fn=mean_loss)


class Mistaken(Picky):
    """Adds what does not fit."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.ones(7, 9)


def mistake(rank: int, folder: Path, fault: Fault, case: dict[str, Any]) -> None:
    """The first step finds that the second stage cannot work."""
    stages = model()
    stages[1] = Mistaken()
    with Pipeline(stages, microbatches=4, loss_fn=mean_loss) as pipe:
        pipe.step(X, target=X)


class Forks(Picky):
    """Forks in a forward: one child raises, another would go on with the step."""

    def __init__(self) -> None:
        super().__init__()
        self.parent = os.getpid()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls in (12, 14) and os.getpid() == self.parent and os.fork() == 0:
            signal.alarm(20)
            if self.calls == 12:
                raise ValueError("the child's own")
        return super().forward(x)


def fork(rank: int, folder: Path, fault: Fault, case: dict[str, Any]) -> None:
    """A stage forks; its children end as processes do, with all that they were born with."""
    stages = model()
    if rank == 1:
        stages[1] = Forks()
    pipe: Any = make(case, model=stages)
    own = os.getpid()
    try:
        for _ in range(8):
            pipe.step(X, target=X)
        pipe.close()
        for _ in range(2 * (rank == 1)):
            os.wait()
    except Exception as error:
        if os.getpid() == own:
            raise
        pipe.close()
        del pipe, stages
        error.__traceback__ = None
        gc.collect()
        with (folder / "children").open("a") as file:
            file.write(f"{type(error).__name__}: {error}\n")
        os._exit(0)


JOBS = {
    "mistake": mistake,
    "train": train,
    "fail outside": fail_outside,
    "try again": try_again,
    "straggle": straggle,
    "differ": differ,
    "fork": fork,
}
