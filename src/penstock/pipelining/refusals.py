"""Errors of this face: they are also what users of torch catch there."""

from __future__ import annotations

from penstock.errors import MicrobatchError, ScheduleError, UsageError


class ChunkError(MicrobatchError, AssertionError):
    """Arguments that cannot be split as asked, or outputs that cannot be merged."""


class PlacementError(ScheduleError, RuntimeError, AssertionError):
    """Stages that are not where the schedule needs them, or actions that are no schedule."""


class CallError(UsageError, RuntimeError, AssertionError):
    """A method that was called at the wrong time."""
