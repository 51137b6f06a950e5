"""The pipeline: how it is set up, and what its calls do."""

from penstock.pipeline.calls import CallArguments
from penstock.pipeline.job import PipelineJob
from penstock.pipeline.model_weights import ModelWeights
from penstock.pipeline.outputs import Outputs
from penstock.pipeline.pipeline import Pipeline, carry_out, check_in_fewer, driven, outputs_apart
from penstock.pipeline.watching import StepEvent, StepHook, TensorBoard, peak_flops, peak_memory

__all__ = [
    "CallArguments",
    "ModelWeights",
    "Outputs",
    "Pipeline",
    "PipelineJob",
    "StepEvent",
    "StepHook",
    "TensorBoard",
    "carry_out",
    "check_in_fewer",
    "driven",
    "outputs_apart",
    "peak_flops",
    "peak_memory",
]
