"""Adapters to what torch shards and replicates: DTensor, DeviceMesh, DDP, FSDP2.

Names are found when they are first used: torch takes half a second for its part of DTensors, which few need.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.parallel.adapter import Adapter, adapter_of
    from penstock.parallel.crossing import let_cross
    from penstock.parallel.groups import group_across, group_of, seat
    from penstock.parallel.tensors import (
        gathered,
        global_norms,
        is_sharded,
        local_part,
        merge_sharded,
        region_of,
        replicated,
        replicated_like,
        split_sharded,
        spread,
        whole,
        with_local,
    )

_HOMES = {
    "Adapter": "adapter",
    "adapter_of": "adapter",
    "gathered": "tensors",
    "global_norms": "tensors",
    "group_across": "groups",
    "group_of": "groups",
    "is_sharded": "tensors",
    "let_cross": "crossing",
    "local_part": "tensors",
    "merge_sharded": "tensors",
    "region_of": "tensors",
    "replicated": "tensors",
    "replicated_like": "tensors",
    "seat": "groups",
    "split_sharded": "tensors",
    "spread": "tensors",
    "whole": "tensors",
    "with_local": "tensors",
}

__all__ = [
    "Adapter",
    "adapter_of",
    "gathered",
    "global_norms",
    "group_across",
    "group_of",
    "is_sharded",
    "let_cross",
    "local_part",
    "merge_sharded",
    "region_of",
    "replicated",
    "replicated_like",
    "seat",
    "split_sharded",
    "spread",
    "whole",
    "with_local",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
