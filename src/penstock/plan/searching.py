"""Find the fastest plans that fit: list the candidates, simulate the most promising, and improve the best.

A candidate is a schedule, numbers of ranks, replicas, stages and microbatches, and how much to recompute.
It is cut so that the ranks of its placement have about equal work. Its bound is a time that no order of its
actions beats; those with the least bounds are simulated, until no other can be among the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise, product
from pathlib import Path
from time import monotonic

from penstock.errors import ScheduleError, UsageError
from penstock.partition import choose_cuts
from penstock.plan.choice import (
    COLUMNS,
    LARGEST,
    POLICIES,
    Order,
    Plan,
    PlanShape,
    check_size,
    row_of,
    scheduled,
    with_messages,
)
from penstock.plan.costs import Cut, Profile, StageCosts, cut_of, runs_of
from penstock.plan.report import report_of
from penstock.schedule import Op, Placement, Schedule, compute_only, names, simulate
from penstock.schedule import search as search_schedule
from penstock.schedule.library import find
from penstock.values import bytes_as_text

KEPT = 10
SIMULATED = 32
"""The most candidates that are simulated, or as many as plans are asked for."""
LARGEST_SEARCH = 512
"""The most stages times microbatches for which a schedule is searched; more takes too long."""
MOST_MICROBATCHES = 6
"""The most numbers of microbatches that are tried by default."""
LAPS = (2, 3, 4)
"""The numbers of stages per rank that are tried by default, if a schedule takes any number."""
IMPROVED = 3
"""The number of best plans that are improved at the end."""
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
        return "\n".join([*map(str.rstrip, lines), self._note()])

    def _note(self) -> str:
        kind = "measured on" if self.profile.measured else "predicted for"
        return f"costs {kind} {self.profile.device}; {self.looked_at} candidates, {self.simulated} simulated"

    def report(self, path: str | Path, *, title: str = "") -> None:
        """Write the report: one HTML file that needs no other.

        Args:
            path: The file.
            title: The heading; by default it names the model.
        """
        title = title or f"Plans for {self.profile.model or 'a model'}"
        page = report_of(self.plans, profile=self.profile, title=title, note=self._note())
        Path(path).write_text(page, encoding="utf-8")


def search(  # noqa: PLR0913 - the whole question, by name
    profile: Profile | Callable[[], Profile],
    *,
    ranks: int,
    batch: int,
    memory: float | None = None,
    schedules: str | Iterable[str] | None = None,
    pipeline: int | Iterable[int] | None = None,
    stages_per_rank: int | Iterable[int] | None = None,
    microbatches: int | Iterable[int] | None = None,
    checkpoint: str | Iterable[str] | None = None,
    states: float = 2.0,
    keep: int = KEPT,
    seconds: float = 10.0,
) -> Plans:
    """Find the fastest ways to run a model.

    Args:
        profile: The profile of the model, from `measure` or `predict`; or a function that makes it, which is
            called after all other arguments are checked.
        ranks: The number of devices.
        batch: The samples of a step.
        memory: The bytes that a rank may hold; by default those of the device, if known; 0 for no limit.
        schedules: The names to choose from; by default every schedule of the library that trains.
        pipeline: The numbers of ranks in a pipeline to try; the other ranks form replicas, each with its
            share of the batch. By default every number that divides ``ranks``.
        stages_per_rank: Numbers to try for schedules that take any; by default 2, 3 and 4.
        microbatches: Numbers to try for each pipeline; by default several that divide its share of the batch.
        checkpoint: ``"none"``, ``"needed"`` (as few units as fit the memory) or ``"all"``; by default all
            three are tried, or without a limit only ``"none"``.
        states: Bytes of optimizer state for each byte of trained weights: 2 for AdamW, 1 for SGD with
            momentum.
        keep: The number of plans to return.
        seconds: How long to improve the best plans at the end, by moving cuts and searching schedules.

    Returns:
        The plans, the fastest first.

    Raises:
        UsageError: Nothing fits (the message says what would), or a number or name is not valid.
    """
    ranks, batch = _whole("ranks", ranks), _whole("batch", batch, most=2**40)
    for name, number in (("memory", memory or 0), ("states", states), ("seconds", seconds)):
        if not isinstance(number, int | float) or not number >= 0:
            raise UsageError(f"{name}={number!r}: must be a number, at least 0")
    if 0 < (memory or 0) < 1:
        raise UsageError(f"memory={memory}: must be at least one byte, or 0 for no limit")
    counts = _whole_numbers("microbatches", microbatches)
    too_many = [count for count in counts or () if count > batch]
    if too_many:
        raise UsageError(f"microbatches={too_many[0]}: the batch has only {batch} samples")
    wanted = _Wanted(
        devices=ranks,
        batch=batch,
        memory=float(memory or 0),
        schedules=_schedules(schedules),
        ranks=_divisors("pipeline", pipeline, ranks),
        stages_per_rank=_whole_numbers("stages_per_rank", stages_per_rank),
        microbatches=counts,
        checkpoint=_policies(checkpoint) or ("none",),
        states=float(states),
        keep=_whole("keep", keep),
    )
    next(wanted.shapes(), None)  # for its check
    profile = profile() if callable(profile) else profile
    limit = profile.memory if memory is None else wanted.memory
    if limit and checkpoint is None:
        wanted = replace(wanted, checkpoint=POLICIES)
    wanted = replace(wanted, memory=limit)
    return _PlanSearch(profile, wanted).plans(seconds)


def plan_for(
    profile: Profile,
    schedule: Schedule,
    stages: Sequence[Sequence[str]],
    *,
    batch: int,
    states: float = 2.0,
) -> Plan:
    """Make the plan of a schedule and a cut that were chosen by hand, to see what it costs.

    Args:
        profile: The costs of the units.
        schedule: The schedule; its messages are made anew.
        stages: The paths of each stage's units.
        batch: The samples of a step.
        states: Bytes of optimizer state for each byte of trained weights.

    Raises:
        UsageError: The stages do not hold the units in their order.
    """
    plain = compute_only(schedule)
    samples = _whole("batch", batch) // plain.microbatches
    units = profile.at(samples)
    latency, bandwidth = profile.wire(plain.ranks)
    costs = units.stages(
        cut_of([unit.path for unit in units.units], stages),
        plain.placement,
        states=states,
        latency=latency,
        bandwidth=bandwidth,
        handling=profile.handling,
    )
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


# ---- the arguments of a search


def _whole(name: str, number: int, most: int = LARGEST) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= most:
        raise UsageError(f"{name}={number!r}: must be a whole number from 1 to {most}")
    return number


def _whole_numbers(name: str, numbers: int | Iterable[int] | None) -> tuple[int, ...] | None:
    if numbers is None:
        return None
    several = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    return tuple(_whole(name, number) for number in several)


def _divisors(name: str, numbers: int | Iterable[int] | None, devices: int) -> tuple[int, ...]:
    several = _whole_numbers(name, numbers)
    if several is None:
        return tuple(_dividing(devices))
    if wrong := [number for number in several if devices % number]:
        raise UsageError(
            f"{name}={wrong[0]}: {devices} ranks cannot be divided into pipelines of {wrong[0]} ranks"
        )
    return several


def _dividing(number: int) -> list[int]:
    """All divisors, in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _schedules(wanted: str | Iterable[str] | None) -> tuple[str, ...]:
    several = names() if wanted is None else [wanted] if isinstance(wanted, str) else list(wanted)
    proper = [find(name)[0] for name in several]
    idle = [name for name in proper if not find(name)[1].trains]
    if idle and wanted is not None:
        raise UsageError(f"schedules={idle[0]!r} has no backward; choose one that trains")
    # 1F1B first: it holds least if several are equally fast.
    return tuple(
        sorted(set(proper) - set(idle), key=lambda name: (name != "1F1B", proper.index(name)))
    )


