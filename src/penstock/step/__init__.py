"""What a training step adds to running a program: the loss and its weights, scaling, statistics, results."""

from penstock.step.loss import (
    Loss,
    LossFunction,
    LossOptions,
    LossWeight,
    Metric,
    NonFinite,
    Reduction,
    Replicas,
    Scale,
    Weights,
    nothing,
)
from penstock.step.scaler import LossScaler
from penstock.step.statistics import BatchStatistics, WholeBatch, check_statistics
from penstock.step.tally import StepResult, Sums, Tally, TimelineKind

__all__ = [
    "BatchStatistics",
    "Loss",
    "LossFunction",
    "LossOptions",
    "LossScaler",
    "LossWeight",
    "Metric",
    "NonFinite",
    "Reduction",
    "Replicas",
    "Scale",
    "StepResult",
    "Sums",
    "Tally",
    "TimelineKind",
    "Weights",
    "WholeBatch",
    "check_statistics",
    "nothing",
]
