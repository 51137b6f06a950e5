"""Write a checkpoint: which process writes what, at once or in the background; when it becomes visible."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.contents import (
    Own,
    Part,
    Targets,
    check_one_rank_each,
    join_groups,
    merge_optimizers,
    merge_weights,
    spread_groups,
)
from penstock.checkpoint.folder import Region, Writer, all_of, write_shard
from penstock.checkpoint.team import Team
from penstock.errors import CheckpointError
from penstock.weights.trees import encode_inline, with_keys

_POLL = 0.02
_ORPHANED = 60.0
"""How many seconds the leading process, before it ends, waits for the files of the others."""


class Plan:
    """Which process writes which part of which tensor: each part once, and all about equally much.

    Args:
        told: for each process its tensors by key, as :attr:`Part.told` describes them.
        team: the processes, for messages.

    Raises:
        CheckpointError: the parts of the processes do not make up a whole tensor.
    """

    def __init__(self, told: Sequence[Mapping[str, Any]], team: Team) -> None:
        self.about: dict[str, tuple[str, list[int]]] = {}
        self.writers: dict[str, dict[Region, int]] = {}
        holders: dict[str, dict[Region, list[int]]] = {}
        for process, tensors in enumerate(told):
            for key, (dtype, shape, region) in tensors.items():
                known = self.about.setdefault(key, (dtype, shape))
                if known != (dtype, shape):
                    raise CheckpointError(
                        f"{key} is {dtype} {shape} on {team.name(process)} and {known[0]} {known[1]} on "
                        "another; one name must mean one tensor"
                    )
                box = tuple(region[0]), tuple(region[1])
                holders.setdefault(key, {}).setdefault(box, []).append(process)
        load = [0] * len(told)
        for key, boxes in holders.items():
            self._check_whole(key, list(boxes))
            self.writers[key] = {}
            for box, processes in boxes.items():
                least = min(processes, key=lambda process: load[process])
                load[least] += math.prod(box[1])
                self.writers[key][box] = least

    def _check_whole(self, key: str, boxes: Sequence[Region]) -> None:
        dtype, shape = self.about[key]
        if dtype is None:
            raise CheckpointError(f"{key} has a type that safetensors files cannot hold")
        if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
            raise CheckpointError(
                f"{key} has the shape {shape}, and the processes that save have the parts "
                f"{[list(sizes) for _, sizes in boxes]} of it; give penstock.Checkpoints(group=...) the "
                "process group of all processes that hold a part"
            )

    def mine(self, parts: Mapping[str, Part], process: int) -> dict[str, Tensor]:
        """The tensors that a process writes, by their names in its file."""
        return {
            name_of(key, part.region, part.shape): part.tensor
            for key, part in parts.items()
            if self.writers[key][part.region] == process
        }


def name_of(key: str, region: Sequence[Sequence[int]], shape: Sequence[int]) -> str:
    """The name of a part of a tensor in a file."""
    if list(region[1]) == list(shape):
        return key
    return f"{key}@{','.join(map(str, region[0]))}"


# ---- from what a user gave to what is to be written


@dataclass
class Job:
    """A checkpoint that is being written.

    Args:
        step: the step of the run.
        made: the folder into which it is written.
        table: its table, without the places of the tensors.
        plan: which process writes what.
        mine: what this process writes, by name.
    """

    step: int
    made: Path
    table: dict[str, Any]
    plan: Plan
    mine: dict[str, Tensor]
    seconds: float = 0.0
    path: Path | None = None
    size: int = 0
    started: float = field(default_factory=time.perf_counter)

    def write(self, process: int) -> dict[str, Any]:
        """Write this process's file.

        Returns:
            What the table must say about the file.
        """
        if not self.mine:
            return {}
        name = f"states-{process + 1:05d}.safetensors"
        return {"file": name, **write_shard(self.made / name, self.mine)}

    def publish(self, written: Sequence[Mapping[str, Any]], writer: Writer) -> Path:
        """Make the checkpoint visible, once all processes have written."""
        for one in written:
            if one and _size(self.made / one["file"]) != one["bytes"]:
                raise CheckpointError(
                    f"{self.made / one['file']} is not there as its process has written it: the folder must "
                    "lie where all processes see the same files"
                )
        files = {
            one["file"]: {"bytes": one["bytes"], "header": one["header"]} for one in written if one
        }
        tensors = {
            key: {
                "dtype": dtype,
                "shape": shape,
                "pieces": [
                    [
                        written[process]["file"],
                        *map(list, box),
                        *written[process]["tensors"][name_of(key, box, shape)],
                    ]
                    for box, process in self.plan.writers[key].items()
                ],
            }
            for key, (dtype, shape) in self.plan.about.items()
        }
        table = {**self.table, "files": files, "tensors": tensors}
        self.path = writer.publish(self.made, self.step, table)
        self.size = sum(about["bytes"] for about in files.values())
        self.seconds = time.perf_counter() - self.started
        return self.path


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


class Preparing:
    """Makes a :class:`Job` of what a user gave; what does not change from save to save is agreed on once."""

    def __init__(self) -> None:
        self._agreed: Any = None
        self._structures: list[Any] = []
        self._plan: Plan | None = None

    def job(self, team: Team, targets: Targets, step: int, extra: Any, writer: Writer) -> Job:
        """Agree with the other processes on what is to be written, and by whom.

        Raises:
            PenstockError: some process cannot save; all raise its error.
        """
        own, made = Own(), ""

        def collect() -> list[Any]:
            nonlocal own, made
            own = Own.of(targets)
            told = encode_inline(extra, "extra=")
            made = str(writer.begin(step)) if team.leads else ""
            return [made, step, own.digest, own.settings, own.told_states(), told]

        try:
            told = team.together("save", collect)
            return self._job(team, targets, own, told)
        except BaseException:
            if made:
                shutil.rmtree(made, ignore_errors=True)
            raise

    def _job(self, team: Team, targets: Targets, own: Own, told: Sequence[Any]) -> Job:
        made, step, _, _, _, extra = told[0]
        if any(one[1] != step for one in told):
            raise CheckpointError(
                f"the ranks save different steps: {[one[1] for one in told]}, by rank; save the same on each"
            )
        agreed = [[one[2], one[4]] for one in told]
        changed = [one[2] for one in told] != [one[0] for one in self._agreed or ()]
        if changed:
            self._structures = team.agree(own.structure)
            check_one_rank_each(self._structures)
        structures = self._structures
        optimizers, numbers = merge_optimizers(
            [one["optimizers"] for one in structures], [one[3] for one in told]
        )
        states = States([one[4] for one in told])
        if agreed != self._agreed or self._plan is None:
            pairs = zip(structures, states.tensors, strict=True)
            self._plan = Plan([{**one["tensors"], **more} for one, more in pairs], team)
            self._agreed = agreed
        table = {
            "torch": str(torch.__version__),
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "layout": {"replicas": team.layout[0], "processes": team.layout[1], **_layout(targets)},
            "weights": merge_weights([one["weights"] for one in structures]),
            "optimizers": optimizers,
            "states": states.table(team, targets, own, numbers),
            "extra": extra,
        }
        parts = {**own.parts, **states.own_parts(own, team.rank)}
        return Job(step, Path(made), table, self._plan, self._plan.mine(parts, team.rank))


def _layout(targets: Targets) -> dict[str, Any]:
    """How the model was cut, as information: nothing depends on it."""
    if targets.pipe is None:
        return {}
    schedule = targets.pipe.schedule
    return {"schedule": schedule.name, "ranks": schedule.ranks, "stages": schedule.stages}


class States:
    """The states that each process has whole: stored once if they are equal, else once for each variant.

    Args:
        told: for each process, by label, the state's digest and the types and shapes of its tensors.
    """

    def __init__(self, told: Sequence[Mapping[str, Any]]) -> None:
        self._told = told
        self.labels = list(dict.fromkeys(label for one in told for label in one))
        self._of: dict[str, list[int]] = {}
        for label in self.labels:
            digests = [one[label][0] if label in one else None for one in told]
            kinds = list(dict.fromkeys(digest for digest in digests if digest is not None))
            self._of[label] = [-1 if digest is None else kinds.index(digest) for digest in digests]
        self.tensors = [self._tensors(process) for process in range(len(told))]

    def _tensors(self, process: int) -> dict[str, Any]:
        return {
            _variant(key, self._of[label][process]): [dtype, shape, [[0] * len(shape), shape]]
            for label, (_, tensors) in self._told[process].items()
            for key, (dtype, shape) in tensors.items()
        }

    def own_parts(self, own: Own, process: int) -> dict[str, Part]:
        """The tensors of this process, by their keys in the checkpoint."""
        return {
            _variant(key, self._of[label][process]): Part(
                tensor, tuple(tensor.shape), all_of(tensor.shape)
            )
            for label, (_, tensors) in own.states.items()
            for key, tensor in tensors.items()
        }

    def table(
        self,
        team: Team,
        targets: Targets,
        own: Own,
        numbers: Mapping[str, Sequence[Sequence[int]]],
    ) -> dict[str, Any]:
        """What the checkpoint's table says about them; on the leading process only."""
        drivers = {label: _driver(own.drivers.get(label), numbers) for label in self.labels}
        differ = [label for label in self.labels if drivers[label] or len({*self._of[label]}) > 1]
        mine = {
            label: spread_groups(own.states[label][0], drivers[label][team.rank])
            if drivers[label]
            else own.states[label][0]
            for label in differ
            if label in own.states
        }
        told = team.agree(mine) if differ else []
        found: dict[str, Any] = {}
        for label in self.labels if team.leads else ():
            of = self._of[label]
            if drivers[label]:
                joined = join_groups([one[label] for one in told if label in one])
                found[label] = {"of": [0] * len(of), "variants": [joined]}
            elif label in differ:
                variants = [_keyed(told[of.index(v)][label], v) for v in range(max(of) + 1)]
                found[label] = {"of": of, "variants": variants}
            else:
                found[label] = {"of": of, "variants": [own.states[label][0]]}
        return found


