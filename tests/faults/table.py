"""What the other processes say of a fault in one of them, and after how many seconds.

``python -m tests.faults.table`` prints each fault in jobs of 2 x 2 and 1 x 4 processes over gloo as markdown;
with ``--healthy``, jobs that run on although somebody is slow for 45 s, and what their logs say.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from tests.faults.jobs import Job, run_job

SILENT = 4.0
"""The limit in these jobs, in seconds."""
SLOW = 45.0
LONG = 3600.0
NEVER = {"rank": 99, "step": 1, "how": "sleep"}
MUTE = ("SIGSTOP", "SIGSTOP of the host of the store")
"""After these, the process itself is there until its launcher ends it."""


def faults(shape: tuple[int, int]) -> dict[str, tuple[int, dict[str, Any]]]:
    """For each fault the process that it happens in, and the case."""
    replicas, ranks = shape
    culprit = replicas * ranks // 2
    replica, rank = divmod(culprit, ranks)

    def injected(how: str, action: str = f"{rank}F2", process: int = culprit) -> Any:
        at = {"rank": process % ranks, "replica": process // ranks if replicas > 1 else None}
        return process, {"fault": {**at, "step": 3, "action": action, "how": how}}

    def asleep(where: str) -> Any:
        return culprit, {"sleeps": [where, [culprit], LONG]}

    return {
        "exception in a forward": injected("exception"),
        "exception between steps": injected("exception", "between"),
        "a loader's own TimeoutError": (culprit, {"raises": [replica, rank, 3]}),
        "SIGKILL": injected("SIGKILL"),
        "SIGKILL of the host of the store": injected("SIGKILL", "0F2", 0),
        "SIGTERM, unhandled": injected("SIGTERM"),
        "SIGTERM, handled": (culprit, {"terminates": culprit}),
        "os._exit between steps": injected("exit", "between"),
        "loop that ends early": injected("short iterator", "between"),
        "refused batch": (culprit, {"refuses": [replica, rank, 3]}),
        "SIGSTOP": injected("SIGSTOP"),
        "SIGSTOP of the host of the store": injected("SIGSTOP", "0F2", 0),
        "hang in the loader": asleep("loader"),
        "hang in a forward": asleep("forward"),
        "hang in an optimizer step": asleep("optimizer"),
        "hang in a save": asleep("save"),
    }


SLEEPERS: dict[str, tuple[str, list[int]]] = {
    "in one rank's loader": ("loader", [2]),
    "in one replica's evaluation": ("evaluation", [2, 3]),
    "in a first step": ("first step", [2]),
    "between the starts of two processes": ("start", [2]),
}


def run(culprit: int, name: str, case: dict[str, Any]) -> tuple[Job, Path]:
    folder = Path(tempfile.mkdtemp(prefix="penstock-table-"))
    # A save has 300 s of its own.
    limit = 360.0 if "save" in name else 120.0
    return run_job(folder, frozen=culprit if name in MUTE else -1, limit=limit, **case), folder


def row(shape: tuple[int, int], name: str) -> str:
    """A line of the first table."""
    culprit, case = faults(shape)[name]
    case = {"fault": NEVER, "shape": shape, "timeout": SILENT, **case}
    where = f"| {shape[0]} x {shape[1]} | {name} | {culprit} "
    try:
        job, folder = run(culprit, name, case)
    except AssertionError as error:
        return f"{where}| **a process is left**: {str(error)[:300]!r} | |"
    others = [ended for process, ended in enumerate(job.ranks) if process != culprit]
    texts = [ended.text for ended in others]
    if "refuses" in case:
        texts = [
            f"refused: {(folder / f'refused-{process}').read_text()}"
            for process in range(len(job.ranks))
        ]
        seconds = f"all go on, statuses {[ended.status for ended in job.ranks]}"
    else:
        times = sorted(ended.time - job.fired for ended in others)
        seconds = f"{times[0]:.1f} to {times[-1]:.1f}"
    said = {re.sub(r"^.*? stopped because ", "", text) for text in texts}
    kinds = "/".join(sorted({ended.error for ended in others}))
    return f"{where}| {kinds}: {' **or** '.join(sorted(one[:170] for one in said))} | {seconds} |"


def healthy(name: str) -> str:
    """A line of the second table."""
    where, sleepers = SLEEPERS[name]
    # With replicas, the program starts the process group, and torch waits for all processes.
    shape = (1, 4) if where == "start" else (2, 2)
    case: dict[str, Any] = {"fault": NEVER, "shape": shape, "sleeps": [where, sleepers, SLOW]}
    job, _ = run(-1, name, {**case, "timeout": 600.0, "first": 600.0, "meeting": 300.0})
    lines = [
        line for ended in job.ranks for line in ended.output.splitlines() if "penstock:" in line
    ]
    return f"| {name} | {[ended.status for ended in job.ranks]} | {'<br>'.join(lines)[:400]} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.table", description=__doc__)
    parser.add_argument("--only", default="", help="jobs such as '2 x 2, SIGKILL' that match this")
    parser.add_argument("--at-once", type=int, default=1, help="jobs beside each other")
    parser.add_argument("--healthy", action="store_true", help="the slow jobs, all at once")
    chosen = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.warm"])
    forkserver.ensure_running()
    shapes = (2, 2), (1, 4)
    work: list[Callable[[], str]] = [partial(healthy, name) for name in SLEEPERS]
    head = f"| {SLOW:g} s | exit statuses | what the log says |", "|---|---|---|"
    if not chosen.healthy:
        rows = [(shape, name) for shape in shapes for name in faults(shape)]
        only = [
            one for one in rows if re.search(chosen.only, f"{one[0][0]} x {one[0][1]}, {one[1]}")
        ]
        work = [partial(row, *one) for one in only]
        job = f"| job, limit {SILENT:g} s | fault | in process "
        head = f"{job}| the others say | after, s |", "|---|---|---|---|---|"
    with ThreadPoolExecutor(len(work) if chosen.healthy else chosen.at_once) as pool:
        for line in chain(head, pool.map(lambda one: one(), work)):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
