"""What a weight is: a parameter, or a tensor that is computed from parameters alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from penstock.backward.saved import has_hooks

# Larger expressions are taken for activations; an orthogonal parametrisation has about thirty nodes.
MOST_NODES = 64

_DEFERRED = {"_DeferredBackward", "_ApartBackward"}


@dataclass(eq=False, slots=True)
class Target:
    """Where the gradient of a weight goes.

    Args:
        edge: The gradient edge of the weight.
        nodes: The nodes below the edge, with the accumulators.
        leaves: The parameters that the gradient reaches in the end.
        like: The weight, if it is a parameter, else a tensor of its shape and strides without data.
        kind: The type and device of the weight.
    """

    edge: GradientEdge
    nodes: tuple[Node, ...]
    leaves: tuple[Tensor, ...]
    like: Tensor
    kind: tuple[torch.dtype, torch.device]

    @property
    def is_parameter(self) -> bool:
        """Whether the weight is a parameter itself."""
        return self.like is self.leaves[0]


def is_weight(tensor: Tensor) -> bool:
    """Says whether a tensor may be a weight whose gradient can wait."""
    if not tensor.requires_grad:
        return False
    if tensor.grad_fn is None:
        return type(tensor) is nn.Parameter
    return type(tensor) is Tensor and below(tensor) is not None


def below(weight: Tensor) -> tuple[tuple[Node, ...], tuple[Tensor, ...]] | None:
    """Returns the nodes that computed a weight, and the parameters that it was computed from.

    None says that it depends on something else, or on what a checkpoint has to recompute. That must
    be said in the recomputation too, or it would save other tensors than forward did.
    """
    assert weight.grad_fn is not None
    seen: dict[Node, None] = {weight.grad_fn: None}
    pending: list[Any] = [weight.grad_fn]
    leaves: list[Tensor] = []
    while pending:
        node = pending.pop()
        leaf = node.variable if type(node).__name__ == "AccumulateGrad" else None
        if leaf is not None:
            leaves.append(leaf)
        if len(seen) > MOST_NODES or not _is_of_weights(node, leaf):
            return None
        new = [n for n, _ in node.next_functions if n is not None and n not in seen]
        seen.update(dict.fromkeys(new))
        pending += new
    return (tuple(seen), tuple(leaves)) if leaves else None


def _is_of_weights(node: Any, leaf: Tensor | None) -> bool:
    if leaf is not None:
        return type(leaf) is nn.Parameter
    return type(node).__name__ not in _DEFERRED and not has_hooks(node)


def target_of(weight: Tensor) -> Target | None:
    """Returns where the gradient of a weight goes, or None if it cannot wait."""
    edge = get_gradient_edge(weight)
    if weight.grad_fn is None:
        return parameter_target(edge, weight)
    found = below(weight)
    if found is None:
        return None
    like = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device="meta")
    return Target(edge, *found, like, (weight.dtype, weight.device))


def parameter_target(edge: GradientEdge, weight: Tensor) -> Target:
    """Returns where the gradient of a parameter goes."""
    return Target(edge, (edge.node,), (weight,), weight, (weight.dtype, weight.device))
