"""Optimizer states, by the names that parameters have in the unsplit model.

An optimizer's own state dict identifies parameters by position, and positions mean different parameters on
each rank. So each group of an optimizer is marked with what it holds: if one rank's state is loaded on
another, the next step raises.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only

from penstock.errors import StateDictError, UsageError, quoted, shortened
from penstock.parallel import is_sharded, replicated_like, spread, whole
from penstock.weights.exchange import Ranks

MARK = "penstock"
"""The key in a parameter group that says what the group holds."""
OWN = frozenset({"params", "param_names", MARK})
"""Keys of a group that are not settings."""
HERE = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings of how a step is computed, which are not loaded with a state."""


@dataclass
class OptimizerStates:
    """The state of an optimizer, or of a rank's part of one.

    Args:
        kind: the name of the optimizer's class.
        settings: of each group.
        groups: for each group, the names of its parameters.
        states: for each parameter by name, what is kept for it.
    """

    kind: str
    settings: list[dict[str, Any]]
    groups: list[list[str]]
    states: dict[str, dict[str, Any]]


def read_states(optimizer: Optimizer, names: Mapping[int, str], called: str) -> OptimizerStates:
    """Read the state of an optimizer.

    Args:
        optimizer: of parameters that live in this process.
        names: the names of parameters, by ``id``.
        called: the name of the optimizer in messages.

    Raises:
        UsageError: it has parameters without a name, or keeps its state in another form.
    """
    check_kept_per_parameter(optimizer, called)
    groups = _names(optimizer, names, called)
    odd: list[Any] = [key for key in optimizer.state_dict() if key not in ("state", "param_groups")]
    odd += [key for key in optimizer.state if id(key) not in names]
    if odd:
        raise UsageError(
            f"{called} keeps {', '.join(shortened(repr(key)) for key in odd[:5])} for no parameter, which "
            "cannot be saved for other cuts of the model; use an optimizer that keeps states for each "
            "parameter"
        )
    return OptimizerStates(
        type(optimizer).__name__,
        [{k: v for k, v in group.items() if k not in OWN} for group in optimizer.param_groups],
        groups,
        {names[id(parameter)]: dict(state) for parameter, state in optimizer.state.items()},
    )


def write_states(
    optimizer: Optimizer, names: Mapping[int, str], held: OptimizerStates, called: str
) -> None:
    """Give an optimizer a state, each value in its own type, where torch would cast to the parameter's.

    Args:
        optimizer: of parameters that live in this process.
        names: the names of parameters, by ``id``.
        held: the settings of its groups and the states of parameters; parameters that are not in it keep
            their states.
        called: the name of the optimizer in messages.
    """
    members = _names(optimizer, names, called)
    for group, of_group, settings in zip(
        optimizer.param_groups, members, held.settings, strict=True
    ):
        for key, value in settings.items():
            now = group.get(key)
            if isinstance(value, Tensor) and isinstance(now, Tensor):
                value = value.to(now.device)
            if key not in HERE:
                group[key] = value
        on_device = group.get("capturable") or group.get("fused")
        for parameter, name in zip(group["params"], of_group, strict=True):
            if name in held.states:
                optimizer.state[parameter] = {
                    key: value
                    if key == "step" and not on_device
                    else tree_map_only(Tensor, partial(_as_kept, parameter), value)
                    for key, value in held.states[name].items()
                }


def _as_kept(parameter: Tensor, value: Tensor) -> Tensor:
    """A tensor that is kept for a parameter: where that is, and sharded if that is."""
    value = value.to(parameter.device)
    if not value.dim() or not is_sharded(parameter) or is_sharded(value):
        return value
    alike = value.shape == parameter.shape
    return spread(parameter, value) if alike else replicated_like(parameter, value)


def _names(optimizer: Optimizer, names: Mapping[int, str], called: str) -> list[list[str]]:
    """For each group, the names of its parameters.

    Raises:
        UsageError: some have none.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    lost = [
        f"number {place} of group {number} (shape {list(parameter.shape)})"
        for number, group in enumerate(groups)
        for place, parameter in enumerate(group)
        if id(parameter) not in names
    ]
    if lost:
        raise UsageError(
            f"{called} has parameters that are not the model's: {', '.join(lost[:5])}; make it from "
            "pipe.parameters(), or from the model's, after they were last replaced"
        )
    return [[names[id(parameter)] for parameter in group] for group in groups]


def check_kept_per_parameter(optimizer: Any, called: str) -> None:
    """Check that an optimizer keeps a separate state for each parameter.

    Raises:
        UsageError: it keeps one state for all of them, which cannot be cut.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            f"{called} is an LBFGS, which keeps one state for all parameters together: it belongs to one "
            "cut of the model and cannot be saved for others; use an optimizer that keeps states for each "
            "parameter"
        )
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise UsageError(
            f"{called} is a ZeroRedundancyOptimizer, which divides its states by position; use FSDP "
            "(torch.distributed.fsdp.fully_shard), whose states can be saved for any number of processes"
        )


# ---- groups of all ranks' optimizers, as those of one optimizer


def merge_groups(
    ranks: Sequence[Sequence[tuple[Any, Sequence[str]]]],
) -> list[tuple[Any, list[str]]]:
    """The groups of several ranks' optimizers as those of one optimizer: settings, and names of parameters.

    Usually all ranks make the same groups in the same order, each of its own parameters. If they do not, as
    with one group per layer, groups with the same settings are merged.

    Args:
        ranks: for each rank, the settings of its groups, as JSON data, and their parameters' names.
    """
    alike = all([of for of, _ in groups] == [of for of, _ in ranks[0]] for groups in ranks)
    merged: dict[str, tuple[Any, dict[str, None]]] = {}
    for groups in ranks:
        for place, (settings, names) in enumerate(groups):
            key = str(place) if alike else json.dumps(settings)
            merged.setdefault(key, (settings, {}))[1].update(dict.fromkeys(names))
    return [(settings, list(names)) for settings, names in merged.values()]


