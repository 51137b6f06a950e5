"""The objects of a run by label: each tells what it saves, compares a checkpoint with that, and takes it.

A label is the name of an argument. *Weights* are those of a Pipeline or a module; *optimizers* keep states
under the names of their parameters; each process has its part of both. Everything else is a *state*, equal on
all processes that have its label. A weight and a parameter's optimizer state have the key ``label/name``, a
state its label: under it the checkpoint has a tensor, or JSON data with tensors below the key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from penstock._engine.parallel import (
    is_sharded,
    local_part,
    path_without_wrappers,
    region_of,
    spread,
    whole,
    with_local,
)
from penstock._engine.weights.files import NAMES, Box, digest, whole_box
from penstock._engine.weights.optimizers import (
    check_kept_per_parameter,
    find_groups,
    fitting_settings,
    read_states,
    write_states,
)
from penstock._engine.weights.states import Names, StageWeights, WholeModel
from penstock._engine.weights.trees import TENSOR, decode, encode
from penstock.checkpoint.planning import HeldTensors, grouped
from penstock.checkpoint.table import CheckpointTable
from penstock.errors import InputFileError, UsageError, printable, quoted
from penstock.partition import find_shared
from penstock.pipeline import Pipeline

MODEL = "model"
RANDOMNESS = "randomness"
WEIGHTS, OPTIMIZER, STATE = "weights", "an optimizer", "a state"
"""The kinds of labelled objects; for an optimizer, a table names its class instead."""
OF_STATE = "state "
"""Names what the leader learns of a state begin with this, and end with its label."""


@dataclass
class Flat:
    """What a process saves.

    Args:
        tensors: the tensors by key; DTensors as they are.
        values: the JSON data by key, except states.
        names: ``kinds`` of labels, ``tied`` keys, names of the parameters in each of an optimizer's
            ``groups``.
        settings: the settings of each optimizer's groups.
        shared: those of all optimizers that all ranks must have alike.
        states: each state's JSON data, and the digests of its tensors.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=lambda: {"kinds": {}, "tied": {}, "groups": {}})
    settings: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, list[float]] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)

    def add(self, key: str, value: Any) -> None:
        """Add a weight, or what an optimizer keeps for a parameter."""
        tree = encode(value, key, self.tensors)
        if tree != TENSOR:
            self.values[key] = tree

    @cached_property
    def held(self) -> HeldTensors:
        """The parts of tensors that this process has."""
        keys_of: dict[Any, list[str]] = {}
        for key, one in self.tensors.items():
            box = region_of(one) or whole_box(one.shape)
            keys_of.setdefault((NAMES.get(one.dtype), tuple(one.shape), *box), []).append(key)
        return HeldTensors([*keys_of], [*keys_of.values()])

    def described(self) -> dict[str, Any]:
        """Return what the leader must know of it, in parts that many processes and saves have in common."""
        data: dict[str, Any] = {
            "parts": self.held.parts,
            "keys": self.held.keys,
            "names": self.names,
            "values": grouped((value, [key]) for key, value in self.values.items()),
            "settings": self.settings,
            "shared": self.shared,
        }
        return data | {f"{OF_STATE}{label}": state for label, state in self.states.items()}


@dataclass
class Fit:
    """How a checkpoint fits what this process has.

    Args:
        used: the keys of the checkpoint that this process has.
        missing: the keys that the checkpoint lacks.
        loose: what does not fit, and is left out where that may be.
        hard: what must fit.
    """

    used: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    loose: list[str] = field(default_factory=list)
    hard: list[str] = field(default_factory=list)


class State:
    """Any object with a state dict."""

    kind = STATE

    def __init__(self, label: str, of: Any) -> None:
        self.label, self.of = label, of
        self._state: Any = None

    def save(self, flat: Flat) -> None:
        """Add its state, and digests by which processes compare it."""
        tensors: dict[str, Tensor] = {}
        tree = encode(self.of.state_dict(), self.label, tensors)
        flat.names["kinds"][self.label] = STATE
        digests = {key: digest(local_part(one)) for key, one in tensors.items()}
        flat.states[self.label] = [tree, digests]
        flat.tensors |= tensors

    def match(self, table: CheckpointTable, fit: Fit) -> None:
        """Nothing: only the object itself can tell whether it takes a state."""

    def read(self, table: CheckpointTable) -> None:
        """Read its state."""
        tree = table.values.get(self.label, TENSOR)  # the state may be one tensor
        self._state = decode(tree, table.read, self.label)

    def fill(self, table: CheckpointTable) -> None:
        """Give it that state."""
        self.of.load_state_dict(self._state)


