"""What hangs on a model's modules, before and after a run: attributes, buffers, counters."""

from __future__ import annotations

import inspect
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Generator, Tensor, equal, nn

_REGISTRIES = frozenset(vars(nn.Module())) - {"training"}
_CONTAINERS = (list, dict, set, deque)
_DEPTH = 4
"""How deep helper objects and containers are looked into."""
_MOST = 1000
"""How many members of a container are."""


@dataclass(frozen=True)
class Changed:
    """Something that a run has changed.

    Attributes:
        what: in words, with the module and the line that assigns to it, as far as it can be told.
        units: the paths of the units that have it; empty if it hangs on a module outside of units.
        attribute: the identity of the module and the name, if it is an attribute.
    """

    what: str
    units: frozenset[str] = frozenset()
    attribute: tuple[int, str] | None = None


class Snapshot:
    """The state of a model's modules.

    Args:
        model: the model.
        units: its units by path; what changes inside of one alone is its own affair.
    """

    def __init__(self, model: nn.Module, units: dict[str, nn.Module]) -> None:
        self._inside = {id(part): path for path, unit in units.items() for part in unit.modules()}
        self._modules = list(model.named_modules())
        self._attributes = [_own(module) for _, module in self._modules]
        self._buffers = [
            {
                name: (buffer, 0 if buffer is None else buffer._version)
                for name, buffer in m._buffers.items()
            }
            for _, m in self._modules
        ]
        self._registries = [
            {
                name: dict(vars(m)[name])
                for name in _REGISTRIES
                if isinstance(vars(m).get(name), dict)
            }
            for _, m in self._modules
        ]
        self._contents: dict[int, tuple[Any, Any]] = {}
        self._generators: dict[int, tuple[Generator, Tensor]] = {}
        self._reached: dict[int, set[str]] = {}
        for (_, module), attributes in zip(self._modules, self._attributes, strict=True):
            unit = self._inside.get(id(module), "")
            for value in attributes.values():
                self._look(value, unit, 0)

    def look(self, value: Any) -> None:
        """Note also what some value holds."""
        self._look(value, "", 0)

    def _look(self, value: Any, unit: str, depth: int) -> None:
        """Note what containers and helper objects hold, and which units have them."""
        if depth > _DEPTH or isinstance(value, nn.Module | Tensor | type | str | int | float):
            return
        if isinstance(value, Generator):
            self._generators[id(value)] = (value, value.get_state())
            return
        if isinstance(value, tuple):
            children = list(value)
        else:
            contents = _contents(value)
            if contents is None or unit in self._reached.get(id(value), ()):
                return
            self._contents.setdefault(id(value), (value, contents.copy()))
            self._reached.setdefault(id(value), set()).add(unit)
            children = _members(contents)
        for child in children[:_MOST]:
            self._look(child, unit, depth + 1)

    def changes(self) -> list[Changed]:
        """What has changed outside of the units, or in what several units have."""
        found: list[Changed] = []
        for (path, module), before, buffers in zip(
            self._modules, self._attributes, self._buffers, strict=True
        ):
            if id(module) in self._inside:
                continue
            owner, after = path or f"the {type(module).__name__}", _own(module)
            names = [n for n in {**before, **after} if _differs(before, after, n)]
            found += [
                Changed(
                    f"the attribute {n!r} of {owner}{_line(module, n)}", attribute=(id(module), n)
                )
                for n in names
            ]
            for name, value in before.items():
                if name not in names and self._is_changed(value, 0, set()):
                    text = f"what the attribute {name!r} of {owner} holds{_line(module, name)}"
                    found.append(Changed(text))
            for name, (buffer, version) in buffers.items():
                now = module._buffers.get(name)
                if now is not buffer or (now is not None and now._version != version):
                    found.append(Changed(f"the buffer {name!r} of {owner}{_line(module, name)}"))
        if any(not equal(g.get_state(), state) for g, state in self._generators.values()):
            found.append(
                Changed("the state of a torch.Generator of the model, from which it draws")
            )
        for key, (value, before) in self._contents.items():
            units = self._reached[key]
            if len(units) > 1 and "" not in units and not _same(before, _contents(value)):
                text = f"an object (a {type(value).__name__}) that {' and '.join(sorted(units)[:2])} have"
                found.append(Changed(text, frozenset(units)))
        return found

    def has_new_tensors(self, counts: Callable[[Tensor], bool]) -> bool:
        """Whether an attribute, or what one holds, has become another tensor that ``counts``."""
        pairs = [
            (before, _own(module))
            for (_, module), before in zip(self._modules, self._attributes, strict=True)
            if id(module) not in self._inside
        ]
        pairs += [
            (_by_place(before), _by_place(_contents(value)))
            for value, before in self._contents.values()
            if not isinstance(value, set)
        ]
        return any(
            isinstance(value, Tensor) and before.get(name) is not value and counts(value)
            for before, after in pairs
            for name, value in after.items()
        )

    def _is_changed(self, value: Any, depth: int, been: set[int]) -> bool:
        if depth > _DEPTH or id(value) in been:
            return False
        been.add(id(value))
        if isinstance(value, tuple):
            return any(self._is_changed(child, depth + 1, been) for child in value)
        if id(value) not in self._contents:
            return False
        before = self._contents[id(value)][1]
        if not _same(before, _contents(value)):
            return True
        return any(self._is_changed(child, depth + 1, been) for child in _members(before))

    def restore(self) -> None:
        """Put everything back that was noted."""
        for (_, module), before, registries in zip(
            self._modules, self._attributes, self._registries, strict=True
        ):
            state = vars(module)
            for name in [n for n in state if n not in _REGISTRIES and n not in before]:
                del state[name]
            state.update(before)
            for name, held in registries.items():
                table = state[name]
                if len(table) != len(held) or any(table[n] is not v for n, v in held.items()):
                    table.clear()
                    table.update(held)
        for generator, state in self._generators.values():
            generator.set_state(state)
        for value, held in self._contents.values():
            now = _contents(value)
            if _same(held, now):
                continue
            now.clear()
            now.extend(held) if isinstance(now, list | deque) else now.update(held)


