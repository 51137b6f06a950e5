"""One training step on two gloo processes: Penstock and the peer, in the same processes, in turn."""

from __future__ import annotations

from typing import Any

from benchmarks.pairs import Ratios, alternate
from benchmarks.work import RANKS, SCHEDULES, WORKS, Peer, ours
from penstock.testing import WorkerPool

REPEATS = {"gpt": 1, "tiny": 5}
AIMS = {
    ("gpt", "1F1B"): 1.0,
    ("gpt", "ZB-V"): 0.95,
    ("tiny", "1F1B"): 0.8,
    ("tiny", "ZB-V"): 0.8,
}
"""How long a step should take at most, in steps of the peer."""


def measure(group: Any, case: str, schedule: str, rounds: int) -> dict[str, list[float]]:
    """A worker's task: paired times of one case, in seconds per step."""
    work = WORKS[case](SCHEDULES[schedule])
    pipe, peer = ours(work, schedule, group), Peer(work, schedule, group)

    def run_ours() -> None:
        pipe.step(work.batch, target=work.target)
        work.zero_grad()

    def run_peer() -> None:
        peer.step()
        work.zero_grad()

    run_ours()
    run_peer()
    first, second = alternate(run_ours, run_peer, rounds, REPEATS[case])
    pipe.close()
    return {"ours": first, "peer": second}


def compare(rounds: int) -> dict[str, Any]:
    """All cases, printed, and as JSON data."""
    found: dict[str, Any] = {}
    with WorkerPool(RANKS) as workers:
        for (case, schedule), aim in AIMS.items():
            answers = workers.run(
                "benchmarks.steps:measure",
                RANKS,
                timeout=1200,
                case=case,
                schedule=schedule,
                rounds=rounds,
            )
            ratios = Ratios(answers[0]["ours"], answers[0]["peer"])
            print(f"step, {schedule:4}, {case:5}: {ratios}; aim {aim}")
            found[f"{case}, {schedule}"] = {"aim": aim, **ratios.to_json()}
    return found