def _policies(wanted: str | Iterable[str] | None) -> tuple[str, ...]:
    several = () if wanted is None else (wanted,) if isinstance(wanted, str) else tuple(wanted)
    for policy in several:
        if policy not in POLICIES:
            raise UsageError(f"checkpoint={policy!r}: must be one of {', '.join(POLICIES)}")
    return several


@dataclass(frozen=True)
class _Wanted:
    """The run to plan, and what the user has fixed; names as in `search`.

    Args:
        devices: The number of devices.
        ranks: The numbers of ranks in a pipeline to try.
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

    def shapes(self, units: float = math.inf) -> Iterator[PlanShape]:
        """All candidates for a model of so many units.

        Raises:
            UsageError: All have too many microbatches to be planned.
        """
        shapes = list(self._all(units))
        fitting = [shape for shape in shapes if shape.forwards <= LARGEST >= shape.replicas]
        if shapes and not fitting:
            check_size("", shapes[0])
        yield from fitting

    def _all(self, units: float) -> Iterator[PlanShape]:
        for ranks in self.ranks:
            replicas = self.devices // ranks
            if self.batch % replicas:
                continue
            part = self.batch // replicas
            # One rank waits for nothing, so any schedule is as fast; the first one, 1F1B, holds least.
            for name in self.schedules if ranks > 1 else self.schedules[:1]:
                laps = [each for each in self._laps(name) if ranks * each <= units]
                counts = self._counts(ranks, part) if laps else ()
                for each, count, policy in product(laps, counts, self.checkpoint):
                    yield PlanShape(name, ranks, replicas, each, count, part // count, policy)  # type: ignore[arg-type]

    def _laps(self, name: str) -> tuple[int, ...]:
        """The numbers of stages per rank to try with a schedule."""
        recipe = find(name)[1]
        if recipe.any_stages:
            return self.stages_per_rank or LAPS
        laps = recipe.stages_per_rank
        return (laps,) if laps in (self.stages_per_rank or (laps,)) else ()

    def _counts(self, ranks: int, part: int) -> tuple[int, ...]:
        """The numbers of microbatches to try for a pipeline's share of the batch."""
        if self.microbatches is not None:
            return tuple(count for count in self.microbatches if part % count == 0)
        counts = _dividing(part)
        # Each is at least twice the one before, since neighbours differ little.
        tried: list[int] = []
        for count in [count for count in counts if count >= ranks] or counts[-1:]:
            if not tried or count >= 2 * tried[-1]:
                tried.append(count)
        return tuple(tried[:MOST_MICROBATCHES])


