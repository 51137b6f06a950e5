"""Find the modules of a model that are placed as a whole, and their stages."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from penstock.errors import PartitionError
from penstock.partition.base import check_lists, check_paths, count_parameters


def worthy(module: nn.Module) -> bool:
    """Tell if a module holds something that must be in one stage: parameters, or buffers that are saved."""
    return count_parameters(module) > 0 or bool(module.state_dict(keep_vars=True))


def has_forward(module: nn.Module) -> bool:
    """Tell if a module can be called at all; a list or dict of modules can if its class defines a forward."""
    return "forward" in vars(module) or forward_of(module) is not nn.Module.forward


def forward_of(module: nn.Module) -> Any:
    """The forward of a module's class, looked up statically: reading a scripted class's attribute fails."""
    return inspect.getattr_static(type(module), "forward")


def is_sequential(model: nn.Module) -> bool:
    """Tell whether a model calls its children one after the other, and does nothing else."""
    return forward_of(model) is nn.Sequential.forward


Weigh = Callable[[nn.Module], float]
"""Says how heavy a module is."""


def find_units(
    model: nn.Module,
    stages: int,
    weigh: Weigh = count_parameters,
    units: Sequence[str] | None = None,
    whole: Collection[str] = (),
) -> list[str]:
    """The units of a model for a number of stages, by path, in the order in which the model holds them.

    Takes the model's parts apart, the heaviest first, until there are enough, and none is in the way of even
    stages: a chain of modules is taken apart if it is heavier than half a stage, and any other part if it is
    heavier than a stage.

    Args:
        model: the whole model.
        stages: the number of stages.
        weigh: says how heavy a part is: by its parameters, until its operations have been counted.
        units: where to begin; by default with the largest parts.
        whole: the paths of parts that stay whole.
    """
    units, weigh = _largest(model) if units is None else list(units), functools.cache(weigh)
    while (heaviest := _to_open(model, units, stages, weigh, whole)) is not None:
        place = units.index(heaviest)
        units[place : place + 1] = parts(model.get_submodule(heaviest), heaviest)
    return once(model, units)


def _largest(model: nn.Module) -> list[str]:
    """The units to begin with: the model's parts; inside these, what a plan of transformers names."""
    if is_sequential(model):
        return [name for name, _ in model.named_children()]
    units = list(parts(model, ""))
    for path in _planned(model):
        units = _opened(model, units, path)
    return units


def _planned(model: nn.Module) -> list[str]:
    """The modules that transformers would place: ``base_model_pp_plan`` of the configurations inside."""
    plan = getattr(model, "pp_plan", None) or getattr(model, "_pp_plan", None)
    known = dict(model.named_modules())
    return [path for path in plan if path in known] if isinstance(plan, dict) else []


def once(model: nn.Module, paths: Iterable[str]) -> list[str]:
    """The paths, without other names of modules that come earlier."""
    first: dict[int, str] = {}
    for path in paths:
        first.setdefault(id(model.get_submodule(path)), path)
    return list(first.values())


def parts(module: nn.Module, path: str) -> Iterator[str]:
    """The units directly inside a module; a list is not a unit itself, but its members are."""
    for name, child in module.named_children():
        full = f"{path}.{name}" if path else name
        if not worthy(child):
            continue
        if has_forward(child):
            yield full
        else:
            yield from parts(child, full)


def _to_open(
    model: nn.Module, units: list[str], stages: int, weigh: Weigh, whole: Collection[str]
) -> str | None:
    """The unit to take apart next, if any."""
    modules = {path: model.get_submodule(path) for path in units}
    weights = {path: weigh(module) for path, module in modules.items()}
    # What would be in every second place of a chain is in the way at half a stage.
    stage = sum(weights.values()) / stages

    def is_wanted(path: str) -> bool:
        few, weight = len(units) < stages, weights[path]
        heavy = weight > _TOO_HEAVY * stage or (weight > stage / 2 and _is_chained(model, path))
        return (few or heavy) and path not in whole and any(parts(modules[path], path))

    return max(filter(is_wanted, units), key=weights.__getitem__, default=None)


_TOO_HEAVY = 1.5
"""A part that is this many times as heavy as a stage is taken apart, whatever it is."""


def _is_chained(model: nn.Module, path: str) -> bool:
    """Tell if a part is a chain or holds one worth taking apart, and is not itself a member of a list."""
    module = model.get_submodule(path)
    if is_sequential(module):
        return True
    if isinstance(model.get_submodule(path.rpartition(".")[0]), nn.Sequential | nn.ModuleList):
        return False
    return any(_is_chain(inner, count_parameters(module)) for inner in module.modules())


