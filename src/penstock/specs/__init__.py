"""What a value between stages is: structure, shapes, dtypes; as JSON."""

from penstock.specs.inference import autocast_types, infer_output, spec_of_arguments
from penstock.specs.signature import named_arguments
from penstock.specs.structure import Structure, flatten, unflatten
from penstock.specs.value import TensorSpec, ValueSpec

__all__ = [
    "Structure",
    "TensorSpec",
    "ValueSpec",
    "autocast_types",
    "flatten",
    "infer_output",
    "named_arguments",
    "spec_of_arguments",
    "unflatten",
]
