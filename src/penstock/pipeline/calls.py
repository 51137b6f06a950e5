"""The calls of a pipeline: described by each rank, carried out by all of them, and what comes of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock._engine.faults import without_library_frames
from penstock._engine.microbatches import (
    MISSING,
    Batch,
    Rules,
    image_tokens,
    output_rule,
    rules_with_images,
    split_batch,
)
from penstock._engine.rng import generator_states, generators_kept
from penstock._engine.runtime import (
    MAIN,
    Call,
    Runner,
    StepCost,
    StepLoss,
    StepResult,
    StepState,
    advice,
    differ,
)
from penstock.errors import PenstockError, StageError, UsageError
from penstock.pipeline.default_loss import LossInside
from penstock.pipeline.holding import HeldModel
from penstock.pipeline.outputs import Outputs
from penstock.pipeline.plan import ProvenSchedules
from penstock.pipeline.slowness import Slowness
from penstock.pipeline.watching import peak_flops, peak_memory
from penstock.schedule import Action
from penstock.schedule.base import whole_number

logger = logging.getLogger("penstock")


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


class PipelineCalls:
    """Carries out the calls of a pipeline.

    A method of the pipeline begins with a :class:`Call` that says what it is to do. :meth:`described` adds
    the batch, or the error in the user's arguments, which all ranks then raise.

    Args:
        runner: carries them out for the ranks of this process.
        schedules: the schedules that there are.
        held: the model, or the stages, in this process.
        rules: how batches are split.
        slowness: learns of recorded steps.
        step_names: the names of the arguments of a step, for hints.

    Attributes:
        apart: whether results have :class:`Outputs` rather than what these are put together.
    """

    def __init__(
        self,
        runner: Runner,
        schedules: ProvenSchedules,
        held: HeldModel,
        rules: Rules | None,
        slowness: Slowness,
        step_names: Iterable[str],
    ) -> None:
        self._runner, self._job, self._schedules, self._held = runner, runner.job, schedules, held
        self._rules, self._slowness = rules, slowness
        self._step_names = tuple(step_names)
        self.apart = False
        self._image_tokens = {} if held.model is None else image_tokens(held.model)

    # ---- before a call

    def described(
        self,
        call: Call,
        arguments: CallArguments | None,
        complete: Callable[[Call], Call] | None = None,
        *,
        runs: bool = True,
    ) -> Call:
        """A call with its batch; or, if the arguments are wrong, with the error for all ranks.

        Args:
            call: what is to be done.
            arguments: what the user called the pipeline with, if they make the batch.
            complete: adds what depends on the batch or on other arguments, and raises if they are wrong.
            runs: whether stages will run, so that their weights must have memory.
        """
        self._job.check_usable()
        try:
            if self._held.partition is not None:
                self._held.partition.check_unchanged()
            if runs:
                self._held.weights.check_filled()
            whole = call if arguments is None else self._with_batch(call, arguments)
            return whole if complete is None else complete(whole)
        except PenstockError as error:
            refusal = error
        except Exception as error:
            # The user's own functions may split and weigh batches.
            refusal = before_first(error)
        return replace(call, refusal=refusal)

    def _with_batch(self, call: Call, arguments: CallArguments) -> Call:
        """A call with the arguments, split into microbatches."""
        args, kwargs, target, microbatches, same_batch = arguments
        if call.outputs:
            output_rule(self._rules)
        count = whole_number("microbatches", microbatches)
        count = self._schedules.microbatches if count is None else count
        rules = self._rules
        if kwargs:
            rules = rules_with_images(rules, kwargs, self._image_tokens)
        batch = split_batch(args, kwargs, target, rules, count, fewer=True)
        return replace(call, batch=batch, same_batch=same_batch)

    # ---- a call

    def run(self, call: Call, arguments: CallArguments = NO_ARGUMENTS) -> StepState:
        """Carry out a call that was described by all ranks.

        Gradients of the batch wait in the state; see :func:`flowed_back`.

        Args:
            call: the call.
            arguments: what the user called the pipeline with, for hints.
        """
        held = self._held
        try:
            if held.uncut is not None:
                self._runner.cut_by(held.uncut, call)
            if call.trains:
                held.stage_weights.prepare()
            step = self._runner.run(call)
        except StageError as error:
            raise self._explained(error, call, arguments) from error.__cause__
        if call.trains:
            held.stage_weights.finish()
        return step

    @contextmanager
    def driven(self, call: Call) -> Iterator[tuple[StepState, Callable[[Action], None]]]:
        """A context like :meth:`run`, in which the caller runs the actions, in any order of its own.

        Yields:
            The state of the call, and a function that runs an action.
        """
        weights = self._held.stage_weights
        if call.trains:
            weights.prepare()
        with self._runner.driven(call) as state_and_perform:
            yield state_and_perform
        if call.trains:
            weights.finish()
        flowed_back(state_and_perform[0])

    def evaluate(self, call: Call, arguments: CallArguments) -> StepResult:
        """Carry out a call in evaluation mode."""
        started = perf_counter()
        call = self.described(call, arguments)
        with self._held.evaluating():
            step = self.run(call, arguments)
        return self.result(step, started)

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

    def result(self, step: StepState, started: float) -> StepResult:
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
        device = self._held.device
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
        types = (p.dtype for stage in self._held.stages for p in stage.module.parameters())
        return peak_flops(self._held.device, autocast or next(types, torch.get_default_dtype()))

    # ---- losses that the model's forward computes, or adds

    def check_losses_inside(self, step: StepState, arguments: CallArguments) -> None:
        """After the first step: check losses that the model's forward computes or adds.

        Raises:
            UsageError: the main one is not what it says, or an added one with a weight of its own.
        """
        loss, model_call = step.call.loss, step.agreement.model_call
        if loss is None or self._job.steps > 1:
            return
        if not self._job.rank:
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

    def check_in_halves(
        self,
        loss: StepLoss | None,
        arguments: CallArguments,
        names: Collection[str] | None = None,
    ) -> dict[str, tuple[float, float]]:
        """Check that the first microbatch has the losses of its halves; all ranks call this.

        Dropouts and batch norms are in evaluation mode, and buffers keep their numbers. A loss that draws
        random numbers is let be, and so is one that is another one when it is computed again.

        Returns:
            Both values of each loss that the model adds and that is not the same, by name; of all of them,
            or of those that are named.

        Raises:
            UsageError: the main loss is not the same.
        """
        batch = self._with_batch(Call(Batch()), arguments).batch
        first, device = arguments._replace(same_batch=False), self._held.device
        if batch.parts:
            part = batch.parts[0]
            first = first._replace(args=part.args, kwargs={**part.kwargs, **part.local})
        if batch.targets:
            first = first._replace(target=batch.targets[0])

        def evaluate(microbatches: int) -> tuple[Mapping[str, float], int]:
            brought = first._replace(microbatches=microbatches)
            call = self.described(Call(Batch(), loss, trains=False), brought)
            step = self.run(call, brought)
            return step.result.losses, step.agreement.model_call.count

        modules = [module for stage in self._held.stages for module in stage.called_modules()]
        settled = [m for m in modules if m.training and _is_restless(m)]
        buffers = [b for m in modules for b in m.buffers(recurse=False) if not b.is_meta]
        kept = [buffer.clone() for buffer in buffers]
        coarse = torch.is_autocast_enabled(device.type) or any(
            p.dtype in (torch.float16, torch.bfloat16) for m in modules for p in m.parameters()
        )
        before = generator_states([device])
        try:
            for module in settled:
                module.training = False
            with generators_kept([device]):
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
            with torch.no_grad():
                for buffer, numbers in zip(buffers, kept, strict=True):
                    buffer.copy_(numbers)
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
    """What to say of an added loss of the first microbatch that is not that of its halves."""
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


def flowed_back(step: StepState) -> StepState:
    """A step whose gradients of the batch have flowed on into the caller's tensors."""
    if step.batch_gradients:
        # In one pass: the tensors may share parts of the caller's graph, which a backward frees.
        tensors, gradients = zip(*step.batch_gradients, strict=True)
        torch.autograd.backward(tensors, gradients)
    return step


def before_first(error: Exception) -> StageError:
    """The error that every rank raises if the user's code fails before the first microbatch."""
    refusal = StageError(f"before the first microbatch: {type(error).__name__}: {error}")
    refusal.__cause__ = error.with_traceback(without_library_frames(error))
    return refusal
