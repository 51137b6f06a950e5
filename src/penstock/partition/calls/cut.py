"""Cut a model at calls of its modules."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from penstock.errors import PartitionError
from penstock.partition.balance import choose_cuts, use_up_to
from penstock.partition.base import Partition
from penstock.partition.calls.cutting import Cutting, analysed
from penstock.partition.calls.outline import Outline
from penstock.partition.calls.routing import Homes, first_uses
from penstock.partition.calls.stage import CallStage
from penstock.partition.calls.tape import Tape, paths_of
from penstock.partition.calls.units import find_units, parts, walk, worthy
from penstock.partition.costs import weigh_units
from penstock.partition.shared import find_shared
from penstock.schedule import Placement
from penstock.values import ValueSpec, flatten

Example = tuple[Sequence[Any], Mapping[str, Any]]


def cut_calls(
    model: nn.Module,
    stages: int | Sequence[str] | Sequence[Sequence[str]],
    *,
    example: Example | None = None,
    balance: str | Sequence[float] | None = None,
    placement: Placement | None = None,
) -> Partition:
    """Cut a model into stages that each run the author's own forward, and of its modules their own.

    Args:
        model: any module.
        stages: how many; or the paths before which to cut; or for each stage the paths of its modules.
        example: arguments for the model, as ``(args, kwargs)``. With them the order in which modules are
            called is seen instead of read from the model's source.
        balance: what makes stages equal where only their number is given: ``"parameters"``; ``"flops"``,
            ``"memory"`` or ``"time"``, which run the example; or a weight for each unit in that order.
        placement: which rank holds which stage; ranks are made equal, not stages.

    Raises:
        PartitionError: an unknown path, more stages than there are modules to place, a module in no stage
            or in two.
    """
    if isinstance(stages, int):
        placed = _by_count(model, stages, example, balance, placement)
    elif all(isinstance(path, str) for path in stages):
        placed = _by_points(model, [str(path) for path in stages])
    else:
        placed = [list(paths) for paths in stages]
        _check_lists(model, placed)
        placed = [[unit for path in paths for unit in _units_at(model, path)] for paths in placed]
    return _assembled(model, placed, example)


def _assembled(
    model: nn.Module, placed: Sequence[Sequence[str]], example: Example | None
) -> Partition:
    homes: dict[str, tuple[int, ...]] = {}
    for stage, paths in enumerate(placed):
        for path in paths:
            homes[path] = (*homes.get(path, ()), stage)
    units = list(homes)
    homes |= _homes_of_loose(model, homes, len(placed), example)
    call = None if example is None else (tuple(example[0]), dict(example[1]))
    cutting = Cutting(model, homes, units, len(placed), example=call)
    modules = tuple(CallStage(cutting, stage, homes) for stage in range(len(placed)))
    return Partition(modules, shared=find_shared(model, modules), describe=cutting.describe)


# ---- by count


def units_in_order(model: nn.Module, stages: int, example: Example | None) -> list[str]:
    """The units of a model for so many stages, in the order of their calls as far as that is known."""
    units = find_units(model, stages)
    return _in_order(model, units, _calls(model, units, example))


def cut_points(
    model: nn.Module, stages: int | Sequence[str] | Sequence[Sequence[str]]
) -> list[str]:
    """The first module of each stage but the first, by path."""
    if isinstance(stages, int):
        return [paths[0] for paths in _by_count(model, stages)[1:]]
    if all(isinstance(path, str) for path in stages):
        return [str(path) for path in stages]
    return [paths[0] for paths in stages[1:]]


def _by_count(
    model: nn.Module,
    stages: int,
    example: Example | None = None,
    balance: Any = None,
    placement: Placement | None = None,
) -> list[list[str]]:
    units = find_units(model, stages)
    calls = _calls(model, units, example)
    units = _in_order(model, units, calls)
    if 1 <= stages <= len(units):
        placed = _balanced(model, units, stages, balance, example, placement)
        if len(set(calls)) == len(calls) or _holds(model, placed, example):
            return placed
    # What is called again and again may be in several stages: its calls are placed.
    turns = [path for path in units if path not in calls] + calls
    if not 1 <= stages <= len(turns):
        raise PartitionError(
            f"a {type(model).__name__} has {len(units)} modules that can be placed, too few for {stages} "
            f"stages; {use_up_to(len(units))}" + ("" if calls else _CALLED_AGAIN)
        )
    return _balanced(model, turns, stages, balance, example, placement)


_CALLED_AGAIN = (
    ". If the model calls some of them again and again, give example=(args, kwargs), with which a number of "
    "stages cuts between the calls"
)


def _balanced(
    model: nn.Module,
    units: Sequence[str],
    stages: int,
    balance: Any,
    example: Example | None,
    placement: Placement | None,
) -> list[list[str]]:
    weights = weigh_units(
        model, units, balance, example, lambda: _assembled(model, [[u] for u in units], example)
    )
    if balance in (None, "parameters"):
        # A module weighs once, however often it is called.
        calls = Counter(units)
        weights = [weight / calls[unit] for weight, unit in zip(weights, units, strict=True)]
    starts = choose_cuts(weights, stages, placement)
    return [list(units[a:b]) for a, b in pairwise([*starts, len(units)])]


def _holds(model: nn.Module, placed: Sequence[Sequence[str]], example: Example | None) -> bool:
    """Whether no value of the example would have to go to an earlier stage."""
    try:
        describe = _assembled(model, placed, example).describe
        assert describe is not None
        describe(ValueSpec.of(_known(model, example)), True)
    except PartitionError:
        return False
    return True


def _known(model: nn.Module, example: Example | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments to try a model with; models of transformers offer some."""
    args, kwargs = example or ((), getattr(model, "dummy_inputs", {}))
    return tuple(args), dict(kwargs)