class Weights:
    """The weights of a pipeline or a module."""

    kind = WEIGHTS

    def __init__(self, label: str, weights: StageWeights) -> None:
        self.label, self.weights = label, weights
        self._matched: list[tuple[str, Any, str]] = []

    def _held(self) -> Iterator[tuple[str, list[str], Any]]:
        """Yield each weight's name as held, its keys, and the weight."""
        self.weights.check_filled()
        for first, (names, value) in self.weights.held().items():
            paths = dict.fromkeys(path_without_wrappers(one) for one in (first, *names))
            yield first, [f"{self.label}/{path}" for path in paths], value

    def save(self, flat: Flat) -> None:
        """Add the weights, each under its first name."""
        flat.names["kinds"][self.label] = WEIGHTS
        for _, (key, *others), value in self._held():
            flat.add(key, value)
            if isinstance(value, Tensor):
                flat.names["tied"] |= dict.fromkeys(others, key)

    def match(self, table: CheckpointTable, fit: Fit) -> None:
        """Find each weight under one of its names, and compare shapes and types."""
        tied = table.contents.tied
        for first, keys, value in self._held():
            keys += [tied[key] for key in keys if key in tied]
            fit.used.update(keys)
            is_tensor = isinstance(value, Tensor)
            there: Mapping[str, Any] = table.tensors if is_tensor else table.values
            key = next((one for one in keys if one in there), None)
            if key is None:
                fit.missing.append(keys[0])
                continue
            if is_tensor:
                shape, dtype = list(table.shape(key)), table.dtype(key)
                if shape != list(value.shape):
                    text = f"{key}: {shape} was saved, {list(value.shape)} is here"
                    fit.hard.append(f"of another shape: {text}")
                elif dtype != value.dtype:
                    text = f"{key}: {dtype} was saved, {value.dtype} is here"
                    fit.loose.append(f"of another type: {text}")
            self._matched.append((first, value, key))

    def read(self, table: CheckpointTable) -> None:
        """Look for the weights; they are read last, when other objects have already changed."""
        for _, value, key in self._matched:
            if isinstance(value, Tensor):
                table.reads(key, region_of(value) or whole_box(value.shape))

    def fill(self, table: CheckpointTable) -> None:
        """Read the weights into the memory that they have."""
        memory, others = self.weights.memory(), dict[str, Any]()
        for first, value, key in self._matched:
            if not isinstance(value, Tensor):
                others[first] = decode(table.values[key], table.read, key)
            elif local_part(value).data_ptr() not in memory:
                # The module's hooks made this tensor for the state dict, and load it back.
                others[first] = spread(value, table.read(key))
            elif (region := region_of(value)) is None:
                value.copy_(spread(value, table.read(key)))
            else:
                local_part(value).copy_(table.read(key, region))
        if others:
            self.weights.load(others)


class OptimizerState:
    """An optimizer of weights.

    Args:
        label: its label.
        optimizer: the optimizer.
        names: the names of all parameters of the weights, by ``id``.
        schedulers: the labels of those of its schedulers that are loaded too.
    """

    kind = OPTIMIZER

    def __init__(
        self, label: str, optimizer: Optimizer, names: Mapping[int, str], schedulers: Sequence[str]
    ) -> None:
        self.label, self.optimizer = label, optimizer
        self._names, self._schedulers = names, schedulers
        self._settings: Sequence[Mapping[str, Any]] = ()
        self._states: dict[str, dict[str, Any]] = {}

    def save(self, flat: Flat) -> None:
        """Add what it keeps for each parameter, and the settings of its groups."""
        kind, groups, states, shared = read_states(self.optimizer, self._names, f"{self.label}=")
        flat.shared |= shared
        flat.names["kinds"][self.label] = kind
        flat.names["groups"][self.label] = [members for _, members in groups]
        flat.settings[self.label] = [encode(of, self.label, None) for of, _ in groups]
        for name, state in states.items():
            flat.add(f"{self.label}/{name}", state)

    def match(self, table: CheckpointTable, fit: Fit) -> None:
        """Find the settings to load into each group."""
        label, saved_kind = self.label, table.contents.kinds.get(self.label, "")
        kind, groups, *_ = read_states(self.optimizer, self._names, f"{label}=")
        if saved_kind != kind:
            text = f"{label}= is of the class {kind}, {printable(saved_kind, '')} was saved"
            fit.loose.append(text)
        saved = [(of.settings, of.parameters) for of in table.contents.groups[label]]
        numbers, missing, differ = find_groups([of for _, of in groups], saved)
        fit.loose += [f"{label}: {text}" for text in differ]
        fit.missing += [f"{label}/{name}" for name in missing]
        fit.used.update(f"{label}/{name}" for _, names in groups for name in names)
        if numbers != list(range(len(saved))):
            fit.hard += [
                f"{one}= keeps a value for each group of {label}=, which has other groups here than when it "
                "was saved; make the same ones in the same order, or leave it out"
                for one in self._schedulers
                if one in table.contents.kinds
            ]
        settings = [{} if n is None else decode(saved[n][0]) for n in numbers]
        if not all(isinstance(of, dict) for of in settings):
            raise InputFileError(f"the settings of {label}= are no settings of groups")
        self._settings, unfit = fitting_settings(self.optimizer, settings)
        fit.loose += [f"{label}: {text}" for text in unfit]

    def read(self, table: CheckpointTable) -> None:
        """Read what was kept for each parameter that is here."""
        known = {name for group in table.contents.groups[self.label] for name in group.parameters}
        for parameter in (one for group in self.optimizer.param_groups for one in group["params"]):
            name = self._names.get(id(parameter), "")  # none for those of other ranks
            if name in known:
                key = f"{self.label}/{name}"
                read = partial(self._read_tensor, table, parameter, name)
                state = decode(table.values.get(key, {}), read, key)
                if not isinstance(state, dict):
                    raise InputFileError(
                        f"what {self.label}= keeps for {quoted([name])} is not a dict"
                    )
                self._states[name] = state

    def _read_tensor(
        self, table: CheckpointTable, parameter: Tensor, name: str, key: str
    ) -> Tensor:
        """Read a tensor kept for a parameter; if that is sharded, only the part for this process."""
        region: Box | None = None
        if is_sharded(parameter) and table.shape(key) == tuple(parameter.shape) != ():
            region = region_of(parameter)
        value = table.read(key, region)
        # If a weight is cast when loaded, so are its optimizer states of the same type.
        for weight in (f"{MODEL}/{name}", name.replace(".", "/", 1)):
            if value.dim() and weight in table.tensors:
                alike = table.dtype(weight) == value.dtype
                value = value.to(parameter.dtype) if alike else value
        return value if region is None else with_local(parameter, value.to(parameter.device))

    def fill(self, table: CheckpointTable) -> None:
        """Give the optimizer its settings and states."""
        write_states(self.optimizer, self._names, self._settings, self._states)


