"""What a process has to save, as flat states: tensors under the unsplit model's names, and JSON beside them.

Each thing has a label, the argument's name, and is one of three kinds. *Weights* are those of a Pipeline or a
module; *optimizers* keep states under the names of their parameters; of both each process has its part.
Everything else is a *state*, which each process has completely: mostly all have the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from penstock.errors import UsageError
from penstock.parallel import local_part, path_without_wrappers, region_of, whole
from penstock.partition import find_shared
from penstock.pipeline import Pipeline
from penstock.weights.files import NAMES, raw_bytes
from penstock.weights.optimizers import check_kept_per_parameter, read_states
from penstock.weights.states import Names, StageWeights, WholeModel
from penstock.weights.trees import MARK, encode, encode_inline

MODEL = "model"
RANDOMNESS = "randomness"
_PER_GROUP = frozenset(
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

    weights: dict[str, StageWeights] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)
    pipe: Pipeline | None = None
    names: dict[int, str] = field(default_factory=dict)

    @staticmethod
    def of(arguments: Mapping[str, Any]) -> Targets:
        """Sort a user's arguments.

        Raises:
            UsageError: something has no state to save.
        """
        targets = Targets()
        for label, value in arguments.items():
            if value is not None:
                targets._add(label, value)
        if targets.optimizers and not targets.weights:
            raise UsageError(
                f"{next(iter(targets.optimizers))}= was given without pipe= or model=, under whose names of "
                "parameters its states are saved; give that too"
            )
        if targets.pipe is not None:
            targets.states.setdefault(RANDOMNESS, targets.pipe.randomness)
        return targets

    def _add(self, label: str, value: Any) -> None:
        if isinstance(value, Pipeline):
            if self.pipe is not None:
                raise UsageError(
                    "two pipelines were given; give each Checkpoints of its own, in a folder of its own"
                )
            self.pipe = value
            self._add_weights(MODEL, value.held_weights)
        elif isinstance(value, nn.Module):
            weights = StageWeights([WholeModel(value)], Names(find_shared(value, [value])))
            self._add_weights(MODEL if label == "pipe" else label, weights)
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

    @property
    def rank(self) -> int:
        """The rank of the pipeline that this process is; the first if it is all of them."""
        return self.pipe.ranks[0] if self.pipe is not None else 0

    @property
    def labels(self) -> list[str]:
        """All labels."""
        return [*self.weights, *self.optimizers, *self.states]

    def optimizer_of(self, label: str) -> str | None:
        """The label of the optimizer that a scheduler drives, empty if that is not here; None for others."""
        value = self.states[label]
        if not isinstance(value, LRScheduler):
            return None
        return next((name for name, one in self.optimizers.items() if one is value.optimizer), "")


Description = list[Any]
"""Of the part of a tensor in a process, as JSON data: type and shape of the tensor, offsets, sizes."""


def describe_part(tensor: Tensor) -> Description:
    """Describe the part of a tensor that this process holds."""
    region = region_of(tensor)
    offsets, sizes = region if region is not None else ((0,) * tensor.dim(), tensor.shape)
    return [NAMES.get(tensor.dtype), list(tensor.shape), list(offsets), list(sizes)]


@dataclass
class Flat:
    """The flat state of a process.

    Args:
        tensors: of weights and optimizers, or their parts, by key.
        structure: what these belong to, as JSON data, which is mostly the same from save to save.
        settings: of the groups of each optimizer, with what schedulers keep for each group.
        states: of each other object the JSON data, and its tensors.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    structure: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    states: dict[str, tuple[Any, dict[str, Tensor]]] = field(default_factory=dict)

    @staticmethod
    def of(targets: Targets) -> Flat:
        """Collect what this process has to save.

        Raises:
            CheckpointError: something cannot be stored.
            UsageError: an optimizer's states cannot be stored.
        """
        flat = Flat(structure={"weights": {}, "optimizers": {}, "rank": targets.rank})
        for label, weights in targets.weights.items():
            flat._add_weights(label, weights)
        for label, optimizer in targets.optimizers.items():
            flat._add_optimizer(label, optimizer, targets.names)
        # A pending sum is no part that could be written.
        flat.tensors = {
            key: tensor if region_of(tensor) is not None else whole(tensor)
            for key, tensor in flat.tensors.items()
        }
        for label, value in targets.states.items():
            tensors: dict[str, Tensor] = {}
            tree = encode(value.state_dict(), label, tensors)
            if optimizer_label := targets.optimizer_of(label):
                tree = _split_groups(tree, label, flat.settings[optimizer_label])
            flat.states[label] = tree, tensors
        flat.structure["tensors"] = {key: describe_part(of) for key, of in flat.tensors.items()}
        return flat

    def _add_weights(self, label: str, weights: StageWeights) -> None:
        weights.check_filled()
        tied, others, alone = {}, {}, []
        for first, (names, value) in weights.held().items():
            name = path_without_wrappers(first)
            if isinstance(value, Tensor):
                self.tensors[f"{label}/{name}"] = value
                tied.update(
                    {
                        path_without_wrappers(one): name
                        for one in names
                        if path_without_wrappers(one) != name
                    }
                )
            else:
                others[name] = encode(value, f"{label}/{name}", self.tensors)
            if not weights.is_shared(first):
                alone.append(name)
        about = {"tied": tied, "others": others, "alone": alone}
        self.structure["weights"][label] = about

    def _add_optimizer(self, label: str, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        held = read_states(optimizer, names, f"{label}=")
        self.settings[label] = [
            {key: encode_inline(one, f"{label}/group {i}/{key}") for key, one in settings.items()}
            for i, settings in enumerate(held.settings)
        ]
        self.structure["optimizers"][label] = {
            "kind": held.kind,
            "groups": held.groups,
            "states": {
                name: encode(state, f"{label}/{name}", self.tensors)
                for name, state in held.states.items()
            },
            "rest": encode(held.rest, f"{label}/-", self.tensors),
        }

    @property
    def digest(self) -> str:
        """A digest of the structure."""
        return hashlib.sha256(json.dumps(self.structure).encode()).hexdigest()

    def describe_states(self) -> dict[str, Any]:
        """For each state its JSON data, and of its tensors the descriptions and digests of their contents."""
        return {
            label: [tree, {key: [*describe_part(one), _digest(one)] for key, one in of.items()}]
            for label, (tree, of) in self.states.items()
        }


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(raw_bytes(local_part(tensor).cpu().contiguous())).hexdigest()


# ---- what schedulers keep for each group of their optimizer is stored with the groups


def _split_groups(tree: Any, path: str, settings: Sequence[dict[str, Any]]) -> Any:
    """Move what a scheduler keeps for each group to the settings of the groups."""
    if isinstance(tree, list):
        return [_split_groups(one, f"{path}/{i}", settings) for i, one in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    left = {}
    for key, value in tree.items():
        if key in _PER_GROUP and isinstance(value, list) and len(value) == len(settings):
            for group, one in zip(settings, value, strict=True):
                group[f"{path}/{key}"] = one
            left[key] = {MARK: "groups", "of": f"{path}/{key}"}
        else:
            left[key] = _split_groups(value, f"{path}/{key}", settings)
    return left


def join_groups(tree: Any, values: Callable[[str, Any], list[Any]], now: Any) -> Any:
    """A scheduler's state with what it keeps for each group.

    Args:
        tree: the state as JSON data, from which that was split off.
        values: returns for a path the values of the groups, given the scheduler's current ones.
        now: the scheduler's current state.
    """
    if isinstance(tree, dict) and tree.get(MARK) == "groups":
        return values(str(tree.get("of")), now)
    if isinstance(tree, dict):
        known = now if isinstance(now, dict) else {}
        return {key: join_groups(one, values, known.get(key)) for key, one in tree.items()}
    if isinstance(tree, list):
        inner = now if isinstance(now, list) and len(now) == len(tree) else [None] * len(tree)
        return [join_groups(one, values, current) for one, current in zip(tree, inner, strict=True)]
    return tree
