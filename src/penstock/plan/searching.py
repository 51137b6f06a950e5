"""Find the fastest plans that fit: try the candidates, best bound first, and improve the best of them.

A candidate is a schedule, numbers of ranks, replicas, stages and microbatches, and how much to recompute.
It is cut so that the ranks of its placement have about equal work. It is simulated twice: first without its
messages spelled out, which never takes longer than with them, and then with them. A candidate that is proven
to be slower than a known one is not simulated:

- no cut makes the step shorter than all work shared out evenly;
- with a given cut, a rank cannot start before the stages ahead of it have run a microbatch, then has all its
  own work to do, and after that a whole backward must still pass the stages ahead.
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
from penstock.partition.costs import aligned
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
from penstock.plan.costs import Cut, Profile, StageCosts, UnitCosts, cut_of, runs_of
from penstock.plan.report import report_of
from penstock.schedule import Op, Placement, Schedule, compute_only, names, simulate
from penstock.schedule import search as search_schedule
from penstock.schedule.library import find
from penstock.values import bytes_as_text

KEPT = 10
POLISHED = 3
"""The number of best plans that are improved at the end."""
LARGEST_SEARCH = 512
"""The most stages times microbatches for which a schedule is searched; more takes too long."""
MOST_MICROBATCHES = 6
"""The most numbers of microbatches that are tried by default."""
LAPS = (2, 3, 4)
"""The numbers of stages per rank that are tried by default, if a schedule takes any number."""
SEARCHED = "searched"
"""The name of a schedule that was searched for these costs."""


@dataclass(frozen=True)
class Plans:
    """Plans, the fastest first; as text, a table.

    Args:
        plans: The plans.
        profile: The profile that the plans were made from.
        looked_at: The number of candidates.
        simulated: The number of simulated candidates; the others were proven to be slower, or too large.
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
        return f"{aligned(rows, words=(1, 10, 11))}\n{self._note()}"

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


@dataclass
class _Candidate:
    """A shape with a cut, and its costs."""

    shape: PlanShape
    schedule: Schedule
    order: Order
    cut: Cut
    again: frozenset[int]
    costs: StageCosts
    reduce: float
    memory: tuple[float, ...] = ()
    seconds: float = math.inf

    def wired(self) -> Schedule:
        """The schedule with the edges of the cut."""
        return self.schedule.with_edges(self.costs.edges)

    def time(self, worst: float = math.inf) -> None:
        """Simulate the step, with messages only if it may be faster than the worst known one."""
        schedule = self.wired()
        if (
            math.isfinite(worst)
            and simulate(schedule, self.costs.costs).makespan + self.reduce >= worst
        ):
            return
        self.seconds = simulate(with_messages(schedule), self.costs.costs).makespan + self.reduce