def _own(module: nn.Module) -> dict[str, Any]:
    return {n: v for n, v in vars(module).items() if n not in _REGISTRIES}


def _contents(value: Any) -> Any:
    """What a container or a helper object holds, as a container that can be changed; or ``None``."""
    if isinstance(value, _CONTAINERS):
        return value
    return vars(value) if hasattr(value, "__dict__") and not callable(value) else None


def _members(contents: Any) -> list[Any]:
    return list(contents.values()) if isinstance(contents, dict) else list(contents)


def _by_place(contents: Any) -> dict[Any, Any]:
    return contents if isinstance(contents, dict) else dict(enumerate(contents))


def _differs(before: dict[str, Any], after: dict[str, Any], name: str) -> bool:
    if name not in before or name not in after:
        return True
    return not _is_equal(before[name], after[name])


def _is_equal(old: Any, new: Any) -> bool:
    plain = isinstance(old, int | float | str | bool)
    return old is new or (plain and type(old) is type(new) and bool(old == new))


def _same(before: Any, after: Any) -> bool:
    if len(before) != len(after):
        return False
    if isinstance(before, set):
        return bool(before == after)
    if isinstance(before, dict):
        return list(before) == list(after) and all(_is_equal(before[n], after[n]) for n in before)
    return all(map(_is_equal, before, after))


def _line(module: nn.Module, name: str) -> str:
    """The line of a module's class that assigns to an attribute, or changes what it holds."""
    try:
        lines, start = inspect.getsourcelines(type(module))
        file = inspect.getsourcefile(type(module)) or ""
    except (OSError, TypeError):
        return ""
    pattern = re.compile(
        rf"\.{name}\b(\[.*\])?(\.\w+)*\s*([-+*/|&%@]|//|\*\*)?=(?!=)|\.{name}\b(\.\w+)*\.\w+\("
    )
    inside = [
        i for i, line in enumerate(lines) if "def __init__" not in line and pattern.search(line)
    ]
    after_init = [i for i in inside if _function_of(lines, i) != "__init__"]
    if not after_init:
        return ""
    return f" ({file.replace(chr(92), '/').rpartition('/')[2]}:{start + after_init[0]})"


def _function_of(lines: Sequence[str], index: int) -> str:
    for line in reversed(lines[: index + 1]):
        if match := re.match(r"\s*(?:async )?def (\w+)", line):
            return match[1]
    return ""
