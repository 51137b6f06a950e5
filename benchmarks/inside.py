"""One training step with all ranks in this process, beside the same microbatches in a plain loop."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.pairs import Ratios, take_turns
from benchmarks.steps import REPEATS
from benchmarks.work import SCHEDULES, WORKS, Work, ours

AIMS = {("tiny", "1F1B"): 1.6, ("tiny", "ZB-V"): 1.8}
"""How much CPU time a step should take at most, of what the plain loop takes."""


def plain(work: Work) -> None:
    """The same modules, losses and backward calls by hand: each microbatch forward and back."""
    parts = zip(
        work.batch.chunk(work.microbatches), work.target.chunk(work.microbatches), strict=True
    )
    for value, target in parts:
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        for stage in work.stages:
            inputs.append(value.detach())
            if outputs:
                inputs[-1].requires_grad_()
            outputs.append(stage(inputs[-1]))
            value = outputs[-1]
        (work.loss(outputs.pop(), target) / work.microbatches).backward()
        while outputs:
            outputs.pop().backward(inputs.pop().grad)
    work.zero_grad()


def measure(case: str, schedule: str, rounds: int) -> Ratios:
    """Paired CPU times of one case, in seconds per step."""
    work = WORKS[case](SCHEDULES[schedule])
    pipe = ours(work, schedule, None)

    def run() -> None:
        pipe.step(work.batch, target=work.target)
        work.zero_grad()

    run()
    plain(work)
    times = take_turns({"ours": run, "bare": lambda: plain(work)}, rounds, REPEATS[case])
    return Ratios(times["ours"].cpu, times["bare"].cpu)


def compare(rounds: int) -> dict[str, Any]:
    """All cases, printed, and as JSON data."""
    found: dict[str, Any] = {}
    for case in WORKS:
        for schedule in SCHEDULES:
            ratios, aim = measure(case, schedule, rounds), AIMS.get((case, schedule))
            aimed = "" if aim is None else f"; aim {aim}"
            print(f"in process, {schedule}, {case}: CPU {ratios.told('a plain loop')}{aimed}")
            found[f"{case}, {schedule}"] = {"aim": aim, **ratios.to_json()}
    return found
