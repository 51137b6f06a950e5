"""What hangs on a model's modules, before and after a run: attributes, buffers, counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

_REGISTRIES = frozenset(vars(nn.Module())) - {"training"}
_CONTAINERS = (list, dict, set, deque)


class Snapshot:
    """The state of a model's modules.

    Args:
        model: the model.
        units: its units; what changes inside of them alone is their own affair.
    """

    def __init__(self, model: nn.Module, units: Sequence[nn.Module]) -> None:
        self._inside = {id(part) for unit in units for part in unit.modules()}
        self._modules = list(model.named_modules())
        self._attributes = [self._of(module) for _, module in self._modules]
        self._buffers = [
            {name: (buffer, 0 if buffer is None else buffer._version) for name, buffer in m._buffers.items()}
            for _, m in self._modules
        ]
        self._registries = [
            {name: dict(vars(m)[name]) for name in _REGISTRIES if isinstance(vars(m).get(name), dict)}
            for _, m in self._modules
        ]
        self._contents: dict[int, tuple[Any, Any]] = {}
        for attributes in self._attributes:
            for value in attributes.values():
                self._look(value, 0)

    def _of(self, module: nn.Module) -> dict[str, Any]:
        return {n: v for n, v in vars(module).items() if n not in _REGISTRIES}

    def _look(self, value: Any, depth: int) -> None:
        """Note what containers and helper objects hold."""
        if depth > 4 or id(value) in self._contents or isinstance(value, nn.Module | Tensor | type):
            return
        if isinstance(value, _CONTAINERS):
            held = value.copy()
            self._contents[id(value)] = (value, held)
            children = list(held.values()) if isinstance(held, dict) else list(held)
        elif isinstance(value, tuple):
            children = list(value)
        elif hasattr(value, "__dict__") and not callable(value):
            held = dict(vars(value))
            self._contents[id(value)] = (value, held)
            children = list(held.values())
        else:
            return
        for child in children[:1000]:
            self._look(child, depth + 1)

    def changes(self) -> list[str]:
        """What has changed outside of the units, in words."""
        found: list[str] = []
        for (path, module), before, buffers in zip(
            self._modules, self._attributes, self._buffers, strict=True
        ):
            if id(module) in self._inside:
                continue
            owner = path or f"the {type(module).__name__}"
            after = self._of(module)
            names = [n for n in {**before, **after} if before.get(n, self) is not after.get(n, self)]
            found += [f"the attribute {n!r} of {owner}" for n in names if not _equal(before, after, n)]
            for name, value in before.items():
                if name not in names and self._is_changed(value, 0, set()):
                    found.append(f"what the attribute {name!r} of {owner} holds")
            for name, (buffer, version) in buffers.items():
                now = module._buffers.get(name)
                if now is not buffer or (now is not None and now._version != version):
                    found.append(f"the buffer {name!r} of {owner}")
        return found

    def has_new_tensors(self) -> bool:
        """Whether an attribute, or what one holds, has become another tensor."""
        for (_, module), before in zip(self._modules, self._attributes, strict=True):
            if id(module) not in self._inside and _new_tensor(before, self._of(module)):
                return True
        return any(
            isinstance(value, list | tuple | deque | dict)
            and _new_tensor(_by_place(held), _by_place(value))
            for value, held in self._contents.values()
        )

    def _is_changed(self, value: Any, depth: int, been: set[int]) -> bool:
        if depth > 4 or id(value) in been:
            return False
        been.add(id(value))
        if isinstance(value, tuple):
            return any(self._is_changed(child, depth + 1, been) for child in value)
        if id(value) not in self._contents:
            return False
        _, before = self._contents[id(value)]
        after = value if isinstance(value, _CONTAINERS) else vars(value)
        if not _same(before, after):
            return True
        children = before.values() if isinstance(before, dict) else before
        return any(self._is_changed(child, depth + 1, been) for child in children)

    def restore(self) -> None:
        """Put everything back that was noted."""
        for (_, module), before in zip(self._modules, self._attributes, strict=True):
            state = vars(module)
            for name in [n for n in state if n not in _REGISTRIES and n not in before]:
                del state[name]
            state.update(before)
        for (_, module), registries in zip(self._modules, self._registries, strict=True):
            for name, held in registries.items():
                table = vars(module)[name]
                if len(table) != len(held) or any(table[n] is not v for n, v in held.items()):
                    table.clear()
                    table.update(held)
        for value, held in self._contents.values():
            if isinstance(value, list | deque):
                if not _same(held, value):
                    value.clear()
                    value.extend(held)
            elif isinstance(value, set | dict):
                if not _same(held, value):
                    value.clear()
                    value.update(held)
            elif not _same(held, vars(value)):
                vars(value).clear()
                vars(value).update(held)


def _by_place(held: Any) -> dict[Any, Any]:
    return held if isinstance(held, dict) else dict(enumerate(held))


def _new_tensor(before: dict[Any, Any], after: dict[Any, Any]) -> bool:
    return any(before.get(n) is not value and isinstance(value, Tensor) for n, value in after.items())


def _equal(before: dict[str, Any], after: dict[str, Any], name: str) -> bool:
    """Whether an attribute has the same plain value, although it is another object."""
    if name not in before or name not in after:
        return False
    old, new = before[name], after[name]
    return type(old) is type(new) and isinstance(old, int | float | str | bool) and old == new


def _same(before: Any, after: Any) -> bool:
    if len(before) != len(after):
        return False
    if isinstance(before, set):
        return bool(before == after)
    if isinstance(before, dict):
        return list(before) == list(after) and all(
            before[n] is after[n] or _plain(before[n], after[n]) for n in before
        )
    return all(a is b or _plain(a, b) for a, b in zip(before, after, strict=True))


def _plain(old: Any, new: Any) -> bool:
    return type(old) is type(new) and isinstance(old, int | float | str | bool) and bool(old == new)
