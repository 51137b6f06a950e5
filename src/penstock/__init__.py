"""Penstock: pipeline parallelism for PyTorch, with unedited models and any schedule.

Submodules such as :mod:`penstock.schedule` and the names below are imported on first use, so that
``import penstock`` is quick, and code that needs no torch does not import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock._engine.lazily import lazily

if TYPE_CHECKING:
    from penstock import backward as backward
    from penstock import checkpoint as checkpoint
    from penstock import doctor as doctor
    from penstock import errors as errors
    from penstock import integrations as integrations
    from penstock import losses as losses
    from penstock import partition as partition
    from penstock import pipeline as pipeline
    from penstock import pipelining as pipelining
    from penstock import plan as plan
    from penstock import schedule as schedule
    from penstock import stage as stage
    from penstock import testing as testing
    from penstock import train as train
    from penstock._engine.faults import Timeouts as Timeouts
    from penstock._engine.microbatches import REPLICATE as REPLICATE
    from penstock._engine.microbatches import Microbatches as Microbatches
    from penstock._engine.microbatches import Split as Split
    from penstock._engine.runtime import ActionEvent as ActionEvent
    from penstock._engine.runtime import GracefulStop as GracefulStop
    from penstock._engine.runtime import Loss as Loss
    from penstock._engine.runtime import LossScaler as LossScaler
    from penstock._engine.runtime import StepResult as StepResult
    from penstock._engine.runtime import add_loss as add_loss
    from penstock._engine.runtime import collect_losses as collect_losses
    from penstock._engine.runtime import overlap_collectives as overlap_collectives
    from penstock._engine.transport import Job as Job
    from penstock._engine.transport import Replicas as Replicas
    from penstock._engine.weights import init_weights as init_weights
    from penstock._engine.weights import load_partition as load_partition
    from penstock._engine.weights import parameters_on_meta as parameters_on_meta
    from penstock._engine.weights import read_weights as read_weights
    from penstock.checkpoint import Checkpoints as Checkpoints
    from penstock.integrations import PipelineModule as PipelineModule
    from penstock.partition import Partition as Partition
    from penstock.partition import randomness as randomness
    from penstock.pipeline import ModelWeights as ModelWeights
    from penstock.pipeline import Pipeline as Pipeline
    from penstock.pipeline import SlowWarning as SlowWarning
    from penstock.pipeline import StepEvent as StepEvent
    from penstock.pipeline import TensorBoard as TensorBoard
    from penstock.stage import PairBackward as PairBackward
    from penstock.stage import PairForward as PairForward
    from penstock.stage import PipelineStage as PipelineStage

__version__ = "0.1.0"
__all__, __getattr__, __dir__ = lazily(__name__)
