"""The flat state that a process saves: tensors under the unsplit model's names, and JSON data.

Each object has a label, its argument's name, and one of three kinds. *Weights* are those of a Pipeline or a
module; *optimizers* keep states under the names of their parameters; each process has its part of both.
Everything else is a *state*, equal on all processes that have its label. Weights and a parameter's optimizer
state have the key ``label/name``, a state its label.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from penstock._engine.parallel import local_part, path_without_wrappers, region_of, whole
from penstock._engine.weights.files import NAMES, Box, digest, whole_box
from penstock._engine.weights.optimizers import check_kept_per_parameter, read_states
from penstock._engine.weights.states import Names, StageWeights, WholeModel
from penstock._engine.weights.trees import encode
from penstock.checkpoint.planning import HeldTensors
from penstock.checkpoint.table import ITSELF, replaced
from penstock.errors import UsageError
from penstock.partition import find_shared
from penstock.pipeline import Pipeline

MODEL = "model"
RANDOMNESS = "randomness"
WEIGHTS, OPTIMIZER, STATE = "weights", "an optimizer", "a state"
"""The kinds of labelled objects; for an optimizer, a table names its class instead."""
OF_STATE = "state "
"""Names what the leader learns of a state begin with this, and end with its label."""


class Targets:
    """The objects that a user passed to save or to load, by label.

    Attributes:
        weights: the weights of pipelines and modules.
        optimizers: the optimizers of their parameters.
        states: all other objects with a state dict.
        pipe: the pipeline, if there is one.
        model: the model of the pipeline, or the unsplit one.
        names: the names of all parameters, by ``id``.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.weights: dict[str, StageWeights] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.states: dict[str, Any] = {}
        self.pipe: Pipeline | None = None
        self.model: nn.Module | None = None
        self.names: dict[int, str] = {}
        for label, value in arguments.items():
            if value is not None:
                self._add(label, value)
        if self.optimizers and not self.weights:
            raise UsageError(
                f"{next(iter(self.optimizers))}= was given without pipe= or model=, under whose names of "
                "parameters its states are saved; give that too"
            )
        if self.pipe is not None:
            self.states.setdefault(RANDOMNESS, self.pipe.randomness)

    def _add(self, label: str, value: Any) -> None:
        if "/" in label or label == ITSELF:
            raise UsageError(f"{label!r} cannot be the name of what is saved: use a plain name")
        if isinstance(value, Pipeline):
            if self.pipe is not None:
                raise UsageError(
                    "two pipelines were given; give each Checkpoints of its own, in a folder of its own"
                )
            self.pipe, self.model = value, value.model
            self._add_weights(MODEL, value.weights.here)
        elif isinstance(value, nn.Module):
            weights = StageWeights([WholeModel(value)], Names(find_shared(value, [value])))
            label = MODEL if label == "pipe" else label
            self._add_weights(label, weights)
            self.model = value if label == MODEL else self.model
        elif isinstance(value, Optimizer):
            check_kept_per_parameter(value, f"{label}=")
            self.optimizers[label] = value
        elif all(callable(getattr(value, f"{do}state_dict", None)) for do in ("", "load_")):
            self.states[label] = value
        else:
            raise UsageError(
                f"{label}= was given a {type(value).__name__}, which has no state_dict() and "
                "load_state_dict(), as torchdata's StatefulDataLoader has; plain values go into extra="
            )

    def _add_weights(self, label: str, weights: StageWeights) -> None:
        if label in self.weights:
            raise UsageError("give pipe= or model=, not both: each says whose weights they are")
        self.weights[label] = weights
        prefix = "" if label == MODEL else f"{label}."
        for name, parameter in weights.named_parameters():
            self.names[id(parameter)] = f"{prefix}{path_without_wrappers(name)}"

    def held(self, label: str) -> Iterator[tuple[str, list[str], Any]]:
        """Yield a label's weights: each one's name as held, its keys, and the weight."""
        self.weights[label].check_filled()
        for first, (names, value) in self.weights[label].held().items():
            keys = dict.fromkeys(f"{label}/{path_without_wrappers(one)}" for one in (first, *names))
            yield first, list(keys), value


