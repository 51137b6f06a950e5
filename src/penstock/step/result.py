"""What a step gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.schedule import Timeline

TimelineKind = Literal["measured", "replayed"]


@dataclass(frozen=True)
class StepResult:
    """The same on every rank.

    Attributes:
        loss: of the whole batch, with what the model added by :func:`penstock.add_loss`.
        losses: of ``loss_fn`` alone under ``"main"``, and what was added under each name, unweighted.
        metrics: what the user measures, by name.
        weight: over how many things the loss is: samples, or what ``loss_weight`` says.
        finite: whether the loss and the gradients are; a step whose are not is an error by default.
        outputs: the model's output for the whole batch, where it was asked for.
        timeline: who did what when, in seconds, where it was asked for.
        timeline_kind: ``"measured"`` on the ranks' own clocks, or ``"replayed"``: all ranks live in one
            process and take turns, and their measured durations were put on one clock per rank.
        bubble: the share of the ranks' time in which they computed nothing, where it was asked for.
    """

    loss: float
    losses: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    weight: float = 0.0
    finite: bool = True
    outputs: Any = None
    timeline: Timeline | None = None
    timeline_kind: TimelineKind | None = None
    bubble: float | None = None
