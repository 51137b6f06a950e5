"""Cut a model into stages."""

from penstock.partition.base import Partition
from penstock.partition.chain import cut_chain, cut_sequential
from penstock.partition.export import save_index, save_stage

__all__ = ["Partition", "cut_chain", "cut_sequential", "save_index", "save_stage"]
