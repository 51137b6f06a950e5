"""Cut a model by the calls of its modules: every stage runs the author's own forward.

A *unit* is a module that is placed as a whole. A stage runs its own units only: what the units of other
stages would have returned is known from an analysis of the call without data (``recorder``), which also
finds the tensors that each stage needs from earlier ones (``routing``). What the author's code does between
the units is done by the stage that can do it first. The model is changed only while a stage runs.

This file decides which modules are units, in which order they are called, and which stage gets which.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from penstock.errors import PartitionError
from penstock.partition.balance import choose_cuts, use_up_to
from penstock.partition.base import (
    Example,
    Partition,
    check_lists,
    check_paths,
    count_parameters,
    find_shared,
)
from penstock.partition.calls.cutting import Cutting, Outline, analysed
from penstock.partition.calls.routing import Homes, first_uses
from penstock.partition.calls.stage import CallStage
from penstock.partition.calls.tape import Tape, paths_of
from penstock.partition.costs import weigh_units
from penstock.schedule import Placement
from penstock.values import ValueSpec, flatten


def cut_calls(
    model: nn.Module,
    stages: int | Sequence[str] | Sequence[Sequence[str]],
    *,
    example: Example | None = None,
    balance: str | Sequence[float] | None = None,
    placement: Placement | None = None,
) -> Partition:
    """Cut a model into stages that each run the author's forward, but only their own modules.

    Arguments and errors are those of :func:`penstock.partition.partition`.
    """
    if isinstance(stages, int):
        placed = _by_count(model, stages, example, balance, placement)
    elif all(isinstance(path, str) for path in stages):
        placed = _by_points(model, [str(path) for path in stages])
    else:
        placed = [list(paths) for paths in stages]
        check_lists(model, placed)
        _check_complete(model, placed)
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
    # A module that is called again and again may be in several stages: then its calls are placed.
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
    weights = weigh_units(model, units, balance, example)
    if balance in (None, "parameters"):
        # A module weighs once, however often it is called.
        calls = Counter(units)
        weights = [weight / calls[unit] for weight, unit in zip(weights, units, strict=True)]
    starts = choose_cuts(weights, stages, placement)
    return [list(units[a:b]) for a, b in pairwise([*starts, len(units)])]


def _holds(model: nn.Module, placed: Sequence[Sequence[str]], example: Example | None) -> bool:
    """Whether a call with the example needs no value to go back to an earlier stage."""
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
    """The calls of the units in order; none where there is no call of the model to try."""
    try:
        tape = _tape(model, units, example)
    except Exception:
        if example is not None:
            raise
        return []
    return [event.what for event in tape.events if event.is_call] if tape else []


def _tape(model: nn.Module, units: list[str], example: Example | None) -> Tape | None:
    """What happens in a call with the example, or with arguments that the model itself offers."""
    call = _known(model, example)
    if not any(call):
        return None
    tensors, _ = flatten(call)
    outline = Outline(model, units)
    return analysed(outline, units, ValueSpec.of(call), training=True, example=tensors)


def _in_order(model: nn.Module, units: list[str], calls: list[str]) -> list[str]:
    """The units in the order of their first calls; where calls are not known, in that of the source."""
    names = paths_of(model, units)
    return _sorted_by(calls, units, lambda path: names[model.get_submodule(path)])


# ---- by path


def _by_points(model: nn.Module, points: Sequence[str]) -> list[list[str]]:
    check_paths(model, points)
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
    """The units, where the one that a point lies inside of is taken apart."""
    while (outer := next((u for u in units if point.startswith(f"{u}.")), None)) is not None:
        place = units.index(outer)
        found = list(parts(model.get_submodule(outer), outer))
        if not found:
            return units
        units = [*units[:place], *found, *units[place + 1 :]]
    return units


def _first_at(model: nn.Module, units: list[str], point: str) -> int:
    """The index of the first unit that stands at a path or after it."""
    order = list(walk(model))
    if point not in order:
        raise PartitionError(f"{point} is another name of a module that comes earlier; use that")
    rest = set(order[order.index(point) :])
    return next((i for i, unit in enumerate(units) if unit in rest), len(units))


def _check_complete(model: nn.Module, placed: Sequence[Sequence[str]]) -> None:
    """Check that the modules of the stages are apart from each other, and are all there are."""
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
    if isinstance(module, LISTS):
        return list(parts(module, path))
    return [path]


# ---- what is in no unit


def _homes_of_loose(
    model: nn.Module, homes: Homes, stages: int, example: Example | None
) -> dict[str, tuple[int, ...]]:
    """The stage of each parameter that no unit holds: the one that calls have reached at its first use."""
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


# ---- which modules of a model are placed as a whole, in the order in which its forward calls them
# The model's source tells that order: where ``forward`` and the methods that it calls first use each child.
# The model need not run for that, and no model is known by name.


LISTS = nn.ModuleList | nn.ModuleDict


def children(module: nn.Module, also: Iterable[str] = ()) -> dict[str, Any]:
    """A module's children by name, in the order of their first use.

    Args:
        module: the module whose children they are.
        also: other attributes to place among them.
    """
    found: dict[str, Any] = {name: getattr(module, name) for name in also}
    found |= dict(module.named_children())
    if isinstance(module, nn.Sequential | LISTS):
        return found
    return {name: found[name] for name in _sorted_by(_order(module, found), list(found))}


def _sorted_by(
    order: Sequence[str], items: Sequence[str], key: Callable[[str], str] = str
) -> list[str]:
    """Items by their first place in an order; one that is not in it stays behind the item before it."""
    first = {name: index for index, name in reversed(list(enumerate(order)))}
    places: dict[str, int] = {}
    latest = -1
    for item in items:
        latest = places[item] = first.get(key(item), latest)
    return sorted(items, key=places.__getitem__)


def _order(module: nn.Module, names: Iterable[str]) -> Sequence[str]:
    """Attributes in the order of their use; models of transformers may have a plan that tells it."""
    plan = getattr(getattr(module, "config", None), "base_model_pp_plan", None) or {}
    first = list(plan) if set(plan) <= set(names) else []
    return [*first, *uses_in_forward(type(module))]


_USES: WeakKeyDictionary[type[nn.Module], tuple[str, ...]] = WeakKeyDictionary()


def uses_in_forward(kind: type[nn.Module]) -> tuple[str, ...]:
    """The attributes that a class's forward uses, in the order of the text."""
    if kind not in _USES:
        _USES[kind] = tuple(dict.fromkeys(_uses(kind, "forward", set())))
    return _USES[kind]


