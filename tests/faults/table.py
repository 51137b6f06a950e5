"""What the other processes say of a fault in one of them, and after how many seconds.

``python -m tests.faults.table`` tries each fault in jobs of 2 x 2 and 1 x 4 processes over gloo, and prints a
table in markdown, as docs/when-a-run-stops.md has it; faults of the network need the rights to make network
namespaces. With ``--healthy``: jobs that run on although somebody is slow for 45 s, and what their logs say.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from tests.faults.jobs import Ended, Job, run_job
from tests.faults.machines import cuts, machines

SHAPES = (2, 2), (1, 4)
"""Replicas, and ranks of each."""
CUTS = "both ways", "to the far side", "to the near side", "a machine is gone"
LONGEST = 130
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
        "hang in the loader of two ranks": (
            culprit,
            {"sleeps": ["loader", [culprit, culprit + 1], LONG]},
        ),
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


def run(frozen: int, limit: float, case: dict[str, Any]) -> Job:
    folder = Path(tempfile.mkdtemp(prefix="penstock-table-"))
    return run_job(folder, frozen=frozen, limit=limit, **case)


def tried(shape: tuple[int, int], name: str) -> tuple[str, str]:
    """What the others said, and when."""
    culprit, case = faults(shape)[name]
    # A save has 300 s of its own.
    limit = 360.0 if "save" in name else 120.0
    case = {"fault": NEVER, "shape": shape, "timeout": SILENT, **case}
    try:
        job = run(culprit if name in MUTE else -1, limit, case)
    except AssertionError as error:
        return f"**a process is left**: {str(error)[:300]!r}", "never"
    # Who hangs, and ends itself, says nothing.
    others = [e for process, e in enumerate(job.ranks) if process != culprit and e.error]
    if "refuses" not in case:
        return said(others), seconds(job, others)
    texts = {(job.folder / f"refused-{rank}").read_text() for rank in range(len(job.ranks))}
    statuses = {ended.status for ended in job.ranks}
    return f"refused on all: {shortest(texts)}", f"all go on, statuses {statuses}"


def cut(shape: tuple[int, int], name: str) -> tuple[str, str]:
    """The same for a link that is cut between the first half of the processes and the second."""
    with machines() as spaces:
        if not spaces:
            return "not tried: no network namespaces here", "-"
        case = {"fault": NEVER, "shape": shape, "timeout": SILENT, "steps": 10**9}
        sides = [spaces[0]] * 2 + [spaces[1]] * 2
        job = run(-1, 120.0, case | {"spaces": sides, "meddle": cuts(spaces)[name]})
    return said(job.ranks), seconds(job, job.ranks)


def seconds(job: Job, others: Sequence[Ended]) -> str:
    times = sorted(ended.time - job.fired for ended in others)
    return f"{times[0]:.1f} to {times[-1]:.1f}"


def said(others: Sequence[Ended]) -> str:
    """What processes said, without their own names."""
    kinds = "/".join(sorted({ended.error for ended in others}))
    texts = {re.sub(r"^.*? stopped because ", "", ended.text) for ended in others}
    # What differs is where the connection broke.
    return (
        f"{kinds}: {shortest({re.sub(r'Broken pipe|Connection reset.*?;', '', t) for t in texts})}"
    )


def shortest(texts: Iterable[str]) -> str:
    text = min(texts, key=len)
    return text if len(text) < LONGEST else f"{text[:LONGEST]} ..."


def row(name: str, of: Callable[[tuple[int, int], str], tuple[str, str]]) -> str:
    """A line of the first table."""
    both = [of(shape, name) for shape in SHAPES]
    title = name if of is tried else f"network cut: {name}"
    return f"| {title} | {both[0][0]} | {' | '.join(when for _, when in both)} |"


def healthy(name: str) -> str:
    """A line of the second table."""
    where, sleepers = SLEEPERS[name]
    # With replicas, the program starts the process group, and torch waits for all processes.
    shape = (1, 4) if where == "start" else (2, 2)
    case: dict[str, Any] = {"fault": NEVER, "shape": shape, "sleeps": [where, sleepers, SLOW]}
    job = run(-1, 120.0, {**case, "timeout": 600.0, "first": 600.0, "meeting": 300.0})
    lines = [
        line for ended in job.ranks for line in ended.output.splitlines() if "penstock:" in line
    ]
    return f"| {name} | {[ended.status for ended in job.ranks]} | {'<br>'.join(lines)[:400]} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.table", description=__doc__)
    parser.add_argument("--only", default="", help="faults that match this")
    parser.add_argument("--at-once", type=int, default=1, help="jobs beside each other")
    parser.add_argument("--healthy", action="store_true", help="the slow jobs, all at once")
    chosen = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.warm"])
    forkserver.ensure_running()
    work: list[Callable[[], str]] = [partial(healthy, name) for name in SLEEPERS]
    head = f"| {SLOW:g} s | exit statuses | what the log says |", "|---|---|---|"
    if not chosen.healthy:
        rows = [(name, tried) for name in faults(SHAPES[0])] + [(name, cut) for name in CUTS]
        work = [partial(row, *one) for one in rows if re.search(chosen.only, one[0])]
        shapes = " | ".join(f"{replicas} x {ranks}, s" for replicas, ranks in SHAPES)
        head = f"| fault | the others say | {shapes} |", "|---|---|---|---|"
    with ThreadPoolExecutor(len(work) if chosen.healthy else chosen.at_once) as pool:
        for line in chain(head, pool.map(lambda one: one(), work)):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
