"""What Penstock tests itself with, for its users' tests too."""

from penstock.testing.counting import CountingTransport, Traffic, count_messages
from penstock.testing.oracle import Case, Verdict, compare, plain_loop
from penstock.testing.workers import WorkerError, WorkerPool

__all__ = [
    "Case",
    "CountingTransport",
    "Traffic",
    "Verdict",
    "WorkerError",
    "WorkerPool",
    "compare",
    "count_messages",
    "plain_loop",
]
