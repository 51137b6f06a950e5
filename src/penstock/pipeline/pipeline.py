"""Pipeline: the class that users hold. It wires the parts together and does little itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

import torch
from torch import nn

from penstock import plan as planning
from penstock.faults import PATIENCE, Patience, Timeout
from penstock.parallel import Siblings, siblings_of
from penstock.partition import Example, Shared, find_shared_between
from penstock.pipeline.calls import Caller, Given
from penstock.pipeline.plan import (
    Asked,
    Plan,
    Source,
    Stages,
    WithTarget,
    check_model,
    computed_again,
    cut,
    make_plan,
    planned,
)
from penstock.pipeline.ranks import LocalRanks
from penstock.pipeline.setup import (
    Wrap,
    being_made,
    check_given,
    check_options,
    check_wrap,
    connect_if_launched,
    ends_of,
    home_for,
    loss_of,
    ranks_of,
    world_of,
    wrap_stages,
)
from penstock.pipeline.watching import StepEvent, StepHook, Watchers
from penstock.pipeline.weights import HeldWeights, WeightMethods
from penstock.rng import Randomness, Seed, own_seed
from penstock.runtime import ActionHook, HookHandle, Hooks, Which, describe_stages
from penstock.schedule import Schedule
from penstock.schedule.base import Edges
from penstock.stage import Compilation, FrugalStage, PipelineStage, home_of, without_compilation
from penstock.step import (
    BatchStatistics,
    Loss,
    LossFunction,
    LossOptions,
    LossScaler,
    LossWeight,
    Replicas,
    StepResult,
    check_statistics,
)
from penstock.transport import Transport
from penstock.values import MISSING, Rules, check_rules
from penstock.weights import load_partition

_HABITS = {
    "train": "step trains, in each module's own mode; eval and predict evaluate and leave the modes",
    "forward": "step trains, eval gives the loss, predict the output",
    "backward": "step runs forward and backward",
    "to": "Pipeline(device=) says where the stages live",
    "cuda": "Pipeline(device=) says where the stages live",
    "modules": "the stages of this process are in stages, each with its module",
    "buffers": "state_dict() holds them",
}
"""What an nn.Module has and a Pipeline does not, and what to use instead."""


class Pipeline(WeightMethods):
    """A model cut into stages that ranks run as a pipeline.

    The same code runs in one process, which then holds all ranks and lets them take turns, and under
    ``torchrun``, where each process is one rank.

    Args:
        model: any module; see docs/partition.md for how it is cut.
        schedule: a name (see :func:`penstock.schedule.names`), a ``.csv`` or ``.json`` file, a
            :class:`~penstock.schedule.Schedule`, or a function of ranks and microbatches that gives one; by
            default 1F1B. ``"auto"`` measures the model with ``example=`` and takes the fastest plan.
        ranks: the number of ranks; by default the world size under torchrun, otherwise what the stages need.
        microbatches: the number of parts that a batch is split into; by default two per rank.
        loss_fn: ``(output, target) -> scalar``; without it the pipeline only predicts.
        stages: the number of stages, the module paths to cut before, the paths of each stage's modules, or a
            Partition.
        example: arguments of the model for one microbatch, as ``(args, kwargs)``. They show in which order
            and how often the model calls its modules, if its source does not tell. The same on every rank.
            For ``schedule="auto"`` also ``(args, kwargs, target)``, so that the time of the loss is
            measured too.
        rules: how arguments are split, by position or name; by default along dimension 0. The rule for
            ``"target"`` splits the target, and the one for ``"output"`` says along which dimension outputs
            are put together.
        device: where the stages live; by default where the model is. Under torchrun, ``"cuda"`` is the
            device of ``LOCAL_RANK``.
        group: under torchrun, the process group of this pipeline's ranks, or a ``DeviceMesh`` of one
            dimension such as ``mesh["pp"]``; by default all processes.
        mesh: in place of ``group``, a ``DeviceMesh`` with a dimension ``pp``, along which the pipeline runs.
            There is one pipeline for each place in the other dimensions.
        wrap: called after the cut with each stage's module and index, on the rank that has the stage. It
            returns the wrapped module, as in ``lambda module, stage: fully_shard(module,
            mesh=mesh["dp"])``, or changes it in place. Names stay those of the unsplit model. See
            docs/meshes.md.
        engine: how backward is cut in two, see :class:`PipelineStage`; by default what the schedule needs.
        compile: whether to compile each stage, or options of ``torch.compile`` to compile it with; see
            docs/compile.md. By default the stages are compiled if the model is, and parts of the model that
            are compiled stay compiled.
        seed: of the random numbers that steps draw, such as those of dropout. They depend only on the seed,
            the step, the microbatch and the module's path. By default it is the seed that rank 0 gave
            ``torch.manual_seed``; ``"off"`` draws from torch's generators as they are. See
            docs/randomness.md.
        timeout: seconds without progress, in a step or between steps, after which a rank is reported as
            silent and all ranks stop. By default 300 for the first step, and then the larger of 30 and ten
            times the median step. A pair sets both.
        batch_statistics: whether batch norms update their running statistics for each ``"microbatch"``, or
            once a step as for the whole ``"batch"``. Either way they normalise each microbatch by itself.
        rendezvous_timeout: seconds until all ranks must be there, and that one rank may hold up the others
            while the Pipeline is made.
        weights: a folder of safetensors files, from which each process reads its own stages. The model may be
            on the meta device; its stages then get memory on ``device``, or on the CPU.
        plan: a plan that :func:`penstock.plan.search` has found, in place of schedule, ranks, microbatches,
            stages and checkpoint.
        checkpoint: activation checkpointing. True for all units of the model, or the paths of modules: these
            keep only their inputs, and backward computes their forward again. By default there is none.
        loss: ``reduction="mean"`` or ``"sum"``, ``loss_weight``, ``metrics``, ``accumulate``, ``replicas``:
            see :class:`penstock.step.LossOptions` and docs/training.md.

    Raises:
        UsageError: an argument is wrong; see its subclasses in :mod:`penstock.errors`.
        AgreementError: the ranks were given different plans.
    """

    def __init__(  # noqa: PLR0913 - the one place where a user says everything, by name
        self,
        model: nn.Module,
        *,
        schedule: Source | None = None,
        ranks: int | None = None,
        microbatches: int | None = None,
        loss_fn: LossFunction | None = None,
        stages: Stages = None,
        example: Example | WithTarget | None = None,
        rules: Rules | None = None,
        device: torch.device | str | None = None,
        group: Any = None,
        mesh: Any = None,
        wrap: Wrap | None = None,
        engine: str | None = None,
        compile: Compilation = None,
        seed: Seed = None,
        timeout: Timeout = None,
        batch_statistics: BatchStatistics = "microbatch",
        rendezvous_timeout: float = PATIENCE,
        weights: str | os.PathLike[str] | None = None,
        plan: planning.Plan | None = None,
        checkpoint: bool | Sequence[str] = False,
        **loss: Unpack[LossOptions],
    ) -> None:
        check_options(loss, Pipeline.__init__)
        check_model(model, stages)
        check_wrap(wrap)
        check_rules(rules)
        model, compile = without_compilation(model, compile)
        check_statistics(batch_statistics, [model], compiled=bool(compile))
        home = home_for(model, device, filled=weights is not None)
        patience = Patience(timeout, rendezvous_timeout)
        found = connect_if_launched(home or home_of(model), group, patience, mesh)
        with being_made(found) as now:
            now("cuts the model")
            asked = Asked(schedule, ranks, microbatches, stages, checkpoint)
            if schedule == "auto":
                now("measures the model and plans")
                plan, asked = planned(asked, model, world_of(found), example, found, loss_fn)
            schedule, ranks, microbatches, stages, checkpoint = asked.by(plan)
            own = make_plan(
                schedule or "1F1B",
                world_of(found) if ranks is None else ranks,
                stages,
                microbatches,
            )
            ends = ends_of(own, found)
            partition = cut(model, stages, own.stages, example and (example[0], example[1]))
            parts, own = partition.modules, replace(own, edges=partition.edges or None)
            again = computed_again(model, partition, checkpoint, compiled=bool(compile))
            # Only these stages are moved to the device, where the others may not fit.
            held = sorted(s for e in ends for s in own.training.placement.stages_on(e.rank))
            partition.keep(held)
            if weights is not None:
                load_partition(partition, held, weights, device=home or home_of(model), seen=now)
            now("makes its stages")
            kinds = [FrugalStage if again[i] else PipelineStage for i in held]
            made = [
                kind(parts[i], i, own.stages, home, engine=engine, compile=compile)
                for kind, i in zip(kinds, held, strict=True)
            ]
            for stage in made:
                if isinstance(stage, FrugalStage):
                    stage.again = again[stage.index]
            # After weights are loaded, and before anything looks at the stages' parameters.
            wrap_stages(made, wrap)
            told = {"reduction": str(loss.get("reduction", "mean")), **describe_stages(parts)}
            siblings = siblings_of(mesh, loss.get("replicas"))
            local = LocalRanks(ranks_of(own, ends, made, partition.describe), told, siblings)
            self._set_up(
                own, local, partition.shared, loss_of(loss_fn, **loss), rules, model, parts
            )
            self._randomness = Randomness(self._local.leading(own_seed(seed)))
        self._statistics = batch_statistics
        self._chosen = plan

    @classmethod
    def from_stages(  # noqa: PLR0913 - as the constructor
        cls,
        stages: Sequence[PipelineStage],
        *,
        schedule: Source,
        microbatches: int | None = None,
        loss_fn: LossFunction | None = None,
        rules: Rules | None = None,
        edges: Edges | None = None,
        shared: Sequence[Shared] | None = None,
        group: Any = None,
        mesh: Any = None,
        seed: Seed = None,
        timeout: Timeout = None,
        batch_statistics: BatchStatistics = "microbatch",
        rendezvous_timeout: float = PATIENCE,
        **loss: Unpack[LossOptions],
    ) -> Pipeline:
        """A pipeline of stages placed by hand.

        Args:
            stages: in one process, all of them; under torchrun, those of this rank.
            schedule: as for :class:`Pipeline`; it says which stage belongs on which rank.
            microbatches: as for :class:`Pipeline`, like the arguments that follow, where nothing else is
                said.
            loss_fn: computes the loss on the last stage.
            rules: how arguments are split.
            edges: which values travel between the stages; by default each stage feeds the next. A stage
                that gives several values returns a dict, and one that uses several gets them as keyword
                arguments.
            shared: the table of weights that stages of different processes share, the same on every rank;
                see :func:`penstock.partition.find_shared`. By default, what the given stages share by
                identity.
            group: the process group of this pipeline's ranks, or a mesh of one dimension.
            mesh: in place of ``group``, a mesh with a dimension ``pp``.
            seed: of the random numbers that steps draw.
            timeout: seconds without progress after which a rank is reported as silent.
            batch_statistics: for what batch norms update their running statistics.
            rendezvous_timeout: seconds until all ranks must be there.
            loss: options of the loss.
        """
        check_options(loss, cls.from_stages)
        check_given(stages)
        check_rules(rules)
        compiled = any(stage.compiles for stage in stages)
        check_statistics(batch_statistics, [s.module for s in stages], compiled=compiled)
        patience = Patience(timeout, rendezvous_timeout)
        found = connect_if_launched(stages[0].device, group, patience, mesh)
        pipe = cls.__new__(cls)
        with being_made(found) as now:
            now("plans its stages")
            plan = make_plan(schedule, world_of(found), stages[0].count, microbatches)
            plan = replace(plan, edges=None if edges is None else tuple(edges))
            modules = {stage.index: stage.own for stage in stages}
            table = find_shared_between(modules) if shared is None else tuple(shared)
            describe = None if edges else stages[0].describe
            ranks, siblings = (
                ranks_of(plan, ends_of(plan, found), stages, describe),
                siblings_of(mesh, loss.get("replicas")),
            )
            local = LocalRanks(ranks, siblings=siblings)
            pipe._set_up(plan, local, table, loss_of(loss_fn, **loss), rules)
            pipe._randomness = Randomness(pipe._local.leading(own_seed(seed)))
            pipe._local.tell_stages_apart()
        pipe._statistics = batch_statistics
        pipe._chosen = None
        return pipe

    def _set_up(
        self,
        plan: Plan,
        local: LocalRanks,
        shared: Sequence[Shared],
        loss: Loss | None,
        rules: Rules | None,
        *cut: Any,
    ) -> None:
        schedule = plan.training
        self._plan = plan
        self._hooks = Hooks()
        self._watchers = Watchers()
        local.assemble(schedule)
        self._local = local
        self._held = HeldWeights(local, shared, schedule.placement.rank_of, *cut)
        self._replicas = Replicas() if loss is None else loss.replicas
        self._caller = Caller(plan, local, loss, rules, self._hooks, self._held.training)

    # ---- what a pipeline is

    @property
    def schedule(self) -> Schedule:
        """The schedule of a training step, with its messages; some calls may need other edges."""
        return self._plan.training

    @property
    def plan(self) -> planning.Plan | None:
        """The plan that the Pipeline was made from, given or found; None without one."""
        return self._chosen

    @property
    def randomness(self) -> Randomness:
        """The seed of random numbers and the number of the next step; saved and loaded with checkpoints."""
        return self._randomness

    @property
    def replicas(self) -> Replicas:
        """The pipelines that train the same weights on other data, see ``replicas=``."""
        return self._replicas

    @property
    def siblings(self) -> Siblings:
        """The pipelines side by side with this one, given by ``mesh=`` or ``replicas=``."""
        return self._local.siblings

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that live in this process: all of them, or one."""
        return tuple(rank.number for rank in self._local.ranks)

    @property
    def leads(self) -> bool:
        """Whether this process is the one that prints and writes for all: it holds rank 0.

        Of several pipelines side by side, given by ``mesh=`` or ``replicas=``, it holds rank 0 of the first.
        """
        return self._local.leads

    @property
    def stages(self) -> tuple[PipelineStage, ...]:
        """The stages that live in this process, in order."""
        return self._local.stages

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            hint = _HABITS.get(name)
            told = f"'{type(self).__name__}' object has no attribute {name!r}"
            raise AttributeError(f"{told}: {hint}" if hint else told, name=name, obj=self)

    # ---- what a pipeline does

    def step(  # noqa: PLR0913 - what a user may say of a step, by name
        self,
        *args: Any,
        target: Any = MISSING,
        microbatches: int | None = None,
        loss_weight: LossWeight | None = None,
        total_weight: float | None = None,
        accumulate: int | None = None,
        scaler: LossScaler | None = None,
        outputs: bool = False,
        record: bool = False,
        **kwargs: Any,
    ) -> StepResult:
        """Run forward and backward of a batch, and add gradients to the parameters' ``.grad``.

        Arguments that require grad get gradients too, on the ranks whose stages use them.

        Args:
            args: the model's arguments. Under torchrun, ranks whose stages use an argument must be given
                it; the others may be.
            target: what ``loss_fn`` compares with, split like the arguments. The rank of the last stage
                must be given it, unless ``loss_fn`` does not use it.
            microbatches: their number in this step; by default that of the Pipeline.
            loss_weight: for this step, in place of the Pipeline's.
            total_weight: what the loss is divided by before backward, in place of the weight of this batch:
                for a batch that is a part of a larger one.
            accumulate: for this step, in place of the Pipeline's.
            scaler: scales the loss for float16.
            outputs: whether to give every rank the model's outputs.
            record: whether to note when each action ran.
            kwargs: the model's keyword arguments; they go to the stages that take them.

        Returns:
            The same result on every rank.

        Raises:
            UsageError: the call is wrong. It is raised on every rank, and if nothing has been sent or
                changed yet, the Pipeline stays as it was.
        StageError: the model's or the loss's code raised.
        PoisonedError: an earlier call failed in the middle.
        """
        self._held.prepare()
        run = partial(
            self._caller.step,
            Given(args, kwargs, target),
            self._randomness,
            whole_batch=self._statistics == "batch",
            microbatches=microbatches,
            loss_weight=loss_weight,
            total_weight=total_weight,
            accumulate=accumulate,
            scaler=scaler,
            outputs=outputs,
            record=record,
        )
        return self._watchers.around(self._coming, run)

    def _coming(self) -> StepEvent:
        """The event of the step that is about to run."""
        return StepEvent(self._randomness.step + 1, self.leads, self.stages[0].device)

    def eval(
        self, *args: Any, target: Any = MISSING, outputs: bool = False, **kwargs: Any
    ) -> StepResult:
        """The loss of a batch in evaluation mode, without gradients.

        Args:
            args: as for :meth:`step`; the batch may be smaller than a training batch.
            target: as for :meth:`step`.
            outputs: whether to give every rank the model's outputs.
            kwargs: the model's arguments by name.
        """
        self._held.prepare()
        return self._caller.evaluate(Given(args, kwargs, target), outputs=outputs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for a batch in evaluation mode, on every rank."""
        self._held.prepare()
        return self._caller.predict(Given(args, kwargs, MISSING))

    def find_nonfinite(self, *args: Any, target: Any = MISSING, **kwargs: Any) -> Any:
        """Run a batch once more, as the last step ran it, to find the first thing that is not finite.

        Gradients and buffers are left as they are. It takes several times as long as a step.

        Args:
            args: as for :meth:`step`.
            target: as for :meth:`step`.
            kwargs: as for :meth:`step`.

        Returns:
            A ``NonFiniteFinding``, which names stage, microbatch, action and module, the same on every rank;
                or None if everything is finite.
        """
        self._held.prepare()
        draw = self._randomness.last
        given = Given(args, kwargs, target)
        return self._caller.find_nonfinite(given, draw, whole_batch=self._statistics == "batch")

    def explain(self) -> str:
        """What the ranks of this process did in the last call, action by action, as a table.

        Each line has the position in the rank's list, the action, what it reads and writes, and for a
        message its channel and bytes. ``take`` is where a message that has arrived is taken, just before
        the action that needs it.

        Raises:
            UsageError: there was no call yet.
        """
        return self._local.explain()

    def on(
        self,
        which: Which,
        *,
        before: ActionHook | None = None,
        after: ActionHook | None = None,
    ) -> HookHandle:
        """Call functions before and after some of the actions that run in this process.

        They get an :class:`~penstock.ActionEvent`, which shows the action, its stage's module, and the
        values or gradients that go in and come out; these must not be changed. Evaluation has actions too:
        forwards and their messages. An exception in a function ends the call with a StageError.

        Args:
            which: an action such as ``"3F0"``, a pattern such as ``"*F*"`` or ``"3*0"`` (see
                :func:`penstock.schedule.matching`), or a function of an Action.
            before: called when everything that the action needs is there; for a receive, when it is posted.
            after: called when the action is done; for a receive, when its message is taken.

        Returns:
            A handle that removes the functions, by ``remove()`` or at the end of a ``with`` block.
        """
        return self._hooks.add(which, before, after)

    def on_step(
        self, after: StepHook | None = None, *, before: StepHook | None = None
    ) -> HookHandle:
        """Call functions after and before each training step of this process.

        They get a :class:`~penstock.StepEvent`: the number of the step, its result, and its time and
        memory. The optimizer has not stepped yet when they are called. An exception in a function is raised
        by :meth:`step`.

        Args:
            after: called when the step is done.
            before: called when the step is about to begin.

        Returns:
            A handle that removes the functions, by ``remove()`` or at the end of a ``with`` block.
        """
        return self._watchers.add(after, before)

    def agree(self, value: Any) -> list[Any]:
        """Exchange JSON values: every rank gets the values of all ranks, in rank order."""
        return self._local.each(lambda rank: rank.exchange(value))

    def wrap_transports(self, wrap: Callable[[Transport], Transport]) -> None:
        """Put something between the ranks of this process and their transports, such as a counter."""
        for rank in self._local.ranks:
            rank.wrap_transport(wrap)

    def patient(self, seconds: float) -> AbstractContextManager[None]:
        """Let this rank take longer than ``timeout`` allows between two steps, such as to save.

        Args:
            seconds: the time that it may need. The ranks that wait for it need not call this.
        """
        return self._local.patient(seconds)

    def report_failures_to(self, folder: str | os.PathLike[str]) -> None:
        """Have a report of a failed rank written to ``failure.json`` in a folder."""
        self._local.report_failures_to(Path(folder))

    def close(self, error: BaseException | None = None) -> None:
        """Release what the transport holds, and end the process group if this Pipeline started it.

        Args:
            error: the reason, if it is an error; the other ranks then stop because of it.
        """
        self._local.close(error)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(error)
