"""The deferred engine: the inputs' half is an ordinary backward pass, the weights' half a store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from penstock.backward.capture import hooks_suspended
from penstock.backward.full import backward_through, seeds_of
from penstock.backward.graph import construct_reverse_graph, nodes_of
from penstock.backward.interception import Interception
from penstock.backward.partial import Gradients
from penstock.backward.store import WeightGradStore
from penstock.backward.structure import Pair, explained
from penstock.errors import PenstockError, UsageError

T = TypeVar("T")

log = logging.getLogger("penstock")


class DeferredBackward:
    """Splits the backward passes of one module.

    Where a weight's gradient cannot wait, it is computed in the inputs' half, as in a full backward
    pass. Where a weight has uses of both kinds, its accumulator still runs once, in the weights' half.

    Args:
        module: The stage's module.
        fused: Multiply the weights' gradients straight into ``.grad``, once that is there, with no
            tensor of a weight's size in between. It changes bits, and the accumulators do not run: for
            weights without hooks of their own only, and not together with DistributedDataParallel.
            ``.grad`` keeps its type; ``weight.grad_dtype`` says which that is.
        joined: Of how many microbatches to compute the weights' gradients as one larger product. It
            changes bits, holds the pairs longer, and hooks run once for all of them. `flush` computes
            what is left over.

    Raises:
        UsageError: ``joined`` is less than 1.
    """

    def __init__(self, module: nn.Module, *, fused: bool = False, joined: int = 1) -> None:
        if joined < 1:
            raise UsageError(
                f"joined={joined}: weight gradients of at least 1 microbatch are computed"
            )
        self._fused, self._joined = fused, joined
        self._left: list[WeightGradStore] = []
        self._interception = Interception(module)
        self._shared = False
        self._reason = self._interception.reason

    def forward(self, run: Callable[[], T]) -> tuple[T, WeightGradStore]:
        """Calls ``run``, the stage's forward and loss, so that the halves can follow.

        Returns:
            What ``run`` returned, and what the halves will need.
        """
        if self._reason is not None:
            log.info("weight gradients do not wait in %s", self._reason)
            self._reason = None
        store = WeightGradStore()
        with self._interception.forward(store):
            return run(), store

    def input_half(
        self, outputs: Any, output_grads: Any, inputs: Sequence[Any], store: WeightGradStore
    ) -> Gradients:
        """Computes the inputs' gradients, and those of weights that cannot wait.

        Args:
            outputs: What forward returned, or its loss.
            output_grads: As for `stage_backward`; they must stay as they are until the other half.
            inputs: The inputs of the stage.
            store: Of this microbatch.

        Returns:
            One gradient of each input's shape, or None where it needs or gets none.

        Raises:
            UsageError: ``output_grads`` has another structure than the outputs.
            StageError: Autograd failed; the cause is chained.
        """
        pairs = seeds_of(outputs, output_grads)
        with (
            explained("the inputs' half of backward", output=outputs, gradient=output_grads),
            self._interception.backward(store),
        ):
            return self._input_half(pairs, inputs, store)

    def weight_half(self, store: WeightGradStore) -> None:
        """Adds to the weights' ``.grad`` what `input_half` has left in ``store``."""
        self._left.append(store)
        if len(self._left) >= self._joined:
            self.flush()

    def flush(self) -> None:
        """Computes what has been left for a larger product."""
        left, self._left = self._left, []
        if not left:
            return
        for store in left[1:]:
            left[0].take(store)
        with explained("the weights' half of backward"):
            left[0].deliver(fused=self._fused, joined=len(left) > 1)

    def _input_half(
        self, pairs: Sequence[Pair], inputs: Sequence[Any], store: WeightGradStore
    ) -> Gradients:
        if not self._shared:
            try:
                with _OnlyForInputs(pairs, store):
                    return backward_through(pairs, inputs, as_edges=self._interception.needs_mode)
            except _SharedError:
                self._shared = True
        return _with_shares_held(pairs, inputs, store, self._interception.anchors())


class _SharedError(PenstockError):
    """The inputs' half would reach a weight whose gradient the other half completes."""


class _OnlyForInputs:
    """Raises _SharedError, before anything has run, if backward would reach what waits in ``store``."""

    def __init__(self, pairs: Sequence[Pair], store: WeightGradStore) -> None:
        self._pairs = pairs
        self._waiting = store.nodes()
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        if self._waiting:
            nodes = set(nodes_of(output for output, _ in self._pairs))
            self._handles += (node.register_prehook(self._look) for node in nodes)

    def __exit__(self, *_: object) -> None:
        _release(self._handles)

    def _look(self, _: Any) -> None:
        _release(self._handles)
        # No public name tells what a backward pass that is running will reach. Seen in torch 2.13.
        if any(map(torch._C._will_engine_execute_node, self._waiting)):
            raise _SharedError


def _release(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


def _with_shares_held(
    pairs: Sequence[Pair], inputs: Sequence[Any], store: WeightGradStore, anchors: list[Tensor]
) -> Gradients:
    """Is the inputs' half for a stage with weights that are needed in both halves."""
    if not pairs:
        return (None,) * len(inputs)
    held = store.leaves()
    own = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    leaves = _leaves_below(pairs, {id(value) for value in (*own, *anchors)})
    wanted = [*own, *leaves.values(), *anchors]
    grads = _grad(
        pairs, wanted, leaves, retain_graph=any(not t.is_parameter for t in store.targets)
    )
    found = dict(zip(map(id, wanted), grads, strict=True))
    ready = []
    for node, leaf in leaves.items():
        grad = found[id(leaf)]
        if grad is not None and node in held:
            store.hold(held[node], grad)
        elif grad is not None:
            ready.append((leaf, grad))
    if ready:
        torch.autograd.backward([leaf for leaf, _ in ready], [grad for _, grad in ready])
    return tuple(found.get(id(value)) for value in inputs)


def _grad(
    pairs: Sequence[Pair], wanted: list[Tensor], leaves: dict[Node, Tensor], *, retain_graph: bool
) -> Gradients:
    edges = [torch.autograd.graph.get_gradient_edge(output) for output, _ in pairs]
    with hooks_suspended(leaves.values()):
        return torch.autograd.grad(
            cast("Any", edges),
            wanted,
            [grad for _, grad in pairs],
            retain_graph=retain_graph,
            allow_unused=True,
        )


def _leaves_below(pairs: Sequence[Pair], without: set[int]) -> dict[Node, Tensor]:
    """Returns the leaves that backward reaches, by their accumulators."""
    nodes: list[Any] = list(construct_reverse_graph(nodes_of(output for output, _ in pairs)))
    found = {n: n.variable for n in nodes if type(n).__name__ == "AccumulateGrad"}
    return {node: leaf for node, leaf in found.items() if id(leaf) not in without}
