"""The engines that cut a stage's backward pass in two, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch import nn

from penstock.backward.deferred import DeferredBackward
from penstock.backward.full import stage_backward
from penstock.backward.partial import Gradients
from penstock.backward.split import stage_backward_input, stage_backward_weight
from penstock.backward.store import WeightGradStore

T = TypeVar("T")


class BackwardEngine(Protocol):
    """How the microbatches of one stage go backward: all at once, or in two halves.

    ``outputs`` and ``output_grads`` are as for `stage_backward`. What a method returns as *state* is
    for the next one: forward, then either ``full``, or ``input_half`` and ``weight_half``.
    """

    def forward(self, run: Callable[[], T]) -> tuple[T, Any]:
        """Calls ``run``; returns its result, and a state."""

    def full(self, outputs: Any, output_grads: Any, inputs: Sequence[Any], state: Any) -> Gradients:
        """Returns the inputs' gradients and adds the weights' to their ``.grad``."""

    def input_half(
        self, outputs: Any, output_grads: Any, inputs: Sequence[Any], state: Any
    ) -> tuple[Gradients, Any]:
        """Returns the inputs' gradients, and a state."""

    def weight_half(self, state: Any) -> None:
        """Adds to the weights' ``.grad`` what the other half has left."""

    def flush(self) -> None:
        """Does what the weights' halves have put off; the stage has no microbatch under way."""


class Deferred:
    """The deferred engine; a full backward is one half and then the other."""

    def __init__(self, module: nn.Module, *, fused: bool = False, joined: int = 1) -> None:
        self._split = DeferredBackward(module, fused=fused, joined=joined)

    def forward(self, run: Callable[[], T]) -> tuple[T, WeightGradStore]:
        """Calls ``run`` with the heavy weights taken out of the graph."""
        return self._split.forward(run)

    def full(
        self, outputs: Any, output_grads: Any, inputs: Sequence[Any], state: WeightGradStore
    ) -> Gradients:
        """Runs both halves."""
        found = self._split.input_half(outputs, output_grads, inputs, state)
        self._split.weight_half(state)
        return found

    def input_half(
        self, outputs: Any, output_grads: Any, inputs: Sequence[Any], state: WeightGradStore
    ) -> tuple[Gradients, WeightGradStore]:
        """Leaves the heavy weights' gradients in the store."""
        return self._split.input_half(outputs, output_grads, inputs, state), state

    def weight_half(self, state: WeightGradStore) -> None:
        """Computes what is in the store."""
        self._split.weight_half(state)

    def flush(self) -> None:
        """Computes what was to be joined with more."""
        self._split.flush()


class Graph:
    """The graph engine."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def forward(self, run: Callable[[], T]) -> tuple[T, None]:
        """Calls ``run``."""
        return run(), None

    def full(
        self, outputs: Any, output_grads: Any, inputs: Sequence[Any], state: None
    ) -> Gradients:
        """Runs a plain backward pass."""
        return stage_backward(outputs, output_grads, inputs)

    def input_half(
        self, outputs: Any, output_grads: Any, inputs: Sequence[Any], state: None
    ) -> tuple[Gradients, Any]:
        """Captures what flows towards the weights."""
        weights = self._module.parameters()
        return stage_backward_input(outputs, output_grads, inputs, weights, accumulate_grad=False)

    def weight_half(self, state: Any) -> None:
        """Takes what was captured down to the weights."""
        stage_backward_weight(self._module.parameters(), state, return_grads=False)

    def flush(self) -> None:
        """Has put nothing off."""


class Unsplit:
    """No split: everything is done in the inputs' half."""

    def __init__(self, module: nn.Module) -> None:
        pass

    def forward(self, run: Callable[[], T]) -> tuple[T, None]:
        """Calls ``run``."""
        return run(), None

    def full(
        self, outputs: Any, output_grads: Any, inputs: Sequence[Any], state: None
    ) -> Gradients:
        """Runs a plain backward pass."""
        return stage_backward(outputs, output_grads, inputs)

    def input_half(
        self, outputs: Any, output_grads: Any, inputs: Sequence[Any], state: None
    ) -> tuple[Gradients, None]:
        """Runs a plain backward pass."""
        return stage_backward(outputs, output_grads, inputs), None

    def weight_half(self, state: None) -> None:
        """Has nothing to do."""

    def flush(self) -> None:
        """Has put nothing off."""


ENGINES: dict[str, Callable[..., BackwardEngine]] = {
    "deferred": Deferred,
    "graph": Graph,
    "none": Unsplit,
}
