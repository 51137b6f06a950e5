"""Train for hundreds of steps with random faults, and check that every run ends as it should.

``python -m tests.fuzz.soak`` starts runs of a few steps on three gloo processes. In a third of them a rank
fails, in a way and at a place that are drawn from a seed. A run is good if all ranks end in time (but for one
that is stopped or holds the GIL), and every rank that still can names the culprit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.faults.jobs import RANKS, run_job

STEPS, SILENT, MEETING = 6, 2.0, 10.0
SET_UP = ("connects", "cuts", "makes")
ANYWHERE = ("exception", "exit", "sleep", "hold the GIL", "SIGKILL", "SIGSTOP", "SIGINT")
FROZEN = ("SIGSTOP", "hold the GIL")
"""Faults after which a process stays until its launcher ends it."""
NONE = {"rank": RANKS, "step": 1}


def draw_fault(chance: random.Random, schedule: str, share: float) -> dict[str, Any]:
    """Which rank fails, where and how, if any does."""
    if chance.random() >= share:
        return NONE
    rank, step = chance.randrange(RANKS), chance.randint(2, STEPS)
    where = chance.choice((*SET_UP, "between", *["step"] * 8))
    if where != "step":
        step = 0 if where in SET_UP else step
        return {"rank": rank, "step": step, "action": where, "how": chance.choice(ANYWHERE)}
    op = "F" if schedule == "ZB-H1" else chance.choice("FB")
    # The output of the last stage goes nowhere, so its shape does not matter.
    shape = ("shape",) if rank < RANKS - 1 and op == "F" else ()
    how = chance.choice((*ANYWHERE, "out of memory", *shape))
    return {"rank": rank, "step": step, "action": f"{rank}{op}{chance.randrange(4)}", "how": how}


def run(schedule: str, fault: dict[str, Any]) -> tuple[list[str], float]:
    """Carry out a run: what was wrong with its end, and how many seconds the news of the fault took."""
    culprit = fault["rank"]
    options: dict[str, Any] = {
        "schedule": schedule,
        "steps": STEPS,
        "timeout": SILENT,
        "meeting": MEETING,
    }
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as folder:
        frozen = culprit if fault.get("how") in FROZEN else -1
        try:
            job = run_job(Path(folder), fault=fault, frozen=frozen, **options)
        except AssertionError as error:
            return [f"a rank hung: {error}"], 0.0
    if fault is not NONE and not job.fired:
        return ["the fault did not happen"], 0.0
    says = f"because rank {culprit}[,:]"
    problems = [
        f"rank {rank}: {ended.error} {ended.text} {ended.output[-2000:]}"
        for rank, ended in enumerate(job.ranks)
        if rank != culprit and (ended.status if fault is NONE else not re.search(says, ended.text))
    ]
    return problems, job.heard(culprit) if job.fired else 0.0


def main(arguments: list[str] | None = None) -> int:
    """Run the soak and print its figures; 0 if every run was good."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=300, help="training steps, over all runs")
    parser.add_argument("--share", type=float, default=1 / 3, help="the share of runs with a fault")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.warm"])
    chance, bad = random.Random(options.seed), 0
    kinds: Counter[str] = Counter()
    longest: dict[str, float] = {}
    for number in range(-(-options.steps // STEPS)):
        schedule = chance.choice(("1F1B", "GPipe", "ZB-H1"))
        fault = draw_fault(chance, schedule, options.share)
        problems, heard = run(schedule, fault)
        kind = fault.get("how", "none")
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
