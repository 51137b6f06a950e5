"""Penstock's stage as this face needs it, and one whose weights' half of backward is the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from penstock.stage import Gradients, PipelineStage

Build = Callable[[], Callable[[], object]]


class HeldStage(PipelineStage):
    """A list between stages becomes several arguments too."""

    spread = (tuple, list)


class OwnWeights(HeldStage):
    """Autograd does all that it knows in the inputs' half; the rest is the user's.

    Args:
        args: of the stage.
        build: is called after each microbatch's backward and gives what does the rest.
    """

    def __init__(self, *args: Any, build: Build) -> None:
        super().__init__(*args, engine="none")
        self._build = build
        self._put_off: dict[int, Callable[[], object]] = {}

    def backward(self, microbatch: int, output_grads: Sequence[Tensor | None] | None) -> Gradients:
        """Full backward of a microbatch."""
        found = super().backward(microbatch, output_grads)
        self._build()()
        return found

    def backward_input(
        self, microbatch: int, output_grads: Sequence[Tensor | None] | None
    ) -> Gradients:
        """All but the user's part, which is made and put off."""
        found = super().backward_input(microbatch, output_grads)
        self._put_off[microbatch] = self._build()
        return found

    def backward_weight(self, microbatch: int) -> None:
        """The user's part."""
        super().backward_weight(microbatch)
        self._put_off.pop(microbatch)()

    def clear(self) -> None:
        """Drop whatever microbatches have left here."""
        super().clear()
        self._put_off.clear()
