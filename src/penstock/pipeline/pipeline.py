"""Pipeline: the user's object. It wires the parts together and does little itself."""

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
from penstock.plan import answer as planning
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
"""What a module has and a Pipeline has not, and what to use instead."""


class Pipeline(WeightMethods):
    """A model cut into stages that ranks run as a pipeline.

    The same lines run in one process, where all ranks live in it and take turns, and under ``torchrun``,
    where this process is one rank.

    Args:
        model: any module; see docs/partition.md for how it is cut.
        schedule: a name (see :func:`penstock.schedule.names`), a ``.csv`` or ``.json`` file, a
            :class:`~penstock.schedule.Schedule`, or a function of ranks and microbatches that gives one; by
            default 1F1B. ``"auto"`` measures the model with ``example=`` and takes the fastest plan.
        ranks: how many ranks; by default the world size under torchrun, else as the stages need.
        microbatches: into how many parts a batch is split; by default two per rank.
        loss_fn: ``(output, target) -> scalar``; without it the pipeline only predicts.
        stages: how many, the module paths to cut before, for each stage the paths of its modules, or a
            Partition.
        example: arguments of the model for one microbatch, as ``(args, kwargs)``, to see in which order it
            calls its modules, and how often, where its source does not tell; the same on every rank. For
            ``schedule="auto"`` also ``(args, kwargs, target)``, so that the time of the loss counts too.
        rules: how arguments are split, by position or name; by default along dimension 0. ``"target"``
            says it of the target, and ``"output"`` along which dimension outputs are put together.
        device: where the stages live; by default where the model is. ``"cuda"`` under torchrun is the
            device of ``LOCAL_RANK``.
        group: under torchrun, the process group of this pipeline's ranks, or a ``DeviceMesh`` of one
            dimension such as ``mesh["pp"]``; by default all.
        mesh: in its place, a ``DeviceMesh`` with a dimension ``pp``, along which the pipeline runs. Each
            place in its other dimensions has a pipeline of its own.
        wrap: called with each stage's module and its index after the cut, on the rank that has the stage;
            it gives the module in a wrapper, such as ``lambda module, stage: fully_shard(module,
            mesh=mesh["dp"])``, or changes it in place. Names stay those of the unsplit model. See
            docs/meshes.md.
        engine: how backward is cut in two, see :class:`PipelineStage`; by default what the schedule needs.
        compile: whether to compile each stage, or the options of ``torch.compile`` to do so with, see
            docs/compile.md; by default as the model is compiled, and what is compiled inside it stays so.
        seed: of the random numbers that steps draw, such as dropout's, which depend on it, the step, the
            microbatch and the module's path alone; by default the one rank 0 gave ``torch.manual_seed``.
            ``"off"`` draws from torch's generators as they are. See docs/randomness.md.
        timeout: seconds without progress, in a step or between steps, after which a rank is named as silent
            and all ranks stop; by default 300 in the first step, then the larger of 30 and ten times the
            median step. A pair says both.
        batch_statistics: whether batch norms update their running statistics for each ``"microbatch"``, or
            once a step as for the whole ``"batch"``; they normalise each microbatch by itself either way.
        rendezvous_timeout: seconds until all ranks must be there, and that one may hold up the others while
            the Pipeline is being made.
        weights: a folder of safetensors files, of which each process reads its own stages. The model may be
            on the meta device: its stages then get memory, on ``device`` or the CPU.
        plan: what :func:`penstock.plan.search` has found, in place of schedule, ranks, microbatches, stages
            and checkpoint.
        checkpoint: whether every unit of the model keeps what it is given alone, so that backward computes
            its forward again; or the paths of the modules that do. By default none.
        loss: ``reduction="mean"`` or ``"sum"``, ``loss_weight``, ``metrics``, ``accumulate``, ``replicas``:
            see :class:`penstock.step.LossOptions` and docs/training.md.

    Raises:
        UsageError: something asked for cannot be had; see its subclasses in :mod:`penstock.errors`.
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
            # Only these are moved to the device: the others may not fit there.
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
            # After weights are loaded, and before anybody looks at what the stages have.
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
            stages: in one process all of them; under torchrun those of this rank.
            schedule: as for :class:`Pipeline`; it says which stage belongs on which rank.
            microbatches: as for :class:`Pipeline`, like what follows.
            loss_fn: computes the loss on the last stage.
            rules: how arguments are split.
            edges: which values travel between the stages; by default each feeds the next. A stage that
                makes several gives them by name in a dict, and gets several by name.
            shared: the weights that stages of different processes share, the same table on every rank, see
                :func:`penstock.partition.find_shared`; by default what the given stages share by identity.
            group: the process group of this pipeline's ranks, or a mesh of one dimension.
            mesh: in its place, a mesh with a dimension ``pp``.
            seed: of the random numbers that steps draw.
            timeout: seconds without progress after which a rank is named as silent.
            batch_statistics: of what batch norms update their running statistics.
            rendezvous_timeout: seconds until all processes of a launcher must be there.
            loss: more about the loss.
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
        """The schedule of a training step, with its messages; a call may need other edges than this."""
        return self._plan.training

    @property
    def plan(self) -> planning.Plan | None:
        """The plan that it was made by, given or found."""
        return self._chosen

    @property
    def randomness(self) -> Randomness:
        """The seed of what steps draw and the number of the next one: saved and loaded with a checkpoint."""
        return self._randomness

    @property
    def replicas(self) -> Replicas:
        """The pipelines that train the same weights on other data, as the Pipeline was told."""
        return self._replicas

    @property
    def siblings(self) -> Siblings:
        """The pipelines side by side with this one, which ``mesh=`` or ``replicas=`` tell of."""
        return self._local.siblings

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that live in this process: all, or one."""
        return tuple(rank.number for rank in self._local.ranks)

    @property
    def leads(self) -> bool:
        """Whether rank 0 lives in this process: the one that prints and writes for all.

        Of several pipelines side by side, which ``mesh=`` or ``replicas=`` tell of, it is that of the first.
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
        """Forward and backward of a batch; gradients are added to the parameters' ``.grad``.

        Arguments that require grad get theirs too, on the ranks whose stages use them.

        Args:
            args: the model's arguments. Under torchrun they may be given to every rank; at least to those
                whose stages use them.
            target: what ``loss_fn`` compares with, split like the arguments; at least for the rank of the
                last stage. May be left out where ``loss_fn`` does not use it.
            microbatches: how many this time; by default as the Pipeline was made for.
            loss_weight: for this step, in place of the Pipeline's.
            total_weight: what the loss is divided by before backward, in place of the weight of this
                batch: where it is a part of a larger one.
            accumulate: for this step, in place of the Pipeline's.
            scaler: scales the loss for float16.
            outputs: whether to give every rank the model's outputs.
            record: whether to note when each action ran.
            kwargs: the model's arguments by name; they go to the stages that take them.

        Returns:
            The same result on every rank.

        Raises:
            UsageError: the call is wrong. What is found before anything is sent or changed is raised on
                every rank alike, and leaves the Pipeline as it was.
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
        """The step that is about to run."""
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
        """Run a batch once more, as the last step ran, to find what is first not finite in it.

        Gradients and buffers are left as they are. It takes some times as long as a step.

        Args:
            args: as for :meth:`step`.
            target: as for :meth:`step`.
            kwargs: as for :meth:`step`.

        Returns:
            A ``NonFiniteFinding``, which names stage, microbatch, action
            and module, the same on every rank; None where everything is finite.
        """
        self._held.prepare()
        draw = self._randomness.last
        given = Given(args, kwargs, target)
        return self._caller.find_nonfinite(given, draw, whole_batch=self._statistics == "batch")

    def explain(self) -> str:
        """What the ranks of this process did in the last call, action by action, as a table.

        Each line is a position in the rank's list, the action, what it reads and writes, and for a message
        its channel and bytes. ``take`` is where what arrived is taken, just before the action that needs it.

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

        They get an :class:`~penstock.ActionEvent`, which shows the action, its stage's module, and the values
        or gradients that go in and come out; what it shows must not be changed. In evaluation the forwards
        and their messages are actions too. What a function raises ends the call as a StageError.

        Args:
            which: an action such as ``"3F0"``, a pattern such as ``"*F*"`` or ``"3*0"`` (see
                :func:`penstock.schedule.matching`), or a function of an Action.
            before: called when all that the action needs is there; for a receive, when it is posted.
            after: called when the action is done; for a receive, when its message is taken.

        Returns:
            A handle; its ``remove()`` takes them away, and so does the end of a ``with`` block.
        """
        return self._hooks.add(which, before, after)

    def on_step(
        self, after: StepHook | None = None, *, before: StepHook | None = None
    ) -> HookHandle:
        """Call functions after and before each training step of this process.

        They get a :class:`~penstock.StepEvent`: the number of the step, its result, and what it took. The
        optimizer has not stepped yet when they are called. What a function raises, :meth:`step` raises.

        Args:
            after: called when the step is done.
            before: called when the step is about to begin.

        Returns:
            A handle; its ``remove()`` takes them away, and so does the end of a ``with`` block.
        """
        return self._watchers.add(after, before)

    def agree(self, value: Any) -> list[Any]:
        """Exchange a JSON value between the ranks: all ranks' values, in rank order."""
        return self._local.each(lambda rank: rank.exchange(value))

    def wrap_transports(self, wrap: Callable[[Transport], Transport]) -> None:
        """Put something between the ranks of this process and their wires, such as a counter."""
        for rank in self._local.ranks:
            rank.wrap_transport(wrap)

    def patient(self, seconds: float) -> AbstractContextManager[None]:
        """Let this rank take so long between two steps, where ``timeout`` would call it silent: to save, say.

        Args:
            seconds: that it may need in the ``with`` block; only it has to ask for them, not those that wait.
        """
        return self._local.patient(seconds)

    def report_failures_to(self, folder: str | os.PathLike[str]) -> None:
        """Have the story of a failure of a rank's process written to ``failure.json`` in a folder."""
        self._local.report_failures_to(Path(folder))

    def close(self, error: BaseException | None = None) -> None:
        """Give back what the transport holds, and the process group where this Pipeline started it.

        Args:
            error: the reason, if it is an error; then the other ranks stop because of it.
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
