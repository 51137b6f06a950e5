"""Candidates of a search: cut evenly, fitted into memory, with a bound, and simulated."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, lru_cache
from itertools import pairwise

from penstock.errors import ScheduleError
from penstock.partition import choose_cuts
from penstock.plan.candidates import Candidate, Wanted, order_of
from penstock.plan.choice import OFFLOAD, Order, PlanShape, with_messages
from penstock.plan.costs import Cut, Profile, StageCosts, runs_of
from penstock.plan.ranks import least_work, ranks_of
from penstock.schedule import Op, Placement, Schedule, lower_bound, offload, simulate


class Fitting:
    """Makes candidates for a run.

    Args:
        profile: the costs of units.
        wanted: what to plan.

    Attributes:
        least: of all that does not fit, what the fullest rank of the smallest would hold, and its shape.
    """

    def __init__(self, profile: Profile, wanted: Wanted) -> None:
        self._profile, self._wanted = profile, wanted
        self.least: tuple[float, PlanShape] | None = None
        self.units = cache(profile.at)
        self._ranks = cache(
            lambda samples, ranks: ranks_of(profile, samples, ranks, wanted.devices, wanted.cluster)
        )

    def limits(self, ranks: int) -> list[float]:
        """The bytes that each rank of a pipeline may hold, whichever replica it is of; 0 for no limit."""
        limits = self._wanted.limits
        return [min(filter(None, limits[rank::ranks]), default=0.0) for rank in range(ranks)]

    def _wire(self, source: int, target: int) -> tuple[float, float]:
        """The latency and bandwidth from one device to another."""
        cluster = self._wanted.cluster
        return cluster.wire(source, target) if cluster else self._profile.wire(self._wanted.devices)

    # ---- cuts

    def candidate(self, shape: PlanShape) -> Candidate | None:
        """The most promising candidate of a shape that fits into memory."""
        fitted = (self.fitted(shape, cut) for cut in self._cuts(shape))
        return min(filter(None, fitted), key=lambda each: each.bound, default=None)

    def _cuts(self, shape: PlanShape) -> list[Cut]:
        """Cuts that balance the ranks: by time and, if memory is limited, also by what they hold."""
        order = order_of(shape)
        if order is None or not order.schedule.trains:
            return []
        twice, units = shape.recompute == "all", self.units(shape.samples)
        weights = [(least_work(units, twice=twice), self._ranks(shape.samples, shape.ranks).paces)]
        limits = self.limits(shape.ranks)
        if any(limits):
            alive = 0 if twice else min(shape.ranks, shape.microbatches)
            copies, most = 1 + self._wanted.states, max(limits)
            held = [u.parameters + u.trained * copies + alive * u.held for u in units.units]
            weights.append((held, tuple(most / (limit or most) for limit in limits)))
        cuts = []
        for each, scales in weights:
            # As shares, so that candidates that differ only in the size of microbatches share a cut.
            total = sum(each) or 1.0
            shares = tuple(round(weight / total, 9) for weight in each)
            alike = len({*scales}) == 1
            cuts.append(_even_cut(shares, order.schedule.placement, () if alike else scales))
        return list(dict.fromkeys(cuts))

    # ---- memory

    def fitted(self, shape: PlanShape, cut: Cut) -> Candidate | None:
        """A candidate that fits, with as many units recomputed or activations offloaded as that needs."""
        if shape.recompute == OFFLOAD:
            return self._offloaded(shape, cut)
        units = len(self.units(shape.samples).units)
        again = frozenset(range(units) if shape.recompute == "all" else ())
        while True:
            candidate = self.composed(shape, cut, again)
            if not candidate.lacks:
                # If nothing has to be recomputed, this is the candidate of the policy "none".
                return candidate if again or shape.recompute != "needed" else None
            more = self._to_compute_again(candidate) if shape.recompute == "needed" else ()
            if not more:
                return None
            again |= frozenset(more)

    def _offloaded(self, shape: PlanShape, cut: Cut) -> Candidate | None:
        """A candidate whose ranks keep as many activations as fit; None if all stay, or the host is slow."""
        plain = self.composed(shape, cut, frozenset())
        costs = plain.stage_costs
        stages = zip(costs.activation, costs.forward, costs.backward, strict=True)
        if not plain.lacks or any(size / costs.host > turn + back for size, turn, back in stages):
            return None
        order, candidate = plain.plain_schedule, plain
        keep = Order(order).flying()
        while candidate.lacks:
            for rank, lacking in enumerate(candidate.lacks):
                size = max(costs.activation[stage] for stage in order.placement.stages_on(rank))
                keep[rank] -= math.ceil(lacking / size) if size else 1
            try:
                moved = offload(order, keep=keep, ahead=costs.ahead)
            except ScheduleError:
                return None
            candidate = self.composed(shape, cut, frozenset(), moved)
        return candidate

    def _to_compute_again(self, candidate: Candidate) -> set[int]:
        """On each rank that holds too much, the units that free the most memory for their time."""
        shape = candidate.shape
        units = self.units(shape.samples).units
        runs = runs_of(candidate.cut, len(units))
        placement = candidate.plain_schedule.placement
        alive = min(shape.ranks, shape.microbatches)
        chosen: set[int] = set()
        for rank, lacking in enumerate(candidate.lacks):
            if lacking <= 0:
                continue
            free = [
                number
                for stage in placement.stages_on(rank)
                for number in runs[stage]
                if number not in candidate.again and units[number].held > 0
            ]
            if not free:
                return set()
            for number in sorted(free, key=lambda n: units[n].forward / units[n].held):
                if lacking > 0:
                    chosen.add(number)
                    lacking -= alive * units[number].held
        return chosen

    def composed(
        self,
        shape: PlanShape,
        cut: Cut,
        again: frozenset[int],
        searched: Schedule | None = None,
    ) -> Candidate:
        """A candidate in which these units are recomputed, whether it fits or not."""
        order = Order(searched) if searched else order_of(shape)
        assert order is not None
        ranks, schedule = self._ranks(shape.samples, shape.ranks), order.schedule
        costs = ranks.stages(cut, schedule.placement, again, self._wanted.states)
        if shape.recompute == OFFLOAD:
            costs = replace(costs, host=self._wanted.host)
        peaks = order.peaks(costs)
        lacks = tuple(
            max(0.0, most - (limit or math.inf))
            for most, limit in zip(peaks, self.limits(shape.ranks), strict=True)
        )
        if any(lacks) and (self.least is None or max(peaks) < self.least[0]):
            self.least = max(peaks), shape
        reduce = self._seconds_to_reduce(shape, schedule.placement, costs)
        return Candidate(
            shape, cut, again,
            stage_costs=costs,
            memory=peaks,
            lacks=lacks if any(lacks) else (),
            reduce=reduce,
            bound=_bound(schedule, costs) + reduce,
            searched=searched,
        )  # fmt: skip

    def _seconds_to_reduce(
        self, shape: PlanShape, placement: Placement, costs: StageCosts
    ) -> float:
        """Return how long the replicas take to sum gradients in a ring, for the rank with the most."""
        replicas, most = shape.replicas, 0.0
        for rank in range(shape.ranks):
            ring = range(rank, self._wanted.devices, shape.ranks)
            wires = [self._wire(a, b) for a, b in pairwise((*ring, rank))]
            latency, bandwidth = max(late for late, _ in wires), min(rate for _, rate in wires)
            size = sum(costs.kinds[stage]["gradients"] for stage in placement.stages_on(rank))
            most = max(most, 2 * (replicas - 1) * (size / replicas / bandwidth + latency))
        return most

    # ---- simulation

    def timed(self, candidate: Candidate) -> Candidate:
        """The candidate after a simulation of its step."""
        seconds = seconds_of(candidate.plain_schedule, candidate.stage_costs)
        return replace(candidate, seconds=seconds + candidate.reduce)


def seconds_of(schedule: Schedule, costs: StageCosts) -> float:
    """The simulated time of a step."""
    return simulate(with_messages(schedule.with_edges(costs.edges)), costs.costs).makespan


@lru_cache(maxsize=1024)
def _even_cut(shares: tuple[float, ...], placement: Placement, paces: tuple[float, ...]) -> Cut:
    return choose_cuts(shares, placement.stages, placement, paces)


def _bound(schedule: Schedule, of: StageCosts) -> float:
    """A time that no order of the actions beats, if as many backwards are whole as in the schedule."""
    costs = of.costs
    if not {Op.I, Op.W} <= schedule.ops:
        costs = replace(costs, input=of.backward, weight=0.0, stash=0.0)
    return lower_bound(
        costs,
        ranks=schedule.ranks,
        microbatches=schedule.microbatches,
        placement=schedule.placement,
        edges=of.edges,
    )
