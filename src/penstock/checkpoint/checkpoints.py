"""Save a whole run in one call, and load it in one in any layout; show and export what was saved."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from penstock.checkpoint.contents import MODEL, Targets
from penstock.checkpoint.folder import TABLE, Found, Writer, find
from penstock.checkpoint.loading import Loading, Table
from penstock.checkpoint.saving import Background, Job, Preparing, Snapshots
from penstock.checkpoint.team import Team
from penstock.errors import InputFileError, UsageError
from penstock.weights.files import save_index, save_stage

# ---- save and load


log = logging.getLogger("penstock")
_PATIENCE = 300.0
"""How many seconds a rank may take to save or load before it is called silent, beyond those for writing."""
_PER_SECOND = 20e6
"""How many bytes per second a slow disk writes."""


@dataclass(frozen=True)
class Saved:
    """The result of saving.

    Attributes:
        step: the step that was saved.
        stall: for how many seconds the training was held up.
        path: the checkpoint's folder; None while it is still being written, and on other ranks than 0.
        bytes: the bytes of its files; 0 while it is still being written, and on other ranks than 0.
        seconds: from the call until it was complete; 0 likewise.
    """

    step: int
    stall: float
    path: Path | None = None
    bytes: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.path is None:
            return f"checkpoint of step {self.step}: stalled {self.stall:.3f} s, being written"
        return (
            f"checkpoint of step {self.step}: {self.bytes / 1e6:,.1f} MB in {self.seconds:.3f} s, "
            f"stalled {self.stall:.3f} s"
        )


class Checkpoints:
    """The checkpoints of a run, in a folder.

    What is saved does not depend on the layout: a run can go on with another schedule, other stages, more or
    fewer ranks or replicas, or as the unsplit model. A checkpoint is visible only when it is complete. See
    docs/saving-and-resuming.md. ::

        checkpoints = penstock.Checkpoints("run/checkpoints", keep=3)
        step = checkpoints.load(pipe=pipe, optimizer=opt, scheduler=sched, loader=loader) or 0
        for step in range(step, steps):
            ...
            checkpoints.save(step + 1, pipe=pipe, optimizer=opt, scheduler=sched, loader=loader)

    Args:
        folder: a folder for this run alone; all processes must see the same files there.
        keep: how many to keep; an old one is removed only when a newer one is complete. By default all.
        asynchronous: whether to write while the training goes on: the states are copied to the host, into
            memory as large as what this process writes, which is kept for the next time. An error is raised
            by the next call.
        group: a process group of all processes of the run, if there are more than the ranks of the pipeline
            and of its replicas.

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
        self._preparing = Preparing()
        self._snapshots = Snapshots()
        self._pending: Background | None = None
        self._last: Saved | None = None
        self._extra: Any = None

    # ---- saving

    def claim(self) -> None:
        """Lock the folder before the first checkpoint is saved; to be called by the leading process.

        Raises:
            UsageError: another run writes into it.
            CheckpointError: it cannot be written to.
        """
        self._writer.hold()

    def save(self, step: int, *, extra: Any = None, **states: Any) -> Saved:
        """Save a run between two steps; all its processes must call this.

        Args:
            step: how many steps were made; :meth:`load` returns this number.
            extra: JSON data of your own, which :attr:`extra` holds after loading.
            states: what to save, under names that :meth:`load` must use too: ``pipe=`` a Pipeline, or
                ``model=`` the unsplit module; ``optimizer=``, ``scheduler=``, ``scaler=``, ``loader=`` and
                whatever else has ``state_dict()`` and ``load_state_dict()``. None is left out. Optimizers
                are saved by their parameters' names. A pipeline's random state is saved with it.

        Raises:
            CheckpointError: some process could not write; earlier checkpoints are as they were.
            UsageError: something that was given cannot be saved, or another run writes into the folder.
        """
        started = time.perf_counter()
        self.wait()
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise UsageError(f"step={step!r}: must be the number of steps made, from 0")
        targets = Targets.of(states)
        team = Team(targets.pipe, self._group)
        with team.patient(_PATIENCE):
            job = self._preparing.job(team, targets, step, extra, self._writer)
        size = sum(tensor.nbytes for tensor in job.mine.values())
        with team.patient(_PATIENCE + size / _PER_SECOND), _cleaned(job, team):
            if not self._asynchronous:
                self._write(job, team)
            else:
                job.mine = self._snapshots.of(job.mine)
                self._pending = Background(job, team, self._writer)
        self._last = _saved(job, time.perf_counter() - started)
        return self._last

    def _write(self, job: Job, team: Team) -> None:
        written = team.together("save", lambda: job.write(team.rank))
        team.together("save", lambda: str(job.publish(written, self._writer)) if team.leads else "")

    def wait(self) -> None:
        """Wait until a checkpoint that is being written is complete; all processes must call this.

        Raises:
            CheckpointError: it could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.wait()
        if self._last is not None:
            self._last = _saved(pending.job, self._last.stall)

    @property
    def last(self) -> Saved | None:
        """The result of the last saving, as far as that is known."""
        if self._pending is not None and self._pending.is_done and self._last is not None:
            return _saved(self._pending.job, self._last.stall)
        return self._last

    # ---- loading

    def load(self, step: int | None = None, *, strict: bool = True, **states: Any) -> int | None:
        """Load the latest complete checkpoint, or that of a step; all processes of the run must call this.

        Each process reads what it needs, after checking that it is there, fits, and is what was written.

        Args:
            step: the step of the checkpoint; by default the one that was written last. If that is damaged, a
                warning names it, and the one before it is loaded.
            strict: whether anything missing, unexpected or of another type is an error. Otherwise a warning
                lists it, and what fits is loaded.
            states: what to load, by the names under which it was saved. What is not given is not loaded.

        Returns:
            The step at which it was saved; None if there is no checkpoint, and nothing was changed.

        Raises:
            StateDictError: it does not fit; the message lists all that does not, and nothing is changed.
            InputFileError: all checkpoints, or that of the step, are damaged; nothing is changed.
        """
        self.wait()
        targets = Targets.of(states)
        team = Team(targets.pipe, self._group)
        with team.patient(10 * _PATIENCE):
            told = team.together("load", lambda: self._candidates(step) if team.leads else [])[0]
            damaged = []
            for name, serial, of in told:
                loading, problem = self._try(
                    Found(self.folder / name, serial, of), targets, team, strict=strict
                )
                if loading is not None:
                    team.together("load", loading.fill)
                    return int(of)
                damaged.append(problem)
                log.warning("%s; the checkpoint before it is tried", problem)
        if damaged:
            raise InputFileError(f"no checkpoint in {self.folder} is whole: {'; '.join(damaged)}")
        return None

    def _candidates(self, step: int | None) -> list[list[Any]]:
        """The checkpoints to try, in order."""
        found = [[one.path.name, one.serial, one.step] for one in find(self.folder)]
        if step is None:
            # Those with damaged tables come first, so that a warning names them.
            return sorted(found, key=lambda one: one[1] >= 0)
        chosen = [one for one in found if one[2] == step]
        if not chosen:
            raise UsageError(
                f"step={step}: {self.folder} has no checkpoint of it; it has those of steps "
                f"{', '.join(str(one[2]) for one in found) or 'none'}"
            )
        return chosen[:1]

    def _try(
        self, found: Found, targets: Targets, team: Team, *, strict: bool
    ) -> tuple[Loading | None, str]:
        """Check on all processes whether a checkpoint is damaged, and whether it fits.

        Raises:
            StateDictError: it does not fit.
        """
        loading: Loading | None = None

        def check() -> list[Any]:
            nonlocal loading
            try:
                table = Table(found)
            except InputFileError as error:
                return [str(error), None]
            loading = Loading(table, targets, team, strict=strict)
            return [loading.damage(), loading.told()]

        told = team.together("load", check)
        damage = list(dict.fromkeys(text for text, _ in told if text))
        if damage or loading is None:
            return None, "; ".join(damage)
        loading.check([one for _, one in told])
        self._extra = loading.extra
        if left := loading.left_out():
            log.warning("%s also holds %s, which load() was not given", found.path, ", ".join(left))
        return loading, ""

    @property
    def extra(self) -> Any:
        """The ``extra=`` of the checkpoint that was loaded last."""
        return self._extra

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are there, the latest first."""
        return [one.step for one in find(self.folder)]

    def close(self) -> None:
        """Wait for what is being written, and let another run write into the folder."""
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
        if error is None:
            self.close()
        else:
            # The other processes may be gone, so do not wait: what is being written is completed anyway.
            self._writer.close()


