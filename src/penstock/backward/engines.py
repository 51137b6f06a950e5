"""The engines that cut a stage's backward pass in two, by name; and gradients collected beside ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from torch import Tensor, nn

from penstock.backward.deferred import DeferredBackward, refusing
from penstock.backward.full import Gradients, stage_backward, tensors_in
from penstock.backward.graph import construct_reverse_graph, nodes_of
from penstock.backward.split import stage_backward_input, stage_backward_weight
from penstock.backward.store import LEAF

# ---- gradients of shared weights, collected beside ``.grad``
# A weight that several stages use has one gradient, the sum of their shares. In one process those stages
# hold the same parameter. If each added its share straight to ``.grad``, the bits of the sum would depend
# on which stages live together, and on whose backward runs first. So each stage collects its own share, and
# ``weights/sharing.py`` adds up all of them.


class Apart:
    """A context in which the gradients of some parameters add up here, and not in their ``.grad``.

    When the context ends, also after an error, ``.grad`` holds again what it held before.

    Args:
        parameters: whose gradients.
    """

    def __init__(self, parameters: Sequence[Tensor] = ()) -> None:
        self._parameters = tuple(parameters)
        self._shares: list[Tensor | None] = [None] * len(self._parameters)
        self._outside: list[Tensor | None] = []

    def __enter__(self) -> None:
        if self._parameters:
            self._outside = [parameter.grad for parameter in self._parameters]
            _put(self._parameters, self._shares)

    def __exit__(self, *_: object) -> None:
        if self._parameters:
            self._shares = [parameter.grad for parameter in self._parameters]
            _put(self._parameters, self._outside)
            self._outside = []

    def take(self) -> list[Tensor | None]:
        """What was collected for each parameter since the last call."""
        shares, self._shares = self._shares, [None] * len(self._parameters)
        return shares


def _put(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


# ---- the engines


class BackwardEngine(Protocol):
    """How the microbatches of one stage go backward: in one piece, or in two halves.

    ``outputs`` and ``output_grads`` are as for `stage_backward`.
    """

    @property
    def is_plain(self) -> bool:
        """Whether `full` is simply autograd's own backward pass."""

    def full(self, outputs: Any, output_grads: Any, inputs: Sequence[Any]) -> Gradients:
        """Returns the inputs' gradients and adds the weights' to their ``.grad``."""

    def input_half(
        self, outputs: Any, output_grads: Any, inputs: Sequence[Any]
    ) -> tuple[Gradients, Any]:
        """Returns the inputs' gradients, and what the other half needs."""

    def weight_half(self, state: Any) -> None:
        """Computes what the other half has left, and adds it to the weights' ``.grad``."""

    def flush(self) -> None:
        """Does what the weights' halves have put off. Called when the stage has no microbatch under way."""


class Unsplit:
    """No split: the inputs' half is a full backward pass."""

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
        """Captures what flows towards the weights, unless this graph runs in whole backward passes only."""
        if refusing(tensors_in(outputs)):
            return super().input_half(outputs, output_grads, inputs)
        weights = self._weights(outputs, inputs)
        found, groups = stage_backward_input(
            outputs, output_grads, inputs, weights, accumulate_grad=False
        )
        return found, (weights, groups)

    def weight_half(self, state: Any) -> None:
        """Takes what was captured down to the weights."""
        if state is not None:
            stage_backward_weight(*state, return_grads=False)

    def _weights(self, outputs: Any, inputs: Sequence[Any]) -> list[Tensor]:
        """The module's weights, and other leaves that a loss uses, such as weights of other stages."""
        nodes = construct_reverse_graph(nodes_of(tensors_in(outputs)))
        used = [cast("Any", node).variable for node in nodes if type(node) is LEAF]
        weights = {id(weight): weight for weight in (*self._module.parameters(), *used)}
        for value in inputs:
            weights.pop(id(value), None)
        return list(weights.values())


ENGINES: dict[str, Callable[..., BackwardEngine]] = {
    "deferred": DeferredBackward,
    "graph": Graph,
    "none": Unsplit,
}
"""The engines by the name that ``engine=`` takes."""
