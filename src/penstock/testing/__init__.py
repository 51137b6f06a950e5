"""The tools with which Penstock tests itself, also for its users' tests."""

from penstock.testing.counting import Channel, CountingTransport, Traffic, count_messages
from penstock.testing.faults import Fault, InjectedError, fail_at
from penstock.testing.oracle import Case, Verdict, compare, plain_loop
from penstock.testing.workers import WorkerError, WorkerPool

__all__ = [
    "Case",
    "Channel",
    "CountingTransport",
    "Fault",
    "InjectedError",
    "Traffic",
    "Verdict",
    "WorkerError",
    "WorkerPool",
    "compare",
    "count_messages",
    "fail_at",
    "plain_loop",
]
