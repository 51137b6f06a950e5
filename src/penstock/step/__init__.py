"""What a training step adds to running a program: the loss, norms, results."""

from penstock.step.loss import Loss, LossFunction, Reduction, total
from penstock.step.norms import scale_gradients, squared_norms
from penstock.step.result import StepResult, TimelineKind

__all__ = [
    "Loss",
    "LossFunction",
    "Reduction",
    "StepResult",
    "TimelineKind",
    "scale_gradients",
    "squared_norms",
    "total",
]
