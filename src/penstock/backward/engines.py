"""The engines that cut a stage's backward pass in two, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn

from penstock.backward.deferred import DeferredBackward
from penstock.backward.full import Gradients, stage_backward, tensors_in
from penstock.backward.split import stage_backward_input, stage_backward_weight
from penstock.backward.waiting import refusing


class BackwardEngine(Protocol):
    """How the microbatches of one stage go backward: all at once, or in two halves.

    ``outputs`` and ``output_grads`` are as for `stage_backward`.
    """

    @property
    def is_plain(self) -> bool:
        """Whether `full` is a backward pass as autograd's own."""

    def full(self, outputs: Any, output_grads: Any, inputs: Sequence[Any]) -> Gradients:
        """Returns the inputs' gradients and adds the weights' to their ``.grad``."""

    def input_half(
        self, outputs: Any, output_grads: Any, inputs: Sequence[Any]
    ) -> tuple[Gradients, Any]:
        """Returns the inputs' gradients, and what the other half needs."""

    def weight_half(self, state: Any) -> None:
        """Adds to the weights' ``.grad`` what the other half has left."""

    def flush(self) -> None:
        """Does what the weights' halves have put off; the stage has no microbatch under way."""


class Unsplit:
    """No split: everything is done in the inputs' half."""

    is_plain = True

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def full(self, outputs: Any, output_grads: Any, inputs: Sequence[Any]) -> Gradients:
        """Runs a plain backward pass."""
        return stage_backward(outputs, output_grads, inputs)

    def input_half(
        self, outputs: Any, output_grads: Any, inputs: Sequence[Any]
    ) -> tuple[Gradients, Any]:
        """Runs a plain backward pass."""
        return self.full(outputs, output_grads, inputs), None

    def weight_half(self, state: Any) -> None:
        """Has nothing to do."""

    def flush(self) -> None:
        """Has put nothing off."""


class Graph(Unsplit):
    """The graph engine."""

    def input_half(
        self, outputs: Any, output_grads: Any, inputs: Sequence[Any]
    ) -> tuple[Gradients, Any]:
        """Captures what flows towards the weights, where backward can be cut."""
        if refusing(tensors_in(outputs)):
            return super().input_half(outputs, output_grads, inputs)
        weights = self._module.parameters()
        return stage_backward_input(outputs, output_grads, inputs, weights, accumulate_grad=False)

    def weight_half(self, state: Any) -> None:
        """Takes what was captured down to the weights."""
        stage_backward_weight(self._module.parameters(), state or (), return_grads=False)


ENGINES: dict[str, Callable[..., BackwardEngine]] = {
    "deferred": DeferredBackward,
    "graph": Graph,
    "none": Unsplit,
}
