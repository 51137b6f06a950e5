"""Load a checkpoint: compare its table with the targets, then read what this process needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from penstock.checkpoint.contents import MODEL, OPTIMIZER, RANDOMNESS, STATE, WEIGHTS, Targets
from penstock.checkpoint.table import CheckpointTable
from penstock.errors import (
    InputFileError,
    PenstockError,
    StateDictError,
    listed,
    printable,
    quoted,
    shortened,
)
from penstock.parallel import is_sharded, local_part, region_of, spread, with_local
from penstock.weights.files import Box
from penstock.weights.optimizers import find_groups, read_states, write_states
from penstock.weights.states import check_one_rank_each
from penstock.weights.trees import decode, keys_of

log = logging.getLogger("penstock")


class Loading:
    """A checkpoint, and the objects to load it into.

    Args:
        table: the table of the checkpoint.
        targets: the objects that the user passed.
        strict: whether everything must fit.

    Attributes:
        step: the checkpoint's step.
        extra: the user's JSON data.
    """

    def __init__(self, table: CheckpointTable, targets: Targets, *, strict: bool) -> None:
        self._table = table
        self._saved = table.contents
        self._targets = targets
        self._strict = strict
        self._problems: dict[str, list[str]] = {"hard": [], "missing": [], "loose": []}
        self._used: set[str] = set()
        self._weights: dict[str, list[tuple[str, Any, str]]] = {}
        self._groups: dict[str, list[int | None]] = {}
        self._states: list[str] = []
        self._ready: list[Callable[[], None]] = []
        self.step = table.step
        self.extra = decode(self._saved.extra)

    # ---- match the checkpoint with the targets

    def match(self) -> list[Any]:
        """Compare the targets here with the checkpoint; nothing is changed.

        Returns:
            A report for the leader: mismatches, labels, those of weights and optimizers that were saved, the
            rank, and two bits for each saved name: whether it is used, and whether no other stage has it.
        """
        targets = self._targets
        for label in targets.weights:
            if self._is_saved(label, WEIGHTS):
                self._weights[label] = list(self._match_weights(label))
        for label in targets.optimizers:
            if self._is_saved(label, OPTIMIZER):
                self._groups[label] = self._match_groups(label)
        self._states = [label for label in targets.states if self._is_saved(label, STATE)]
        labels = [*targets.weights, *targets.optimizers, *targets.states]
        names = self.names()
        alone = {f"{MODEL}/{name}" for name in targets.alone}
        bits = [bits_of(names, self._used), bits_of(names, alone)]
        return [self._problems, labels, [*self._weights, *self._groups], targets.rank, bits]

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
        for first, keys, value in self._targets.held(label):
            keys += [self._saved.tied[key] for key in keys if key in self._saved.tied]
            self._used.update(keys)
            there = self._saved.tensors if isinstance(value, Tensor) else self._saved.values
            key = next((one for one in keys if one in there), None)
            if key is None:
                self._problems["missing"].append(keys[0])
            elif not isinstance(value, Tensor) or self._fits(key, value):
                yield first, value, key

    def _fits(self, key: str, tensor: Tensor) -> bool:
        shape, dtype = self._table.shape(key), self._table.dtype(key)
        if shape != tuple(tensor.shape):
            text = f"{key}: {list(shape)} was saved, {list(tensor.shape)} is here"
            self._problems["hard"].append(f"of another shape: {text}")
            return False
        if dtype != tensor.dtype:
            text = f"of another type: {key}: {dtype} was saved, {tensor.dtype} is here"
            self._problems["loose"].append(text)
        # Check this now: weights are read last, when other targets have already changed.
        self._table.reads(key, region_of(tensor) or ((0,) * len(shape), shape))
        return True

    def _match_groups(self, label: str) -> list[int | None]:
        """Return the number of the saved group for each of an optimizer's groups."""
        optimizer, problems = self._targets.optimizers[label], self._problems
        kind, groups, _ = read_states(optimizer, self._targets.names, f"{label}=")
        saved_kind, saved = self._saved.kinds.get(label, ""), self._saved.groups[label]
        if saved_kind != kind:
            text = f"{label}= is of the class {kind}, {printable(saved_kind, '')} was saved"
            problems["loose"].append(text)
        numbers, missing, differ = find_groups(groups, [(g.settings, g.parameters) for g in saved])
        problems["loose"] += [f"{label}: {text}" for text in differ]
        problems["missing"] += [f"{label}/{name}" for name in missing]
        self._used.update(f"{label}/{name}" for _, names in groups for name in names)
        if numbers != list(range(len(saved))):
            problems["hard"] += [
                f"{one}= keeps a value for each group of {label}=, which has other groups here than when it "
                "was saved; make the same ones in the same order, or leave it out"
                for one, value in self._targets.states.items()
                if one in self._saved.kinds
                and isinstance(value, LRScheduler)
                and value.optimizer is optimizer
            ]
        return numbers

    def names(self) -> list[str]:
        """Return the keys saved for weights and optimizers, the same in every process."""
        keys = {*self._saved.tensors, *self._saved.values}
        inner = {key for value in self._saved.values.values() for key in keys_of(value)}
        weights = {label for label, kind in self._saved.kinds.items() if kind == WEIGHTS}
        names = {key for key in keys - inner if key.partition("/")[0] in weights}
        for label, groups in self._saved.groups.items():
            for group in groups:
                names.update(f"{label}/{name}" for name in group.parameters)
        return sorted(names)

    # ---- check the reports of all processes

    def check(self, reports: Sequence[Any]) -> None:
        """Check the reports of all processes, in the leader; one error lists every mismatch."""
        lines, missing, loose = (
            list(dict.fromkeys(text for one in reports for text in one[0][kind]))
            for kind in ("hard", "missing", "loose")
        )
        names = self.names()
        here = {label for one in reports for label in one[1]} | {RANDOMNESS}
        matched = {label for one in reports for label in one[2]}
        alone = {(rank, bits[1]) for *_, rank, bits in reports}
        check_one_rank_each(
            (rank, (name.partition("/")[2] for name in _chosen(names, bits)))
            for rank, bits in alone
        )
        used = {name for bits in {one[-1][0] for one in reports} for name in _chosen(names, bits)}
        # What belongs to no object that was given is told below.
        asked = {name for name in names if name.partition("/")[0] in matched}
        unexpected = sorted(asked - used)
        loose += [f"missing in it: {listed(missing)}"] if missing else []
        loose += [f"in it, but not here: {listed(unexpected)}"] if unexpected else []
        path = self._table.path
        if self._strict:
            lines += loose
        elif loose:
            log.warning("%s fits in part:\n\t%s", path, "\n\t".join(loose))
        if lines:
            other = asked == {*unexpected} != set()
            fits = "is of another model" if other else "does not fit"
            hint = "; strict=False loads what fits of it" if self._strict else ""
            raise StateDictError(
                f"{path} {fits}, and nothing was loaded{hint}:\n\t" + "\n\t".join(lines)
            )
        left = [label for label in self._saved.kinds if label not in here]
        if left and here - self._targets.weights.keys() - {RANDOMNESS}:
            log.warning("%s also holds %s, which load() was not given", path, ", ".join(left))

    # ---- read, and fill the targets

    @torch.no_grad()
    def read(self) -> None:
        """Read all but the weights into new memory; nothing is changed."""
        try:
            for label in self._states:
                state = decode(self._saved.values.get(label), self._table.read)
                self._ready.append(partial(self._targets.states[label].load_state_dict, state))
            for label in self._groups:
                self._ready.append(self._read_optimizer(label))
        except InputFileError as error:
            raise InputFileError(
                f"{self._table.path} is damaged, and nothing was loaded: {error}"
            ) from error

    def _read_optimizer(self, label: str) -> Callable[[], None]:
        optimizer, names = self._targets.optimizers[label], self._targets.names
        saved = self._saved.groups[label]
        settings = [
            {} if number is None else decode(saved[number].settings)
            for number in self._groups[label]
        ]
        known = {name for group in saved for name in group.parameters}
        states = {}
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            name = names.get(id(parameter), "")  # none for those of other ranks
            if name in known:
                tree = self._saved.values.get(f"{label}/{name}", {})
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
                others[first] = decode(self._saved.values[key], self._table.read)
            elif local_part(tensor).data_ptr() not in memory:
                # The module's hooks made this tensor for the state dict, and load it back.
                others[first] = spread(tensor, self._table.read(key))
            elif (region := region_of(tensor)) is None:
                tensor.copy_(spread(tensor, self._table.read(key)))
            else:
                local_part(tensor).copy_(self._table.read(key, region))
        if others:
            weights.load(others)


def bits_of(names: Sequence[str], chosen: Set[str]) -> str:
    """A bit for each of some names that is chosen, in hexadecimal digits."""
    bits = np.fromiter((name in chosen for name in names), dtype=bool, count=len(names))
    return np.packbits(bits).tobytes().hex()


def _chosen(names: Sequence[str], bits: str) -> list[str]:
    """The names whose bits are set."""
    row = np.unpackbits(np.frombuffer(bytes.fromhex(bits), dtype=np.uint8))
    return [names[place] for place in np.flatnonzero(row).tolist()]
