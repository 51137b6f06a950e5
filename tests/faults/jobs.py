"""Jobs of three ranks, or of several pipelines, over gloo, that fail as they are told."""

from __future__ import annotations

import ctypes
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from penstock import Checkpoints, Loss, Pipeline, Timeouts
from penstock.errors import AgreementError, UsageError, status_of
from penstock.testing import Fault, fail_at
from tests import processes
from tests.processes import Job, free_port, variables

RANKS = 3
LIMIT = 90.0
"""Seconds until a job is killed and its test fails."""
SLACK = 10.0
"""How much longer than on a quiet machine things may take here, where others run beside."""
SILENT = 4.0
"""Seconds without progress after which a rank is silent, in jobs that are about that."""


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
class Outcome:
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
    folder: Path,
    *,
    meddle: Callable[[], None] | None = None,
    frozen: int = -1,
    limit: float = LIMIT,
    **case: Any,
) -> Outcome:
    """Run one.

    Args:
        folder: an empty one.
        meddle: called when all ranks train.
        frozen: a rank that does not end by itself, as it is stopped or holds the GIL.
        limit: seconds until the job is killed.
        case: ``fault``: arguments of :func:`fail_at`; ``first``, ``timeout``, ``meeting``, ``steps``;
            ``forks``: an action in which a stage forks; ``spaces``: for each rank its network namespace and
            the device there; ``shape``: the number of pipelines side by side, and of ranks in each;
            ``shards``: whether ``wrap=`` shards stages over the pipelines, without ``replicas=``, and gathers
            them for each microbatch;
            ``sleeps``: where in step 3 processes sleep, which, and for how many seconds;
            ``terminates``: the process that gets SIGTERM in step 3, and raises SystemExit;
            ``weightless``: the replica and step without a target, by which the loss is weighted;
            ``refuses``, ``raises``: the replica, rank and step with a wrong batch, or with a TimeoutError.
    """
    count, port = math.prod(case.get("shape", (1, RANKS))), free_port()
    (folder / "port").write_text(str(port))
    rows = [(rank, str(folder), case) for rank in range(count)]
    # The first hosts the store.
    told = [variables(rank, count, port) for rank in range(count)]
    with Job(run_rank, rows, told) as job:
        if meddle is not None:
            job.until(
                lambda: all((folder / f"trains-{rank}").exists() for rank in range(count)), limit
            )
            (folder / "fired").write_text(str(time.monotonic()))
            meddle()
        ended = job.wait(limit, frozen=[frozen] if frozen >= 0 else [])
    ranks = tuple(_ended(folder, rank, one) for rank, one in enumerate(ended))
    fired = folder / "fired"
    return Outcome(float(fired.read_text()) if fired.exists() else 0.0, ranks, folder)


def _ended(folder: Path, rank: int, ended: processes.Ended) -> Ended:
    path = folder / f"ended-{rank}"
    record = (
        json.loads(path.read_text()) if path.exists() else {"error": "", "text": "", "time": 0.0}
    )
    return Ended(ended.status, **record, output=ended.out + ended.err)


def run_rank(rank: int, folder: str, case: dict[str, Any]) -> None:
    """Run one rank of a job in this process, and exit."""
    if spaces := case.get("spaces"):
        _enter(Path(folder), *spaces[rank])
    error = work(rank, Path(folder), case)
    sys.exit(0 if error is None else status_of(error))


def _enter(folder: Path, space: str, device: str) -> None:
    """Live in a network namespace, with a machine of its own."""
    with Path("/run/netns", space).open() as file:
        assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
    # Of a network that is this test's own: nobody else can hold the port.
    os.environ |= {"MASTER_ADDR": "10.213.0.1", "MASTER_PORT": "29533"}
    os.environ["GLOO_SOCKET_IFNAME"] = device
    # Sockets in folders would lead around the network: no path here is short enough for one.
    tempfile.tempdir = str(folder / f"{'machine' * 16}-{os.getpid()}")
    Path(tempfile.tempdir).mkdir()
    logging.basicConfig(level=logging.DEBUG)


def work(rank: int, folder: Path, case: dict[str, Any]) -> BaseException | None:
    """Run one rank; returns what it raised."""
    torch.set_num_threads(1)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    fired = folder / "fired"
    error: BaseException | None = None
    with fail_at(**case["fault"], before=lambda: fired.write_text(str(time.monotonic()))) as fault:
        try:
            train(rank, folder, fault, case)
        except BaseException as caught:
            error = caught
            traceback.print_exc()
    record = {"error": type(error).__name__, "text": str(error), "time": time.monotonic()}
    (folder / f"ended-{rank}").write_text(json.dumps(record))
    return error


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def lossless(output: Tensor, target: Tensor | None) -> Tensor:
    """A loss that does without a target."""
    return mean_loss(output, torch.zeros_like(output) if target is None else target)


