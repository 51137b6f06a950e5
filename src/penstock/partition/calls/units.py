"""The units of a model whose calls are cut, and which stage has which."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from penstock.partition.calls.tape import Event, Tape

# ---- which modules of a model are placed as a whole, in the order in which its forward calls them
# The model's source tells that order: where each child is used first in ``forward`` and in the methods that
# it calls. No model has to run for it, and no model is known by name.


LISTS = nn.ModuleList | nn.ModuleDict


def children(module: nn.Module, also: Iterable[str] = ()) -> dict[str, Any]:
    """A module's children by name, in the order of their first use.

    Args:
        module: whose.
        also: attributes to place among them.
    """
    found: dict[str, Any] = {name: getattr(module, name) for name in also}
    found |= dict(module.named_children())
    if isinstance(module, nn.Sequential | LISTS):
        return found
    place = {name: index for index, name in reversed(list(enumerate(_order(module, found))))}
    places: dict[str, int] = {}
    latest = -1
    for name in found:
        # What the text does not name comes after what it was registered after.
        latest = places[name] = place.get(name, latest)
    return dict(sorted(found.items(), key=lambda item: places[item[0]]))


def _order(module: nn.Module, names: Iterable[str]) -> Sequence[str]:
    """Attributes in the order of their use; transformers tells it in a plan where it has one."""
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
    for node in _in_order(tree) if tree is not None else ():
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


def _in_order(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes as they are evaluated: what is called comes after its arguments."""
    for node in _evaluated(tree):
        yield from _in_order(node)
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
        # The first turn uses what the body names, before most of what it loops over.
        yield from (*tree.body, tree.iter, *tree.orelse)
    else:
        yield from ast.iter_child_nodes(tree)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_getattr(node: ast.Call) -> bool:
    called = isinstance(node.func, ast.Name) and node.func.id == "getattr"
    return called and len(node.args) > 1 and _is_self(node.args[0])


# ---- units


def count_parameters(module: nn.Module) -> int:
    """How many numbers a module's parameters hold."""
    return sum(parameter.numel() for parameter in module.parameters())


def worthy(module: nn.Module) -> bool:
    """Whether a module holds something that must be in one stage: parameters, or buffers that are saved."""
    return count_parameters(module) > 0 or bool(module.state_dict(keep_vars=True))


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called at all."""
    return not isinstance(module, LISTS) and type(module).forward is not nn.Module.forward


def walk(model: nn.Module, path: str = "", *, parameters: bool = False) -> Iterator[str]:
    """Every path in the order of the calls, and on request the names of parameters where they are used."""
    # In their order: every process must find the same one.
    own = [name for name, p in model._parameters.items() if p is not None]
    names = list(children(model, also=own if parameters else ()))
    for name in names:
        full = f"{path}.{name}" if path else name
        yield full
        if name not in own:
            yield from walk(model.get_submodule(name), full, parameters=parameters)


def find_units(model: nn.Module, stages: int) -> list[str]:
    """The units of a model for so many stages, by path, in the order of the calls.

    The model's parts are taken apart, the heaviest first, until there are enough of them and none that
    holds a chain is too heavy for a stage. The members of a chain stay whole as long as there are enough.
    """
    units = list(parts(model, ""))
    while (heaviest := _to_open(model, units, stages)) is not None:
        place = units.index(heaviest)
        units[place : place + 1] = parts(model.get_submodule(heaviest), heaviest)
    # A module that has several paths is placed under the first.
    return list({id(model.get_submodule(path)): path for path in reversed(units)}.values())[::-1]


def parts(module: nn.Module, path: str) -> Iterator[str]:
    """The units right below a module; lists are no units but their members are."""
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
    """Whether a part that is no member of a chain has one inside that is worth taking apart."""
    if isinstance(model.get_submodule(path.rpartition(".")[0]), nn.Sequential | nn.ModuleList):
        return False
    module = model.get_submodule(path)
    return any(_is_chain(inner, count_parameters(module)) for inner in module.modules())


def _is_chain(module: nn.Module, whole: int) -> bool:
    if not isinstance(module, nn.Sequential | nn.ModuleList):
        return False
    members = [child for child in module.children() if count_parameters(child) > 0]
    if len(members) < 2:
        return False
    made_of_parts = all(next(member.children(), None) is not None for member in members)
    return made_of_parts or (len(members) > 3 and 2 * count_parameters(module) > whole)


# ---- which stage runs what happens between the units: where the fewest bytes travel for it
# At first it is the earliest stage that can know all it uses: of a residual sum the sum travels and not its
# summands. What makes more of less, such as an upsampling, a concatenation or a cast, moves on to the stage
# that uses it, if then fewer bytes travel.


class Placing:
    """The stage of each event, to be improved.

    Args:
        tape: the events.
        owners: the earliest stage of each.
        makers: the stage of each parameter among the values, by number.
        stages: how many there are.
    """

    def __init__(
        self, tape: Tape, owners: Sequence[int], makers: Mapping[int, int], stages: int
    ) -> None:
        self._tape = tape
        self._parameters = makers
        self.owners = list(owners)
        self._users: dict[int, list[int]] = {}
        for index, event in enumerate(tape.events):
            for number in event.inputs:
                self._users.setdefault(number, []).append(index)
        self.stages = stages
        changed = {tape.values[c.new].memory for event in tape.events for c in event.changes}
        self._fixed = {n for n, value in enumerate(tape.values) if value.memory in changed}

    def improve(self) -> list[int]:
        """Move events to later stages, from the last event to the first."""
        for index in reversed(range(len(self.owners))):
            target = self._target(index)
            if target is not None and self._gain(index, target) > 0:
                self.owners[index] = target
        for index, event in enumerate(self._tape.events):
            if event.on is not None:
                self.owners[index] = self.stage_of(event.on)
        return self.owners

    def stage_of(self, number: int) -> int:
        """The stage that makes a value."""
        maker = self._tape.values[number].maker
        return self._parameters[number] if maker is None else self.owners[maker]

    def _target(self, index: int) -> int | None:
        """The first stage that uses what an event makes, if it is a later one and the event may move."""
        event = self._tape.events[index]
        if not self._may_move(event):
            return None
        stages = [s for n in self._made(index) for s in self._used_in(n)]
        first = min(stages, default=self.owners[index])
        return first if first > self.owners[index] else None

    def _may_move(self, event: Event) -> bool:
        if event.is_call or event.changes or event.random or event.answers or event.effect:
            return False
        if event.generators:
            return False
        return self._fixed.isdisjoint(event.inputs) and all(
            slot.same_as is None and slot.value not in self._fixed for slot in event.slots
        )

    def _made(self, index: int) -> list[int]:
        return [slot.value for slot in self._tape.events[index].slots]

    def _used_in(self, number: int, but: int | None = None) -> set[int]:
        """The stages that use a value, apart from event ``but``."""
        found = {self.owners[i] for i in self._users.get(number, ()) if i != but}
        return found | ({self.stages - 1} if number in self._tape.outputs else set())

    def _gain(self, index: int, target: int) -> int:
        """How many bytes fewer travel if an event moves."""
        owner = self.owners[index]
        gain = sum(self._bytes(n) for n in self._made(index) if target in self._used_in(n))
        for number in self._tape.events[index].inputs:
            home, others = self.stage_of(number), self._used_in(number, but=index)
            gain += self._bytes(number) * (home != owner and owner not in others)
            gain -= self._bytes(number) * (home != target and target not in others)
        return gain

    def _bytes(self, number: int) -> int:
        form = self._tape.values[number].form
        return math.prod(form.shape) * form.dtype.itemsize
