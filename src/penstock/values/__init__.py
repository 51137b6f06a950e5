"""What travels: nested values, their shapes and types, and batches in parts."""

from penstock.values.batch import MISSING, Batch, Microbatch, Microbatches
from penstock.values.classes import register_type
from penstock.values.constants import Structure
from penstock.values.hooks import isolate_hooks
from penstock.values.inference import (
    Inferred,
    autocast_types,
    forms_of_arguments,
    found_of,
    infer,
    infer_output,
    new_family,
    spec_of_arguments,
    spec_of_forms,
    surely_reached,
)
from penstock.values.merging import merge, output_dim
from penstock.values.rules import (
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
from penstock.values.signature import named_arguments
from penstock.values.sizes import Family, Form, Found, NotGeneral, Unknowns
from penstock.values.splitting import split, split_batch
from penstock.values.structure import flatten, paths, unflatten
from penstock.values.tensors import TensorSpec
from penstock.values.trial import attributes_kept, randomness_kept
from penstock.values.value import ValueSpec

__all__ = [
    "MISSING",
    "OUTPUT",
    "REPLICATE",
    "TARGET",
    "Batch",
    "CallSplitter",
    "Family",
    "Form",
    "Found",
    "Inferred",
    "Microbatch",
    "Microbatches",
    "NotGeneral",
    "Replicate",
    "Rule",
    "Rules",
    "Split",
    "Splitter",
    "Structure",
    "TensorSpec",
    "Unknowns",
    "ValueSpec",
    "attributes_kept",
    "autocast_types",
    "check_rules",
    "flatten",
    "forms_of_arguments",
    "found_of",
    "infer",
    "infer_output",
    "isolate_hooks",
    "merge",
    "named_arguments",
    "new_family",
    "output_dim",
    "paths",
    "randomness_kept",
    "register_type",
    "spec_of_arguments",
    "spec_of_forms",
    "split",
    "split_batch",
    "surely_reached",
    "unflatten",
]
