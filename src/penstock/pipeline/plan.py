"""Turns the user's arguments into a partition of the model and a proven schedule for it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import nn

from penstock import plan as planning
from penstock.errors import PartitionError, ScheduleError, UsageError
from penstock.parallel import spread_parts
from penstock.partition import Example, Partition
from penstock.plan import measure, search
from penstock.schedule import (
    Schedule,
    add_communication,
    build,
    compute_only,
    load,
    validate,
)
from penstock.schedule.action import GRADIENT_OPS, Op
from penstock.schedule.base import Edges, flat, whole_number
from penstock.schedule.library import built
from penstock.schedule.library.schedules import forward_only
from penstock.transport import Transport
from penstock.values import MISSING, split_batch

Builder = Callable[[int, int], Schedule]
"""The user's function that makes a schedule for a number of ranks and microbatches."""
Source = str | PathLike[str] | Schedule | Builder
"""A schedule as a user gives it: a name, a file, a value, or a function of ranks and microbatches."""

Stages = int | Sequence[str] | Sequence[Sequence[str]] | Partition | None
"""How to cut: a count, module paths to cut before, paths for each stage, a partition, or None."""

AHEAD = 2
"""The number of receives posted ahead on a channel. One would be late if ranks do not keep step."""


class Asked(NamedTuple):
    """The arguments of a Pipeline that a plan can decide instead."""

    schedule: Source | None
    ranks: int | None
    microbatches: int | None
    stages: Stages
    checkpoint: bool | Sequence[str]

    def by(self, plan: planning.Plan | None) -> Asked:
        """These arguments, as a plan decides them if there is one.

        Raises:
            UsageError: ``plan`` is not a Plan, or an argument was given that the plan decides.
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
                f"plan= already decides {', '.join(f'{name}=' for name in said)}; give one or the other"
            )
        stages = [list(paths) for paths in plan.stages]
        return Asked(plan.source, plan.ranks, plan.microbatches, stages, plan.checkpoint)


@dataclass(frozen=True)
class ProvenSchedules:
    """The proven schedules that a pipeline runs.

    Args:
        schedule: a name, a value that is used as it is, or a function of ranks and microbatches.
        ranks: the number of ranks.
        stages: the number of stages.
        microbatches: their number in a training step, unless the step says otherwise.
        edges: which values travel between the stages; by default, those of the schedule.
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
        """The schedule for a number of microbatches, with its messages, and proven not to deadlock.

        Args:
            microbatches: their number.
            edges: which values travel, if that depends on the call.
            trains: whether there is a backward.

        Raises:
            ScheduleError: the schedule fails :func:`penstock.schedule.validate`, whose report is the
                message.
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
        """Check that a step may have this number of microbatches, if known.

        Raises:
            ScheduleError: there is no such schedule.
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
    """A schedule with another edge table, from which messages are derived again if it spells them out."""
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
    """Refuse a schedule for another number of microbatches that does not fit the stages in place."""
    if made.placement != usual.placement:
        raise ScheduleError(
            f"{made.name!r} places the stages on ranks {list(made.placement.rank_of)} for "
            f"{made.microbatches} microbatches, and on {list(usual.placement.rank_of)} for "
            f"{usual.microbatches}; a schedule must place the stages in the same way for every number of "
            "microbatches"
        )
    if made.trains != usual.trains:
        without = usual if made.trains else made
        raise ScheduleError(
            f"{made.name!r} has no backward for {without.microbatches} microbatches"
        )


def _built(builder: Builder, ranks: int, microbatches: int) -> Schedule:
    """The schedule that a user's function makes."""
    called = f"the function {getattr(builder, '__name__', builder)}"
    return built(lambda: builder(ranks, microbatches), called, ranks, microbatches)


def prove(schedule: Schedule) -> Schedule:
    """Add the messages of a schedule and prove that it cannot deadlock.

    Raises:
        ScheduleError: the schedule cannot run; the message lists every problem.
    """
    lowered = add_communication(schedule, ahead=AHEAD)
    report = validate(lowered)
    if not report.ok:
        raise ScheduleError(f"the schedule {schedule.name!r} cannot run:\n{report}")
    return lowered


def make_plan(
    schedule: Source,
    ranks: int | None,
    stages: Stages,
    microbatches: int | None,
    world: int | None,
) -> ProvenSchedules:
    """Choose a pipeline's schedules, with defaults for what was not given.

    Args:
        schedule: a name, a file (``.csv``, ``.json``), a value or a function.
        ranks: the number of ranks; None takes that of the processes, the schedule or the stages.
        stages: how the model is cut.
        microbatches: their number; None takes the schedule's, or else two per rank.
        world: the number of processes, if each rank is one.

    Raises:
        UsageError: the numbers contradict each other, or too little was given.
    """
    ranks = world if ranks is None else whole_number("ranks", ranks)
    microbatches, count = whole_number("microbatches", microbatches), _count(stages)
    schedule = _read(schedule)
    value = schedule if isinstance(schedule, Schedule) else None
    if not isinstance(schedule, Schedule):
        ranks = _ranks_for(schedule, count) if ranks is None else ranks
        if ranks < 1:
            raise UsageError(f"ranks={ranks}: must be at least 1")
        microbatches = 2 * ranks if microbatches is None else microbatches
        if isinstance(schedule, str):
            if count is None:
                count = build(schedule, ranks=ranks, microbatches=microbatches).stages
            plan = ProvenSchedules(schedule, ranks, count, microbatches)
        else:
            value = _built(schedule, ranks, microbatches)
    if value is not None:
        _check_value(value, ranks, count, microbatches)
        plan = ProvenSchedules(schedule, value.ranks, value.stages, value.microbatches)
    if world not in (None, plan.ranks):
        raise UsageError(
            f"{world} processes were started for a pipeline of {plan.ranks} ranks; start one process per rank"
        )
    return plan


