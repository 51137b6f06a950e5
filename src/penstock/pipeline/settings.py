"""What a user says when a Pipeline is made: each argument is checked and resolved here."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from penstock import plan as planning
from penstock.devices import placed_on
from penstock.errors import PartitionError, UsageError, check_known
from penstock.faults import Patience, Timeout
from penstock.microbatches import MISSING, Rules, check_rules, split_batch
from penstock.parallel import group_across, spread_parts
from penstock.partition import Example, Partition
from penstock.pipeline.plan import (
    Builder,
    ProvenSchedules,
    Source,
    Stages,
    WithTarget,
    build_by,
)
from penstock.rng import Seed, checked_seed
from penstock.runtime import Loss, LossFunction, LossOptions, Replicas, check_function
from penstock.schedule import Schedule, build, load
from penstock.schedule.base import Edges, whole_number
from penstock.stage import (
    Compilation,
    PipelineStage,
    compilation_of,
    device_of,
    without_compilation,
)
from penstock.transport import Circle, Transport

_CUT = "cut the model first: stages=penstock.partition.partition(model, stages, {}=...)"
_INSTEAD = {
    **{name: _CUT.format(name) for name in ("balance", "placement")},
    "how": "a model is cut by count, paths or lists of paths (stages=); penstock.pipelining.pipeline traces",
    "batch_statistics": "batch norms use and update each microbatch's statistics",
    "chunks": "did you mean microbatches=?",
    "loss": "did you mean loss_fn=?",
    "criterion": "did you mean loss_fn=?",
    "num_stages": "did you mean stages=?",
    "world_size": "did you mean ranks=?",
}
"""Hints for names that are not near the right one, such as those of other libraries."""
REMEDIES = {
    "DistributedDataParallel": 'DistributedDataParallel(module, process_group=mesh.get_group("dp"))',
    "fully_shard": 'fully_shard(module, mesh=mesh["dp"])',
}
"""For each wrapper, how to spread a stage by it."""
Wrap = Callable[[nn.Module, int], nn.Module | None]
"""Wraps a stage's module, called with the module and its index; None means it was changed in place."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineSettings:
    """The arguments that every Pipeline has, as the user gives them; see :class:`~penstock.Pipeline`.

    Args:
        caller: the function that the user called, whose keyword arguments there are.
        options: the keyword arguments beyond these.

    The others are those of the caller.

    Raises:
        UsageError: an argument is wrong, whatever the others and the other ranks say; all else is refused
            when it is asked for.
    """

    caller: Callable[..., Any]
    schedule: Source | None
    microbatches: int | None
    loss_fn: LossFunction | None
    rules: Rules | None
    group: Any
    mesh: Any
    seed: Seed
    timeout: Timeout
    rendezvous_timeout: float | None
    options: LossOptions
    watch_every: int | None = None

    def __post_init__(self) -> None:
        parameters = inspect.signature(self.caller).parameters.values()
        named = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
        check_known(self.options, [*named, *LossOptions.__annotations__], _INSTEAD)
        check_rules(self.rules)
        every = whole_number("watch_every", self.watch_every)
        if every is not None and every < 1:
            raise UsageError(f"watch_every={every}: must be at least 1, or None")
        for name in ("replicas", "loss", "patience", "home"):
            getattr(self, name)

    # ---- each by itself

    @cached_property
    def home(self) -> torch.device:
        """Where the stages of this process live."""
        raise NotImplementedError

    @cached_property
    def patience(self) -> Patience:
        """How long the ranks wait for one another."""
        return Patience(self.timeout, self.rendezvous_timeout)

    @cached_property
    def replicas(self) -> Replicas:
        """The replicas of this pipeline, from a group or mesh of the ranks at the same place in each."""
        replicas = self.options.get("replicas")
        if replicas is None or isinstance(replicas, Replicas):
            return replicas or Replicas()
        group = group_across(replicas)
        if not callable(getattr(group, "allgather", None)):
            hint = f", as in mesh[{replicas!r}]" if isinstance(replicas, str) else ""
            raise UsageError(
                f"replicas={replicas!r}: must be a process group of the ranks at this place in each "
                f"pipeline, a mesh of that dimension{hint}, or penstock.Replicas"
            )
        circle = Circle(group)
        return Replicas(
            circle.size, circle.sum, index=circle.rank, exchange=circle.exchange, group=group
        )

    @cached_property
    def loss(self) -> Loss | None:
        """The loss, if the user gave a function for it."""
        if self.loss_fn is None:
            return None
        metrics = self.options.get("metrics") or {}
        if not isinstance(metrics, Mapping):
            raise UsageError(f"metrics={metrics!r}: must be functions by name, in a dict")
        check_function("loss_fn", self.loss_fn)
        for name, metric in metrics.items():
            check_function(f"metrics[{name!r}]", metric)
        more: dict[str, Any] = {**self.options, "metrics": metrics, "replicas": self.replicas}
        return Loss(self.loss_fn, rules=self.rules, **more)

    @property
    def seed_here(self) -> Any:
        """The seed of this process: the user's, ``"off"``, or that of torch."""
        return checked_seed(self.seed)

    # ---- the schedule

    @property
    def stage_count(self) -> int | None:
        """The number of stages that was asked for, if any was."""
        raise NotImplementedError

    def schedules(self, world: int | None, ranks: int | None = None) -> ProvenSchedules:
        """The pipeline's schedules, with defaults for what was not given.

        Args:
            world: the number of processes, if each rank is one.
            ranks: the number of ranks; by default that of the processes, the schedule or the stages.

        Raises:
            UsageError: the numbers contradict each other, or too little was given.
        """
        ranks = world if ranks is None else whole_number("ranks", ranks)
        microbatches, count = whole_number("microbatches", self.microbatches), self.stage_count
        schedule = _read_schedule("1F1B" if self.schedule is None else self.schedule)
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


