"""The calls of a pipeline: steps, evaluations, predictions, and the search for values that are not finite."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import NonFiniteError, PenstockError, StageError, UsageError
from penstock.faults import without_own_frames
from penstock.pipeline.plan import Plan
from penstock.pipeline.ranks import LocalRanks
from penstock.rng import Draw, OwnHook, Randomness
from penstock.runtime import Call, Hooks, Rank, Report
from penstock.runtime.instrumentation import OUTPUT, Spot, Trouble
from penstock.schedule import Schedule
from penstock.schedule.base import Edges, whole_number
from penstock.stage import PipelineStage
from penstock.step import Loss, LossScaler, LossWeight, NonFinite, StepResult
from penstock.values import (
    MISSING,
    Batch,
    Rules,
    flatten,
    merge,
    output_dim,
    split_batch,
    uncompiled,
)

logger = logging.getLogger("penstock")


_OPTIONS = (
    "target",
    "microbatches",
    "loss_weight",
    "total_weight",
    "accumulate",
    "scaler",
    "outputs",
    "record",
)
"""The step's own arguments; all other keyword arguments are the model's."""


class Given(NamedTuple):
    """What the user gives to a call: the model's arguments by position and by name, and the target."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    target: Any


class Caller:
    """Makes calls of what the user gives, has them carried out, and returns their results.

    Args:
        plan: which schedules there are.
        local: the ranks of this process.
        loss: what the Pipeline was told about its loss.
        rules: how batches are split.
        hooks: the user's hooks on actions.
        training: a context around every training step.
    """

    def __init__(
        self,
        plan: Plan,
        local: LocalRanks,
        loss: Loss | None,
        rules: Rules | None,
        hooks: Hooks,
        training: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._plan = plan
        self._local = local
        self._loss = loss
        self._rules = rules
        self._hooks = hooks
        self._training = training

    def step(  # noqa: PLR0913 - as Pipeline.step
        self,
        given: Given,
        randomness: Randomness,
        *,
        whole_batch: bool,
        microbatches: int | None,
        loss_weight: LossWeight | None,
        total_weight: float | None,
        accumulate: int | None,
        scaler: LossScaler | None,
        outputs: bool,
        record: bool,
    ) -> StepResult:
        """A training step, see :meth:`penstock.Pipeline.step`."""

        def made() -> Call:
            loss = self._training_loss().weighed(loss_weight)
            scale = loss.scale(accumulate, total_weight, _attached(scaler, self._is_anywhere))
            batch = self._batch(given, microbatches)
            self._plan.check_trains(batch.count)
            return self._call(
                batch,
                loss,
                trains=True,
                scale=scale,
                outputs=outputs,
                record=record,
                draw=randomness.next,
                whole_batch=whole_batch,
                # A loss scaler lets gradients become infinite on purpose, and checks them itself.
                finite=scaler is None,
            )

        call = self._prepared(made, trains=True)
        with self._training():
            reports = self._carried_out(call, given)
        randomness.advance()
        result, trouble = self._result(call, reports), reports[0].trouble
        if trouble is None or call.loss is None:
            return result
        self._meet(trouble, call.loss.nonfinite, randomness.step)
        return replace(result, finite=False)

    def _meet(self, trouble: Trouble, nonfinite: NonFinite, step: int) -> None:
        """Raise, skip or warn about a step that is not finite, the same on every rank."""
        if nonfinite == "stop":
            raise NonFiniteError(
                f"step {step}: {trouble}; do not step the optimizer. find_nonfinite of this batch says which "
                'module made it; nonfinite="skip" drops the gradients of such steps, and "warn" only '
                "logs them"
            )
        if self._local.leads:
            skipped = ", its gradients are dropped" if nonfinite == "skip" else ""
            logger.warning("penstock: step %d is not finite%s: %s", step, skipped, trouble)
        if nonfinite == "skip":
            for stage in self._local.stages:
                for parameter in stage.module.parameters():
                    parameter.grad = None

    def find_nonfinite(
        self, given: Given, draw: Draw | None, *, whole_batch: bool
    ) -> NonFiniteFinding | None:
        """The first thing that is not finite, see :meth:`penstock.Pipeline.find_nonfinite`."""

        def made() -> Call:
            loss = self._training_loss()
            return self._call(
                self._batch(given), loss, trains=True, outputs=False, draw=draw, whole_batch=whole_batch,
                scale=loss.scale(None, None, 1.0), finite=True, noted=True,
            )  # fmt: skip

        call = self._prepared(made, trains=True)

        # Inside of what keeps the gradients, since shared weights get theirs when the context ends.
        def run() -> Sequence[Report]:
            with self._training():
                return self._carried_out(call, given)

        return seek(self._local, run)

    def _training_loss(self) -> Loss:
        if self._loss is None:
            raise UsageError("step needs a loss; make the Pipeline with loss_fn=")
        if not self._plan.training.trains:
            raise UsageError(
                f"the schedule {self._plan.training.name!r} has no backward, so it cannot train; "
                "use eval, or choose a schedule with a backward"
            )
        if torch.is_inference_mode_enabled():
            raise UsageError(
                "step needs gradients, and under torch.inference_mode() there are none; call it outside, "
                "or use eval"
            )
        return self._loss

    def evaluate(self, given: Given, *, outputs: bool) -> StepResult:
        """An evaluation, see :meth:`penstock.Pipeline.eval`."""

        def made() -> Call:
            if self._loss is None:
                raise UsageError(
                    "eval needs a loss; make the Pipeline with loss_fn=, or use predict"
                )
            return self._call(self._batch(given), self._loss, trains=False, outputs=outputs)

        return self._without_gradients(made, given)

    def predict(self, given: Given) -> Any:
        """The model's output, see :meth:`penstock.Pipeline.predict`."""

        def made() -> Call:
            return self._call(self._batch(given), None, trains=False, outputs=True)

        return self._without_gradients(made, given).outputs

    def _without_gradients(self, made: Callable[[], Call], given: Given) -> StepResult:
        call = self._prepared(made, trains=False)
        with self._local.evaluating():
            return self._result(call, self._carried_out(call, given))

    def _prepared(self, made: Callable[[], Call], *, trains: bool) -> Call:
        """The call that ``made`` returns; or, if it raises, a call that tells all ranks what is wrong."""
        refused: PenstockError
        try:
            return made()
        except PenstockError as error:
            refused = error
        except Exception as error:
            # The user's own functions may split and weigh batches.
            refused = before_first(error)
        return replace(self._call(Batch(), None, trains=trains, outputs=False), refused=refused)

    def _carried_out(self, call: Call, given: Given) -> list[Report]:
        """Carry a call out on all ranks; if the model refuses an argument meant for the step, say so."""
        try:
            return self._local.carry_out(call)
        except StageError as error:
            for name in given.kwargs:
                near = get_close_matches(name, _OPTIONS, n=1)
                if near and f"unexpected keyword argument {name!r}" in str(error):
                    error.args = (f"{error}; did you mean {near[0]}=?",)
            if call.loss and given.target is MISSING and " positional argument" in str(error):
                error.args = (f"{error}; the target is given by name, as target=",)
            raise

    def _batch(self, given: Given, microbatches: int | None = None) -> Batch:
        asked = whole_number("microbatches", microbatches)
        count = self._plan.microbatches if asked is None else asked
        args, kwargs, target = given
        return split_batch(args, kwargs, target, self._rules, count, fewer=True)

    def _call(
        self, batch: Batch, loss: Loss | None, *, trains: bool, outputs: bool, **more: Any
    ) -> Call:
        if outputs:
            output_dim(self._rules)

        def schedules(count: int, edges: Edges | None) -> Schedule:
            return self._plan.proven(count, edges, trains=trains)

        hooks = self._hooks if self._hooks else None
        return Call(schedules, batch, loss, trains=trains, outputs=outputs, hooks=hooks, **more)

    def _is_anywhere(self, found: bool) -> bool:
        """Whether something was found on any rank of this pipeline or of a replica."""
        told: list[Any] = self._local.each(lambda rank: rank.exchange(found))
        here = torch.tensor([float(any(told))], dtype=torch.float64)
        return bool((self._loss.replicas.added(here) if self._loss else here).any())

    def _result(self, call: Call, reports: Sequence[Report]) -> StepResult:
        report = reports[0]
        found = report.outputs if call.outputs else None
        if found and not report.ready:
            found = merge(found, output_dim(self._rules))
        result = replace(report.numbers, outputs=found)
        if not call.record:
            return result
        timeline, kind = self._local.timeline(reports)
        return replace(result, timeline=timeline, timeline_kind=kind, bubble=timeline.bubble)


def before_first(error: Exception) -> StageError:
    """What every rank raises for an error in the user's code before the first microbatch."""
    refused = StageError(f"before the first microbatch: {type(error).__name__}: {error}")
    refused.__cause__ = error.with_traceback(without_own_frames(error))
    return refused


def _attached(scaler: Any, agree: Callable[[bool], bool]) -> float:
    """The factor of a loss scaler, which from now on decides together with the other ranks.

    Raises:
        UsageError: it is not a scaler, or one that decides for its rank alone.
    """
    if scaler is None:
        return 1.0
    if not isinstance(scaler, LossScaler):
        raise UsageError(
            f"scaler={type(scaler).__name__}: must be a penstock.LossScaler. It is used like "
            "torch.amp.GradScaler, takes the same arguments and loads its state_dict, and decides for all "
            "ranks together whether to skip a step, as no other scaler does"
        )
    scaler.attach(agree)
    return scaler.get_scale()


# ---- find_nonfinite: run a batch once more to find the first module that makes something not finite


@dataclass(frozen=True)
class NonFiniteFinding:
    """The first thing in a step that is not finite; the same on every rank.

    Attributes:
        stage: the stage that made it; None for weights.
        rank: the rank of that stage; None for weights.
        microbatch: the microbatch it was made in; None for weights.
        action: the action that made it, such as ``"1F2"``.
        module: the path, in its stage, of the module that made it from finite inputs, if that was in
            forward.
        weights: the names of weights and buffers that were not finite before the step; then nothing was run.
        what: all of this in words.
    """

    stage: int | None
    rank: int | None
    microbatch: int | None
    action: str
    module: str
    weights: tuple[str, ...]
    what: str

    def __str__(self) -> str:
        return self.what


def seek(local: LocalRanks, run: Callable[[], Sequence[Report]]) -> NonFiniteFinding | None:
    """Find the first thing that is not finite.

    Args:
        local: the ranks of this process.
        run: carries out a training step that checks whether everything is finite.

    Returns:
        The finding, or None if everything is finite.
    """
    weights = _told(local, [name for stage in local.stages for name in _ill_tensors(stage)])
    if weights:
        listed = ", ".join(weights)
        said = f"weights are not finite before the step: {listed}"
        return NonFiniteFinding(None, None, None, "", "", tuple(weights), said)
    with _untouched(local), _traced(local) as seen:
        trouble = run()[0].trouble
    traces = _told(local, [[*place, path] for place, path in seen.items()])
    if trouble is None or trouble.first is None:
        return None
    spot = trouble.first
    paths = {(stage, microbatch): path for stage, microbatch, path in traces}
    module = paths.get((spot.stage, spot.microbatch), "") if spot.kind == OUTPUT else ""
    return _finding(spot, module)


def _finding(spot: Spot, module: str) -> NonFiniteFinding:
    maker = f", made by the module {module!r} from finite inputs" if module else ""
    return NonFiniteFinding(
        spot.stage, spot.rank, spot.microbatch, spot.action, module, (), f"{spot}{maker}"
    )


def _told(local: LocalRanks, mine: list[Any]) -> list[Any]:
    told: list[list[Any]] = local.each(lambda rank: rank.exchange(mine))
    # If all ranks share this process, each of them has already told everything.
    return told[0] if len(local.ranks) > 1 else [item for of in told for item in of]


def _ill_tensors(stage: PipelineStage) -> list[str]:
    found = (name for name, tensor in stage.named_tensors() if not _is_finite([tensor]))
    return list(dict.fromkeys(found))


@contextmanager
def _untouched(local: LocalRanks) -> Iterator[None]:
    """Restore gradients and buffers afterwards."""
    parameters = [p for stage in local.stages for p in stage.module.parameters()]
    buffers = [b for stage in local.stages for b in stage.module.buffers()]
    gradients, values = [p.grad for p in parameters], [b.detach().clone() for b in buffers]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for buffer, value in zip(buffers, values, strict=True):
            buffer.data.copy_(value)


@contextmanager
def _traced(local: LocalRanks) -> Iterator[dict[tuple[int, int], str]]:
    """For each stage and microbatch, the first module that makes a non-finite output from finite inputs."""
    seen: dict[tuple[int, int], str] = {}
    with ExitStack() as stack, uncompiled():
        found = [(rank, stage) for rank in local.ranks for stage in rank.stages.values()]
        for rank, stage in found:
            for path, _, module in stage.parts():
                note = OwnHook(_note, rank, stage.index, path, seen)
                stack.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        yield seen


def _note(  # noqa: PLR0913 - the last four are those of a forward hook
    rank: Rank,
    stage: int,
    path: str,
    seen: dict[tuple[int, int], str],
    module: nn.Module,
    args: Any,
    kwargs: Any,
    output: Any,
) -> None:
    action = rank.activity.doing
    place = (stage, getattr(action, "microbatch", None) or 0)
    if action is None or place in seen or _is_finite(flatten(output)[0]):
        return
    if _is_finite(flatten((args, kwargs))[0]):
        seen[place] = path or type(module).__name__


def _is_finite(tensors: Sequence[Tensor]) -> bool:
    plain = (tensor for tensor in tensors if tensor.is_floating_point() and not tensor.is_meta)
    return all(bool(tensor.isfinite().all()) for tensor in plain)
