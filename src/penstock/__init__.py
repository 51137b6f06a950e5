"""Penstock: pipeline parallelism for PyTorch. Any model, any schedule, proven before it runs.

Submodules such as :mod:`penstock.schedule` and the names below are imported on first use, so that
``import penstock`` is quick, and code that needs no torch does not import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazily import lazily

if TYPE_CHECKING:
    from penstock import backward as backward
    from penstock import checkpoint as checkpoint
    from penstock import compiled as compiled
    from penstock import devices as devices
    from penstock import doctor as doctor
    from penstock import elsewhere as elsewhere
    from penstock import errors as errors
    from penstock import faults as faults
    from penstock import integrations as integrations
    from penstock import launchers as launchers
    from penstock import masks as masks
    from penstock import microbatches as microbatches
    from penstock import parallel as parallel
    from penstock import partition as partition
    from penstock import pipeline as pipeline
    from penstock import pipelining as pipelining
    from penstock import plan as plan
    from penstock import rng as rng
    from penstock import runtime as runtime
    from penstock import schedule as schedule
    from penstock import stage as stage
    from penstock import testing as testing
    from penstock import train as train
    from penstock import transport as transport
    from penstock import values as values
    from penstock import weights as weights
    from penstock.checkpoint import Checkpoints as Checkpoints
    from penstock.faults import Timeouts as Timeouts
    from penstock.integrations import PipelineModule as PipelineModule
    from penstock.launchers import read_launcher as read_launcher
    from penstock.microbatches import REPLICATE as REPLICATE
    from penstock.microbatches import Microbatches as Microbatches
    from penstock.microbatches import Split as Split
    from penstock.partition import Partition as Partition
    from penstock.partition import randomness as randomness
    from penstock.pipeline import ModelWeights as ModelWeights
    from penstock.pipeline import Pipeline as Pipeline
    from penstock.pipeline import PipelineJob as PipelineJob
    from penstock.pipeline import SlowWarning as SlowWarning
    from penstock.pipeline import StepEvent as StepEvent
    from penstock.pipeline import TensorBoard as TensorBoard
    from penstock.runtime import ActionEvent as ActionEvent
    from penstock.runtime import GracefulStop as GracefulStop
    from penstock.runtime import Loss as Loss
    from penstock.runtime import LossScaler as LossScaler
    from penstock.runtime import Replicas as Replicas
    from penstock.runtime import StepResult as StepResult
    from penstock.runtime import add_loss as add_loss
    from penstock.runtime import collect_losses as collect_losses
    from penstock.stage import PipelineStage as PipelineStage
    from penstock.weights import init_weights as init_weights
    from penstock.weights import read_weights as read_weights

__version__ = "0.1.0"
__all__, __getattr__, __dir__ = lazily(__name__)