Labelled = Weights | OptimizerState | State
"""Each can ``save``; to load it, ``match``, ``read``, which changes nothing yet, and ``fill`` are called."""


class Targets:
    """The objects that a user passed to save or to load.

    Attributes:
        all: them, the weights first.
        pipe: the pipeline, if there is one.
        model: the model of the pipeline, or the unsplit one.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.pipe: Pipeline | None = None
        self.model: nn.Module | None = None
        weights: dict[str, Weights] = {}
        optimizers: dict[str, Optimizer] = {}
        states: dict[str, Any] = {}
        cut = any(isinstance(value, Pipeline) for value in arguments.values())
        for label, value in arguments.items():
            if "/" in label:
                raise UsageError(f"{label!r} cannot be the name of what is saved: use a plain name")
            if value is None:
                continue
            if isinstance(value, Pipeline | nn.Module):
                one = self._weights_of(label, value, cut=cut)
                if one.label in weights:
                    raise UsageError(
                        "give pipe= or model=, not both: each says whose weights they are"
                    )
                weights[one.label] = one
            elif isinstance(value, Optimizer):
                check_kept_per_parameter(value, f"{label}=")
                optimizers[label] = value
            elif all(callable(getattr(value, f"{do}state_dict", None)) for do in ("", "load_")):
                states[label] = value
            else:
                raise UsageError(
                    f"{label}= was given a {type(value).__name__}, which has no state_dict() and "
                    "load_state_dict(), as torchdata's StatefulDataLoader has; plain values go into extra="
                )
        if optimizers and not weights:
            raise UsageError(
                f"{next(iter(optimizers))}= was given without pipe= or model=, under whose names of "
                "parameters its states are saved; give that too"
            )
        if self.pipe is not None:
            states.setdefault(RANDOMNESS, self.pipe.randomness)
        names = {
            id(parameter): ("" if label == MODEL else f"{label}.") + path_without_wrappers(name)
            for label, one in weights.items()
            for name, parameter in one.weights.named_parameters()
        }
        self.all: list[Labelled] = [*weights.values()]
        for label, optimizer in optimizers.items():
            schedulers = [
                one
                for one, of in states.items()
                if isinstance(of, LRScheduler) and of.optimizer is optimizer
            ]
            self.all.append(OptimizerState(label, optimizer, names, schedulers))
        self.all += [State(label, of) for label, of in states.items()]

    def _weights_of(self, label: str, value: Pipeline | nn.Module, *, cut: bool) -> Weights:
        if isinstance(value, nn.Module):
            label = MODEL if label == "pipe" else label
            self.model = value if label == MODEL else self.model
            names = Names(find_shared(value, [value]))
            # Of an average of the pipeline's model, each rank has its part.
            return Weights(label, StageWeights([WholeModel(value, only_here=cut)], names))
        if self.pipe is not None:
            raise UsageError(
                "two pipelines were given; give each Checkpoints of its own, in a folder of its own"
            )
        self.pipe, self.model = value, value.model
        return Weights(MODEL, value.weights.here)

    def flat(self) -> Flat:
        """Collect what this process must save."""
        flat = Flat()
        for one in self.all:
            one.save(flat)
        # A pending sum has no part that could be written.
        flat.tensors = {
            key: tensor if region_of(tensor) is not None else whole(tensor)
            for key, tensor in flat.tensors.items()
        }
        return flat
