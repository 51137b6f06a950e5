"""What a process has to save, and how a checkpoint's table tells of it: by names, never by where it lies.

Each thing that is saved has a label, the argument's name, and is one of three kinds. *Weights* are those of a
Pipeline or a module, *optimizers* keep states under the names of their parameters, and of both each process
has its part. Everything else is a *state* that one process has whole: mostly all have the same one, which is
then saved once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from penstock.checkpoint.folder import NAMES, Region, all_of
from penstock.errors import UsageError
from penstock.parallel import local_part, region_of, whole
from penstock.partition import find_shared
from penstock.pipeline import Pipeline
from penstock.rng import unwrapped
from penstock.weights.files import raw_bytes
from penstock.weights.optimizers import check_kept_per_parameter, merge_groups, read_states
from penstock.weights.states import Names, Weights, WholeModel, check_apart
from penstock.weights.trees import MARK, encode, encode_inline

MODEL = "model"
RANDOMNESS = "randomness"
PER_GROUP = frozenset(
    {"base_lrs", "_last_lr", "min_lrs", "max_lrs", "lr_lambdas", "base_momentums", "max_momentums"}
)
"""The attributes that schedulers of learning rates keep for each group of their optimizer."""


@dataclass
class Targets:
    """What a user gave to save or to load, by label.

    Args:
        weights: the weights of pipelines and modules.
        optimizers: the optimizers of their parameters.
        states: whatever else has a state dict.
        pipe: the pipeline, if there is one.
        names: the names of all parameters, by identity.
    """

    weights: dict[str, Weights] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)
    pipe: Pipeline | None = None
    names: dict[int, str] = field(default_factory=dict)

    @staticmethod
    def of(given: Mapping[str, Any]) -> Targets:
        """Sort what a user gave.

        Raises:
            UsageError: something has no state to save.
        """
        found = Targets()
        for label, value in given.items():
            if value is not None:
                found._add(label, value)
        if found.optimizers and not found.weights:
            raise UsageError(
                f"{next(iter(found.optimizers))}= was given without pipe= or model=, under whose names of "
                "parameters its states are saved; give that too"
            )
        if found.pipe is not None:
            found.states.setdefault(RANDOMNESS, found.pipe.randomness)
        return found

    def _add(self, label: str, value: Any) -> None:
        if isinstance(value, Pipeline):
            if self.pipe is not None:
                raise UsageError(
                    "two pipelines were given; give each Checkpoints of its own, in a folder of its own"
                )
            self.pipe = value
            self._add_weights(MODEL, value.held_weights, dict(value.named_parameters()))
        elif isinstance(value, nn.Module):
            names = Names(find_shared(value, [value]))
            weights = Weights([WholeModel(value)], names)
            self._add_weights(
                MODEL if label == "pipe" else label, weights, dict(weights.named_parameters())
            )
        elif isinstance(value, Optimizer):
            check_kept_per_parameter(value, f"{label}=")
            self.optimizers[label] = value
        elif callable(getattr(value, "state_dict", None)) and callable(
            getattr(value, "load_state_dict", None)
        ):
            self.states[label] = value
        else:
            raise UsageError(
                f"{label}= was given a {type(value).__name__}, which has no state_dict() and "
                "load_state_dict(), as torchdata's StatefulDataLoader has; plain values go into extra="
            )

    def _add_weights(self, label: str, weights: Weights, named: Mapping[str, Tensor]) -> None:
        if label in self.weights:
            raise UsageError("give pipe= or model=, not both: each says whose weights they are")
        self.weights[label] = weights
        prefix = "" if label == MODEL else f"{label}."
        self.names.update(
            {id(parameter): f"{prefix}{unwrapped(name)}" for name, parameter in named.items()}
        )

    @property
    def rank(self) -> int:
        """The rank of the pipeline that this process is; the first if it is all of them."""
        return self.pipe.ranks[0] if self.pipe is not None else 0

    @property
    def labels(self) -> list[str]:
        """All labels."""
        return [*self.weights, *self.optimizers, *self.states]


class Part(NamedTuple):
    """The part of a tensor that is in this process.

    Attributes:
        tensor: the part.
        shape: the shape of the whole tensor.
        region: where the part is in it.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    region: Region

    @property
    def told(self) -> list[Any]:
        """Its type, shape and region as JSON data."""
        return [NAMES.get(self.tensor.dtype), list(self.shape), [list(of) for of in self.region]]


def part_of(tensor: Tensor) -> Part:
    """The part of a tensor that is in this process."""
    region = region_of(tensor)
    if region is None:
        tensor = whole(tensor)
        region = all_of(tensor.shape)
    return Part(local_part(tensor), tuple(tensor.shape), region)


