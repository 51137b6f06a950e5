"""Save a whole run in one call, and load it in another, in any layout."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from torch import Tensor

from penstock._engine.transport import Group, Job
from penstock._engine.weights.states import agree_to_load
from penstock.checkpoint.contents import Targets
from penstock.checkpoint.folder import Writer, find
from penstock.checkpoint.loading import Choosing, Loading
from penstock.checkpoint.saving import (
    Checkpoint,
    Planner,
    Saved,
    Writing,
    check_seen,
    settle,
    snapshots,
)
from penstock.errors import UsageError
from penstock.pipeline import Pipeline

_PATIENCE = 300.0
"""Seconds that a rank may take to save or load, besides writing, before it counts as silent."""
_PER_SECOND = 20e6
"""Bytes per second that a slow disk writes."""


class Checkpoints:
    """The checkpoints of a run, in a folder.

    A checkpoint does not depend on the layout: a run can resume with another schedule, other stages, more or
    fewer ranks or replicas, or as the unsplit model. A checkpoint is visible only when it is complete. See
    docs/saving-and-resuming.md. ::

        checkpoints = penstock.Checkpoints("run/checkpoints", keep=3)
        step = checkpoints.load(pipe=pipe, optimizer=opt, scheduler=sched, loader=loader) or 0
        for step in range(step, steps):
            ...
            checkpoints.save(step + 1, pipe=pipe, optimizer=opt, scheduler=sched, loader=loader)

    Args:
        folder: a folder for this run alone; all processes must see the same files there.
        keep: how many to keep, by default all; an old one is removed only when a newer one is complete.
        asynchronous: whether to write while training continues: the states are copied to the host, into
            memory as large as what this process writes, which is kept for reuse. The next call raises a
            failure; if there is none, the process reports it when it ends, and exits with status 70.
        group: a process group of all processes of the run, if these are more than the ranks of the
            pipeline and its replicas.

    Raises:
        UsageError: ``keep`` is not a whole number of at least 1.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: int | None = None,
        *,
        asynchronous: bool = False,
        group: Any = None,
    ) -> None:
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise UsageError(
                f"keep={keep!r}: must be how many checkpoints to keep, at least 1, or None"
            )
        self.folder = Path(folder)
        self._asynchronous = asynchronous
        self._group = group
        self._writer = Writer(self.folder, keep)
        self._planner = Planner()
        self._snapshots: dict[str, Tensor] = {}
        self._pending: Writing | None = None
        self._last: Checkpoint | None = None
        self._complete: Callable[[], None] | None = None
        self._extra: Any = None
        self._skipped: list[str] = []

    # ---- saving

    def claim(self) -> None:
        """Take the folder before the first checkpoint is saved; the leading process calls this.

        It is this run's until :meth:`close`, or until nothing refers to this object.

        Raises:
            UsageError: another run writes into the folder.
            StorageError: the folder cannot be written to.
        """
        self._writer.hold()

    def check_shared(self, pipe: Pipeline) -> None:
        """Check that all processes of a pipeline and of those beside it see the same folder; all call this.

        Raises:
            CheckpointError: some host does not see what the leader writes there.
        """
        check_seen(_job(pipe, self._group), self.folder)

    def save(self, step: int, *, extra: Any = None, **states: Any) -> Saved:
        """Save a run between two steps; all its processes must call this.

        Args:
            step: the number of completed steps; :meth:`load` returns it.
            extra: JSON data of your own, which :attr:`extra` holds after loading.
            states: what to save, under names that :meth:`load` must use too: ``pipe=`` a Pipeline, or
                ``model=`` the unsplit module; ``optimizer=``, ``scheduler=``, ``scaler=``, ``loader=`` and
                whatever else has ``state_dict()`` and ``load_state_dict()``. None is skipped. Optimizers
                are saved by their parameters' names. A pipeline's random state is saved with it.

        Raises:
            CheckpointError: some process could not write; earlier checkpoints are unchanged.
            UsageError: an argument cannot be saved, or another run writes into the folder.
        """
        started = time.perf_counter()
        self.wait()
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise UsageError(f"step={step!r}: must be the number of steps made, from 0")
        targets = Targets(states)
        job = _job(targets.pipe, self._group)
        with job.calling("Checkpoints.save", _PATIENCE):
            checkpoint = self._planner.begin(job, targets, step, extra, self._writer)
        with job.calling("Checkpoints.save", _seconds_for(checkpoint)):
            try:
                live = checkpoint.tensors
                if self._asynchronous:
                    checkpoint.tensors = self._snapshots = snapshots(live, self._snapshots)
                settle(live.values())
                self._pending = Writing(checkpoint, job, self._writer)
                self._complete = targets.pipe.job.when_checkpointed() if targets.pipe else None
            except BaseException:
                shutil.rmtree(checkpoint.folder, ignore_errors=True)
                raise
            if not self._asynchronous:
                self.wait()
        checkpoint.stall, self._last = time.perf_counter() - started, checkpoint
        return checkpoint.saved

    def wait(self) -> None:
        """Wait until a checkpoint that is being written is complete; all processes must call this.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            with pending.job.calling("Checkpoints.wait", _seconds_for(pending.checkpoint)):
                pending.wait()
            if self._complete is not None:
                self._complete()

    @property
    def last(self) -> Saved | None:
        """The result of the last save, as far as it is known."""
        return None if self._last is None else self._last.saved

    # ---- loading

    def load(
        self,
        step: int | None = None,
        *,
        strict: bool = True,
        resume: Literal["newest", "auto"] = "newest",
        **states: Any,
    ) -> int | None:
        """Load the checkpoint that was written last, or that of a step; all processes of the run call this.

        Each process reads what it needs, after checking that the data is present, fits and is undamaged.

        Args:
            step: the step of the checkpoint; by default the one written last.
            strict: whether anything missing, unexpected or of another type is an error. Otherwise a warning
                lists it, and what fits is loaded; weights, and optimizer states of a weight's type, are
                cast to the type that the weight has here.
            resume: what to do if the checkpoint that was written last is damaged: ``"newest"`` is an error,
                ``"auto"`` takes the newest one that is whole, and a warning says so.
            states: what to load, by the names under which it was saved. Nothing else is loaded.

        Returns:
            The checkpoint's step; None if there is no checkpoint, and nothing was changed.

        Raises:
            StateDictError: the checkpoint does not fit; the message lists all mismatches; nothing is changed.
            InputFileError: the checkpoint is damaged; nothing is changed.
            StorageError: a file system fails, or a file is not there; nothing is changed.
        """
        self.wait()
        targets = Targets(states)
        if resume not in ("newest", "auto"):
            raise UsageError(f"resume={resume!r}: must be 'newest' or 'auto'")
        job = _job(targets.pipe, self._group)
        choosing = Choosing(self.folder, step, older=resume == "auto")
        with job.calling("Checkpoints.load", 10 * _PATIENCE):
            if not job.together.rank:
                self._writer.tidy()
            table = choosing.choose(job)
            if table is None:
                return None
            loading = Loading(table, targets)
            agree_to_load(job, job.together, loading.match, partial(loading.check, strict))
            job.meet(loading.read, doing="load")
            job.meet(loading.fill, doing="load")
        self._extra, self._skipped = loading.extra, choosing.skipped
        if targets.pipe is not None:
            targets.pipe.job.when_checkpointed()()
        return loading.step

    @property
    def skipped(self) -> Sequence[str]:
        """Why newer checkpoints were not loaded, where ``resume="auto"`` took an older one."""
        return tuple(self._skipped)

    @property
    def extra(self) -> Any:
        """The ``extra=`` of the checkpoint that was loaded last."""
        return self._extra

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, the latest first."""
        return [one.step for one in find(self.folder)]

    def close(self) -> None:
        """Wait for a pending checkpoint, and let another run write into the folder."""
        try:
            self.wait()
        finally:
            self._writer.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error other processes may have gone, so do not wait for them.
        if error is None:
            self.close()
        elif self._pending is None or self._pending.is_settled():
            self._writer.close()


def _seconds_for(checkpoint: Checkpoint) -> float:
    """Seconds that this process may take to write before it counts as silent."""
    return _PATIENCE + sum(tensor.nbytes for tensor in checkpoint.tensors.values()) / _PER_SECOND


def _job(pipe: Pipeline | None, group: Any) -> Job:
    """All processes of a run: those of a pipeline and the pipelines beside it, or of a process group."""
    if pipe is not None and group is None:
        return pipe.job
    return Job(group=Group(group), activity=None if pipe is None else pipe.job.activity)
