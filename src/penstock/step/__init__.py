"""What a training step adds to running a program: the loss, norms, results."""

from penstock.step.loss import Loss, LossFunction, Reduction, total
from penstock.step.norms import gradient_norms, scale_gradients, total_norm
from penstock.step.result import StepResult, TimelineKind
from penstock.step.statistics import BatchStatistics, WholeBatch, check_statistics

__all__ = [
    "BatchStatistics",
    "Loss",
    "LossFunction",
    "Reduction",
    "StepResult",
    "TimelineKind",
    "WholeBatch",
    "check_statistics",
    "gradient_norms",
    "scale_gradients",
    "total",
    "total_norm",
]
