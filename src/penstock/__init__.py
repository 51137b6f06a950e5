"""Penstock: pipeline parallelism for PyTorch. Any model, any schedule, proven before it runs.

The parts, such as :mod:`penstock.schedule`, and the names below are imported when they are first used:
``import penstock`` is quick, and what needs no torch does not import it.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock import backward as backward
    from penstock import checkpoint as checkpoint
    from penstock import compiled as compiled
    from penstock import errors as errors
    from penstock import faults as faults
    from penstock import launch as launch
    from penstock import parallel as parallel
    from penstock import partition as partition
    from penstock import pipeline as pipeline
    from penstock import pipelining as pipelining
    from penstock import plan as plan
    from penstock import rng as rng
    from penstock import runtime as runtime
    from penstock import schedule as schedule
    from penstock import stage as stage
    from penstock import step as step
    from penstock import testing as testing
    from penstock import train as train
    from penstock import transport as transport
    from penstock import values as values
    from penstock import weights as weights
    from penstock.checkpoint import Checkpoints
    from penstock.partition import Partition
    from penstock.pipeline import Pipeline, StepEvent, TensorBoard
    from penstock.partition import randomness
    from penstock.runtime import ActionEvent
    from penstock.stage import PipelineStage
    from penstock.step import LossScaler, Replicas, StepResult
    from penstock.step.loss import add_loss, collect_losses
    from penstock.values import REPLICATE, Microbatches, Split
    from penstock.weights import init_weights, read_weights

__version__ = "0.1.0"

_HOMES = {
    "ActionEvent": "penstock.runtime",
    "Checkpoints": "penstock.checkpoint",
    "LossScaler": "penstock.step",
    "Microbatches": "penstock.values",
    "Partition": "penstock.partition",
    "Pipeline": "penstock.pipeline",
    "PipelineStage": "penstock.stage",
    "REPLICATE": "penstock.values",
    "Replicas": "penstock.step",
    "Split": "penstock.values",
    "StepEvent": "penstock.pipeline",
    "StepResult": "penstock.step",
    "TensorBoard": "penstock.pipeline",
    "add_loss": "penstock.step.loss",
    "collect_losses": "penstock.step.loss",
    "init_weights": "penstock.weights",
    "randomness": "penstock.partition",
    "read_weights": "penstock.weights",
}

__all__ = [
    "REPLICATE",
    "ActionEvent",
    "Checkpoints",
    "LossScaler",
    "Microbatches",
    "Partition",
    "Pipeline",
    "PipelineStage",
    "Replicas",
    "Split",
    "StepEvent",
    "StepResult",
    "TensorBoard",
    "add_loss",
    "collect_losses",
    "init_weights",
    "randomness",
    "read_weights",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    parts = (part.name for part in iter_modules(__path__) if not part.name.startswith("_"))
    return sorted({*globals(), *_HOMES, *parts})
