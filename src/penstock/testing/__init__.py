"""The tools with which Penstock tests itself, also for its users' tests."""

from penstock.testing.faults import Fault, InjectedError, fail_at
from penstock.testing.oracle import Program, Refusal, Verdict, compare, judge, plain_loop
from penstock.testing.recording import Recorded, RecordingTransport, Traffic, record_messages
from penstock.testing.workers import WorkerError, WorkerPool

Case = Program  # The doctor's name for it, until it changes.

__all__ = [
    "Fault",
    "InjectedError",
    "Program",
    "Recorded",
    "RecordingTransport",
    "Refusal",
    "Traffic",
    "Verdict",
    "WorkerError",
    "WorkerPool",
    "compare",
    "fail_at",
    "judge",
    "plain_loop",
    "record_messages",
]
