"""Find the fastest plans that fit: try the candidates, best bound first, and improve the best of them."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from time import monotonic

from penstock.errors import ScheduleError, UsageError
from penstock.plan.answer import Plan, Plans, Shape, bytes_as_text, static_of, with_messages
from penstock.plan.candidates import POLICIES, SEARCHED, Candidate, Candidates, Wanted, built
from penstock.plan.costs import Cut, Profile, StageCosts, cut_of, runs_of
from penstock.schedule import Schedule, compute_only, names, simulate
from penstock.schedule import search as search_schedule
from penstock.schedule.library import find

KEPT = 10
POLISHED = 3
"""How many of the best plans are improved at the end."""
LARGEST_SEARCH = 512
"""Up to which product of stages and microbatches a schedule is searched; beyond it takes too long."""


def search(  # noqa: PLR0913 - the whole question, by name
    profile: Profile,
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
    prune: bool = True,
) -> Plans:
    """Find the fastest ways to run a model.

    Args:
        profile: what its units cost, from :func:`measure` or :func:`predict`.
        ranks: how many devices there are.
        batch: the samples of a step.
        memory: the bytes that a rank may hold; by default those of the device, if known; 0 for no limit.
        schedules: the names to choose from; by default every schedule of the library that trains.
        pipeline: how many ranks a pipeline may have; the other ranks are replicas, each with its share of
            the batch. By default every number that divides ``ranks``.
        stages_per_rank: numbers to try for schedules that take any; by default 2, 3 and 4.
        microbatches: numbers to try for each pipeline; by default several that divide its share of the batch.
        checkpoint: ``"none"``, ``"needed"`` (as few units as fit the memory) or ``"all"``; by default all
            three are tried, or without a limit only ``"none"``.
        states: bytes of optimizer state for each byte of trained weights: 2 for AdamW, 1 for SGD with
            momentum.
        keep: how many plans to return.
        seconds: how long the best may be improved at the end, by moving their cuts and searching schedules.
        prune: whether to skip candidates that are proven to be slower, which does not change the plans.

    Returns:
        The plans, the fastest first.

    Raises:
        UsageError: nothing fits (the message says what would), or a number or name is not valid.
    """
    limit = profile.memory if memory is None else memory
    policies = POLICIES if limit else ("none",)
    wanted = Wanted(
        devices=_positive("ranks", ranks),
        batch=_positive("batch", batch),
        memory=limit,
        schedules=_names(schedules),
        ranks=_divisors("pipeline", pipeline, ranks),
        stages_per_rank=_numbers("stages_per_rank", stages_per_rank),
        microbatches=_numbers("microbatches", microbatches),
        checkpoint=_policies(checkpoint) or policies,
        states=states,
        keep=_positive("keep", keep),
    )
    if limit < 0 or states < 0:
        raise UsageError(f"memory={limit}, states={states}: must be numbers, at least 0")
    return _Search(profile, wanted, prune=prune).plans(seconds)


def plan_for(
    profile: Profile,
    schedule: Schedule,
    stages: Sequence[Sequence[str]],
    *,
    batch: int,
    states: float = 2.0,
) -> Plan:
    """The plan of a schedule and a cut that were chosen by hand, to see what it costs.

    Args:
        profile: what the units cost.
        schedule: the schedule; its messages are worked out anew.
        stages: for each stage the paths of its units.
        batch: the samples of a step.
        states: bytes of optimizer state for each byte of trained weights.

    Raises:
        UsageError: the stages do not hold the units in their order.
    """
    made = compute_only(schedule)
    samples = batch // made.microbatches
    paths = [unit.path for unit in profile.at(samples).units]
    laps = made.stages // made.ranks
    shape = Shape(made.name, made.ranks, 1, laps, made.microbatches, samples, "none")
    wanted = Wanted(made.ranks, batch, 0.0, (), (made.ranks,), None, None, ("none",), states, 1)
    search = _Search(profile, wanted, prune=False)
    return search.plan_by_hand(shape, made, cut_of(paths, stages))


def _positive(name: str, number: int) -> int:
    if not isinstance(number, int) or number < 1:
        raise UsageError(f"{name}={number!r}: must be a whole number, at least 1")
    return number


def _numbers(name: str, given: int | Iterable[int] | None) -> tuple[int, ...] | None:
    if given is None:
        return None
    found = (given,) if isinstance(given, int) else tuple(given)
    return tuple(_positive(name, number) for number in found)


def _divisors(name: str, given: int | Iterable[int] | None, devices: int) -> tuple[int, ...]:
    found = _numbers(name, given)
    if found is None:
        return tuple(n for n in range(1, devices + 1) if devices % n == 0)
    if wrong := [number for number in found if devices % number]:
        raise UsageError(
            f"{name}={wrong[0]}: {devices} ranks cannot be divided into pipelines of {wrong[0]} ranks"
        )
    return found


def _names(given: str | Iterable[str] | None) -> tuple[str, ...]:
    if given is None:
        given = [name for name in names() if _trains(name)]
    found = (given,) if isinstance(given, str) else tuple(given)
    idle = [name for name in found if not _trains(name)]
    if idle:
        raise UsageError(f"schedules={idle[0]!r} has no backward; choose one that trains")
    return tuple(sorted((find(name)[0] for name in found), key=lambda name: name != "1F1B"))


def _trains(name: str) -> bool:
    return find(name)[1].trains


def _policies(given: str | Iterable[str] | None) -> tuple[str, ...]:
    found = () if given is None else (given,) if isinstance(given, str) else tuple(given)
    for policy in found:
        if policy not in POLICIES:
            raise UsageError(f"checkpoint={policy!r}: must be one of {', '.join(POLICIES)}")
    return found


class _Search:
    """One search, and what it has found."""

    def __init__(self, profile: Profile, wanted: Wanted, *, prune: bool) -> None:
        self._profile = profile
        self._wanted = wanted
        self._candidates = Candidates(profile, wanted)
        self._prune = prune
        self._best: list[tuple[float, float, int, Candidate]] = []
        self._simulated = 0
        self._looked_at = 0

    def plans(self, seconds: float) -> Plans:
        """The best plans, improved for some seconds."""
        self._look(self._wanted)
        if not self._best:
            raise UsageError(_what_would_do(self._profile, self._wanted, self._candidates.least))
        best = [candidate for *_, candidate in self._best]
        until = monotonic() + seconds
        for candidate in best[:POLISHED] if seconds > 0 else ():
            best += self._improved(candidate, until)
        best.sort(key=lambda candidate: (candidate.seconds, max(candidate.memory)))
        made = tuple(self._plan(candidate) for candidate in best[: self._wanted.keep])
        return Plans(made, self._profile, self._looked_at, self._simulated)

    def _look(self, wanted: Wanted) -> None:
        shapes = list(wanted.shapes(self.units))
        self._looked_at = len(shapes)
        ordered = sorted(
            (self._candidates.at_least(shape), n, shape) for n, shape in enumerate(shapes)
        )
        for number, (bound, _, shape) in enumerate(ordered):
            if self._prune and bound >= self._worst:
                break
            if (found := self._evaluated(shape)) is not None:
                entry = (found.seconds, max(found.memory), number, found)
                insort(self._best, entry, key=lambda entry: entry[:3])
                del self._best[wanted.keep :]

    def anything_fits(self) -> bool:
        """Whether some candidate fits, tried with the smallest microbatches and all computed again."""
        thrifty = "all" if "all" in self._wanted.checkpoint else self._wanted.checkpoint[-1]
        shapes = list(replace(self._wanted, checkpoint=(thrifty,)).shapes(self.units))
        least = min((shape.samples for shape in shapes), default=0)
        for shape in (shape for shape in shapes if shape.samples == least):
            schedule = built(shape.schedule, shape.ranks, shape.microbatches, shape.stages_per_rank)
            if schedule is None or self._candidates.least_memory(shape) > self._wanted.memory:
                continue
            for cut in self._candidates.cuts(shape, schedule):
                if self._candidates.fitted(shape, schedule, cut) is not None:
                    return True
        return False

    @property
    def units(self) -> int:
        """How many units the model has."""
        sizes = sorted(self._profile.known) or [self._smallest()]
        return len(self._profile.at(sizes[0]).units)

    def _smallest(self) -> int:
        """Some size of a microbatch, for which to find the units."""
        shapes = self._wanted.shapes(1_000_000)
        found = min((shape.samples for shape in shapes), default=None)
        if found is None:
            wanted = self._wanted
            raise UsageError(
                f"batch={wanted.batch} cannot be shared as asked by {wanted.devices} ranks: the share of a "
                "pipeline must be a whole number of samples, and of microbatches"
            )
        return found

    @property
    def _worst(self) -> float:
        """The time that a candidate has to beat."""
        full = len(self._best) >= self._wanted.keep
        return self._best[-1][0] if full else float("inf")

    # ---- one candidate

    def _evaluated(self, shape: Shape) -> Candidate | None:
        """A candidate with the best of its cuts, if it fits and is good enough."""
        schedule = built(shape.schedule, shape.ranks, shape.microbatches, shape.stages_per_rank)
        if schedule is None:
            return None
        found: Candidate | None = None
        for cut in self._candidates.cuts(shape, schedule):
            candidate = self._candidates.fitted(shape, schedule, cut)
            if candidate is None:
                continue
            bound = self._candidates.bound(schedule, candidate.stage_costs) + candidate.reduce
            if self._prune and bound >= min(self._worst, found.seconds if found else self._worst):
                continue
            self._time(candidate)
            if candidate.seconds < (found.seconds if found else float("inf")):
                found = candidate
        return found

    def _time(self, candidate: Candidate) -> None:
        """Simulate a candidate; with messages only if it may be good enough."""
        self._simulated += 1
        of = candidate.stage_costs.costs
        quick = simulate(candidate.schedule, of).makespan + candidate.reduce
        if self._prune and quick >= self._worst:
            return
        spelled = simulate(with_messages(candidate.schedule), of)
        candidate.seconds = spelled.makespan + candidate.reduce

    # ---- improving

    def _improved(self, candidate: Candidate, until: float) -> list[Candidate]:
        """The candidate with an improved cut, and with a schedule that is searched for that."""
        found = []
        moved = self._moved(candidate, until)
        if moved is not candidate:
            found.append(moved)
        searched = self._searched(moved, until)
        if searched is not None:
            found.append(searched)
        return found

    def _moved(self, candidate: Candidate, until: float) -> Candidate:
        """Move single units from stage to stage for as long as that helps."""
        units = len(self._profile.at(candidate.shape.samples).units)
        best, tried = candidate, {candidate.cut}
        while monotonic() < until:
            cut = next((cut for cut in _near(best.cut, units) if cut not in tried), None)
            if cut is None:
                break
            tried.add(cut)
            other = self._candidates.fitted(candidate.shape, candidate.schedule, cut)
            if other is not None:
                self._time(other)
                best = other if other.seconds < best.seconds * (1 - 1e-9) else best
        return best

    def _searched(self, candidate: Candidate, until: float) -> Candidate | None:
        """The candidate with a schedule that is searched for its costs, if that is faster."""
        schedule, stage_costs = candidate.schedule, candidate.stage_costs
        large = schedule.stages * schedule.microbatches > LARGEST_SEARCH
        if large or schedule.ranks == 1 or monotonic() > until:
            return None
        limit = None
        if self._wanted.memory:
            limit = [self._room(schedule, stage_costs, rank) for rank in range(schedule.ranks)]
            if min(limit) <= 0:
                return None
        try:
            found = search_schedule(
                stage_costs.costs,
                ranks=schedule.ranks,
                microbatches=schedule.microbatches,
                memory=limit,
                placement=schedule.placement,
                edges=stage_costs.edges,
                seconds=max(0.5, (until - monotonic()) / 2),
            )
        except ScheduleError:
            return None
        shape = replace(candidate.shape, schedule=SEARCHED)
        other = replace(candidate, shape=shape, schedule=found)
        if not self._candidates.fits(other):
            return None
        self._time(other)
        return other if other.seconds < candidate.seconds else None

    def _room(self, schedule: Schedule, stage_costs: StageCosts, rank: int) -> float:
        """The bytes that a schedule may fill with activations, whatever its order."""
        own = schedule.placement.stages_on(rank)
        extra = max(sizes[stage] for sizes in stage_costs.extra.values() for stage in own)
        messages = sum(map(stage_costs.messages, own))
        fixed = static_of(schedule.placement, stage_costs, rank)
        return self._wanted.memory - fixed - extra - messages

    # ---- plans of candidates

    def plan_by_hand(self, shape: Shape, schedule: Schedule, cut: Cut) -> Plan:
        """The plan of one candidate, whether it fits or not."""
        candidate = self._candidates.composed(shape, schedule, cut, frozenset())
        self._candidates.fits(candidate)
        self._time(candidate)
        return replace(self._plan(candidate), own=candidate.schedule)

    def _plan(self, candidate: Candidate) -> Plan:
        costs = self._profile.at(candidate.shape.samples)
        paths = [unit.path for unit in costs.units]
        runs = runs_of(candidate.cut, len(paths))
        shape, schedule = candidate.shape, candidate.schedule
        ran = simulate(with_messages(schedule), candidate.stage_costs.costs)
        again = [
            sum(
                costs.again(unit)
                for stage in schedule.placement.stages_on(rank)
                for unit in runs[stage]
                if unit in candidate.again
            )
            for rank in range(schedule.ranks)
        ]
        busiest = max(range(schedule.ranks), key=lambda rank: ran.busy[rank])
        tokens = self._wanted.batch * (self._profile.tokens or 1)
        return Plan(
            shape,
            tuple(tuple(paths[unit] for unit in run) for run in runs),
            tuple(paths[unit] for unit in sorted(candidate.again)),
            schedule if shape.schedule == SEARCHED else None,
            candidate.seconds,
            candidate.reduce,
            again[busiest] * shape.microbatches,
            ran.bubble,
            candidate.memory,
            self._wanted.memory,
            tokens,
            candidate.stage_costs,
        )


def _near(cut: Cut, units: int) -> Iterator[Cut]:
    """Cuts with one boundary moved by one unit."""
    for index in range(1, len(cut)):
        for step in (-1, 1):
            moved = (*cut[:index], cut[index] + step, *cut[index + 1 :])
            if all(a < b for a, b in pairwise((*moved, units))):
                yield moved


# ---- where nothing fits


def _what_would_do(profile: Profile, wanted: Wanted, least: Candidate | None) -> str:
    """The smallest change of each kind with which something fits."""
    if least is None:
        return (
            f"none of {', '.join(wanted.schedules)} can run so few units on the ranks and microbatches asked "
            f"for: ranks={wanted.devices}, batch={wanted.batch}; leave some of these options out"
        )
    most = max(least.memory)
    found = [
        f"memory={most:.0f} ({bytes_as_text(most)}) would do, with {least.shape.schedule} and "
        f"{least.shape.microbatches} microbatches"
    ]
    enough = _enough_ranks(profile, wanted)
    if enough is not None:
        found.append(f"ranks={enough} would do")
    smaller = _smaller_microbatch(profile, wanted)
    if smaller is not None:
        found.append(smaller)
    return (
        f"nothing fits into memory={wanted.memory:.0f} ({bytes_as_text(wanted.memory)}) on each of "
        f"{wanted.devices} ranks: {'; '.join(found)}"
    )


def _enough_ranks(profile: Profile, wanted: Wanted) -> int | None:
    """The least number of ranks of a single pipeline that fits; replicas would not help."""
    search = _Search(profile, wanted, prune=True)
    for devices in range(wanted.devices + 1, search.units + 1):
        if wanted.batch < devices and wanted.microbatches is None:
            break
        more = replace(wanted, devices=devices, ranks=(devices,))
        if _Search(profile, more, prune=True).anything_fits():
            return devices
    return None


def _smaller_microbatch(profile: Profile, wanted: Wanted) -> str | None:
    parts = {wanted.batch // (wanted.devices // ranks): ranks for ranks in wanted.ranks}
    counts = sorted({m for part in parts for m in range(1, part + 1) if part % m == 0})
    tried = {shape.microbatches for shape in wanted.shapes(1_000_000)}
    for count in (count for count in counts if count not in tried):
        other = replace(wanted, microbatches=(count,))
        if _Search(profile, other, prune=True).anything_fits():
            return f"microbatches={count} would do"
    return None
