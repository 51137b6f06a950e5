"""Optimizer states, by the parameters' names in the unsplit model.

An optimizer's own state dict identifies parameters by position, and holds what belongs to one rank: if it is
loaded on another, the next step raises (see :mod:`penstock._engine.placeholders`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Number
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from penstock._engine.parallel import is_sharded, replicated_like, spread
from penstock._engine.placeholders import is_placeholder
from penstock.errors import UsageError, quoted, shortened

logger = logging.getLogger("penstock")
NOT_SETTINGS = frozenset({"params", "param_names"})
"""Keys of a group that are not settings."""
HERE = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings for how a step is computed; they are not loaded with a state."""
KEPT_TOGETHER = {
    "LBFGS": "which keeps one state for all parameters together, so it belongs to one cut of the model; "
    "use an optimizer that keeps states for each parameter",
    "ZeroRedundancyOptimizer": "which divides its states by position; use FSDP "
    "(torch.distributed.fsdp.fully_shard), whose states can be saved for any number of processes",
}
"""Optimizers whose states cannot be cut, and what to do."""

Group = tuple[Any, Sequence[str]]
"""A group of an optimizer: its settings, and the names of its parameters."""


class OptimizerStates(NamedTuple):
    """The state of an optimizer, or of a rank's part of one.

    Attributes:
        kind: the name of the optimizer's class.
        groups: the optimizer's groups.
        states: the state of each parameter, by name.
        shared: the settings that all ranks must have alike, see :func:`shared_settings`.
    """

    kind: str
    groups: Sequence[Group]
    states: Mapping[str, dict[str, Any]]
    shared: Mapping[str, list[float]] = MappingProxyType({})


def read_states(optimizer: Optimizer, names: Mapping[int, str], called: str) -> OptimizerStates:
    """Read the state of an optimizer.

    Args:
        optimizer: an optimizer of the model's parameters.
        names: the names of parameters, by ``id``.
        called: the name of the optimizer in messages.
    """
    check_kept_per_parameter(optimizer, called)
    lost = [
        f"number {place} of group {number} (shape {list(parameter.shape)})"
        for number, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
        if id(parameter) not in names and not is_placeholder(parameter)
    ]
    if lost:
        raise UsageError(
            f"{called} has parameters that are not the model's: {', '.join(lost[:5])}; make it from "
            "pipe.parameters(), or from the model's, after they were last replaced"
        )
    odd: list[Any] = [key for key in optimizer.state_dict() if key not in ("state", "param_groups")]
    # Some optimizers begin with a state for each parameter, elsewhere or not.
    here = {key: of for key, of in optimizer.state.items() if not is_placeholder(key)}
    odd += [key for key in here if id(key) not in names]
    if odd:
        raise UsageError(
            f"{called} keeps {', '.join(shortened(repr(key)) for key in odd[:5])} for no parameter, which "
            "cannot be saved for other cuts of the model; use an optimizer that keeps states for each "
            "parameter"
        )
    groups = [
        (settings_of(group), [names[id(p)] for p in group["params"] if not is_placeholder(p)])
        for group in optimizer.param_groups
    ]
    states = {names[id(parameter)]: dict(state) for parameter, state in here.items()}
    shared = shared_settings(optimizer, names)
    return OptimizerStates(type(optimizer).__name__, groups, states, shared)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group."""
    return {key: value for key, value in group.items() if key not in NOT_SETTINGS}


def shared_settings(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, list[float]]:
    """The numbers among the settings of groups whose weights lie on this rank and on others.

    All these ranks need the same ones. An optimizer that takes a number over all weights, and keeps it in its
    groups, has another one on each.

    Args:
        optimizer: an optimizer of the model's parameters.
        names: the names of parameters here, by ``id``.

    Returns:
        The numbers, by a text that says the same on all ranks what they are.
    """
    settings = {}
    for group in optimizer.param_groups:
        weights = group["params"]
        if len({is_placeholder(weight) for weight in weights}) < 2:
            continue
        first = (
            weights[0].location.name if is_placeholder(weights[0]) else names.get(id(weights[0]))
        )
        where = f"{type(optimizer).__name__} ({len(weights)} weights from {first!r})"
        for key, value in group.items():
            numbers = tree_leaves(value) if key not in NOT_SETTINGS else []
            if numbers and all(map(_is_number, numbers)):
                settings[f"{key!r} of {where}"] = [float(number) for number in numbers]
    return settings


def warn_of_settings(
    ranks: Sequence[Mapping[str, list[float]]], name: Callable[[int], str]
) -> None:
    """Log where :func:`shared_settings` differ between processes that save an optimizer.

    Args:
        ranks: those of each process.
        name: returns the name of a process.
    """
    for setting in dict.fromkeys(setting for row in ranks for setting in row):
        values = {process: row[setting] for process, row in enumerate(ranks) if setting in row}
        if len({*map(repr, values.values())}) > 1:
            shown = ", ".join(
                f"{', '.join(f'{x:g}' for x in value)} on {name(process)}"
                for process, value in values.items()
            )
            logger.warning(
                "penstock: %s is saved with different values: %s. Each rank has measured its own weights "
                "alone; pipe.weights.sum gives an optimizer its sums over all of them",
                setting, shown,
            )  # fmt: skip


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not is_placeholder(value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_kept_per_parameter(optimizer: Any, called: str) -> None:
    """Refuse an optimizer that keeps one state for all parameters, which cannot be cut."""
    for kind in type(optimizer).__mro__:
        if kind.__name__ in KEPT_TOGETHER:
            raise UsageError(
                f"{called} is of the class {kind.__name__}, {KEPT_TOGETHER[kind.__name__]}"
            )


def fitting_settings(
    optimizer: Optimizer, settings: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Separate the saved settings that the groups of an optimizer can take from all others.

    Args:
        optimizer: the optimizer.
        settings: what was saved for each of its groups.

    Returns:
        What to load into each group, and what is wrong with the rest.
    """
    fitting, problems = [], []
    for place, (group, saved) in enumerate(zip(optimizer.param_groups, settings, strict=True)):
        unfit = {
            key: value
            for key, value in saved.items()
            if key not in HERE and (key in NOT_SETTINGS or not _fits(value, group.get(key)))
        }
        fitting.append({key: value for key, value in saved.items() if key not in unfit})
        for key, value in unfit.items():
            was = f"group {place}: {shortened(str(key))}={shortened(repr(value))} was saved, which"
            if key in NOT_SETTINGS:
                problems.append(f"{was} is no setting")
            else:
                problems.append(f"{was} cannot take the place of {shortened(repr(group[key]))}")
    return fitting, problems


