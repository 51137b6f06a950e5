"""Read a checkpoint: compare its table with what is to be filled, then read what this process needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.contents import (
    MODEL,
    RANDOMNESS,
    Targets,
    optimizer_of,
    pick_groups,
    spread_groups,
)
from penstock.checkpoint.folder import BLOCK, TABLE, Found, Region, Stored, all_of, verify_header
from penstock.checkpoint.team import Team
from penstock.errors import InputFileError, StateDictError
from penstock.parallel import is_sharded, local_part, region_of, spread, with_local
from penstock.rng import unwrapped
from penstock.weights.files import DTYPES
from penstock.weights.optimizers import (
    OptimizerStates,
    find_groups,
    read_states,
    write_states,
)
from penstock.weights.states import Weights, check_apart
from penstock.weights.trees import decode, decode_inline, keys_of

log = logging.getLogger("penstock")
Need = tuple[str, Region]
"""A tensor's key, and the part of it that is wanted."""


class Table:
    """The table of a checkpoint, and with it what its files hold.

    Args:
        found: the checkpoint.

    Raises:
        InputFileError: its table is damaged.
    """

    def __init__(self, found: Found) -> None:
        self.found = found
        try:
            table = found.table()
            self.files: dict[str, Any] = table["files"]
            self.tensors: dict[str, Any] = table["tensors"]
            self.weights: dict[str, Any] = table["weights"]
            self.optimizers: dict[str, Any] = table["optimizers"]
            self.states: dict[str, Any] = table["states"]
            self.layout: dict[str, Any] = table["layout"]
            self.about = {key: table[key] for key in ("torch", "written")}
            self.extra = decode_inline(table["extra"], None)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputFileError):
                raise
            raise InputFileError(
                f"{found.path / TABLE} is not the table of a checkpoint ({type(error).__name__}: {error})"
            ) from error

    @property
    def labels(self) -> list[str]:
        """The labels of everything that was saved."""
        return [*self.weights, *self.optimizers, *self.states]

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self.tensors[key]["shape"])

    def dtype(self, key: str) -> torch.dtype:
        """The type of a tensor."""
        return DTYPES[self.tensors[key]["dtype"]]

    def everything(self, key: str) -> Region:
        """The region of a whole tensor."""
        return all_of(self.shape(key))

    def pieces(self, key: str) -> Iterator[tuple[Stored, Region]]:
        """The pieces of a tensor, each with its place in it."""
        about = self.tensors[key]
        for file, offset, sizes, begin, sums in about["pieces"]:
            stored = Stored(self.found.file(file), self.dtype(key), tuple(sizes), begin, sums)
            yield stored, (tuple(offset), tuple(sizes))

    def read(self, key: str, region: Region | None = None) -> Tensor:
        """A part of a tensor, or all of it."""
        wanted = region or self.everything(key)
        made: Tensor | None = None
        for stored, place in self.pieces(key):
            overlap = _overlap(wanted, place)
            if overlap is None:
                continue
            inside, target = overlap
            found = stored.read(inside)
            if inside[1] == wanted[1]:
                return found
            made = torch.empty(wanted[1], dtype=found.dtype) if made is None else made
            view = made
            for dim, (begin, length) in enumerate(zip(target, inside[1], strict=True)):
                view = view.narrow(dim, begin, length)
            view.copy_(found)
        return torch.empty(wanted[1], dtype=self.dtype(key)) if made is None else made

    def verify(self, needs: Sequence[Need]) -> None:
        """Read what is needed, to check that it is what was written.

        Raises:
            InputFileError: it is not; the message names the file.
        """
        buffer = memoryview(bytearray(BLOCK))
        headed: set[str] = set()
        for key, region in needs:
            for stored, place in self.pieces(key):
                overlap = _overlap(region, place)
                if overlap is None:
                    continue
                if stored.path.name not in headed:
                    headed.add(stored.path.name)
                    self._verify_header(stored.path.name)
                stored.verify(overlap[0], buffer)

    def _verify_header(self, name: str) -> None:
        about = self.files[name]
        length, told = about["header"]
        verify_header(self.found.file(name), length, told, about["bytes"])

    def verify_all(self) -> None:
        """Like :meth:`verify`, for everything."""
        for name in self.files:
            self._verify_header(name)
        self.verify([(key, self.everything(key)) for key in self.tensors])


def _overlap(wanted: Region, place: Region) -> tuple[Region, tuple[int, ...]] | None:
    """The overlap of a wanted part with a piece: its region in the piece, its offset in the wanted part."""
    offsets, targets, sizes = [], [], []
    for begin, length, start, size in zip(*wanted, *place, strict=True):
        low, high = max(begin, start), min(begin + length, start + size)
        if high <= low:
            return None
        offsets.append(low - start)
        targets.append(low - begin)
        sizes.append(high - low)
    return (tuple(offsets), tuple(sizes)), tuple(targets)


