"""What a training step adds to running a program: the loss, norms, results."""

from penstock.step.loss import Loss, LossFunction, Reduction, total
from penstock.step.norms import gradient_norms, scale_gradients, total_norm
from penstock.step.result import StepResult, TimelineKind

__all__ = [
    "Loss",
    "LossFunction",
    "Reduction",
    "StepResult",
    "TimelineKind",
    "gradient_norms",
    "scale_gradients",
    "total",
    "total_norm",
]
