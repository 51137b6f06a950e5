"""What a custom function is given besides its action."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.pipelining.stages.base import StageBase


@dataclass
class PipelineContext:
    """What a custom function is told besides its action.

    Attributes:
        schedule_ref: the schedule that runs.
        arg_mbs: for each microbatch the positional arguments; empty where this process was given none.
        kwarg_mbs: for each microbatch the arguments by name.
        target_mbs: for each microbatch the target.
        losses: the list that the caller gave for the losses.
    """

    schedule_ref: Any
    arg_mbs: list[tuple[Any, ...]] | None = None
    kwarg_mbs: list[dict[str, Any]] | None = None
    target_mbs: list[Any] | None = None
    losses: list[Any] | None = None

    @property
    def stages(self) -> list[StageBase]:
        """The stages of this process."""
        found: list[StageBase] = self.schedule_ref.stages
        return found


class Arrived:
    """The receives that a custom function may ask for: all have arrived, there is nothing to wait for."""

    def __contains__(self, key: object) -> bool:
        return True

    def pop(self, key: object, default: Any = None) -> list[Any]:
        """No work to wait for."""
        return []
