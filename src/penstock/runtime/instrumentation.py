"""What looks on while a step runs: the user's hooks, a clock, and a check for values that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import StageError, UsageError
from penstock.schedule import Action, Span, matching
from penstock.stage import PipelineStage
from penstock.values import flatten


@dataclass(frozen=True)
class ActionEvent:
    """An action that is about to run, or has run. A hook may look at what it shows, but must not change it.

    Attributes:
        action: the action.
        rank: the rank that runs it.
        module: its stage's module.
        inputs: for F, ``(args, kwargs)``; for B and I, the gradients of the stage's outputs, one or
            ``None`` for each tensor; for a send, its tensors; else ``None``.
        outputs: for F, the module's output; for B and I, the gradients of the inputs; for a receive, the
            tensors that arrived. ``None`` before the action, and for all other actions.
    """

    action: Action
    rank: int
    module: nn.Module
    inputs: Any = None
    outputs: Any = None


ActionHook = Callable[[ActionEvent], object]
"""A function that is called before or after an action."""
Which = str | Callable[[Action], bool]
"""Which actions are meant: a pattern, or a function of an Action."""


class _Hook(NamedTuple):
    which: Which
    matches: Callable[[Action], bool]
    before: ActionHook | None
    after: ActionHook | None


class HookHandle:
    """Removes what one call of ``on`` or ``on_step`` has added."""

    def __init__(self, hooks: dict[HookHandle, Any]) -> None:
        self._hooks = hooks

    def remove(self) -> None:
        """Remove it; a second time does nothing."""
        self._hooks.pop(self, None)

    def __enter__(self) -> HookHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class Hooks:
    """The hooks of a pipeline, in the order in which they were added."""

    def __init__(self) -> None:
        self._hooks: dict[HookHandle, _Hook] = {}

    def __len__(self) -> int:
        return len(self._hooks)

    def add(self, which: Which, before: ActionHook | None, after: ActionHook | None) -> HookHandle:
        """Call functions before and after some actions.

        Raises:
            UsageError: neither function was given, or what was given cannot be called.
            ScheduleError: ``which`` is a string, but not a valid pattern.
        """
        given = [function for function in (before, after) if function is not None]
        if not given or not all(map(callable, given)):
            raise UsageError("a hook needs before= or after=, or both: functions of an ActionEvent")
        if not isinstance(which, str) and not callable(which):
            raise UsageError(
                f"{which!r}: actions are named by a pattern or by a function of an Action"
            )
        handle = HookHandle(self._hooks)
        matches = matching(which) if isinstance(which, str) else which
        self._hooks[handle] = _Hook(which, matches, before, after)
        return handle

    def before(self, event: ActionEvent) -> None:
        """An action is about to run.

        Raises:
            StageError: a hook raised.
        """
        for hook in tuple(self._hooks.values()):
            _call(hook, "before", hook.before, event)

    def after(self, event: ActionEvent) -> None:
        """An action has run.

        Raises:
            StageError: a hook raised.
        """
        for hook in tuple(self._hooks.values()):
            _call(hook, "after", hook.after, event)


def _call(hook: _Hook, when: str, function: ActionHook | None, event: ActionEvent) -> None:
    if function is None:
        return
    try:
        if hook.matches(event.action):
            function(event)
    except Exception as error:
        raise StageError(
            f"the hook {when} {hook.which!r} raised {type(error).__name__}: {error}"
        ) from error


# ---- when each action of a step ran, on this process's clock


class Recorder:
    """Notes the start and end of actions, in seconds since it was made.

    On an accelerator the device is synchronised before each reading, so that a span measures the work
    itself and not its launch. This slows a recorded step down.

    Args:
        rank: whose actions they are.
        device: where they run.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self.spans: list[Span] = []
        self._rank = rank
        self._synchronize: Callable[[], object] = (
            _nothing if device.type == "cpu" else torch.accelerator.synchronize
        )
        self._origin = self._now()
        self._start = 0.0

    def start(self) -> None:
        """An action begins, or a part of one."""
        self._start = self._now() - self._origin

    def stop(self, action: Action) -> None:
        """The action ends. Several parts of one action, one after the other, become one span."""
        start = self._start
        if self.spans and self.spans[-1].action == action:
            start = self.spans.pop().start
        self.spans.append(Span(self._rank, action, start, self._now() - self._origin))

    def elapsed(self) -> float:
        """Seconds since the recorder was made."""
        return self._now() - self._origin

    def _now(self) -> float:
        self._synchronize()
        return perf_counter()


def _nothing() -> None:
    """There is nothing to wait for on the CPU."""


