"""The engines that cut a stage's backward pass in two, by name; and gradients that are collected apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from torch import Tensor, nn

from penstock.backward.deferred import DeferredBackward, refusing
from penstock.backward.full import Gradients, stage_backward, tensors_in
from penstock.backward.graph import construct_reverse_graph, nodes_of
from penstock.backward.split import stage_backward_input, stage_backward_weight
from penstock.backward.store import LEAF

# ---- gradients that are collected beside ``.grad``, stage by stage
# A weight that several stages use has one gradient, the sum of their shares. In one process those stages
# hold one parameter; if each added straight into its ``.grad``, the bits of the sum would depend on which
# stages live together and on whose backward runs first. So each stage collects its own share, and whoever
# knows all shares adds them up.


class Apart:
    """A context in which gradients of some parameters add up here and not in their ``.grad``.

    What stood in ``.grad`` is back there when the context ends, also after an error.

    Args:
        parameters: which ones.
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
        """What was collected of each parameter since the last call."""
        shares, self._shares = self._shares, [None] * len(self._parameters)
        return shares


def _put(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


# ---- the engines that cut a stage's backward pass in two, by name


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
        """The module's weights, and the leaves that a loss uses besides, such as other stages' weights."""
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