@dataclass
class Own:
    """What this process has to save.

    Args:
        parts: the parts of weights and optimizers' states, by key.
        structure: what these belong to, as JSON data, which is mostly the same from save to save.
        settings: the settings of the groups of optimizers.
        states: for each other object its state as JSON data, and its tensors.
        drivers: for each scheduler the label of its optimizer.
    """

    parts: dict[str, Part] = field(default_factory=dict)
    structure: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    states: dict[str, tuple[Any, dict[str, Tensor]]] = field(default_factory=dict)
    drivers: dict[str, str | None] = field(default_factory=dict)

    @staticmethod
    def of(targets: Targets) -> Own:
        """Collect what this process has to save.

        Raises:
            CheckpointError: something cannot be stored.
            UsageError: an optimizer's states cannot be stored.
        """
        own = Own(structure={"weights": {}, "optimizers": {}, "rank": targets.rank})
        for label, weights in targets.weights.items():
            own._take_weights(label, weights)
        for label, optimizer in targets.optimizers.items():
            own._take_optimizer(label, optimizer, targets.names)
        for label, value in targets.states.items():
            tensors: dict[str, Tensor] = {}
            own.states[label] = encode(value.state_dict(), label, tensors), tensors
            own.drivers[label] = optimizer_of(value, targets.optimizers)
        own.structure["tensors"] = {key: part.told for key, part in own.parts.items()}
        return own

    def _take_weights(self, label: str, weights: Weights) -> None:
        weights.check_filled()
        tensors: dict[str, Tensor] = {}
        tied, others = {}, {}
        held = weights.held()
        for name, (names, value) in held.items():
            name = unwrapped(name)
            if isinstance(value, Tensor):
                tensors[f"{label}/{name}"] = value
                tied.update({unwrapped(other): name for other in names if unwrapped(other) != name})
            else:
                others[name] = encode(value, f"{label}/{name}", tensors)
        self.parts.update({key: part_of(tensor) for key, tensor in tensors.items()})
        shared = [name for name in held if weights.is_shared(name)]
        self.structure["weights"][label] = {"tied": tied, "others": others, "shared": shared}

    def _take_optimizer(self, label: str, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        held = read_states(optimizer, names, f"{label}=")
        tensors: dict[str, Tensor] = {}
        self.settings[label] = [
            {
                key: encode_inline(value, f"{label}/group {i}/{key}")
                for key, value in settings.items()
            }
            for i, settings in enumerate(held.settings)
        ]
        self.structure["optimizers"][label] = {
            "kind": held.kind,
            "members": held.groups,
            "states": {
                name: encode(state, f"{label}/{name}", tensors)
                for name, state in held.states.items()
            },
            "rest": encode(held.rest, f"{label}/-", tensors),
        }
        self.parts.update({key: part_of(tensor) for key, tensor in tensors.items()})

    @property
    def digest(self) -> str:
        """A digest of the structure."""
        return hashlib.sha256(json.dumps(self.structure).encode()).hexdigest()

    def told_states(self) -> dict[str, Any]:
        """For each state a digest, of its tensors' contents too, and the types and shapes of its tensors."""
        return {
            label: [
                _digest(value, tensors),
                {key: [NAMES.get(of.dtype), list(of.shape)] for key, of in tensors.items()},
            ]
            for label, (value, tensors) in self.states.items()
        }


def _digest(value: Any, tensors: Mapping[str, Tensor]) -> str:
    summed = hashlib.sha256(json.dumps(value).encode())
    for key, tensor in tensors.items():
        here = local_part(tensor).cpu().contiguous()
        summed.update(f"{key} {here.dtype} {list(here.shape)}".encode())
        summed.update(raw_bytes(here))
    return summed.hexdigest()


# ---- the parts of all processes, put together in one table


def check_one_rank_each(told: Sequence[Mapping[str, Any]]) -> None:
    """Check that no two ranks of a pipeline have different weights of the same name.

    Raises:
        UsageError: there are such weights.
    """
    rank_of: dict[str, int] = {}
    for one in told:
        shared = {f"{MODEL}/{name}" for name in one["weights"].get(MODEL, {}).get("shared", ())}
        own = [key for key in one["tensors"] if key.startswith(f"{MODEL}/") and key not in shared]
        twice = [key for key in own if rank_of.setdefault(key, one["rank"]) != one["rank"]]
        check_apart([key.partition("/")[2] for key in twice] * 2)


def merge_weights(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all processes tell about weights, by label."""
    labels = list(dict.fromkeys(label for one in told for label in one))
    return {
        label: {
            about: {k: v for one in told if label in one for k, v in one[label][about].items()}
            for about in ("tied", "others")
        }
        for label in labels
    }


def merge_optimizers(
    told: Sequence[Mapping[str, Any]], settings: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[str, list[list[int]]]]:
    """What all processes tell about optimizers, by label; and for each process which group became which.

    Raises:
        UsageError: optimizers of the same label are of different classes.
    """
    found, numbers = {}, {}
    for label in dict.fromkeys(label for one in told for label in one):
        here = [one.get(label) for one in told]
        kinds = {one["kind"] for one in here if one}
        if len(kinds) > 1:
            raise UsageError(
                f"{label}= is of the classes {', '.join(sorted(kinds))} on different ranks; use one"
            )
        groups = merge_groups(
            [
                list(zip(of.get(label, ()), one["members"] if one else (), strict=True))
                for one, of in zip(here, settings, strict=True)
            ]
        )
        numbers[label] = groups.numbers
        found[label] = {
            "kind": kinds.pop(),
            "groups": [
                {"settings": of, "parameters": members}
                for of, members in zip(groups.settings, groups.members, strict=True)
            ],
            "states": {name: state for one in here if one for name, state in one["states"].items()},
            "rest": next(one["rest"] for one in here if one),
        }
    return found, numbers


def spread_groups(state: Any, numbers: Sequence[int]) -> Any:
    """A scheduler's state, where what it keeps for its groups is stored by the merged groups.

    Args:
        state: the state as JSON data.
        numbers: for each of its groups the number of the merged one.
    """
    if isinstance(state, list):
        return [spread_groups(one, numbers) for one in state]
    if not isinstance(state, dict):
        return state
    return {
        key: _by_number(value, numbers)
        if key in PER_GROUP and isinstance(value, list) and len(value) == len(numbers)
        else spread_groups(value, numbers)
        for key, value in state.items()
    }


def _by_number(values: Sequence[Any], numbers: Sequence[int]) -> dict[str, Any]:
    by_number = {str(number): value for number, value in zip(numbers, values, strict=True)}
    return {MARK: "groups", "of": by_number}


def _is_by_number(state: Any) -> bool:
    return isinstance(state, dict) and state.get(MARK) == "groups"


def join_groups(states: Sequence[Any]) -> Any:
    """The states of a scheduler on several ranks, joined to one with all groups."""
    known: dict[str, dict[str, Any]] = {}
    for state in states:
        _collect(state, "", known)
    return _filled(states[0], "", known)


def _collect(state: Any, path: str, known: dict[str, dict[str, Any]]) -> None:
    if _is_by_number(state):
        known.setdefault(path, {}).update(state["of"])
    elif isinstance(state, (dict, list)):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            _collect(value, f"{path}/{key}", known)


def _filled(state: Any, path: str, known: Mapping[str, Mapping[str, Any]]) -> Any:
    if path in known:
        return {MARK: "groups", "of": dict(known[path])}
    if isinstance(state, list):
        return [_filled(one, f"{path}/{i}", known) for i, one in enumerate(state)]
    if isinstance(state, dict):
        return {key: _filled(one, f"{path}/{key}", known) for key, one in state.items()}
    return state


def pick_groups(state: Any, numbers: Sequence[int | None], now: Any) -> Any:
    """A scheduler's state, where what it keeps for groups is in the order of the groups here.

    Args:
        state: the state with all merged groups, as JSON data.
        numbers: for each group here the number of the merged one.
        now: the scheduler's current state, which is kept for a group that was not saved.
    """
    if _is_by_number(state):
        here = now if isinstance(now, list) and len(now) == len(numbers) else [None] * len(numbers)
        return [
            state["of"].get(str(number), own) for number, own in zip(numbers, here, strict=True)
        ]
    if isinstance(state, list):
        inner = now if isinstance(now, list) and len(now) == len(state) else [None] * len(state)
        return [pick_groups(one, numbers, own) for one, own in zip(state, inner, strict=True)]
    if isinstance(state, dict):
        known = now if isinstance(now, dict) else {}
        return {key: pick_groups(one, numbers, known.get(key)) for key, one in state.items()}
    return state


def optimizer_of(value: Any, optimizers: Mapping[str, Optimizer]) -> str | None:
    """The label of the optimizer that an object drives, if it is a scheduler."""
    is_scheduler = isinstance(value, LRScheduler) or hasattr(value, "min_lrs")
    held = getattr(value, "optimizer", None) if is_scheduler else None
    return next((label for label, one in optimizers.items() if one is held), None)