# ---- what does not fit


class Problems:
    """What does not fit on this process."""

    KINDS = ("missing", "shapes", "types", "others")

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {kind: [] for kind in self.KINDS}
        self.used: set[str] = set()
        self.alone: set[str] = set()

    def add(self, kind: str, text: str) -> None:
        """Note a problem."""
        self.found[kind].append(text)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:20])
    return shown if len(names) <= 20 else f"{shown} and {len(names) - 20} more"


class Loading:
    """A checkpoint, and what it is loaded into.

    Args:
        table: the table of the checkpoint.
        targets: what the user gave.
        team: the processes that load together.
        strict: whether everything must fit.
    """

    def __init__(self, table: Table, targets: Targets, team: Team, *, strict: bool) -> None:
        self._table = table
        self._targets = targets
        self._team = team
        self._strict = strict
        self._problems = Problems()
        self._weights = {label: self._match(label, of) for label, of in targets.weights.items()}
        self._optimizers = {label: self._matched(label) for label in targets.optimizers}
        self._states = {label: self._state(label) for label in targets.states}

    # ---- matching

    def _match(self, label: str, weights: Weights) -> list[tuple[str, Any, str]]:
        """For each weight here its name, the weight itself, and its key in the checkpoint."""
        weights.check_filled()
        saved, found = self._table.weights.get(label), []
        if saved is None:
            self._note_unsaved(label)
            return []
        for first, (names, value) in weights.held().items():
            known = [unwrapped(name) for name in names]
            known += [saved["tied"][name] for name in known if name in saved["tied"]]
            key = self._key(label, known, value)
            self._problems.used.update(f"{label}/{name}" for name in known)
            if label == MODEL and not weights.is_shared(first):
                self._problems.alone.add(f"{label}/{unwrapped(first)}")
            if key is None:
                self._problems.add("missing", f"{label}/{unwrapped(first)}")
                continue
            if not isinstance(value, Tensor) or self._fits(key, value):
                found.append((first, value, key))
        return found

    def _key(self, label: str, names: Sequence[str], value: Any) -> str | None:
        known = (
            self._table.tensors
            if isinstance(value, Tensor)
            else {f"{label}/{name}": None for name in self._table.weights[label]["others"]}
        )
        return next((f"{label}/{name}" for name in names if f"{label}/{name}" in known), None)

    def _fits(self, key: str, own: Tensor) -> bool:
        shape, dtype = self._table.shape(key), self._table.dtype(key)
        if shape != tuple(own.shape):
            self._problems.add(
                "shapes", f"{key}: {list(shape)} was saved, {list(own.shape)} is here"
            )
            return False
        if dtype != own.dtype:
            self._problems.add("types", f"{key}: {dtype} was saved, {own.dtype} is here")
        return True

    def _matched(self, label: str) -> list[int | None]:
        """For each group of an optimizer the number of the saved group."""
        saved, optimizer = self._table.optimizers.get(label), self._targets.optimizers[label]
        own = read_states(optimizer, self._targets.names, f"{label}=")
        if saved is None:
            self._note_unsaved(label)
            return [None] * len(own.groups)
        if saved["kind"] != own.kind:
            self._problems.add(
                "others", f"{label}= is of the class {own.kind}, {saved['kind']} was saved"
            )
        members = [group["parameters"] for group in saved["groups"]]
        known = {name for names in members for name in names}
        numbers, problems = find_groups(
            own.groups, members, [group["settings"] for group in saved["groups"]]
        )
        for text in problems:
            self._problems.add("others", f"{label}: {text}")
        for name in (name for names in own.groups for name in names):
            self._problems.used.add(f"{label}/{name}")
            if name not in known:
                self._problems.add("missing", f"{label}/{name}")
        return numbers

    def _state(self, label: str) -> Any:
        """The saved state of an object for this process, as JSON data; None if it was not saved."""
        saved = self._table.states.get(label)
        if saved is None:
            if label != RANDOMNESS:
                self._note_unsaved(label)
            return None
        numbers = saved["of"]
        if len(saved["variants"]) == 1:
            return saved["variants"][0]
        number = self._variant(numbers)
        if number is None:
            self._problems.add(
                "others",
                f"{label}= was different on the {len(numbers)} processes that saved it, and this run has "
                f"{self._team.size}; load it with as many, or leave it out",
            )
            return None
        return saved["variants"][number]

    def _variant(self, numbers: Sequence[int]) -> int | None:
        """Which of the states that differed between processes is for this one."""
        replicas, processes = self._table.layout["replicas"], self._table.layout["processes"]
        if (replicas, processes) == self._team.layout:
            number = numbers[self._team.rank]
            return None if number < 0 else number
        if replicas != self._team.layout[0]:
            return None
        replica = self._team.rank // self._team.layout[1]
        own = {n for n in numbers[replica * processes : (replica + 1) * processes] if n >= 0}
        return own.pop() if len(own) == 1 else None

    def _note_unsaved(self, label: str) -> None:
        saved = ", ".join(f"{one}=" for one in self._table.labels)
        self._problems.add("others", f"{label}= was not saved; there are {saved}")

    # ---- checking

    def damage(self) -> str:
        """What is damaged of the files that this process needs, in words; empty if nothing is."""
        try:
            self._table.verify(list(self._needs()))
        except InputFileError as error:
            return str(error)
        return ""

    def _needs(self) -> Iterator[Need]:
        for held in self._weights.values():
            for _, own, key in held:
                if isinstance(own, Tensor):
                    yield key, region_of(own) or self._table.everything(key)
        for label, optimizer in self._targets.optimizers.items():
            for _, parameter, state in self._states_of(label, optimizer):
                for key in keys_of(state):
                    yield key, self._region(key, parameter)
        for state in self._states.values():
            yield from ((key, self._table.everything(key)) for key in keys_of(state))
        for label in self._weights:
            others = self._table.weights.get(label, {}).get("others", {})
            yield from ((key, self._table.everything(key)) for key in keys_of(others))

    def told(self) -> list[Any]:
        """What to tell the other processes: what does not fit, and what of the checkpoint is used here."""
        names = self._names()
        bits = sum(1 << i for i, name in enumerate(names) if name in self._problems.used)
        alone = sum(1 << i for i, name in enumerate(names) if name in self._problems.alone)
        return [self._problems.found, f"{bits:x}", self._targets.rank, f"{alone:x}"]

    def _names(self) -> list[str]:
        """The names of all that was saved of the given weights and optimizers."""
        others = [
            f"{label}/{name}"
            for label, saved in self._table.weights.items()
            if label in self._weights
            for name in saved["others"]
        ]
        weights = [key for key in self._table.tensors if key.partition("/")[0] in self._weights]
        inner = {key for of in self._table.weights.values() for key in keys_of(of["others"])}
        parameters = [
            f"{label}/{name}"
            for label, saved in self._table.optimizers.items()
            if label in self._optimizers
            for group in saved["groups"]
            for name in group["parameters"]
        ]
        return sorted({*others, *(key for key in weights if key not in inner), *parameters})

    def check(self, told: Sequence[Any]) -> None:
        """Check what all processes have told.

        Raises:
            StateDictError: the checkpoint does not fit; the message lists everything.
        """
        found = {
            kind: list(dict.fromkeys(text for one in told for text in one[0][kind]))
            for kind in Problems.KINDS
        }
        used = 0
        for one in told:
            used |= int(one[1], 16)
        names = self._names()
        self._check_apart(told, names)
        unexpected = [name for i, name in enumerate(names) if not used >> i & 1]
        self._report(found, unexpected, foreign=bool(names) and not used)

    def _check_apart(self, told: Sequence[Any], names: Sequence[str]) -> None:
        """Check that each saved weight goes to one rank only, or to ranks that share it."""
        of_rank: dict[int, int] = {}
        for _, _, rank, alone in told:
            of_rank[rank] = of_rank.get(rank, 0) | int(alone, 16)
        twice = [
            name
            for i, name in enumerate(names)
            if sum(bits >> i & 1 for bits in of_rank.values()) > 1
        ]
        check_apart([name.partition("/")[2] for name in twice] * 2)

    def _report(
        self, found: Mapping[str, list[str]], unexpected: list[str], *, foreign: bool
    ) -> None:
        lines = [f"of another shape: {text}" for text in found["shapes"]]
        loose = [*found["others"]]
        loose += [f"missing in it: {_listed(found['missing'])}"] if found["missing"] else []
        loose += [f"in it, but not here: {_listed(unexpected)}"] if unexpected else []
        loose += [f"of another type: {text}" for text in found["types"]]
        if self._strict:
            lines += loose
        elif loose:
            log.warning("%s fits in part:\n\t%s", self._table.found.path, "\n\t".join(loose))
        if lines:
            other = "is of another model" if foreign else "does not fit"
            hint = "" if not self._strict else "; strict=False loads what fits of it"
            raise StateDictError(
                f"{self._table.found.path} {other}, and nothing was loaded{hint}:\n\t"
                + "\n\t".join(lines)
            )

    # ---- filling

    @torch.no_grad()
    def fill(self) -> None:
        """Read what this process needs, and put it into place."""
        states = {
            label: decode(self._adapted(label, state), self._table.read)
            for label, state in self._states.items()
            if state is not None
        }
        for label, held in self._weights.items():
            self._fill_weights(label, self._targets.weights[label], held)
        for label in self._optimizers:
            self._fill_optimizer(label)
        for label, state in states.items():
            self._targets.states[label].load_state_dict(state)
        self._follow_step()

    def _fill_weights(
        self, label: str, weights: Weights, held: Sequence[tuple[str, Any, str]]
    ) -> None:
        lies = {tensor.data_ptr() for tensor in weights.tensors()}
        apart: dict[str, Any] = {}
        for first, own, key in held:
            if not isinstance(own, Tensor):
                saved = self._table.weights[label]["others"][key.partition("/")[2]]
                apart[first] = decode(saved, self._table.read)
            elif local_part(own).data_ptr() in lies:
                self._copy(own, key)
            else:
                # Not in memory of the module: its hooks made it for the state dict, and will take it back.
                apart[first] = spread(own, self._table.read(key))
        if apart:
            weights.load(apart)

    def _copy(self, own: Tensor, key: str) -> None:
        region = region_of(own)
        if region is None:
            own.copy_(spread(own, self._table.read(key)))
        else:
            local_part(own).copy_(self._table.read(key, region))

    def _states_of(self, label: str, optimizer: Any) -> Iterator[tuple[str, Tensor, Any]]:
        """The parameters of an optimizer, with the states that were saved for them."""
        saved = self._table.optimizers.get(label, {"states": {}})["states"]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self._targets.names[id(parameter)]
                if name in saved:
                    yield name, parameter, saved[name]

    def _region(self, key: str, parameter: Tensor) -> Region:
        """The part of a state that belongs to the part of a parameter in this process."""
        alike = self._table.shape(key) == tuple(parameter.shape)
        if is_sharded(parameter) and alike and parameter.dim():
            return region_of(parameter) or self._table.everything(key)
        return self._table.everything(key)

    def _fill_optimizer(self, label: str) -> None:
        optimizer, saved = self._targets.optimizers[label], self._table.optimizers.get(label)
        if saved is None:
            return
        settings = [
            {} if number is None else self._settings(saved["groups"][number]["settings"], group)
            for number, group in zip(self._optimizers[label], optimizer.param_groups, strict=True)
        ]
        states = {
            name: decode(state, self._reader(parameter))
            for name, parameter, state in self._states_of(label, optimizer)
        }
        rest = decode(saved["rest"], self._table.read)
        held = OptimizerStates(saved["kind"], settings, [], states, rest)
        write_states(optimizer, self._targets.names, held, f"{label}=")

    def _settings(self, saved: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
        return {key: decode_inline(value, group.get(key)) for key, value in saved.items()}

    def _reader(self, parameter: Tensor) -> Callable[[str], Tensor]:
        def read(key: str) -> Tensor:
            region = self._region(key, parameter)
            found = self._table.read(key, region)
            if region == self._table.everything(key) or region_of(parameter) is None:
                return found
            return with_local(parameter, found.to(parameter.device))

        return read

    def _adapted(self, label: str, state: Any) -> Any:
        """A state; if it is a scheduler's, then for the groups that its optimizer has here."""
        value = self._targets.states[label]
        optimizer = optimizer_of(value, self._targets.optimizers)
        if optimizer is None:
            return state
        numbers = self._optimizers[optimizer]
        saved = self._table.optimizers.get(optimizer, {"groups": []})["groups"]
        merged = spread_groups(state, list(range(len(saved))))
        return pick_groups(merged, numbers, value.state_dict())

    def _follow_step(self) -> None:
        """If no random state was saved, as by a plain loop, let the random numbers go on at the step."""
        pipe = self._targets.pipe
        if pipe is None or self._states.get(RANDOMNESS) is not None:
            return
        step = self._table.found.step
        log.warning(
            "%s holds no seed and step of random numbers: the next step is taken to be number %d",
            self._table.found.path,
            step,
        )
        pipe.randomness.load_state_dict({"seed": pipe.randomness.seed, "step": step})

    @property
    def extra(self) -> Any:
        """The user's own data, which were saved as ``extra=``."""
        return self._table.extra

    def left_out(self) -> list[str]:
        """The labels that were saved but are not loaded, if more than weights is loaded."""
        given = {*self._targets.labels, RANDOMNESS}
        asks = self._targets.optimizers or self._targets.states.keys() - {RANDOMNESS}
        return [label for label in self._table.labels if label not in given] if asks else []
