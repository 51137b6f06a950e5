"""The schedules of a pipeline, proven not to deadlock."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import NamedTuple, cast

from penstock._engine.runtime import forwards_first
from penstock.errors import PartitionError, PenstockError, ScheduleError, UsageError
from penstock.partition import Partition
from penstock.plan import Plan
from penstock.schedule import (
    Schedule,
    add_communication,
    build,
    compute_only,
    load,
    names,
    validate,
)
from penstock.schedule.action import GRADIENT_OPS, Op
from penstock.schedule.base import Edges, flat, whole_number
from penstock.schedule.library import built
from penstock.schedule.library.schedules import forward_only
from penstock.schedule.passes import AHEAD

Builder = Callable[[int, int], Schedule]
"""The user's function that makes a schedule for a number of ranks and microbatches."""
Source = str | PathLike[str] | Schedule | Builder | Plan
"""A schedule as a user gives it: a name, a file, a value, a plan, or a function of ranks and microbatches."""

Stages = int | Sequence[str] | Sequence[Sequence[str]] | Partition | None
"""How to cut: a count, module paths to cut before, paths for each stage, a partition, or None."""


class Layout(NamedTuple):
    """A schedule and the stages that it is for, as a user says them or a plan decides them.

    Attributes:
        schedule: as for :class:`~penstock.Pipeline`; None stands for 1F1B.
        ranks: the number of ranks; by default that of the processes, the schedule or the stages.
        microbatches: their number; by default two per rank.
        stages: how to cut the model, or the number of stages.
        recompute: the units whose forward backward recomputes.
    """

    schedule: Source | None = None
    ranks: int | None = None
    microbatches: int | None = None
    stages: Stages = None
    recompute: bool | Sequence[str] = False

    @classmethod
    def of(cls, plan: Plan) -> Layout:
        """Return what a plan decides."""
        stages = [list(paths) for paths in plan.stages]
        return cls(plan.source, plan.ranks, plan.microbatches, stages, plan.recompute)

    @property
    def is_planned(self) -> bool:
        """True if a plan decides it, given or still to be found."""
        return isinstance(self.schedule, Plan) or self.schedule == "auto"

    def schedules(self, world: int | None) -> ProvenSchedules:
        """The schedules, with defaults for what was not said.

        Args:
            world: the number of processes, if each rank is one.

        Raises:
            UsageError: the numbers contradict each other, or too little was said.
        """
        ranks = world if self.ranks is None else whole_number("ranks", self.ranks)
        microbatches, count = whole_number("microbatches", self.microbatches), self._stage_count
        # What a plan will decide runs nothing before it has.
        undecided = self.schedule is None or self.schedule == "auto"
        schedule = _read_schedule(cast("Source", "1F1B" if undecided else self.schedule))
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
                value = build_by(schedule, ranks, microbatches)
        if value is not None:
            _check_value(value, ranks, count, microbatches)
            plan = ProvenSchedules(schedule, value.ranks, value.stages, value.microbatches)
        if world not in (None, plan.ranks):
            raise UsageError(
                f"{world} processes were started for a pipeline of {plan.ranks} ranks; start one process per "
                "rank"
            )
        return plan

    @property
    def _stage_count(self) -> int | None:
        """The number of stages that was asked for, if any was."""
        stages = self.stages
        if isinstance(stages, Partition):
            return len(stages.modules)
        if not isinstance(stages, Sequence):
            return whole_number("stages", stages)
        flat = [isinstance(paths, str) for paths in stages]
        if isinstance(stages, str) or (any(flat) and not all(flat)):
            raise PartitionError(
                f"stages={stages!r}: must hold the module paths to cut before, such as ['blocks.1', 'head'], "
                "or a list of module paths for each stage, such as [['embed', 'blocks.0'], ['blocks.1', "
                "'head']]"
            )
        return len(stages) + 1 if flat and all(flat) else len(stages)


