"""A fault on one rank becomes a named error on all: heartbeats in the store, a monitor, and reports.

Names are imported on first use, so that the command line can handle signals without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazily import lazily

if TYPE_CHECKING:
    from penstock.faults.activity import RENDEZVOUS, Activity, Patience, Timeout, add_probe
    from penstock.faults.failure import (
        Failure,
        failing_module,
        status_of,
        versions,
        without_own_frames,
    )
    from penstock.faults.meeting import Meeting, end_waits, meet
    from penstock.faults.processes import this_host
    from penstock.faults.silence import Place, find_silent
    from penstock.faults.watch import Watch

__all__ = [
    "RENDEZVOUS",
    "Activity",
    "Failure",
    "Meeting",
    "Patience",
    "Place",
    "Timeout",
    "Watch",
    "add_probe",
    "end_waits",
    "failing_module",
    "find_silent",
    "meet",
    "status_of",
    "this_host",
    "versions",
    "without_own_frames",
]

__getattr__ = lazily(
    __name__,
    {
        "activity": "RENDEZVOUS Activity Patience Timeout add_probe",
        "failure": "Failure failing_module status_of versions without_own_frames",
        "meeting": "Meeting end_waits meet",
        "processes": "this_host",
        "silence": "Place find_silent",
        "watch": "Watch",
    },
)
