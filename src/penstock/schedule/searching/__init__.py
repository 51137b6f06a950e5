"""Search for a schedule for stages of unequal cost under a memory limit.

``task`` describes the step in numbers, ``drafting`` makes drafts of its schedule, and ``annealing`` improves
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from numbers import Real
from operator import attrgetter, itemgetter, le
from random import Random
from time import monotonic

from penstock.errors import ScheduleError, UsageError
from penstock.schedule.base import (
    Edge,
    Placement,
    Schedule,
    chain,
    check_at_least_one,
    looped,
    v_shaped,
)
from penstock.schedule.clock import Costs
from penstock.schedule.library import RECIPES
from penstock.schedule.searching.annealing import Annealer
from penstock.schedule.searching.drafting import Dispatcher, rules
from penstock.schedule.searching.task import SLACK, Draft, Task
from penstock.schedule.simulation import simulate

Memory = float | Sequence[float]
"""The most that a rank may hold: one number for all ranks, or one for each."""
EFFORT = 1_200_000
"""The number of moves tried by default, as the annealer counts them: a few seconds of work."""
MAKESPAN = attrgetter("makespan")
STARTS = 24
"""The number of drafts in the first round."""


def search(  # noqa: PLR0913 - the whole task, by name
    costs: Costs,
    *,
    ranks: int,
    microbatches: int,
    memory: Memory | None = None,
    placement: Placement | None = None,
    edges: Iterable[Edge] | None = None,
    slices: int = 1,
    seed: int = 0,
    seconds: float = 10.0,
    effort: float = 1.0,
) -> Schedule:
    """Make a schedule for stages of unequal cost under a memory limit.

    It minimises the makespan of one step as :func:`penstock.schedule.simulate` counts it without messages
    spelled out: a rank runs one action at a time; F of a stage needs the values that it uses, I or B its F
    and the gradients owed to it, W its I; a value arrives a transfer and a latency after it was made, and
    channels carry any number of values at once. The search chooses the order of actions, and which backwards
    are whole (B) and which are split into I and W. No rank holds more than its memory at any time. Overlapped
    pairs are not searched; but if ``costs.overlap`` makes a library schedule with such pairs the best, the
    search returns it.

    The candidates are the library's schedules for this placement that keep to the memory, and drafts of a
    list scheduler that simulated annealing improves; so the result is never longer than the best of the
    library. The search ends when its effort is used up, when the result meets :func:`lower_bound`, or when
    time runs out. Unless time ends it, the same arguments give the same schedule.

    Args:
        costs: the costs of each stage.
        ranks: the number of ranks that share the model.
        microbatches: the number of parts of the batch.
        memory: the most that a rank may hold, in the units of ``costs.activation`` and ``costs.stash``: one
            number for all ranks, or one for each. By default there is no limit.
        placement: which rank holds which stages. By default as many stages as ``costs`` lists, in laps over
            the ranks and, if that makes two per rank, also in a V; one stage per rank if it lists none.
        edges: the values that travel between stages; by default the chain.
        slices: into how many slices the sequences of each microbatch are cut; ``costs.slice_times`` and
            ``costs.slice_sizes`` say what each of them costs.
        seed: the seed of the random moves.
        seconds: after which to return the best so far; the library's schedules are timed in any case.
        effort: how much to try; 1 takes a few seconds, 10 ten times as long.

    Returns:
        A schedule without messages, which :func:`penstock.schedule.validate` passes.

    Raises:
        ScheduleError: the numbers contradict each other, or there is too little memory for one microbatch.
        UsageError: the costs list different numbers of stages, or an argument is not a valid number.

    Example:
        >>> from penstock.schedule import Costs, search, simulate
        >>> share = [1, 1, 1, 2]
        >>> costs = Costs(forward=share, input=share, weight=share, activation=share, stash=share)
        >>> schedule = search(costs, ranks=4, microbatches=8, memory=4)
        >>> simulate(schedule, costs).makespan
        51.0
    """
    for name, number in (("seconds", seconds), ("effort", effort)):
        if not number >= 0:
            raise UsageError(f"{name}={number}: must be a number, at least 0")
    until = monotonic() + seconds
    tasks = _tasks(costs, ranks, microbatches, memory, placement, edges, slices)
    shortest, best = min(
        (known for task in tasks for known in _library(task)),
        default=(math.inf, None),
        key=itemgetter(0),
    )
    drafts = [Dispatcher(tasks[0], next(rules(tasks[0]))).run()]
    drafts += (
        Dispatcher(task, rule).run()
        for task in tasks
        for rule in rules(task)
        if monotonic() < until
    )
    draft = _race(drafts, shortest, Random(seed), until, effort)
    return draft.schedule() if best is None or draft.makespan < shortest * (1 - SLACK) else best


def _race(
    drafts: list[Draft], shortest: float, random: Random, until: float, effort: float
) -> Draft:
    """The best draft after rounds of annealing, each with half as many drafts and twice the effort.

    Annealing improves details, but hardly changes how far each rank runs ahead; so the race starts with many.
    """
    rounds = STARTS.bit_length()
    share = EFFORT * effort / (2**rounds - 1)
    for turn in range(rounds):
        drafts = _distinct(drafts)[: STARTS >> turn]
        known = min(shortest, drafts[0].makespan) * (1 - SLACK)
        running = [draft for draft in drafts if draft.task.least < known]
        for draft in takewhile(lambda _: monotonic() <= until, running):
            annealer = Annealer(draft, random)
            annealer.run(share * 2**turn / len(running), until)
            drafts.append(annealer.best)
    return min(drafts, key=MAKESPAN)


def _distinct(drafts: Iterable[Draft]) -> list[Draft]:
    """One draft for each makespan, the shortest first."""
    kept: list[Draft] = []
    for draft in sorted(drafts, key=MAKESPAN):
        if not kept or draft.makespan > kept[-1].makespan * (1 + SLACK):
            kept.append(draft)
    return kept


def lower_bound(
    costs: Costs,
    *,
    ranks: int,
    microbatches: int,
    memory: Memory | None = None,
    placement: Placement | None = None,
    edges: Iterable[Edge] | None = None,
    slices: int = 1,
) -> float:
    """A time that every schedule of such a step takes at least.

    It is the work of the busiest rank, with what must come before its first action and after its last, or the
    longest way of one microbatch through all stages. Memory does not count. Arguments and errors are those of
    :func:`search`.
    """
    check_at_least_one(ranks=ranks, microbatches=microbatches)
    # All microbatches are alike, so one will do.
    tasks = _tasks(costs, ranks, 1, memory, placement, edges, slices)
    return min(task.least_of(microbatches) for task in tasks)


def _tasks(
    costs: Costs,
    ranks: int,
    microbatches: int,
    memory: Memory | None,
    placement: Placement | None,
    edges: Iterable[Edge] | None,
    slices: int,
) -> list[Task]:
    """The task for each placement."""
    check_at_least_one(ranks=ranks, microbatches=microbatches, slices=slices)
    limits = _limits(memory, ranks)
    placements = [placement] if placement else _placements(costs, ranks)
    if placements[0].ranks != ranks:
        raise ScheduleError(f"ranks={ranks}, but the placement has {placements[0].ranks}")
    table = None if edges is None else tuple(edges)
    tasks = [
        Task(
            placed,
            chain(placed.stages) if table is None else table,
            microbatches,
            costs,
            limits,
            slices,
        )
        for placed in placements
    ]
    needs = [task.held_by_one for task in tasks]
    fitting = [
        task for task, held in zip(tasks, needs, strict=True) if all(map(le, held, task.limit))
    ]
    if not fitting:
        least = min(needs, key=max)
        raise ScheduleError(
            f"memory={memory} is too little for one microbatch, of which the stages of the ranks hold "
            f"{least}: give each rank as much, or {max(least):g} to all, make microbatches smaller, "
            "or recompute activations"
        )
    return fitting


def _limits(memory: Memory | None, ranks: int) -> list[float]:
    """The most that each rank may hold."""
    if memory is None:
        return [math.inf] * ranks
    limits = list(memory) if isinstance(memory, Sequence) else [memory] * ranks
    for limit in limits:
        if not isinstance(limit, Real) or not limit >= 0:
            raise UsageError(f"memory={limit!r}: must be a number, at least 0")
    if len(limits) != ranks:
        raise ScheduleError(
            f"memory has {len(limits)} numbers for {ranks} ranks: give one for each rank, or one for all"
        )
    return limits


def _placements(costs: Costs, ranks: int) -> list[Placement]:
    """The placements to choose from if none is given."""
    kinds = (
        costs.forward,
        costs.input,
        costs.weight,
        costs.backward,
        costs.activation,
        costs.stash,
    )
    counts = {len(cost) for cost in kinds if isinstance(cost, Sequence)} or {ranks}
    if len(counts) > 1:
        raise UsageError(
            f"costs list {sorted(counts)} stages: give one number for each stage, or one for all"
        )
    (stages,) = counts
    if stages % ranks or not stages:
        raise ScheduleError(
            f"costs list {stages} stages, which is not a multiple of ranks={ranks}: give the placement"
        )
    laps = looped(ranks, stages // ranks)
    return [laps, v_shaped(ranks)] if stages == 2 * ranks > 2 else [laps]


def _library(task: Task) -> Iterator[tuple[float, Schedule]]:
    """The schedules of the library that solve a task, each with its makespan."""
    placement = task.split.placement
    cut = task.slices > 1
    for recipe in [recipe for recipe in RECIPES.values() if recipe.slices == cut]:
        stages_per_rank, slices = len(placement.stages_on(0)), task.slices if cut else None
        try:
            schedule = recipe.make(task.ranks, task.microbatches, stages_per_rank, slices)
        except ScheduleError:
            continue
        if schedule.placement != placement or not schedule.trains:
            continue
        schedule = schedule.with_edges(task.split.edges)
        ran = simulate(schedule, task.costs)
        if all(peak <= limit for peak, limit in zip(ran.peak_memory, task.limit, strict=True)):
            yield ran.makespan, schedule