# ---- candidates


@lru_cache(maxsize=64)
def _built(shape: PlanShape) -> tuple[Schedule, Order] | None:
    """A schedule of the library, without edges; None if there is none for these numbers."""
    try:
        schedule = scheduled(shape)
    except ScheduleError:
        return None
    return schedule, Order(schedule)


def _schedule_of(shape: PlanShape) -> tuple[Schedule, Order] | None:
    # The key leaves out what the schedule does not depend on.
    return _built(replace(shape, replicas=1, samples=1, checkpoint="none"))


@lru_cache(maxsize=1024)
def _even_cut(shares: tuple[float, ...], placement: Placement) -> Cut:
    return choose_cuts(shares, placement.stages, placement)


@dataclass(frozen=True)
class _Candidate:
    """A shape with a cut.

    Args:
        again: The units that are recomputed.
        costs: What its stages cost.
        memory: The most that each rank holds, in bytes.
        reduce: The seconds in which replicas sum their gradients.
        bound: Seconds that no order of the actions beats.
        seconds: The simulated time of a step.
        own: Its schedule, if it is not one of the library.
    """

    shape: PlanShape
    cut: Cut
    again: frozenset[int]
    costs: StageCosts
    memory: tuple[float, ...]
    reduce: float
    bound: float
    seconds: float = math.inf
    own: Schedule | None = None

    def timed(self) -> _Candidate:
        """The candidate after a simulation of its step."""
        known = None if self.own else _schedule_of(self.shape)
        schedule = (known[0] if known else self.own).with_edges(self.costs.edges)  # type: ignore[union-attr]
        seconds = simulate(with_messages(schedule), self.costs.costs).makespan + self.reduce
        return replace(self, seconds=seconds)

    @property
    def rank(self) -> tuple[float, float]:
        """By what candidates are sorted, the fastest first."""
        return self.seconds, max(self.memory)


