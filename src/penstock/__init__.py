"""Penstock: pipeline parallelism for PyTorch. Any model, any schedule, proven before it runs.

Names are found when they are first used, so that ``import penstock.schedule`` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.checkpoint import Checkpoints
    from penstock.partition import Partition
    from penstock.pipeline import Pipeline
    from penstock.rng import randomness
    from penstock.runtime import ActionEvent
    from penstock.stage import PipelineStage
    from penstock.step import LossScaler, Replicas, StepResult
    from penstock.step.losses import add_loss, collect_losses
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
    "StepResult": "penstock.step",
    "add_loss": "penstock.step.losses",
    "collect_losses": "penstock.step.losses",
    "init_weights": "penstock.weights",
    "randomness": "penstock.rng",
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
    "StepResult",
    "add_loss",
    "collect_losses",
    "init_weights",
    "randomness",
    "read_weights",
]


_PARTS = ("plan",)
"""Parts that are found by their names without being imported."""


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return import_module(f"penstock.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_PARTS])
