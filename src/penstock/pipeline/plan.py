"""From what the user asks for to a partition of the model and a proven schedule for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import nn

from penstock.errors import PartitionError, ScheduleError, UsageError
from penstock.parallel import spreads_over_processes
from penstock.partition import Example, Partition, find_shared, partition, unit_paths
from penstock.plan import answer as planning
from penstock.plan import measure, search
from penstock.schedule import (
    Schedule,
    add_communication,
    build,
    compute_only,
    load,
    release_sends,
    validate,
)
from penstock.schedule.base import Edges, whole_number
from penstock.schedule.library import built
from penstock.schedule.library.schedules import forward_only
from penstock.transport import Transport
from penstock.values import MISSING, split_batch

Builder = Callable[[int, int], Schedule]
"""An own schedule for so many ranks and microbatches."""
Source = str | PathLike[str] | Schedule | Builder
"""A schedule as a user says it: a name, a file, a value, or a function of ranks and microbatches."""

Stages = int | Sequence[str] | Sequence[Sequence[str]] | Partition | None
"""How to cut: a count, module paths to cut before, paths for each stage, a partition, or by default."""

AHEAD = 2
"""Messages of a channel for which a buffer waits: one alone comes late where ranks do not keep step."""


class Asked(NamedTuple):
    """What a Pipeline is asked for, as far as a plan decides it too."""

    schedule: Source | None
    ranks: int | None
    microbatches: int | None
    stages: Stages
    checkpoint: bool | Sequence[str]

    def by(self, plan: planning.Plan | None) -> Asked:
        """The same with what a plan decides.

        Raises:
            UsageError: something is said beside the plan that it says too.
        """
        if plan is None:
            return self
        if not isinstance(plan, planning.Plan):
            raise UsageError(
                f"plan={plan!r}: must be a penstock.plan.Plan, such as plans[0] of penstock.plan.search"
            )
        said = [name for name, value in self._asdict().items() if value not in (None, False)]
        if said:
            raise UsageError(
                f"plan= says {', '.join(f'{name}=' for name in said)} already; give one or the other"
            )
        stages = [list(paths) for paths in plan.stages]
        return Asked(plan.source, plan.ranks, plan.microbatches, stages, plan.checkpoint)


@dataclass(frozen=True)
class Plan:
    """Which schedules a pipeline runs.

    Args:
        schedule: a name, a value that is used as it is, or a function of ranks and microbatches.
        ranks: how many ranks share the model.
        stages: how many stages there are.
        microbatches: how many a training step has, unless it says otherwise.
        edges: which values travel between the stages; by default as the schedule says.
    """

    schedule: str | Schedule | Builder
    ranks: int
    stages: int
    microbatches: int
    edges: Edges | None = None
    _proven: dict[tuple[int, bool, Edges | None], Schedule] = field(
        default_factory=dict, compare=False
    )

    @property
    def training(self) -> Schedule:
        """The schedule of a training step, with its messages."""
        return self.proven(self.microbatches, trains=True)

    def proven(self, microbatches: int, edges: Edges | None = None, *, trains: bool) -> Schedule:
        """The schedule for so many microbatches: with its messages, and proven not to hang.

        Args:
            microbatches: how many.
            edges: which values travel, where that depends on the call.
            trains: whether there is a backward.

        Raises:
            ScheduleError: the report of :func:`penstock.schedule.validate`, where it fails.
        """
        edges = self.edges if edges is None else edges
        key = (microbatches, trains, edges)
        if key not in self._proven:
            made = self._named(microbatches) if trains else self._forward_only(microbatches)
            if trains and microbatches != self.microbatches:
                _check_alike(made, self.training)
            self._proven[key] = prove(made if edges is None else with_edges(made, edges))
        return self._proven[key]

    def check_trains(self, microbatches: int | None) -> None:
        """Check that a step may have so many microbatches, where their number is known.

        Raises:
            ScheduleError: the schedule is for others.
        """
        if microbatches is None or microbatches == self.microbatches:
            return
        try:
            self.proven(microbatches, trains=True)
        except ScheduleError as error:
            raise ScheduleError(
                f"this step has {microbatches} microbatches instead of {self.microbatches}: {error}; a batch "
                "with fewer samples than microbatches has as many as it has samples: leave it out, or use "
                "a schedule that takes any number, such as 1F1B"
            ) from error

    def _named(self, microbatches: int) -> Schedule:
        if isinstance(self.schedule, str):
            return _build(self.schedule, self.ranks, self.stages, microbatches)
        if not isinstance(self.schedule, Schedule):
            return _built(self.schedule, self.ranks, microbatches)
        if self.schedule.microbatches != microbatches:
            raise ScheduleError(
                f"the schedule {self.schedule.name!r} is for {self.schedule.microbatches} microbatches, "
                f"not {microbatches}; to have one for each number, give the name of a schedule, or a "
                "function of ranks and microbatches"
            )
        return self.schedule

    def _forward_only(self, microbatches: int) -> Schedule:
        training = self.training
        plain = forward_only(self.ranks, microbatches, training.placement)
        return plain.with_edges(training.edges)


def with_edges(schedule: Schedule, edges: Edges) -> Schedule:
    """A schedule for another edge table; messages that it spells out for its own are worked out anew."""
    if schedule.edges == edges:
        return schedule
    return (compute_only(schedule) if schedule.communicates else schedule).with_edges(edges)


def _build(name: str, ranks: int, stages: int, microbatches: int) -> Schedule:
    if stages % ranks:
        raise PartitionError(
            f"{stages} stages cannot be divided evenly among {ranks} ranks; "
            f"use a multiple of {ranks} stages, or give a Schedule that places them"
        )
    made = build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages // ranks)
    if made.stages != stages:
        raise PartitionError(
            f"{name} on {ranks} ranks has {made.stages} stages, but the model is cut into {stages}"
        )
    return made


def _check_alike(made: Schedule, usual: Schedule) -> None:
    """Check that a schedule for another number of microbatches can run on the stages as they are placed.

    Raises:
        ScheduleError: it has them elsewhere, or one trains and the other does not.
    """
    if made.placement != usual.placement:
        raise ScheduleError(
            f"{made.name!r} places the stages on ranks {list(made.placement.rank_of)} for "
            f"{made.microbatches} microbatches, and on {list(usual.placement.rank_of)} for "
            f"{usual.microbatches}; a schedule must place the stages alike for every number of microbatches"
        )
    if made.trains != usual.trains:
        without = usual if made.trains else made
        raise ScheduleError(
            f"{made.name!r} has no backward for {without.microbatches} microbatches"
        )


def _built(builder: Builder, ranks: int, microbatches: int) -> Schedule:
    """What a user's function gives for these numbers."""
    called = f"the function {getattr(builder, '__name__', builder)}"
    return built(lambda: builder(ranks, microbatches), called, ranks, microbatches)


