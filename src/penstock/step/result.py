"""What a step gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from penstock.schedule import Timeline

TimelineKind = Literal["measured", "replayed"]


@dataclass(frozen=True)
class StepResult:
    """The same on every rank.

    Attributes:
        loss: the loss of the whole batch; 0.0 where there was no target.
        outputs: the model's output for the whole batch, where it was asked for.
        timeline: who did what when, in seconds, where it was asked for.
        timeline_kind: ``"measured"`` on the ranks' own clocks, or ``"replayed"``: all ranks live in one
            process and take turns, and their measured durations were put on one clock per rank.
        bubble: the share of the ranks' time in which they computed nothing, where it was asked for.
    """

    loss: float
    outputs: Any = None
    timeline: Timeline | None = None
    timeline_kind: TimelineKind | None = None
    bubble: float | None = None
