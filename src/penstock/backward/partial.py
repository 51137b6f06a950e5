"""Run single autograd nodes for some of their edges only.

The engine computes an edge of a node only if the running backward pass needs what lies behind it. So
a node called *inside* a pass that asks for the weight side, and for nothing else, does no work
towards the inputs. The pass is made of one node of our own, whose backward does the calls. None of
the hooks on the nodes or on their tensors runs a second time, since no gradient travels; and all
calls belong to one pass, so that a checkpointed block is recomputed once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients: TypeAlias = tuple[Tensor | None, ...]


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
