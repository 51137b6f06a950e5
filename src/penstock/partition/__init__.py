"""Cut a model into stages."""

from penstock.partition.balance import choose_cuts
from penstock.partition.base import (
    Describe,
    Description,
    Example,
    Partition,
    Shared,
    Watched,
    find_shared,
    find_shared_between,
    named_tensors,
)
from penstock.partition.costs import Table, table
from penstock.partition.entry import cut_chain, cut_sequential, partition, unit_paths
from penstock.partition.traced import cut_into, cut_traced, weigh_blocks

__all__ = [
    "Describe",
    "Description",
    "Example",
    "Partition",
    "Shared",
    "Table",
    "Watched",
    "choose_cuts",
    "cut_chain",
    "cut_into",
    "cut_sequential",
    "cut_traced",
    "find_shared",
    "find_shared_between",
    "named_tensors",
    "partition",
    "table",
    "unit_paths",
    "weigh_blocks",
]
