"""Find the first non-finite value in a step, by running the step once more with hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock._engine.runtime import ActionEvent, Hooks, StepState
from penstock._engine.transport import Job
from penstock._engine.values import tensors_in
from penstock.partition import state_kept
from penstock.schedule import Action, Op, Schedule
from penstock.schedule.action import microbatch_of
from penstock.stage import PipelineStage, uncompiled


@dataclass(frozen=True)
class NonFiniteFinding:
    """The first non-finite value in a step; the same on every rank.

    Attributes:
        stage: the stage that made it; None for weights.
        rank: the rank of that stage; None for weights.
        microbatch: the microbatch it was made in; None for weights.
        action: the action that made it, such as ``"1F2"``.
        module: the path, in its stage, of the module that made it from finite inputs, if that was in
            forward.
        weights: the names of weights and buffers that were not finite before the step; it is not run then.
        what: the finding in words.
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


def find_nonfinite(
    stages: Sequence[PipelineStage],
    schedule: Schedule,
    job: Job,
    run: Callable[[Hooks], StepState],
) -> NonFiniteFinding | None:
    """Find the first non-finite value, or None.

    Args:
        stages: the stages of this process.
        schedule: the schedule of the step.
        job: reaches the other ranks.
        run: carries out the training step with the hooks that it is passed.
    """
    tensors = [named for stage in stages for named in stage.named_tensors()]
    names = [name for name, tensor in tensors if not _is_finite([tensor])]
    of_ranks = job.meet(lambda: names, among=job.pipeline)
    weights = list(dict.fromkeys(name for row in of_ranks for name in row))
    if weights:
        what = f"weights are not finite before the step: {', '.join(weights)}"
        return NonFiniteFinding(None, None, None, "", "", tuple(weights), what)
    seen = _Seen(stages, schedule.stages)
    # Of compiled code, not every module's hooks run.
    with _untouched(stages), seen.hooked_modules(), uncompiled():
        seen.add_end_of(run(seen.hooks))
    of_ranks = job.meet(lambda: sorted(seen.places), among=job.pipeline)
    rows = [place for row in of_ranks for place in row]
    return _finding(min(rows), schedule) if rows else None


_OUTPUT, _LOSS, _GRADIENT, _WEIGHTS = range(4)
"""The kinds of values, in the order in which a step makes them."""


class _Seen:
    """The non-finite values in a step: lists of kind, microbatch, stages before it, stage and module."""

    def __init__(self, stages: Sequence[PipelineStage], count: int) -> None:
        self.places: list[list[Any]] = []
        self.hooks = Hooks(ActionEvent)
        self.hooks.add(self._before, self._after, "*")
        self._stages, self._count = stages, count
        self._action: Action | None = None
        self._modules: dict[tuple[int, int], str] = {}

    def _before(self, event: ActionEvent) -> None:
        self._action = event.action

    def _after(self, event: ActionEvent) -> None:
        action = event.action
        stage, microbatch = action.stage, microbatch_of(action) or 0
        if action.op is Op.F and not _is_finite(_tensors(event.outputs)):
            module = self._modules.get((stage, microbatch), "")
            self.places.append([_OUTPUT, microbatch, stage, stage, module])
        elif action.op in (Op.I, Op.B) and not _is_finite(_tensors(event.outputs)):
            self.places.append([_GRADIENT, microbatch, self._count - stage, stage, ""])
        self._action = None

    def add_end_of(self, step: StepState) -> None:
        """Note the losses and the weights' gradients."""
        last = self._count - 1
        for microbatch, loss in enumerate(step.tally.main_losses()):
            if not _is_finite([loss]):
                self.places.append([_LOSS, microbatch, last, last, ""])
        for stage in self._stages:
            if not _is_finite(p.grad for p in stage.module.parameters() if p.grad is not None):
                self.places.append([_WEIGHTS, 0, self._count - stage.index, stage.index, ""])

    @contextmanager
    def hooked_modules(self) -> Iterator[None]:
        """Note, for each stage and microbatch, the first module with non-finite output from finite inputs."""
        with ExitStack() as stack:
            for stage in self._stages:
                for path, _, module in stage.parts():
                    note = partial(self._note, stage.index, path)
                    stack.callback(module.register_forward_hook(note, with_kwargs=True).remove)
            yield

    def _note(
        self, stage: int, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        action = self._action
        if action is None or action.stage != stage:
            return
        place = stage, microbatch_of(action) or 0
        if place in self._modules or _is_finite(_tensors(output)):
            return
        if _is_finite([*_tensors(args), *_tensors(kwargs)]):
            self._modules[place] = path or type(module).__name__


def _tensors(value: Any) -> list[Tensor]:
    return tensors_in(list(value) if isinstance(value, tuple) else value)


@contextmanager
def _untouched(stages: Sequence[PipelineStage]) -> Iterator[None]:
    """Restore gradients, buffers and what modules keep afterwards."""
    gradients = [(p, p.grad) for stage in stages for p in stage.module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with state_kept(part for stage in stages for part in stage.called_modules()):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _is_finite(tensors: Iterable[Tensor]) -> bool:
    plain = (tensor for tensor in tensors if tensor.is_floating_point() and not tensor.is_meta)
    return all(bool(torch.isfinite(tensor).all()) for tensor in plain)


def _finding(place: list[Any], schedule: Schedule) -> NonFiniteFinding:
    kind, microbatch, _, stage, module = place
    rank = schedule.placement.rank_of[stage]
    action = f"{stage}{'B' if kind in (_GRADIENT, _WEIGHTS) else 'F'}{microbatch}"
    at = f"stage {stage}, rank {rank}"
    if kind == _WEIGHTS:
        what = f"the gradients of the weights of {at} are not finite"
    else:
        thing = {_OUTPUT: "output", _LOSS: "loss", _GRADIENT: "gradient of the inputs"}[kind]
        what = f"the {thing} of microbatch {microbatch} in {at}, action {action}, is not finite"
    if module:
        what += f", made by the module {module!r} from finite inputs"
    return NonFiniteFinding(stage, rank, microbatch, action, module, (), what)
