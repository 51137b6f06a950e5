"""What a stage's code offers to whatever runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from penstock.rng import Draws


@dataclass(frozen=True)
class StageCall:
    """One microbatch's call of a stage.

    Attributes:
        plan: what ``Partition.plan`` returned for this kind of call.
        microbatch: its index.
        draws: seeds the generators; ``None`` leaves them alone.
    """

    plan: Any
    microbatch: int
    draws: Draws | None = None


class StageModule(nn.Module):
    """A stage's code as the runtime calls it.

    Attributes:
        index: which stage.
    """

    index: int

    @property
    def units(self) -> list[nn.Module]:
        """The modules that run here as a whole: the pieces that can be compiled."""
        raise NotImplementedError

    @property
    def initialisers(self) -> dict[str, Callable[[nn.Module], Any]]:
        """The ``_init_weights`` of the models around the units, by their paths."""
        return {}

    def forward(
        self, call: StageCall, values: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Run the stage's part of the model.

        Args:
            call: what is called.
            values: what has arrived for this stage, by the edge's name: fresh tensors, which may be
                changed in place.
            *args: the model's arguments; tensors that this process was not given are on the meta device.
            **kwargs: those by name.

        Returns:
            The model's output in the last stage, else ``None``; and the values of this stage's edges by name.
        """
        raise NotImplementedError
