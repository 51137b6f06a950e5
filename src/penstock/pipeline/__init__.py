"""The pipeline: how it is set up, and what its calls do."""

from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.watching import StepEvent, StepHook, TensorBoard, peak_flops, peak_memory

__all__ = ["Pipeline", "StepEvent", "StepHook", "TensorBoard", "peak_flops", "peak_memory"]