@dataclass
class Flat:
    """The flat state of a process.

    Args:
        tensors: the tensors by key; DTensors as they are.
        names: ``kinds`` of labels, ``tied`` keys, names of the parameters in each of an optimizer's
            ``groups``.
        values: JSON data by key: what an optimizer keeps for each parameter, and weights that are no tensors.
        settings: the settings of each optimizer's groups.
        shared: those of all optimizers that all ranks must have alike.
        states: each other object's JSON data, and the digests of its tensors.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, list[float]] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(targets: Targets) -> Flat:
        """Collect what this process must save."""
        flat = Flat(names={"kinds": {}, "tied": {}, "groups": {}})
        for label in targets.weights:
            flat._add_weights(label, targets)
        for label, optimizer in targets.optimizers.items():
            flat._add_optimizer(label, optimizer, targets.names)
        for label, value in targets.states.items():
            tensors: dict[str, Tensor] = {}
            tree = encode(value.state_dict(), label, tensors)
            flat.names["kinds"][label] = STATE
            flat.states[label] = [
                tree,
                {key: digest(local_part(one)) for key, one in tensors.items()},
            ]
            flat.tensors |= tensors
        # A pending sum has no part that could be written.
        flat.tensors = {
            key: tensor if region_of(tensor) is not None else whole(tensor)
            for key, tensor in flat.tensors.items()
        }
        return flat

    def _add_weights(self, label: str, targets: Targets) -> None:
        self.names["kinds"][label] = WEIGHTS
        for _, (key, *others), value in targets.held(label):
            if isinstance(value, Tensor):
                self.tensors[key] = value
                self.names["tied"] |= dict.fromkeys(others, key)
            else:
                self.values[key] = encode(value, key, self.tensors)

    def _add_optimizer(self, label: str, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        kind, groups, states, shared = read_states(optimizer, names, f"{label}=")
        self.shared |= shared
        self.names["kinds"][label] = kind
        self.names["groups"][label] = [members for _, members in groups]
        self.settings[label] = [encode(settings, label, None) for settings, _ in groups]
        for name, state in states.items():
            key = f"{label}/{name}"
            self.values[key] = encode(state, key, self.tensors)

    def described(self) -> dict[str, Any]:
        """What the leader must know of it, in parts that many processes and saves have in common."""
        held = held_of(
            (key, NAMES.get(one.dtype), one.shape, region_of(one) or whole_box(one.shape))
            for key, one in self.tensors.items()
        )
        data: dict[str, Any] = {
            "parts": held.parts,
            "tensors": held.tensors,
            "names": self.names,
            "values": alike(self.values),
            "settings": self.settings,
            "shared": self.shared,
        }
        return data | {f"{OF_STATE}{label}": state for label, state in self.states.items()}


def held_of(described: Iterable[tuple[str, str | None, Sequence[int], Box]]) -> HeldTensors:
    """Collect tensors that are described by key, type and shape, and the part that a process holds."""
    parts: dict[Any, int] = {}
    tensors = {
        key: parts.setdefault((dtype, tuple(shape), *box), len(parts))
        for key, dtype, shape, box in described
    }
    return HeldTensors([*parts], tensors)


def alike(values: Mapping[str, Any]) -> list[Any]:
    """JSON data by key, as JSON data and the keys that have it in common."""
    return merge_alike((replaced(value, key, ITSELF), [key]) for key, value in values.items())


def merge_alike(pairs: Iterable[tuple[Any, Iterable[str]]]) -> list[Any]:
    """JSON data and the keys that have it, each once."""
    keys_of: dict[str, dict[str, None]] = {}
    for value, keys in pairs:
        keys_of.setdefault(json.dumps(value), {}).update(dict.fromkeys(keys))
    return [[json.loads(text), list(keys)] for text, keys in keys_of.items()]
