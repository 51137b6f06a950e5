"""Watching a run: the event that hooks on steps get, and a writer for TensorBoard."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

try:
    import resource
except ModuleNotFoundError:  # Windows
    resource = None  # type: ignore[assignment]

from penstock._engine.devices import is_accelerator, name_of
from penstock._engine.runtime import StepResult
from penstock.errors import UsageError
from penstock.plan import device_called
from penstock.schedule.base import whole_number

logger = logging.getLogger("penstock")
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclass
class StepEvent:
    """A training step that is about to run, or has run.

    Attributes:
        step: the number of the step, counted from 1; it continues from a loaded checkpoint.
        is_main_process: whether this process prints and writes for all, see ``Pipeline.is_main_process``.
        device: where the stages of this process live.
        record: whether to note when each action runs; a hook before the step may set it, on every rank.
        result: what ``pipe.step`` returns; None before the step.
        seconds: how long the step took in this process; 0 before it.
    """

    step: int
    is_main_process: bool
    device: torch.device
    record: bool = False
    result: StepResult | None = None
    seconds: float = 0.0

    @property
    def memory(self) -> int:
        """The peak bytes of this process so far: allocated on a GPU, or resident without one."""
        return peak_memory(self.device)


StepHook = Callable[[StepEvent], object]


class SlowWarning:
    """Records some of the steps, and logs a warning for ranks and stages that are slow in them.

    ``pipe.on_step(penstock.SlowWarning(every=100))``. A step is held against the plan that the pipeline
    follows or, without one, against the first recorded step; see docs/profiling.md.

    Args:
        every: the number of steps after which one is recorded.

    Raises:
        UsageError: ``every`` is not a whole number of at least 1.
    """

    def __init__(self, every: int) -> None:
        self.every = whole_number("every", every)
        if self.every < 1:
            raise UsageError(f"every={every}: must be at least 1")

    def before(self, event: StepEvent) -> None:
        """Ask for a record of each step whose turn it is."""
        event.record = event.record or event.step % self.every == 0

    def __call__(self, event: StepEvent) -> None:
        """Log what was slow in a step whose turn it was."""
        result = event.result
        if result is None or event.step % self.every or not event.is_main_process:
            return
        for slow in result.slow:
            logger.warning("penstock: %s", slow)


class TensorBoard:
    """Writes the numbers of each step for TensorBoard; pass it to ``pipe.on_step``.

    Only the main process writes. Needs the package ``tensorboard``.

    Args:
        folder: the folder to write into.

    Raises:
        UsageError: tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            self._module = import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise UsageError(
                f"TensorBoard({os.fspath(folder)!r}): the package tensorboard is not installed; "
                "pip install 'penstock-pipeline[tensorboard]'"
            ) from error
        self._folder = os.fspath(folder)
        self._writer: Any = None
        self._step = 0

    def __call__(self, event: StepEvent) -> None:
        """Write the numbers of a step that has run."""
        self._step = event.step
        result = event.result
        if result is None or not event.is_main_process:
            return
        if self._writer is None:
            self._writer = self._module.SummaryWriter(self._folder)
        self.add("loss", result.loss)
        self.add("seconds", event.seconds)
        self.add("memory", event.memory)
        for name, value in result.losses.items():
            if len(result.losses) > 1:
                self.add(f"losses/{name}", value)
        for name, value in result.metrics.items():
            self.add(f"metrics/{name}", value)
        if result.bubble is not None:
            self.add("bubble", result.bubble)

    def add(self, name: str, value: float) -> None:
        """Write another number of the last step; processes that do not lead write nothing."""
        if self._writer is not None:
            self._writer.add_scalar(name, value, self._step)

    def close(self) -> None:
        """Flush what is still in memory, and close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """A device's peak operations per second in a type; None if unknown."""
    if not is_accelerator(device):
        return None
    known = device_called(name_of(device))
    name = str(dtype).removeprefix("torch.")
    if name == "float32" and torch.get_float32_matmul_precision() != "highest":
        name = "tf32"
    return None if known is None else known.flops.get(name)


def peak_memory(device: torch.device) -> int:
    """The peak bytes of this process so far: allocated on its device, or resident on a CPU.

    0 where the system does not tell, as on Windows.
    """
    if is_accelerator(device):
        return torch.accelerator.max_memory_allocated(device)
    if resource is None:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT
