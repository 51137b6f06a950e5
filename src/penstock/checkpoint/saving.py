"""Write a checkpoint: agree on what is written by whom, write it beside the training, and make it visible."""

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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.contents import STATE, Flat, Targets
from penstock.checkpoint.folder import Writer
from penstock.checkpoint.planning import Shares, file_of, plan_writes
from penstock.checkpoint.team import ProcessTeam
from penstock.errors import FAILURE, CheckpointError, UsageError
from penstock.parallel import local_part
from penstock.weights.files import write_file
from penstock.weights.optimizers import merge_groups
from penstock.weights.states import check_one_rank_each
from penstock.weights.trees import encode

_POLL = 0.02
_AT_EXIT = 5.0
"""How many seconds an ending process waits for a checkpoint that makes no progress."""


# ---- agree on what is written, and by whom


@dataclass
class Job:
    """A checkpoint that is to be written.

    Args:
        step: the step of the run.
        folder: the folder into which it is written.
        contents: of its table, but for the files.
        tensors: what this process writes, by name.
    """

    step: int
    folder: Path
    contents: dict[str, Any]
    tensors: dict[str, Tensor]
    path: Path | None = None
    size: int = 0
    seconds: float = 0.0
    started: float = field(default_factory=time.perf_counter)


class Preparing:
    """Makes a :class:`Job` of what a user gave; what does not change from save to save is agreed on once."""

    def __init__(self) -> None:
        self._digests: list[str] = []
        self._parts: list[Any] = []
        self._described: Any = None
        self._shares: Shares = []
        self._tensors: dict[str, Any] = {}

    def job(
        self, team: ProcessTeam, targets: Targets, step: int, extra: Any, writer: Writer
    ) -> Job:
        """Agree with the other processes on what is to be written, and by whom.

        Raises:
            PenstockError: some process cannot save; all raise its error.
        """
        flat, folder = Flat(), ""

        def collect() -> list[Any]:
            nonlocal flat, folder
            flat = Flat.of(targets)
            encoded = encode(extra, "extra=", None)
            folder = str(writer.begin(step)) if team.leads else ""
            return [folder, step, encoded, flat.digest, flat.settings, flat.states]

        try:
            replies = team.together("save", collect)
            return self._job(team, targets, flat, replies)
        except BaseException:
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _job(self, team: ProcessTeam, targets: Targets, flat: Flat, replies: Sequence[Any]) -> Job:
        folders, steps, extras, digests, settings, states = zip(*replies, strict=True)
        if len({*steps}) > 1:
            raise CheckpointError(
                f"the ranks save different steps: {list(steps)}, by rank; save the same"
            )
        trees = _same_states(states, team)
        if list(digests) != self._digests:
            agreed = team.agree(flat.parts)
            check_one_rank_each((one["rank"], one["alone"]) for one in agreed)
            self._digests, self._parts = list(digests), agreed
        described = [
            [digest, {key: one[0] for _, of in state.values() for key, one in of.items()}]
            for digest, state in zip(digests, states, strict=True)
        ]
        if described != self._described:
            parts = [
                part["tensors"] | of for part, (_, of) in zip(self._parts, described, strict=True)
            ]
            names = [team.name(process) for process in range(team.size)]
            self._shares, self._tensors = plan_writes(parts, names)
            self._described = described
        replicas, processes = team.layout
        contents = {
            "torch": str(torch.__version__),
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "layout": {"replicas": replicas, "processes": processes, **_layout(targets)},
            "kinds": self._merged("kinds") | dict.fromkeys(trees, STATE),
            "tensors": self._tensors,
            "values": self._merged("values") | trees,
            "tied": self._merged("tied"),
            "groups": _merge_optimizers(self._parts, settings),
            "extra": extras[0],
        }
        mine = self._shares[team.rank]
        tensors = {name: local_part(flat.tensors[key]) for key, name in mine}
        return Job(steps[0], Path(folders[0]), contents, tensors)

    def _merged(self, part: str) -> dict[str, Any]:
        return {key: of for one in self._parts for key, of in one[part].items()}


def _layout(targets: Targets) -> dict[str, Any]:
    if targets.pipe is None:
        return {}
    schedule = targets.pipe.schedule
    return {"schedule": schedule.name, "ranks": schedule.ranks, "stages": schedule.stages}


def _same_states(states: Sequence[Mapping[str, Any]], team: ProcessTeam) -> dict[str, Any]:
    """The JSON data of each state, which all processes that have it must have alike.

    Raises:
        UsageError: they have not.
    """
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
    """What all processes say about the groups of optimizers, by label.

    Raises:
        UsageError: optimizers of the same label are of different classes.
    """
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


# ---- write, while the training goes on or waits


