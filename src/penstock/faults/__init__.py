"""A fault on one rank becomes a named error on all: heartbeats, a place to report failures, and a watch.

Names are imported on first use, so that the command line can handle signals without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazily import lazily

if TYPE_CHECKING:
    from penstock.faults.failure import (
        Failure,
        failing_module,
        status_of,
        versions,
        without_own_frames,
    )
    from penstock.faults.processes import this_host
    from penstock.faults.progress import (
        FIRST_STEP,
        PATIENCE,
        Activity,
        Patience,
        Timeout,
        add_probe,
        has_probes,
    )
    from penstock.faults.rendezvous import SLACK, Rendezvous
    from penstock.faults.watch import Watch

__all__ = [
    "FIRST_STEP",
    "PATIENCE",
    "SLACK",
    "Activity",
    "Failure",
    "Patience",
    "Rendezvous",
    "Timeout",
    "Watch",
    "add_probe",
    "failing_module",
    "has_probes",
    "status_of",
    "this_host",
    "versions",
    "without_own_frames",
]

__getattr__ = lazily(
    __name__,
    {
        "failure": "Failure failing_module status_of versions without_own_frames",
        "processes": "this_host",
        "progress": "FIRST_STEP PATIENCE Activity Patience Timeout add_probe has_probes",
        "rendezvous": "SLACK Rendezvous",
        "watch": "Watch",
    },
)
