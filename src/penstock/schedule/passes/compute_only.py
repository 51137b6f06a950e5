"""Leave out what only moves data."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.schedule.action import COMPUTE_OPS, Entry, Overlap, Program
from penstock.schedule.base import Schedule


def compute_only(schedule: Schedule) -> Schedule:
    """Leave F, I, W, B and overlapped pairs: the form in which schedules are written by hand."""
    return schedule.with_programs(map(_computing, schedule.programs))


def _computing(program: Program) -> Iterator[Entry]:
    return (entry for entry in program if isinstance(entry, Overlap) or entry.op in COMPUTE_OPS)
