"""The tensors that autograd nodes have saved: find them, and read them once more.

The ``_raw_saved_*`` attributes are described in torch's notes on autograd, "Hooks for saved tensors".
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils import checkpoint


def has_hooks(node: Node) -> bool:
    """Says whether hooks handle what ``node`` saved, as they do in a checkpointed region."""
    return any(saved.unpack_hook is not None for saved in saved_by(node))


def is_recomputed(saved: Any) -> bool:
    """Says whether reading a saved tensor recomputes a region of non-reentrant checkpointing."""
    if saved.unpack_hook is None or type(saved.data).__module__ != checkpoint.__name__:
        return False
    return hasattr(saved.data, "handles")


def read_early(node: Any, name: str) -> Tensor:
    """Returns a saved tensor that a checkpoint recomputes, so that the node can still read it afterwards.

    A checkpoint hands out each tensor once in a backward pass, and records that in the tensor's holder. Here
    nothing is recorded. Seen in torch 2.13.
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


def saved_by(node: Node) -> Iterator[Any]:
    """Yields what ``node`` saved, with its hooks."""
    for name in saved_names(type(node)):
        saved = getattr(node, name)
        if isinstance(saved, tuple):
            yield from saved
        elif saved is not None:
            yield saved


# Bounded, since a Python function may have a new type for each call.
@lru_cache(1024)
def saved_names(kind: type) -> tuple[str, ...]:
    """Returns the attributes under which nodes of a kind show what they saved."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