def _driver(
    label: str | None, numbers: Mapping[str, Sequence[Sequence[int]]]
) -> Sequence[Sequence[int]]:
    """For a scheduler whose optimizer's groups differ between processes: which group became which."""
    found = numbers.get(label or "", ())
    return found if any(list(of) != list(range(len(of))) for of in found if of) else ()


def _variant(key: str, number: int) -> str:
    return key if number <= 0 else f"{key}#{number}"


def _keyed(state: Any, number: int) -> Any:
    """A state in which tensors have the keys of a variant."""
    return with_keys(state, lambda key: _variant(key, number))


# ---- in the background, while the training goes on


class Snapshots:
    """Copies on the CPU of what this process writes, in memory that is reused for the next checkpoint.

    They take as much memory as the process's share of the checkpoint, and keep it.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of tensors that may change from now on."""
        kept = {name: self._place(name, tensor) for name, tensor in tensors.items()}
        devices = set()
        for name, tensor in tensors.items():
            kept[name].copy_(tensor, non_blocking=True)
            devices.add(tensor.device)
        for device in devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        self._kept = kept
        return kept

    def _place(self, name: str, tensor: Tensor) -> Tensor:
        known = self._kept.get(name)
        if known is not None and (known.shape, known.dtype) == (tensor.shape, tensor.dtype):
            return known
        pinned = tensor.device.type == "cuda"
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)


