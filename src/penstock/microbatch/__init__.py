"""Split a batch into microbatches, and merge the outputs of microbatches."""

from penstock.microbatch.batch import MISSING, Batch, Microbatch, Microbatches
from penstock.microbatch.merging import merge, output_dim
from penstock.microbatch.rules import (
    OUTPUT,
    REPLICATE,
    TARGET,
    CallSplitter,
    Replicate,
    Rule,
    Rules,
    Split,
    Splitter,
    check_rules,
)
from penstock.microbatch.splitting import split, split_batch

__all__ = [
    "MISSING",
    "OUTPUT",
    "REPLICATE",
    "TARGET",
    "Batch",
    "CallSplitter",
    "Microbatch",
    "Microbatches",
    "Replicate",
    "Rule",
    "Rules",
    "Split",
    "Splitter",
    "check_rules",
    "merge",
    "output_dim",
    "split",
    "split_batch",
]