def _fits(value: Any, now: Any) -> bool:
    """Tell whether a saved setting is of the kind of the one that it replaces."""
    if isinstance(now, tuple):
        alike = isinstance(value, tuple | list) and len(value) == len(now)
        return alike and all(map(_fits, value, now))
    for kinds in (str, list | tuple, Mapping):
        if isinstance(now, kinds):
            return isinstance(value, kinds)
    return _passes_as_number(value) or not _passes_as_number(now)


def _passes_as_number(value: Any) -> bool:
    if isinstance(value, int):
        return value.bit_length() < 1024  # a float can be as large
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Number)


def write_states(
    optimizer: Optimizer,
    names: Mapping[int, str],
    settings: Sequence[Mapping[str, Any]],
    states: Mapping[str, Mapping[str, Any]],
) -> None:
    """Load states into an optimizer, each value in its own type; torch would cast to the parameter's.

    Args:
        optimizer: an optimizer of the model's parameters.
        names: the names of parameters, by ``id``.
        settings: the settings of each of its groups.
        states: the states of parameters by name; other parameters keep theirs.
    """
    for group, of_group in zip(optimizer.param_groups, settings, strict=True):
        for key in of_group.keys() - HERE:
            value, now = of_group[key], group.get(key)
            if isinstance(value, Tensor) and isinstance(now, Tensor):
                value = value.to(now.device)
            group[key] = value
        on_device = group.get("capturable") or group.get("fused")
        for parameter in group["params"]:
            if not is_placeholder(parameter) and names[id(parameter)] in states:
                optimizer.state[parameter] = {
                    key: value
                    if key == "step" and not on_device
                    else tree_map_only(Tensor, partial(_as_kept, parameter), value)
                    for key, value in states[names[id(parameter)]].items()
                }


def _as_kept(parameter: Tensor, value: Tensor) -> Tensor:
    """A state's tensor on its parameter's device, and sharded if the parameter is."""
    value = value.to(parameter.device)
    if not value.dim() or not is_sharded(parameter) or is_sharded(value):
        return value
    alike = value.shape == parameter.shape
    return spread(parameter, value) if alike else replicated_like(parameter, value)


# ---- groups of all ranks' optimizers, as those of one optimizer


def merge_groups(ranks: Sequence[Sequence[Group]]) -> list[Group]:
    """Merge the groups of several ranks' optimizers, with settings as JSON data, into those of one.

    Usually all ranks make the same groups in the same order, each of its own parameters. If they do not, as
    with one group per layer, groups with the same settings are merged.
    """
    alike = all([of for of, _ in groups] == [of for of, _ in ranks[0]] for groups in ranks)
    merged: dict[str, tuple[Any, dict[str, None]]] = {}
    for groups in ranks:
        for place, (settings, names) in enumerate(groups):
            key = str(place) if alike else json.dumps(settings)
            merged.setdefault(key, (settings, {}))[1].update(dict.fromkeys(names))
    return [(settings, list(names)) for settings, names in merged.values()]


def find_groups(
    here: Sequence[Sequence[str]], saved: Sequence[Group]
) -> tuple[list[int | None], list[str], list[str]]:
    """Compare an optimizer's groups with those that were saved.

    Args:
        here: the names of the parameters in each group.
        saved: the saved groups.

    Returns:
        The number of each group's saved group, the names that were not saved, and the conflicts.
    """
    number_of = {name: number for number, (_, names) in enumerate(saved) for name in names}
    continued: list[int | None] = []
    problems, missing = [], []
    for place, names in enumerate(here):
        missing += [name for name in names if name not in number_of]
        numbers = list(dict.fromkeys(number_of[name] for name in names if name in number_of))
        if any(saved[number][0] != saved[numbers[0]][0] for number in numbers):
            groups = (
                f"{quoted(saved[n][1][:1])} with {shortened(str(saved[n][0]))}" for n in numbers
            )
            problems.append(
                f"group {place} has parameters that were saved in groups with different settings: "
                + "; ".join(groups)
            )
        by_place = place if len(here) == len(saved) else None
        continued.append(numbers[0] if numbers else by_place)
    return continued, missing, problems


# ---- state dicts by name


def named_state_dict(held: OptimizerStates) -> dict[str, Any]:
    """The states as a state dict whose keys are names: the form of ``torch.distributed.checkpoint``."""
    groups = [{"params": list(names), **settings} for settings, names in held.groups]
    return {"state": dict(held.states), "param_groups": groups}
