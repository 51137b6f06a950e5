"""What a plan depends on, of a model's modules: modes, hooks, which weights learn, and plain attributes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor, nn

REGISTRIES = frozenset(vars(nn.Module())) - {"training"}
"""The attributes in which a module keeps its parts and hooks, and not the author's values."""
_NO_SETTINGS = REGISTRIES | {"training"}
"""The mode has a place of its own in a row."""
_ATOMS = frozenset({bool, int, float, str, type(None)})
_MANY = 3
"""An attribute that has had more values than these is a counter."""
_LONG = 64
"""The longest container of plain values that counts."""

Row = tuple[Any, ...]
"""A module's mode, number of hooks, flags of parameters, and attributes by name."""


class Settings:
    """The settings of some modules.

    An attribute that changes again and again, such as a count of steps, would ask for a new plan at every
    step. It counts with the value that it had when it was found out, until it has doubled or halved, or
    until ``refresh``. Where it changes what a module gives before that, the check of what the module gave
    finds out.

    Args:
        modules: the modules, whose order is the same in all processes.
        parameters: other parameters that count, besides those of the modules.
    """

    def __init__(
        self, modules: Iterable[nn.Module], parameters: Sequence[nn.Parameter] = ()
    ) -> None:
        self._modules = list({id(module): module for module in modules}.values())
        self._written = [_is_written(module) for module in self._modules]
        self._parameters = parameters
        self._values: defaultdict[tuple[int, str], set[Any]] = defaultdict(set)
        self._counters: dict[tuple[int, str], Any] = {}
        self._rows: tuple[Row, ...] = ()

    def look(self) -> tuple[Row, ...]:
        """The settings now, as JSON data that can be hashed."""
        # In loops: this runs at every step, and a comprehension is a call.
        seen: dict[int, None] = {}
        rows: list[Row] = []
        for number, module in enumerate(self._modules):
            learns: Row = ()
            for parameter in module._parameters.values():
                if parameter is not None:
                    learns = (*learns, parameter.requires_grad)
            hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
            back = len(module._backward_hooks) + len(module._backward_pre_hooks)
            written = self._written[number]
            attributes = self._attributes(number, vars(module), seen) if written else ()
            rows.append((module.training, hooks, back, learns, attributes))
        learns = ()
        for parameter in self._parameters:
            learns = (*learns, parameter.requires_grad)
        rows.append((learns,))
        now = tuple(rows)
        if now != self._rows:
            self._count_values(now)
            self._rows = now
        return now

    def _attributes(self, number: int, state: Mapping[str, Any], seen: dict[int, None]) -> Row:
        row: list[Any] = []
        for name, value in state.items():
            kind = type(value)
            if name in _NO_SETTINGS:
                continue
            if (number, name) in self._counters:
                row.append((name, *self._counted((number, name), value)))
            elif kind in _ATOMS:
                row.append((name, value))
            elif id(value) not in seen:
                seen[id(value)] = None
                row.append((name, kind.__name__, _inside(value, kind)))
        return tuple(row)

    def _counted(self, key: tuple[int, str], value: Any) -> Any:
        """The value that a counter has for plans."""
        old = self._counters[key]
        numbers = type(value) in (int, float) and len(old) == 1 and type(old[0]) in (int, float)
        if numbers and not 0.5 <= (value / old[0] if old[0] else value == 0) <= 2:
            self._counters[key] = (value,)
        return self._counters[key]

    def refresh(self) -> None:
        """Let counters count with the values that they have now."""
        self._counters.clear()
        self._values.clear()

    def _count_values(self, now: tuple[Row, ...]) -> None:
        attributes = [
            (n, name, value) for n, row in enumerate(now[:-1]) for name, *value in row[-1]
        ]
        for number, name, value in attributes:
            values = self._values[number, name]
            values.add(tuple(value))
            if len(values) > _MANY:
                self._counters[number, name] = tuple(value)

    @contextmanager
    def taken_over(self, rows: Sequence[Any]) -> Iterator[None]:
        """Give the modules the modes, flags and plain attributes of another process, for a while."""
        before: list[tuple[Any, str, Any]] = []

        def put(thing: Any, name: str, value: Any) -> None:
            missing = name not in vars(thing) and not isinstance(thing, nn.Parameter)
            old = _MISSING if missing else getattr(thing, name)
            if old is _MISSING or type(old) is not type(value) or old != value:
                before.append((thing, name, old))
                setattr(thing, name, value)

        def put_all(module: nn.Module, row: Sequence[Any]) -> None:
            put(module, "training", row[0])
            weights = [p for p in module._parameters.values() if p is not None]
            for weight, learns in zip(weights, row[3], strict=False):
                put(weight, "requires_grad", learns)
            for name, value in (attribute for attribute in row[4] if len(attribute) == 2):
                put(module, name, value)

        try:
            for module, row in zip(self._modules, rows, strict=False):
                put_all(module, row)
            for weight, learns in zip(self._parameters, rows[-1][0], strict=False):
                put(weight, "requires_grad", learns)
            yield
        finally:
            for thing, name, old in reversed(before):
                delattr(thing, name) if old is _MISSING else setattr(thing, name, old)


_MISSING: Any = object()


def _is_written(module: nn.Module) -> bool:
    """Whether somebody else than PyTorch wrote the module's class."""
    return not type(module).__module__.startswith("torch.nn.")


def _inside(value: Any, kind: type) -> Any:
    """The plain values in a container or object, without what is deeper."""
    if kind is list or kind is tuple or kind is set:
        return repr(value) if len(value) <= _LONG and _ATOMS.issuperset(map(type, value)) else ""
    if isinstance(value, Tensor | nn.Module | type | ModuleType) or callable(value):
        return ""
    members = value if kind is dict else getattr(value, "__dict__", {})
    if len(members) > 4 * _LONG:
        return ""
    return tuple([(str(n), v) for n, v in members.items() if type(v) in _ATOMS])
