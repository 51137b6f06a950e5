"""The errors of this package. Each is also of the class that code written for torch catches."""

from __future__ import annotations

from penstock.errors import (
    InputFileError,
    MicrobatchError,
    PartitionError,
    ScheduleError,
    SpecError,
    UsageError,
)


class ChunkError(MicrobatchError, AssertionError):
    """Arguments that cannot be split as asked, or outputs that cannot be merged."""


class PlacementError(ScheduleError, RuntimeError, AssertionError):
    """Stages that are not where the schedule needs them, or actions that form no schedule."""


class CallError(UsageError, RuntimeError, AssertionError):
    """A method was called at the wrong time."""


class CutError(PartitionError, RuntimeError):
    """A model that cannot be traced, or cannot be cut where it was asked to be."""


class RowsError(InputFileError, RuntimeError):
    """A file that holds no schedule."""


class PathError(PartitionError, AttributeError):
    """A path at which the model has no module."""


class PipeliningMetadataError(SpecError, RuntimeError):
    """Tensors that differ from their descriptions."""
