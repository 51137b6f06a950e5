"""Train for hundreds of steps with random faults, and check that every run ends as it should.

``python -m tests.fuzz.soak`` starts runs of a few steps on three gloo processes. In a third of them a rank
fails, in a way and at a place that are drawn from a seed. A run is good if all ranks end in time (but for one
that is stopped or holds the GIL), and every rank that still can names the culprit.
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
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock import Pipeline
from penstock.testing import fail_at

RANKS, STEPS, MICROBATCHES = 3, 6, 4
SILENT, MEETING, LIMIT = 2.0, 10.0, 120.0
SIGNALS = ("SIGKILL", "SIGSTOP", "SIGINT")
ANYWHERE = ("exception", "exit", "sleep", "hold the GIL", *SIGNALS)
SET_UP = ("connects", "cuts", "makes")
PROCESSES: Any = multiprocessing.get_context("forkserver")


FROZEN = ("SIGSTOP", "hold the GIL")
"""Faults after which a process stays until its launcher ends it."""


def draw_fault(chance: random.Random, schedule: str, share: float) -> dict[str, Any] | None:
    """Which rank fails, where and how, if any does."""
    if chance.random() >= share:
        return None
    rank, step = chance.randrange(RANKS), chance.randint(2, STEPS)
    where = chance.choice((*SET_UP, "between", *["step"] * 8))
    if where != "step":
        step = 0 if where in SET_UP else step
        return {"rank": rank, "step": step, "action": where, "how": chance.choice(ANYWHERE)}
    op = "F" if schedule == "ZB-H1" else chance.choice("FB")
    # The output of the last stage goes nowhere, so its shape does not matter.
    shape = ("shape",) if rank < RANKS - 1 and op == "F" else ()
    how = chance.choice((*ANYWHERE, "out of memory", *shape))
    action = f"{rank}{op}{chance.randrange(MICROBATCHES)}"
    return {"rank": rank, "step": step, "action": action, "how": how}


def work(rank: int, port: int, folder: str, schedule: str, fault: dict[str, Any] | None) -> None:
    """One process of a run."""
    sys.stdout = sys.stderr = Path(folder, f"out-{rank}").open("w", buffering=1)  # noqa: SIM115
    os.dup2(sys.stdout.fileno(), 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    reply: dict[str, Any] = {"error": "", "text": "", "time": 0.0}
    fired = Path(folder, "fired")
    try:
        if fault is None:
            train(schedule, range(STEPS))
        else:
            armed = fail_at(**fault, before=lambda: fired.write_text(str(time.monotonic())))
            train(schedule, armed.over(range(STEPS), rank))
    except BaseException as error:
        reply = {"error": type(error).__name__, "text": str(error), "time": time.monotonic()}
    Path(folder, f"ended-{rank}").write_text(json.dumps(reply))


def train(schedule: str, batches: Any) -> None:
    """Train a small model for some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(RANKS)))
    x = torch.rand(8, 4)
    with Pipeline(
        model, schedule=schedule, microbatches=MICROBATCHES, loss_fn=nn.functional.mse_loss,
        timeout=(60.0, SILENT), rendezvous_timeout=MEETING,
    ) as pipe:  # fmt: skip
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for _ in batches:
            pipe.step(x, target=x)
            optimizer.step()
            optimizer.zero_grad()


def run(schedule: str, fault: dict[str, Any] | None) -> tuple[list[str], float]:
    """Carry out a run: what was wrong with its end, and how many seconds the news of the fault took."""
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as folder:
        task = (free_port(), folder, schedule, fault)
        processes = [PROCESSES.Process(target=work, args=(rank, *task)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + LIMIT
        frozen = fault["rank"] if fault is not None and fault["how"] in FROZEN else None
        waited = {rank: process for rank, process in enumerate(processes) if rank != frozen}
        for process in waited.values():
            process.join(max(0.0, deadline - time.monotonic()))
        hung = {rank for rank, process in waited.items() if process.is_alive()}
        for process in processes:
            process.kill()
            process.join()
        return judge(fault, Path(folder), hung)


def judge(fault: dict[str, Any] | None, folder: Path, hung: set[int]) -> tuple[list[str], float]:
    culprit = None if fault is None else fault["rank"]
    problems = [f"rank {rank} hung" for rank in hung]
    fired, heard = folder / "fired", 0.0
    if fault is not None and not fired.exists():
        return [*problems, "the fault did not happen"], heard
    for rank in set(range(RANKS)) - {culprit} - hung:
        path = folder / f"ended-{rank}"
        if not path.exists():
            text = (folder / f"out-{rank}").read_text()
            problems.append(f"rank {rank} ended itself: {text[-2000:]}")
            continue
        reply = json.loads(path.read_text())
        right = reply["error"] == ("" if fault is None else "PeerFailed")
        if fault is not None:
            heard = max(heard, reply["time"] - float(fired.read_text()))
            right &= bool(re.search(rf"because rank {culprit}[,:]", reply["text"]))
        if not right:
            problems.append(f"rank {rank}: {reply['error']}: {reply['text']}")
    return problems, heard


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def main(arguments: list[str] | None = None) -> int:
    """Run the soak and print its figures; 0 if every run was good."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=300, help="training steps, over all runs")
    parser.add_argument("--share", type=float, default=1 / 3, help="the share of runs with a fault")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    PROCESSES.set_forkserver_preload(["penstock.pipeline", "penstock.testing"])
    chance, bad = random.Random(options.seed), 0
    kinds: Counter[str] = Counter()
    longest: dict[str, float] = {}
    for number in range(-(-options.steps // STEPS)):
        schedule = chance.choice(("1F1B", "GPipe", "ZB-H1"))
        fault = draw_fault(chance, schedule, options.share)
        problems, heard = run(schedule, fault)
        kind = "none" if fault is None else fault["how"]
        kinds[kind] += 1
        longest[kind] = max(heard, longest.get(kind, 0.0))
        if problems:
            bad += 1
            say(f"run {number}: {schedule}, {fault}: {'; '.join(problems)}")
    for kind, count in kinds.most_common():
        say(f"{count:4} runs, fault: {kind}, heard after {longest[kind]:.2f} s at most")
    say(f"{kinds.total()} runs of {STEPS} steps on {RANKS} processes, {bad} bad")
    return int(bad > 0)


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - this is a command


if __name__ == "__main__":
    sys.exit(main())
