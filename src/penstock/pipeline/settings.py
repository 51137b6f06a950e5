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
from penstock._engine.devices import placed_on
from penstock._engine.faults import Patience, Timeout
from penstock._engine.microbatches import MISSING, Rules, RulesGiven, read_rules, split_batch
from penstock._engine.parallel import group_across, spread_parts
from penstock._engine.rng import Seed, checked_seed
from penstock._engine.runtime import Loss, LossFunction, StepLoss
from penstock._engine.transport import Group, Replicas
from penstock.errors import PartitionError, UsageError, check_known
from penstock.partition import Example, Partition
from penstock.pipeline.default_loss import default_loss
from penstock.pipeline.plan import (
    Builder,
    ProvenSchedules,
    Source,
    Stages,
    build_by,
    for_batch_losses,
)
from penstock.schedule import Schedule, build, load
from penstock.schedule.base import Edges, whole_number
from penstock.stage import (
    Compilation,
    PipelineStage,
    compilation_of,
    device_of,
    without_compilation,
)

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
    "plan": "did you mean schedule=?",
    "rules": "did you mean split=?",
    "group": "did you mean mesh=?",
    "checkpoint": "did you mean recompute=?",
    "example": "call pipe.cut(...) with the arguments of a batch",
    "weights": "call pipe.weights.load(folder)",
    "rendezvous_timeout": "say timeout=penstock.Timeouts(rendezvous=...)",
    "watch_every": "call pipe.on_step(penstock.SlowWarning(every=...))",
    **dict.fromkeys(("accumulate", "total_weight"), "it is an argument of pipe.step(...)"),
    **{
        name: f"say loss_fn=penstock.Loss(function, {option}=...)"
        for option in ("reduction", "weight", "over", "metrics", "nonfinite")
        for name in (option, f"loss_{option}")
    },
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
    loss_fn: LossFunction | Loss | None
    split: RulesGiven | None
    mesh: Any
    replicas: Any
    seed: Seed
    timeout: Timeout
    unknown: Mapping[str, Any]

    def __post_init__(self) -> None:
        parameters = inspect.signature(self.caller).parameters.values()
        named = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
        check_known(self.unknown, named, _INSTEAD)
        for name in ("rules", "replica_set", "loss", "patience", "home"):
            getattr(self, name)

    # ---- each by itself

    @cached_property
    def rules(self) -> Rules | None:
        """The rules by which arguments are split."""
        return read_rules(self.split)

    @cached_property
    def home(self) -> torch.device:
        """The device of this process's stages."""
        raise NotImplementedError

    @cached_property
    def patience(self) -> Patience:
        """The limits on how long ranks wait for each other."""
        return Patience(self.timeout)

    @cached_property
    def replica_set(self) -> Replicas:
        """The replicas of this pipeline, from a group or mesh of the ranks at the same place in each."""
        replicas = self.replicas
        if replicas is None or isinstance(replicas, Replicas):
            return replicas or Replicas()
        group = group_across(replicas, self.mesh)
        inside = Group(group)
        several = isinstance(replicas, tuple | list) and len(replicas) > 1
        dims = tuple(self.mesh.get_group(name) for name in replicas) if several else ()
        return Replicas(inside.size, inside.sum, index=inside.rank, group=group, dims=dims)

    @cached_property
    def loss(self) -> StepLoss | None:
        """The loss, if there is one."""
        loss_fn = self.default_loss if self.loss_fn is None else self.loss_fn
        return (
            None if loss_fn is None else StepLoss.for_steps(loss_fn, self.replica_set, self.rules)
        )

    @property
    def default_loss(self) -> Loss | None:
        """The loss where the user gave none."""
        return None

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


