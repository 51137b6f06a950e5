"""The nodes of autograd's graph: the one behind a tensor, and the tensors that nodes have saved.

The ``_raw_saved_*`` attributes are described in torch's notes on autograd, "Hooks for saved tensors".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils import checkpoint


def node_type(name: str) -> Any:
    """The type of the nodes of a name, or None if this version of torch has none."""
    # The types have no public name; seen in torch 2.13.
    return getattr(torch._C._functions, name, None)


LEAF = node_type("AccumulateGrad")
"""The type of the nodes that add to ``.grad``."""

edge_to: Callable[[tuple[Node, int, None]], GradientEdge] = partial(tuple.__new__, GradientEdge)
"""Makes an edge from what is in it. To call the class takes three times as long."""


def edge_of(tensor: Tensor) -> GradientEdge:
    """The edge behind a tensor that requires grad: what backward may start from, without its memory."""
    node = tensor.grad_fn
    if node is None or isinstance(node, BackwardCFunction):
        # A leaf has no node yet, and to refer to a node of a Python function does not keep it alive.
        return get_gradient_edge(tensor)
    return edge_to((node, tensor.output_nr, None))


def node_of(t: Tensor) -> Node | None:
    """The node that receives a tensor's gradient; None for a tensor that requires none.

    It is the function that computed the tensor, or the accumulator of a leaf. Autograd makes accumulators
    lazily, so those are found through a view.
    """
    if not t.requires_grad or t.grad_fn is not None:
        return t.grad_fn
    with torch.enable_grad():
        view = t.view_as(t).grad_fn
    return view.next_functions[0][0] if view is not None else None


def has_hooks(node: Node) -> bool:
    """Tell whether hooks handle what ``node`` saved, as they do in a checkpointed region."""
    for name in saved_names(type(node)):
        saved: Any = getattr(node, name)
        for one in saved if isinstance(saved, tuple) else (saved,):
            if one is not None and one.unpack_hook is not None:
                return True
    return False


def is_recomputed(saved: Any) -> bool:
    """Tell whether reading a saved tensor recomputes a region of non-reentrant checkpointing."""
    if saved.unpack_hook is None or type(saved.data).__module__ != checkpoint.__name__:
        return False
    return hasattr(saved.data, "handles")


def read_early(node: Any, name: str) -> Tensor:
    """A saved tensor that a checkpoint recomputes, so that the node can still read it afterwards.

    A checkpoint hands out each tensor once in a backward pass, and records that in the tensor's holder. Here
    nothing is recorded. Of torch 2.13:
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/checkpoint.py#L898
    """
    holder = getattr(node, f"_raw{name}").data
    holder.handles = _WithoutNotes(holder.handles)
    try:
        tensor: Tensor = getattr(node, name)
    finally:
        holder.handles = dict(holder.handles)
    return tensor


class _WithoutNotes(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        if value is not None:
            super().__setitem__(key, value)


# Bounded, since a Python function may have a new type for each call.
@lru_cache(1024)
def saved_names(kind: type) -> tuple[str, ...]:
    """The attributes under which nodes of a kind show what they saved."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