def _uses(kind: type[Any], method: str, been: set[str]) -> Iterator[str]:
    if method in been:
        return
    been.add(method)
    tree = _source(kind, method)
    for node in _evaluation(tree) if tree is not None else ():
        if isinstance(node, ast.Attribute) and _is_self(node.value):
            yield node.attr
            if inspect.isfunction(getattr(kind, node.attr, None)):
                yield from _uses(kind, node.attr, been)
        elif isinstance(node, ast.Call) and _is_getattr(node):
            yield from (str(a.value) for a in node.args[1:2] if isinstance(a, ast.Constant))


def _source(kind: type[Any], method: str) -> ast.AST | None:
    try:
        function = inspect.unwrap(getattr(kind, method))
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, AttributeError, ValueError):
        return None


def _evaluation(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes in the order of evaluation: a call comes after its arguments."""
    for node in _evaluated(tree):
        yield from _evaluation(node)
    yield tree


def _evaluated(tree: ast.AST) -> Iterator[ast.AST]:
    if isinstance(tree, ast.Assign | ast.AnnAssign | ast.AugAssign):
        if tree.value is not None:
            yield tree.value
        yield from (node for node in ast.iter_child_nodes(tree) if node is not tree.value)
    elif isinstance(tree, ast.Call):
        yield from tree.args
        yield from (keyword.value for keyword in tree.keywords)
        yield tree.func
    elif isinstance(tree, ast.For):
        # In its first turn a loop uses what the body names, before most of the modules that it loops over.
        yield from (*tree.body, tree.iter, *tree.orelse)
    else:
        yield from ast.iter_child_nodes(tree)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_getattr(node: ast.Call) -> bool:
    called = isinstance(node.func, ast.Name) and node.func.id == "getattr"
    return called and len(node.args) > 1 and _is_self(node.args[0])


# ---- units


def worthy(module: nn.Module) -> bool:
    """Whether a module holds something that must be in one stage: parameters, or buffers that are saved."""
    return count_parameters(module) > 0 or bool(module.state_dict(keep_vars=True))


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called at all."""
    return not isinstance(module, LISTS) and type(module).forward is not nn.Module.forward


def walk(model: nn.Module, path: str = "", *, parameters: bool = False) -> Iterator[str]:
    """Every path in the order of the calls, with the names of parameters among them on request."""
    # A list, not a set: every process must find the same order.
    own = [name for name, p in model._parameters.items() if p is not None]
    names = list(children(model, also=own if parameters else ()))
    for name in names:
        full = f"{path}.{name}" if path else name
        yield full
        if name not in own:
            yield from walk(model.get_submodule(name), full, parameters=parameters)


def find_units(model: nn.Module, stages: int) -> list[str]:
    """The units of a model for so many stages, by path, in the order of the calls.

    The model's parts are taken apart, the heaviest first, until there are enough of them, and none that
    holds a chain is too heavy for a stage. The members of a chain stay whole while there are enough parts.
    """
    units = list(parts(model, ""))
    while (heaviest := _to_open(model, units, stages)) is not None:
        place = units.index(heaviest)
        units[place : place + 1] = parts(model.get_submodule(heaviest), heaviest)
    # A module that has several paths is placed under the first.
    return list({id(model.get_submodule(path)): path for path in reversed(units)}.values())[::-1]


def parts(module: nn.Module, path: str) -> Iterator[str]:
    """The units directly inside a module; a list is not a unit itself, but its members are."""
    for name, child in children(module).items():
        full = f"{path}.{name}" if path else name
        if not worthy(child):
            continue
        if has_forward(child):
            yield full
        else:
            yield from parts(child, full)


def _to_open(model: nn.Module, units: list[str], stages: int) -> str | None:
    """The unit that is to be taken apart next, if any is."""
    weights = {path: count_parameters(model.get_submodule(path)) for path in units}
    total = sum(weights.values())
    inner = {path: list(parts(model.get_submodule(path), path)) for path in units}
    wanted = [
        path
        for path in units
        if inner[path]
        and (
            len(units) < stages
            or (weights[path] * 2 * stages > total and _holds_chain(model, path))
        )
    ]
    return max(wanted, key=lambda path: weights[path], default=None)


def _holds_chain(model: nn.Module, path: str) -> bool:
    """Whether a part, itself not a member of a chain, holds one that is worth taking apart."""
    if isinstance(model.get_submodule(path.rpartition(".")[0]), nn.Sequential | nn.ModuleList):
        return False
    module = model.get_submodule(path)
    return any(_is_chain(inner, count_parameters(module)) for inner in module.modules())


def _is_chain(module: nn.Module, whole: int) -> bool:
    """Whether a module is a list of parts that are modules themselves, or most of a whole of this size."""
    if not isinstance(module, nn.Sequential | nn.ModuleList):
        return False
    members = [child for child in module.children() if count_parameters(child) > 0]
    if len(members) < 2:
        return False
    made_of_parts = all(next(member.children(), None) is not None for member in members)
    return made_of_parts or (len(members) > 3 and 2 * count_parameters(module) > whole)