class Background:
    """A job that is written while the training goes on.

    The processes need no messages for that: each leaves a note in the folder when its file is on disk, and
    the leading one makes the checkpoint visible when all notes are there.

    Args:
        job: what to write.
        team: the processes.
        writer: makes the checkpoint visible.
    """

    def __init__(self, job: Job, team: Team, writer: Writer) -> None:
        self.job = job
        self._team = team
        self._writer = writer
        self._told: dict[str, Any] = {}
        self._problem: Exception | None = None
        self._own_done = threading.Event()
        self._given_up = threading.Event()
        # Not a daemon, so that the process does not end before its file is complete.
        self._thread = threading.Thread(target=self._run, name="penstock-checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._told = self.job.write(self._team.rank)
            _leave_note(self.job.made, self._team.rank, self._told)
        except Exception as error:
            self._problem = error
        finally:
            self._own_done.set()
        if self._team.leads and self._problem is None:
            try:
                notes = self._notes()
                if notes is not None:
                    self.job.publish(notes, self._writer)
            except Exception as error:
                self._problem = error

    def _notes(self) -> list[Any] | None:
        """What all processes have written; None if that was given up."""
        found: dict[int, Any] = {}
        ended: float | None = None
        while len(found) < self._team.size:
            for process in set(range(self._team.size)) - found.keys():
                with suppress(OSError, ValueError):
                    found[process] = json.loads(_note(self.job.made, process).read_bytes())
            if not threading.main_thread().is_alive():
                ended = ended or time.monotonic()
            if self._given_up.is_set() or (ended and time.monotonic() > ended + _ORPHANED):
                return None
            if len(found) < self._team.size:
                time.sleep(_POLL)
        return [found[process] for process in range(self._team.size)]

    @property
    def is_done(self) -> bool:
        """Whether this process has done its part."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is visible; every process must call it.

        Raises:
            CheckpointError: some process could not write its part.
        """
        try:
            self._team.together("save", self._written)
            self._team.together("save", self._published)
        except BaseException:
            self._given_up.set()
            if self._team.leads:
                self._thread.join()
                shutil.rmtree(self.job.made, ignore_errors=True)
            raise

    def _written(self) -> None:
        self._own_done.wait()
        if self._problem is not None and not self._told:
            raise self._problem

    def _published(self) -> None:
        self._thread.join()
        if self._problem is not None:
            raise self._problem


def _note(made: Path, process: int) -> Path:
    return made / f".done-{process}.json"


def _leave_note(made: Path, process: int, told: Mapping[str, Any]) -> None:
    partial = made / f".part-{process}"
    try:
        partial.write_text(json.dumps(told))
        os.replace(partial, _note(made, process))
    except OSError as error:
        raise CheckpointError(f"{made} cannot be written: {error.strerror or error}") from error
