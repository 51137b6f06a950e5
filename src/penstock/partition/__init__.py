"""Cut a model into stages."""

from penstock.partition.base import Describe, Description, Partition, Shared
from penstock.partition.chain import cut_chain, cut_sequential
from penstock.partition.export import save_index, save_stage

__all__ = [
    "Describe",
    "Description",
    "Partition",
    "Shared",
    "cut_chain",
    "cut_sequential",
    "save_index",
    "save_stage",
]
