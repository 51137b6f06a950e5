"""Find the fastest plans that fit: list the candidates, simulate the most promising, and improve the best.

A candidate is a schedule, numbers of ranks, replicas, stages and microbatches, and how much to recompute. It
is cut so that its ranks take equally long. Its bound is a time that no order of its actions beats; those with
the least bounds are simulated, until no other can be among the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from pathlib import Path
from time import monotonic

from penstock._engine.values import bytes_as_text
from penstock.errors import ScheduleError, UsageError
from penstock.plan.candidates import (
    Candidate,
    Wanted,
    divisors,
    policies,
    schedules_of,
    whole,
    whole_numbers,
)
from penstock.plan.choice import (
    COLUMNS,
    OFFLOAD,
    POLICIES,
    Order,
    Plan,
    PlanShape,
    row_of,
)
from penstock.plan.cluster import Cluster
from penstock.plan.costs import Cut, Profile, StageCosts, cut_of, runs_of
from penstock.plan.devices import Device
from penstock.plan.fitting import Fitting, seconds_of
from penstock.plan.ranks import ranks_of
from penstock.plan.report import report_of
from penstock.schedule import Placement, Schedule, compute_only
from penstock.schedule import search as search_schedule

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
        plans: the plans.
        profile: the profile that the plans were made from.
        looked_at: the number of candidates.
        simulated: the number of simulated candidates; the others have a larger bound, or do not fit.
    """

    plans: tuple[Plan, ...]
    profile: Profile = field(repr=False)
    looked_at: int = 0
    simulated: int = 0

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
        return "\n".join([*map(str.rstrip, lines), self._basis()])

    def _basis(self) -> str:
        kind = "measured on" if self.profile.measured else "predicted for"
        return f"costs {kind} {self.profile.device}; {self.looked_at} candidates, {self.simulated} simulated"

    def report(self, path: str | Path, *, title: str = "") -> None:
        """Write the report: one HTML file that needs no other.

        Args:
            path: the file.
            title: the heading; by default it names the model.
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
    recompute: str | Iterable[str] | None = None,
    states: float = 2.0,
    host_bandwidth: float | None = None,
    keep: int = KEPT,
    seconds: float = 10.0,
) -> Plans:
    """Find the fastest ways to run a model.

    Args:
        profile: the profile of the model, from ``measure`` or ``predict``; or a function that makes it, which
            is called after all other arguments are checked.
        batch: the samples of a step.
        ranks: the number of devices; with ``cluster=``, all of that.
        cluster: the devices, if they differ, with their links. Stages then take equally long, not equally
            much. A profile that was measured is taken to be of the first device, while the others waited.
        memory: the bytes that a rank may hold; by default those of the device, if known; 0 for no limit.
        schedules: the names to choose from; by default every schedule of the library that trains.
        pipeline: the numbers of ranks in a pipeline to try; the other ranks form replicas, each with its
            share of the batch. By default every number that divides the number of devices.
        stages_per_rank: numbers to try for schedules that take any; by default 2, 3 and 4.
        microbatches: numbers to try for each pipeline; by default several that divide its share of the batch.
        recompute: ``"none"``, ``"needed"`` (as few units as fit the memory), ``"all"``, or ``"offload"``
            (none, and as few activations as fit the memory wait on the host); by default all are tried, or
            without a limit only ``"none"``.
        states: bytes of optimizer state for each byte of trained weights: 2 for AdamW, 1 for SGD with
            momentum.
        host_bandwidth: the bytes per second that a device exchanges with its host; by default activations
            stay on the device.
        keep: the number of plans to return.
        seconds: how long to improve the best plan at the end, by moving cuts and searching schedules.

    Returns:
        The plans, the fastest first.

    Raises:
        UsageError: nothing fits (the message says what would), or a number or name is not valid.
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
    host = host_bandwidth or 0.0
    numbers = {"memory": memory or 0, "states": states, "seconds": seconds, "host_bandwidth": host}
    for name, number in numbers.items():
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
        memory=None if memory is None else float(memory),
        schedules=schedules_of(schedules),
        ranks=divisors("pipeline", pipeline, ranks),
        stages_per_rank=whole_numbers("stages_per_rank", stages_per_rank),
        microbatches=counts,
        recompute=policies(recompute, host) or ("none",),
        states=float(states),
        keep=whole("keep", keep),
        cluster=cluster,
        host=host or math.inf,
    )
    wanted.check()
    profile = profile() if callable(profile) else profile
    if memory is None and cluster is None:
        wanted = replace(wanted, memory=profile.memory)
    if any(wanted.limits) and recompute is None:
        wanted = replace(wanted, recompute=(*POLICIES, OFFLOAD) if host else POLICIES)
    return _PlanSearch(profile, wanted).plans(seconds)


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
        profile: the costs of the units.
        schedule: the schedule; its messages are made anew.
        stages: the paths of each stage's units.
        batch: the samples of a step.
        states: bytes of optimizer state for each byte of trained weights.
        cluster: the devices of the ranks, if they differ.

    Raises:
        UsageError: the stages do not hold the units in their order, or the cluster has too few devices.
    """
    plain = compute_only(schedule)
    if cluster is not None and len(cluster) < plain.ranks:
        raise UsageError(
            f"the schedule has {plain.ranks} ranks, and the cluster only {len(cluster)} devices; give a "
            "device for each rank"
        )
    # As a batch is split: the first microbatches are larger if it does not divide evenly.
    samples = -(-whole("batch", batch) // plain.microbatches)
    ranks = ranks_of(profile, samples, plain.ranks, plain.ranks, cluster)
    cut = cut_of([unit.path for unit in ranks.units[0].units], stages)
    costs = ranks.stages(cut, plain.placement, states=states)
    laps = max(1, plain.stages // plain.ranks)
    wired = plain.with_edges(costs.edges)
    return Plan(
        PlanShape(plain.name, plain.ranks, 1, laps, plain.microbatches, samples, "none"),
        stages=tuple(map(tuple, stages)),
        recompute=(),
        seconds=seconds_of(plain, costs),
        reduce=0.0,
        memory=Order(plain).peaks(costs),
        limit=0.0,
        tokens=batch * (profile.tokens or 1),
        stage_costs=costs,
        custom=wired,
    )


class _PlanSearch:
    """One search.

    Args:
        profile: the costs of units.
        wanted: what to plan.
    """

    def __init__(self, profile: Profile, wanted: Wanted) -> None:
        self._profile, self._wanted = profile, wanted
        self._fitting = Fitting(profile, wanted)
        # If the costs of no size are known yet, any size to be planned will do.
        sizes = sorted(profile.known or {shape.samples for shape in wanted.shapes()})
        if not sizes:
            raise UsageError(
                f"batch={wanted.batch} cannot be divided among {wanted.devices} ranks as asked: each "
                "pipeline needs a whole number of samples, and of microbatches"
            )
        self._units = len(self._fitting.units(sizes[0]).units)

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
            best.append(self._fitting.timed(candidate))
            best = sorted(best, key=lambda each: each.rank)[:keep]
        if not best:
            raise UsageError(self._why_none())
        if seconds:
            best += self._improved(best[0], monotonic() + seconds)
        best.sort(key=lambda each: each.rank)
        plans = tuple(map(self._plan, best[:keep]))
        return Plans(plans, self._profile, looked_at, simulated)

    def _listed(self) -> tuple[list[Candidate], int]:
        """The candidates that fit, the least bound first, and how many were looked at."""
        tried = list(self._wanted.shapes(self._units))
        fitting = filter(None, map(self._fitting.candidate, tried))
        return sorted(fitting, key=lambda each: each.bound), len(tried)

    def _plan(self, candidate: Candidate) -> Plan:
        shape, costs, searched = candidate.shape, candidate.stage_costs, candidate.searched
        units = self._fitting.units(shape.samples).units
        runs = runs_of(candidate.cut, len(units))
        limits = {*self._wanted.limits}
        return Plan(
            shape=shape,
            stages=tuple(tuple(units[number].path for number in run) for run in runs),
            recompute=tuple(units[number].path for number in sorted(candidate.again)),
            seconds=candidate.seconds,
            reduce=candidate.reduce,
            memory=candidate.memory,
            limit=limits.pop() if len(limits) == 1 else 0.0,
            tokens=self._wanted.batch * (self._profile.tokens or 1),
            stage_costs=costs,
            custom=None if searched is None else searched.with_edges(costs.edges),
        )

    def _why_none(self) -> str:
        wanted, least = self._wanted, self._fitting.least
        if least is None:
            return (
                f"none of {', '.join(wanted.schedules)} can run the model's {self._units} units with "
                f"ranks={wanted.devices}, batch={wanted.batch} and the other options; leave some of these "
                "options out"
            )
        most, shape = least
        memory = f"the memory of {wanted.cluster}"
        if wanted.memory is not None:
            memory = (
                f"memory={wanted.memory:.0f} ({bytes_as_text(wanted.memory)}) on each of "
                f"{wanted.devices} ranks"
            )
        return (
            f"nothing fits into {memory}: memory={most:.0f} ({bytes_as_text(most)}) would do, with "
            f"{shape.schedule} and {shape.microbatches} microbatches; more ranks, smaller microbatches or "
            "recompute='all' need less"
        )

    # ---- improving the best

    def _improved(self, best: Candidate, until: float) -> Iterator[Candidate]:
        """The candidate with units moved from stage to stage while that helps, and with a searched order."""
        tried, start = {best.cut}, best
        while monotonic() < until:
            cut = next((cut for cut in _near(best.cut, self._units) if cut not in tried), None)
            if cut is None:
                break
            tried.add(cut)
            other = self._fitting.fitted(best.shape, cut)
            if other is not None and other.bound < best.seconds:
                other = self._fitting.timed(other)
                best = other if other.seconds < best.seconds * (1 - 1e-9) else best
        searched = self._searched(best, until)
        yield from (each for each in (best, searched) if each is not None and each is not start)

    def _searched(self, candidate: Candidate, until: float) -> Candidate | None:
        """The candidate with a schedule searched for its costs, if that is faster."""
        shape, costs = candidate.shape, candidate.stage_costs
        if shape.forwards > LARGEST_SEARCH or shape.ranks == 1 or monotonic() > until:
            return None
        placement = candidate.plain_schedule.placement
        limits = self._fitting.limits(shape.ranks)
        room = [_room(placement, costs, rank, limit) for rank, limit in enumerate(limits)]
        if any(limits) and min(room) <= 0:
            return None
        try:
            schedule = search_schedule(
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
        other = self._fitting.composed(shape, candidate.cut, candidate.again, schedule)
        if other.lacks:
            return None
        other = self._fitting.timed(other)
        return other if other.seconds < candidate.seconds else None


def _room(placement: Placement, costs: StageCosts, rank: int, limit: float) -> float:
    """The bytes of a rank that a schedule may fill with activations, whatever its order."""
    mine = placement.stages_on(rank)
    extra = max(sizes[stage] for sizes in costs.extra.values() for stage in mine)
    messages = sum(map(costs.messages, mine))
    return (limit or math.inf) - costs.static_on(placement, rank) - extra - messages


def _near(cut: Cut, units: int) -> Iterator[Cut]:
    """Cuts with one boundary moved by one unit."""
    for index, step in product(range(1, len(cut)), (-1, 1)):
        moved = (*cut[:index], cut[index] + step, *cut[index + 1 :])
        if all(a < b for a, b in pairwise((*moved, units))):
            yield moved
