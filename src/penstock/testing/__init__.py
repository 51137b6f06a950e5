"""What Penstock tests itself with, for its users' tests too."""

from penstock.testing.oracle import Case, Verdict, compare, plain_loop
from penstock.testing.workers import WorkerError, WorkerPool

__all__ = ["Case", "Verdict", "WorkerError", "WorkerPool", "compare", "plain_loop"]
