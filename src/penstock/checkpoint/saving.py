"""Write a checkpoint, at once or while the training goes on."""

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.contents import MODEL, Description, Flat, Targets
from penstock.checkpoint.folder import Writer
from penstock.checkpoint.planning import Share, plan_writes
from penstock.checkpoint.table import join_pieces
from penstock.checkpoint.team import ProcessTeam
from penstock.errors import FAILURE, CheckpointError, UsageError
from penstock.parallel import local_part
from penstock.weights.files import Written, write_file
from penstock.weights.optimizers import merge_groups
from penstock.weights.states import check_one_rank_each
from penstock.weights.trees import encode_inline, with_keys

_POLL = 0.02
_AT_EXIT = 5.0
"""How many seconds an ending process waits for a checkpoint that makes no progress."""

# ---- from what a user gave to what is to be written


@dataclass
class Job:
    """A checkpoint that is being written.

    Args:
        step: the step of the run.
        folder: the folder into which it is written.
        contents: of its table, but for files and tensors.
        descriptions: the types and shapes of all tensors.
        shares: which process writes what.
        tensors: what this process writes, by name.
    """

    step: int
    folder: Path
    contents: dict[str, Any]
    descriptions: Mapping[str, Description]
    shares: Sequence[Sequence[Share]]
    tensors: dict[str, Tensor]
    path: Path | None = None
    size: int = 0
    seconds: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def write(self, process: int) -> list[Any]:
        """Write this process's file; returns as JSON data what the table must say about it."""
        if not self.tensors:
            return []
        name = f"states-{process + 1:05d}.safetensors"
        written: Written = write_file(self.folder / name, self.tensors)
        return [name, written.size, written.header, written.tensors]

    def publish(self, written: Sequence[Sequence[Any]], writer: Writer) -> Path:
        """Make the checkpoint visible, once all processes have written.

        Raises:
            CheckpointError: it cannot be written, or not all files are there.
        """
        files = {}
        for name, size, header, _ in (one for one in written if one):
            with suppress(OSError):
                if (self.folder / name).stat().st_size == size:
                    files[name] = {"bytes": size, "header": list(header)}
            if name not in files:
                raise CheckpointError(
                    f"{self.folder / name} is not there as its process has written it: the folder must lie "
                    "where all processes see the same files"
                )
        places = [(one[0], one[3]) if one else ("", {}) for one in written]
        tensors = join_pieces(self.shares, self.descriptions, places)
        self.path = writer.publish(
            self.folder, self.step, {**self.contents, "files": files, "tensors": tensors}
        )
        self.size = sum(about["bytes"] for about in files.values())
        self.seconds = time.perf_counter() - self.started
        return self.path


class Preparing:
    """Makes a :class:`Job` of what a user gave; what does not change from save to save is agreed on once."""

    def __init__(self) -> None:
        self._agreed: Any = None
        self._structures: list[Any] = []
        self._shares: list[list[Share]] = []

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
            encoded = encode_inline(extra, "extra=")
            folder = str(writer.begin(step)) if team.leads else ""
            return [folder, step, encoded, flat.digest, flat.settings, flat.describe_states()]

        try:
            replies = team.together("save", collect)
            return self._job(team, targets, flat, replies)
        except BaseException:
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _job(self, team: ProcessTeam, targets: Targets, flat: Flat, replies: Sequence[Any]) -> Job:
        folder, step, extra, *_ = replies[0]
        if any(one[1] != step for one in replies):
            raise CheckpointError(
                f"the ranks save different steps: {[one[1] for one in replies]}, by rank; save the same"
            )
        states = {label: _variants(label, replies) for label in _labels([r[5] for r in replies])}
        extras = [_state_tensors(states, process, one[5]) for process, one in enumerate(replies)]
        digests = [one[3] for one in replies]
        if self._agreed is None or digests != self._agreed[0]:
            self._agreed, self._structures = None, team.agree(flat.structure)
            models = [(one["rank"], one["weights"].get(MODEL)) for one in self._structures]
            check_one_rank_each((rank, of["alone"]) for rank, of in models if of)
        parts = [one["tensors"] | more for one, more in zip(self._structures, extras, strict=True)]
        if self._agreed is None or extras != self._agreed[1]:
            self._shares = plan_writes(parts, [team.name(process) for process in range(team.size)])
            self._agreed = digests, extras
        contents = {
            "torch": str(torch.__version__),
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "layout": {"replicas": team.layout[0], "processes": team.layout[1], **_layout(targets)},
            "weights": _merge_weights([one["weights"] for one in self._structures]),
            "optimizers": _merge_optimizers(
                [one["optimizers"] for one in self._structures], [one[4] for one in replies]
            ),
            "states": {
                label: {"of": of, "variants": trees} for label, (of, trees) in states.items()
            },
            "extra": extra,
        }
        tensors = flat.tensors | {
            _variant_key(key, states[label][0][team.rank]): tensor
            for label, (_, held) in flat.states.items()
            for key, tensor in held.items()
        }
        mine = {share.name: local_part(tensors[share.key]) for share in self._shares[team.rank]}
        described = {key: of for one in parts for key, of in one.items()}
        return Job(step, Path(folder), contents, described, self._shares, mine)


