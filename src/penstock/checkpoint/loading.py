"""Load a checkpoint: the leader compares its table with what all have; each process reads what it needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.contents import MODEL, OPTIMIZER, RANDOMNESS, STATE, WEIGHTS, Targets
from penstock.checkpoint.folder import CheckpointFolder, find
from penstock.checkpoint.table import CheckpointTable, check_file
from penstock.errors import (
    InputFileError,
    PenstockError,
    StateDictError,
    UsageError,
    listed,
    printable,
    quoted,
    shortened,
)
from penstock.parallel import is_sharded, local_part, region_of, spread, with_local
from penstock.weights.files import Box
from penstock.weights.optimizers import find_groups, write_states
from penstock.weights.states import check_one_rank_each
from penstock.weights.team import distinct
from penstock.weights.trees import decode

log = logging.getLogger("penstock")

# ---- in the leader: choose a checkpoint, and compare it with what all processes have


@dataclass
class Match:
    """How a checkpoint fits what one process has.

    Attributes:
        problems: what does not fit, by how much it matters.
        used: the keys in it that the process has.
        keys: for each label of weights, those that are not under their first name: their key, None for none.
        groups: for each label of optimizers, the number of the saved group for each of its groups.
        states: the labels of states.
    """

    problems: dict[str, list[str]] = field(
        default_factory=lambda: {"hard": [], "missing": [], "loose": []}
    )
    used: set[str] = field(default_factory=set)
    keys: dict[str, dict[str, str | None]] = field(default_factory=dict)
    groups: dict[str, list[int | None]] = field(default_factory=dict)
    states: list[str] = field(default_factory=list)


class Choosing:
    """Chooses the checkpoint, and the part of its table that each process needs.

    Args:
        folder: the folder of checkpoints.
        step: the step to load; None for the checkpoint that was written last.
        strict: whether everything must fit.
        older: whether to take an older one if the newest is damaged.
    """

    _table: CheckpointTable

    def __init__(self, folder: Path, step: int | None, *, strict: bool, older: bool) -> None:
        self._folder, self._step, self._strict, self._older = folder, step, strict, older
        self._requests: list[Any] = []
        self._every: list[Any] = []
        self._left: list[CheckpointFolder] = []
        self._newest = 0
        self._damage: list[str] = []

    def begin(self, parts: list[dict[str, Any]]) -> list[Any]:
        """Begin with what all processes have; return what each is to check."""
        self._requests = [of["request"] for of in parts]
        self._every = distinct(parts, "request")
        self._left = find(self._folder)
        if self._step is not None:
            chosen = [one for one in self._left if one.step == self._step]
            if not chosen:
                steps = ", ".join(str(one.step) for one in self._left)
                raise UsageError(
                    f"step={self._step}: {self._folder} has no checkpoint of it; it has those of steps "
                    f"{steps or 'none'}"
                )
            self._left = chosen[:1]
        if not self._left:
            return [None] * len(parts)
        self._newest = self._left[0].step
        return self._offers()

    def _offers(self) -> list[Any]:
        """The next checkpoint whose table is whole, and a share of its files for each process."""
        while self._left:
            path = self._left.pop(0).path
            try:
                self._table = CheckpointTable(path)
            except InputFileError as error:
                self._pass_over(path, str(error))
                continue
            count = len(self._requests)
            files = [[one.name, one.bytes, one.crc32] for one in self._table.contents.files]
            return [[path.name, self._table.save, files[i::count]] for i in range(count)]
        raise InputFileError(f"no checkpoint in {self._folder} is whole: {'; '.join(self._damage)}")

    def _pass_over(self, path: Path, damage: str) -> None:
        self._damage.append(damage if str(path) in damage else f"{path}: {damage}")
        if self._step is not None:
            raise InputFileError(self._damage[-1])
        if self._older:
            return
        if not self._left:
            raise InputFileError(f"{damage}; nothing was loaded, and there is no other checkpoint")
        step = self._left[0].step
        raise InputFileError(
            f"{self._damage[-1]}; nothing was loaded. The one before it is of step {step}: "
            f'load(step={step}) takes that, and resume="auto" the newest one that is whole'
        )

    def judge(self, damage: list[str]) -> list[Any]:
        """From what all have found of the files: the next offer for each, or its part of the table."""
        if any(damage):
            self._pass_over(self._table.path, "; ".join(dict.fromkeys(filter(None, damage))))
            return [[offer, None] for offer in self._offers()]
        matches = {id(one): self._match(one) for one in self._every}
        self._check(list(matches.values()))
        if self._damage:
            log.warning(
                "%s: resumes from step %d, not from the newest, step %d: %s",
                self._folder, self._table.step, self._newest, "; ".join(self._damage),
            )  # fmt: skip
        parts = {id(one): self._part(one, matches[id(one)]) for one in self._every}
        return [[self._table.path.name, parts[id(one)]] for one in self._requests]

    def _part(self, request: Any, match: Match) -> dict[str, Any]:
        members = {
            name for _, groups in request["optimizers"].values() for of in groups for name in of
        }
        return {
            "table": self._table.part({*match.used, *match.states}, members, match.groups),
            "keys": match.keys,
            "groups": match.groups,
            "states": match.states,
            "skipped": self._damage,
        }

    # ---- compare

    def _match(self, request: Any) -> Match:
        match = Match()
        for label, rows in request["weights"].items():
            if self._is_saved(match, label, WEIGHTS):
                self._match_weights(match, label, rows, request["types"])
        for label, (kind, members) in request["optimizers"].items():
            if self._is_saved(match, label, OPTIMIZER):
                self._match_groups(match, label, kind, members, request["schedulers"])
        match.states = [label for label in request["states"] if self._is_saved(match, label, STATE)]
        return match

    def _is_saved(self, match: Match, label: str, kind: str) -> bool:
        contents = self._table.contents
        saved = contents.kinds.get(label)
        is_saved = saved == kind or (kind == OPTIMIZER and label in contents.groups)
        if not is_saved and not (saved is None and label == RANDOMNESS):
            labels = ", ".join(f"{one}=" for one in contents.kinds)
            what = "was not saved" if saved is None else f"is {kind}, {shortened(saved)} was saved"
            match.problems["loose"].append(f"{label}= {what}; there are {labels}")
        return is_saved

    def _match_weights(
        self, match: Match, label: str, rows: Sequence[Any], types: Sequence[Any]
    ) -> None:
        contents, problems = self._table.contents, match.problems
        match.keys[label] = {}
        for kind, *keys in rows:
            keys += [contents.tied[key] for key in keys if key in contents.tied]
            match.used.update(keys)
            there: Any = contents.tensors if kind >= 0 else contents.place_of_value
            key = next((one for one in keys if one in there), None)
            if key != keys[0]:
                match.keys[label][keys[0]] = key
            if key is None:
                problems["missing"].append(keys[0])
            elif kind >= 0:
                shape, dtype = list(self._table.shape(key)), str(self._table.dtype(key))
                dtype_here, shape_here = types[kind]
                if shape != shape_here:
                    text = f"{key}: {shape} was saved, {shape_here} is here"
                    problems["hard"].append(f"of another shape: {text}")
                elif dtype != dtype_here:
                    text = f"{key}: {dtype} was saved, {dtype_here} is here"
                    problems["loose"].append(f"of another type: {text}")

    def _match_groups(
        self, match: Match, label: str, kind: str, members: Sequence[Any], schedulers: Any
    ) -> None:
        """Find the number of the saved group for each of an optimizer's groups."""
        contents, problems = self._table.contents, match.problems
        saved_kind, saved = contents.kinds.get(label, ""), contents.groups[label]
        if saved_kind != kind:
            text = f"{label}= is of the class {kind}, {printable(saved_kind, '')} was saved"
            problems["loose"].append(text)
        groups = [(g.settings, g.parameters) for g in saved]
        numbers, missing, differ = find_groups(members, groups, self._table.group_of[label])
        problems["loose"] += [f"{label}: {text}" for text in differ]
        problems["missing"] += [f"{label}/{name}" for name in missing]
        match.used.update(f"{label}/{name}" for names in members for name in names)
        if numbers != list(range(len(saved))):
            problems["hard"] += [
                f"{one}= keeps a value for each group of {label}=, which has other groups here than when it "
                "was saved; make the same ones in the same order, or leave it out"
                for one, of in schedulers.items()
                if of == label and one in contents.kinds
            ]
        match.groups[label] = numbers

    def _check(self, matches: Sequence[Match]) -> None:
        """Check how the checkpoint fits all processes; one error lists every mismatch."""
        table, kinds = self._table, self._table.contents.kinds
        lines, missing, loose = (
            list(dict.fromkeys(text for one in matches for text in one.problems[kind]))
            for kind in ("hard", "missing", "loose")
        )
        weights = {label for one in self._every for label in one["weights"]}
        others = {
            label for one in self._every for of in ("optimizers", "states") for label in one[of]
        }
        matched = {label for one in matches for label in (*one.keys, *one.groups)}
        check_one_rank_each((one["rank"], one["alone"]) for one in self._every)
        # What belongs to no object that was given is told below.
        asked = {name for name in table.names if name.partition("/")[0] in matched}
        unexpected = sorted(asked.difference(*(one.used for one in matches)))
        loose += [f"missing in it: {listed(missing)}"] if missing else []
        loose += [f"in it, but not here: {listed(unexpected)}"] if unexpected else []
        if self._strict:
            lines += loose
        elif loose:
            log.warning("%s fits in part:\n\t%s", table.path, "\n\t".join(loose))
        if lines:
            other = asked == {*unexpected} != set()
            fits = "is of another model" if other else "does not fit"
            hint = "; strict=False loads what fits of it" if self._strict else ""
            raise StateDictError(
                f"{table.path} {fits}, and nothing was loaded{hint}:\n\t" + "\n\t".join(lines)
            )
        left = [label for label in kinds if label not in weights | others | {RANDOMNESS}]
        if left and others - {RANDOMNESS}:
            log.warning("%s also holds %s, which load() was not given", table.path, ", ".join(left))


