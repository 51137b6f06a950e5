"""torch's names on Penstock's engine: change ``torch.distributed.pipelining`` to ``penstock.pipelining``."""

from penstock.pipelining.pipe import Pipe, PipeInfo, build_stage
from penstock.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from penstock.pipelining.split import SplitPoint, pipe_split, pipeline
from penstock.pipelining.stage import PipelineStage

__all__ = [
    "Pipe",
    "PipeInfo",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "SplitPoint",
    "build_stage",
    "pipe_split",
    "pipeline",
]