@dataclass(eq=False)
class ProvenSchedules:
    """The proven schedules that a pipeline runs; a plan may decide them late, see :meth:`follow`.

    Args:
        schedule: a name, a value that is used as it is, or a function of ranks and microbatches.
        ranks: the number of ranks.
        stages: the number of stages.
        microbatches: their number in a training step, unless the step says otherwise.
        edges: which values travel between the stages; by default, those of the schedule.
        plan: the plan that they are part of, if there is one.
        by_hand: whether the stages are placed by hand, and may hand a state from slice to slice.
    """

    schedule: str | Schedule | Builder
    ranks: int
    stages: int
    microbatches: int
    edges: Edges | None = None
    plan: Plan | None = None
    by_hand: bool = False
    _proven: dict[tuple[int, bool, Edges | None], Schedule] = field(default_factory=dict)

    def follow(self, decided: ProvenSchedules) -> None:
        """Become what a plan has decided, before anything has run."""
        vars(self).update(vars(decided))

    @property
    def training(self) -> Schedule:
        """The schedule of a training step, with its messages."""
        return self.proven(self.microbatches * self.slices, trains=True)

    @cached_property
    def slices(self) -> int:
        """Into how many slices training cuts sequences."""
        return self._named(self.microbatches).slices if self.by_hand else 1

    def proven(self, microbatches: int, edges: Edges | None = None, *, trains: bool) -> Schedule:
        """The schedule for a number of microbatches, with its messages, and proven not to deadlock.

        Args:
            microbatches: their number; in training, that of their slices.
            edges: which values travel, if that depends on the call.
            trains: whether there is a backward.

        Raises:
            ScheduleError: the schedule fails :func:`penstock.schedule.validate`, whose report is the
                message.
        """
        edges = self.edges if edges is None else edges
        key = (microbatches, trains, edges)
        if key not in self._proven:
            whole = microbatches // self.slices
            schedule = self._named(whole) if trains else self._forward_only(microbatches)
            if schedule.slices > 1 and not self.by_hand:
                raise ScheduleError(
                    f"the schedule {schedule.name!r} cuts sequences into {schedule.slices} slices, and "
                    "stages cut from a model hand no state from slice to slice; give Pipeline.from_stages "
                    "modules whose forward(x, state) returns its output and the state for the next slice"
                )
            if trains and whole != self.microbatches:
                _check_alike(schedule, self.training)
            self._proven[key] = prove(schedule if edges is None else with_edges(schedule, edges))
        return self._proven[key]

    def check_trains(self, microbatches: int | None) -> None:
        """Check that a step may have this number of microbatches, if known.

        Raises:
            ScheduleError: there is no such schedule.
        """
        if microbatches is None or microbatches == self.microbatches * self.slices:
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
            return build_by(self.schedule, self.ranks, microbatches)
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


def _read_schedule(schedule: Source) -> str | Schedule | Builder:
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
    if stages is None:
        raise UsageError(
            "the number of ranks is not known: give ranks= or stages=, or start one process per rank "
            "with torchrun"
        )
    if isinstance(schedule, str):
        return max(1, stages // build(schedule, ranks=1, microbatches=2).stages)
    try:
        return max(1, stages // schedule(1, 2).stages)
    except ScheduleError as error:
        raise UsageError(
            f"the number of ranks for {stages} stages is not known: the function in schedule= makes no "
            f"schedule for one rank ({error}); start one process per rank with torchrun, or give a schedule"
        ) from error


def _check_value(
    schedule: Schedule, ranks: int | None, stages: int | None, microbatches: int | None
) -> None:
    """Refuse a finished schedule of other numbers than were asked for."""
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
    schedule = build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages // ranks)
    if schedule.stages != stages:
        raise PartitionError(
            f"{name} on {ranks} ranks has {schedule.stages} stages, but the model is cut into {stages}"
        )
    return schedule


def _check_alike(other: Schedule, usual: Schedule) -> None:
    """Refuse a schedule for another number of microbatches that does not fit the stages in place."""
    if other.placement != usual.placement:
        raise ScheduleError(
            f"{other.name!r} places the stages on ranks {list(other.placement.rank_of)} for "
            f"{other.microbatches} microbatches, and on {list(usual.placement.rank_of)} for "
            f"{usual.microbatches}; a schedule must place the stages in the same way for every number of "
            "microbatches"
        )
    if other.slices != usual.slices:
        raise ScheduleError(
            f"{other.name!r} cuts sequences into {other.slices} slices for {other.microbatches} "
            f"microbatches, and into {usual.slices} for {usual.microbatches}; the number must always be "
            "the same"
        )
    if other.trains != usual.trains:
        without = usual if other.trains else other
        raise ScheduleError(
            f"{other.name!r} has no backward for {without.microbatches} microbatches"
        )


def build_by(builder: Builder, ranks: int, microbatches: int) -> Schedule:
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


def for_batch_losses(ranks: int, microbatches: int) -> list[str]:
    """The names of the schedules that suit a loss ``over="batch"``: their last stage runs forwards first."""
    fitting = []
    for name in names():
        with suppress(PenstockError):
            schedule = build(name, ranks=ranks, microbatches=microbatches)
            if schedule.trains and forwards_first(schedule):
                fitting.append(name)
    return fitting


def in_flight(schedule: Schedule) -> list[int]:
    """For each stage, how many microbatches it holds at once at most."""
    most, now = [0] * schedule.stages, [0] * schedule.stages
    for rank in range(schedule.ranks):
        for action in flat(tuple(schedule.actions(rank))):
            now[action.stage] += (action.op is Op.F) - (action.op in GRADIENT_OPS)
            most[action.stage] = max(most[action.stage], now[action.stage])
    return most
