"""Read a checkpoint: compare its table with what is to be filled, then read what this process needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.contents import MODEL, RANDOMNESS, Targets, join_groups
from penstock.checkpoint.planning import Box
from penstock.checkpoint.table import CheckpointTable
from penstock.checkpoint.team import ProcessTeam
from penstock.errors import InputFileError, PenstockError, StateDictError, printable
from penstock.parallel import (
    is_sharded,
    local_part,
    path_without_wrappers,
    region_of,
    spread,
    with_local,
)
from penstock.weights.files import shortened
from penstock.weights.optimizers import OptimizerStates, find_groups, read_states, write_states
from penstock.weights.states import StageWeights, check_one_rank_each
from penstock.weights.trees import decode, decode_inline, keys_of

log = logging.getLogger("penstock")
_KINDS = ("missing", "shapes", "types", "others")
"""The kinds of what may not fit."""


class Loading:
    """A checkpoint, and what it is loaded into.

    Args:
        table: the table of the checkpoint.
        targets: what the user gave.
        team: the processes that load together.
        strict: whether everything must fit.
    """

    def __init__(
        self, table: CheckpointTable, targets: Targets, team: ProcessTeam, *, strict: bool
    ) -> None:
        self._table = table
        self._saved = table.contents
        self._targets = targets
        self._team = team
        self._strict = strict
        self._problems: dict[str, list[str]] = {kind: [] for kind in _KINDS}
        self._used: set[str] = set()
        self._alone: set[str] = set()
        self.extra = decode_inline(self._saved.extra, None)
        self._weights = {label: self._match(label, of) for label, of in targets.weights.items()}
        self._groups = {label: self._match_groups(label) for label in targets.optimizers}
        self._trees = {label: self._pick_state(label) for label in targets.states}
        self._ready: list[Callable[[], None]] = []

    @property
    def step(self) -> int:
        """The step at which the checkpoint was saved."""
        return self._table.step

    # ---- match what was saved with what is here

    def _match(self, label: str, weights: StageWeights) -> list[tuple[str, Any, str]]:
        """For each weight here its name, the weight itself, and its key in the checkpoint."""
        weights.check_filled()
        saved, matched = self._saved.weights.get(label), []
        if saved is None:
            self._note_unsaved(label)
            return []
        for first, (names, value) in weights.held().items():
            known = [path_without_wrappers(name) for name in names]
            known += [saved.tied[name] for name in known if name in saved.tied]
            keys = [f"{label}/{name}" for name in known]
            self._used.update(keys)
            if label == MODEL and not weights.is_shared(first):
                self._alone.add(path_without_wrappers(first))
            if isinstance(value, Tensor):
                key = next((one for one in keys if one in self._saved.tensors), None)
            else:
                key = next((one for one in known if one in saved.others), None)
            if key is None:
                self._problems["missing"].append(f"{label}/{path_without_wrappers(first)}")
            elif not isinstance(value, Tensor) or self._fits(key, value):
                matched.append((first, value, key))
        return matched

    def _fits(self, key: str, tensor: Tensor) -> bool:
        shape, dtype = self._table.shape(key), self._table.dtype(key)
        if shape != tuple(tensor.shape):
            text = f"{key}: {list(shape)} was saved, {list(tensor.shape)} is here"
            self._problems["shapes"].append(text)
        elif dtype != tensor.dtype:
            self._problems["types"].append(f"{key}: {dtype} was saved, {tensor.dtype} is here")
        return shape == tuple(tensor.shape)

    def _match_groups(self, label: str) -> list[int | None]:
        """For each group of an optimizer the number of the saved group."""
        saved, optimizer = self._saved.optimizers.get(label), self._targets.optimizers[label]
        states = read_states(optimizer, self._targets.names, f"{label}=")
        if saved is None:
            self._note_unsaved(label)
            return [None] * len(states.groups)
        others = self._problems["others"]
        if saved.kind != states.kind:
            others.append(
                f"{label}= is of the class {states.kind}, {printable(saved.kind, '')} was saved"
            )
        members = [group.parameters for group in saved.groups]
        numbers, problems = find_groups(
            states.groups, members, [group.settings for group in saved.groups]
        )
        others += [f"{label}: {text}" for text in problems]
        known = {name for names in members for name in names}
        for name in (name for names in states.groups for name in names):
            self._used.add(f"{label}/{name}")
            if name not in known:
                self._problems["missing"].append(f"{label}/{name}")
        return numbers

    def _pick_state(self, label: str) -> Any:
        """The saved state of an object for this process, as JSON data; None if there is none."""
        saved = self._saved.states.get(label)
        if saved is None:
            if label != RANDOMNESS:
                self._note_unsaved(label)
            return None
        if len(saved.variants) == 1:
            return saved.variants[0]
        number = self._variant(saved.of)
        if number is None:
            self._problems["others"].append(
                f"{label}= was different on the {len(saved.of)} processes that saved it, and this run has "
                f"{self._team.size}; load it with as many, or leave it out"
            )
            return None
        return saved.variants[number]

    def _variant(self, numbers: Sequence[int]) -> int | None:
        """Which of the states that differed between processes is for this one."""
        replicas, processes = self._saved.layout.replicas, self._saved.layout.processes
        if len(numbers) != replicas * processes or replicas != self._team.layout[0]:
            return None
        replica = self._team.rank // self._team.layout[1]
        of_replica = numbers[replica * processes : (replica + 1) * processes]
        if processes == self._team.layout[1]:
            of_replica = [of_replica[self._team.rank % processes]]
        kinds = {number for number in of_replica if number >= 0}
        return kinds.pop() if len(kinds) == 1 else None

    def _note_unsaved(self, label: str) -> None:
        saved = ", ".join(f"{one}=" for one in self._table.labels)
        self._problems["others"].append(f"{label}= was not saved; there are {saved}")

    # ---- check what all processes have found

    def damage(self) -> str:
        """What is damaged of the files that this process needs, in words; empty if nothing is."""
        try:
            self._table.verify(self._needs())
        except InputFileError as error:
            return str(error)
        return ""

    def _needs(self) -> Iterator[tuple[str, Box | None]]:
        for label, matched in self._weights.items():
            for _, tensor, key in matched:
                if isinstance(tensor, Tensor):
                    yield key, region_of(tensor)
            saved = self._saved.weights.get(label)
            yield from ((key, None) for key in keys_of(saved.others if saved else {}))
        for label in self._groups:
            for parameter, _, state in self._states_of(label):
                yield from ((key, self._region(key, parameter)) for key in keys_of(state))
            if label in self._saved.optimizers:
                yield from ((key, None) for key in keys_of(self._saved.optimizers[label].rest))
        for tree in self._trees.values():
            yield from ((key, None) for key in keys_of(tree))

    def report(self) -> list[Any]:
        """For the other processes: what does not fit, what is not used here, and which weights are here."""
        unused = sorted(self._names() - self._used)
        return [self._problems, unused, self._targets.rank, sorted(self._alone)]

    def _names(self) -> set[str]:
        """The names of all that was saved of the given weights and optimizers."""
        names: set[str] = set()
        inner: set[str] = set()
        for label in self._weights:
            if saved := self._saved.weights.get(label):
                names.update(f"{label}/{name}" for name in saved.others)
                inner.update(keys_of(saved.others))
        for label in self._groups:
            if optimizer := self._saved.optimizers.get(label):
                names.update(f"{label}/{n}" for of in optimizer.groups for n in of.parameters)
        tensors = (key for key in self._saved.tensors if key.partition("/")[0] in self._weights)
        return names.union(key for key in tensors if key not in inner)

    def check(self, reports: Sequence[Any]) -> None:
        """Check what all processes report.

        Raises:
            StateDictError: the checkpoint does not fit; the message lists everything.
        """
        problems = {
            kind: list(dict.fromkeys(text for one in reports for text in one[0][kind]))
            for kind in _KINDS
        }
        check_one_rank_each((rank, alone) for _, _, rank, alone in reports)
        unexpected = sorted(set[str].intersection(*({*unused} for _, unused, _, _ in reports)))
        names = self._names()
        self._raise_or_warn(problems, unexpected, other_model=names == {*unexpected} != set())

    def _raise_or_warn(
        self, problems: Mapping[str, list[str]], unexpected: list[str], *, other_model: bool
    ) -> None:
        lines = [f"of another shape: {text}" for text in problems["shapes"]]
        loose = list(problems["others"])
        missing = problems["missing"]
        loose += [f"missing in it: {_listed(missing)}"] if missing else []
        loose += [f"in it, but not here: {_listed(unexpected)}"] if unexpected else []
        loose += [f"of another type: {text}" for text in problems["types"]]
        if self._strict:
            lines += loose
        elif loose:
            log.warning("%s fits in part:\n\t%s", self._table.path, "\n\t".join(loose))
        if lines:
            fits = "is of another model" if other_model else "does not fit"
            hint = "; strict=False loads what fits of it" if self._strict else ""
            raise StateDictError(
                f"{self._table.path} {fits}, and nothing was loaded{hint}:\n\t" + "\n\t".join(lines)
            )
        asks = self._targets.optimizers or self._targets.states.keys() - {RANDOMNESS}
        left = [n for n in self._table.labels if n not in (*self._targets.labels, RANDOMNESS)]
        if asks and left:
            text = "%s also holds %s, which load() was not given"
            log.warning(text, self._table.path, ", ".join(left))

    # ---- read, and put into place

    @torch.no_grad()
    def read(self) -> None:
        """Read all but the weights into new memory; nothing is changed.

        Raises:
            InputFileError: something of the table cannot be read.
        """
        try:
            self._read()
        except InputFileError as error:
            raise InputFileError(
                f"{self._table.path} is damaged, and nothing was loaded: {error}"
            ) from error

    def _read(self) -> None:
        for label, tree in self._trees.items():
            if tree is not None:
                state = decode(self._joined(label, tree), self._table.read)
                self._ready.append(partial(self._give, label, state))
        for label, optimizer in self._targets.optimizers.items():
            if label in self._saved.optimizers:
                held = self._optimizer_states(label)
                names = self._targets.names
                self._ready.append(partial(write_states, optimizer, names, held, f"{label}="))

    def _give(self, label: str, state: Any) -> None:
        self._targets.states[label].load_state_dict(state)

    def _joined(self, label: str, tree: Any) -> Any:
        """A state; if it is a scheduler's, then with values for the groups that its optimizer has here."""
        optimizer = self._targets.optimizer_of(label)
        if optimizer is None:
            return tree

        def values(path: str, now: Any) -> list[Any]:
            if optimizer:
                saved = self._saved.optimizers.get(optimizer)
                groups = [one.settings for one in saved.groups] if saved else []
                numbers = self._groups[optimizer]
            else:
                # Its optimizer is not loaded, so the groups are taken as they were.
                every = (group for one in self._saved.optimizers.values() for group in one.groups)
                groups = [group.settings for group in every if path in group.settings]
                numbers = list(range(len(groups)))
            current = (
                now if isinstance(now, list) and len(now) == len(numbers) else [None] * len(numbers)
            )
            return [
                value if number is None else groups[number].get(path, value)
                for number, value in zip(numbers, current, strict=True)
            ]

        return join_groups(tree, values, self._targets.states[label].state_dict())

    def _optimizer_states(self, label: str) -> OptimizerStates:
        saved, optimizer = self._saved.optimizers[label], self._targets.optimizers[label]
        settings: list[dict[str, Any]] = []
        for number, group in zip(self._groups[label], optimizer.param_groups, strict=True):
            of_group = {} if number is None else saved.groups[number].settings
            settings.append(
                {k: decode_inline(v, group.get(k)) for k, v in of_group.items() if "/" not in k}
            )
        states = {
            name: {
                key: decode(one, partial(self._read_state, parameter, name))
                for key, one in state.items()
            }
            for parameter, name, state in self._states_of(label)
        }
        rest = decode(saved.rest, self._table.read)
        return OptimizerStates(saved.kind, settings, [], states, rest)

    def _states_of(self, label: str) -> Iterator[tuple[Tensor, str, dict[str, Any]]]:
        """The parameters of an optimizer, with their names and the states that were saved for them."""
        saved = self._saved.optimizers.get(label)
        for group in self._targets.optimizers[label].param_groups:
            for parameter in group["params"]:
                name = self._targets.names[id(parameter)]
                if saved and name in saved.states:
                    yield parameter, name, saved.states[name]

    def _region(self, key: str, parameter: Tensor) -> Box | None:
        """The part of a state that belongs to the part of a parameter in this process; None for all of it."""
        alike = is_sharded(parameter) and self._table.shape(key) == tuple(parameter.shape)
        return region_of(parameter) if alike and parameter.dim() else None

    def _read_state(self, parameter: Tensor, name: str, key: str) -> Tensor:
        region = self._region(key, parameter)
        value = self._table.read(key, region)
        # Where a weight is loaded with a cast, so is what was kept for it in its type.
        for weight in (f"{MODEL}/{name}", name.replace(".", "/", 1)):
            if value.dim() and weight in self._saved.tensors:
                alike = self._table.dtype(weight) == value.dtype
                value = value.to(parameter.dtype) if alike else value
        return value if region is None else with_local(parameter, value.to(parameter.device))

    @torch.no_grad()
    def fill(self) -> None:
        """Put everything into place, the weights last.

        Raises:
            StateDictError: an object does not take what was saved for it.
        """
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
        if pipe is not None and self._trees.get(RANDOMNESS) is None:
            # None was saved, as by a plain loop.
            step = self._table.step
            text = "%s holds no seed and step of random numbers: the next step is taken to be number %d"
            log.warning(text, self._table.path, step)
            pipe.randomness.load_state_dict({"seed": pipe.randomness.seed, "step": step})

    def _fill_weights(self, label: str, matched: Sequence[tuple[str, Any, str]]) -> None:
        weights = self._targets.weights[label]
        memory = {tensor.data_ptr() for tensor in weights.tensors()}
        others: dict[str, Any] = {}
        for first, tensor, key in matched:
            if not isinstance(tensor, Tensor):
                others[first] = decode(self._saved.weights[label].others[key], self._table.read)
            elif local_part(tensor).data_ptr() not in memory:
                # The module's hooks made it for the state dict, and will take it back.
                others[first] = spread(tensor, self._table.read(key))
            elif (region := region_of(tensor)) is None:
                tensor.copy_(spread(tensor, self._table.read(key)))
            else:
                local_part(tensor).copy_(self._table.read(key, region))
        if others:
            weights.load(others)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(shortened, names[:20]))
    return shown if len(names) <= 20 else f"{shown} and {len(names) - 20} more"
