"""Faults at all places of a job: what the other processes say of each, and after how many seconds.

Each fault is tried in jobs of 2 x 2 and 1 x 4 processes over gloo. Faults of the network need the rights to
make network namespaces. The cases "slow ..." are jobs that run on although somebody is slow for 45 s.
"""

from __future__ import annotations

import re
import tempfile
from argparse import Namespace
from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from campaigns.run import Campaign, Rows
from campaigns.table import Row
from tests.faults.jobs import Ended, Outcome, run_job
from tests.faults.machines import cuts, machines
from tests.processes import warm_up

SHAPES = (2, 2), (1, 4)
"""Replicas, and ranks of each."""
CUTS = "both ways", "to the far side", "to the near side", "a machine is gone"
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


def run(frozen: int, limit: float, case: dict[str, Any]) -> Outcome:
    folder = Path(tempfile.mkdtemp(prefix="penstock-table-"))
    return run_job(folder, frozen=frozen, limit=limit, **case)


def tried(shape: tuple[int, int], name: str) -> tuple[str, str, str]:
    """The verdict, what the others said, and when."""
    culprit, case = faults(shape)[name]
    # A save has 300 s of its own.
    limit = 360.0 if "save" in name else 120.0
    case = {"fault": NEVER, "shape": shape, "timeout": SILENT, **case}
    job = run(culprit if name in MUTE else -1, limit, case)
    others = [ended for process, ended in enumerate(job.ranks) if process != culprit]
    if "refuses" in case:
        texts = {(job.folder / f"refused-{rank}").read_text() for rank in range(len(job.ranks))}
        statuses = {ended.status for ended in job.ranks}
        verdict = "refused" if statuses == {0} else "ended"
        return verdict, shortest(texts), f"all go on, statuses {statuses}"
    return answered(job, others)


def cut(shape: tuple[int, int], name: str) -> tuple[str, str, str]:
    """The same for a link that is cut between the first half of the processes and the second."""
    with machines() as spaces:
        if not spaces:
            return "not tried", "no network namespaces here", ""
        case = {"fault": NEVER, "shape": shape, "timeout": SILENT, "steps": 10**9}
        sides = [spaces[0]] * 2 + [spaces[1]] * 2
        job = run(-1, 120.0, case | {"spaces": sides, "meddle": cuts(spaces)[name]})
    return answered(job, job.ranks)


def answered(job: Outcome, others: Sequence[Ended]) -> tuple[str, str, str]:
    # Who hangs, and ends itself, says nothing.
    said = [ended for ended in others if ended.error]
    kinds = "/".join(sorted({ended.error for ended in said}))
    # Without the names of who speaks, and what differs by where the connection broke.
    texts = {re.sub(r"^.*? stopped because ", "", ended.text) for ended in said}
    texts = {re.sub(r"Broken pipe|Connection reset.*?;", "", text) for text in texts}
    times = sorted(ended.time - job.fired for ended in said)
    if not job.fired or not said or kinds == "NoneType":
        return "no fault", kinds, ""
    return "told", f"{kinds}: {shortest(texts)}", f"{times[0]:.1f} to {times[-1]:.1f} s"


def shortest(texts: Iterable[str]) -> str:
    return min(texts, key=len)


def healthy(name: str) -> Iterator[Row]:
    """Jobs in which somebody is slow, and no more."""
    where, sleepers = SLEEPERS[name]
    # With replicas, the program starts the process group, and torch waits for all processes.
    shape = (1, 4) if where == "start" else (2, 2)
    case: dict[str, Any] = {"fault": NEVER, "shape": shape, "sleeps": [where, sleepers, SLOW]}
    job = run(-1, 120.0, {**case, "timeout": 600.0, "first": 600.0, "meeting": 300.0})
    lines = [
        line for ended in job.ranks for line in ended.output.splitlines() if "penstock:" in line
    ]
    verdict = "ended" if any(ended.status for ended in job.ranks) else "went on"
    yield Row(f"slow {name}", verdict, (f"{shape[0]} x {shape[1]}", "; ".join(lines), ""))


def rows_of(case: str, name: str, of: Any) -> Iterator[Row]:
    for shape in SHAPES:
        title = f"{shape[0]} x {shape[1]}"
        try:
            verdict, said, when = of(shape, name)
        except AssertionError as error:
            verdict, said, when = "left", str(error), ""
        yield Row(case, verdict, (title, said, when))


def cases(options: Namespace) -> Generator[tuple[str, Rows]]:
    warm_up()
    for name in faults(SHAPES[0]):
        yield name, partial(rows_of, name, name, tried)
    for name in CUTS:
        yield f"network cut: {name}", partial(rows_of, f"network cut: {name}", name, cut)
    for name in SLEEPERS:
        yield f"slow {name}", partial(healthy, name)


CAMPAIGN = Campaign(
    cases,
    columns=("processes", "the others say", "after"),
    bad=("left", "ended", "no fault"),
)
