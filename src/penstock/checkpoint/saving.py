"""Save a checkpoint: agree on who writes what, write while training continues, and make it visible."""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.contents import Flat, Targets
from penstock.checkpoint.folder import Writer
from penstock.checkpoint.planning import Shares, file_of, plan_writes
from penstock.checkpoint.team import ProcessTeam
from penstock.errors import FAILURE, CheckpointError, UsageError
from penstock.parallel import local_part
from penstock.values import bytes_as_text
from penstock.weights.files import write_file
from penstock.weights.optimizers import merge_groups
from penstock.weights.states import check_one_rank_each
from penstock.weights.trees import encode

_POLL = 0.02
_AT_EXIT = 5.0
"""Seconds that an ending process waits for a checkpoint that makes no progress."""


@dataclass(frozen=True)
class Saved:
    """The result of saving.

    Attributes:
        step: the step that was saved.
        stall: the seconds for which training was held up.
        path: the checkpoint's folder; None while it is still being written, and on other ranks than 0.
        bytes: the size of its files; 0 while it is still being written, and on other ranks than 0.
        seconds: the time from the call until it was complete; 0 likewise.
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
            f"checkpoint of step {self.step}: {bytes_as_text(self.bytes)} in {self.seconds:.3f} s, "
            f"stalled {self.stall:.3f} s"
        )


# ---- agree on who writes what


@dataclass
class Job:
    """A checkpoint to write.

    Args:
        step: the step of the run.
        folder: the folder to write into.
        contents: the contents of its table, except the files.
        tensors: what this process writes, by name.
        stall: the seconds for which it has held up training.
        complete: the folder, bytes and seconds of the complete checkpoint.
    """

    step: int
    folder: Path
    contents: dict[str, Any]
    tensors: dict[str, Tensor]
    stall: float = 0.0
    complete: tuple[Path | None, int, float] = (None, 0, 0.0)
    started: float = field(default_factory=time.perf_counter)

    @property
    def saved(self) -> Saved:
        """The result, as far as it is known."""
        return Saved(self.step, self.stall, *self.complete)


class Preparing:
    """Makes a :class:`Job` of the user's objects; what does not change between saves is agreed on once."""

    def __init__(self) -> None:
        self._digests: Sequence[str] = ()
        self._parts: list[Any] = []
        self._shares: Shares = []
        self._tensors: dict[str, Any] = {}

    def job(
        self, team: ProcessTeam, targets: Targets, step: int, extra: Any, writer: Writer
    ) -> Job:
        """Agree with the other processes on who writes what."""
        flat, folder = Flat(), ""

        def collect() -> list[Any]:
            nonlocal flat, folder
            flat = Flat.of(targets)
            encoded = encode(extra, "extra=", None)
            folder = str(writer.begin(step)) if team.leads else ""
            return [folder, step, encoded, flat.digest, flat.settings, flat.states]

        try:
            replies = team.together("save", collect)
            folders, steps, extras, digests, settings, states = zip(*replies, strict=True)
            if len({*steps}) > 1:
                raise CheckpointError(
                    f"the ranks save different steps: {list(steps)}, by rank; save the same"
                )
            trees = _same_states(states, team)
            if digests != self._digests:
                self._agree(team, flat)
                self._digests = digests
            contents = {
                "torch": str(torch.__version__),
                "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "layout": _layout(team, targets),
                "kinds": self._merged("kinds"),
                "tensors": self._tensors,
                "values": self._merged("values") | trees,
                "tied": self._merged("tied"),
                "groups": _merge_optimizers(self._parts, settings),
                "extra": extras[0],
            }
            mine = {name: local_part(flat.tensors[key]) for key, name in self._shares[team.rank]}
            return Job(step, Path(folders[0]), contents, mine)
        except BaseException:
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _agree(self, team: ProcessTeam, flat: Flat) -> None:
        parts = team.agree(flat.parts)
        check_one_rank_each(part["alone"] for part in parts)
        names = [team.name(process) for process in range(team.size)]
        self._shares, self._tensors = plan_writes([part["tensors"] for part in parts], names)
        self._parts = parts

    def _merged(self, part: str) -> dict[str, Any]:
        return {key: of for one in self._parts for key, of in one[part].items()}