def prove(schedule: Schedule) -> Schedule:
    """Spell out the messages of a schedule, check that it cannot hang, and say when sends are let go.

    Raises:
        ScheduleError: every problem that was found.
    """
    lowered = add_communication(schedule, ahead=AHEAD)
    report = validate(lowered)
    if not report.ok:
        raise ScheduleError(f"the schedule {schedule.name!r} cannot run:\n{report}")
    return release_sends(lowered)


def make_plan(
    schedule: Source,
    ranks: int | None,
    stages: Stages,
    microbatches: int | None,
) -> Plan:
    """Fill in what was left open.

    Args:
        schedule: a name, a file (``.csv``, ``.json``), a value or a function.
        ranks: how many ranks, or ``None`` for what the schedule or the stages say.
        stages: how the model is cut.
        microbatches: how many, or ``None`` for the schedule's number, else two per rank.

    Raises:
        UsageError: numbers that contradict each other, or too little is given.
    """
    ranks, microbatches = whole_number("ranks", ranks), whole_number("microbatches", microbatches)
    count = _count(stages)
    schedule = _read(schedule)
    if isinstance(schedule, Schedule):
        _check_value(schedule, ranks, count, microbatches)
        return Plan(schedule, schedule.ranks, schedule.stages, schedule.microbatches)
    ranks = _ranks_for(schedule, count) if ranks is None else ranks
    if ranks < 1:
        raise UsageError(f"ranks={ranks}: must be at least 1")
    microbatches = 2 * ranks if microbatches is None else microbatches
    if not isinstance(schedule, str):
        made = _built(schedule, ranks, microbatches)
        _check_value(made, ranks, count, microbatches)
        return Plan(schedule, ranks, made.stages, microbatches)
    if count is None:
        count = build(schedule, ranks=ranks, microbatches=microbatches).stages
    return Plan(schedule, ranks, count, microbatches)