def _is_chain(module: nn.Module, whole: int) -> bool:
    """Tell if a module is a list whose members have children, or that is most of a whole of this size."""
    if not isinstance(module, nn.Sequential | nn.ModuleList):
        return False
    members = [child for child in module.children() if count_parameters(child) > 0]
    if len(members) < 2:
        return False
    made_of_parts = all(next(member.children(), None) is not None for member in members)
    return made_of_parts or (len(members) > 3 and 2 * count_parameters(module) > whole)


# ---- stages by path


def units_at_points(model: nn.Module, points: Sequence[str]) -> list[str]:
    """The largest units between which a model can be cut before the modules at some paths."""
    check_paths(model, points)
    units = list(parts(model, "")) if not is_sequential(model) else find_units(model, 1)
    for point in points:
        units = _opened(model, units, point)
    return once(model, units)


def at_points(model: nn.Module, points: Sequence[str], units: Sequence[str]) -> list[list[str]]:
    """The units of each stage, given the modules to cut before.

    Args:
        model: the whole model.
        points: the paths before which to cut.
        units: the units, in the order of their calls.
    """
    starts = [0, *sorted(_first_at(model, units, point) for point in points)]
    if any(a >= b for a, b in pairwise([*starts, len(units)])):
        raise PartitionError(
            f"cuts before {', '.join(points)} leave a stage without modules; the model's order is "
            f"{', '.join(units)}"
        )
    return [list(units[a:b]) for a, b in pairwise([*starts, len(units)])]


def _opened(model: nn.Module, units: list[str], point: str) -> list[str]:
    """The units, with the one that contains a point taken apart."""
    while (outer := next((u for u in units if point.startswith(f"{u}.")), None)) is not None:
        place = units.index(outer)
        inner = list(parts(model.get_submodule(outer), outer))
        if not inner:
            return units
        units = [*units[:place], *inner, *units[place + 1 :]]
    return units


def _first_at(model: nn.Module, units: Sequence[str], point: str) -> int:
    """The index of the first unit at or after a path."""
    paths = [path for path, _ in model.named_modules() if path]
    if point not in paths:
        raise PartitionError(f"{point} is another name of a module that comes earlier; use that")
    inside = [i for i, unit in enumerate(units) if unit == point or unit.startswith(f"{point}.")]
    if inside:
        return inside[0]
    rest = set(paths[paths.index(point) :])
    return next((i for i, unit in enumerate(units) if unit in rest), len(units))


def in_lists(model: nn.Module, stages: Sequence[Sequence[str]]) -> list[list[str]]:
    """The units of each stage, given the modules of each."""
    check_lists(model, stages)
    _check_complete(model, stages)
    return [[unit for path in paths for unit in _units_at(model, path)] for paths in stages]


def _check_complete(model: nn.Module, placed: Sequence[Sequence[str]]) -> None:
    """Check that no module of the stages contains another, and that none is missing."""
    paths = [path for of in placed for path in of]
    nested = [p for p in paths if any(p.startswith(f"{other}.") for other in paths)]
    if nested:
        raise PartitionError(
            "stages= names these modules and also a module that contains "
            f"them: {', '.join(dict.fromkeys(nested))}"
        )
    missing = list(_uncovered(model, paths))
    if missing:
        shown = ", ".join(missing[:5]) + (" and more" if len(missing) > 5 else "")
        raise PartitionError(f"in no stage: {shown}; name them, or the modules that hold them")


def _uncovered(model: nn.Module, paths: Sequence[str]) -> list[str]:
    """The largest modules with parameters that no path covers."""
    covered = {id(m) for path in paths for m in model.get_submodule(path).modules()}
    missing: list[str] = []

    def look(module: nn.Module, at: str) -> None:
        for name, child in module.named_children():
            path = f"{at}{name}"
            # Of a list or dict of parameters, each is where it is used, like those that no module holds.
            is_table = not has_forward(child) and next(child.children(), None) is None
            if id(child) in covered or is_table or not worthy(child):
                continue
            if any(other.startswith(f"{path}.") for other in paths):
                look(child, f"{path}.")
            else:
                missing.append(path)

    look(model, "")
    return missing


def _units_at(model: nn.Module, path: str) -> list[str]:
    module = model.get_submodule(path)
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict) and not has_forward(module)
    return list(parts(module, path)) if is_list else [path]


def loose_parameters(model: nn.Module, units: Iterable[str]) -> dict[str, list[str]]:
    """The parameters that no unit holds, by every name, each with the units near it.

    Those are the units in the innermost module around the parameter that holds any.
    """
    inside = {id(p) for path in units for p in model.get_submodule(path).parameters()}
    wanted = list(units)
    around: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in inside:
            continue
        path = name
        near: list[str] = []
        while path and not near:
            path = path.rpartition(".")[0]
            near = [unit for unit in wanted if unit.startswith(f"{path}." if path else "")]
        around[name] = near
    return around
