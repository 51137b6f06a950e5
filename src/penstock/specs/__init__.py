"""What a value between stages is: structure, shapes, dtypes; as JSON."""

from penstock.specs.classes import register_type
from penstock.specs.constants import Structure
from penstock.specs.hooks import isolate_hooks
from penstock.specs.inference import (
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
from penstock.specs.signature import named_arguments
from penstock.specs.sizes import Family, Form, Found, NotGeneral, Unknowns
from penstock.specs.structure import flatten, paths, unflatten
from penstock.specs.tensors import TensorSpec
from penstock.specs.trial import attributes_kept, randomness_kept
from penstock.specs.value import ValueSpec

__all__ = [
    "Family",
    "Form",
    "Found",
    "Inferred",
    "NotGeneral",
    "Structure",
    "TensorSpec",
    "Unknowns",
    "ValueSpec",
    "attributes_kept",
    "autocast_types",
    "flatten",
    "forms_of_arguments",
    "found_of",
    "infer",
    "infer_output",
    "isolate_hooks",
    "named_arguments",
    "new_family",
    "paths",
    "randomness_kept",
    "register_type",
    "spec_of_arguments",
    "spec_of_forms",
    "surely_reached",
    "unflatten",
]