class _PlanSearch:
    """One search."""

    def __init__(self, profile: Profile, wanted: _Wanted) -> None:
        self._profile = profile
        self._wanted = wanted
        self._least: tuple[float, PlanShape] | None = None
        """The least memory of what does not fit."""
        # If the costs of no size are known yet, any size to be planned will do.
        sizes = sorted(profile.known or {shape.samples for shape in wanted.shapes()})
        if not sizes:
            raise UsageError(
                f"batch={wanted.batch} cannot be divided among {wanted.devices} ranks as asked: each "
                "pipeline needs a whole number of samples, and of microbatches"
            )
        self._units = len(profile.at(sizes[0]).units)

    def plans(self, seconds: float) -> Plans:
        """The best plans, improved for some seconds."""
        shapes, keep = list(self._wanted.shapes(self._units)), self._wanted.keep
        listed = sorted(
            (each for shape in shapes if (each := self._candidate(shape)) is not None),
            key=lambda each: each.bound,
        )
        best: list[_Candidate] = []
        simulated = 0
        for candidate in listed[: max(SIMULATED, keep)]:
            if len(best) == keep and candidate.bound >= best[-1].seconds:
                break
            simulated += 1
            best = sorted([*best, candidate.timed()], key=lambda each: each.rank)[:keep]
        if not best:
            raise UsageError(self._why_none())
        until = monotonic() + seconds
        for candidate in best[:IMPROVED] if seconds else ():
            best += self._improved(candidate, until)
        best.sort(key=lambda each: each.rank)
        plans = tuple(map(self._plan, best[:keep]))
        return Plans(plans, self._profile, len(shapes), simulated)

    def _candidate(self, shape: PlanShape) -> _Candidate | None:
        """The most promising candidate of a shape that fits into memory."""
        known = _schedule_of(shape)
        if known is None or not known[0].trains:
            return None
        fitted = (self._fitted(shape, cut) for cut in self._cuts(shape, known[0].placement))
        return min((each for each in fitted if each), key=lambda each: each.bound, default=None)

    def _cuts(self, shape: PlanShape, placement: Placement) -> Iterator[Cut]:
        """Cuts that balance the ranks: by time and, if memory is limited, also by what they hold."""
        costs, twice = self._profile.at(shape.samples), shape.checkpoint == "all"
        weights = [
            [
                unit.forward * (1 + twice) + min(unit.backward, unit.input + unit.weight)
                for unit in costs.units
            ]
        ]
        if self._wanted.memory:
            alive = 0 if twice else min(shape.ranks, shape.microbatches)
            copies = 1 + self._wanted.states
            weights.append(
                [u.parameters + u.trained * copies + alive * u.held for u in costs.units]
            )
        cuts = []
        for each in weights:
            # As shares, so that candidates that differ only in the size of microbatches share a cut.
            total = sum(each) or 1.0
            cuts.append(_even_cut(tuple(round(weight / total, 9) for weight in each), placement))
        yield from dict.fromkeys(cuts)

    def _fitted(self, shape: PlanShape, cut: Cut) -> _Candidate | None:
        """A candidate that fits into memory, with as many units recomputed as that needs."""
        again = frozenset(range(self._units) if shape.checkpoint == "all" else ())
        while True:
            candidate = self._composed(shape, cut, again)
            if self._fits(candidate):
                # If nothing has to be recomputed, this is the candidate of the policy "none".
                return candidate if again or shape.checkpoint != "needed" else None
            more = self._to_compute_again(candidate) if shape.checkpoint == "needed" else ()
            if not more:
                return None
            again |= frozenset(more)

    def _composed(
        self, shape: PlanShape, cut: Cut, again: frozenset[int], own: Schedule | None = None
    ) -> _Candidate:
        """A candidate in which these units are recomputed."""
        known = (own, Order(own)) if own else _schedule_of(shape)
        assert known is not None
        schedule, order = known
        latency, bandwidth = self._profile.wire(self._wanted.devices)
        costs = self._profile.at(shape.samples).stages(
            cut,
            schedule.placement,
            checkpoint=again,
            states=self._wanted.states,
            latency=latency,
            bandwidth=bandwidth,
            handling=self._profile.handling,
        )
        reduce = _seconds_to_reduce(shape, schedule.placement, costs)
        bound = _bound(schedule, costs) + reduce
        return _Candidate(shape, cut, again, costs, order.peaks(costs), reduce, bound, own=own)

    def _fits(self, candidate: _Candidate) -> bool:
        most = max(candidate.memory)
        fits = not self._wanted.memory or most <= self._wanted.memory
        if not fits and (self._least is None or most < self._least[0]):
            self._least = most, candidate.shape
        return fits

    def _to_compute_again(self, candidate: _Candidate) -> set[int]:
        """On each rank that holds too much, the units that free the most memory for their time."""
        units = self._profile.at(candidate.shape.samples).units
        runs = runs_of(candidate.cut, len(units))
        shape = candidate.shape
        placement = _schedule_of(shape)[0].placement  # type: ignore[index] # the candidate has one
        alive = min(shape.ranks, shape.microbatches)
        chosen: set[int] = set()
        for rank, most in enumerate(candidate.memory):
            lacking = most - self._wanted.memory
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
        return (
            f"nothing fits into memory={wanted.memory:.0f} ({bytes_as_text(wanted.memory)}) on each of "
            f"{wanted.devices} ranks: memory={most:.0f} ({bytes_as_text(most)}) would do, with "
            f"{shape.schedule} and {shape.microbatches} microbatches; more ranks, smaller microbatches or "
            "checkpoint='all' need less"
        )

    # ---- improving the best

    def _improved(self, best: _Candidate, until: float) -> Iterator[_Candidate]:
        """The candidate with units moved from stage to stage while that helps, and with a searched order."""
        tried, start = {best.cut}, best
        while monotonic() < until:
            cut = next((cut for cut in _near(best.cut, self._units) if cut not in tried), None)
            if cut is None:
                break
            tried.add(cut)
            other = self._fitted(best.shape, cut)
            if other is not None and other.bound < best.seconds:
                other = other.timed()
                best = other if other.seconds < best.seconds * (1 - 1e-9) else best
        searched = self._searched(best, until)
        yield from (each for each in (best, searched) if each is not None and each is not start)

    def _searched(self, candidate: _Candidate, until: float) -> _Candidate | None:
        """The candidate with a schedule searched for its costs, if that is faster."""
        shape, costs = candidate.shape, candidate.costs
        known = _schedule_of(shape)
        if shape.forwards > LARGEST_SEARCH or shape.ranks == 1 or monotonic() > until:
            return None
        assert known is not None
        placement, limit = known[0].placement, None
        if self._wanted.memory:
            limit = [self._room(placement, costs, rank) for rank in range(shape.ranks)]
            if min(limit) <= 0:
                return None
        try:
            order = search_schedule(
                costs.costs,
                ranks=shape.ranks,
                microbatches=shape.microbatches,
                memory=limit,
                placement=placement,
                edges=costs.edges,
                seconds=max(0.5, (until - monotonic()) / 2),
            )
        except ScheduleError:
            return None
        shape = replace(shape, schedule=SEARCHED)
        other = self._composed(shape, candidate.cut, candidate.again, order)
        if not self._fits(other):
            return None
        other = other.timed()
        return other if other.seconds < candidate.seconds else None

    def _room(self, placement: Placement, costs: StageCosts, rank: int) -> float:
        """The bytes that a schedule may fill with activations, whatever its order."""
        mine = placement.stages_on(rank)
        extra = max(sizes[stage] for sizes in costs.extra.values() for stage in mine)
        messages = sum(map(costs.messages, mine))
        return self._wanted.memory - costs.static_on(placement, rank) - extra - messages

    def _plan(self, candidate: _Candidate) -> Plan:
        shape, units = candidate.shape, self._profile.at(candidate.shape.samples).units
        runs = runs_of(candidate.cut, len(units))
        return Plan(
            shape=shape,
            stages=tuple(tuple(units[number].path for number in run) for run in runs),
            checkpoint=tuple(units[number].path for number in sorted(candidate.again)),
            seconds=candidate.seconds,
            reduce=candidate.reduce,
            memory=candidate.memory,
            limit=self._wanted.memory,
            tokens=self._wanted.batch * (self._profile.tokens or 1),
            stage_costs=candidate.costs,
            own=candidate.own.with_edges(candidate.costs.edges) if candidate.own else None,
        )