class _PlanSearch:
    """One search, and what it has found."""

    def __init__(self, profile: Profile, wanted: _Wanted) -> None:
        self._profile = profile
        self._wanted = wanted
        self._best: dict[PlanShape, _Candidate] = {}
        self._least: _Candidate | None = None
        """The candidate with the least memory of those that do not fit."""
        self._simulated = 0

    def plans(self, seconds: float) -> Plans:
        """The best plans, improved for some seconds."""
        looked_at = self._look()
        if not self._best:
            raise UsageError(self._what_would_do())
        best = self._ranking()
        until = monotonic() + seconds
        for candidate in best[:POLISHED] if seconds > 0 else ():
            moved = self._moved(candidate, until)
            searched = self._searched(moved, until)
            best += [
                each for each in (moved, searched) if each is not None and each is not candidate
            ]
        best.sort(key=lambda candidate: (candidate.seconds, max(candidate.memory)))
        plans = tuple(self._plan(candidate) for candidate in best[: self._wanted.keep])
        return Plans(plans, self._profile, looked_at, self._simulated)

    # ---- looking at all candidates

    def _look(self) -> int:
        """Simulate shapes, least bound first, until no other can be among the best; return their number."""
        shapes = sorted(self._wanted.shapes(self.units), key=self._bound_of_shape)
        worst = math.inf
        for shape in shapes:
            if self._bound_of_shape(shape) >= worst:
                break
            for candidate in self._candidates(shape):
                if self._bound(candidate) + candidate.reduce >= worst:
                    continue
                self._simulated += 1
                candidate.time(worst)
                known = self._best.get(shape)
                if candidate.seconds < (known.seconds if known else math.inf):
                    self._best[shape] = candidate
                    ranking = self._ranking()
                    worst = ranking[-1].seconds if len(ranking) == self._wanted.keep else math.inf
        return len(shapes)

    def _ranking(self) -> list[_Candidate]:
        best = sorted(self._best.values(), key=lambda each: (each.seconds, max(each.memory)))
        return best[: self._wanted.keep]

    @property
    def units(self) -> int:
        """The number of units in the model."""
        # If the costs of no size are known yet, any size to be planned will do.
        sizes = sorted(self._profile.known or {shape.samples for shape in self._wanted.shapes()})
        if not sizes:
            raise UsageError(
                f"batch={self._wanted.batch} cannot be divided among {self._wanted.devices} ranks as asked: "
                "each pipeline needs a whole number of samples, and of microbatches"
            )
        return len(self._profile.at(sizes[0]).units)

    def _candidates(self, shape: PlanShape) -> Iterator[_Candidate]:
        """The candidates of a shape that fit into memory, one for each good cut."""
        known = _schedule_of(shape)
        if known is not None and known[0].trains:
            for cut in self._cuts(shape, known[0].placement):
                candidate = self._fitted(shape, *known, cut)
                if candidate is not None:
                    yield candidate

    def _cuts(self, shape: PlanShape, placement: Placement) -> Iterator[Cut]:
        """Cuts that balance the ranks: by time and, if memory is limited, also by what they hold."""
        costs = self._profile.at(shape.samples)
        weights = [_works(costs, shape.checkpoint)]
        if self._wanted.memory:
            alive = 0 if shape.checkpoint == "all" else min(shape.ranks, shape.microbatches)
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

    def _fitted(
        self, shape: PlanShape, schedule: Schedule, order: Order, cut: Cut
    ) -> _Candidate | None:
        """A candidate that fits into memory, with as many units recomputed as that needs."""
        units = len(self._profile.at(shape.samples).units)
        again = frozenset(range(units) if shape.checkpoint == "all" else ())
        candidate = self._compose(shape, schedule, order, cut, again)
        if self._fits(candidate):
            # If nothing has to be recomputed, this is the candidate of the policy "none".
            return None if shape.checkpoint == "needed" else candidate
        while shape.checkpoint == "needed":
            more = self._to_compute_again(candidate)
            if not more:
                break
            again |= more
            candidate = self._compose(shape, schedule, order, cut, again)
            if self._fits(candidate):
                return candidate
        return None

    def _compose(
        self, shape: PlanShape, schedule: Schedule, order: Order, cut: Cut, again: frozenset[int]
    ) -> _Candidate:
        """A candidate in which these units are recomputed."""
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
        memory = order.peaks(costs)
        return _Candidate(shape, schedule, order, cut, again, costs, reduce, memory)

    def _fits(self, candidate: _Candidate) -> bool:
        fits = not self._wanted.memory or max(candidate.memory) <= self._wanted.memory
        if not fits and (self._least is None or max(candidate.memory) < max(self._least.memory)):
            self._least = candidate
        return fits

    def _to_compute_again(self, candidate: _Candidate) -> frozenset[int]:
        """On each rank that holds too much, the units that free the most memory for their time."""
        units = self._profile.at(candidate.shape.samples).units
        runs = runs_of(candidate.cut, len(units))
        alive = min(candidate.shape.ranks, candidate.shape.microbatches)
        chosen: set[int] = set()
        for rank, most in enumerate(candidate.memory):
            lacking = most - self._wanted.memory
            if lacking <= 0:
                continue
            free = [
                number
                for stage in candidate.schedule.placement.stages_on(rank)
                for number in runs[stage]
                if number not in candidate.again and units[number].held > 0
            ]
            if not free:
                return frozenset()
            free.sort(key=lambda number: units[number].forward / units[number].held)
            for number in free:
                chosen.add(number)
                lacking -= alive * units[number].held
                if lacking <= 0:
                    break
        return frozenset(chosen)

    # ---- bounds

    def _bound_of_shape(self, shape: PlanShape) -> float:
        """A time that no cut of the units beats: all work, shared out evenly."""
        work = sum(_works(self._profile.at(shape.samples), shape.checkpoint))
        return shape.microbatches * work / shape.ranks

    def _bound(self, candidate: _Candidate) -> float:
        """A time that no order of the actions beats, for a cut."""
        schedule, costs = candidate.schedule, candidate.costs
        split = {Op.I, Op.W} <= schedule.ops
        backward = costs.backward
        if split:
            halves = zip(costs.backward, costs.input, costs.weight, strict=True)
            backward = tuple(min(whole, first + second) for whole, first, second in halves)
        bound = 0.0
        for rank in range(schedule.ranks):
            mine = schedule.placement.stages_on(rank)
            own_work = sum(costs.forward[stage] + backward[stage] for stage in mine)
            ahead = sum(costs.forward[: mine[0]])
            behind = 0.0 if split else sum(backward[: mine[0]])
            bound = max(bound, ahead + schedule.microbatches * own_work + behind)
        return bound

    # ---- improving

    def _moved(self, candidate: _Candidate, until: float) -> _Candidate:
        """Move single units from stage to stage for as long as that helps."""
        units = len(self._profile.at(candidate.shape.samples).units)
        best, tried = candidate, {candidate.cut}
        while monotonic() < until:
            cut = next((cut for cut in _near(best.cut, units) if cut not in tried), None)
            if cut is None:
                break
            tried.add(cut)
            other = self._fitted(candidate.shape, candidate.schedule, candidate.order, cut)
            if other is not None:
                self._simulated += 1
                other.time(best.seconds)
                best = other if other.seconds < best.seconds * (1 - 1e-9) else best
        return best

    def _searched(self, candidate: _Candidate, until: float) -> _Candidate | None:
        """The candidate with a schedule searched for its costs, if that is faster."""
        schedule, costs = candidate.schedule, candidate.costs
        large = schedule.stages * schedule.microbatches > LARGEST_SEARCH
        if large or schedule.ranks == 1 or monotonic() > until:
            return None
        limit = None
        if self._wanted.memory:
            limit = [self._room(schedule.placement, costs, rank) for rank in range(schedule.ranks)]
            if min(limit) <= 0:
                return None
        try:
            order = search_schedule(
                costs.costs,
                ranks=schedule.ranks,
                microbatches=schedule.microbatches,
                memory=limit,
                placement=schedule.placement,
                edges=costs.edges,
                seconds=max(0.5, (until - monotonic()) / 2),
            )
        except ScheduleError:
            return None
        other = replace(
            candidate,
            shape=replace(candidate.shape, schedule=SEARCHED),
            schedule=order,
            order=Order(order),
            memory=Order(order).peaks(costs),
            seconds=math.inf,
        )
        if not self._fits(other):
            return None
        self._simulated += 1
        other.time(candidate.seconds)
        return other if other.seconds < candidate.seconds else None

    def _room(self, placement: Placement, costs: StageCosts, rank: int) -> float:
        """The bytes that a schedule may fill with activations, whatever its order."""
        mine = placement.stages_on(rank)
        extra = max(sizes[stage] for sizes in costs.extra.values() for stage in mine)
        messages = sum(map(costs.messages, mine))
        return self._wanted.memory - costs.static_on(placement, rank) - extra - messages

    # ---- plans of candidates

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
            own=candidate.wired() if shape.schedule == SEARCHED else None,
        )

    # ---- if nothing fits

    def _what_would_do(self) -> str:
        """The smallest change of each kind that makes something fit."""
        wanted, least = self._wanted, self._least
        if least is None:
            return (
                f"none of {', '.join(wanted.schedules)} can run the model's {self.units} units with "
                f"ranks={wanted.devices}, batch={wanted.batch} and the other options; leave some of these "
                "options out"
            )
        most = max(least.memory)
        remedies = [
            f"memory={most:.0f} ({bytes_as_text(most)}) would do, with {least.shape.schedule} and "
            f"{least.shape.microbatches} microbatches"
        ]
        for others in (self._with_more_ranks(), self._with_smaller_microbatches()):
            change = next((text for text, other in others if self._fits_with(other)), None)
            remedies += [f"{change} would do"] if change else []
        return (
            f"nothing fits into memory={wanted.memory:.0f} ({bytes_as_text(wanted.memory)}) on each of "
            f"{wanted.devices} ranks: {'; '.join(remedies)}"
        )

    def _with_more_ranks(self) -> Iterator[tuple[str, _Wanted]]:
        """Single pipelines of more ranks; replicas would not help."""
        wanted = self._wanted
        most = self.units if wanted.microbatches else min(self.units, wanted.batch)
        for devices in range(wanted.devices + 1, most + 1):
            yield f"ranks={devices}", replace(wanted, devices=devices, ranks=(devices,))

    def _with_smaller_microbatches(self) -> Iterator[tuple[str, _Wanted]]:
        wanted = self._wanted
        parts = {wanted.batch // (wanted.devices // ranks) for ranks in wanted.ranks}
        counts = {count for part in parts if part for count in _dividing(part) if count <= LARGEST}
        for count in sorted(counts - {shape.microbatches for shape in wanted.shapes(self.units)}):
            yield f"microbatches={count}", replace(wanted, microbatches=(count,))

    def _fits_with(self, wanted: _Wanted) -> bool:
        """Whether something fits, tried with the smallest microbatches and all units recomputed."""
        thrifty = "all" if "all" in wanted.checkpoint else wanted.checkpoint[-1]
        other = _PlanSearch(self._profile, replace(wanted, checkpoint=(thrifty,)))
        try:
            shapes = list(other._wanted.shapes(self.units))
        except UsageError:
            return False
        least = min((shape.samples for shape in shapes), default=0)
        return any(
            other._least_memory(shape) <= wanted.memory and any(other._candidates(shape))
            for shape in shapes
            if shape.samples == least
        )

    def _least_memory(self, shape: PlanShape) -> float:
        """The bytes that some rank holds with any cut: what the largest unit always needs."""
        units = self._profile.at(shape.samples).units
        return max(unit.parameters + unit.trained * (1 + self._wanted.states) for unit in units)


def _near(cut: Cut, units: int) -> Iterator[Cut]:
    """Cuts with one boundary moved by one unit."""
    for index, step in product(range(1, len(cut)), (-1, 1)):
        moved = (*cut[:index], cut[index] + step, *cut[index + 1 :])
        if all(a < b for a, b in pairwise((*moved, units))):
            yield moved


def _works(costs: UnitCosts, policy: str) -> list[float]:
    """The least time that each unit takes for a microbatch, in any order."""
    return [
        unit.forward * (2 if policy == "all" else 1) + min(unit.backward, unit.input + unit.weight)
        for unit in costs.units
    ]


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