def snapshots(tensors: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU of tensors that may change from now on, in the memory of earlier copies."""
    copies = {}
    for name, tensor in tensors.items():
        copy = kept.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            pinned = tensor.device.type == "cuda"
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        copies[name] = copy.copy_(tensor, non_blocking=True)
    return copies


def settle(tensors: Iterable[Tensor]) -> None:
    """Wait until devices have done what they were told, so that another thread sees the tensors whole."""
    for device in {tensor.device for tensor in tensors} - {torch.device("cpu")}:
        torch.accelerator.synchronize(device)


class Writing:
    """A thread that writes this process's part of a job; the leading one's makes the checkpoint visible.

    While the training goes on, the processes need no messages for that: each leaves a note in the folder when
    its file is on disk. Those that wait exchange the notes.

    Args:
        job: what to write.
        team: the processes.
        writer: makes the checkpoint visible.
    """

    def __init__(self, job: Job, team: ProcessTeam, writer: Writer) -> None:
        self.job = job
        self.process = os.getpid()
        self._team = team
        self._writer = writer
        self._note: list[Any] = []
        self._notes: list[Any] | None = None
        self._problem: Exception | None = None
        self._file_done = threading.Event()
        self._handed = threading.Event()
        # A daemon, since the end of the process waits for it in a way of its own, see finish_all().
        self._thread = threading.Thread(target=self._run, name="penstock-checkpoint", daemon=True)
        self._thread.start()
        _UNFINISHED.add(self)

    def _run(self) -> None:
        try:
            self._write()
            self._file_done.set()
            if self._team.leads and (notes := self._all_notes()) is not None:
                self._publish([note for note in notes if note])
        except Exception as error:
            self._problem = error
        finally:
            self._file_done.set()

    def _write(self) -> None:
        folder = self.job.folder
        if self.job.tensors:
            name = file_of(self._team.rank)
            self._note = [name, *write_file(folder / name, self.job.tensors)]
        if self._handed.is_set():  # given up: what was written may have changed under it
            raise CheckpointError("the saving was interrupted")
        try:
            self._note_of(self._team.rank).write_text(json.dumps(self._note))
        except OSError as error:
            text = f"{folder} cannot be written: {error.strerror or error}"
            raise CheckpointError(text) from error

    def _note_of(self, process: int) -> Path:
        return self.job.folder / f".done-{process}"

    def _all_notes(self) -> list[Any] | None:
        """What all processes have written; None if that was given up."""
        notes: dict[int, Any] = {self._team.rank: self._note}
        while len(notes) < self._team.size and not self._handed.wait(_POLL):
            for process in set(range(self._team.size)) - notes.keys():
                with suppress(OSError, ValueError):
                    notes[process] = json.loads(self._note_of(process).read_bytes())
        return self._notes if self._handed.is_set() else list(notes.values())

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
        job.path = self._writer.publish(job.folder, job.step, {**job.contents, "files": files})
        job.size = sum(about["bytes"] for about in files.values())
        job.seconds = time.perf_counter() - job.started

    @property
    def is_done(self) -> bool:
        """Whether this process has done its part."""
        return not self._thread.is_alive()

    def is_settled(self) -> bool:
        """After an error: whether nothing is written any more; a run of one process waits for that."""
        if self._team.size == 1:
            self.finish(time.monotonic() + _AT_EXIT)
        return self.is_done

    def wait(self) -> None:
        """Wait until the checkpoint is visible; every process must call it.

        Raises:
            CheckpointError: some process could not write its part.
        """
        _UNFINISHED.discard(self)
        try:
            self._notes = self._team.together("save", lambda: self._wait_for(self._file_done.wait))
            self._handed.set()
            self._team.together("save", lambda: self._wait_for(self._thread.join))
        except BaseException:
            self._notes = None
            self._handed.set()
            if self._team.leads:
                # If even that hangs, its folder is removed by the next run.
                self._thread.join(_AT_EXIT)
                shutil.rmtree(self.job.folder, ignore_errors=True)
            raise

    def _wait_for(self, done: Any) -> list[Any]:
        done()
        if self._problem is not None:
            raise self._problem
        return self._note

    def finish(self, until: float) -> str:
        """At the end of the process, wait as long as something is written, and at most until a time.

        Returns:
            What went wrong, in words; empty if nothing did.
        """
        progress, stalled = -1, time.monotonic() + _AT_EXIT
        while self._thread.is_alive() and time.monotonic() < min(stalled, until):
            size = 0
            with suppress(OSError):
                size = sum(entry.stat().st_size for entry in os.scandir(self.job.folder))
            if size != progress:
                progress, stalled = size, time.monotonic() + _AT_EXIT
            self._thread.join(_POLL)
        if self._problem is not None:
            return str(self._problem)
        return "it was not complete when the process ended" if self._thread.is_alive() else ""


_UNFINISHED: set[Writing] = set()


def finish_all() -> None:
    """At the end of the process, complete what is being written, or say that it was lost."""
    # A process that dies of an exception does not wait for long; its status says already that it failed.
    fails = getattr(sys, "last_value", None) is not None
    until = time.monotonic() + _AT_EXIT if fails else math.inf
    problems = []
    for writing in [one for one in _UNFINISHED if one.process == os.getpid()]:
        if problem := writing.finish(until):
            problems.append(f"the checkpoint of step {writing.job.step} was lost: {problem}")
    sys.stderr.writelines(f"penstock: {text}\n" for text in problems)
    if problems and not fails:
        # An exception here would not change the status, and what would run after this is told to end first.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAILURE)


atexit.register(finish_all)
