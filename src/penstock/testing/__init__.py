"""The tools with which Penstock tests itself, also for its users' tests."""

from penstock.testing.faults import Fault, InjectedError, fail_at
from penstock.testing.oracle import Case, Refusal, Verdict, compare, judge, plain_loop
from penstock.testing.workers import WorkerError, WorkerPool

__all__ = [
    "Case",
    "Fault",
    "InjectedError",
    "Refusal",
    "Verdict",
    "WorkerError",
    "WorkerPool",
    "compare",
    "fail_at",
    "judge",
    "plain_loop",
]