@dataclass(frozen=True, kw_only=True, eq=False)
class StageSettings(PipelineSettings):
    """The arguments of :meth:`Pipeline.from_stages <penstock.Pipeline.from_stages>`."""

    stages: Sequence[PipelineStage]
    edges: Edges | None

    @cached_property
    def home(self) -> torch.device:
        """The device of this process's stages."""
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
        return replace(super().schedules(world, ranks), edges=self.edges, by_hand=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelSettings(PipelineSettings):
    """The arguments of :class:`~penstock.Pipeline`."""

    model: nn.Module
    ranks: int | None
    stages: Stages
    device: torch.device | str | None
    wrap: Wrap | None
    compile: Compilation
    recompute: bool | Sequence[str]

    def __post_init__(self) -> None:
        _check_model(self.model, self.stages)
        super().__post_init__()
        if self.is_planned:
            decides = ["stages", "recompute"]
            if self.schedule != "auto":
                decides += ["ranks", "microbatches"]
            said = [name for name in decides if getattr(self, name) not in (None, False)]
            if said:
                raise UsageError(
                    f"the plan in schedule= decides {', '.join(f'{name}=' for name in said)} itself; leave "
                    f"{'it' if len(said) == 1 else 'them'} out"
                )
        if isinstance(self.stages, Partition) and self.recompute:
            raise UsageError(
                "recompute= is used to cut a model, but stages= is a Partition, which is already cut; give "
                "recompute= to penstock.partition.partition"
            )
        if self.wrap is not None and not callable(self.wrap):
            raise UsageError(
                f"wrap={self.wrap!r}: must be a function of a stage's module and its index, such as "
                'lambda module, stage: fully_shard(module, mesh=mesh["dp"])'
            )
        compilation_of(self.compile)
        if self.recompute and self.uncompiled[1]:
            raise UsageError("recompute= cannot be used with compile=; leave one of them out")

    @property
    def default_loss(self) -> Loss | None:
        """The loss that a model of transformers computes itself."""
        return default_loss(self.uncompiled[0])

    @cached_property
    def uncompiled(self) -> tuple[nn.Module, Compilation]:
        """The model without ``torch.compile`` around it, which is undone, and how to compile its stages."""
        return without_compilation(self.model, self.compile)

    @cached_property
    def chosen_device(self) -> torch.device | None:
        """The device to move the stages to; None leaves them where the model is."""
        return None if self.device is None else placed_on(self.device)

    @cached_property
    def home(self) -> torch.device:
        """The device of this process's stages."""
        return self.chosen_device or device_of(self.model)

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

    @property
    def is_planned(self) -> bool:
        """True if a plan decides schedule, microbatches, stages and recomputation."""
        return isinstance(self.schedule, planning.Plan) or self.schedule == "auto"

    def planned(self) -> ModelSettings:
        """These arguments, as the plan that was given decides them; itself without one."""
        plan = self.schedule
        if not isinstance(plan, planning.Plan):
            return self
        return self.decided_by(plan)

    def decided_by(self, plan: planning.Plan) -> ModelSettings:
        """These arguments, as a plan decides them."""
        return replace(
            self,
            model=self.uncompiled[0],
            compile=self.uncompiled[1],
            schedule=plan.source,
            ranks=plan.ranks,
            microbatches=plan.microbatches,
            stages=[list(paths) for paths in plan.stages],
            recompute=plan.recompute,
        )

    def fastest_plan(
        self, call: Example, target: Any, ranks: int, microbatches: int
    ) -> planning.Plan:
        """The fastest plan for the model, for ``schedule="auto"``.

        Args:
            call: the arguments of the model for a microbatch.
            target: the target of the loss for it, if there is one.
            ranks: the number of ranks.
            microbatches: the number of microbatches.

        Raises:
            PlanError: no plan fits into memory.
        """
        args, kwargs = call
        samples = split_batch(tuple(args), dict(kwargs), MISSING, None, 1).samples or (1,)
        function = None if self.loss is None else self.loss.function
        profile = planning.measure(
            self.uncompiled[0],
            *args,
            target=target,
            loss_fn=function if target is not MISSING or _needs_no_target(function) else None,
            stages=ranks,
            **kwargs,
        )
        only: dict[str, Any] = {}
        if self.loss is not None and self.loss.over == "batch":
            # A schedule that is searched may begin backward early.
            only = {"schedules": for_batch_losses(ranks, microbatches), "seconds": 0.0}
        plans = planning.search(
            profile,
            ranks=ranks,
            pipeline=ranks,
            batch=samples[0] * microbatches,
            microbatches=microbatches,
            keep=1,
            **only,
        )
        return plans[0]


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