@dataclass(frozen=True, kw_only=True, eq=False)
class StageSettings(PipelineSettings):
    """The arguments of :meth:`Pipeline.from_stages <penstock.Pipeline.from_stages>`."""

    stages: Sequence[PipelineStage]
    edges: Edges | None

    @cached_property
    def home(self) -> torch.device:
        """Where the stages of this process live."""
        others = [type(one).__name__ for one in self.stages if not isinstance(one, PipelineStage)]
        if others or not self.stages:
            raise UsageError(
                f"from_stages was given {', '.join(others) or 'no stages'}; give it the stages of this rank, "
                "each made by PipelineStage(module, index, count)"
            )
        return self.stages[0].device

    @property
    def stage_count(self) -> int:
        """The number of stages that they were made for."""
        return self.stages[0].count

    def schedules(self, world: int | None, ranks: int | None = None) -> ProvenSchedules:
        """The pipeline's schedules, for the values that travel here."""
        return replace(super().schedules(world, ranks), edges=self.edges)


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelSettings(PipelineSettings):
    """The arguments of :class:`~penstock.Pipeline`."""

    model: nn.Module
    ranks: int | None
    stages: Stages
    example: Example | WithTarget | None
    device: torch.device | str | None
    wrap: Wrap | None
    compile: Compilation
    weights: str | PathLike[str] | None
    plan: planning.Plan | None
    checkpoint: bool | Sequence[str]

    def __post_init__(self) -> None:
        _check_model(self.model, self.stages)
        super().__post_init__()
        self._check_plan()
        if isinstance(self.stages, Partition) and (self.example is not None or self.checkpoint):
            name = "checkpoint" if self.example is None else "example"
            raise UsageError(
                f"{name}= is used to cut a model, but stages= is a Partition, which is already cut; give "
                f"{name}= to penstock.partition.partition"
            )
        _check_example(self.example)
        if self.wrap is not None and not callable(self.wrap):
            raise UsageError(
                f"wrap={self.wrap!r}: must be a function of a stage's module and its index, such as "
                'lambda module, stage: fully_shard(module, mesh=mesh["dp"])'
            )
        compilation_of(self.compile)
        if self.checkpoint and self.uncompiled[1]:
            raise UsageError("checkpoint= cannot be used with compile=; leave one of them out")

    @cached_property
    def uncompiled(self) -> tuple[nn.Module, Compilation]:
        """The model without ``torch.compile`` around it, which is undone, and how to compile its stages."""
        return without_compilation(self.model, self.compile)

    @cached_property
    def chosen_device(self) -> torch.device | None:
        """Where to move the stages; None leaves them where the model is."""
        if self.device is not None:
            return placed_on(self.device)
        is_bare = self.weights is not None and device_of(self.model).type == "meta"
        return torch.device("cpu") if is_bare else None

    @cached_property
    def home(self) -> torch.device:
        """Where the stages of this process live."""
        return self.chosen_device or device_of(self.model)

    @property
    def arguments(self) -> Example | None:
        """The example's arguments of the model."""
        return None if self.example is None else (self.example[0], self.example[1])

    @property
    def stage_count(self) -> int | None:
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

    def schedules(self, world: int | None, ranks: int | None = None) -> ProvenSchedules:
        """The pipeline's schedules, for the ranks that were asked for."""
        return super().schedules(world, self.ranks if ranks is None else ranks)

    # ---- what a plan decides

    def _check_plan(self) -> None:
        if self.plan is None:
            return
        if not isinstance(self.plan, planning.Plan):
            raise UsageError(
                f"plan={self.plan!r}: must be a penstock.plan.Plan, such as plans[0] of penstock.plan.search"
            )
        decides = ("schedule", "ranks", "microbatches", "stages", "checkpoint")
        said = [name for name in decides if getattr(self, name) not in (None, False)]
        if said:
            raise UsageError(
                f"plan= already decides {', '.join(f'{name}=' for name in said)}; give one or the other"
            )

    def decided_by(self, plan: planning.Plan | None) -> ModelSettings:
        """These arguments, as a plan decides them if there is one."""
        if plan is None:
            return self
        return replace(
            self,
            model=self.uncompiled[0],
            compile=self.uncompiled[1],
            schedule=plan.source,
            ranks=plan.ranks,
            microbatches=plan.microbatches,
            stages=[list(paths) for paths in plan.stages],
            checkpoint=plan.checkpoint,
            plan=None,
        )

    def fastest_plan(self, transport: Transport | None) -> planning.Plan:
        """The fastest plan for the model, for ``schedule="auto"``; rank 0 finds it for all ranks.

        Args:
            transport: this process's end, if each rank is a process.

        Raises:
            UsageError: too little was given, or too much; or no plan fits into memory.
        """
        world = None if transport is None else transport.ranks
        ranks = world if self.ranks is None else self.ranks
        if self.example is None or ranks is None:
            raise UsageError(
                'schedule="auto" measures the model: give example=(args, kwargs, target) for one microbatch, '
                "and ranks= if not started by torchrun"
            )
        if self.stages is not None or self.checkpoint:
            raise UsageError(
                'schedule="auto" decides stages= and checkpoint= itself; leave them out'
            )
        text = ""
        if transport is None or transport.rank == 0:
            microbatches, (args, kwargs, *rest) = self.microbatches or 2 * ranks, self.example
            samples = split_batch(tuple(args), dict(kwargs), MISSING, None, 1).samples or (1,)
            profile = planning.measure(
                self.uncompiled[0],
                *args,
                target=rest[0] if rest else MISSING,
                loss_fn=self.loss_fn if rest or _needs_no_target(self.loss_fn) else None,
                stages=ranks,
                **kwargs,
            )
            plans = planning.search(
                profile,
                ranks=ranks,
                pipeline=ranks,
                batch=samples[0] * microbatches,
                microbatches=microbatches,
                keep=1,
            )
            text = plans[0].to_json()
        return planning.Plan.from_json(text if transport is None else transport.exchange(text)[0])