def _layout(targets: Targets) -> dict[str, Any]:
    if targets.pipe is None:
        return {}
    schedule = targets.pipe.schedule
    return {"schedule": schedule.name, "ranks": schedule.ranks, "stages": schedule.stages}


def _labels(replies: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(label for one in replies for label in one))


def _variants(label: str, replies: Sequence[Any]) -> tuple[list[int], list[Any]]:
    """Which of an object's states each process has (-1: none), and these, each once."""
    texts = [json.dumps(one[5][label]) if label in one[5] else None for one in replies]
    different = list(dict.fromkeys(text for text in texts if text is not None))
    keyed = [
        with_keys(json.loads(text)[0], partial(_variant_key, number=number))
        for number, text in enumerate(different)
    ]
    return [-1 if text is None else different.index(text) for text in texts], keyed


def _variant_key(key: str, number: int) -> str:
    return key if number <= 0 else f"{key}#{number}"


def _state_tensors(
    states: Mapping[str, tuple[list[int], Any]], process: int, described: Mapping[str, Any]
) -> dict[str, Description]:
    return {
        _variant_key(key, states[label][0][process]): about[:-1]
        for label, (_, tensors) in described.items()
        for key, about in tensors.items()
    }


def _merge_weights(structures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all processes say about weights, by label."""
    return {
        label: {
            about: {
                k: v for one in structures if label in one for k, v in one[label][about].items()
            }
            for about in ("tied", "others")
        }
        for label in _labels(structures)
    }


def _merge_optimizers(
    structures: Sequence[Mapping[str, Any]], settings: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What all processes say about optimizers, by label.

    Raises:
        UsageError: optimizers of the same label are of different classes.
    """
    merged = {}
    for label in _labels(structures):
        of_label = [one[label] for one in structures if label in one]
        kinds = {one["kind"] for one in of_label}
        if len(kinds) > 1:
            raise UsageError(
                f"{label}= is of the classes {', '.join(sorted(kinds))} on different ranks; use one"
            )
        groups = merge_groups(
            [
                list(
                    zip(
                        of_process.get(label, ()),
                        one.get(label, {"groups": ()})["groups"],
                        strict=True,
                    )
                )
                for one, of_process in zip(structures, settings, strict=True)
            ]
        )
        merged[label] = {
            "kind": kinds.pop(),
            "groups": [{"settings": of, "parameters": names} for of, names in groups],
            "states": {name: of for one in of_label for name, of in one["states"].items()},
            "rest": of_label[0]["rest"],
        }
    return merged


# ---- in the background, while the training goes on


class Snapshots:
    """Copies on the CPU of what this process writes, in memory that is reused for the next checkpoint.

    They take as much memory as the process's share of the checkpoint, and keep it.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of tensors that may change from now on."""
        copies = {}
        for name, tensor in tensors.items():
            kept = self._kept.get(name)
            if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
                pinned = tensor.device.type == "cuda"
                kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            copies[name] = kept.copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values()}:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        self._kept = copies
        return copies


