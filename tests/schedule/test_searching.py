"""The search: against optima, bounds and the library; what it promises and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any, NamedTuple

import pytest

from penstock.schedule import (
    Costs,
    Placement,
    Schedule,
    looped,
    lower_bound,
    search,
    simulate,
    v_shaped,
    validate,
)

FEW = 3000
"""Moves that take a few tenths of a second."""

Counts = tuple[tuple[int, int, int], ...]
"""For each stage how many F and how many I or B are done, and how many Ws are owed."""
Queues = tuple[tuple[float, ...], ...]
"""For each stage when those of its values are there that the next one has not used."""


class Way(NamedTuple):
    """A way to do some part of a step: when its ranks are free, and when values and gradients are there."""

    free: tuple[float, ...]
    values: Queues
    gradients: Queues

    def is_no_later(self, other: Way) -> bool:
        queues = zip(self.values + self.gradients, other.values + other.gradients, strict=True)
        pairs = [(self.free, other.free), *queues]
        return all(a <= b for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))


class Exact:
    """The optimum of a small step of the chain, by the best ways to do each part of it, in any order.

    It shares nothing with the search but that the microbatches of a stage stay in order.
    """

    def __init__(
        self, costs: Costs, placement: Placement, microbatches: int, memory: float
    ) -> None:
        kinds = ("forward", "input", "backward", "weight")
        self.takes = [costs.per_stage(kind, placement.stages) for kind in kinds]
        self.activation = costs.per_stage("activation", placement.stages)
        self.stash = costs.per_stage("stash", placement.stages)
        self.rank_of, self.ranks, self.latency = placement.rank_of, placement.ranks, costs.latency
        self.m, self.memory = microbatches, memory

    def makespan(self) -> float:
        none: Queues = ((),) * len(self.rank_of)
        parts: list[dict[Counts, list[Way]]] = [{} for _ in range(3 * len(none) * self.m + 1)]
        parts[0][((0, 0, 0),) * len(none)] = [Way((0.0,) * self.ranks, none, none)]
        for size, part in enumerate(parts[:-1]):
            for (counts, ways), stage, kind in product(part.items(), range(len(none)), range(4)):
                more = self.counted(counts, stage, kind)
                if more is not None and self.fits(more, self.rank_of[stage]):
                    known = parts[size + (2 if kind == 2 else 1)].setdefault(more, [])
                    self.extend_all(ways, stage, kind, known)
        return min(max(way.free) for ways in parts[-1].values() for way in ways)

    def extend_all(self, ways: list[Way], stage: int, kind: int, known: list[Way]) -> None:
        for way in filter(None, (self.extended(way, stage, kind) for way in ways)):
            if not any(other.is_no_later(way) for other in known):
                known[:] = [other for other in known if not way.is_no_later(other)] + [way]

    def counted(self, counts: Counts, stage: int, kind: int) -> Counts | None:
        forwards, backwards, owed = counts[stage]
        possible = (forwards < self.m, backwards < forwards, backwards < forwards, owed > 0)
        change = ((1, 0, 0), (0, 1, 1), (0, 1, 0), (0, 0, -1))[kind]
        after = (forwards + change[0], backwards + change[1], owed + change[2])
        return (*counts[:stage], after, *counts[stage + 1 :]) if possible[kind] else None

    def fits(self, counts: Counts, rank: int) -> bool:
        held = sum(
            (forwards - backwards) * self.activation[stage] + owed * self.stash[stage]
            for stage, (forwards, backwards, owed) in enumerate(counts)
            if self.rank_of[stage] == rank
        )
        return held <= self.memory

    def extended(self, way: Way, stage: int, kind: int) -> Way | None:
        values, gradients, free = list(way.values), list(way.gradients), list(way.free)
        rank, last = self.rank_of[stage], len(values) - 1
        queue, source = (values, stage - 1) if kind == 0 else (gradients, stage + 1)
        start = free[rank]
        if kind != 3 and 0 <= source <= last:
            if not queue[source]:
                return None
            start, queue[source] = max(start, queue[source][0]), queue[source][1:]
        free[rank] = end = start + self.takes[kind][stage]
        user = stage + 1 if kind == 0 else stage - 1
        if kind != 3 and 0 <= user <= last:
            queue[stage] += (end + self.latency * (self.rank_of[user] != rank),)
        return Way(tuple(free), tuple(values), tuple(gradients))


def some_costs(random: Random, stages: int, **more: Any) -> Costs:
    kinds = ("forward", "input", "weight", "activation")
    drawn = {kind: [float(random.randint(3, 12)) for _ in range(stages)] for kind in kinds}
    stash = [random.choice((0.0, 0.5, 1.0)) * held for held in drawn["activation"]]
    return Costs(**{**drawn, "stash": stash, "latency": random.choice((0.0, 2.0)), **more})


def peaks_fit(schedule: Schedule, costs: Costs, memory: float) -> bool:
    return max(simulate(schedule, costs).peak_memory) <= memory * (1 + 1e-9)


SMALL = [
    pytest.param(placement, microbatches, room, id=f"{placement.rank_of}-{microbatches}-{room}")
    for placement, microbatches in (
        (looped(2), 3),
        (looped(3), 2),
        (v_shaped(2), 2),
        (looped(2, 2), 2),
        (Placement((0, 0, 1)), 2),
    )
    for room in (1.0, 1.6, math.inf)
]


@pytest.mark.parametrize(("placement", "microbatches", "room"), SMALL)
def test_small_steps_take_no_longer_than_the_optimum(
    placement: Placement, microbatches: int, room: float
) -> None:
    random = Random(f"{placement}{microbatches}{room}")
    costs = some_costs(random, placement.stages)
    if random.random() < 0.5:
        halves = (costs.per_stage(kind, placement.stages) for kind in ("input", "weight"))
        costs = replace(costs, backward=[0.8 * sum(pair) for pair in zip(*halves, strict=True)])
    held = costs.per_stage("activation", placement.stages)
    ranks = range(placement.ranks)
    memory = room * max(sum(held[s] for s in placement.stages_on(rank)) for rank in ranks)
    problem: dict[str, Any] = {
        "ranks": placement.ranks,
        "microbatches": microbatches,
        "memory": memory,
        "placement": placement,
    }
    optimum = Exact(costs, placement, microbatches, memory).makespan()
    found = search(costs, **problem, moves=4 * FEW)
    assert simulate(found, costs).makespan == pytest.approx(optimum)
    assert lower_bound(costs, **problem) <= optimum * (1 + 1e-9)
    assert validate(found).ok
    assert peaks_fit(found, costs, memory)
