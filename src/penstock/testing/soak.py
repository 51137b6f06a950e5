"""Train for hundreds of steps with random faults, and check that every run ends as it should.

``python -m penstock.testing.soak`` starts runs of a few steps on three gloo processes. In a third of them a
rank fails, in a way and at a place that are drawn from a seed. A run is good if no process is left, all ranks
ended in time, and every rank that still could named the culprit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.faults import status_of
from penstock.pipeline import Pipeline
from penstock.testing.faults import fail_at

RANKS, STEPS, MICROBATCHES = 3, 6, 4
SILENT = 2.0
MEETING = 10.0
LIMIT = 120.0
ANYWHERE = (
    "exception",
    "out of memory",
    "SIGKILL",
    "SIGSTOP",
    "SIGINT",
    "exit",
    "sleep",
    "hold the GIL",
)
FORWARD = (*ANYWHERE, "shape")
"""Not for the last stage: its output goes nowhere, so its shape does not matter."""
SET_UP = ("connects", "cuts", "makes")
PLACES = (*SET_UP, "between", *["step"] * 8)
"""Where a fault happens: in a step, between two steps, or while the Pipeline is being made."""
SCHEDULES = ("1F1B", "GPipe", "ZB-H1")


@dataclass(frozen=True)
class Plan:
    """What a run does: its schedule, and which rank fails where and how, if any does."""

    schedule: str
    fault: dict[str, Any] | None


@dataclass(frozen=True)
class Verdict:
    """How a run ended: what was wrong with that, and after how many seconds the others knew of the fault."""

    problems: tuple[str, ...]
    heard: float | None


def plan_of(draw: random.Random) -> Plan:
    """The plan of the next run; a third of them have a fault."""
    schedule = draw.choice(SCHEDULES)
    if draw.random() >= 1 / 3:
        return Plan(schedule, None)
    rank = draw.randrange(RANKS)
    where = draw.choice(PLACES)
    if where != "step":
        step, action = (0, where) if where in SET_UP else (draw.randint(2, STEPS), where)
        how = draw.choice([how for how in ANYWHERE if how != "out of memory"])
        return Plan(schedule, {"rank": rank, "step": step, "action": action, "how": how})
    op = "F" if schedule == "ZB-H1" else draw.choice("FB")
    action = f"{rank}{op}{draw.randrange(MICROBATCHES)}"
    how = draw.choice(ANYWHERE if rank == RANKS - 1 or op == "B" else FORWARD)
    step = draw.randint(2, STEPS)
    return Plan(schedule, {"rank": rank, "step": step, "action": action, "how": how})


def work(rank: int, port: int, folder: str, plan: Plan) -> None:
    """Run one process of a run."""
    sys.stdout = sys.stderr = Path(folder, f"out-{rank}").open("w", buffering=1)  # noqa: SIM115
    os.dup2(sys.stdout.fileno(), 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    told: dict[str, Any] = {"error": "", "text": "", "time": 0.0}
    status = 0
    fired = Path(folder, "fired")
    try:
        batches: Iterable[int] = range(STEPS)
        if plan.fault is not None:
            fault = fail_at(**plan.fault, before=lambda: fired.write_text(str(time.monotonic())))
            batches = fault.over(batches, rank)
        train(plan.schedule, batches)
    except BaseException as error:
        status = status_of(error)
        told = {"error": type(error).__name__, "text": str(error), "time": time.monotonic()}
    Path(folder, f"ended-{rank}").write_text(json.dumps(told))
    sys.exit(status)


def train(schedule: str, batches: Iterable[int]) -> None:
    """Train a small model for some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(RANKS)))
    x = torch.rand(8, 4)
    made = Pipeline(
        model,
        schedule=schedule,
        microbatches=MICROBATCHES,
        loss_fn=_loss,
        timeout=(60.0, SILENT),
        rendezvous_timeout=MEETING,
    )
    with made as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for _ in batches:
            pipe.step(x, target=x)
            optimizer.step()
            optimizer.zero_grad()


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def run(plan: Plan) -> Verdict:
    """Carry out a run and judge it."""
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as folder:
        port = _free_port()
        processes = [
            context.Process(target=work, args=(rank, port, folder, plan)) for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + LIMIT
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        return judge(plan, Path(folder), hung, [process.exitcode for process in processes])


def judge(plan: Plan, folder: Path, hung: list[int], statuses: list[int | None]) -> Verdict:
    """What is wrong with how a run ended."""
    problems = [f"rank {rank} hung" for rank in hung]
    if plan.fault is None:
        problems += [f"rank {r} ended with {s}" for r, s in enumerate(statuses) if s]
        return Verdict(tuple(problems), None)
    culprit, heard = plan.fault["rank"], 0.0
    fired = folder / "fired"
    if not fired.exists():
        return Verdict((*problems, "the fault did not happen"), None)
    for rank in set(range(RANKS)) - {culprit} - set(hung):
        told = json.loads((folder / f"ended-{rank}").read_text())
        heard = max(heard, told["time"] - float(fired.read_text()))
        if told["error"] != "PeerFailed" or not re.search(
            rf"because rank {culprit}[,:]", told["text"]
        ):
            problems.append(f"rank {rank}: {told['error']}: {told['text']}")
    return Verdict(tuple(problems), heard)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def main(arguments: list[str] | None = None) -> int:
    """Run the soak and print its figures; 0 if every run was good."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=300, help="training steps, over all runs")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["penstock.pipeline.pipeline", "penstock.testing"]
    )
    draw, heard, bad = random.Random(options.seed), dict[str, list[float]](), 0
    kinds: Counter[str] = Counter()
    for number in range(-(-options.steps // STEPS)):
        plan = plan_of(draw)
        verdict = run(plan)
        kind = "none" if plan.fault is None else plan.fault["how"]
        kinds[kind] += 1
        if verdict.heard is not None:
            heard.setdefault(kind, []).append(verdict.heard)
        if verdict.problems:
            bad += 1
            _say(f"run {number}: {plan}: {'; '.join(verdict.problems)}")
    for kind, count in kinds.most_common():
        worst = f", heard after {max(heard[kind]):.2f} s at most" if kind in heard else ""
        _say(f"{count:4} runs, fault: {kind}{worst}")
    _say(f"{sum(kinds.values())} runs of {STEPS} steps on {RANKS} processes, {bad} bad")
    return 1 if bad else 0


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - this is a command


if __name__ == "__main__":
    sys.exit(main())
