"""Pipeline, the class that users work with."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from penstock import plan as planning
from penstock._engine.devices import is_accelerator
from penstock._engine.faults import Timeout
from penstock._engine.microbatches import MISSING, RulesGiven
from penstock._engine.parallel import groups_beside
from penstock._engine.rng import Randomness, Seed
from penstock._engine.runtime import (
    MAIN,
    ActionHook,
    HookHandle,
    Hooks,
    Loss,
    LossFunction,
    LossScaler,
    LossWeight,
    StepResult,
    TotalWeight,
    Which,
    check_plans,
)
from penstock._engine.transport import Job, Replicas, collective
from penstock.errors import NonFiniteError, UsageError, listed
from penstock.partition import Shared, find_shared_between
from penstock.pipeline.engine import Engine
from penstock.pipeline.nonfinite import NonFiniteFinding
from penstock.pipeline.plan import Layout, Source, Stages
from penstock.pipeline.settings import Settings, Wrap
from penstock.pipeline.setup import (
    before_meeting,
    check_loss,
    check_placed,
    check_states,
    connect_process,
    described_stages,
    make_equal,
    set_up,
)
from penstock.pipeline.uncut import CUT_NOW
from penstock.pipeline.watching import StepEvent, StepHook
from penstock.pipeline.weights import ModelWeights
from penstock.schedule import Edge, Schedule
from penstock.stage import Compilation, OverlapFunction, PipelineStage

logger = logging.getLogger("penstock")
_HABITS = {
    "eval": "evaluate gives the loss of a batch, predict its output; both run in evaluation mode",
    "train": "step trains, in each module's own mode; evaluate and predict leave the modes",
    "forward": "step trains, evaluate gives the loss, predict the output",
    "backward": "step runs forward and backward",
    "to": "Pipeline(device=) says where the stages live",
    "cuda": "Pipeline(device=) says where the stages live",
    "modules": "the stages of this process are in stages, each with its module",
    "buffers": "weights.state_dict() holds them",
    "state_dict": "weights.state_dict() holds this process's weights, with full=True the whole model's",
    "load_state_dict": "weights.load_state_dict() takes the whole model's",
    "optimizer_state": "penstock.Checkpoints saves optimizers, weights.optimizer_state_dict() gives their "
    "states",
}
"""Attributes of nn.Module or an earlier Pipeline that this one lacks, and what to use instead."""


class Pipeline:
    """A model cut into stages that ranks run as a pipeline.

    The same code runs in one process, which then does the work of all ranks, and under
    ``torchrun``, where each process is one rank.

    Args:
        model: any module; see docs/cutting.md for how it is cut.
        schedule: a name (see :func:`penstock.schedule.names`), a ``.csv`` or ``.json`` file, a
            :class:`~penstock.schedule.Schedule`, a function of ranks and microbatches that returns one, or a
            :class:`penstock.plan.Plan`, which also decides microbatches, stages and recompute; by default
            1F1B. ``"auto"`` measures the model with the first batch and uses the fastest plan.
        microbatches: the number of parts that a batch is split into; by default two per rank.
        loss_fn: ``(output, target) -> scalar``, or a :class:`penstock.Loss` that says what the scalar means.
            By default a model of transformers trains with the loss that it computes from ``labels=``; any
            other only predicts.
        ranks: the number of ranks; by default the world size under torchrun, otherwise what the stages need.
        mesh: under torchrun, a ``DeviceMesh`` with a dimension ``pp``, along which the pipeline runs: there
            is one pipeline for each place in the other dimensions. Or a mesh of one dimension, or a process
            group. By default all processes.
        replicas: data parallelism: the pipelines that train the same weights on other data, as the name of a
            dimension of ``mesh`` or a tuple of names, a process group of the ranks at the same place in each
            of them, or :class:`penstock.Replicas`. They begin with the weights of the first, and gradients
            are averaged over them.
        stages: the number of stages, the module paths to cut before, the paths of each stage's modules, or a
            Partition. By default as many as the schedule has, cut where the first batch shows.
        split: how arguments are split, by position or name: a dimension, or a :class:`penstock.Split` or
            another rule; by default along dimension 0. The rule for ``"target"`` splits the target, and the
            one for ``"output"`` says how the outputs of microbatches are put together, by default along
            dimension 0, which must count the samples.
        device: where the stages live; by default where the model is. Under torchrun, ``"cuda"`` is the
            device of ``LOCAL_RANK``.
        wrap: called after the cut with each stage's module and index, on the rank that has the stage. It
            returns the wrapped module, as in ``lambda module, stage: fully_shard(module,
            mesh=mesh["dp"])``, or changes it in place. Names stay those of the unsplit model. See
            docs/replicas-and-sharding.md.
        compile: whether to compile each stage, or options of ``torch.compile`` to compile it with; see
            docs/compile.md. By default the stages are compiled if the model is, and parts of the model that
            are compiled stay compiled.
        recompute: activation checkpointing. True for all units of the model, or the paths of modules: these
            keep only their inputs, and backward recomputes their forward. By default there is none.
        seed: the seed of the random numbers that steps draw, as for dropout. They depend only on the seed,
            the step, the microbatch and the module's path. By default it is the seed that rank 0 gave
            ``torch.manual_seed``; ``"off"`` draws from torch's generators as they are. See
            docs/reproducibility.md.
        timeout: seconds without progress, in a step or between steps, after which a rank is reported as
            silent and all ranks stop; or :class:`penstock.Timeouts`. By default 600.

    Raises:
        UsageError: an argument is wrong; see its subclasses in :mod:`penstock.errors`.
        AgreementError: the ranks were given different plans.
    """

    def __init__(  # noqa: PLR0913 - the one place where a user says everything, by name
        self,
        model: nn.Module,
        *,
        schedule: Source | None = None,
        microbatches: int | None = None,
        loss_fn: LossFunction | Loss | None = None,
        ranks: int | None = None,
        mesh: Any = None,
        replicas: Any = None,
        stages: Stages = None,
        split: RulesGiven | None = None,
        device: torch.device | str | None = None,
        wrap: Wrap | None = None,
        compile: Compilation = None,
        recompute: bool | Sequence[str] = False,
        seed: Seed = None,
        timeout: Timeout = None,
        **unknown: Any,
    ) -> None:
        with before_meeting(mesh, replicas):
            settings = Settings(
                caller=Pipeline.__init__, model=model,
                layout=Layout(schedule, ranks, microbatches, stages, recompute), loss_fn=loss_fn,
                split=split, mesh=mesh, replicas=replicas, device=device, wrap=wrap, compile=compile,
                seed=seed, timeout=timeout, unknown=unknown,
            )  # fmt: skip
        with self._begun(settings, "cuts the model"):
            self.engine.take_model(settings)

    @classmethod
    def from_stages(  # noqa: PLR0913 - as the constructor
        cls,
        stages: Sequence[PipelineStage],
        *,
        schedule: Source,
        microbatches: int | None = None,
        loss_fn: LossFunction | Loss | None = None,
        split: RulesGiven | None = None,
        edges: Sequence[Edge] | None = None,
        shared: Sequence[Shared] | None = None,
        mesh: Any = None,
        replicas: Any = None,
        seed: Seed = None,
        timeout: Timeout = None,
        **unknown: Any,
    ) -> Pipeline:
        """Make a pipeline of stages placed by hand.

        Args:
            stages: in one process, all of them; under torchrun, those of this rank.
            schedule: as for :class:`Pipeline`; it says which stage belongs on which rank.
            microbatches: as for :class:`Pipeline`; so are the arguments that follow, unless noted.
            loss_fn: computes the loss on the last stage.
            split: how arguments are split.
            edges: the values that travel between the stages; by default each stage feeds the next. A stage
                that makes several values returns a dict, and one that uses several gets them as keyword
                arguments.
            shared: the table of weights that stages of different processes share, the same on every rank;
                see :func:`penstock.partition.find_shared`. By default, the weights that the given stages
                share by identity.
            mesh: a mesh, or the process group of this pipeline's ranks.
            replicas: the pipelines that train the same weights on other data.
            seed: the seed of the random numbers that steps draw.
            timeout: seconds without progress after which a rank is reported as silent.
            unknown: must be empty; what is in it is refused with the name that was probably meant.
        """
        with before_meeting(mesh, replicas):
            settings = Settings(
                caller=cls.from_stages, by_hand=stages, layout=Layout(schedule, None, microbatches),
                loss_fn=loss_fn, split=split, edges=None if edges is None else tuple(edges), mesh=mesh,
                replicas=replicas, seed=seed, timeout=timeout, unknown=unknown,
            )  # fmt: skip
        pipe = cls.__new__(cls)
        with pipe._begun(settings, "plans its stages"):
            table = find_shared_between({one.index: one.code for one in stages})
            make_equal(stages, pipe.replicas, pipe.job.transport)
            pipe.engine.take_stages(stages, table if shared is None else tuple(shared))
        return pipe

    @contextmanager
    def _begun(self, settings: Settings, doing: str) -> Iterator[None]:
        """A context for taking the stages, once this process has met the others and all have the same."""
        transport = connect_process(settings)
        with set_up(transport) as prepare:
            prepare(doing)
            schedules = settings.schedules(None if transport is None else transport.ranks)
            if settings.model is None:
                check_placed(schedules.training, settings.by_hand, transport)
                check_states(schedules.training, settings.by_hand)
            replicas = settings.replica_set
            beside = groups_beside(settings.mesh, replicas)
            self._job = Job(
                transport, schedules.ranks, replicas, settings.home, beside=bool(beside)
            )
            self._schedules = schedules
            self._undecided = settings.layout.schedule == "auto"
            self._step_hooks = Hooks(StepEvent)
            self._closed = False
            self._unread: StepResult | None = None
            details = settings.described()
            seeds = check_plans(self._job, schedules.training, details, settings.seed_here)
            if not self._undecided:
                check_loss(settings.loss, schedules.training)
            names = signature(Pipeline.step).parameters
            self.engine = Engine(settings, schedules, self._job, seeds[0], names)
            yield
        if transport is not None:
            # Waits of this rank on the user's groups of pipelines side by side end with the others' failure.
            transport.watch.protect_groups(beside)

    # ---- what a pipeline is

    @property
    def model(self) -> nn.Module | None:
        """The model that was cut, of which this process holds only its stages; None without one.

        In it, placeholders that say where they lie stand for the weights of other processes. Before the
        first batch cuts it, each process holds all of it.
        """
        return self.engine.model

    @property
    def is_cut(self) -> bool:
        """True once the model is cut: at once if ``stages=`` says where, else by a call."""
        return self.engine.uncut is None

    @property
    def schedule(self) -> Schedule:
        """The schedule of a training step, with its messages; some calls may need other edges.

        Raises:
            UsageError: it is ``"auto"``, and the model is not cut yet.
        """
        if self._undecided and not self.is_cut:
            raise UsageError(f'schedule="auto" is decided when the model is cut; {CUT_NOW}')
        return self._schedules.training

    @property
    def plan(self) -> planning.Plan | None:
        """The plan that the Pipeline was made from, given or found; None without one."""
        return self._schedules.plan

    @property
    def randomness(self) -> Randomness:
        """The seed of random numbers and the number of the next step; saved and loaded with checkpoints."""
        return self.engine.randomness

    @property
    def replicas(self) -> Replicas:
        """The pipelines that train the same weights on other data, see ``replicas=``."""
        return self._job.replicas

    @property
    def weights(self) -> ModelWeights:
        """The weights of the whole model: their norms, state dicts, files and first values."""
        return self.engine.weights

    @property
    def job(self) -> Job:
        """The processes that train together, what they tell each other, and how long each may take."""
        return self._job

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks that live in this process: all of them, or one."""
        if self._job.transport is None:
            return tuple(range(self._schedules.ranks))
        return (self._job.rank,)

    @property
    def rank(self) -> int:
        """The rank of this process; 0 if all ranks live in it."""
        return self._job.rank

    @property
    def computes_loss(self) -> bool:
        """True if there is a loss, so that :meth:`step` can train."""
        return self.engine.loss is not None

    @property
    def stopping(self) -> bool:
        """True if the run should stop after the latest step; the same on every rank of the job.

        A signal or a time limit has come on some rank, see :class:`penstock.GracefulStop`.
        """
        return self.engine.stopping

    @property
    def is_main_process(self) -> bool:
        """True in the process that holds rank 0, which prints and writes for all.

        Of several pipelines side by side, given by ``mesh=`` or ``replicas=``, it is rank 0 of the first.
        """
        return self._job.is_main_process

    @property
    def stages(self) -> tuple[PipelineStage, ...]:
        """The stages that live in this process, in order.

        Raises:
            UsageError: the model is not cut yet, see :attr:`is_cut`.
        """
        if not self.is_cut:
            raise UsageError(f"there are no stages yet: the first batch cuts the model; {CUT_NOW}")
        return self.engine.stages

    @property
    def units(self) -> list[str]:
        """The paths of the modules that are placed as a whole, as :func:`penstock.randomness` takes them.

        Raises:
            UsageError: the model is not cut yet, see :attr:`is_cut`.
        """
        cut = self.stages and self.engine.partition
        return cut.units if cut else []

    @property
    def device(self) -> torch.device:
        """The device of this process's stages."""
        return self.engine.device

    def __repr__(self) -> str:
        schedule = self._schedules.training
        here = "" if self._job.transport is None else f"; this process is rank {self.rank}"
        count = self._job.replicas.number
        beside = f"; {count} replicas" if count > 1 else ""
        name = "auto" if self._undecided and not self.is_cut else schedule.name
        first = (
            f"Pipeline({name}, ranks={schedule.ranks}, stages={schedule.stages}, "
            f"microbatches={schedule.microbatches}, device={str(self.device)!r}{beside}{here})"
        )
        uncut = self.engine.uncut
        if uncut is not None:
            kind = type(uncut.model).__name__
            return f"{first}\n  not cut yet: the first batch cuts the {kind}"
        rows = described_stages(schedule, self.stages, self.engine.partition)
        return "\n".join([first, *rows])

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a Pipeline cannot be copied or pickled: it holds this process's place among the ranks. Copy the "
            "model before a Pipeline cuts it, copy.deepcopy(model), and make another Pipeline of the copy; "
            "save weights by pipe.weights.save(folder), and a whole run by penstock.Checkpoints"
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            hint = _HABITS.get(name)
            text = f"'{type(self).__name__}' object has no attribute {name!r}"
            raise AttributeError(f"{text}: {hint}" if hint else text, name=name, obj=self)

    # ---- what a pipeline does

    def step(  # noqa: PLR0913 - what a user may say of a step, by name
        self,
        *args: Any,
        target: Any = MISSING,
        microbatches: int | None = None,
        loss_weight: LossWeight | None = None,
        total_weight: TotalWeight | None = None,
        accumulate: int | None = None,
        scaler: LossScaler | None = None,
        outputs: bool = False,
        record: bool = False,
        same_batch: bool | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> StepResult:
        """Run forward and backward of a batch, and add gradients to the parameters' ``.grad``.

        Arguments and targets that require grad get gradients too, the whole ones on every rank that was
        given them.

        Args:
            args: the model's arguments. Under torchrun, a rank is given all of them or none; ranks whose
                stages use some need them, and so does the rank of the first stage.
            target: the target of ``loss_fn``, split like the arguments. The rank of the last stage must be
                given it, unless ``loss_fn`` does not use it or names an argument of the model as the target,
                as the loss of a model of transformers names ``labels``.
            microbatches: their number in this step; by default that of the Pipeline.
            loss_weight: replaces the Pipeline's in this step; of a dict, those that it names.
            total_weight: what the loss is divided by before backward, in place of the weight of this batch:
                for a batch that is a part of a larger one. A dict by name, if ``loss_weight`` is one.
            accumulate: the number of steps whose gradients together equal those of one large batch; by
                default 1. With replicas, see :meth:`no_sync`.
            scaler: scales the loss for float16.
            outputs: whether to give every rank the model's outputs.
            record: whether to note when each action ran.
            same_batch: whether every rank must be given the same batch, in every step. By default, what
                several ranks were given is compared in the first steps and in each of new shapes, and must be
                the same; ranks may be given nothing, or a part. False compares nothing.
            model_kwargs: keyword arguments of the model, under any names, such as those of this method.
            kwargs: more keyword arguments of the model; they go to the stages that take them.

        Returns:
            The same result on every rank.

        Raises:
            UsageError: the call is wrong. It is raised on every rank, and if nothing has been sent or
                changed yet, the Pipeline stays as it was.
            StageError: the model's or the loss's code raised. In one process the Pipeline stays usable;
                between processes it is closed.
            PoisonedError: an earlier call failed in the middle.
        """
        with self.engine.turn():
            self._look_at_last()
            number, event = self.engine.randomness.step + 1, None
            if self._step_hooks:
                event = StepEvent(number, self._job.is_main_process, self.device)
                self._step_hooks.call("before", event)
            started = perf_counter()
            arguments = self.engine.arguments(
                args,
                kwargs,
                model_kwargs,
                target=target,
                microbatches=microbatches,
                same_batch=same_batch,
            )
            result = self.engine.step(
                arguments,
                loss_weight=loss_weight,
                total_weight=total_weight,
                accumulate=accumulate,
                scaler=scaler,
                outputs=outputs,
                record=record or (event is not None and event.record),
            )
            if scaler is None:
                self._unread = result
                waits = self.engine.training_loss.nonfinite == "warn"
                if not (waits and self._job.transport is None and is_accelerator(self.device)):
                    self._look_at_last()
            if event is not None:
                after = replace(event, result=result, seconds=perf_counter() - started)
                self._step_hooks.call("after", after)
            return result

    @collective
    def cut(
        self,
        *args: Any,
        target: Any = MISSING,
        model_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Cut the model now, by the arguments of a batch, as the first step would. Every rank calls it.

        Does nothing to a model that is cut. Where ``stages=`` says where to cut, no arguments are needed: a
        model on the meta device waits for this or for its weights.

        Args:
            args: the model's arguments, as for :meth:`step`.
            target: the target; with ``schedule="auto"`` the time of the loss is measured with it.
            model_kwargs: as for :meth:`step`.
            kwargs: the model's arguments by name.

        Raises:
            PartitionError: the model cannot be cut; it stays whole.
        """
        uncut = self.engine.uncut
        if uncut is None:
            return
        uncut.was_asked = True
        if not (args or kwargs or model_kwargs or uncut.needs_call):
            uncut.cut_now()
            return
        self.engine.cut(self.engine.arguments(args, kwargs, model_kwargs, target=target))

    def evaluate(
        self,
        *args: Any,
        target: Any = MISSING,
        outputs: bool = False,
        same_batch: bool | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> StepResult:
        """The loss of a batch in evaluation mode, without gradients.

        Args:
            args: as for :meth:`step`; the batch may be smaller than a training batch.
            target: as for :meth:`step`.
            outputs: whether to give every rank the model's outputs.
            same_batch: as for :meth:`step`.
            model_kwargs: as for :meth:`step`.
            kwargs: the model's arguments by name.
        """
        arguments = self.engine.arguments(
            args, kwargs, model_kwargs, target=target, same_batch=same_batch
        )
        return self.engine.evaluate(arguments, outputs=outputs)

    def predict(
        self,
        *args: Any,
        same_batch: bool | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The model's output for a batch in evaluation mode, on every rank.

        Args:
            args: as for :meth:`step`; the batch may be smaller than a training batch.
            same_batch: as for :meth:`step`.
            model_kwargs: as for :meth:`step`.
            kwargs: the model's arguments by name.
        """
        return self.engine.predict(
            self.engine.arguments(args, kwargs, model_kwargs, same_batch=same_batch)
        )

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context in evaluation mode, which restores each module's own mode."""
        with self.engine.evaluating():
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which steps add each replica's own gradients up, and the next step averages them all.

        It saves the averages over ``replicas=``, ``DistributedDataParallel`` or ``fully_shard`` of all steps
        with ``accumulate=`` but the last, as the method of this name does in DDP. Every rank of every replica
        enters it for the same steps; weights that stages share are averaged in each. Until the next step
        outside, gradients are those of one replica: to clip or measure them is an error, and the optimizer
        must not step::

            for number, (x, y) in enumerate(batches, start=1):
                with nullcontext() if number % 4 == 0 else pipe.no_sync():
                    pipe.step(x, target=y, accumulate=4)

        """
        before, self.engine.averages = self.engine.averages, False
        try:
            yield
        finally:
            self.engine.averages = before

    def find_nonfinite(
        self,
        *args: Any,
        target: Any = MISSING,
        model_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> NonFiniteFinding | None:
        """Run a batch once more, as the last step ran it, to find the first non-finite value.

        Gradients and buffers stay as they are. The search takes several times as long as a step.

        Args:
            args: as for :meth:`step`.
            target: as for :meth:`step`.
            model_kwargs: as for :meth:`step`.
            kwargs: as for :meth:`step`.

        Returns:
            A ``NonFiniteFinding``, which names stage, microbatch, action and module, the same on every rank;
            or None if everything is finite.
        """
        arguments = self.engine.arguments(args, kwargs, model_kwargs, target=target)
        return self.engine.find_nonfinite(arguments)

    # ---- a step that is not finite

    def _look_at_last(self) -> None:
        """See whether the last step was finite, if that has not been done yet."""
        result, self._unread = self._unread, None
        if result is not None and not result.finite:
            self._meet_nonfinite(result)

    def _meet_nonfinite(self, result: StepResult) -> None:
        """Raise, skip or warn about a step that is not finite, the same on every rank."""
        loss = self.engine.loss
        assert loss is not None
        step, nonfinite = self.randomness.step, loss.nonfinite
        what = f"the loss is {result.loss:g}"
        added = [n for n, value in result.losses.items() if n != MAIN and not math.isfinite(value)]
        if added:
            what += f", through the added loss {listed(added)}"
        if torch.isfinite(torch.tensor(result.loss, device="cpu")):
            what += ", but gradients are not finite"
        if nonfinite == "stop":
            raise NonFiniteError(
                f"step {step}: {what}; do not step the optimizer. find_nonfinite of this batch says which "
                'module made it; nonfinite="skip" drops all gradients then, and "warn" only logs it'
            )
        if self.is_main_process:
            skipped = ", all gradients are dropped" if nonfinite == "skip" else ""
            logger.warning("penstock: step %d is not finite%s: %s", step, skipped, what)
        if nonfinite == "skip":
            self.zero_grad()

    # ---- parameters

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the whole model, each once, under their names in it and in its order.

        They are the same objects before and after the cut, so an optimizer can be made at any time.

        In a process of several, those of other ranks are placeholders, which optimizers leave out. What needs
        the numbers of one is an error that names it and its rank; see docs/weights.md.
        """
        return self.weights.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the whole model, each once; see :meth:`named_parameters`."""
        return (parameter for _, parameter in self.named_parameters())

    def zero_grad(self) -> None:
        """Drop all gradients, also those that wait for a step outside of :meth:`no_sync`.

        An optimizer's own ``zero_grad`` does not reach what ``fully_shard`` keeps of such steps.
        """
        self.engine.zero_grad()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> float:
        """Scale all gradients so that their norm over the whole model is at most ``max_norm``.

        It is that of :attr:`weights`, for the line that every training loop has; every rank calls it.

        Args:
            max_norm: the largest norm.
            norm_type: which norm; ``float("inf")`` is the largest absolute value.
            error_if_nonfinite: whether a norm that is infinite or ``nan`` is an error.

        Returns:
            The norm before scaling, the same on every rank.
        """
        return self.weights.clip_grad_norm_(
            max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )

    # ---- hooks, and the end

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
            before: called when all that the action needs has arrived; for a receive, when it is posted.
            after: called when the action is done; for a receive, when its message is taken.

        Returns:
            A handle that removes the functions, by ``remove()`` or at the end of a ``with`` block.
        """
        return self.engine.hooks.add(before, after, which)

    def on_overlap(self, function: OverlapFunction) -> HookHandle:
        """Let a function run the overlapped pairs of this process (``OVERLAP_F_B``) in training steps.

        Without one, a pair of an F and a B is run by the method ``overlapped_forward_backward`` of the module
        of the stage that runs the F, if it has one and is neither wrapped in DistributedDataParallel nor
        sharded by FSDP; else, and where the backward is an I, F runs first, then the backward. See
        docs/schedules.md. For layers that communicate there is :func:`penstock.overlap_collectives`.

        Args:
            function: called with a :class:`~penstock.PairForward` and a :class:`~penstock.PairBackward`. It
                must compute the output of the forward, run the backward from ``outputs`` with
                ``output_grads``, which adds to the weights' ``.grad``, and return the output and the
                gradients of ``inputs``: a list with one of the same shape and type, or None, for each. A
                later function takes precedence.

        Returns:
            A handle that removes the function, by ``remove()`` or at the end of a ``with`` block.

        Raises:
            UsageError: it cannot be called.
        """
        if not callable(function):
            raise UsageError(
                f"on_overlap got a {type(function).__name__}; give it a function of a PairForward and a "
                "PairBackward"
            )
        handle = HookHandle(self.engine.overlaps)
        self.engine.overlaps[handle] = function
        return handle

    def on_step(
        self, after: StepHook | None = None, *, before: StepHook | None = None
    ) -> HookHandle:
        """Call functions after and before each training step of this process.

        They get a :class:`~penstock.StepEvent`: the number of the step, its result, and its time and
        memory. The optimizer has not stepped yet when they are called. An exception in a function is raised
        by :meth:`step`.

        Args:
            after: called when the step is done. If it has a method ``before``, that is called before it.
            before: called when the step is about to begin.

        Returns:
            A handle that removes the functions, by ``remove()`` or at the end of a ``with`` block.
        """
        return self._step_hooks.add(before or getattr(after, "before", None), after)

    def close(self, error: BaseException | None = None) -> None:
        """Release what the transport holds, and end the process group if this Pipeline started it.

        Args:
            error: the reason, if it is an error; the other ranks then stop because of it.
        """
        # An error after close(), in a with block that closes again, is not the pipeline's failure.
        if error is None:
            self._look_at_last()
        transport = self._job.transport
        if self._closed or transport is None:
            return
        self._closed = True
        if error is not None and self._job.usable:
            self._job.fail(error)
        transport.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)
