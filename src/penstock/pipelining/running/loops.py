"""What a schedule that says itself what happens, stage call by stage call, finds to call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from penstock.pipelining.refusals import CallError
from penstock.pipelining.running.runner import StepParts
from penstock.pipelining.stages.base import StageBase


class LoopParts(StepParts):
    """The parts of a step, for a ``_step_microbatches`` of one's own.

    Where Penstock's engine runs the step they do nothing: losses are computed where the last stage's forward
    runs, and what travels is agreed on beforehand.
    """

    _stages: list[StageBase]
    _has_backward: bool

    def __init__(self) -> None:
        self._internal_losses: list[Tensor] = []
        self._engine_runs = False
        self._prepared: bool | None = None

    def _initialize_stage(
        self, args: Any, kwargs: Any, target: Any = None, loss_kwargs: Any = None
    ) -> None:
        """Agree on what travels, from a microbatch's arguments; once for training and once for forward."""
        if self._prepared is self._has_backward:
            return
        self._prepared = self._has_backward
        given: Any = None
        for stage in sorted(self._stages, key=lambda stage: stage.stage_index):
            given = stage.agree(self._n_microbatches, args if stage.is_first else given, kwargs)

    _initialize_stages = _initialize_stage

    def _maybe_compute_loss(
        self,
        stage: StageBase,
        output: Any,
        target_mbs: Sequence[Any] | None,
        mb_index: int,
        loss_kwargs: Any = None,
    ) -> None:
        """Compute and keep a microbatch's loss, on the last stage."""
        if self._engine_runs or not stage.is_last or self._loss_fn is None:
            return
        if target_mbs is None and not self._has_backward:
            return
        if target_mbs is None:
            raise CallError("the last stage's rank was given no target; pass target= on that rank")
        loss = self._compute_loss(output, target_mbs[mb_index], loss_kwargs)
        self._internal_losses.append(loss)

    def _maybe_get_loss(self, stage: StageBase, mb_index: int) -> Tensor | None:
        """A microbatch's loss, on the last stage."""
        if self._engine_runs or not stage.is_last or self._loss_fn is None:
            return None
        if not 0 <= mb_index < len(self._internal_losses):
            raise CallError(
                f"there is no loss of microbatch {mb_index} yet; there are {len(self._internal_losses)}"
            )
        return self._internal_losses[mb_index]

    def _update_losses(self, stages: Any, losses: list[Any] | None) -> None:
        """Hand the losses to the caller's list, on the rank of the last stage, and forget them."""
        held = stages if isinstance(stages, list) else [stages]
        if losses is not None and any(stage.is_last for stage in held):
            found = len(self._internal_losses)
            if found != self._n_microbatches:
                raise CallError(f"expected {self._n_microbatches} losses, found {found}")
            losses[:] = [loss.detach() for loss in self._internal_losses]
        self._internal_losses.clear()


def check_losses(losses: Any) -> None:
    """Check that there is a list for the losses, or nothing.

    Raises:
        TypeError: there is something else.
    """
    if losses is not None and not isinstance(losses, list):
        raise TypeError(f"losses must be a list, not a {type(losses).__name__}")
