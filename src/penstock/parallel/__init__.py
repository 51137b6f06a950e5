"""Adapters to what torch shards and replicates: DTensor, DeviceMesh, DDP, FSDP2."""

from penstock.parallel.dtensors import is_dtensor, merge_dtensors, split_dtensor
from penstock.parallel.groups import group_of, seat

__all__ = ["group_of", "is_dtensor", "merge_dtensors", "seat", "split_dtensor"]
