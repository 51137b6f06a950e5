"""Save a checkpoint: agree on who writes what, write while training continues, and make it visible."""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock._engine.devices import is_accelerator, wait_for
from penstock._engine.parallel import local_part, region_of
from penstock._engine.transport import Job
from penstock._engine.values import bytes_as_text
from penstock._engine.weights.files import whole_box, write_file
from penstock._engine.weights.folders import files_beside
from penstock._engine.weights.optimizers import merge_groups, warn_of_settings
from penstock._engine.weights.storage import check_arrived, patiently, write_bytes
from penstock._engine.weights.telling import Known, distinct, tell
from penstock._engine.weights.trees import TENSOR, encode
from penstock.checkpoint.contents import OF_STATE, Flat, Targets
from penstock.checkpoint.folder import Writer
from penstock.checkpoint.planning import (
    HeldTensors,
    WritePlan,
    file_of,
    grouped,
    part_name,
    plan_writes,
)
from penstock.checkpoint.table import table_text
from penstock.errors import FAILURE, CheckpointError, UsageError

_POLL = 0.02
AT_EXIT = 5.0
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
class Checkpoint:
    """A checkpoint to write.

    Args:
        step: the step of the run.
        folder: the folder to write into.
        save: the identifier that the table and all files carry.
        contents: the contents of its table, except the files.
        tensors: what this process writes, by name.
        stall: the seconds for which it has held up training.
        complete: the folder, bytes and seconds of the complete checkpoint.
    """

    step: int
    folder: Path
    save: str
    contents: dict[str, Any]
    tensors: dict[str, Tensor]
    stall: float = 0.0
    complete: tuple[Path | None, int, float] = (None, 0, 0.0)
    started: float = field(default_factory=time.perf_counter)

    @property
    def saved(self) -> Saved:
        """The result, as far as it is known."""
        return Saved(self.step, self.stall, *self.complete)


class Begun:
    """What a process brings to a save, and the folder that the leading one makes for it.

    Attributes:
        made: the folder, if this process has made it.
    """

    def __init__(self, targets: Targets, step: int, extra: Any, writer: Writer) -> None:
        self._targets, self._step, self._extra, self._writer = targets, step, extra, writer
        self._flat, self._beside = Flat(), dict[str, bytes]()
        self._folder_and_save = ["", ""]
        self.made: Path | None = None

    def describe(self) -> tuple[Any, dict[str, Any]]:
        """Collect what this process must save; return the step, and what the leader must know."""
        self._flat = self._targets.flat()
        encode(self._extra, "extra=", None)  # an error here is one before anything is written
        return self._step, self._flat.described()

    def make_folder(self, steps: list[Any]) -> list[str]:
        """In the leading process, make the folder; return it, and an identifier of the save."""
        if len({*steps}) > 1:
            raise CheckpointError(
                f"the ranks save different steps: {steps}, by rank; save the same"
            )
        self._beside = files_beside(self._targets.model)
        save = os.urandom(6).hex()
        self.made = self._writer.begin(self._step, save)
        return [str(self.made), save]

    def find_folder(self, folder_and_save: list[str]) -> None:
        """Check that this host sees the folder."""
        self._folder_and_save = folder_and_save
        check_arrived(Path(folder_and_save[0]))

    def about(self, job: Job) -> dict[str, Any]:
        """Return what the run says of itself in the table."""
        replicas, processes = job.layout
        layout: dict[str, Any] = {"replicas": replicas, "processes": processes}
        if self._targets.pipe is not None:
            schedule = self._targets.pipe.schedule
            layout |= {
                "schedule": schedule.name, "ranks": schedule.ranks, "stages": schedule.stages
            }  # fmt: skip
        beside = {name: content.decode() for name, content in self._beside.items()}
        return {"layout": layout, "extra": encode(self._extra, "extra=", None), "beside": beside}

    def checkpoint(self, contents: dict[str, Any], share: Sequence[int]) -> Checkpoint:
        """The checkpoint with this process's share of the tensors, by their names in the file."""
        keys, written = [*chain.from_iterable(self._flat.held.keys)], dict[str, Tensor]()
        for key in (keys[place] for place in share):
            tensor = self._flat.tensors[key]
            box = region_of(tensor) or whole_box(tensor.shape)
            written[part_name(key, tensor.shape, box)] = local_part(tensor)
        folder, save = self._folder_and_save
        return Checkpoint(self._step, Path(folder), save, contents, written)


