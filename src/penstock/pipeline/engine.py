"""The engine of a pipeline: carries out its calls, each from its arguments to its result."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from difflib import get_close_matches
from functools import partial, wraps
from operator import attrgetter
from time import perf_counter
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn

from penstock._engine.microbatches import (
    MISSING,
    Batch,
    KnownCuts,
    image_tokens,
    output_rule,
    rules_with_images,
    sliced,
    split_batch,
)
from penstock._engine.rng import Randomness, generator_states, generators_kept
from penstock._engine.runtime import (
    MAIN,
    ActionEvent,
    Call,
    HookHandle,
    Hooks,
    LossScaler,
    LossWeight,
    Runner,
    StepCost,
    StepLoss,
    StepResult,
    StepState,
    TotalWeight,
    advice,
    differ,
)
from penstock._engine.transport import Job
from penstock.errors import StageError, UsageError
from penstock.partition import Partition, Shared, state_kept
from penstock.pipeline.default_loss import LossInside
from penstock.pipeline.nonfinite import NonFiniteFinding, find_nonfinite
from penstock.pipeline.outputs import Outputs, product
from penstock.pipeline.plan import ProvenSchedules
from penstock.pipeline.settings import Settings
from penstock.pipeline.setup import check_shared, check_spread, warn_of_batch_norms
from penstock.pipeline.slowness import Slowness
from penstock.pipeline.uncut import UncutModel
from penstock.pipeline.watching import peak_flops, peak_memory
from penstock.pipeline.weights import ModelWeights
from penstock.schedule import Action
from penstock.schedule.base import whole_number
from penstock.stage import OverlapFunction, PipelineStage

logger = logging.getLogger("penstock")


_IN_THIS_PROCESS = threading.RLock()
"""Held by the calls of pipelines that live in one process: they seed and draw from the same generators."""
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _in_turn(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Mark a call of an engine, which waits for those of other threads; see :meth:`Engine.turn`."""

    @wraps(method)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        engine: Any = args[0]
        with engine.turn():
            return method(*args, **kwargs)

    return called