class Background:
    """A job that is written while the training goes on.

    The processes need no messages for that: each leaves a note in the folder when its file is on disk, and
    the leading one makes the checkpoint visible when all notes are there.

    Args:
        job: what to write.
        team: the processes.
        writer: makes the checkpoint visible.
    """

    def __init__(self, job: Job, team: ProcessTeam, writer: Writer) -> None:
        self.job = job
        self._team = team
        self._writer = writer
        self.process = os.getpid()
        self._problem: Exception | None = None
        self._file_done = threading.Event()
        self._given_up = threading.Event()
        # A daemon, since the end of the process waits for it in a way of its own, see finish_all().
        self._thread = threading.Thread(target=self._run, name="penstock-checkpoint", daemon=True)
        self._thread.start()
        _UNFINISHED.add(self)

    def _run(self) -> None:
        try:
            note = self.job.write(self._team.rank)
            try:
                unfinished = self.job.folder / f".part-{self._team.rank}"
                unfinished.write_text(json.dumps(note))
                os.replace(unfinished, self._note(self._team.rank))
            except OSError as error:
                text = f"{self.job.folder} cannot be written: {error.strerror or error}"
                raise CheckpointError(text) from error
            self._file_done.set()
            if self._team.leads and (notes := self._notes()) is not None:
                self.job.publish(notes, self._writer)
        except Exception as error:
            self._problem = error
            self._file_done.set()

    def _note(self, process: int) -> Path:
        return self.job.folder / f".done-{process}.json"

    def _notes(self) -> list[Any] | None:
        """What all processes have written; None if that was given up."""
        notes: dict[int, Any] = {}
        while not self._given_up.is_set():
            for process in set(range(self._team.size)) - notes.keys():
                with suppress(OSError, ValueError):
                    notes[process] = json.loads(self._note(process).read_bytes())
            if len(notes) == self._team.size:
                return [notes[process] for process in range(self._team.size)]
            time.sleep(_POLL)
        return None

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
            self._team.together("save", lambda: self._wait_for(self._file_done.wait))
            self._team.together("save", lambda: self._wait_for(self._thread.join))
        except BaseException:
            self._given_up.set()
            if self._team.leads:
                # If even that hangs, its folder is removed by the next run.
                self._thread.join(_AT_EXIT)
                shutil.rmtree(self.job.folder, ignore_errors=True)
            raise

    def _wait_for(self, done: Any) -> None:
        done()
        if self._problem is not None:
            raise self._problem

    def finish(self, until: float) -> str:
        """At the end of the process, wait as long as something is written, and at most until a time.

        Returns:
            What went wrong, in words; empty if nothing did.
        """
        progress, stalled = -1, time.monotonic() + _AT_EXIT
        while self._thread.is_alive() and time.monotonic() < min(stalled, until):
            if (size := self._written()) != progress:
                progress, stalled = size, time.monotonic() + _AT_EXIT
            self._thread.join(_POLL)
        if self._problem is not None:
            return str(self._problem)
        return "it was not complete when the process ended" if self._thread.is_alive() else ""

    def _written(self) -> int:
        size = 0
        with suppress(OSError):
            for entry in os.scandir(self.job.folder):
                size += entry.stat().st_size
        return size


_UNFINISHED: set[Background] = set()


def finish_all() -> None:
    """At the end of the process, complete what is being written, or say that it was lost."""
    # A process that dies of an exception does not wait for long; its status says already that it failed.
    fails = getattr(sys, "last_value", None) is not None
    until = time.monotonic() + _AT_EXIT if fails else math.inf
    problems = []
    for background in [one for one in _UNFINISHED if one.process == os.getpid()]:
        if problem := background.finish(until):
            problems.append(f"the checkpoint of step {background.job.step} was lost: {problem}")
    sys.stderr.writelines(f"penstock: {text}\n" for text in problems)
    if problems and not fails:
        # An exception here would not change the status, and what would run after this is told to end first.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAILURE)


atexit.register(finish_all)