class Planner:
    """Who writes what of a checkpoint, as all processes agree.

    Each process tells the first one what it has, as far as it has changed since the last save. That plans,
    and tells each what it writes, if that has changed.

    Attributes:
        contents: in the first process, the contents of the table, except the files and what the run says of
            itself.
    """

    def __init__(self) -> None:
        self._known = Known()
        self._share: list[int] = []
        self._planned: list[Any] = []
        self._plan = WritePlan([], [], [])
        self.contents: dict[str, Any] = {}

    @property
    def writers(self) -> list[int]:
        """The processes that write a file, in the order of the table's files."""
        return self._plan.writers

    def begin(
        self, job: Job, targets: Targets, step: int, extra: Any, writer: Writer
    ) -> Checkpoint:
        """Agree with the other processes on a new checkpoint of the user's objects."""
        group, begun = job.together, Begun(targets, step, extra, writer)
        try:
            share = tell(
                job, group, "save", begun.describe, partial(self.plan, names=group.names),
                known=self._known, begin=begun.make_folder, look=begun.find_folder,
            )  # fmt: skip
            self._share = self._share if share is None else share
            contents = {} if group.rank else self.contents | begun.about(job)
            return begun.checkpoint(contents, self._share)
        except BaseException:
            if begun.made is not None:
                shutil.rmtree(begun.made, ignore_errors=True)
            raise

    def plan(self, parts: list[dict[str, Any]], names: Sequence[str]) -> list[Any]:
        """Plan from what all processes have, as :meth:`Flat.described` says it.

        Args:
            parts: what each process has.
            names: the names of the processes, for messages.

        Returns:
            For each process, the places of the tensors that it writes; None: those of the last save.
        """
        _check_states(parts, names)
        warn_of_settings([of["shared"] for of in parts], names.__getitem__)
        planned = [of[name] for of in parts for name in ("parts", "keys")]
        is_new = list(map(id, planned)) != list(map(id, self._planned))
        held = [HeldTensors(of["parts"], of["keys"]) for of in parts]
        plan = plan_writes(held, names.__getitem__) if is_new else self._plan
        of_names = distinct(parts, "names")
        contents = {
            "torch": str(torch.__version__),
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "kinds": {label: kind for one in of_names for label, kind in one["kinds"].items()},
            "tensors": plan.tensors,
            "values": _values(parts),
            "tied": {key: first for one in of_names for key, first in one["tied"].items()},
            "groups": _merge_optimizers(distinct(parts, "names", "settings")),
        }
        # Only now: a plan that nobody learns of, as something does not fit, is none of the last save.
        self._planned, self._plan, self.contents = planned, plan, contents
        return [*plan.shares] if is_new else [None] * len(parts)


