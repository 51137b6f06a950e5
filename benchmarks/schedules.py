"""Seconds to make, lower, validate and simulate large schedules: ``python -m benchmarks.schedules``.

Each case runs in a process of its own, so that its memory is its own. Times are of the processor, which
other work on the machine lengthens less than it does the wall clock.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Any, TypeVar
from unittest import mock

from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as peer

from penstock import schedule as ps

Times = dict[str, float]
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """A schedule to measure, and what it should take at most.

    Args:
        name: of the schedule.
        ranks: how many.
        stages_per_rank: how many.
        microbatches: how many.
        seconds: all four steps together should take no longer.
        peer: whether torch's own functions finish in reasonable time.
    """

    name: str
    ranks: int
    stages_per_rank: int
    microbatches: int
    seconds: float
    peer: bool = False

    def __str__(self) -> str:
        size = f"p={self.ranks} v={self.stages_per_rank} m={self.microbatches}"
        return f"{self.name} {size} (at most {self.seconds:g} s)"


CASES = (
    Case("Interleaved1F1B", 64, 2, 256, 1.5, peer=True),
    Case("Interleaved1F1B", 256, 2, 1024, 25),
    Case("1F1B", 1024, 1, 4096, 240),
)
SMALL = 1
"""How many of the cases take seconds rather than minutes."""


def measure(case: Case) -> dict[str, Any]:
    """Run a case here: seconds of each step, actions, and the most memory in bytes."""
    times: Times = {}
    made = _timed(
        times,
        "make",
        lambda: ps.build(
            case.name,
            ranks=case.ranks,
            microbatches=case.microbatches,
            stages_per_rank=case.stages_per_rank,
        ),
    )
    lowered = _timed(times, "lower", lambda: ps.add_communication(made))
    _timed(times, "validate", lambda: ps.validate(lowered)).raise_if_bad()
    _timed(times, "simulate", lambda: _measures(lowered))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "seconds": times,
        "total": sum(times.values()),
        "actions": sum(map(len, lowered.programs)),
        "memory": memory,
    }


def _measures(schedule: ps.Schedule) -> tuple[float, float, tuple[float, ...]]:
    ran = ps.simulate(schedule)
    return ran.makespan, ran.bubble, ran.peak_memory


def _timed(times: Times, step: str, run: Callable[[], T]) -> T:
    start = process_time()
    result = run()
    times[step] = process_time() - start
    return result


def measure_peer(case: Case) -> dict[str, Any]:
    """The same steps by torch's own functions; its simulator wants no UNSHARD, so they are left out."""
    times: Times = {}
    made = _timed(times, "make", lambda: _peer_programs(case))
    rank_of = {stage: stage % case.ranks for stage in range(case.ranks * case.stages_per_rank)}
    lowered = _timed(times, "lower", lambda: peer._add_send_recv(made(), rank_of.get, len(rank_of)))
    validate = peer._validate_schedule
    _timed(times, "validate", lambda: validate(made(), case.ranks, len(rank_of), case.microbatches))
    simulate = peer._simulate_comms_compute
    _timed(times, "simulate", lambda: simulate(lowered, rank_of.get, len(rank_of)))
    return {"seconds": times, "total": sum(times.values())}


def _peer_programs(case: Case) -> Callable[[], dict[int, list[Any]]]:
    """Copies of the peer's programs, since its passes empty what they are given."""
    stages = [
        mock.create_autospec(PipelineStage, instance=True) for _ in range(case.stages_per_rank)
    ]
    for stage in stages:
        stage.num_stages, stage.group_size = case.ranks * case.stages_per_rank, case.ranks
        stage.group_rank, stage.submod = 0, None
    kind = peer.get_schedule_class(case.name)
    with mock.patch.object(kind, "_prepare_schedule_with_comms"):
        order = kind(stages, case.microbatches).pipeline_order
    return lambda: {rank: [a for a in row if a is not None] for rank, row in order.items()}


def compare(rounds: int = 1, *, cases: int = len(CASES)) -> dict[str, Any]:
    """Measure the cases one after the other and print them.

    Args:
        rounds: unused; a large schedule is measured once.
        cases: how many of :data:`CASES`.
    """
    del rounds
    figures = {}
    for number, case in enumerate(CASES[:cases]):
        print(case)
        found: dict[str, Any] = {"case": asdict(case), "ours": _elsewhere("ours", number)}
        print("  ours ", _line(found["ours"]))
        if case.peer:
            found["peer"] = _elsewhere("peer", number)
            print("  torch", _line(found["peer"]))
        figures[str(case)] = found
    return figures


def _elsewhere(whose: str, number: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.schedules", "--one", whose, str(number)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, Any] = json.loads(printed)
    return found


def _line(found: dict[str, Any]) -> str:
    steps = ", ".join(f"{step} {seconds:.2f}" for step, seconds in found["seconds"].items())
    size = (
        f"; {found['actions']} actions, {found['memory'] / 1e9:.2f} GB"
        if "actions" in found
        else ""
    )
    return f"{found['total']:.2f} s ({steps}){size}"


def main(argv: list[str] | None = None) -> None:
    """Measure all cases, or the quick ones, and write ``bench-results/schedules.json``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedules", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only what takes seconds")
    parser.add_argument("--output", type=Path, default=Path("bench-results"))
    parser.add_argument("--one", nargs=2, metavar=("WHOSE", "CASE"), help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if chosen.one:
        run = measure if chosen.one[0] == "ours" else measure_peer
        print(json.dumps(run(CASES[int(chosen.one[1])])))
        return
    figures = compare(cases=SMALL if chosen.quick else len(CASES))
    chosen.output.mkdir(parents=True, exist_ok=True)
    (chosen.output / "schedules.json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
