"""The pipeline: how it is set up, and what its calls do."""

from penstock.pipeline.default_loss import author_of, is_named, label_names, own_loss
from penstock.pipeline.engine import CallArguments, Engine
from penstock.pipeline.outputs import Outputs
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.setup import before_meeting
from penstock.pipeline.watching import (
    SlowWarning,
    StepEvent,
    StepHook,
    TensorBoard,
    peak_flops,
    peak_memory,
)
from penstock.pipeline.weights import ModelWeights

__all__ = [
    "CallArguments",
    "Engine",
    "ModelWeights",
    "Outputs",
    "Pipeline",
    "SlowWarning",
    "StepEvent",
    "StepHook",
    "TensorBoard",
    "author_of",
    "before_meeting",
    "is_named",
    "label_names",
    "own_loss",
    "peak_flops",
    "peak_memory",
]
