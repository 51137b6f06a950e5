"""Load a checkpoint: all compare it with what they have, before each reads what it needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from penstock._engine.parallel import is_sharded, local_part, region_of, spread, with_local
from penstock._engine.transport import Job
from penstock._engine.weights.files import Box, whole_box
from penstock._engine.weights.optimizers import (
    find_groups,
    fitting_settings,
    read_states,
    write_states,
)
from penstock._engine.weights.states import LoadResult, Offer
from penstock._engine.weights.telling import distinct
from penstock._engine.weights.trees import decode
from penstock.checkpoint.contents import MODEL, OPTIMIZER, RANDOMNESS, STATE, WEIGHTS, Targets
from penstock.checkpoint.folder import find
from penstock.checkpoint.table import CheckpointTable
from penstock.errors import (
    CheckpointError,
    InputFileError,
    PenstockError,
    StateDictError,
    UsageError,
    listed,
    printable,
    quoted,
    shortened,
)

log = logging.getLogger("penstock")

# ---- choose a checkpoint


class Choosing:
    """Chooses a checkpoint that is whole; the processes share the work of looking.

    Args:
        folder: the folder of checkpoints.
        step: the step to load; None for the checkpoint that was written last.
        older: whether to take an older one if the newest is damaged.

    Attributes:
        skipped: why newer checkpoints were not taken.
    """

    def __init__(self, folder: Path, step: int | None, *, older: bool) -> None:
        self._folder, self._step, self._older = folder, step, older
        self.skipped: list[str] = []

    def choose(self, job: Job) -> CheckpointTable | None:
        """The table of the checkpoint, or None if there is none; all processes call this."""
        group = job.together
        listed_ones = job.meet(lambda: None, lambda _: self._candidates(), "load")
        for place, (name, step) in enumerate(listed_ones):
            tables: list[CheckpointTable] = []
            look = partial(self._look, name, slice(group.rank, None, group.size), tables)
            if not (damage := job.meet(look, self._judge, "load")):
                if self.skipped and not group.rank:
                    log.warning(
                        "%s: resumes from step %d, not from the newest, step %d: %s",
                        self._folder, step, listed_ones[0][1], "; ".join(self.skipped),
                    )  # fmt: skip
                return tables[0]
            self._pass_over(damage, [one for _, one in listed_ones[place + 1 :]])
        return None

    def _candidates(self) -> list[Any]:
        """The names and steps of checkpoints, in the order in which they are tried."""
        there = find(self._folder)
        chosen = [one for one in there if self._step in (None, one.step)]
        if self._step is not None and not chosen:
            steps = ", ".join(str(one.step) for one in there)
            raise UsageError(
                f"step={self._step}: {self._folder} has no checkpoint of it; it has those of steps "
                f"{steps or 'none'}"
            )
        return [[one.path.name, one.step] for one in chosen]

    def _look(self, name: str, share: slice, tables: list[CheckpointTable]) -> list[str]:
        """Read a table, and compare a share of its files with it; return its save, and the damage."""
        try:
            tables.append(CheckpointTable(self._folder / name))
            tables[0].check_files(share)
        except InputFileError as error:
            text = str(error)
            return ["", text if name in text else f"{self._folder / name}: {text}"]
        return [tables[0].save, ""]

    def _judge(self, seen: list[Any]) -> str:
        damage = "; ".join(dict.fromkeys(text for _, text in seen if text))
        if not damage and len({save for save, _ in seen}) > 1:
            raise CheckpointError(
                f"the hosts see different checkpoints in {self._folder.absolute()}; it must lie where all "
                "processes see the same files"
            )
        return damage

    def _pass_over(self, damage: str, others: Sequence[int]) -> None:
        self.skipped.append(damage)
        if self._older and others:
            return
        if self._older:
            raise InputFileError(
                f"no checkpoint in {self._folder} is whole: {'; '.join(self.skipped)}"
            )
        if self._step is not None:
            raise InputFileError(damage)
        hint = ", and there is no other checkpoint"
        if others:
            hint = (
                f". The one before it is of step {others[0]}: load(step={others[0]}) takes that, and "
                'resume="auto" the newest one that is whole'
            )
        raise InputFileError(f"{damage}; nothing was loaded{hint}")


# ---- compare it, read it, and fill the targets


class Loading:
    """A checkpoint, and the objects to load it into.

    Args:
        table: the checkpoint's table.
        targets: the objects that the user passed.

    Attributes:
        step: the checkpoint's step.
        extra: the user's JSON data.
    """

    def __init__(self, table: CheckpointTable, targets: Targets) -> None:
        self._table, self._saved = table, table.contents
        self._targets = targets
        self._weights: dict[str, list[tuple[str, Any, str]]] = {}
        self._settings: dict[str, list[dict[str, Any]]] = {}
        self._states: list[str] = []
        self._used: set[str] = set()
        self._problems: dict[str, list[str]] = {"hard": [], "missing": [], "loose": []}
        self._ready: list[Callable[[], None]] = []
        self.step = table.step
        self.extra = decode(self._saved.extra)

    def match(self) -> Offer:
        """Compare the checkpoint with what this process has."""
        targets = self._targets
        for label in targets.weights:
            if self._is_saved(label, WEIGHTS):
                self._weights[label] = list(self._match_weights(label))
        for label, optimizer in targets.optimizers.items():
            if self._is_saved(label, OPTIMIZER):
                self._settings[label] = self._match_groups(label, optimizer)
        self._states = [label for label in targets.states if self._is_saved(label, STATE)]
        matched = {*self._weights, *self._settings}
        asked = sorted(name for name in self._table.names if name.partition("/")[0] in matched)
        labels = [[*targets.weights], [*targets.optimizers, *targets.states]]
        return Offer(sorted(self._used), asked, self._problems, labels)

    def _is_saved(self, label: str, kind: str) -> bool:
        saved = self._saved.kinds.get(label)
        is_saved = saved == kind or (kind == OPTIMIZER and label in self._saved.groups)
        if not is_saved and not (saved is None and label == RANDOMNESS):
            labels = ", ".join(f"{one}=" for one in self._saved.kinds)
            what = "was not saved" if saved is None else f"is {kind}, {shortened(saved)} was saved"
            self._problems["loose"].append(f"{label}= {what}; there are {labels}")
        return is_saved

    def _match_weights(self, label: str) -> Iterator[tuple[str, Any, str]]:
        """Yield each weight's name, the weight itself, and its key in the checkpoint."""
        saved, problems = self._saved, self._problems
        for first, keys, value in self._targets.held(label):
            keys += [saved.tied[key] for key in keys if key in saved.tied]
            self._used.update(keys)
            is_tensor = isinstance(value, Tensor)
            there: Any = saved.tensors if is_tensor else saved.place_of_value
            key = next((one for one in keys if one in there), None)
            if key is None:
                problems["missing"].append(keys[0])
                continue
            if is_tensor:
                shape, dtype = list(self._table.shape(key)), self._table.dtype(key)
                if shape != list(value.shape):
                    text = f"{key}: {shape} was saved, {list(value.shape)} is here"
                    problems["hard"].append(f"of another shape: {text}")
                elif dtype != value.dtype:
                    text = f"{key}: {dtype} was saved, {value.dtype} is here"
                    problems["loose"].append(f"of another type: {text}")
            yield first, value, key

    def _match_groups(self, label: str, optimizer: Optimizer) -> list[dict[str, Any]]:
        """The settings to load into each of an optimizer's groups."""
        saved_kind, problems = self._saved.kinds.get(label, ""), self._problems
        kind, groups, *_ = read_states(optimizer, self._targets.names, f"{label}=")
        if saved_kind != kind:
            text = f"{label}= is of the class {kind}, {printable(saved_kind, '')} was saved"
            problems["loose"].append(text)
        saved = [(of.settings, of.parameters) for of in self._saved.groups[label]]
        numbers, missing, differ = find_groups([of for _, of in groups], saved)
        problems["loose"] += [f"{label}: {text}" for text in differ]
        problems["missing"] += [f"{label}/{name}" for name in missing]
        self._used.update(f"{label}/{name}" for _, names in groups for name in names)
        if numbers != list(range(len(saved))):
            problems["hard"] += [
                f"{one}= keeps a value for each group of {label}=, which has other groups here than when it "
                "was saved; make the same ones in the same order, or leave it out"
                for one, of in self._targets.states.items()
                if isinstance(of, LRScheduler)
                and of.optimizer is optimizer
                and one in self._saved.kinds
            ]
        with self._reading():
            settings = [{} if n is None else decode(saved[n][0]) for n in numbers]
            if not all(isinstance(of, dict) for of in settings):
                raise InputFileError(f"the settings of {label}= are no settings of groups")
        fitting, unfit = fitting_settings(optimizer, settings)
        problems["loose"] += [f"{label}: {text}" for text in unfit]
        return fitting

    def check(
        self, strict: bool, result: LoadResult, problems: Mapping[str, list[str]], parts: Any
    ) -> None:
        """In the leader: check how the checkpoint fits all processes; one error lists every mismatch."""
        path, (missing, unexpected) = self._table.path, result
        lines, loose = list(problems["hard"]), list(problems["loose"])
        loose += [f"missing in it: {listed(missing)}"] if missing else []
        loose += [f"in it, but not here: {listed(unexpected)}"] if unexpected else []
        if strict:
            lines += loose
        elif loose:
            log.warning("%s fits in part:\n\t%s", path, "\n\t".join(loose))
        if lines:
            asked = set[str]().union(*distinct(parts, "loaded"))
            fits = "is of another model" if asked == {*unexpected} != set() else "does not fit"
            hint = "; strict=False loads what fits of it" if strict else ""
            raise StateDictError(
                f"{path} {fits}, and nothing was loaded{hint}:\n\t" + "\n\t".join(lines)
            )
        rows = distinct(parts, "about")
        weights, others = ({label for row in rows for label in row[of]} for of in (0, 1))
        left = [
            label for label in self._saved.kinds if label not in weights | others | {RANDOMNESS}
        ]
        if left and others - {RANDOMNESS}:
            log.warning("%s also holds %s, which load() was not given", path, ", ".join(left))

    @torch.no_grad()
    def read(self) -> None:
        """Read all but the weights into new memory, and look for these; nothing is changed."""
        with self._reading():
            # Weights are read last, when other targets have already changed.
            for _, value, key in chain.from_iterable(self._weights.values()):
                if isinstance(value, Tensor):
                    self._table.reads(key, region_of(value) or whole_box(value.shape))
            for label in self._states:
                state = decode(self._table.value(label), self._table.read)
                self._ready.append(partial(self._targets.states[label].load_state_dict, state))
            for label, settings in self._settings.items():
                self._ready.append(self._read_optimizer(label, settings))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """A context in which the checkpoint is read, and nothing is changed."""
        try:
            yield
        except InputFileError as error:
            raise InputFileError(
                f"{self._table.path} is damaged, and nothing was loaded: {error}"
            ) from error

    def _read_optimizer(
        self, label: str, settings: Sequence[Mapping[str, Any]]
    ) -> Callable[[], None]:
        optimizer, names = self._targets.optimizers[label], self._targets.names
        saved = self._saved.groups[label]
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
        if pipe is None:
            return
        for optimizer in self._targets.optimizers.values():
            pipe.weights.was_loaded(optimizer)
        if RANDOMNESS not in self._saved.kinds:
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
