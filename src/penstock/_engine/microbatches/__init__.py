"""Batches that are split into microbatches by rules, and outputs that are merged."""

from penstock._engine.microbatches.batch import MISSING, Batch, Microbatch, Microbatches
from penstock._engine.microbatches.images import ByImages, image_tokens, rules_with_images
from penstock._engine.microbatches.merging import Ways, merge
from penstock._engine.microbatches.rules import (
    OUTPUT,
    REPLICATE,
    TARGET,
    CallSplitter,
    ItemRule,
    Replicate,
    Rule,
    Rules,
    RulesGiven,
    Split,
    Splitter,
    output_rule,
    read_rules,
)
from penstock._engine.microbatches.slicing import sliced
from penstock._engine.microbatches.splitting import KnownCuts, split_batch
from penstock._engine.microbatches.tokens import labels_that_count

__all__ = [
    "MISSING",
    "OUTPUT",
    "REPLICATE",
    "TARGET",
    "Batch",
    "ByImages",
    "CallSplitter",
    "ItemRule",
    "KnownCuts",
    "Microbatch",
    "Microbatches",
    "Replicate",
    "Rule",
    "Rules",
    "RulesGiven",
    "Split",
    "Splitter",
    "Ways",
    "image_tokens",
    "labels_that_count",
    "merge",
    "output_rule",
    "read_rules",
    "rules_with_images",
    "sliced",
    "split_batch",
]
