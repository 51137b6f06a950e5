"""Adapters to what torch shards and replicates: DTensor, DeviceMesh, DDP, FSDP2.

Names are imported on first use, since torch needs half a second to import DTensors, which few runs use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazily import lazily

if TYPE_CHECKING:
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
        let_cross,
        local_part,
        merge_sharded,
        put_together,
        region_of,
        replicated,
        replicated_like,
        settled,
        split_sharded,
        spread,
        take_apart,
        whole,
        with_local,
    )
    from penstock.parallel.wrapping import (
        Adapter,
        Part,
        adapter_of,
        alone,
        named_buffers,
        named_parameters,
        names_without_wrappers,
        over_replicas,
        parts_of,
        spreads_over_processes,
        unwrapped,
    )

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
    "put_together",
    "region_of",
    "replicated",
    "replicated_like",
    "replicated_mesh",
    "seat",
    "settled",
    "siblings_of",
    "split_sharded",
    "spread",
    "spreads_over_processes",
    "take_apart",
    "unwrapped",
    "whole",
    "with_local",
]

__getattr__ = lazily(
    __name__,
    {
        "groups": "Siblings group_across group_of replicated_mesh seat siblings_of",
        "tensors": "gathered global_norms is_sharded let_cross local_part merge_sharded put_together region_of settled take_apart "
        "replicated replicated_like split_sharded spread whole with_local",
        "wrapping": "Adapter Part adapter_of alone named_buffers named_parameters names_without_wrappers "
        "over_replicas parts_of spreads_over_processes unwrapped",
    },
)
