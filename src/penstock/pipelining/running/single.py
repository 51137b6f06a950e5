"""Schedules with one stage per rank, under torch's names and arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.errors import UsageError
from penstock.pipelining.refusals import CallError
from penstock.pipelining.running.base import PipelineSchedule
from penstock.pipelining.stages.base import StageBase


class PipelineScheduleSingle(PipelineSchedule):
    """A schedule with one stage per rank; arguments as :class:`PipelineSchedule`, with one stage."""

    def __init__(  # noqa: PLR0913 - torch's arguments
        self,
        stage: StageBase,
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
    ) -> None:
        super().__init__(
            [stage],
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads,
        )
        self._stage = stage
        self._build()


class ScheduleForwardOnly(PipelineScheduleSingle):
    """All forwards, and no loss."""

    recipe = "forward-only"

    def _build(self) -> None:
        # Also where a loss was given, as to all schedules alike.
        self._has_backward = False
        super()._build()

    def _step_microbatches(
        self,
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        losses: Any = None,
        *rest: Any,
        **more: Any,
    ) -> None:
        if target_mbs is not None or losses is not None:
            raise CallError("a forward-only schedule has no loss; take ScheduleGPipe and call eval")
        super()._step_microbatches(arg_mbs, kwarg_mbs, None, None, *rest, **more)


class ScheduleGPipe(PipelineScheduleSingle):
    """All forwards, then all backwards."""

    recipe = "GPipe"


class Schedule1F1B(PipelineScheduleSingle):
    """One forward, one backward, after a warm-up.

    Raises:
        ValueError: fewer microbatches than stages.
    """

    recipe = "1F1B"

    def _build(self) -> None:
        check_enough(self._n_microbatches, self._num_stages)
        super()._build()


def check_enough(microbatches: int, stages: int) -> None:
    """Check that there are as many microbatches as stages.

    Raises:
        UsageError: there are fewer.
    """
    if microbatches < stages:
        raise UsageError(
            f"{microbatches} microbatches for {stages} stages: there must be at least as many "
            "microbatches as stages"
        )
