"""Cut a model into stages."""

from penstock.partition.balance import choose_cuts
from penstock.partition.base import Describe, Description, Partition, Shared, named_tensors
from penstock.partition.chain import cut_chain, cut_sequential
from penstock.partition.costs import StageCost, stage_costs
from penstock.partition.entry import Example, partition
from penstock.partition.export import save_index, save_stage
from penstock.partition.loading import load_partition, load_stage, load_stages, parameters_on_meta
from penstock.partition.reading import WeightFiles, read_weights
from penstock.partition.shared import Watched, find_shared, find_shared_between
from penstock.partition.table import Table, table
from penstock.partition.traced import cut_into, cut_traced, weigh_blocks

__all__ = [
    "Describe",
    "Description",
    "Example",
    "Partition",
    "Shared",
    "StageCost",
    "Table",
    "Watched",
    "WeightFiles",
    "choose_cuts",
    "cut_chain",
    "cut_into",
    "cut_sequential",
    "cut_traced",
    "find_shared",
    "find_shared_between",
    "load_partition",
    "load_stage",
    "load_stages",
    "named_tensors",
    "parameters_on_meta",
    "partition",
    "read_weights",
    "save_index",
    "save_stage",
    "stage_costs",
    "table",
    "weigh_blocks",
]
