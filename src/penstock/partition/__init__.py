"""Cut a model into stages."""

from penstock.partition.balance import choose_cuts
from penstock.partition.base import Describe, Description, Partition, Shared, named_tensors
from penstock.partition.chain import cut_chain, cut_sequential
from penstock.partition.export import save_index, save_stage
from penstock.partition.reading import WeightFiles, read_weights
from penstock.partition.shared import find_shared, find_shared_between

__all__ = [
    "Describe",
    "Description",
    "Partition",
    "Shared",
    "WeightFiles",
    "choose_cuts",
    "cut_chain",
    "cut_sequential",
    "find_shared",
    "find_shared_between",
    "named_tensors",
    "read_weights",
    "save_index",
    "save_stage",
]