def _layout(team: ProcessTeam, targets: Targets) -> dict[str, Any]:
    replicas, processes = team.layout
    layout = {"replicas": replicas, "processes": processes}
    if targets.pipe is None:
        return layout
    schedule = targets.pipe.schedule
    return layout | {"schedule": schedule.name, "ranks": schedule.ranks, "stages": schedule.stages}


def _same_states(states: Sequence[Mapping[str, Any]], team: ProcessTeam) -> dict[str, Any]:
    """Return each state's JSON data, which must be equal on all processes that have it."""
    trees: dict[str, Any] = {}
    firsts: dict[str, int] = {}
    for process, of_process in enumerate(states):
        for label, state in of_process.items():
            first = firsts.setdefault(label, process)
            if states[first][label] != state:
                raise UsageError(
                    f"{label}= has another state on {team.name(process)} than on {team.name(first)}; give "
                    f"what differs between processes a name of its own on each, such as **{{f'{label}_"
                    "{replica}': ...}, or leave it out. A scheduler needs the same groups of its "
                    "optimizer on all ranks"
                )
            trees[label] = state[0]
    return trees


def _merge_optimizers(
    parts: Sequence[Any], settings: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Merge each optimizer's groups from all processes, by label."""
    merged = {}
    for label in dict.fromkeys(label for one in parts for label in one["groups"]):
        kinds = {one["kinds"][label] for one in parts if label in one["groups"]}
        if len(kinds) > 1:
            raise UsageError(
                f"{label}= is of the classes {', '.join(sorted(kinds))} on different ranks; use one"
            )
        groups = merge_groups(
            [
                list(zip(of.get(label, ()), one["groups"].get(label, ()), strict=True))
                for one, of in zip(parts, settings, strict=True)
            ]
        )
        merged[label] = [{"settings": of, "parameters": names} for of, names in groups]
    return merged


# ---- write, while training continues or waits


def snapshots(tensors: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that are about to change to the CPU, reusing the memory of earlier copies."""
    copies = {}
    for name, tensor in tensors.items():
        copy = kept.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            pinned = tensor.device.type == "cuda"
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        copies[name] = copy.copy_(tensor, non_blocking=True)
    return copies


def settle(tensors: Iterable[Tensor]) -> None:
    """Wait until devices have finished their work, so that another thread sees complete tensors."""
    for device in {tensor.device for tensor in tensors} - {torch.device("cpu")}:
        torch.accelerator.synchronize(device)


class Writing:
    """A thread that writes this process's part of a job; the leading process's makes the checkpoint visible.

    While training continues, this needs no messages: each process leaves a note in the folder when its file
    is on disk. Processes that wait exchange the notes instead.
    """

    def __init__(self, job: Job, team: ProcessTeam, writer: Writer) -> None:
        self.job = job
        self.process = os.getpid()
        self._team = team
        self._writer = writer
        self._file: Future[list[Any]] = Future()
        self._end: Future[None] = Future()
        self._notes: list[Any] | None = None
        self._handed = threading.Event()
        # A daemon, since finish_all() waits for it in its own way when the process ends.
        threading.Thread(target=self._run, name="penstock-checkpoint", daemon=True).start()
        _UNFINISHED.add(self)

    def _run(self) -> None:
        try:
            self._file.set_result(self._write())
            if self._team.leads and (notes := self._all_notes()) is not None:
                self._publish([note for note in notes if note])
            self._end.set_result(None)
        except Exception as error:
            if not self._file.done():
                self._file.set_exception(error)
            self._end.set_exception(error)

    def _write(self) -> list[Any]:
        folder, note = self.job.folder, list[Any]()
        if self.job.tensors:
            name = file_of(self._team.rank)
            note = [name, *write_file(folder / name, self.job.tensors)]
        if self._handed.is_set():  # abandoned: the tensors may have changed meanwhile
            raise CheckpointError("the saving was interrupted")
        try:
            self._note_of(self._team.rank).write_text(json.dumps(note))
        except OSError as error:
            text = f"{folder} cannot be written: {error.strerror or error}"
            raise CheckpointError(text) from error
        return note

    def _note_of(self, process: int) -> Path:
        return self.job.folder / f".done-{process}"

    def _all_notes(self) -> list[Any] | None:
        """Wait for the notes of all processes; None if the saving was abandoned."""
        notes = list[Any]()
        while not self._handed.is_set():
            try:
                while len(notes) < self._team.size:
                    notes.append(json.loads(self._note_of(len(notes)).read_bytes()))
                return notes
            except (OSError, ValueError):  # the note is missing or incomplete so far
                self._handed.wait(_POLL)
        return self._notes

    def _publish(self, notes: Sequence[Sequence[Any]]) -> None:
        job, files = self.job, {}
        for name, size, summed in notes:
            with suppress(OSError):
                if (job.folder / name).stat().st_size == size:
                    files[name] = {"bytes": size, "crc32": summed}
            if name not in files:
                raise CheckpointError(
                    f"{job.folder / name} is not there as its process has written it: the folder must lie "
                    "where all processes see the same files"
                )
        for note in job.folder.glob(".done-*"):
            note.unlink(missing_ok=True)
        path = self._writer.publish(job.folder, job.step, {**job.contents, "files": files})
        size = sum(about["bytes"] for about in files.values())
        job.complete = path, size, time.perf_counter() - job.started

    def is_settled(self) -> bool:
        """After an error: whether the writing has ended; a run of one process waits for that."""
        if self._team.size == 1:
            self.finish(time.monotonic() + _AT_EXIT)
        return self._end.done()

    def wait(self) -> None:
        """Wait until the checkpoint is visible, or raise any process's error; all processes call this."""
        _UNFINISHED.discard(self)
        try:
            self._notes = self._team.together("save", self._file.result)
            self._handed.set()
            self._team.together("save", self._end.result)
        except BaseException:
            self._notes = None
            self._handed.set()
            if self._team.leads:
                # If the thread hangs, the next run removes its folder.
                with suppress(Exception):
                    self._end.result(_AT_EXIT)
                shutil.rmtree(self.job.folder, ignore_errors=True)
            raise

    def finish(self, until: float) -> str:
        """At the end of the process, wait as long as the writing progresses; return what went wrong."""
        progress, stalled = -1, time.monotonic() + _AT_EXIT
        while not self._end.done() and time.monotonic() < min(stalled, until):
            size = 0
            with suppress(OSError):
                size = sum(entry.stat().st_size for entry in os.scandir(self.job.folder))
            if size != progress:
                progress, stalled = size, time.monotonic() + _AT_EXIT
            time.sleep(_POLL)
        if not self._end.done():
            return "it was not complete when the process ended"
        return str(self._end.exception() or "")


_UNFINISHED: set[Writing] = set()


def finish_all() -> None:
    """At the end of the process, complete pending checkpoints, or report that they were lost."""
    # A process that dies of an exception waits only briefly: its exit status reports the failure.
    fails = getattr(sys, "last_value", None) is not None
    until = time.monotonic() + _AT_EXIT if fails else math.inf
    problems = []
    for writing in [one for one in _UNFINISHED if one.process == os.getpid()]:
        if problem := writing.finish(until):
            problems.append(f"the checkpoint of step {writing.job.step} was lost: {problem}")
    sys.stderr.writelines(f"penstock: {text}\n" for text in problems)
    if problems and not fails:
        # An exception here would not change the status; os._exit does, but skips these flushes.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAILURE)


atexit.register(finish_all)