def _saved(job: Job, stall: float) -> Saved:
    return Saved(job.step, stall, job.path, job.size, job.seconds)


@contextmanager
def _cleaned(job: Job, team: Team) -> Iterator[None]:
    """Remove what was being written if that fails."""
    try:
        yield
    except BaseException:
        if team.leads:
            shutil.rmtree(job.made, ignore_errors=True)
        raise


# ---- the contents of a folder of checkpoints in words, and the weights of one as plain files


LARGEST = 2 << 30
"""The most bytes of an exported file, which are in memory at once."""


def _found(folder: str | os.PathLike[str]) -> list[Found]:
    """The checkpoints of a folder, or of a run folder; or a single one.

    Raises:
        UsageError: there is none.
    """
    path = Path(folder)
    if (path / TABLE).is_file():
        return [one for one in find(path.parent) if one.path.name == path.name]
    found = find(path) or find(path / "checkpoints")
    if not found:
        raise UsageError(
            f"{str(path)!r} holds no checkpoint; give a run folder, a folder of checkpoints, or one of them"
        )
    return found


def describe(folder: str | os.PathLike[str], *, check: bool = False) -> str:
    """Which checkpoints a folder holds, and what is in the latest of them, as text.

    Args:
        folder: a run folder, a folder of checkpoints, or one of these.
        check: whether to read everything, and compare it with the checksums.

    Raises:
        UsageError: there is no checkpoint.
    """
    lines, latest = [], None
    for one in _found(folder):
        try:
            table = Table(one)
            if check:
                table.verify_all()
        except InputFileError as error:
            lines.append(f"{one.path.name}  DAMAGED: {error}")
            continue
        latest = latest or table
        size = sum(about["bytes"] for about in table.files.values())
        checked = "  all bytes are those that were written" if check else ""
        lines.append(f"{one.path.name}  {table.about['written']}  {_bytes(size)}{checked}")
    return "\n".join([*lines, *(["", *_contents(latest)] if latest else [])])