def _near(cut: Cut, units: int) -> Iterator[Cut]:
    """Cuts with one boundary moved by one unit."""
    for index, step in product(range(1, len(cut)), (-1, 1)):
        moved = (*cut[:index], cut[index] + step, *cut[index + 1 :])
        if all(a < b for a, b in pairwise((*moved, units))):
            yield moved


def _bound(schedule: Schedule, costs: StageCosts) -> float:
    """A time that no order of the actions beats.

    A rank cannot start before the stages ahead of it have run a microbatch, then has all its own work to do,
    and after that a whole backward must still pass the stages ahead.
    """
    split = {Op.I, Op.W} <= schedule.ops
    backward = costs.backward
    if split:
        halves = zip(costs.backward, costs.input, costs.weight, strict=True)
        backward = tuple(min(whole, first + second) for whole, first, second in halves)
    bound = 0.0
    for rank in range(schedule.ranks):
        mine = schedule.placement.stages_on(rank)
        work = sum(costs.forward[stage] + backward[stage] for stage in mine)
        ahead = sum(costs.forward[: mine[0]])
        behind = 0.0 if split else sum(backward[: mine[0]])
        bound = max(bound, ahead + schedule.microbatches * work + behind)
    return bound


def _seconds_to_reduce(shape: PlanShape, placement: Placement, costs: StageCosts) -> float:
    """How long the replicas take to sum gradients in a ring, for the rank with the most."""
    if shape.replicas == 1:
        return 0.0
    most = max(
        sum(costs.kinds[stage]["gradients"] for stage in placement.stages_on(rank))
        for rank in range(placement.ranks)
    )
    rounds = 2 * (shape.replicas - 1)
    return rounds * (most / shape.replicas / costs.bandwidth + costs.latency)
