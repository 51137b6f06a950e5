"""Adapters to what torch shards and replicates: DTensor, DeviceMesh, DDP, FSDP2.

Names are found when they are first used: torch takes half a second for its part of DTensors, which few need.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.parallel.adapter import Adapter, adapter_of, over_replicas
    from penstock.parallel.crossing import let_cross
    from penstock.parallel.groups import (
        Siblings,
        group_across,
        group_of,
        replicated_mesh,
        seat,
        siblings_of,
    )
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
    from penstock.parallel.wrapping import (
        Part,
        alone,
        named_buffers,
        named_parameters,
        names_without_wrappers,
        parts_of,
        spreads_over_processes,
        unwrapped,
    )

_HOMES = {
    "over_replicas": "adapter",
    "siblings_of": "groups",
    "replicated_mesh": "groups",
    "Siblings": "groups",
    "alone": "wrapping",
    "unwrapped": "wrapping",
    "spreads_over_processes": "wrapping",
    "parts_of": "wrapping",
    "names_without_wrappers": "wrapping",
    "named_parameters": "wrapping",
    "named_buffers": "wrapping",
    "Part": "wrapping",
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
    "Part",
    "Siblings",
    "adapter_of",
    "alone",
    "gathered",
    "global_norms",
    "group_across",
    "group_of",
    "is_sharded",
    "let_cross",
    "local_part",
    "merge_sharded",
    "named_buffers",
    "named_parameters",
    "names_without_wrappers",
    "over_replicas",
    "parts_of",
    "region_of",
    "replicated",
    "replicated_like",
    "replicated_mesh",
    "seat",
    "siblings_of",
    "split_sharded",
    "spread",
    "spreads_over_processes",
    "unwrapped",
    "whole",
    "with_local",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
