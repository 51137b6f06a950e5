"""What a user says when a Pipeline is made: each argument is checked and resolved here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

from penstock import plan as planning
from penstock._engine.devices import placed_on
from penstock._engine.faults import Patience, Timeout
from penstock._engine.microbatches import MISSING, Rules, RulesGiven, read_rules, split_batch
from penstock._engine.parallel import group_across, spread_parts
from penstock._engine.rng import Seed, checked_seed
from penstock._engine.runtime import Loss, LossFunction, StepLoss, describe_stages
from penstock._engine.transport import Group, Replicas
from penstock.errors import UsageError, check_known
from penstock.partition import Example, Partition
from penstock.pipeline.default_loss import default_loss
from penstock.pipeline.plan import Layout, ProvenSchedules, Stages, for_batch_losses
from penstock.schedule.base import Edges
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


@dataclass(kw_only=True, eq=False)
class Settings:
    """What a user says when a Pipeline is made: checked once, and resolved.

    Args:
        caller: the function that the user called, whose keyword arguments there are.
        layout: the schedule and the stages.
        unknown: the keyword arguments beyond those of the caller.
        model: the model to cut; None where stages are placed by hand.
        by_hand: those stages.

    The others are those of the caller; see :class:`~penstock.Pipeline`.

    Attributes:
        model: the model without ``torch.compile`` around it, which is undone.
        compile: how to compile its stages.
        plan: the plan that the user gave; it has decided the layout.
        rules: the rules by which arguments are split.
        patience: the limits on how long ranks wait for each other.
        replica_set: the replicas of this pipeline.
        loss: the loss, if there is one.
        device: the device to move the stages to; None leaves them where the model is.
        home: the device of this process's stages.

    Raises:
        UsageError: an argument is wrong, whatever the others and the other ranks say. What depends on the
            number of processes is refused by :meth:`schedules`.
    """

    caller: Callable[..., Any]
    layout: Layout
    loss_fn: LossFunction | Loss | None
    split: RulesGiven | None
    mesh: Any
    replicas: Any
    seed: Seed
    timeout: Timeout
    unknown: Mapping[str, Any]
    model: nn.Module | None = None
    device: torch.device | str | None = None
    wrap: Wrap | None = None
    compile: Compilation = None
    by_hand: Sequence[PipelineStage] = ()
    edges: Edges | None = None
    plan: planning.Plan | None = field(init=False, default=None)
    rules: Rules | None = field(init=False)
    patience: Patience = field(init=False)
    replica_set: Replicas = field(init=False)
    loss: StepLoss | None = field(init=False)
    home: torch.device = field(init=False)

    def __post_init__(self) -> None:
        if self.model is not None:
            _check_model(self.model, self.layout.stages)
        parameters = inspect.signature(self.caller).parameters.values()
        named = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
        check_known(self.unknown, named, _INSTEAD)
        self.rules = read_rules(self.split)
        self.replica_set = _replicas_of(self.replicas, self.mesh)
        self.patience = Patience(self.timeout)
        if self.model is None:
            self._take_stages()
        else:
            self._take_model(self.model)
        given = self.loss_fn
        if given is None and self.model is not None:
            given = default_loss(self.model)
        replicas, rules = self.replica_set, self.rules
        self.loss = None if given is None else StepLoss.for_steps(given, replicas, rules)

    def _take_stages(self) -> None:
        """Check stages that were placed by hand."""
        others = [type(one).__name__ for one in self.by_hand if not isinstance(one, PipelineStage)]
        if others or not self.by_hand:
            raise UsageError(
                f"from_stages was given {', '.join(others) or 'no stages'}; give it the stages of this rank, "
                "each made by PipelineStage(module, index, count)"
            )
        first = self.by_hand[0]
        self.home, self.layout = first.device, self.layout._replace(stages=first.count)

    def _take_model(self, model: nn.Module) -> None:
        """Check what concerns a model that is to be cut."""
        layout = self.layout
        if layout.is_planned:
            decides = ["stages", "recompute"]
            if layout.schedule != "auto":
                decides += ["ranks", "microbatches"]
            said = [name for name in decides if getattr(layout, name) not in (None, False)]
            if said:
                raise UsageError(
                    f"the plan in schedule= decides {', '.join(f'{name}=' for name in said)} itself; leave "
                    f"{'it' if len(said) == 1 else 'them'} out"
                )
        if isinstance(layout.stages, Partition) and layout.recompute:
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
        self.home = device_of(model) if self.device is None else placed_on(self.device)
        self.device = None if self.device is None else self.home
        self.model, self.compile = without_compilation(model, self.compile)
        if layout.recompute and self.compile:
            raise UsageError("recompute= cannot be used with compile=; leave one of them out")
        if isinstance(layout.schedule, planning.Plan):
            self.plan, self.layout = layout.schedule, Layout.of(layout.schedule)

    @property
    def seed_here(self) -> Any:
        """The seed of this process: the user's, ``"off"``, or that of torch."""
        return checked_seed(self.seed)

    def described(self) -> dict[str, str]:
        """Return what must be the same on every rank of a model that is to be cut, as texts by name."""
        if self.model is None:
            return {}
        stages = self.layout.stages
        cut = stages.modules if isinstance(stages, Partition) else [self.model]
        reduction = "mean" if self.loss is None else self.loss.reduction
        return {"reduction": reduction, **describe_stages(cut)}

    def schedules(self, world: int | None, plan: planning.Plan | None = None) -> ProvenSchedules:
        """The pipeline's schedules.

        Args:
            world: the number of processes, if each rank is one.
            plan: a plan that was found since, where the user left the layout to it.

        Raises:
            UsageError: what was said contradicts itself or the number of processes, or is too little.
        """
        layout = self.layout if plan is None else Layout.of(plan)
        schedules = layout.schedules(world)
        by_hand = self.model is None
        return replace(schedules, edges=self.edges, plan=plan or self.plan, by_hand=by_hand)

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
        assert self.model is not None
        args, kwargs = call
        samples = split_batch(tuple(args), dict(kwargs), MISSING, None, 1).samples or (1,)
        function = None if self.loss is None else self.loss.function
        profile = planning.measure(
            self.model,
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


def _replicas_of(replicas: Any, mesh: Any) -> Replicas:
    """The replicas of a pipeline, from a group or mesh of the ranks at the same place in each."""
    if replicas is None or isinstance(replicas, Replicas):
        return replicas or Replicas()
    group = group_across(replicas, mesh)
    inside = Group(group)
    several = isinstance(replicas, tuple | list) and len(replicas) > 1
    dims = tuple(mesh.get_group(name) for name in replicas) if several else ()
    return Replicas(inside.size, inside.sum, index=inside.rank, group=group, dims=dims)


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


def _needs_no_target(loss_fn: Callable[..., Any] | None) -> bool:
    """Tell whether a loss function can be called with the output alone."""
    try:
        inspect.signature(cast("Callable[..., Any]", loss_fn)).bind(None)
    except (TypeError, ValueError):
        return False
    return True
