"""The API of ``torch.distributed.pipelining`` on Penstock's engine: only the import has to change.

Modules that torch has as well bear its names: ``schedules``, ``stage``, ``microbatch``, ``_IR``,
``_backward`` and ``_utils``. They stand on four others: ``rows`` holds schedules in
torch's form, ``running`` runs them, ``by_hand`` lets users drive stages, and ``traced`` traces models and
cuts them.
"""

from penstock.pipelining._IR import Pipe, SplitPoint, pipe_split, pipeline
from penstock.pipelining._utils import PipeInfo
from penstock.pipelining.schedules import (
    PipelineActivationLiveness,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    analyze_pipeline_activation_liveness,
)
from penstock.pipelining.schedules import ScheduleForwardOnly as _ScheduleForwardOnly
from penstock.pipelining.stage import PipelineStage, PipelineStageInfo, build_stage

__all__ = [
    "Pipe",
    "PipeInfo",
    "PipelineActivationLiveness",
    "PipelineStage",
    "PipelineStageInfo",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "SplitPoint",
    "_ScheduleForwardOnly",
    "analyze_pipeline_activation_liveness",
    "build_stage",
    "pipe_split",
    "pipeline",
]
