"""What a value between stages is: structure, shapes, dtypes; as JSON."""

from penstock.specs.classes import register_type
from penstock.specs.constants import Structure
from penstock.specs.hooks import isolate_hooks
from penstock.specs.inference import (
    Inferred,
    autocast_types,
    infer,
    infer_output,
    spec_of_arguments,
)
from penstock.specs.signature import named_arguments
from penstock.specs.structure import flatten, paths, unflatten
from penstock.specs.tensors import TensorSpec
from penstock.specs.value import ValueSpec

__all__ = [
    "Inferred",
    "Structure",
    "TensorSpec",
    "ValueSpec",
    "autocast_types",
    "flatten",
    "infer",
    "infer_output",
    "isolate_hooks",
    "named_arguments",
    "paths",
    "register_type",
    "spec_of_arguments",
    "unflatten",
]
