"""Messages between ranks that are processes, over gloo, NCCL, and sockets for small ones."""

from __future__ import annotations

import torch
import torch.distributed as dist

from penstock._engine.faults import Activity, Meeting, Watch
from penstock._engine.transport.base import (
    FIRST_TAG,
    GRADIENTS,
    LEFT,
    VALUES,
    WEIGHTS,
    WORDS,
    Arrival,
    Channel,
    Sending,
    Transport,
)
from penstock._engine.transport.gloo import GlooTransport
from penstock._engine.transport.group import BROKEN, STEP, Group, launched
from penstock._engine.transport.job import Job, Replicas, collective
from penstock._engine.transport.nccl import NcclTransport

__all__ = [
    "BROKEN",
    "FIRST_TAG",
    "GRADIENTS",
    "LEFT",
    "STEP",
    "VALUES",
    "WEIGHTS",
    "WORDS",
    "Arrival",
    "Channel",
    "Group",
    "Job",
    "Replicas",
    "Sending",
    "Transport",
    "collective",
    "join",
    "launched",
]


def join(
    meeting: Meeting, watch: Watch, activity: Activity, device: torch.device, wait: float
) -> Transport:
    """This rank's transport; all ranks call this together.

    Args:
        meeting: where the ranks have met.
        watch: the watch over all ranks.
        activity: where this rank notes what it is doing, for the watch.
        device: where this rank's stages live.
        wait: seconds to wait for all ranks to connect.
    """
    gloo = GlooTransport(meeting, watch, activity, device, wait)
    if f"{device.type}:nccl" not in dist.get_backend_config(meeting.group).split(","):
        return gloo
    return NcclTransport(gloo, meeting, device)
