"""One training step with all ranks in this process, beside the same microbatches in a plain loop."""

from __future__ import annotations

from typing import Any

from benchmarks.pairs import Ratios, alternate
from benchmarks.steps import REPEATS
from benchmarks.work import SCHEDULES, WORKS, Work, ours


def plain(work: Work) -> None:
    """What one process would do by hand: forward and backward of each microbatch."""
    parts = zip(
        work.batch.chunk(work.microbatches), work.target.chunk(work.microbatches), strict=True
    )
    for value, target in parts:
        for stage in work.stages:
            value = stage(value)
        (work.loss(value, target) / work.microbatches).backward()
    work.zero_grad()


def measure(case: str, schedule: str, rounds: int) -> Ratios:
    """Paired times of one case, in seconds per step."""
    work = WORKS[case](SCHEDULES[schedule])
    pipe = ours(work, schedule, None)

    def run() -> None:
        pipe.step(work.batch, target=work.target)
        work.zero_grad()

    run()
    plain(work)
    return Ratios(*alternate(run, lambda: plain(work), rounds, REPEATS[case]))


def compare(rounds: int) -> dict[str, Any]:
    """All cases, printed, and as JSON data."""
    found: dict[str, Any] = {}
    for case in WORKS:
        for schedule in SCHEDULES:
            ratios = measure(case, schedule, rounds)
            print(f"in process, {schedule:4}, {case:5}: {ratios.told('a plain loop')}")
            found[f"{case}, {schedule}"] = ratios.to_json()
    return found