def _contents(table: Table) -> Iterator[str]:
    yield f"step {table.found.step}, in {table.found.path.name}:"
    layout = table.layout
    cut = f", {layout['schedule']}, {layout['stages']} stages on {layout['ranks']} ranks"
    yield (
        f"  written by {layout['processes']} processes in {layout['replicas']} replicas"
        f"{cut if 'schedule' in layout else ', unsplit'}, torch {table.about['torch']}"
    )
    for label, about in table.weights.items():
        keys = [key for key in table.tensors if key.startswith(f"{label}/")]
        count = sum(math.prod(table.shape(key)) for key in keys)
        types = sorted({str(table.dtype(key)).removeprefix("torch.") for key in keys})
        tied = f", {len(about['tied'])} further names of tied ones" if about["tied"] else ""
        yield f"  {label}: {count:,} numbers in {len(keys)} tensors of {', '.join(types)}{tied}"
    for label, about in table.optimizers.items():
        yield f"  {label}: {about['kind']}, states of {len(about['states'])} parameters"
        for number, group in enumerate(about["groups"]):
            settings = ", ".join(f"{key}={_setting(of)}" for key, of in group["settings"].items())
            yield f"    group {number}: {len(group['parameters'])} parameters, {settings}"
    for label, about in table.states.items():
        kinds = len(about["variants"])
        yield f"  {label}: {'the same on all processes' if kinds == 1 else f'{kinds} different ones'}"
    if table.extra is not None:
        yield f"  extra: {json.dumps(table.extra, default=str)}"


def _setting(value: Any) -> Any:
    return value["of"] if isinstance(value, Mapping) and "of" in value else value


def _bytes(size: float) -> str:
    if size < 1000:
        return f"{size:,.0f} bytes"
    for unit in ("kB", "MB"):
        size /= 1000
        if size < 1000:
            return f"{size:,.1f} {unit}"
    return f"{size / 1000:,.1f} GB"


def export(folder: str | os.PathLike[str], out: str | os.PathLike[str]) -> list[Path]:
    """Write the weights of a checkpoint (of several, the latest) as plain safetensors files and an index.

    :func:`penstock.read_weights`, ``Pipeline(weights=)`` and transformers read them.

    Args:
        folder: a run folder, a folder of checkpoints, or one of these.
        out: the folder to write to, which must not hold such files yet.

    Returns:
        The files.

    Raises:
        UsageError: there is no checkpoint with a model's weights, or there are such files already.
        InputFileError: the checkpoint is damaged.
    """
    table, path = Table(_found(folder)[0]), Path(out)
    if MODEL not in table.weights:
        raise UsageError(f"{table.found.path} holds no weights of a pipeline or of model=")
    if path.exists() and any(path.glob("*.safetensors*")):
        raise UsageError(f"{str(path)!r} holds weights already; choose another folder")
    keys = [key for key in table.tensors if key.startswith(f"{MODEL}/")]
    table.verify([(key, table.everything(key)) for key in keys])
    shards = list(_shards(table, keys))
    sizes = {}
    for number, shard in enumerate(shards):
        state: dict[str, Tensor] = {key.partition("/")[2]: table.read(key) for key in shard}
        sizes[number] = save_stage(state, path, number, len(shards))
    save_index(path, sizes, table.weights[MODEL]["tied"])
    return sorted(path.glob("*.safetensors"))


def _shards(table: Table, keys: list[str]) -> Iterator[list[str]]:
    """The weights in parts of bounded size."""
    held, size = list[str](), 0
    for key in keys:
        bytes_of_one = math.prod(table.shape(key)) * table.dtype(key).itemsize
        if held and size + bytes_of_one > LARGEST:
            yield held
            held, size = [], 0
        held.append(key)
        size += bytes_of_one
    yield held
