"""A fault on one rank is a named error on all: heartbeats, a failure channel, a watch, and a report."""

from penstock.faults.activity import Activity, add_probe, has_probes
from penstock.faults.failure import (
    Failure,
    failing_module,
    status_of,
    versions,
    without_own_frames,
)
from penstock.faults.processes import this_host
from penstock.faults.rendezvous import SLACK, Rendezvous
from penstock.faults.silence import FIRST_STEP, PATIENCE, Patience, Timeout
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
