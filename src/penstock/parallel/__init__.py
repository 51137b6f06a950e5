"""Adapters to what torch shards and replicates: DTensor, DeviceMesh, DDP, FSDP2.

Names are found when they are first used: torch takes half a second for its part of DTensors, which few need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazily import lazily

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

__getattr__ = lazily(
    __name__,
    {
        "adapter": "Adapter adapter_of",
        "crossing": "let_cross",
        "groups": "group_across group_of seat",
        "tensors": "gathered global_norms is_sharded local_part merge_sharded region_of "
        "replicated replicated_like split_sharded spread whole with_local",
    },
)
