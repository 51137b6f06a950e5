"""One training step with all ranks in this process, against the same microbatches in a plain loop."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.pairs import Ratios, take_turns
from benchmarks.steps import REPEATS
from benchmarks.work import SCHEDULES, Work, ours, tiny

AIMS = {"1F1B": 1.45, "ZB-V": 1.8, "ZB-H1": 1.6}
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


def measure(schedule: str, rounds: int) -> Ratios:
    """Paired CPU times of a step of tiny stages, in seconds."""
    work = tiny(SCHEDULES[schedule])
    pipe = ours(work, schedule, None)
    ways = {
        "ours": work.cleared(lambda: pipe.step(work.batch, target=work.target)),
        "bare": work.cleared(lambda: plain(work)),
    }
    for way in ways.values():
        way()
    times = take_turns(ways, rounds, REPEATS["tiny"])
    return Ratios(times["ours"].cpu, times["bare"].cpu)


def compare(rounds: int) -> dict[str, Any]:
    """All schedules, printed, and as JSON data."""
    figures: dict[str, Any] = {}
    for schedule, aim in AIMS.items():
        ratios = measure(schedule, rounds)
        print(f"in process, {schedule}, tiny: CPU {ratios.told('a plain loop')}; aim {aim}")
        figures[f"{schedule}, CPU time"] = {"aim": aim, **ratios.to_json()}
    return figures
