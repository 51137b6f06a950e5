"""Hundreds of training steps on three gloo processes with random faults: each run ends as it should.

In a third of the runs a rank fails, in a way and at a place that are drawn from the seed. A run is good if
all ranks end in time (but for one that is stopped or holds the GIL), and every rank that still can names the
culprit.
"""

from __future__ import annotations

import itertools
import random
import re
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from campaigns.run import Campaign, Rows
from campaigns.table import Row
from tests.faults.jobs import RANKS, run_job
from tests.processes import warm_up

STEPS, SILENT, MEETING = 6, 2.0, 10.0
SET_UP = ("connects", "cuts")
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


def rows_of(name: str, schedule: str, fault: dict[str, Any]) -> Iterator[Row]:
    """Carry out a run: what was wrong with its end, and how many seconds the news of the fault took."""
    culprit = fault["rank"]
    frozen = culprit if fault.get("how") in FROZEN else -1
    options: dict[str, Any] = {"schedule": schedule, "steps": STEPS}
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as folder:
        try:
            job = run_job(
                Path(folder), fault=fault, frozen=frozen, timeout=SILENT, meeting=MEETING, **options
            )
        except AssertionError as error:
            yield Row(name, "hung", ("", error))
            return
    if fault is not NONE and not job.fired:
        yield Row(name, "no fault", ("", "the fault did not happen"))
        return
    says = f"because rank {culprit}[,:]"
    problems = [
        f"rank {rank}: {ended.error} {ended.text} {ended.output[-2000:]}"
        for rank, ended in enumerate(job.ranks)
        if rank != culprit and (ended.status if fault is NONE else not re.search(says, ended.text))
    ]
    heard = f"{job.heard(culprit):.2f} s" if job.fired else ""
    yield Row(name, "wrong" if problems else "good", (heard, "; ".join(problems)))


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--share", type=float, default=1 / 3, help="the share of runs with a fault")


def cases(options: Namespace) -> Generator[tuple[str, Rows]]:
    warm_up()
    chance = random.Random(options.seed)
    for number in itertools.count():
        schedule = chance.choice(("1F1B", "GPipe", "ZB-H1"))
        fault = draw_fault(chance, schedule, options.share)
        what = "no fault"
        if fault is not NONE:
            what = (
                f"{fault['how']} of rank {fault['rank']}, {fault['action']} of step {fault['step']}"
            )
        name = f"run {number}: {schedule}, {what}"
        yield name, partial(rows_of, name, schedule, fault)


CAMPAIGN = Campaign(
    cases,
    columns=("the others know after", "what is wrong"),
    bad=("hung", "no fault", "wrong"),
    seconds=600.0,
    options=add_options,
)
