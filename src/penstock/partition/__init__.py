"""Cut a model into stages."""

from penstock.partition.balance import choose_cuts
from penstock.partition.base import (
    Example,
    Partition,
    Shared,
    find_shared,
    find_shared_between,
    named_tensors,
)
from penstock.partition.entry import partition, randomness, trace, unit_paths
from penstock.partition.plan import CallPlan
from penstock.partition.seen import Door
from penstock.partition.trace import Trace

__all__ = [
    "CallPlan",
    "Door",
    "Example",
    "Partition",
    "Shared",
    "Trace",
    "choose_cuts",
    "find_shared",
    "find_shared_between",
    "named_tensors",
    "partition",
    "randomness",
    "trace",
    "unit_paths",
]
