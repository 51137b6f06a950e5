"""One GPT step on two gloo processes under a zero-bubble schedule, with 1F1B as the baseline."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.pairs import Ratios, take_turns
from benchmarks.work import RANKS, SCHEDULES, gpt, ours
from penstock.schedule import Costs, build, simulate
from penstock.testing import WorkerPool

BASELINE = "1F1B"
ZERO_BUBBLE = ("ZB-H1", "ZB-V")
MICROBATCHES = (4, 8)


def measure(group: Any, microbatches: int, rounds: int) -> dict[str, list[float]]:
    """A worker's task: seconds of a step under each schedule, in turns."""
    pipes, ways = [], {}
    for schedule in (BASELINE, *ZERO_BUBBLE):
        work = gpt(SCHEDULES[schedule], microbatches)
        pipes.append(ours(work, schedule, group))
        ways[schedule] = work.cleared(partial(pipes[-1].step, work.batch, target=work.target))
    for way in (*ways.values(), *ways.values()):
        way()
    times = take_turns(ways, rounds, repeats=1)
    for pipe in pipes:
        pipe.close()
    return {name: list(taken.elapsed) for name, taken in times.items()}


def simulated(schedule: str, microbatches: int) -> float:
    """The makespan, where F, I and W of a rank's share of the model take 1 each and messages no time."""
    made = build(schedule, ranks=RANKS, microbatches=microbatches)
    share = RANKS / made.stages
    return simulate(made, Costs(forward=share, input=share, weight=share)).makespan


def compare(rounds: int) -> dict[str, Any]:
    """All cases, printed, and as JSON data."""
    figures: dict[str, Any] = {}
    with WorkerPool(RANKS) as workers:
        for microbatches in MICROBATCHES:
            times = workers.run(
                "benchmarks.schedules:measure",
                RANKS,
                timeout=1200,
                microbatches=microbatches,
                rounds=rounds,
            )[0]
            for schedule in ZERO_BUBBLE:
                ratios = Ratios(times[schedule], times[BASELINE])
                expected = simulated(schedule, microbatches) / simulated(BASELINE, microbatches)
                title = f"{schedule}, {microbatches} microbatches (simulated: {expected:.2f})"
                print(f"{title}: {ratios.told(BASELINE)}")
                figures[title] = ratios.to_json()
    return figures