class CallArguments(NamedTuple):
    """The arguments of a user's call of a pipeline.

    Attributes:
        args: the model's arguments by position.
        kwargs: the model's arguments by name.
        target: the target of the loss.
        microbatches: their number, if it is not that of the pipeline.
        same_batch: whether every rank must be given the same batch; None: what several ranks are given is
            compared now and then.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    target: Any = MISSING
    microbatches: int | None = None
    same_batch: bool | None = None


NO_ARGUMENTS = CallArguments((), {})


class Engine:
    """Carries out the calls of a pipeline, each from its arguments to its result; ``pipe.engine``.

    Calls from several threads take turns, see :meth:`turn`.

    :class:`~penstock.Pipeline` is what users see of it. The packages above, with loops of other libraries or
    of the user's own, call it for what no user of a Pipeline does. All ranks make each call together; an
    error in one rank's arguments is raised on all of them, and none begins.

    Args:
        settings: what the user said when the pipeline was made.
        schedules: the schedules that there are.
        job: this process among the others.
        seed: what random numbers are drawn from, see :class:`Randomness`.
        step_names: the names of the arguments of a step, for hints.

    Attributes:
        loss: the loss of the pipeline, if it has one.
        weights: the weights of the model.
        model: the model, of which this process has the stages alone once it is cut; None without one.
        uncut: the model, while it waits for its cut.
        partition: how the model was cut, if it was.
        stages: the stages of this process, in order; none before the cut.
        hooks: the user's functions around actions.
        overlaps: the user's functions that run overlapped pairs; the last one counts.
        randomness: the seed of random numbers, and the number of the next step.
        averages: False while steps leave gradients to each replica, see :meth:`Pipeline.no_sync`.
        apart: whether results have :class:`Outputs` rather than what these are put together.
    """

    def __init__(
        self,
        settings: Settings,
        schedules: ProvenSchedules,
        job: Job,
        seed: Any,
        step_names: Iterable[str],
    ) -> None:
        self.loss, self._rules = settings.loss, settings.rules
        self._job, self._schedules, self._step_names = job, schedules, tuple(step_names)
        self._runner = Runner(schedules.proven, job, settings.home)
        self._slowness = Slowness(schedules, job)
        self.weights = ModelWeights(job)
        self.model: nn.Module | None = None
        self.uncut: UncutModel | None = None
        self.partition: Partition | None = None
        self.stages: tuple[PipelineStage, ...] = ()
        self.hooks = Hooks(ActionEvent)
        self.overlaps: dict[HookHandle, OverlapFunction] = {}
        self.randomness = Randomness(seed)
        self._last_seed: tuple[int, int] | None = None
        self.averages = True
        self.apart = False
        self._lock = threading.RLock()
        self._depth = 0
        self._flowing: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._image_tokens: dict[str, int] = {}
        self._cuts: KnownCuts = {}

    # ---- the model, and the stages that it is cut into

    def take_model(self, settings: Settings) -> None:
        """Take a model; cut it now if that needs neither a call nor weights, and by the first call else."""
        uncut = UncutModel(settings, self._schedules, self._job, self._take_cut)
        self.uncut, self.model = uncut, uncut.model
        self._image_tokens = image_tokens(uncut.model)
        self.weights.wait(uncut)
        if not (uncut.needs_call or uncut.is_bare):
            uncut.cut_now()

    def _take_cut(self, stages: Sequence[PipelineStage], partition: Partition) -> None:
        self.partition = partition
        if partition.planner is None:
            self.model = None
        self.take_stages(stages, partition.shared)

    def take_stages(self, stages: Sequence[PipelineStage], shared: Sequence[Shared]) -> None:
        """Take the stages of this process, and check that they fit those of the others.

        Args:
            stages: the stages.
            shared: the table of weights that stages share.
        """
        self._runner.hold(stages)
        self.stages = tuple(sorted(stages, key=attrgetter("index")))
        weighted = self.loss is not None and self.loss.weight is not None
        check_spread(self.stages, self._job, weighted=weighted)
        check_shared(self.stages, shared, self._job)
        rank_of = self._schedules.training.placement.rank_of
        self.weights.hold(self.stages, shared, rank_of, self.model)
        self.uncut = None

    @property
    def device(self) -> torch.device:
        """The device of this process's stages."""
        return self.stages[0].device if self.uncut is None else self.uncut.device

    @property
    def stopping(self) -> bool:
        """True if the job stops now, as the last training step has found out."""
        return self._runner.stopping

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context in evaluation mode, which restores each module's own mode."""
        uncut = self.uncut
        if uncut is not None:
            roots, modules = [uncut.model], list(uncut.model.modules())
        else:
            roots = [stage.module for stage in self.stages]
            modules = [m for stage in self.stages for m in stage.called_modules()]
        modes = [(module, module.training) for module in modules]
        for root in roots:
            root.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            if uncut is not None:
                # Stages that were made in here.
                for stage in self.stages:
                    stage.follow_mode(training=uncut.model.training)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A context around a call, in which the calls of other threads wait.

        Those of other pipelines wait too, unless pipelines have other processes, which call in an order of
        their own.

        After it, gradients of the batch flow on into the caller's graph: autograd may run that, and a call in
        it, in other threads.
        """
        with self._lock if self._job.transport is not None else _IN_THIS_PROCESS:
            self._depth += 1
            try:
                yield
            except BaseException:
                self._flowing.clear()
                raise
            finally:
                self._depth -= 1
            if self._depth:
                return
            flowing, self._flowing = self._flowing, []
        if flowing:
            # In one pass: the tensors may share parts of the caller's graph, which a backward frees.
            tensors, gradients = zip(*flowing, strict=True)
            torch.autograd.backward(tensors, gradients)

    # ---- what users of a Pipeline call

    def arguments(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        model_kwargs: Mapping[str, Any] | None = None,
        *,
        target: Any = MISSING,
        microbatches: int | None = None,
        same_batch: bool | None = None,
    ) -> CallArguments:
        """The arguments of a call.

        The keyword arguments of the model are those in both dicts. The target, if it is not given, is the
        argument of the model that the loss names.

        Raises:
            UsageError: a name is in both dicts.
        """
        more = {} if model_kwargs is None else model_kwargs
        if not isinstance(more, Mapping):
            raise UsageError(
                f"model_kwargs is a {type(more).__name__}; it must be a dict of the model's arguments by name"
            )
        if both := sorted(kwargs.keys() & more.keys()):
            raise UsageError(
                f"{', '.join(both)} given by name and in model_kwargs=; give each once"
            )
        named = {**kwargs, **more}
        if target is None:
            target = MISSING  # a placeholder: a loss that needs no target gets None without one too
        name = None if self.loss is None else self.loss.target
        if name is not None and target is MISSING:
            target = named.get(name, MISSING)
        return CallArguments(args, named, target, microbatches, same_batch)

    def step(
        self,
        arguments: CallArguments,
        *,
        loss_weight: LossWeight | None = None,
        total_weight: TotalWeight | None = None,
        accumulate: int | None = None,
        scaler: LossScaler | None = None,
        outputs: bool = False,
        record: bool = False,
    ) -> StepResult:
        """Run forward and backward of a batch in a :meth:`turn`; add gradients to the weights' ``.grad``.

        The arguments are those of :meth:`Pipeline.step <penstock.Pipeline.step>`.
        """
        started, number = perf_counter(), self.randomness.step
        seed = self._drawn_from(number)
        # A loss scaler lets gradients become infinite on purpose, and checks them itself.
        call = Call(
            outputs=outputs, record=record, seed=seed, hooks=self.hooks or None,
            finite=scaler is None, finalizes=self.averages, settings=self.weights.shared_settings,
            overlap=next(reversed(self.overlaps.values()), None),
        )  # fmt: skip
        with call.refusing():
            self._bring(call, arguments)
            factor = 1.0 if scaler is None else self._attach(scaler)
            call.loss = self.training_loss.in_step(loss_weight, accumulate, total_weight, factor)
            if loss_weight is not None:
                check_spread(self.stages, self._job, weighted=True)
            self._schedules.check_trains(call.batch.count)
        step = self._run(call, arguments)
        self._flowing += step.batch_gradients
        self.weights.leave_gradients(averaged=call.finalizes or step.adapters is None)
        if self._job.steps == 1:
            self._check_losses_inside(step, arguments)
        if not number and self._job.is_first_pipeline:
            warn_of_batch_norms(self.stages, step.agreement.model_call.count)
        self._last_seed = seed
        self.randomness.advance()
        result = self._result(step, started)
        if scaler is None:
            return result
        numbers = result.read
        return replace(result, read=lambda: numbers()._replace(finite=True))

    @_in_turn
    def evaluate(self, arguments: CallArguments, *, outputs: bool) -> StepResult:
        """Compute the loss of a batch in evaluation mode.

        Raises:
            UsageError: there is no loss.
        """
        if self.loss is None:
            raise UsageError(
                "evaluate needs a loss; make the Pipeline with loss_fn=, or use predict"
            )
        return self._in_evaluation(arguments, self.loss, outputs=outputs)

    @_in_turn
    def predict(self, arguments: CallArguments) -> Any:
        """Compute the output for a batch in evaluation mode, on every rank."""
        return self._in_evaluation(arguments, None, outputs=True).outputs

    @_in_turn
    def cut(self, arguments: CallArguments) -> None:
        """Cut the model by a batch, if that is still to be done."""
        if self.uncut is not None:
            call = Call(trains=torch.is_grad_enabled())
            with call.refusing():
                self._bring(call, arguments, runs=False)
            self._cut_by(call)

    @_in_turn
    def find_nonfinite(self, arguments: CallArguments) -> NonFiniteFinding | None:
        """Run a batch once more, as the last step ran it, to find the first non-finite value."""
        call = Call(seed=self._last_seed, finite=True)
        with call.refusing():
            self._bring(call, arguments)
            call.loss = self.training_loss.in_step()
            if self._runner.holds_gradients:
                raise UsageError(
                    "find_nonfinite after a step inside pipe.no_sync() would lose the gradients that "
                    "fully_shard keeps of it; call pipe.zero_grad() before, or search after a step outside"
                )

        self._cut_by(call)

        # Called where gradients are restored afterwards: shared weights get theirs when the context ends.
        def run(hooks: Hooks) -> StepState:
            return self._run(replace(call, hooks=hooks), arguments)

        return find_nonfinite(self.stages, self._schedules.training, self._job, run)

    def zero_grad(self) -> None:
        """Drop all gradients; one rank may call it alone."""
        self.weights.zero_grad()
        self._runner.drop_gradients()

    # ---- what the loops of other libraries need

    @contextmanager
    def outputs_apart(self) -> Iterator[None]:
        """A context in which calls give :class:`~penstock.pipeline.outputs.Outputs`."""
        before, self.apart = self.apart, True
        try:
            yield
        finally:
            self.apart = before

    @_in_turn
    def forward(self, arguments: CallArguments) -> Any:
        """Compute the output for a batch as a training step does, on every rank.

        Modules run in their own modes, and draw the random numbers of the next step. :meth:`backward`
        computes the gradients.
        """
        started, seed = perf_counter(), self._drawn_from(self.randomness.step)
        call = Call(trains=False, outputs=True, seed=seed, hooks=self.hooks or None)
        with call.refusing():
            self._bring(call, arguments)
        step = self._run(call, arguments)
        return self._result(step, started).outputs

    @_in_turn
    def backward(
        self,
        gradients: Sequence[Sequence[torch.Tensor | None]],
        arguments: CallArguments,
        number: int | None = None,
    ) -> None:
        """Add to ``.grad`` what gradients of a batch's outputs make of it, by a whole step.

        Args:
            gradients: for each microbatch, a list of the gradients of the tensors in its output, in order,
                the same on every rank; None where there is none.
            arguments: those of :meth:`forward`.
            number: the number of the step whose random numbers the forward drew.
        """
        replicas = self._job.replicas
        share = 1.0 / replicas.number if replicas.averaged else 1.0
        loss = StepLoss(product, reduction="sum", check=False, replicas=replicas, factor=share)
        call = Call(loss=loss, seed=None if number is None else self._drawn_from(number))
        # Each rank may have computed the gradients by itself.
        arguments = arguments._replace(same_batch=False)
        # Autograd calls this without gradients, and parts of inputs need a graph.
        with torch.enable_grad(), call.refusing():
            self._bring(call, arguments)
            self._schedules.check_trains(call.batch.count)
            call.batch = replace(call.batch, targets=gradients, look=None)
        self._flowing += self._run(call, arguments).batch_gradients

    @_in_turn
    def perform(self, call: Call) -> StepState:
        """Carry out a call described by hand."""
        with call.refusing():
            self._check_ready()
        step = self._run(call)
        self._flowing += step.batch_gradients
        return step

    @contextmanager
    def driven(self, call: Call) -> Iterator[tuple[StepState, Callable[[Action], None]]]:
        """A context like :meth:`perform`, in which the caller runs the actions, in any order of its own.

        Yields:
            The state of the call, and a function that runs an action.
        """
        with self.turn():
            with call.refusing():
                self._check_ready()
            sharing = self.weights.in_step() if call.trains else nullcontext()
            with sharing, self._runner.driven(call) as (step, perform):
                yield step, perform
            self._flowing += step.batch_gradients

    # ---- a call

    @property
    def training_loss(self) -> StepLoss:
        """The loss of a training step.

        Raises:
            UsageError: there is none, or the pipeline cannot train.
        """
        if self.loss is None:
            raise UsageError("step needs a loss; make the Pipeline with loss_fn=")
        if not self._schedules.training.trains:
            raise UsageError(
                f"the schedule {self._schedules.training.name!r} has no backward, so it cannot train; "
                "use evaluate, or choose a schedule with a backward"
            )
        if not torch.is_grad_enabled():
            mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
            raise UsageError(
                f"step needs gradients, and under torch.{mode}() there are none; call it outside, "
                "or use evaluate"
            )
        return self.loss

    def _drawn_from(self, number: int) -> tuple[int, int] | None:
        """Return what a step draws its random numbers from; None for torch's generators."""
        seed = self.randomness.seed
        return None if seed == "off" else (seed, number)

    def _attach(self, scaler: LossScaler) -> float:
        """The factor of a loss scaler, which from now on decides together with the other ranks."""
        if not isinstance(scaler, LossScaler):
            raise UsageError(
                f"scaler={type(scaler).__name__}: must be a penstock.LossScaler, a torch.amp.GradScaler that "
                "decides for all ranks together whether to skip a step"
            )
        return scaler.attach(self._job.sum)

    def _in_evaluation(
        self, arguments: CallArguments, loss: StepLoss | None, *, outputs: bool
    ) -> StepResult:
        started = perf_counter()
        call = Call(loss=loss, trains=False, outputs=outputs, hooks=self.hooks or None)
        with call.refusing():
            self._bring(call, arguments)
        with self.evaluating():
            step = self._run(call, arguments)
        return self._result(step, started)

    def _check_ready(self) -> None:
        """Check that the stages can run."""
        if self.partition is not None:
            self.partition.check_unchanged()
        self.weights.check_filled()

    def _bring(self, call: Call, arguments: CallArguments, *, runs: bool = True) -> None:
        """Give a call its batch.

        Args:
            call: the call, which is being completed.
            arguments: what the user called the pipeline with.
            runs: whether stages will run, so that their weights must have memory.
        """
        if runs:
            self._check_ready()
        if call.outputs:
            output_rule(self._rules)
        call.batch, call.same_batch = self._split(arguments), arguments.same_batch
        if self._schedules.slices > 1:
            call.slices = self._schedules.slices
            call.batch = sliced(call.batch, call.slices) if call.trains else call.batch

    def _split(self, arguments: CallArguments) -> Batch:
        """The arguments, split into microbatches."""
        args, kwargs, target, microbatches, _ = arguments
        count = self._schedules.microbatches
        if microbatches is not None:
            count = whole_number("microbatches", microbatches)
        rules = self._rules
        if kwargs:
            rules = rules_with_images(rules, kwargs, self._image_tokens)
        known = self._cuts if rules is self._rules else None  # others are of this batch alone
        return split_batch(args, kwargs, target, rules, count, fewer=True, known=known)

    def _run(self, call: Call, arguments: CallArguments = NO_ARGUMENTS) -> StepState:
        """Carry out a call that was described by all ranks.

        Args:
            call: the call.
            arguments: what the user called the pipeline with, for hints.
        """
        try:
            self._cut_by(call)
            with self.weights.in_step() if call.trains else nullcontext():
                return self._runner.run(call)
        except StageError as error:
            raise self._explained(error, call, arguments) from error.__cause__

    def _cut_by(self, call: Call) -> None:
        """Cut the model by what a call brings, if that is still to be done."""
        if self.uncut is not None:
            self._runner.cut_by(call, self.uncut.agree, self.uncut.take_stages)

    def _explained(self, error: StageError, call: Call, arguments: CallArguments) -> StageError:
        """The error, with a hint if the model refused an argument meant for the step."""
        for name in arguments.kwargs:
            near = get_close_matches(name, self._step_names, n=1)
            if near and f"unexpected keyword argument {name!r}" in str(error):
                hint = "step alone takes it" if near[0] == name else f"did you mean {near[0]}=?"
                error.args = (f"{error}; {hint}",)
        if call.loss and arguments.target is MISSING and " positional argument" in str(error):
            error.args = (f"{error}; the target is given by name, as target=",)
        return error

    # ---- after a call

    def _result(self, step: StepState, started: float) -> StepResult:
        """The user's result of a call that began at a time of ``perf_counter``."""
        seconds = perf_counter() - started
        outputs: Any = None
        if step.call.outputs:
            model_call, rule, ways = step.agreement.model_call, None, None
            if not model_call.presplit:
                rule = output_rule(self._rules, packed=model_call.dim is not None)
                ways = model_call.ways
            outputs = Outputs(step.shared, rule, ways)
            if not self.apart:
                function = None if step.call.loss is None else step.call.loss.function
                if isinstance(function, LossInside):
                    rule = function.with_loss(rule, step.weights.counts)
                outputs = outputs.joined(step.shared, rule)
        device = self.device
        autocast = None
        if torch.is_autocast_enabled(device.type):
            autocast = torch.get_autocast_dtype(device.type)
        devices = 1 if self._job.transport is None else self._schedules.ranks
        memory, peak = partial(peak_memory, device), partial(self._peak, autocast)
        cost = StepCost(seconds, devices, memory, step.flops, peak)
        result = replace(step.result, outputs=outputs, cost=cost)
        if not step.call.record:
            return result
        timeline, kind, slow = self._slowness.note(step)
        return replace(
            result, timeline=timeline, timeline_kind=kind, bubble=timeline.bubble, slow=slow
        )

    def _peak(self, autocast: torch.dtype | None) -> float | None:
        """The device's peak operations per second, in the type of autocast or of the weights."""
        types = (p.dtype for stage in self.stages for p in stage.module.parameters())
        return peak_flops(self.device, autocast or next(types, torch.get_default_dtype()))

    # ---- losses that the model's forward computes, or adds

    def _check_losses_inside(self, step: StepState, arguments: CallArguments) -> None:
        """Check losses that the model's forward computes or adds, after the first step.

        Raises:
            UsageError: the main one is not what it says, or an added one with a weight of its own.
        """
        loss, model_call = step.call.loss, step.agreement.model_call
        if loss is None:
            return
        if loss.check and not self._job.rank:
            loss.warn_of_unknown(step.result.losses)
        weighs = any(isinstance(weight, Sequence) for weight in loss.weights.values())
        if not loss.check or weighs or model_call.presplit or model_call.count == 1:
            return
        names = {name for name in step.result.losses if not loss.is_by_custom(name)} - {MAIN}
        if any(self._told(self._runner.interpreter.has_loss_inside)):
            names.add(MAIN)
        apart = self.check_in_halves(loss, arguments, names) if names else {}
        for name, values in sorted(apart.items()):
            text = remedy_of_added(loss, name, *values)
            if name in loss.weights:
                raise UsageError(text)
            if not self._job.rank:
                logger.warning("penstock: %s", text)

    @_in_turn
    def check_in_halves(
        self,
        loss: StepLoss | None,
        arguments: CallArguments,
        names: Collection[str] | None = None,
    ) -> dict[str, tuple[float, float]]:
        """Check that the first microbatch has the losses of its halves; all ranks call this.

        Without a loss, it is that of the pipeline.

        Dropouts and batch norms are in evaluation mode, and buffers keep their numbers. A loss that draws
        random numbers is let be, and so is one that is another one when it is computed again.

        Returns:
            Both values of each loss that the model adds and that is not the same, by name; of all of them,
            or of those that are named.

        Raises:
            UsageError: the main loss is not the same.
        """
        loss = self.loss if loss is None else loss
        batch = self._split(arguments)
        first, device = arguments._replace(same_batch=False), self.device
        if batch.parts:
            part = batch.parts[0]
            first = first._replace(args=part.args, kwargs={**part.kwargs, **part.local})
        if batch.targets:
            first = first._replace(target=batch.targets[0])

        def evaluate(microbatches: int) -> tuple[Mapping[str, float], int]:
            brought = first._replace(microbatches=microbatches)
            call = Call(loss=loss, trains=False)
            with call.refusing():
                self._bring(call, brought)
            step = self._run(call, brought)
            return step.result.losses, step.agreement.model_call.count

        modules = [module for stage in self.stages for module in stage.called_modules()]
        settled = [m for m in modules if m.training and _is_restless(m)]
        coarse = torch.is_autocast_enabled(device.type) or any(
            p.dtype in (torch.float16, torch.bfloat16) for m in modules for p in m.parameters()
        )
        before = generator_states([device])
        try:
            for module in settled:
                module.training = False
            with state_kept(modules), generators_kept([device]):
                (halves, count), (whole, _) = evaluate(2), evaluate(1)
                drew = not all(map(torch.equal, before, generator_states([device])))
                drawn, coarses = zip(*self._told([drew, coarse]), strict=True)
                kind = torch.bfloat16 if any(coarses) else torch.float32

                def unlike(other: Mapping[str, float], known: Iterable[str]) -> list[str]:
                    sizes = {name: max(abs(other[name]), abs(halves[name])) for name in known}
                    return [n for n, of in sizes.items() if differ(other[n], halves[n], of, kind)]

                known = halves.keys() & whole.keys()
                apart = unlike(whole, known if names is None else known & {*names})
                if not apart or count < 2 or any(drawn):
                    return {}
                changing = unlike(evaluate(2)[0], apart)
        except StageError as error:
            error.add_note(
                "this was the check of the loss; penstock.Loss(..., check=False) leaves it out"
            )
            raise
        finally:
            for module in settled:
                module.training = True
        both = {name: (whole[name], halves[name]) for name in apart if name not in changing}
        if MAIN in both:
            a, b = both[MAIN]
            looks = None if differ(a, 2 * b, abs(a), kind) else "sum"
            raise UsageError(
                f"the loss of the first microbatch is {a:.6g}, but {b:.6g} as the mean of its halves, "
                + advice(
                    looks, 'compute it in loss_fn, from outputs of the model, with over="batch"'
                )
            )
        return both

    def _told(self, value: Any) -> list[Any]:
        """The JSON values of all ranks."""
        values: list[Any] = self._job.meet(lambda: value, among=self._job.pipeline)
        return values


def _is_restless(module: nn.Module) -> bool:
    """Return whether a module is a dropout or a batch norm."""
    files = {base.__module__ for base in type(module).__mro__}
    return not files.isdisjoint({"torch.nn.modules.dropout", "torch.nn.modules.batchnorm"})


def remedy_of_added(loss: StepLoss, name: str, whole: float, halves: float) -> str:
    """Return what to say of an added loss of the first microbatch that is not that of its halves."""
    differs = (
        f"the added loss {name!r} of the first microbatch is {whole:.6g}, but {halves:.6g} as the mean of "
        "its halves"
    )
    if name in loss.weights:
        return (
            f"{differs}, so the weight of {name!r} does not count what it is a mean over; give a function of "
            "the target that does"
        )
    main = "" if loss.weights[MAIN] is None else f"{MAIN!r}: ..., "
    return (
        f"{differs}, as it counts by the weights of the loss. If it is a mean over something else, such as "
        f"other tokens, say weight={{{main}{name!r}: a function of the target that counts them}}; if it "
        "is one of each microbatch by itself, such as a balance of experts, say "
        f'weight={{{main}{name!r}: "microbatch"}}, in penstock.Loss or as loss_weight= of the step'
    )
