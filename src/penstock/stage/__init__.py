"""One stage of a model: the work of one microbatch, without any communication."""

from penstock.stage.entrance import Entrance
from penstock.stage.stage import (
    Compilation,
    FrugalStage,
    Gradients,
    PipelineStage,
    home_of,
    without_compilation,
)

__all__ = [
    "Compilation",
    "Entrance",
    "FrugalStage",
    "Gradients",
    "PipelineStage",
    "home_of",
    "without_compilation",
]
