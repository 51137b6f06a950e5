"""Recompute a unit in its backward without running its state on a second time.

A unit may change what it keeps while it runs: running statistics, a codebook, the vectors of spectral_norm.
The second run must begin where the first one began, or it gives other activations, and must leave behind what
the first one left, or the state moves twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as checkpointing

from penstock.errors import PartitionError, StageError
from penstock.partition.snapshot import Snapshot

Run = Callable[..., Any]


def recomputed(
    run: Run, unit: nn.Module | None, name: str, again: Callable[[], Any] | None = None
) -> Run:
    """A call of a unit that runs again in its backward, and draws the same there.

    Args:
        run: makes the call.
        unit: the unit, whose state moves once; None in a checkpoint of the author's, where it moves twice.
        name: the path of the unit, for messages.
        again: makes the context in which it runs again, for what only surrounds the first run.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        function = run if unit is None else _Repeatable(run, unit)
        if again is not None:
            function = _later_within(function, again)
        try:
            return checkpointing.checkpoint(function, *args, use_reentrant=False, **kwargs)
        except RuntimeError as error:
            if unit is None or "saved tensor hooks" not in str(error):
                raise
            raise PartitionError(
                f"{name} takes gradients by torch.func, and PyTorch cannot recompute such code ({error}); "
                "leave this module out of recompute="
            ) from error

    return call


def _later_within(run: Run, again: Callable[[], Any]) -> Run:
    been = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal been
        with again() if been else nullcontext():
            been = True
            return run(*args, **kwargs)

    return call


class _Repeatable:
    """One call of a unit, which begins with the same state each time, and changes it the first time alone."""

    def __init__(self, run: Run, unit: nn.Module) -> None:
        self._run, self._unit = run, unit
        self._begun: Snapshot | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._run(*args, **kwargs)
        if self._begun is None:
            return self._first(args, kwargs)
        with self._begun.again():
            return self._run(*args, **kwargs)

    def _first(self, args: Any, kwargs: Any) -> Any:
        begun = Snapshot(self._unit.modules())
        weights = [(name, p, p._version) for name, p in _weights(self._unit)]
        output = self._run(*args, **kwargs)
        for name, parameter, version in weights:
            if parameter._version != version:
                raise StageError(
                    f"{type(self._unit).__name__} changes its parameter {name} in place in its forward, "
                    "which must run again; make that a buffer, or leave the module out of recompute="
                )
        begun.note_written()
        self._begun = begun
        return output


def _weights(unit: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that a forward may not change: all but those of a table that keeps its rows short."""
    for path, part in unit.named_modules():
        if getattr(part, "max_norm", None) is None:
            yield from part.named_parameters(path, recurse=False)
