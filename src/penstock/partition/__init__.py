"""Cut a model into stages."""

from penstock.partition.balance import Room, choose_cuts
from penstock.partition.base import (
    Example,
    Partition,
    Shared,
    find_shared,
    find_shared_between,
    named_tensors,
)
from penstock.partition.cutting import Cutting, explained, partition, unit_calls
from penstock.partition.draws import randomness
from penstock.partition.interception import Interceptor
from penstock.partition.planning import CallPlan
from penstock.partition.snapshot import Snapshot, state_kept

__all__ = [
    "CallPlan",
    "Cutting",
    "Example",
    "Interceptor",
    "Partition",
    "Room",
    "Shared",
    "Snapshot",
    "choose_cuts",
    "explained",
    "find_shared",
    "find_shared_between",
    "named_tensors",
    "partition",
    "randomness",
    "state_kept",
    "unit_calls",
]