def make_pipeline(case: dict[str, Any]) -> Pipeline:
    """A pipeline of a stage per rank."""
    torch.manual_seed(0)
    replicas, ranks = case.get("shape", (1, RANKS))
    options = dict[str, Any]()
    if replicas > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("dp", "pp"))
        options = {"mesh": mesh, "replicas": mesh["dp"]}
        if case.get("shards"):
            gathers = partial(fully_shard, mesh=mesh["dp"], reshard_after_forward=True)
            options = {"mesh": mesh, "wrap": lambda stage, _: gathers(stage)}
    loss_fn: Any = mean_loss
    if "weightless" in case:
        loss_fn = Loss(lossless, weight=len)
    return Pipeline(
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(ranks))),
        schedule=case.get("schedule", "1F1B"),
        microbatches=4,
        loss_fn=loss_fn,
        timeout=Timeouts(
            step=case.get("timeout", 60.0),
            first_step=case.get("first", 60.0),
            rendezvous=case.get("meeting", 60.0),
        ),
        **options,
    )


def train(rank: int, folder: Path, fault: Fault, case: dict[str, Any]) -> None:
    """Some steps of training, with whatever fault there is."""
    x = torch.arange(32.0).reshape(8, 4) / 32
    refusals: tuple[type[Exception], ...] = ()
    if "refuses" in case or "weightless" in case:
        refusals = UsageError, AgreementError
    sleeper = Sleeper(rank, folder, *case.get("sleeps", ("nowhere", (), 0.0)))
    sleeper("start")
    with make_pipeline(case) as pipe:
        pipe.job.report_failures_to(folder)
        if "forks" in case:
            pipe.on(case["forks"], before=lambda event: fork(folder))
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        sleeper.hook(pipe, optimizer)
        replica = pipe.replicas.index
        for step in fault.over(range(1, case.get("steps", 4) + 1), pipe.rank, replica):
            if step == 3:
                meddle_between(pipe, optimizer, sleeper, case)
            batch = x[:, :3] if case.get("refuses") == [replica, pipe.rank, step] else x
            target: dict[str, Any] = (
                {} if case.get("weightless") == [replica, step] else {"target": x}
            )
            try:
                pipe.step(batch, **target)
            except refusals as error:
                (folder / f"refused-{rank}").write_text(str(error))
                continue
            if case.get("raises") == [replica, pipe.rank, step]:
                sleeper.fire()
                raise TimeoutError("s3 read timed out")
            optimizer.step()
            optimizer.zero_grad()
            if step >= 2:
                (folder / f"trains-{rank}").touch()


class Sleeper:
    """Sleeps at a place in one step: by default in the third.

    Args:
        rank: the global rank of this process.
        folder: where it writes when it falls asleep.
        where: the place.
        ranks: who sleeps there.
        seconds: for how long.
    """

    def __init__(
        self, rank: int, folder: Path, where: str, ranks: Sequence[int], seconds: float
    ) -> None:
        self.rank, self.folder, self.where, self.seconds = rank, folder, where, seconds
        self.sleeps = rank in ranks
        self.calls = 0

    def __call__(self, where: str) -> bool:
        """Sleep, if this is the place; returns whether it was."""
        is_here = self.sleeps and where == self.where
        if is_here:
            self.fire()
            time.sleep(self.seconds)
        return is_here

    def fire(self) -> None:
        (self.folder / "fired").write_text(str(time.monotonic()))

    def count(self, where: str, number: int) -> None:
        """Sleep in the call of this number of a hook."""
        self.calls += 1
        if self.calls == number:
            self(where)

    def hook(self, pipe: Pipeline, optimizer: Any) -> None:
        """Have hooks sleep."""
        if self.where in ("first step", "forward"):
            number = 1 if self.where == "first step" else 3
            pipe.on(f"{pipe.rank}F2", before=lambda event: self.count(self.where, number))
        if self.where == "optimizer":
            optimizer.register_step_pre_hook(lambda *_: self.count("optimizer", 3))
        optimizer.register_state_dict_pre_hook(lambda *_: self("save") and None)


def meddle_between(pipe: Pipeline, optimizer: Any, sleeper: Sleeper, case: dict[str, Any]) -> None:
    """What happens in a process's own code before the third step."""
    sleeper("loader")
    if sleeper.where == "evaluation" and sleeper.sleeps:
        pipe.predict(torch.ones(8, 4))
        sleeper("evaluation")
        pipe.predict(torch.ones(8, 4))
    if sleeper.where == "save":
        Checkpoints(sleeper.folder / "saved").save(2, pipe=pipe, optimizer=optimizer)
    if case.get("terminates") == sleeper.rank:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        sleeper.fire()
        os.kill(os.getpid(), signal.SIGTERM)


def fork(folder: Path) -> None:
    """Fork once; the child goes on with the step, and its parent waits until it has ended."""
    if not (folder / "forked").exists():
        (folder / "forked").touch()
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            (folder / "forked").write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    raised = work(int(os.environ["RANK"]), Path(sys.argv[1]), json.loads(sys.argv[2]))
    if raised is not None:
        raise raised
