"""What checking every value and watching for faults costs: tiny stages on two gloo processes."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

from penstock.faults.monitor import Monitor
from penstock.runtime.bind import Wanted

from benchmarks.pairs import Ratios, alternate
from benchmarks.work import RANKS, SCHEDULES, ours, tiny
from penstock import Pipeline
from penstock.testing import WorkerPool
from penstock.values import ValueSpec

REPEATS = 5
AIM = 1.03
"""How long a step should take at most, in steps without checks and watch."""
IDLE = 3.0
"""Seconds over which the watch's own thread is measured."""


def measure(group: Any, schedule: str, rounds: int) -> dict[str, Any]:
    """A worker's task: paired times in seconds per step, and the watch's share of a core."""
    work = tiny(SCHEDULES[schedule])
    with patch.object(Monitor, "start", lambda _: None):
        bare = ours(work, schedule, group)
    whole = ours(work, schedule, group)

    def run(pipe: Pipeline) -> None:
        pipe.step(work.batch, target=work.target)
        work.zero_grad()

    def run_bare() -> None:
        with (
            patch.object(ValueSpec, "fits", lambda *_, **__: True),
            patch("penstock.runtime.rank.Wanted", lambda **of: Wanted(**{**of, "noted": False})),
        ):
            run(bare)

    run(whole)
    run_bare()
    first, second = alternate(lambda: run(whole), run_bare, rounds, REPEATS)
    started = time.process_time()
    time.sleep(IDLE)
    share = (time.process_time() - started) / IDLE
    whole.close()
    bare.close()
    return {"with": first, "without": second, "share": share}


def compare(rounds: int) -> dict[str, Any]:
    """Both schedules, printed, and as JSON data."""
    found: dict[str, Any] = {}
    with WorkerPool(RANKS) as workers:
        for schedule in SCHEDULES:
            answers = workers.run(
                "benchmarks.checks:measure", RANKS, timeout=1200, schedule=schedule, rounds=rounds
            )
            ratios = Ratios(answers[0]["with"], answers[0]["without"])
            share = max(answer["share"] for answer in answers)
            told = ratios.told("a step without")
            print(
                f"checks, {schedule:4}: {told}; aim {AIM}; the watch's thread: {share:.2%} of a core"
            )
            found[schedule] = {"aim": AIM, "share_of_core": share, **ratios.to_json()}
    return found
