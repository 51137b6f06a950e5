"""Carry captured gradients from the intermediates down to the weights.

The engine computes an edge of a node only if the running backward pass needs what lies behind it. So an
intermediate that is called *inside* a pass that asks for the weight side, and for nothing else, does no work
towards the inputs. The pass is made of one node of our own, whose backward does the calls. None of the hooks
on the nodes or on their tensors runs a second time, since no gradient travels; and all calls belong to one
pass, so that a checkpointed block is recomputed once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from penstock.backward.full import Gradients
from penstock.backward.graph import ParamGroup

Flow: TypeAlias = tuple[GradientEdge, Tensor | None]
"""A gradient and where it flows."""

# Gradients that wait for their backward pass take memory, and a pass takes time of its own.
BATCH_BYTES = 16 * 2**20


def deliver(
    param_groups: Sequence[ParamGroup], leaves: Mapping[Node, Tensor], *, retain_graph: bool
) -> None:
    """Adds the gradients that follow from ``param_groups`` to the ``.grad`` of ``leaves``.

    Args:
        param_groups: As `stage_backward_input` returned them.
        leaves: The weights, by their accumulators.
        retain_graph: Keep the groups and their graph; otherwise each group is emptied when used.
    """
    batch = _Batch(leaves, retain_graph=retain_graph)
    needed = [edge for group in param_groups for edge in _edges_to_compute(group)]
    work = partial(_compute, param_groups, batch)
    if needed:
        run_inside_backward(work, needed)
    else:
        work()
    batch.run()


def _compute(param_groups: Sequence[ParamGroup], batch: _Batch) -> None:
    for group in param_groups:
        for node, grads in zip(group["intermediates"], group["grads"], strict=True):
            batch.add(_results(node, grads, group["weight_side"]))
        batch.close(group)


def _edges_to_compute(group: ParamGroup) -> Iterator[GradientEdge]:
    weight_side = group["weight_side"]
    for node in group["intermediates"]:
        if node not in weight_side:
            yield from _edges_into(weight_side, node)


def _edges_into(weight_side: set[Node], node: Node) -> Iterator[GradientEdge]:
    for successor, index in node.next_functions:
        if successor in weight_side:
            yield GradientEdge(successor, index)


def _results(node: Node, grads: Gradients, weight_side: set[Node]) -> Iterator[Flow]:
    """Yields the gradients at the edges into the weight side that follow from ``grads``."""
    if node in weight_side:
        yield from ((GradientEdge(node, index), grad) for index, grad in enumerate(grads))
    elif any(grad is not None for grad in grads):
        for (successor, index), grad in zip(
            node.next_functions, call_node(node, grads), strict=True
        ):
            if successor in weight_side:
                yield GradientEdge(successor, index), grad


def _fitted(grad: Tensor, edge: GradientEdge, leaf: Tensor | None) -> Tensor:
    """Returns ``grad`` as the engine would have brought it to ``edge``.

    Nodes leave it to the engine to undo broadcasting and to drop an imaginary part.
    """
    # No public name says what a node expects. torch.autograd itself looks here for the shape of a
    # gradient edge; seen in torch 2.13.
    expected: Any = leaf if leaf is not None else edge.node._input_metadata[edge.output_nr]
    if grad.is_complex() and not expected.dtype.is_complex:
        grad = grad.real
    return grad if grad.shape == expected.shape else grad.sum_to_size(expected.shape)


class _Batch:
    """Gradients at edges into the weight side that wait for one backward pass."""

    def __init__(self, leaves: Mapping[Node, Tensor], *, retain_graph: bool) -> None:
        self._leaves = leaves
        self._retain_graph = retain_graph
        self._waiting: list[tuple[GradientEdge, Tensor]] = []
        self._targets: list[Tensor] = []
        self._bytes = 0

    def add(self, flows: Iterator[Flow]) -> None:
        """Takes the gradients that are there."""
        for edge, grad in flows:
            if grad is not None:
                self._bytes += grad.nbytes
                self._waiting.append((edge, _fitted(grad, edge, self._leaves.get(edge.node))))

    def close(self, group: ParamGroup) -> None:
        """Says that all gradients of ``group`` are there, and runs once enough are waiting."""
        self._targets += (self._leaves[node] for node in group["params"] if node in self._leaves)
        if not self._retain_graph:
            _empty(group)
        if self._bytes >= BATCH_BYTES:
            self.run()

    def run(self) -> None:
        """Takes what is waiting down to the weights."""
        waiting, targets = self._waiting, self._targets
        self._waiting, self._targets, self._bytes = [], [], 0
        if waiting and targets:
            edges, grads = zip(*waiting, strict=True)
            torch.autograd.backward(edges, grads, retain_graph=self._retain_graph, inputs=targets)


def _empty(group: ParamGroup) -> None:
    for key in group.keys() - {"params"}:
        del group[key]


# ---- single nodes, for some of their edges only


class _Carrier(torch.autograd.Function):
    """The identity, whose backward does some work."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, work: Callable[[], None]) -> Tensor:
        ctx.work = work
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        ctx.work()
        return grad_outputs[0], None


def run_inside_backward(work: Callable[[], None], needed: Sequence[GradientEdge]) -> None:
    """Calls ``work`` inside a backward pass that needs the gradients at some edges.

    Args:
        work: Called once. In it, `call_node` computes what leads directly to ``needed``.
        needed: Edges that count as needed. The pass brings nothing to them.
    """
    with torch.enable_grad():
        leaf = torch.zeros((), requires_grad=True)
        carried: Tensor = cast("Any", _Carrier).apply(leaf, work)
    own = get_gradient_edge(leaf)
    torch.autograd.grad([carried], [own, *needed], allow_unused=True)


def call_node(node: Node, grads: Gradients) -> Gradients:
    """Returns the gradients that ``node`` sends along its edges when ``grads`` flow into it.

    Args:
        node: A node written in C++; its saved tensors stay.
        grads: One gradient or None for each output of the forward operation.

    Returns:
        One gradient per edge, None for edges that the running backward pass does not need.
    """
    result = cast("Callable[..., Tensor | Gradients | None]", node)(*grads)
    return result if isinstance(result, tuple) else (result,)