def _read(schedule: Source) -> str | Schedule | Builder:
    """Read a schedule from a file; return a name, a value or a function as it is."""
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
    """The number of ranks: all stages divided by the stages that the schedule gives each rank."""
    if stages is None and os.environ.get("WORLD_SIZE") == "1":
        return 1  # as where a launcher has started more; one machine may be all that is left of several
    if stages is None or not isinstance(schedule, str):
        raise UsageError(
            "the number of ranks is not known: give ranks= or stages=, or start one process per rank "
            "with torchrun"
        )
    each = build(schedule, ranks=1, microbatches=2).stages
    return max(1, stages // each)


def _count(stages: Stages) -> int | None:
    """The number of stages asked for, or None."""
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
"""Arguments for one microbatch by position and by name, and the target."""


def planned(
    asked: Asked,
    model: nn.Module,
    world: int | None,
    example: Example | WithTarget | None,
    transport: Transport | None,
    loss_fn: Callable[..., Any] | None,
) -> tuple[planning.Plan, Asked]:
    """The fastest plan for a model; rank 0 finds it for all ranks.

    Args:
        asked: the user's arguments; ranks and microbatches have defaults.
        model: the model, with data.
        world: the number of ranks, if each is a process.
        example: arguments for one microbatch, and the target.
        transport: this process's end, if each rank is a process.
        loss_fn: the loss function, which is part of the last stage's work.

    Returns:
        The plan, and the arguments that remain besides it: none.

    Raises:
        UsageError: too little was given, or no plan fits into memory.
    """
    ranks = world if asked.ranks is None else asked.ranks
    if example is None or ranks is None:
        raise UsageError(
            'schedule="auto" measures the model: give example=(args, kwargs, target) for one microbatch, '
            "and ranks= if not started by torchrun"
        )
    if asked.stages is not None or asked.checkpoint:
        raise UsageError('schedule="auto" decides stages= and checkpoint= itself; leave them out')
    text = ""
    if transport is None or transport.rank == 0:
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
    if transport is not None:
        text = transport.exchange(text)[0]
    return planning.Plan.from_json(text), Asked(None, None, None, None, checkpoint=False)


def _needs_no_target(loss_fn: Callable[..., Any] | None) -> bool:
    """Whether a loss function can be called with the output alone."""
    try:
        inspect.signature(cast("Callable[..., Any]", loss_fn)).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def check_model(model: nn.Module, stages: Stages = None) -> None:
    """Check that a model can be cut.

    Raises:
        UsageError: it is not a module, or was spread over processes before the cut.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model: must be an nn.Module, not a {type(model).__name__}")
    spread = () if isinstance(stages, Partition) else spread_parts(model)
    for path, by, _ in spread:
        where = f"its module {path!r}" if path else "the model"
        raise UsageError(
            f"{where} was wrapped by {by} before the cut, so it would gather and reduce across stages of "
            f"several ranks; give the plain model and wrap=lambda module, stage: {REMEDIES[by]}, which "
            "wraps each stage after the cut"
        )


REMEDIES = {
    "DistributedDataParallel": 'DistributedDataParallel(module, process_group=mesh.get_group("dp"))',
    "fully_shard": 'fully_shard(module, mesh=mesh["dp"])',
}


def check_uncut(stages: Stages, example: Any, checkpoint: bool | Sequence[str]) -> None:
    """Refuse what is said of a cut beside a partition, which is cut already.

    Raises:
        UsageError: an example or checkpoints were given.
    """
    if isinstance(stages, Partition) and (example is not None or checkpoint):
        name = "checkpoint" if example is None else "example"
        raise UsageError(
            f"{name}= is used to cut a model, but stages= is a Partition, which is already cut; give "
            f"{name}= to penstock.partition.partition"
        )


def in_flight(schedule: Schedule) -> list[int]:
    """For each stage, how many microbatches it holds at once at most."""
    most, now = [0] * schedule.stages, [0] * schedule.stages
    for rank in range(schedule.ranks):
        for action in flat(tuple(schedule.actions(rank))):
            now[action.stage] += (action.op is Op.F) - (action.op in GRADIENT_OPS)
            most[action.stage] = max(most[action.stage], now[action.stage])
    return most
