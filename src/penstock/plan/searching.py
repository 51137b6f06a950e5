"""Find the fastest plans that fit: list the candidates, simulate the most promising, and improve the best.

A candidate is a schedule, numbers of ranks, replicas, stages and microbatches, and how much to recompute; on
a cluster also which ranks form the pipelines, and in which order. It is cut so that its ranks take equally
long. Its bound is a time that no order of its actions beats; those with the least bounds are simulated, until
no other can be among the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise, permutations, product
from pathlib import Path
from time import monotonic
from typing import Any

from penstock.errors import ScheduleError, UsageError
from penstock.partition import choose_cuts
from penstock.plan.candidates import (
    Arrangement,
    Candidate,
    Wanted,
    divisors,
    policies,
    schedule_of,
    schedules_of,
    whole,
    whole_numbers,
)
from penstock.plan.choice import (
    COLUMNS,
    POLICIES,
    Order,
    Plan,
    PlanShape,
    row_of,
    seconds_as_text,
    with_messages,
)
from penstock.plan.cluster import Cluster
from penstock.plan.costs import Cut, Profile, StageCosts, UnitCosts, Wire, cut_of, runs_of
from penstock.plan.devices import Device
from penstock.plan.report import report_of
from penstock.schedule import Op, Placement, Schedule, compute_only, simulate
from penstock.schedule import search as search_schedule
from penstock.values import bytes_as_text

KEPT = 10
SIMULATED = 32
"""The most candidates that are simulated, or as many as plans are asked for."""
LARGEST_SEARCH = 512
"""The most stages times microbatches for which a schedule is searched; more takes too long."""
SEARCHED = "searched"
"""The name of a schedule that was searched for these costs."""


@dataclass(frozen=True)
class Plans:
    """Plans, the fastest first; as text, a table.

    Args:
        plans: The plans.
        profile: The profile that the plans were made from.
        looked_at: The number of candidates.
        simulated: The number of simulated candidates; the others have a larger bound, or do not fit.
        why: What the best plan for a cluster gains by its choices, in sentences.
    """

    plans: tuple[Plan, ...]
    profile: Profile = field(repr=False)
    looked_at: int = 0
    simulated: int = 0
    why: tuple[str, ...] = ()

    def __getitem__(self, index: int) -> Plan:
        return self.plans[index]

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __str__(self) -> str:
        rows = [["", *COLUMNS]]
        rows += [[str(n), *row_of(plan, self[0])] for n, plan in enumerate(self, 1)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        # Words to the left, numbers to the right.
        sides = ["<" if column in (1, 10, 11) else ">" for column in range(len(widths))]
        lines = (
            "  ".join(f"{c:{side}{w}}" for c, side, w in zip(row, sides, widths, strict=True))
            for row in rows
        )
        return "\n".join([*map(str.rstrip, lines), self._basis(), *self.why])

    def _basis(self) -> str:
        kind = "measured on" if self.profile.measured else "predicted for"
        return f"costs {kind} {self.profile.device}; {self.looked_at} candidates, {self.simulated} simulated"

    def report(self, path: str | Path, *, title: str = "") -> None:
        """Write the report: one HTML file that needs no other.

        Args:
            path: The file.
            title: The heading; by default it names the model.
        """
        title = title or f"Plans for {self.profile.model or 'a model'}"
        page = report_of(self.plans, profile=self.profile, title=title, note=self._basis())
        Path(path).write_text(page, encoding="utf-8")


def search(  # noqa: PLR0913 - the whole question, by name
    profile: Profile | Callable[[], Profile],
    *,
    batch: int,
    ranks: int | None = None,
    cluster: Cluster | Sequence[Device] | None = None,
    memory: float | None = None,
    schedules: str | Iterable[str] | None = None,
    pipeline: int | Iterable[int] | None = None,
    stages_per_rank: int | Iterable[int] | None = None,
    microbatches: int | Iterable[int] | None = None,
    checkpoint: str | Iterable[str] | None = None,
    states: float = 2.0,
    keep: int = KEPT,
    seconds: float = 10.0,
    even: bool = False,
) -> Plans:
    """Find the fastest ways to run a model.

    Args:
        profile: The profile of the model, from `measure` or `predict`; or a function that makes it, which is
            called after all other arguments are checked.
        batch: The samples of a step.
        ranks: The number of devices; with ``cluster=``, all of that.
        cluster: The devices, if they differ, with their links. Stages then take equally long, not equally
            much; ranks may work in another order than their own, and some may be left out. A profile that
            was measured is taken to be of the first one, while the others waited.
        memory: The bytes that a rank may hold; by default those of the device, if known; 0 for no limit.
        schedules: The names to choose from; by default every schedule of the library that trains.
        pipeline: The numbers of ranks in a pipeline to try; the other ranks form replicas, each with its
            share of the batch. By default every number that divides the number of devices.
        stages_per_rank: Numbers to try for schedules that take any; by default 2, 3 and 4.
        microbatches: Numbers to try for each pipeline; by default several that divide its share of the batch.
        checkpoint: ``"none"``, ``"needed"`` (as few units as fit the memory) or ``"all"``; by default all
            three are tried, or without a limit only ``"none"``.
        states: Bytes of optimizer state for each byte of trained weights: 2 for AdamW, 1 for SGD with
            momentum.
        keep: The number of plans to return.
        seconds: How long to improve the best plan at the end, by moving cuts and searching schedules.
        even: Whether to treat the ranks of a cluster as if they were alike: all of them, in their order, with
            even cuts.

    Returns:
        The plans, the fastest first.

    Raises:
        UsageError: Nothing fits (the message says what would), or a number or name is not valid.
    """
    if cluster is not None and not isinstance(cluster, Cluster):
        cluster = Cluster(tuple(cluster))
    if ranks is None and cluster is None:
        raise UsageError("give the number of devices as ranks=, or the devices as cluster=")
    ranks = whole("ranks", len(cluster) if ranks is None and cluster else ranks)  # type: ignore[arg-type]
    if cluster is not None and len(cluster) != ranks:
        raise UsageError(
            f"ranks={ranks}, but the cluster has {len(cluster)} devices; leave ranks= out"
        )
    batch = whole("batch", batch, most=2**40)
    for name, number in (("memory", memory or 0), ("states", states), ("seconds", seconds)):
        if not isinstance(number, int | float) or not number >= 0:
            raise UsageError(f"{name}={number!r}: must be a number, at least 0")
    if 0 < (memory or 0) < 1:
        raise UsageError(f"memory={memory}: must be at least one byte, or 0 for no limit")
    counts = whole_numbers("microbatches", microbatches)
    too_many = [count for count in counts or () if count > batch]
    if too_many:
        raise UsageError(f"microbatches={too_many[0]}: the batch has only {batch} samples")
    wanted = Wanted(
        devices=ranks,
        batch=batch,
        memory=float(memory or 0),
        schedules=schedules_of(schedules),
        ranks=divisors("pipeline", pipeline, ranks),
        stages_per_rank=whole_numbers("stages_per_rank", stages_per_rank),
        microbatches=counts,
        checkpoint=policies(checkpoint) or ("none",),
        states=float(states),
        keep=whole("keep", keep),
        cluster=cluster,
    )
    wanted.check()
    profile = profile() if callable(profile) else profile
    if memory is None and cluster is None:
        wanted = replace(wanted, memory=profile.memory)
    limited = wanted.memory or (
        memory is None and cluster and any(d.memory for d in cluster.devices)
    )
    if limited and checkpoint is None:
        wanted = replace(wanted, checkpoint=POLICIES)
    return _PlanSearch(profile, wanted, own_memory=memory is None, even=even).plans(seconds)


def plan_for(
    profile: Profile,
    schedule: Schedule,
    stages: Sequence[Sequence[str]],
    *,
    batch: int,
    states: float = 2.0,
    cluster: Cluster | None = None,
) -> Plan:
    """Make the plan of a schedule and a cut that were chosen by hand, to see what it costs.

    Args:
        profile: The costs of the units.
        schedule: The schedule; its messages are made anew.
        stages: The paths of each stage's units.
        batch: The samples of a step.
        states: Bytes of optimizer state for each byte of trained weights.
        cluster: The devices of the ranks, if they differ.

    Raises:
        UsageError: The stages do not hold the units in their order.
    """
    plain = compute_only(schedule)
    samples = whole("batch", batch) // plain.microbatches
    units = profile.at(samples)
    latency, bandwidth = profile.wire(plain.ranks)
    cut = cut_of([unit.path for unit in units.units], stages)
    costs = units.stages(
        cut,
        plain.placement,
        states=states,
        latency=latency,
        bandwidth=bandwidth,
        **_handling(profile, cluster),
    )
    if cluster is not None:
        on, links = profile.on_all(samples, cluster.devices), _wires(cluster, range(plain.ranks))
        costs = units.placed(costs, cut, plain.placement, (), on, links)
    laps = max(1, plain.stages // plain.ranks)
    wired = plain.with_edges(costs.edges)
    return Plan(
        PlanShape(plain.name, plain.ranks, 1, laps, plain.microbatches, samples, "none"),
        stages=tuple(map(tuple, stages)),
        checkpoint=(),
        seconds=simulate(with_messages(wired), costs.costs).makespan,
        reduce=0.0,
        memory=Order(plain).peaks(costs),
        limit=0.0,
        tokens=batch * (profile.tokens or 1),
        stage_costs=costs,
        own=wired,
    )


def _handling(profile: Profile, cluster: Cluster | None) -> dict[str, Any]:
    """How long a rank is busy with messages, as arguments of `UnitCosts.stages`."""
    if cluster is None:
        return {"handling": profile.handling}
    return {"handling": cluster.handling, "copying": cluster.copying}


def _wires(cluster: Cluster, ranks: Sequence[int]) -> tuple[Wire, ...]:
    """The links between some ranks, by their places among these."""
    pairs = permutations(range(len(ranks)), 2)
    return tuple((a, b, *cluster.wire(ranks[a], ranks[b])) for a, b in pairs)


# ---- the ranks of a pipeline


@dataclass(frozen=True)
class _RankCosts:
    """The ranks of a pipeline, as costs need them.

    Args:
        on: What the units cost on each; empty if they are alike.
        links: What is known of their links.
        limits: What each may hold, in bytes; 0 for no limit.
        paces: How many times as long each takes for the same work.
    """

    on: tuple[UnitCosts, ...]
    links: tuple[Wire, ...]
    limits: tuple[float, ...]
    paces: tuple[float, ...]


@lru_cache(maxsize=1024)
def _even_cut(shares: tuple[float, ...], placement: Placement, paces: tuple[float, ...]) -> Cut:
    return choose_cuts(shares, placement.stages, placement, paces)


def _work(costs: UnitCosts, *, twice: bool = False) -> list[float]:
    """What a microbatch takes on each unit, at least."""
    return [
        unit.forward * (1 + twice) + min(unit.backward, unit.input + unit.weight)
        for unit in costs.units
    ]


class _PlanSearch:
    """One search.

    Args:
        profile: The costs of units.
        wanted: What to plan.
        own_memory: Whether each device of a cluster may hold what it has.
        even: Whether to treat the ranks of a cluster alike.
    """

    def __init__(self, profile: Profile, wanted: Wanted, *, own_memory: bool, even: bool) -> None:
        self._profile, self._wanted = profile, wanted
        self._own_memory, self._even = own_memory, even
        self._known: dict[Any, Any] = {}
        self._least: tuple[float, PlanShape] | None = None
        """What lacks least of what does not fit: the bytes that the fullest rank would need."""
        # If the costs of no size are known yet, any size to be planned will do.
        sizes = sorted(
            profile.known or {s.samples for t in wanted.teams() for s in wanted.shapes(len(t))}
        )
        if not sizes:
            raise UsageError(
                f"batch={wanted.batch} cannot be divided among {wanted.devices} ranks as asked: each "
                "pipeline needs a whole number of samples, and of microbatches"
            )
        self._units = len(self._costs(sizes[0]).units)

    def _costs(self, samples: int) -> UnitCosts:
        if samples not in self._known:
            self._known[samples] = self._profile.at(samples)
        costs: UnitCosts = self._known[samples]
        return costs

    def plans(self, seconds: float) -> Plans:
        """The best plans, the best of them improved for some seconds."""
        listed, looked_at = self._listed()
        keep = self._wanted.keep
        best: list[Candidate] = []
        simulated = 0
        for candidate in listed[: max(SIMULATED, keep)]:
            if len(best) == keep and candidate.bound >= best[-1].seconds:
                break
            simulated += 1
            best = sorted([*best, self._timed(candidate)], key=lambda each: each.rank)[:keep]
        if not best:
            raise UsageError(self._why_none())
        why = tuple(self._why(best[0], listed))
        if seconds:
            best += self._improved(best[0], monotonic() + seconds)
        best.sort(key=lambda each: each.rank)
        plans = tuple(map(self._plan, best[:keep]))
        return Plans(plans, self._profile, looked_at, simulated, why)

    def _listed(self) -> tuple[list[Candidate], int]:
        """The candidates that fit, the least bound first, and how many were looked at."""
        wanted = self._wanted
        teams = [tuple(range(wanted.devices))] if self._even else wanted.teams()
        tried = [(shape, team) for team in teams for shape in wanted.shapes(len(team), self._units)]
        found = (
            self._candidate(shape, wanted.arrangements(team, shape, plain=self._even)[:1])
            for shape, team in tried
        )
        listed = sorted(filter(None, found), key=lambda each: each.bound)
        if wanted.cluster is not None and not self._even:
            # All ways to use the devices are tried where that may matter.
            best = [self._rearranged(each) for each in listed[:SIMULATED]]
            listed = sorted([*best, *listed[SIMULATED:]], key=lambda each: each.bound)
        return listed, len(tried)

    def _rearranged(self, candidate: Candidate) -> Candidate:
        """The most promising candidate of the same shape, on the same devices."""
        assert candidate.arrangement is not None
        team = sorted(rank for ranks in candidate.arrangement.pipelines for rank in ranks)
        found = self._candidate(candidate.shape, self._wanted.arrangements(team, candidate.shape))
        return found or candidate

    def _on(self, samples: int, ranks: Sequence[int]) -> list[UnitCosts]:
        """What a microbatch costs on ranks of the cluster."""
        cluster = self._wanted.cluster
        assert cluster is not None
        if ("on", samples) not in self._known:
            every = self._profile.on_all(samples, cluster.devices)
            self._known["on", samples] = every
        return [self._known["on", samples][rank] for rank in ranks]

    def _ranks(self, shape: PlanShape, arrangement: Arrangement | None) -> list[_RankCosts]:
        """The ranks of each pipeline, once for pipelines that are alike."""
        key = shape.samples, shape.ranks, arrangement
        if key not in self._known:
            limit, count = self._wanted.memory, shape.ranks
            if arrangement is None:
                self._known[key] = [_RankCosts((), (), (limit,) * count, (1.0,) * count)]
            else:
                self._known[key] = [self._ranks_of(shape, ranks) for ranks in arrangement.pipelines]
        ranks: list[_RankCosts] = self._known[key]
        return ranks

    def _ranks_of(self, shape: PlanShape, ranks: Sequence[int]) -> _RankCosts:
        cluster = self._wanted.cluster
        assert cluster is not None
        on = self._on(shape.samples, ranks)
        works = [sum(_work(of)) or 1.0 for of in on]
        limits = [
            cluster.devices[rank].memory if self._own_memory else self._wanted.memory
            for rank in ranks
        ]
        paces = tuple(work / min(works) for work in works)
        return _RankCosts(tuple(on), _wires(cluster, ranks), tuple(limits), paces)

    # ---- candidates

    def _candidate(
        self, shape: PlanShape, arrangements: Iterable[Arrangement | None]
    ) -> Candidate | None:
        """The most promising candidate of a shape that fits into memory."""
        found = list[Candidate]()
        for arrangement in arrangements:
            known = schedule_of(shape, arrangement)
            if known is None or not known[0].trains:
                return None
            fitted = (
                self._fitted(shape, arrangement, cut) for cut in self._cuts(shape, arrangement)
            )
            found += filter(None, fitted)
        return min(found, key=lambda each: each.bound, default=None)

    def _cuts(self, shape: PlanShape, arrangement: Arrangement | None) -> list[Cut]:
        """Cuts that balance the ranks: by time and, if memory is limited, also by what they hold."""
        known = schedule_of(shape, arrangement)
        assert known is not None
        placement, costs = known[0].placement, self._costs(shape.samples)
        twice, pipelines = shape.checkpoint == "all", self._ranks(shape, arrangement)
        # A cut is one for all pipelines.
        paces = tuple(map(max, zip(*(ranks.paces for ranks in pipelines), strict=True)))
        limits = tuple(map(min, zip(*(ranks.limits for ranks in pipelines), strict=True)))
        weights = [(_work(costs, twice=twice), paces)]
        if any(limits):
            alive = 0 if twice else min(shape.ranks, shape.microbatches)
            copies = 1 + self._wanted.states
            held = [u.parameters + u.trained * copies + alive * u.held for u in costs.units]
            most = max(limits)
            weights.append((held, tuple(most / (limit or most) for limit in limits)))
        cuts = []
        for each, scales in weights:
            # As shares, so that candidates that differ only in the size of microbatches share a cut.
            total = sum(each) or 1.0
            shares = tuple(round(weight / total, 9) for weight in each)
            alike = self._even or len({*scales}) == 1
            cuts.append(_even_cut(shares, placement, () if alike else scales))
        return list(dict.fromkeys(cuts))

    def _fitted(
        self, shape: PlanShape, arrangement: Arrangement | None, cut: Cut
    ) -> Candidate | None:
        """A candidate that fits into memory, with as many units recomputed as that needs."""
        again = frozenset(range(self._units) if shape.checkpoint == "all" else ())
        while True:
            candidate = self._composed(shape, arrangement, cut, again)
            if not any(candidate.lacks):
                # If nothing has to be recomputed, this is the candidate of the policy "none".
                return candidate if again or shape.checkpoint != "needed" else None
            more = self._to_compute_again(candidate) if shape.checkpoint == "needed" else ()
            if not more:
                return None
            again |= frozenset(more)

    def _composed(
        self,
        shape: PlanShape,
        arrangement: Arrangement | None,
        cut: Cut,
        again: frozenset[int],
        own: Schedule | None = None,
    ) -> Candidate:
        """A candidate in which these units are recomputed."""
        known = (own, Order(own)) if own else schedule_of(shape, arrangement)
        assert known is not None
        schedule, order = known
        base = self._stage_costs(shape, cut, again, schedule.placement)
        peaks, pipelines = order.peaks(base), self._ranks(shape, arrangement)
        limits = [min(limits) for limits in zip(*(one.limits for one in pipelines), strict=True)]
        lacking = [
            max(0.0, most - limit) if limit else 0.0
            for most, limit in zip(peaks, limits, strict=True)
        ]
        each = [self._placed(shape, base, cut, again, schedule.placement, one) for one in pipelines]
        bounds = [_bound(schedule, one) for one in each]
        costs = each[bounds.index(max(bounds))]
        reduce = self._seconds_to_reduce(shape, arrangement, schedule.placement, costs)
        # Unequal pipelines share the batch.
        bound = len(bounds) / sum(1 / one if one else math.inf for one in bounds)
        lacks = tuple(lacking) if any(lacking) else ()
        if lacks and (self._least is None or max(peaks) < self._least[0]):
            self._least = max(peaks), shape
        return Candidate(
            shape, cut, again, costs, peaks, lacks, reduce, bound + reduce, arrangement, own=own
        )

    def _placed(
        self,
        shape: PlanShape,
        base: StageCosts,
        cut: Cut,
        again: frozenset[int],
        placement: Placement,
        ranks: _RankCosts,
    ) -> StageCosts:
        """What stages cost on the ranks of a pipeline."""
        if not ranks.on:
            return base
        units = self._costs(shape.samples)
        return units.placed(base, cut, placement, again, ranks.on, ranks.links)

    def _stage_costs(
        self, shape: PlanShape, cut: Cut, again: frozenset[int], placement: Placement
    ) -> StageCosts:
        """What stages cost on ranks that are alike."""
        profile = self._profile
        latency, bandwidth = profile.wire(self._wanted.devices)
        return self._costs(shape.samples).stages(
            cut,
            placement,
            checkpoint=again,
            states=self._wanted.states,
            latency=latency,
            bandwidth=bandwidth,
            **_handling(profile, self._wanted.cluster),
        )

    def _seconds_to_reduce(
        self,
        shape: PlanShape,
        arrangement: Arrangement | None,
        placement: Placement,
        costs: StageCosts,
    ) -> float:
        """How long the replicas take to sum gradients in a ring, for the rank with the most."""
        if shape.replicas == 1:
            return 0.0
        wires = [(costs.latency, costs.bandwidth)] * shape.ranks
        cluster = self._wanted.cluster
        if cluster is not None and arrangement is not None:
            wires = []
            for ranks in zip(*arrangement.pipelines, strict=True):
                each = [cluster.wire(a, b) for a, b in pairwise((*ranks, ranks[0]))]
                wires.append((max(late for late, _ in each), min(rate for _, rate in each)))
        rounds, most = 2 * (shape.replicas - 1), 0.0
        for rank, (latency, bandwidth) in enumerate(wires):
            size = sum(costs.kinds[stage]["gradients"] for stage in placement.stages_on(rank))
            most = max(most, rounds * (size / shape.replicas / bandwidth + latency))
        return most

    def _to_compute_again(self, candidate: Candidate) -> set[int]:
        """On each rank that holds too much, the units that free the most memory for their time."""
        shape = candidate.shape
        units = self._costs(shape.samples).units
        runs = runs_of(candidate.cut, len(units))
        placement = schedule_of(shape, candidate.arrangement)[0].placement  # type: ignore[index] # it has one
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

    def _why_none(self) -> str:
        wanted = self._wanted
        if self._least is None:
            return (
                f"none of {', '.join(wanted.schedules)} can run the model's {self._units} units with "
                f"ranks={wanted.devices}, batch={wanted.batch} and the other options; leave some of these "
                "options out"
            )
        most, shape = self._least
        limit = f"memory={wanted.memory:.0f} ({bytes_as_text(wanted.memory)})"
        told = f"{limit} on each of {wanted.devices} ranks"
        if self._own_memory and wanted.cluster is not None:
            told = f"the memory of {wanted.cluster}"
        return (
            f"nothing fits into {told}: memory={most:.0f} ({bytes_as_text(most)}) would do, with "
            f"{shape.schedule} and {shape.microbatches} microbatches; more ranks, smaller microbatches or "
            "checkpoint='all' need less"
        )

    # ---- simulation

    def _timed(self, candidate: Candidate) -> Candidate:
        """The candidate after a simulation of its step; unequal pipelines share the batch by their rates."""
        shape = candidate.shape
        pipelines = self._ranks(shape, candidate.arrangement)
        if len(pipelines) == 1:
            schedule = candidate.own or schedule_of(shape, candidate.arrangement)[0]  # type: ignore[index]
            seconds = _seconds(schedule, candidate.costs)
            return replace(candidate, seconds=seconds + candidate.reduce)
        equal = self._with_shares(candidate, (shape.microbatches,) * len(pipelines))
        times = [seconds for seconds, _ in equal]
        alike = max(times) < 1.01 * min(times)
        shares = () if alike or candidate.own or self._even else _shares(shape.microbatches, times)
        shared = self._with_shares(candidate, shares) if shares else []
        slowest = max(shared or equal, key=lambda one: one[0])
        if not shared or slowest[0] >= max(times):
            slowest, shares = max(equal, key=lambda one: one[0]), ()
        seconds = slowest[0] + candidate.reduce
        return replace(candidate, seconds=seconds, costs=slowest[1], shares=shares)

    def _with_shares(
        self, candidate: Candidate, shares: Sequence[int]
    ) -> list[tuple[float, StageCosts]]:
        """The seconds of each pipeline with so many microbatches, and its costs; nothing if one cannot."""
        found = list[tuple[float, StageCosts]]()
        done: dict[Any, tuple[float, StageCosts]] = {}
        for ranks, count in zip(
            self._ranks(candidate.shape, candidate.arrangement), shares, strict=True
        ):
            shape = replace(candidate.shape, microbatches=count)
            known = (candidate.own,) if candidate.own else schedule_of(shape, candidate.arrangement)
            if known is None:
                return []
            key = tuple(map(id, ranks.on)), ranks.links, count
            if key not in done:
                cut, again, placement = candidate.cut, candidate.again, known[0].placement
                base = self._stage_costs(shape, cut, again, placement)
                costs = self._placed(shape, base, cut, again, placement, ranks)
                done[key] = _seconds(known[0], costs), costs
            found.append(done[key])
        return found

    # ---- why

    def _why(self, best: Candidate, listed: Sequence[Candidate]) -> Iterator[str]:
        """In sentences, what a plan for a cluster gains by its choices."""
        cluster, arrangement = self._wanted.cluster, best.arrangement
        if cluster is None or arrangement is None or self._even:
            return
        used = {rank for ranks in arrangement.pipelines for rank in ranks}
        out = [rank for rank in range(len(cluster)) if rank not in used]
        if out:
            whole = (
                one
                for one in listed
                if one.arrangement and sum(map(len, one.arrangement.pipelines)) == len(cluster)
            )
            other = next(whole, None)
            told = "with all of them nothing fits"
            if other is not None:
                told = f"with all of them a step takes {_longer(self._timed(other), best)}"
            named = ", ".join(f"{rank} ({cluster.devices[rank].name})" for rank in out)
            yield f"ranks left out: {named}; {told}"
        plain = Arrangement(arrangement.pipelines, tuple(range(best.shape.ranks)))
        if not arrangement.is_plain:
            other = self._candidate(best.shape, [plain])
            told = "in their own order nothing fits"
            if other is not None:
                told = f"in their own order a step takes {_longer(self._timed(other), best)}"
            order = ", ".join(str(arrangement.pipelines[0][rank]) for rank in arrangement.order)
            yield f"the stages go through ranks {order}; {told}"
        self._even = True
        other = self._candidate(best.shape, [plain])
        self._even = False
        told = "does not fit" if other is None else f"takes {_longer(self._timed(other), best)}"
        yield f"the same with even stages, in the ranks' own order, {told}"

    # ---- improving the best

    def _improved(self, best: Candidate, until: float) -> Iterator[Candidate]:
        """The candidate with units moved from stage to stage while that helps, and with a searched order."""
        tried, start = {best.cut}, best
        while monotonic() < until and not self._even:
            cut = next((cut for cut in _near(best.cut, self._units) if cut not in tried), None)
            if cut is None:
                break
            tried.add(cut)
            other = self._fitted(best.shape, best.arrangement, cut)
            if other is not None and other.bound < best.seconds:
                other = self._timed(other)
                best = other if other.seconds < best.seconds * (1 - 1e-9) else best
        searched = self._searched(best, until)
        yield from (each for each in (best, searched) if each is not None and each is not start)

    def _searched(self, candidate: Candidate, until: float) -> Candidate | None:
        """The candidate with a schedule searched for its costs, if that is faster."""
        shape, costs, arrangement = candidate.shape, candidate.costs, candidate.arrangement
        known = schedule_of(shape, arrangement)
        too_large = shape.forwards > LARGEST_SEARCH or shape.ranks == 1 or candidate.shares
        if too_large or known is None or monotonic() > until:
            return None
        placement = known[0].placement
        limits = self._ranks(shape, arrangement)[0].limits
        room = [self._room(placement, costs, rank, limit) for rank, limit in enumerate(limits)]
        if any(limits) and min(room) <= 0:
            return None
        try:
            order = search_schedule(
                costs.costs,
                ranks=shape.ranks,
                microbatches=shape.microbatches,
                memory=room if any(limits) else None,
                placement=placement,
                edges=costs.edges,
                seconds=max(0.5, (until - monotonic()) / 2),
            )
        except ScheduleError:
            return None
        shape = replace(shape, schedule=SEARCHED)
        other = self._composed(shape, arrangement, candidate.cut, candidate.again, order)
        if other.lacks:
            return None
        other = self._timed(other)
        return other if other.seconds < candidate.seconds else None

    def _room(self, placement: Placement, costs: StageCosts, rank: int, limit: float) -> float:
        """The bytes that a schedule may fill with activations, whatever its order."""
        mine = placement.stages_on(rank)
        extra = max(sizes[stage] for sizes in costs.extra.values() for stage in mine)
        messages = sum(map(costs.messages, mine))
        return (limit or math.inf) - costs.static_on(placement, rank) - extra - messages

    def _plan(self, candidate: Candidate) -> Plan:
        shape, arrangement = candidate.shape, candidate.arrangement
        units = self._costs(shape.samples).units
        runs = runs_of(candidate.cut, len(units))
        own = candidate.own
        if own is None and arrangement is not None and not arrangement.is_plain:
            own = schedule_of(shape, arrangement)[0]  # type: ignore[index] # it has one
        limits = {limit for ranks in self._ranks(shape, arrangement) for limit in ranks.limits}
        return Plan(
            shape=shape,
            stages=tuple(tuple(units[number].path for number in run) for run in runs),
            checkpoint=tuple(units[number].path for number in sorted(candidate.again)),
            seconds=candidate.seconds,
            reduce=candidate.reduce,
            memory=candidate.memory,
            limit=limits.pop() if len(limits) == 1 else 0.0,
            tokens=self._wanted.batch * (self._profile.tokens or 1),
            stage_costs=candidate.costs,
            own=own.with_edges(candidate.costs.edges) if own else None,
            pipelines=arrangement.pipelines if arrangement else (),
            shares=candidate.shares,
        )


def _seconds(schedule: Schedule, costs: StageCosts) -> float:
    return simulate(with_messages(schedule.with_edges(costs.edges)), costs.costs).makespan


def _longer(other: Candidate, best: Candidate) -> str:
    return (
        f"{seconds_as_text(other.seconds)}, {other.seconds / best.seconds:.2f} times as long as "
        f"{seconds_as_text(best.seconds)}"
    )


def _shares(microbatches: int, times: Sequence[float]) -> tuple[int, ...]:
    """Microbatches for pipelines by their rates, as many in all as if each had the same number."""
    total, rates = microbatches * len(times), [1 / time for time in times]
    exact = [total * rate / sum(rates) for rate in rates]
    shares = [max(1, math.floor(one)) for one in exact]
    for place in sorted(range(len(times)), key=lambda n: shares[n] - exact[n]):
        shares[place] += sum(shares) < total
    return tuple(shares) if sum(shares) == total else ()


def _near(cut: Cut, units: int) -> Iterator[Cut]:
    """Cuts with one boundary moved by one unit."""
    for index, step in product(range(1, len(cut)), (-1, 1)):
        moved = (*cut[:index], cut[index] + step, *cut[index + 1 :])
        if all(a < b for a, b in pairwise((*moved, units))):
            yield moved


def _bound(schedule: Schedule, costs: StageCosts) -> float:
    """A time that no order of the actions beats.

    A rank cannot start before a microbatch has passed the stages ahead of it, then has all its own work to
    do, and after that a whole backward must still pass the stages ahead.
    """
    rank_of = schedule.placement.rank_of
    hops = [0.0, *(costs.costs.wire(a, b)[0] if a != b else 0.0 for a, b in pairwise(rank_of))]
    late = list(accumulate(hops))
    split = {Op.I, Op.W} <= schedule.ops
    backward = costs.backward
    if split:
        halves = zip(costs.backward, costs.input, costs.weight, strict=True)
        backward = tuple(min(whole, first + second) for whole, first, second in halves)
    bound = 0.0
    for rank in range(schedule.ranks):
        mine = schedule.placement.stages_on(rank)
        work = sum(costs.forward[stage] + backward[stage] for stage in mine)
        ahead = sum(costs.forward[: mine[0]]) + late[mine[0]]
        behind = 0.0 if split else sum(backward[: mine[0]]) + late[mine[0]]
        bound = max(bound, ahead + schedule.microbatches * work + behind)
    return bound