def find_groups(
    current: Sequence[Sequence[str]], saved: Sequence[tuple[Any, Sequence[str]]]
) -> tuple[list[int | None], list[str]]:
    """For each group here, the index of the saved group that it continues, and what does not fit.

    Args:
        current: the parameters of the groups here.
        saved: the settings and the parameters of the saved groups.
    """
    number_of = {name: number for number, (_, names) in enumerate(saved) for name in names}
    continued: list[int | None] = []
    problems = []
    for place, names in enumerate(current):
        numbers = list(dict.fromkeys(number_of[name] for name in names if name in number_of))
        if any(saved[number][0] != saved[numbers[0]][0] for number in numbers):
            groups = (
                f"{quoted(saved[n][1][:1])} with {shortened(str(saved[n][0]))}" for n in numbers
            )
            problems.append(
                f"group {place} has parameters that were saved in groups with different settings: "
                + "; ".join(groups)
            )
        by_place = place if len(current) == len(saved) else None
        continued.append(numbers[0] if numbers else by_place)
    return continued, problems


# ---- find states of one rank that were loaded on another

_NAME = "penstock_name"
"""The attribute of a parameter that holds its name. (A weak reference would keep torch from swapping it.)"""
_SEEN: WeakKeyDictionary[Optimizer, list[tuple[int, Any]]] = WeakKeyDictionary()
_hooked = False


def remember_names(parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Mark these parameters with their names, so that their optimizers are checked at every step."""
    global _hooked
    for name, parameter in parameters:
        setattr(parameter, _NAME, name)
    if not _hooked:
        register_optimizer_step_pre_hook(_check_names)
        _hooked = True


def _check_names(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Before each step, check that the marks of the groups, which load_state_dict replaces, are their own.

    torch's ``param_names`` do not serve for this: they may be any names that a user has given, and once one
    group has them, torch refuses to add a group without.
    """
    del args, kwargs
    groups = optimizer.param_groups
    seen = _SEEN.get(optimizer, [])
    if seen == [(len(group["params"]), group.get(MARK)) for group in groups]:
        return
    for number, group in enumerate(groups):
        names = [getattr(parameter, _NAME, "") for parameter in group["params"]]
        if not names or not all(names):
            continue
        digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
        mark = f"{len(names)} parameters from {names[0]!r} to {names[-1]!r} ({digest})"
        # A group that has grown since still has its own, older mark.
        grown = number < len(seen) and seen[number][0] != len(names)
        if not grown and group.get(MARK, mark) != mark:
            raise StateDictError(
                f"this optimizer was given the state of another one: its group {number} holds {mark}, but "
                f"the state is of {group[MARK]}. An optimizer's own state_dict() holds positions, which mean "
                "different parameters on each rank; save and load with penstock.Checkpoints, or with "
                "pipe.optimizer_state_dict(optimizer, full=True) and pipe.load_optimizer_state_dict()"
            )
        group[MARK] = mark
    _SEEN[optimizer] = [(len(group["params"]), group.get(MARK)) for group in groups]


# ---- state dicts by name


def named_state_dict(held: OptimizerStates) -> dict[str, Any]:
    """The states as a state dict whose keys are names: the form of ``torch.distributed.checkpoint``."""
    groups = [
        {"params": list(names), **settings}
        for names, settings in zip(held.groups, held.settings, strict=True)
    ]
    return {"state": held.states, "param_groups": groups}


def copies(state: Any) -> Any:
    """A copy of a state, with whole tensors on the CPU."""
    if isinstance(state, Tensor):
        return whole(state).cpu().clone()
    if isinstance(state, dict):
        return {key: copies(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(copies, state))
    return state


def find_states(
    ranks: Ranks, optimizer: Optimizer, names: Mapping[int, str], state: Mapping[str, Any]
) -> tuple[OptimizerStates, tuple[list[str], list[str]], list[str]]:
    """What an optimizer here gets of a state dict whose keys are names, after all ranks have compared theirs.

    Returns:
        The states; the names that are missing and unexpected, over all ranks; and other problems.

    Raises:
        StateDictError: its keys are positions, as in an optimizer's own, or it is not a state dict at all.
    """
    if not {"state", "param_groups"} <= state.keys():
        raise StateDictError(
            f"an optimizer's state dict has 'state' and 'param_groups', not {sorted(map(str, state))}; pass "
            "what pipe.optimizer_state_dict(optimizer) returned"
        )
    groups = [
        ({k: copies(of) for k, of in group.items() if k not in OWN}, list(group["params"]))
        for group in state["param_groups"]
    ]
    known = {name for _, members in groups for name in members}
    if not all(isinstance(name, str) for name in [*state["state"], *known]):
        raise StateDictError(
            "this optimizer's state dict holds positions, which mean different parameters on each rank; save "
            "what pipe.optimizer_state_dict(optimizer, full=True) returns, or use penstock.Checkpoints"
        )
    states_here = read_states(optimizer, names, "the optimizer")
    numbers, problems = find_groups(states_here.groups, groups)
    here = {name for members in states_here.groups for name in members}
    replies = ranks.gather([sorted(here - known), sorted(here), problems])
    missing = sorted({name for one in replies for name in one[0]})
    unexpected = sorted(known.difference(*(one[1] for one in replies)))
    states_here.settings = [{} if number is None else groups[number][0] for number in numbers]
    states_here.states = {name: copies(of) for name, of in state["state"].items() if name in here}
    return states_here, (missing, unexpected), [text for one in replies for text in one[2]]
