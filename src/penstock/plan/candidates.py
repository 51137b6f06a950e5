"""The candidates for a plan: ways to run a model, how each is cut, what it costs, and whether it fits.

Each candidate is a schedule, numbers of ranks, replicas, stages and microbatches, and how much is computed
again. It is cut so that the ranks of its placement have about equal work. It is simulated twice: first
without its messages spelled out, which never takes longer than with them, and then with them. A candidate
that is proven to be slower than a known one is not simulated at all:

- with no cut is the step shorter than all work shared out evenly;
- with a given cut, a rank cannot start before the stages ahead of it have run a microbatch, then has all its
  own work to do, and after that a whole backward must still pass the stages ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product

from penstock.errors import ScheduleError
from penstock.partition import choose_cuts
from penstock.plan import answer
from penstock.plan.answer import Shape, peak_memory
from penstock.plan.costs import Cut, Profile, StageCosts, UnitCost, UnitCosts, runs_of
from penstock.schedule import Op, Placement, Schedule
from penstock.schedule.library import find

POLICIES = ("none", "needed", "all")
MOST_MICROBATCHES = 6
"""How many numbers of microbatches are tried by default."""
LAPS = (2, 3, 4)
"""The numbers of stages per rank that are tried by default, if a schedule takes any number."""
MANY_STAGES = 32
"""With more stages than this, and more than two per rank, stages are made equal rather than ranks."""
SEARCHED = "searched"
"""The name of a schedule that was searched for these costs."""


@dataclass(frozen=True)
class Wanted:
    """What is planned, and what the user has fixed.

    Args:
        devices: how many devices there are.
        batch: the samples of a step, of all replicas together.
        memory: the bytes that a rank may hold; 0 for no limit.
        schedules: the names of the schedules to try.
        ranks: the numbers of ranks of a pipeline to try.
        stages_per_rank: the numbers of stages per rank to try; None for the usual ones.
        microbatches: the numbers of microbatches to try; None for the usual ones.
        checkpoint: which of :data:`POLICIES` to try.
        states: bytes of optimizer state for each byte of trained weights.
        keep: how many plans to keep.
    """

    devices: int
    batch: int
    memory: float
    schedules: tuple[str, ...]
    ranks: tuple[int, ...]
    stages_per_rank: tuple[int, ...] | None
    microbatches: tuple[int, ...] | None
    checkpoint: tuple[str, ...]
    states: float
    keep: int

    def shapes(self, units: int) -> Iterator[Shape]:
        """All candidates for a model of so many units."""
        for ranks in self.ranks:
            replicas = self.devices // ranks
            if self.batch % replicas:
                continue
            part = self.batch // replicas
            # One rank waits for nothing, so any schedule is as fast; the first one, 1F1B, holds least.
            for name in self.schedules if ranks > 1 else self.schedules[:1]:
                laps = [each for each in self._laps(name) if ranks * each <= units]
                counts = self._microbatches(ranks, part)
                for each, count, policy in product(laps, counts, self.checkpoint):
                    yield Shape(name, ranks, replicas, each, count, part // count, policy)

    def _laps(self, name: str) -> tuple[int, ...]:
        """How many stages per rank a schedule is tried with."""
        recipe = find(name)[1]
        if recipe.any_stages:
            return self.stages_per_rank or LAPS
        own = recipe.stages_per_rank
        return (own,) if own in (self.stages_per_rank or (own,)) else ()

    def _microbatches(self, ranks: int, part: int) -> tuple[int, ...]:
        if self.microbatches is not None:
            return tuple(m for m in self.microbatches if m <= part and part % m == 0)
        counts = [m for m in range(1, part + 1) if part % m == 0]
        enough = [m for m in counts if m >= ranks] or counts[-1:]
        # Each is at least twice the one before, since neighbours differ little.
        found: list[int] = []
        for count in enough:
            if not found or count >= 2 * found[-1]:
                found.append(count)
        return tuple(found[:MOST_MICROBATCHES])


# ---- candidates


@lru_cache(maxsize=64)
def built(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Schedule | None:
    """A schedule of the library; None if it has none for such numbers."""
    shape = Shape(name, ranks, 1, stages_per_rank, microbatches, 1, "none")
    try:
        return answer.scheduled(shape)
    except ScheduleError:
        return None


@lru_cache(maxsize=1024)
def _even_cut(shares: tuple[float, ...], placement: Placement) -> Cut:
    laps, many = placement.stages // placement.ranks, placement.stages > MANY_STAGES
    # With many laps, even stages make even ranks; making the ranks still more even would take long.
    return choose_cuts(shares, placement.stages, None if many and laps > 2 else placement)


@dataclass
class Candidate:
    """A shape with a cut, and what that costs."""

    shape: Shape
    schedule: Schedule
    cut: Cut
    again: frozenset[int]
    stage_costs: StageCosts
    reduce: float
    memory: tuple[float, ...] = ()
    seconds: float = field(default=float("inf"))


class Candidates:
    """Makes candidates of shapes.

    Args:
        profile: what the units cost.
        wanted: what is planned.

    Attributes:
        least: of all candidates that do not fit the one that needs the least memory.
    """

    def __init__(self, profile: Profile, wanted: Wanted) -> None:
        self.profile = profile
        self.wanted = wanted
        self.least: Candidate | None = None

    def at_least(self, shape: Shape) -> float:
        """A time that no cut of the units beats: all work, shared out evenly."""
        costs = self.profile.at(shape.samples)
        work = sum(_works(costs, shape.checkpoint))
        saved = sum(costs.between) * (len(costs.units) - shape.ranks)
        return shape.microbatches * max(work - saved, 0.0) / shape.ranks

    def least_memory(self, shape: Shape) -> float:
        """Bytes that some rank holds with any cut: those that the largest unit always needs."""
        units = self.profile.at(shape.samples).units
        return max(unit.parameters + unit.trained * (1 + self.wanted.states) for unit in units)

    def bound(self, schedule: Schedule, stage_costs: StageCosts) -> float:
        """A time that no order of the actions beats, for a cut."""
        costs, stages = stage_costs.costs, schedule.stages
        forward = costs.per_stage("forward", stages)
        whole, split = costs.per_stage("backward", stages), {Op.I, Op.W} <= schedule.ops
        halves = [
            first + second
            for first, second in zip(
                costs.per_stage("input", stages), costs.per_stage("weight", stages), strict=True
            )
        ]
        backward = [min(b, h) if split else b for b, h in zip(whole, halves, strict=True)]
        found = 0.0
        for rank in range(schedule.ranks):
            mine = schedule.placement.stages_on(rank)
            own = sum(forward[stage] + backward[stage] for stage in mine)
            ahead = sum(forward[: mine[0]])
            behind = 0.0 if split else sum(backward[: mine[0]])
            found = max(found, ahead + schedule.microbatches * own + behind)
        return found

    def cuts(self, shape: Shape, schedule: Schedule) -> list[Cut]:
        """Cuts that make the ranks equal: by time, and where memory is limited also by what is held."""
        costs = self.profile.at(shape.samples)
        weighed = [_works(costs, shape.checkpoint)]
        if self.wanted.memory:
            alive = min(schedule.ranks, schedule.microbatches)
            states = self.wanted.states
            weighed.append([_weight(unit, alive, shape.checkpoint, states) for unit in costs.units])
        found = []
        for weights in weighed:
            # As shares, so that candidates that differ only in the size of microbatches share a cut.
            whole = sum(weights) or 1.0
            shares = tuple(round(weight / whole, 9) for weight in weights)
            cut = _even_cut(shares, schedule.placement)
            if cut not in found:
                found.append(cut)
        return found

    def fitted(self, shape: Shape, schedule: Schedule, cut: Cut) -> Candidate | None:
        """A candidate that keeps to the memory, by computing as much again as that needs."""
        costs = self.profile.at(shape.samples)
        units = range(len(costs.units))
        again = frozenset(units if shape.checkpoint == "all" else ())
        candidate = self.composed(shape, schedule, cut, again)
        if self.fits(candidate):
            # If nothing has to be computed again, this is the candidate of the policy "none".
            return None if shape.checkpoint == "needed" else candidate
        if shape.checkpoint != "needed":
            return None
        while True:
            more = self._to_compute_again(candidate, costs)
            if not more:
                return None
            again |= more
            candidate = self.composed(shape, schedule, cut, again)
            if self.fits(candidate):
                return candidate

    def composed(
        self, shape: Shape, schedule: Schedule, cut: Cut, again: frozenset[int]
    ) -> Candidate:
        """A candidate in which these units are computed again."""
        costs = self.profile.at(shape.samples)
        latency, bandwidth = self.profile.wire(self.wanted.devices)
        stage_costs = costs.stages(
            cut,
            schedule.placement,
            checkpoint=again,
            states=self.wanted.states,
            latency=latency,
            bandwidth=bandwidth,
            handling=self.profile.handling,
        )
        reduce = _reduce(shape, schedule.placement, stage_costs)
        made = schedule.with_edges(stage_costs.edges)
        return Candidate(shape, made, cut, again, stage_costs, reduce)

    def fits(self, candidate: Candidate) -> bool:
        """Whether a candidate keeps to the memory; notes what each rank holds."""
        candidate.memory = peak_memory(candidate.schedule, candidate.stage_costs)
        fits = not self.wanted.memory or max(candidate.memory) <= self.wanted.memory
        if not fits and (self.least is None or max(candidate.memory) < max(self.least.memory)):
            self.least = candidate
        return fits

    def _to_compute_again(self, candidate: Candidate, costs: UnitCosts) -> frozenset[int]:
        """On each rank that holds too much, the units that free most memory for their time."""
        placement = candidate.schedule.placement
        runs = runs_of(candidate.cut, len(costs.units))
        found: set[int] = set()
        for rank, most in enumerate(candidate.memory):
            lacking = most - self.wanted.memory
            if lacking <= 0:
                continue
            units = [
                unit
                for stage in placement.stages_on(rank)
                for unit in runs[stage]
                if unit not in candidate.again and costs.units[unit].held > 0
            ]
            if not units:
                return frozenset()
            units.sort(key=lambda unit: costs.units[unit].forward / costs.units[unit].held)
            alive = min(candidate.schedule.ranks, candidate.schedule.microbatches)
            for unit in units:
                found.add(unit)
                lacking -= alive * costs.units[unit].held
                if lacking <= 0:
                    break
        return frozenset(found)


def _reduce(shape: Shape, placement: Placement, stage_costs: StageCosts) -> float:
    """How long the replicas take to sum gradients in a ring, for the rank that has most."""
    if shape.replicas == 1:
        return 0.0
    most = max(
        sum(stage_costs.kinds[stage]["gradients"] for stage in placement.stages_on(rank))
        for rank in range(placement.ranks)
    )
    wire = stage_costs.costs
    rounds = 2 * (shape.replicas - 1)
    return rounds * (most / shape.replicas / wire.bandwidth + wire.latency)


def _works(costs: UnitCosts, policy: str) -> list[float]:
    """The least time that each unit takes for a microbatch, in any order."""
    return [
        unit.forward
        + min(unit.backward, unit.input + unit.weight)
        + (costs.again(number) if policy == "all" else 0.0)
        for number, unit in enumerate(costs.units)
    ]


def _weight(unit: UnitCost, alive: int, policy: str, states: float) -> float:
    """The bytes that a unit holds with so many microbatches alive."""
    kept = 0.0 if policy == "all" else unit.held
    return unit.parameters + unit.trained * (1 + states) + alive * kept