def _check_example(example: Any) -> None:
    if example is None:
        return
    # A named tuple is a batch.
    is_call = type(example) in (tuple, list) and len(example) in (2, 3)
    if is_call and isinstance(example[0], list | tuple) and isinstance(example[1], Mapping):
        return
    by_name = isinstance(example, Mapping)
    raise UsageError(
        f"example= is a {type(example).__name__}, and must be (args, kwargs), a tuple of the model's "
        f"arguments by position and a dict of those by name: "
        f"{'example=((), inputs) for inputs by name' if by_name else 'example=((x,), {}) for one argument'}; "
        'for schedule="auto" also (args, kwargs, target)'
    )


def _check_model(model: nn.Module, stages: Stages) -> None:
    """Refuse what is no module, and one that was spread over processes before the cut."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model: must be an nn.Module, not a {type(model).__name__}")
    for path, by, _ in () if isinstance(stages, Partition) else spread_parts(model):
        where = f"its module {path!r}" if path else "the model"
        raise UsageError(
            f"{where} was wrapped by {by} before the cut, so it would gather and reduce across stages of "
            f"several ranks; give the plain model and wrap=lambda module, stage: {REMEDIES[by]}, which "
            "wraps each stage after the cut"
        )


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
    if stages is None or not isinstance(schedule, str):
        raise UsageError(
            "the number of ranks is not known: give ranks= or stages=, or start one process per rank "
            "with torchrun"
        )
    return max(1, stages // build(schedule, ranks=1, microbatches=2).stages)


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


def _needs_no_target(loss_fn: Callable[..., Any] | None) -> bool:
    """Whether a loss function can be called with the output alone."""
    try:
        inspect.signature(cast("Callable[..., Any]", loss_fn)).bind(None)
    except (TypeError, ValueError):
        return False
    return True
