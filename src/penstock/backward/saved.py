"""What autograd nodes have saved for backward: find it, read it once more, and drop it early.

The ``_raw_saved_*`` attributes are described in torch's notes on autograd, "Hooks for saved tensors".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NoReturn

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils import checkpoint


def is_checkpointed(node: Node) -> bool:
    """Says whether running ``node`` recomputes a region of non-reentrant checkpointing."""
    return any(map(is_recomputed, _saved(node)))


def is_recomputed(saved: Any) -> bool:
    """Says whether reading a saved tensor recomputes a region of non-reentrant checkpointing."""
    if saved.unpack_hook is None or type(saved.data).__module__ != checkpoint.__name__:
        return False
    return hasattr(saved.data, "handles")


def read_early(node: Any, name: str) -> Tensor:
    """Returns a saved tensor that a checkpoint recomputes, and lets the node read it after this.

    A checkpoint hands out each tensor once in a backward pass and notes that with the tensor's holder; the
    note is not taken here. Seen in torch 2.13.
    """
    holder = getattr(node, f"_raw{name}").data
    holder.handles = _WithoutNotes(holder.handles)
    try:
        found: Tensor = getattr(node, name)
    finally:
        holder.handles = dict(holder.handles)
    return found


class _WithoutNotes(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        if value is not None:
            super().__setitem__(key, value)


def has_hooks(node: Node) -> bool:
    """Says whether hooks handle what ``node`` saved, as in a region that will be or is recomputed."""
    if not _attributes(type(node)):
        return False
    return any(saved.unpack_hook is not None for saved in _saved(node))


def release(nodes: Iterable[Node]) -> None:
    """Drops what ``nodes`` saved; they cannot run again.

    What a hook on saved tensors already handles is left to it: torch allows no second hook.
    """
    for node in nodes:
        for saved in _saved(node):
            with contextlib.suppress(RuntimeError):
                saved.register_hooks(_drop, _complain)


def _saved(node: Node) -> Iterator[Any]:
    for name in _attributes(type(node)):
        saved = getattr(node, name)
        if isinstance(saved, tuple):
            yield from saved
        elif saved is not None:
            yield saved


# A function in Python may have a type of its own for each call: not all may be remembered.
@lru_cache(1024)
def _attributes(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _drop(_: Tensor) -> None:
    """Packs a tensor into nothing."""


def _complain(_: object) -> NoReturn:
    raise RuntimeError(
        "what this node saved was freed after the inputs' half of backward; "
        "the weights' half does not need it, so something else runs the graph once more"
    )
