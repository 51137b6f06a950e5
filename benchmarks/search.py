"""What a search finds, beside the library and what none can beat: ``python -m benchmarks search``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from penstock import schedule as ps

KNOWN = ("ZB-H1", "ZB-H2", "ZB-V", "V-Half", "V-Min")
RANKS, MICROBATCHES = (2, 4, 8), (8, 16, 24)
ROOMS = (0.75, 1.0, 1.5)
"""What a rank may hold, as a share of what its part of the model takes for a microbatch per rank."""


def compare(rounds: int) -> dict[str, Any]:
    """Search at equal costs in the memory of known schedules, then at random costs; print and return it all.

    Args:
        rounds: of random costs for each number of ranks and of microbatches, one for ten.
    """
    return {"equal": list(_equal()), "random": list(_random(max(1, rounds // 10)))}


def _equal() -> Iterator[dict[str, Any]]:
    """Each known schedule of the library, and what is found in its memory."""
    print("F = I = W = 1, 4 ranks, 8 microbatches: makespan")
    for name in KNOWN:
        known = ps.build(name, ranks=4, microbatches=8)
        ran = ps.simulate(known)
        found = _searched(ps.Costs(), known.placement, 8, max(ran.peak_memory))
        figures = {"library": ran.makespan, **found}
        print(f"  in the memory of {name:7}", _line(figures))
        yield {"name": name, **figures}


def _random(draws: int) -> Iterator[dict[str, Any]]:
    """Random costs for each size, one stage per rank and two in a V."""
    print("random costs: gap to the lower bound, median and worst")
    for ranks, microbatches in product(RANKS, MICROBATCHES):
        random = Random(f"{ranks} {microbatches}")
        found = [_drawn(ranks, microbatches, number, random) for number in range(draws)]
        gaps = [one["makespan"] / one["bound"] - 1 for one in found]
        seconds = [one["seconds"] for one in found]
        print(
            f"  {ranks} ranks, {microbatches:2} microbatches: {median(gaps):6.2%}, {max(gaps):6.2%} "
            f"in {median(seconds):.1f} s, {max(seconds):.1f} s"
        )
        yield {"ranks": ranks, "microbatches": microbatches, "found": found}


def _drawn(ranks: int, microbatches: int, number: int, random: Random) -> dict[str, Any]:
    placement = (ps.looped(ranks), ps.v_shaped(ranks))[number % 2]
    stages = placement.stages
    kinds = ("forward", "input", "weight", "activation")
    drawn: dict[str, Any] = {kind: [random.uniform(1, 3) for _ in range(stages)] for kind in kinds}
    costs = ps.Costs(**drawn, stash=[held / 2 for held in drawn["activation"]], latency=0.1)
    held = max(
        sum(drawn["activation"][stage] for stage in placement.stages_on(rank))
        for rank in range(ranks)
    )
    memory = held * max(1, ranks * random.choice(ROOMS))
    return {"stages": stages, **_searched(costs, placement, microbatches, memory)}


def _searched(
    costs: ps.Costs, placement: ps.Placement, microbatches: int, memory: float
) -> dict[str, float]:
    step: dict[str, Any] = {
        "ranks": placement.ranks,
        "microbatches": microbatches,
        "memory": memory,
        "placement": placement,
    }
    start = perf_counter()
    found = ps.search(costs, **step)
    seconds = perf_counter() - start
    bound = ps.lower_bound(costs, **step)
    makespan = ps.simulate(found, costs).makespan
    return {"makespan": makespan, "bound": bound, "seconds": seconds}


def _line(figures: dict[str, float]) -> str:
    return ", ".join(f"{kind} {figure:.4g}" for kind, figure in figures.items())
