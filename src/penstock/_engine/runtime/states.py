"""What a stage hands from one slice of a microbatch's sequences to the next, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from penstock._engine.values import tensors_in
from penstock.errors import StageError
from penstock.stage import Entrance

STATE = "state"
"""The name of the argument of a stage's forward."""
NUMBER = -1
"""Stands for the state among the values that enter a stage, which are numbered from 0."""


class States:
    """The states of the stages of this process in a call, by stage and position of the slice.

    A stage's forward gets ``state=``: ``None`` for the first slice of a microbatch, else what it has returned
    for the slice before; and returns its output and a state. The state is part of the graph: backward of a
    slice starts from the gradients of its output and of its state, which the slice after has left.

    Args:
        slices: into how many slices each microbatch is cut; 1 for whole sequences, as in evaluation.
        trains: whether gradients flow back.
    """

    def __init__(self, slices: int, *, trains: bool) -> None:
        self._slices, self._trains = slices, trains
        self._values: dict[tuple[int, int], Any] = {}
        self._learners: dict[tuple[int, int], int] = {}
        self._leaves: dict[tuple[int, int], int] = {}
        self._gradients: dict[tuple[int, int], Sequence[Tensor | None]] = {}

    def enter(self, stage: int, part: int, entrance: Entrance) -> Any:
        """The state for a slice, as its forward gets it."""
        state = self._values.pop((stage, part), None)
        before = len(entrance.leaves)
        entered = entrance.take(state, originals=None, number=NUMBER)
        self._leaves[stage, part] = len(entrance.leaves) - before
        return entered

    def take_apart(self, stage: int, part: int, returned: Any) -> tuple[Any, list[Tensor]]:
        """The output in what a stage returned, and the tensors of its state that backward starts from.

        Raises:
            StageError: it did not return both.
        """
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise StageError(
                f"it returned a {type(returned).__name__}; where the schedule cuts sequences into slices, a "
                "stage's forward gets state= and returns two values: its output, and the state for the next "
                "slice"
            )
        output, state = returned
        if (part + 1) % self._slices == 0:
            return output, []
        self._values[stage, part + 1] = state
        roots = [tensor for tensor in tensors_in(state) if self._trains and tensor.requires_grad]
        self._learners[stage, part] = len(roots)
        return output, roots

    def owed(self, stage: int, part: int) -> Sequence[Tensor | None]:
        """The gradients of those tensors."""
        learners = self._learners.pop((stage, part), 0)
        return self._gradients.pop((stage, part), [None] * learners)

    def keep(self, stage: int, part: int, gradients: Sequence[Tensor | None]) -> int:
        """Keep the gradients of the state that a slice got for the slice before.

        Args:
            stage: the stage.
            part: the position of the slice.
            gradients: those of the state, and others behind them.

        Returns:
            How many are the state's.
        """
        count = self._leaves.pop((stage, part))
        if count:
            self._gradients[stage, part - 1] = gradients[:count]
        return count
