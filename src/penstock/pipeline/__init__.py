"""The pipeline: how it is set up, and what its calls do."""

from penstock.pipeline.calls import CallArguments
from penstock.pipeline.default_loss import author_of, is_named, label_names, own_loss
from penstock.pipeline.model_weights import ModelWeights
from penstock.pipeline.outputs import Outputs
from penstock.pipeline.pipeline import (
    Pipeline,
    carry_out,
    check_in_halves,
    cut_before,
    driven,
    joined,
    outputs_apart,
    run_backward,
    run_forward,
)
from penstock.pipeline.setup import before_meeting
from penstock.pipeline.watching import (
    SlowWarning,
    StepEvent,
    StepHook,
    TensorBoard,
    peak_flops,
    peak_memory,
)

__all__ = [
    "CallArguments",
    "ModelWeights",
    "Outputs",
    "Pipeline",
    "SlowWarning",
    "StepEvent",
    "StepHook",
    "TensorBoard",
    "author_of",
    "before_meeting",
    "carry_out",
    "check_in_halves",
    "cut_before",
    "driven",
    "is_named",
    "joined",
    "label_names",
    "outputs_apart",
    "own_loss",
    "peak_flops",
    "peak_memory",
    "run_backward",
    "run_forward",
]