# ---- whether what a step makes is finite, and where it first is not
# During the step each value and gradient that leaves a stage is only added up, which waits for no device.
# The sums are checked after the step, and only if the loss or the norm of the gradients is not finite.


OUTPUT, LOSS, GRADIENT, WEIGHTS = range(4)
"""The kinds of things that may not be finite, in the order in which a step makes them."""


class Spot(NamedTuple):
    """A place where something is not finite. Of two, the one that was made earlier compares as smaller.

    Args:
        kind: one of the four kinds above.
        microbatch: its microbatch; 0 for the gradients of weights.
        distance: how many stages lie before it, forward or backward.
        stage: the stage that made it.
        rank: the rank of that stage.
    """

    kind: int
    microbatch: int
    distance: int
    stage: int
    rank: int

    @property
    def action(self) -> str:
        """The action that made it."""
        op = "B" if self.kind in (GRADIENT, WEIGHTS) else "F"
        return f"{self.stage}{op}{self.microbatch}"

    def __str__(self) -> str:
        at = f"stage {self.stage}, rank {self.rank}"
        if self.kind == WEIGHTS:
            return f"the gradients of the weights of {at}"
        return f"{_WORDS[self.kind]} of microbatch {self.microbatch} in {at}, action {self.action}"


_WORDS = {
    OUTPUT: "the output",
    LOSS: "the loss",
    GRADIENT: "the gradient of the inputs",
}


class Health:
    """Collects what one rank sees in one training step.

    Args:
        rank: the rank.
        stages: how many stages the pipeline has.
    """

    def __init__(self, rank: int, stages: int) -> None:
        self._rank = rank
        self._stages = stages
        self._sums: list[tuple[Spot, Tensor]] = []

    def forward(self, stage: int, microbatch: int, output: Any) -> None:
        """A stage has given its output."""
        spot = Spot(OUTPUT, microbatch, stage, stage, self._rank)
        self._note(spot, flatten(output)[0])

    def backward(self, stage: int, microbatch: int, gradients: Sequence[Tensor | None]) -> None:
        """A stage has given the gradients of its inputs."""
        spot = Spot(GRADIENT, microbatch, self._stages - stage, stage, self._rank)
        self._note(spot, gradients)

    def _note(self, spot: Spot, tensors: Iterable[Tensor | None]) -> None:
        for tensor in tensors:
            if type(tensor) is Tensor and tensor.is_floating_point():
                self._sums.append((spot, _sum_of(tensor)))

    def spots(self, losses: Sequence[Tensor], stages: Iterable[PipelineStage]) -> list[Spot]:
        """Everything that is not finite here.

        Args:
            losses: of the microbatches, if the last stage is here.
            stages: those of this rank.
        """
        last = self._stages - 1
        found = [spot for spot, total in self._sums if not bool(total.isfinite())]
        for microbatch, loss in enumerate(losses):
            if not bool(loss.isfinite()):
                found.append(Spot(LOSS, microbatch, last, last, self._rank))
        for stage in stages:
            if not has_finite_gradients([stage]):
                distance = self._stages - stage.index
                found.append(Spot(WEIGHTS, 0, distance, stage.index, self._rank))
        return found


def _sum_of(tensor: Tensor) -> Tensor:
    """A sum that is finite if all elements are; 16-bit types are summed in float32, so as not to overflow."""
    wide = torch.float32 if tensor.itemsize < 4 else None
    return tensor.detach().sum(dtype=wide)


def has_finite_gradients(stages: Iterable[PipelineStage]) -> bool:
    """Whether the norm of the weights' gradients is finite; DTensors are left to what shards them."""
    gradients: list[Tensor] = []
    for stage in stages:
        # Gradients of weights that stages share are collected beside .grad, and are in it in this context.
        with stage.apart:
            found = [parameter.grad for parameter in stage.module.parameters()]
        gradients += [grad for grad in found if type(grad) is Tensor and not grad.is_sparse]
    return not gradients or bool(nn.utils.get_total_norm(gradients).isfinite())


class Trouble(NamedTuple):
    """A step whose loss or gradients are not finite.

    Args:
        loss: of the batch.
        first: where it began, or None if that was in another replica.
    """

    loss: float
    first: Spot | None

    def __str__(self) -> str:
        gradients = "" if not math.isfinite(self.loss) else ", but gradients are not finite"
        if self.first is None:
            return f"the loss is {self.loss:g}{gradients}; it began in another replica"
        return f"the loss is {self.loss:g}{gradients}; the first that is not finite is {self.first}"
