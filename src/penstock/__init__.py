"""Penstock: pipeline parallelism for PyTorch. Any model, any schedule, proven before it runs.

Names are found when they are first used, so that ``import penstock.schedule`` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.draws import randomness
    from penstock.engine import Pipeline
    from penstock.initial import init_weights
    from penstock.losses import add_loss, collect_losses
    from penstock.microbatch import REPLICATE, Microbatches, Split
    from penstock.partition import Partition, read_weights
    from penstock.runtime import ActionEvent
    from penstock.stage import PipelineStage
    from penstock.step import LossScaler, Replicas, StepResult

__version__ = "0.1.0"

_HOMES = {
    "ActionEvent": "penstock.runtime",
    "LossScaler": "penstock.step",
    "Microbatches": "penstock.microbatch",
    "Partition": "penstock.partition",
    "Pipeline": "penstock.engine",
    "PipelineStage": "penstock.stage",
    "REPLICATE": "penstock.microbatch",
    "Replicas": "penstock.step",
    "Split": "penstock.microbatch",
    "StepResult": "penstock.step",
    "add_loss": "penstock.losses",
    "collect_losses": "penstock.losses",
    "init_weights": "penstock.initial",
    "randomness": "penstock.draws",
    "read_weights": "penstock.partition",
}

__all__ = [
    "REPLICATE",
    "ActionEvent",
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