def _calls(model: nn.Module, units: list[str], example: Example | None) -> list[str]:
    """The calls of the units in order, as far as a call of the model is known."""
    try:
        tape = _tape(model, units, example)
    except Exception:
        if example is not None:
            raise
        return []
    return [event.what for event in tape.events if event.is_call] if tape else []


def _tape(model: nn.Module, units: list[str], example: Example | None) -> Tape | None:
    """What happens between the units in a call that is known."""
    call = _known(model, example)
    if not any(call):
        return None
    tensors, _ = flatten(call)
    outline = Outline(model, units)
    return analysed(outline, units, ValueSpec.of(call), training=True, example=tensors)


def _in_order(model: nn.Module, units: list[str], calls: list[str]) -> list[str]:
    """The units in the order of their first calls, where calls are known; else as the source has it."""
    first = {path: index for index, path in reversed(list(enumerate(calls)))}
    names = paths_of(model, units)
    places: dict[str, int] = {}
    latest = -1
    for path in units:
        # What is not called in this call comes after what comes before it in the source.
        latest = places[path] = first.get(names[model.get_submodule(path)], latest)
    return sorted(units, key=lambda path: places[path])


# ---- by path


def _by_points(model: nn.Module, points: Sequence[str]) -> list[list[str]]:
    _check_known(model, points)
    units = list(parts(model, ""))
    for point in points:
        units = _opened(model, units, point)
    starts = [0, *(_first_at(model, units, point) for point in points)]
    if any(a >= b for a, b in pairwise([*starts, len(units)])):
        raise PartitionError(
            f"cuts before {', '.join(points)} leave a stage without modules; the model's order is "
            f"{', '.join(units)}"
        )
    return [units[a:b] for a, b in pairwise([*starts, len(units)])]


def _opened(model: nn.Module, units: list[str], point: str) -> list[str]:
    """The units, with the one that a point lies in taken apart."""
    while (outer := next((u for u in units if point.startswith(f"{u}.")), None)) is not None:
        place = units.index(outer)
        found = list(parts(model.get_submodule(outer), outer))
        if not found:
            return units
        units = [*units[:place], *found, *units[place + 1 :]]
    return units


def _first_at(model: nn.Module, units: list[str], point: str) -> int:
    """The first unit that comes at a path or after it."""
    order = list(walk(model))
    if point not in order:
        raise PartitionError(f"{point} is another name of a module that comes earlier; use that")
    rest = set(order[order.index(point) :])
    return next((i for i, unit in enumerate(units) if unit in rest), len(units))


def _check_lists(model: nn.Module, placed: Sequence[Sequence[str]]) -> None:
    paths = [path for of in placed for path in of]
    _check_known(model, paths)
    empty = [index for index, of in enumerate(placed) if not of]
    if empty:
        raise PartitionError(f"stages {empty} have no modules; name at least one for each stage")
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
            if id(child) in covered or not worthy(child):
                continue
            if any(other.startswith(f"{path}.") for other in paths):
                look(child, f"{path}.")
            else:
                missing.append(path)

    look(model, "")
    return missing


def _units_at(model: nn.Module, path: str) -> list[str]:
    module = model.get_submodule(path)
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return list(parts(module, path))
    return [path]


def _check_known(model: nn.Module, paths: Sequence[str]) -> None:
    known = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    for path in paths:
        if path not in known:
            near = difflib.get_close_matches(path, known, 3, 0.4) or known[:3]
            raise PartitionError(
                f"no module {path!r} in the model; did you mean {' or '.join(near)}?"
            )


# ---- what is in no unit


def _homes_of_loose(
    model: nn.Module, homes: Homes, stages: int, example: Example | None
) -> dict[str, tuple[int, ...]]:
    """The stage of each parameter that no unit holds: where its module has come to by its first use."""
    found: dict[str, int] = {}
    stage = 0
    for path in walk(model, parameters=True):
        if path in homes:
            stage = homes[path][0]
        elif not any(path.startswith(f"{unit}.") for unit in homes):
            found[path] = stage
    names = dict(model.named_parameters(remove_duplicate=False))
    found = {name: stage for name, stage in found.items() if name in names}
    if found and example is not None and (tape := _tape(model, list(homes), example)):
        found |= {n: s for n, s in first_uses(tape, homes, stages).items() if n in found}
    return {name: (stage,) for name, stage in found.items()}