def _read(schedule: Source) -> str | Schedule | Builder:
    """The schedule of a file; a name, a value or a function as it is."""
    if isinstance(schedule, PathLike) or (
        isinstance(schedule, str) and Path(schedule).suffix.lower() in (".csv", ".json")
    ):
        return load(Path(schedule))
    if isinstance(schedule, str | Schedule):
        return schedule
    if not callable(schedule) or isinstance(schedule, type):
        raise UsageError(
            f"schedule={schedule!r}: must be a name, a file, a Schedule, or a function of ranks and "
            "microbatches that gives one"
        )
    return schedule


def _ranks_for(schedule: str | Builder, stages: int | None) -> int:
    """How many ranks share so many stages, each as many as the schedule gives a rank."""
    if stages is None or not isinstance(schedule, str):
        raise UsageError(
            "how many ranks are there? Give ranks= or stages=, or start one "
            "process per rank with torchrun or penstock run"
        )
    each = build(schedule, ranks=1, microbatches=2).stages
    return max(1, stages // each)


def _count(stages: Stages) -> int | None:
    """How many stages are asked for."""
    if isinstance(stages, Partition):
        return len(stages.modules)
    if not isinstance(stages, Sequence):
        return whole_number("stages", stages)
    flat = [isinstance(paths, str) for paths in stages]
    if isinstance(stages, str) or (any(flat) and not all(flat)):
        raise PartitionError(
            f"stages={stages!r}: must hold the module paths to cut before, such as ['blocks.1', 'head'], or "
            "a list of module paths for each stage, such as [['embed', 'blocks.0'], ['blocks.1', 'head']]"
        )
    return len(stages) + 1 if flat and all(flat) else len(stages)


def _check_value(
    schedule: Schedule, ranks: int | None, stages: int | None, microbatches: int | None
) -> None:
    asked = {"ranks": ranks, "stages": stages, "microbatches": microbatches}
    wrong = {
        name: number
        for name, number in asked.items()
        if number is not None and number != getattr(schedule, name)
    }
    if wrong:
        has = ", ".join(f"{name}={getattr(schedule, name)}" for name in wrong)
        wanted = ", ".join(f"{name}={number}" for name, number in wrong.items())
        raise UsageError(f"the schedule {schedule.name!r} has {has}, but {wanted} was asked for")


WithTarget = tuple[Sequence[Any], Mapping[str, Any], Any]
"""Arguments for one microbatch, by position and by name, and what the loss compares with."""


def planned(
    asked: Asked,
    model: nn.Module,
    world: int | None,
    example: Example | WithTarget | None,
    found: Sequence[Transport],
    loss_fn: Callable[..., Any] | None,
) -> tuple[planning.Plan, Asked]:
    """The fastest plan for a model, which rank 0 finds for all.

    Args:
        asked: of ranks and microbatches, what is left open is the default.
        model: with data.
        world: how many ranks there are, where each is a process.
        example: arguments for one microbatch, and what the loss compares with.
        found: this process's end.
        loss_fn: what the last stage computes beside its modules.

    Returns:
        The plan, and what is asked for beside it.

    Raises:
        UsageError: too little is given, or nothing fits.
    """
    ranks = world if asked.ranks is None else asked.ranks
    if example is None or ranks is None:
        raise UsageError(
            'schedule="auto" measures the model: give example=(args, kwargs, target) for one microbatch, and '
            "ranks= where torchrun does not tell them"
        )
    if asked.stages is not None or asked.checkpoint:
        raise UsageError('schedule="auto" decides stages= and checkpoint= itself; leave them out')
    text = ""
    if not found or found[0].rank == 0:
        count = asked.microbatches or 2 * ranks
        args, kwargs, *rest = example
        samples = split_batch(tuple(args), dict(kwargs), MISSING, None, 1).samples or (1,)
        target = rest[0] if rest else MISSING
        loss = loss_fn if rest or _needs_no_target(loss_fn) else None
        profile = measure(model, *args, target=target, loss_fn=loss, stages=ranks, **kwargs)
        plans = search(
            profile,
            ranks=ranks,
            pipeline=ranks,
            batch=samples[0] * count,
            microbatches=count,
            keep=1,
        )
        text = plans[0].to_json()
    if found:
        text = found[0].agree(text).take()[0]
    return planning.Plan.from_json(text), Asked(None, None, None, None, checkpoint=False)


def _needs_no_target(loss_fn: Callable[..., Any] | None) -> bool:
    """Whether a loss can do without what it compares with."""
    try:
        inspect.signature(cast("Callable[..., Any]", loss_fn)).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def computed_again(
    model: nn.Module,
    made: Partition,
    checkpoint: bool | Sequence[str],
    *,
    compiled: bool = False,
) -> list[list[nn.Module]]:
    """For each stage the modules that backward computes again.

    Args:
        model: what was cut.
        made: its stages.
        checkpoint: whether all units are, or the paths of those that are.
        compiled: whether the stages are to be compiled.

    Raises:
        UsageError: a path of no module, or stages that do not run the model's own modules.
    """
    if isinstance(checkpoint, str):
        raise UsageError(f"checkpoint={checkpoint!r}: must be True, or a list of module paths")
    if checkpoint and compiled:
        raise UsageError(
            "checkpoint= computes modules again as they are, not compiled; leave compile= out"
        )
    paths = list(unit_paths(model, len(made.modules)) if checkpoint is True else checkpoint or ())
    known = dict(model.named_modules(remove_duplicate=False))
    unknown = [path for path in paths if path not in known]
    if unknown:
        raise UsageError(
            f"checkpoint=: no module {unknown[0]!r} in the model; its paths are like "
            f"{', '.join(list(known)[1:6])}"
        )
    wanted = [known[path] for path in dict.fromkeys(paths)]
    inside = [set(part.modules()) for part in made.modules]
    lost = [path for path in paths if not any(known[path] in own for own in inside)]
    if lost:
        raise UsageError(
            f"checkpoint=: {lost[0]!r} is run by no stage as a module; name units of the model, "
            "and cut it by calls or as a chain"
        )
    return [[module for module in wanted if module in own] for own in inside]


def check_model(model: nn.Module, stages: Stages = None) -> None:
    """Check that a model is one that can be cut, or was.

    Raises:
        UsageError: it is something else, or spread over processes before the cut.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model: must be an nn.Module, not a {type(model).__name__}")
    found = None if isinstance(stages, Partition) else spreads_over_processes(model)
    if found is not None:
        path, by = found
        where = f"its module {path!r}" if path else "the model"
        raise UsageError(
            f"{where} went through {by} before the cut, which would gather and reduce over stages of several "
            f"ranks; give the plain model and wrap=lambda module, stage: {_REMEDIES[by]}, which wraps each "
            "stage after the cut"
        )


_REMEDIES = {
    "DistributedDataParallel": 'DistributedDataParallel(module, process_group=mesh.get_group("dp"))',
    "fully_shard": 'fully_shard(module, mesh=mesh["dp"])',
}


def cut(model: nn.Module, stages: Stages, count: int, example: Example | None = None) -> Partition:
    """Cut a model into ``count`` stages.

    Raises:
        PartitionError: it cannot be cut so; the message says how to say it.
        UsageError: an example for what is cut already.
    """
    if isinstance(stages, Partition):
        if example is not None:
            raise UsageError(
                "example= helps to cut a model, but stages= is a Partition, which is cut already; "
                "give example= to penstock.partition.partition"
            )
        found = () if stages.shared else find_shared(model, stages.modules)
        made = replace(stages, shared=found) if found else stages
        made.check_covers(model)
        return made
    return partition(model, count if stages is None else stages, example=example)
