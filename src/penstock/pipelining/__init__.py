"""torch's names on Penstock's engine: change ``torch.distributed.pipelining`` to ``penstock.pipelining``."""

from penstock.pipelining._utils import PipeInfo
from penstock.pipelining.running.single import ScheduleForwardOnly as _ScheduleForwardOnly
from penstock.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from penstock.pipelining.stage import PipelineStage, build_stage
from penstock.pipelining.tracing.pipe import Pipe
from penstock.pipelining.tracing.split import SplitPoint, pipe_split, pipeline

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
    "_ScheduleForwardOnly",
    "build_stage",
    "pipe_split",
    "pipeline",
]
