"""A pipeline of passes is a pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from penstock.schedule.base import Schedule

Pass = Callable[[Schedule], Schedule]
"""Schedule in, Schedule out, the argument untouched."""


def compose(*passes: Pass) -> Pass:
    """The pass that applies ``passes`` from first to last; without any, the one that changes nothing."""
    return lambda schedule: reduce(lambda made, apply: apply(made), passes, schedule)
