"""A fault on one rank is a named error on all: heartbeats, a failure channel, a watch, and a report."""

from penstock.faults.activity import Activity, add_probe
from penstock.faults.board import Board, BoardLostError, FolderBoard, StoreBoard
from penstock.faults.failure import Failure, failing_module, status_of, without_own_frames
from penstock.faults.meeting import Meeting
from penstock.faults.patience import Patience, Timeout
from penstock.faults.processes import Process, this_process
from penstock.faults.rendezvous import PATIENCE
from penstock.faults.report import versions
from penstock.faults.watch import Watch

__all__ = [
    "PATIENCE",
    "Activity",
    "Board",
    "BoardLostError",
    "Failure",
    "FolderBoard",
    "Meeting",
    "Patience",
    "Process",
    "StoreBoard",
    "Timeout",
    "Watch",
    "add_probe",
    "failing_module",
    "status_of",
    "this_process",
    "versions",
    "without_own_frames",
]
