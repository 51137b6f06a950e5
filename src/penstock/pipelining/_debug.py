"""Values as short texts, in the module where torch has it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

# As in ``microbatch``: it knows the types that users register as trees.
from torch.utils import _pytree as pytree

__all__ = ["friendly_debug_info", "map_debug_info"]


def friendly_debug_info(v: object) -> str:
    """A tensor as its shape, requires_grad and dtype; anything else as it prints."""
    if isinstance(v, Tensor):
        return f"Tensor({v.shape}, grad={v.requires_grad}, dtype={v.dtype})"
    return str(v)


def map_debug_info(a: Any) -> Any:
    """The same for every value in nested tuples, lists and dicts."""
    return pytree.tree_map(friendly_debug_info, a)