def check_files(folder: Path, offer: Sequence[Any]) -> str:
    """Compare this process's share of a checkpoint's files with their checksums; return the damage."""
    name, save, files = offer
    try:
        for file in files:
            check_file(folder / name, save, *file)
    except InputFileError as error:
        return str(error)
    return ""


# ---- in each process: read, and fill the targets


class Loading:
    """A checkpoint that fits, and the objects to load it into.

    Args:
        path: the checkpoint's folder.
        part: what :meth:`Choosing.judge` has returned for this process.
        targets: the objects that the user passed.

    Attributes:
        step: the checkpoint's step.
        extra: the user's JSON data.
        skipped: why newer checkpoints were not taken.
    """

    def __init__(self, path: Path, part: Mapping[str, Any], targets: Targets) -> None:
        self._table = CheckpointTable(path, part["table"])
        self._saved = self._table.contents
        self._part = part
        self._targets = targets
        self._weights: dict[str, list[tuple[str, Any, str]]] = {}
        self._ready: list[Callable[[], None]] = []
        self.step: int = self._table.step
        self.extra = decode(self._saved.extra)
        self.skipped: list[str] = part["skipped"]

    @torch.no_grad()
    def read(self) -> None:
        """Read all but the weights into new memory, and look for these; nothing is changed."""
        try:
            for label in self._part["keys"]:
                self._weights[label] = list(self._stored_weights(label))
            for label in self._part["states"]:
                state = decode(self._table.value(label), self._table.read)
                self._ready.append(partial(self._targets.states[label].load_state_dict, state))
            for label in self._part["groups"]:
                self._ready.append(self._read_optimizer(label))
        except InputFileError as error:
            raise InputFileError(
                f"{self._table.path} is damaged, and nothing was loaded: {error}"
            ) from error

    def _stored_weights(self, label: str) -> Iterator[tuple[str, Any, str]]:
        """Yield each weight's name, the weight itself, and its key in the checkpoint."""
        renamed = self._part["keys"][label]
        for first, keys, value in self._targets.held(label):
            key = renamed.get(keys[0], keys[0])
            if key is not None:
                if isinstance(value, Tensor):
                    # Weights are read last, when other targets have already changed.
                    whole = (0,) * value.dim(), tuple(value.shape)
                    self._table.reads(key, region_of(value) or whole)
                yield first, value, key

    def _read_optimizer(self, label: str) -> Callable[[], None]:
        optimizer, names = self._targets.optimizers[label], self._targets.names
        saved = self._saved.groups[label]
        settings = [
            {} if number is None else decode(saved[number].settings)
            for number in self._part["groups"][label]
        ]
        known = {name for group in saved for name in group.parameters}
        states = {}
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            name = names.get(id(parameter), "")  # none for those of other ranks
            if name in known:
                tree = self._table.value(f"{label}/{name}", {})
                state = decode(tree, partial(self._read_state, parameter, name))
                if not isinstance(state, dict):
                    raise InputFileError(f"what {label}= keeps for {quoted([name])} is not a dict")
                states[name] = state
        return partial(write_states, optimizer, names, settings, states)

    def _read_state(self, parameter: Tensor, name: str, key: str) -> Tensor:
        """Read an optimizer's tensor for a parameter; if that is sharded, only the part for this process."""
        region: Box | None = None
        if is_sharded(parameter) and self._table.shape(key) == tuple(parameter.shape) != ():
            region = region_of(parameter)
        value = self._table.read(key, region)
        # If a weight is cast when loaded, so are its optimizer states of the same type.
        for weight in (f"{MODEL}/{name}", name.replace(".", "/", 1)):
            if value.dim() and weight in self._saved.tensors:
                alike = self._table.dtype(weight) == value.dtype
                value = value.to(parameter.dtype) if alike else value
        return value if region is None else with_local(parameter, value.to(parameter.device))

    @torch.no_grad()
    def fill(self) -> None:
        """Fill all targets, the weights last."""
        for give in self._ready:
            try:
                give()
            except PenstockError:
                raise
            except Exception as error:
                text = f"{type(error).__name__}: {error}".split("\n")[0][:300]
                raise StateDictError(
                    f"{self._table.path}: what was saved is not taken, and no weights were loaded ({text})"
                ) from error
        for label, matched in self._weights.items():
            self._fill_weights(label, matched)
        pipe = self._targets.pipe
        if pipe is not None and RANDOMNESS not in self._saved.kinds:
            # A plain loop, for example, saves none.
            text = "%s holds no seed and step of random numbers: the next step is taken to be number %d"
            log.warning(text, self._table.path, self.step)
            pipe.randomness.load_state_dict({"seed": pipe.randomness.seed, "step": self.step})

    def _fill_weights(self, label: str, matched: Sequence[tuple[str, Any, str]]) -> None:
        weights = self._targets.weights[label]
        memory = weights.memory()
        others: dict[str, Any] = {}
        for first, tensor, key in matched:
            if not isinstance(tensor, Tensor):
                others[first] = decode(self._table.value(key), self._table.read)
            elif local_part(tensor).data_ptr() not in memory:
                # The module's hooks made this tensor for the state dict, and load it back.
                others[first] = spread(tensor, self._table.read(key))
            elif (region := region_of(tensor)) is None:
                tensor.copy_(spread(tensor, self._table.read(key)))
            else:
                local_part(tensor).copy_(self._table.read(key, region))
        if others:
            weights.load(others)