def _check_states(parts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Check that each state is the same on all processes that have it."""
    firsts: dict[str, int] = {}
    for process, of in enumerate(parts):
        for part in of:
            first, label = firsts.setdefault(part, process), part.removeprefix(OF_STATE)
            if part != label and parts[first][part] is not of[part]:
                raise UsageError(
                    f"{label}= has another state on {names[process]} than on {names[first]}; "
                    "give what differs between processes a name of its own on "
                    f"each, such as **{{f'{label}_{{replica}}': ...}}, or leave it out. A scheduler "
                    "needs the same groups of its optimizer on all ranks"
                )


def _values(parts: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The JSON data of all processes, as the table has it."""
    rows = list(chain.from_iterable(distinct(parts, "values")))
    states = {part: of[part][0] for of in parts for part in of if part.startswith(OF_STATE)}
    rows += [
        (tree, [part.removeprefix(OF_STATE)]) for part, tree in states.items() if tree != TENSOR
    ]
    return [{"value": value, "keys": keys} for value, keys in grouped(rows)]


def _merge_optimizers(parts: Sequence[Any]) -> dict[str, Any]:
    """Merge each optimizer's groups from all processes, by label."""
    merged = {}
    for label in dict.fromkeys(label for one, _ in parts for label in one["groups"]):
        kinds = {one["kinds"][label] for one, _ in parts if label in one["groups"]}
        if len(kinds) > 1:
            raise UsageError(
                f"{label}= is of the classes {', '.join(sorted(kinds))} on different ranks; use one"
            )
        groups = merge_groups(
            [
                list(zip(of.get(label, ()), one["groups"].get(label, ()), strict=True))
                for one, of in parts
            ]
        )
        merged[label] = [{"settings": of, "parameters": names} for of, names in groups]
    return merged


def check_seen(job: Job, folder: Path) -> None:
    """Check that all processes see what the first one writes into a folder; all of them call this.

    Raises:
        CheckpointError: some process does not.
    """
    token, leads = f".shared-{os.urandom(6).hex()}", not job.together.rank

    def write() -> None:
        if leads:
            write_bytes(folder / token, token.encode())

    try:
        name = job.meet(write, lambda _: token, "write")
        job.meet(lambda: check_arrived(folder / name), doing="see the files of the run")
    finally:
        if leads:
            with suppress(OSError):
                (folder / token).unlink(missing_ok=True)


# ---- write, while training continues or waits


def snapshots(tensors: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that are about to change to the CPU, reusing the memory of earlier copies."""
    copies = {}
    for name, tensor in tensors.items():
        copy = kept.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            # Only memory that cannot be paged out is filled while the host goes on.
            pinned = is_accelerator(tensor.device)
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned, device="cpu")
        copies[name] = copy.copy_(tensor, non_blocking=True)
    return copies


def settle(tensors: Iterable[Tensor]) -> None:
    """Wait until devices have finished their work, so that another thread sees complete tensors."""
    for device in {tensor.device for tensor in tensors}:
        wait_for(device)


class Writing:
    """A thread that writes this process's part of a job; the leading process's makes the checkpoint visible.

    While training continues, this needs no messages: each process leaves a note in the folder when its file
    is on disk. Processes that wait exchange the notes instead.
    """

    def __init__(self, checkpoint: Checkpoint, job: Job, writer: Writer) -> None:
        self.checkpoint, self.job = checkpoint, job
        self.process = os.getpid()
        group = job.together
        self._rank, self._size = group.rank, group.size
        self._writer = writer
        self._note: Future[list[Any]] = Future()
        self._notes: Future[list[Any]] = (
            Future()
        )  # as messages; cancelled if the saving is abandoned
        self._end: Future[None] = Future()
        # A daemon, since finish_all() waits for it in its own way when the process ends.
        threading.Thread(target=self._run, name="penstock-checkpoint", daemon=True).start()
        _UNFINISHED.add(self)

    def _run(self) -> None:
        try:
            self._note.set_result(self._write())
            if not self._rank:
                self._publish([note for note in self._all_notes() if note])
            self._end.set_result(None)
        except Exception as error:
            reason = self._writer.reason(error)
            if not self._note.done():
                self._note.set_exception(reason)
            self._end.set_exception(reason)

    def _write(self) -> list[Any]:
        checkpoint, note = self.checkpoint, list[Any]()
        if checkpoint.tensors:
            name = file_of(self._rank)
            path = checkpoint.folder / name
            note = [name, *write_file(path, checkpoint.tensors, checkpoint.save)]
        if self._notes.cancelled():  # the tensors may have changed meanwhile
            raise CheckpointError("the saving was interrupted")
        write_bytes(self._note_of(self._rank), json.dumps(note).encode())
        return note

    def _note_of(self, process: int) -> Path:
        return self.checkpoint.folder / f".done-{process}"

    def _all_notes(self) -> list[Any]:
        """Wait for the notes of all processes, as files or as messages."""
        notes = list[Any]()
        while True:
            # A note is missing or incomplete so far.
            with suppress(OSError, ValueError):
                while len(notes) < self._size:
                    notes.append(json.loads(self._note_of(len(notes)).read_bytes()))
                return notes
            with suppress(TimeoutError):
                return self._notes.result(_POLL)

    def _publish(self, notes: Sequence[Sequence[Any]]) -> None:
        checkpoint = self.checkpoint
        for process in range(self._size):
            note = self._note_of(process)
            patiently("removed", note, partial(note.unlink, missing_ok=True))
        files = [{"name": name, "bytes": size, "crc32": summed} for name, size, summed in notes]
        contents = {**checkpoint.contents, "files": files}
        table = table_text(contents, checkpoint.save, checkpoint.step)
        sizes = {checkpoint.folder / name: size for name, size, _ in notes}
        path = self._writer.publish(checkpoint.folder, checkpoint.step, table, sizes)
        checkpoint.complete = path, sum(sizes.values()), time.perf_counter() - checkpoint.started

    def is_settled(self) -> bool:
        """After an error: whether the writing has ended; a run of one process waits for that."""
        if self._size == 1:
            self.finish()
        return self._end.done()

    def wait(self) -> None:
        """Wait until the checkpoint is visible, or raise any process's error; all processes call this."""
        _UNFINISHED.discard(self)

        def publish(notes: list[Any]) -> None:
            self._notes.set_result(notes)
            self._end.result()

        try:
            self.job.meet(self._note.result, publish, "save")
        except BaseException:
            self._notes.cancel()
            if not self._rank:
                # If the thread hangs, the next run removes its folder.
                with suppress(Exception):
                    self._end.result(AT_EXIT)
                shutil.rmtree(self.checkpoint.folder, ignore_errors=True)
            raise

    def finish(self) -> str:
        """At the end of the process, wait as long as the writing progresses; return what went wrong."""
        progress, stalled = -1, time.monotonic() + AT_EXIT
        while not self._end.done() and time.monotonic() < stalled:
            size = 0
            # A file may vanish meanwhile.
            with suppress(OSError), os.scandir(self.checkpoint.folder) as entries:
                size = sum(entry.stat().st_size for entry in entries)
            if size != progress:
                progress, stalled = size, time.monotonic() + AT_EXIT
            time.sleep(_POLL)
        if not self._end.done():
            return "it was not complete when the process ended"
        return str(self._end.exception() or "")


_UNFINISHED: set[Writing] = set()


def finish_all() -> None:
    """At the end of the process, complete pending checkpoints, or report that they were lost."""
    ours = [writing for writing in _UNFINISHED if writing.process == os.getpid()]
    lost = [(writing.checkpoint.step, problem) for writing in ours if (problem := writing.finish())]
    for step, problem in lost:
        sys.stderr.write(f"penstock: the checkpoint of step {step} was lost: {problem}\n")
    if lost:
        # An exception here would not change the status; os._exit does, but skips these flushes.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAILURE)


atexit.register(finish_all)
