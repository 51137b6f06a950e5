"""A call of the pipeline: what the ranks are told, and what they tell afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from penstock.errors import PenstockError
from penstock.rng import Draw
from penstock.runtime.bind import Replacement
from penstock.runtime.health import Trouble
from penstock.runtime.hooks import Hooks
from penstock.schedule import Edge, Schedule, Span
from penstock.step import Loss, Numbers, Scale
from penstock.values import Batch, autocast_types

Schedules = Callable[[int, tuple[Edge, ...] | None], Schedule]
"""The proven schedule for so many microbatches, and for these edges where they depend on the call."""


@dataclass(frozen=True)
class Order:
    """One call of the pipeline; every rank has one, alike but for what its process was given.

    Args:
        schedules: the schedule for what comes out to be called with.
        batch: what this process was given.
        loss: how to compute the loss, where there is one.
        trains: whether gradients are wanted.
        outputs: whether every rank shall get the last stage's outputs.
        record: whether to note when each action ran.
        draw: what random numbers are drawn for; without it they come from torch's generators as they are.
        keep: whether the rank of the last stage shall report its losses and outputs as they are.
        replaced: by kind of work, what does it instead.
        hooks: what to call before and after actions, where there are any.
        whole_batch: whether batch norms update their statistics once, as the whole batch would.
        scale: what else the gradients are scaled by.
        finite: whether to look whether the loss and the gradients are finite.
        noted: whether somebody in this process asks what the ranks do right now.
        refused: what is wrong with what this process was given; the ranks tell each other, and none begins.
    """

    schedules: Schedules
    batch: Batch
    loss: Loss | None = None
    trains: bool = True
    outputs: bool = False
    record: bool = False
    draw: Draw | None = None
    keep: bool = False
    replaced: Mapping[str, Replacement] = field(default_factory=dict)
    hooks: Hooks | None = None
    whole_batch: bool = False
    scale: Scale | None = None
    finite: bool = False
    noted: bool = False
    refused: PenstockError | None = None

    @property
    def mode(self) -> str:
        """What else the values depend on: a model may give others in evaluation, and under autocast."""
        doing = "train" if self.trains else "evaluate"
        losses = "with" if self.loss else "without"
        return " ".join([doing, losses, "loss", *autocast_types()])


@dataclass(frozen=True)
class Refusal:
    """That a call was not begun: nothing was sent or changed, and every rank has such an error.

    Attributes:
        error: what is wrong; its cause is there on the rank where that happened.
    """

    error: PenstockError


@dataclass(frozen=True)
class Report:
    """What a rank knows after a call.

    Attributes:
        schedule: what was run.
        numbers: what the call comes to.
        outputs: of the last stage, where asked.
        spans: when each action ran, where asked.
        elapsed: seconds, where asked.
        owed: the batch's tensors that require grad, and their gradients.
        ready: whether the user split the batch, and so gets its outputs one by one.
        losses: of the microbatches, not scaled, on the rank of the last stage.
        kept: the last stage's outputs there, where asked.
        trouble: where something is not finite, if it was looked for.
    """

    schedule: Schedule
    numbers: Numbers
    outputs: list[Any] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    elapsed: float = 0.0
    owed: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    ready: bool = False
    losses: list[Tensor] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    trouble: Trouble | None = None


def reports_of(found: Sequence[Report | Refusal]) -> list[Report]:
    """What ranks report.

    Raises:
        PenstockError: they refused the call. Of several the one with a cause; where it was found inside of
            Penstock is of no use to who made the call.
    """
    errors = [one.error for one in found if isinstance(one, Refusal)]
    if errors:
        raise max(errors, key=lambda error: error.__cause__ is not None).with_traceback(None)
    return [one for one in found if isinstance(one, Report)]
