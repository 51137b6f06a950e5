"""What a model's code holds besides weights and buffers, compared before and after the run without data."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Generator, Tensor, nn
from torch._subclasses import FakeTensor

from penstock.partition.mutables import (
    CONTAINERS,
    MISSING,
    Mutable,
    Mutables,
    Words,
    is_equal,
    is_iterator,
    read,
    same,
)
from penstock.partition.settings import REGISTRIES


class Changed(NamedTuple):
    """Something outside of parameters and buffers that a run has changed.

    Attributes:
        what: a description for messages.
        units: the paths of the units that have it; empty if code around the units has it.
    """

    what: str
    units: frozenset[str] = frozenset()


class Held:
    """What a model's modules hold, before a run.

    Args:
        model: the model.
        units: its units by path.

    Attributes:
        outside: the modules around the units, with their names for messages.
    """

    def __init__(self, model: nn.Module, units: Mapping[str, nn.Module]) -> None:
        inside = {id(part): path for path, unit in units.items() for part in unit.modules()}
        self._mutables = Mutables()
        self._common: list[Mutable] | None = None
        self._early: set[int] = set()
        self.outside: list[tuple[nn.Module, str]] = []
        for path, module in model.named_modules():
            name = path or f"the {type(module).__name__}"
            if id(module) not in inside:
                self.outside.append((module, name))
            self._look_at(module, inside.get(id(module), ""), name)
        # Only now, when the iterators have been replaced.
        self._modules = [(m, attributes_of(m), _registries(m)) for m in model.modules()]

    def _look_at(self, module: nn.Module, unit: str, name: str) -> None:
        mutables = self._mutables
        for attribute, value in attributes_of(module).items():
            if is_iterator(value):
                value = mutables.replay(module, attribute, value)
            if unit == "" or not isinstance(value, Tensor):
                words = f"what the attribute {attribute!r} of {name} holds"
                mutables.look(value, unit, Words(words, module))
        for kind in _classes(module):
            words = f"an attribute of the class {kind.__name__} of {name}"
            mutables.look(kind, unit, Words(words, module), ("",))
            for method in filter(inspect.isfunction, vars(kind).values()):
                if method.__name__ != "__init__":
                    mutables.look(method, unit, Words(f"the code of {name}"), ("", ""))
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            # What only hooks have is put back, and is nobody's.
            mutables.look(hook, _HOOKS, Words(f"a hook of {name}"), ("",))

    def changes(self) -> list[Changed]:
        """The changes of mutables that code around the units has, or that several units have."""
        changed, once = [], {id(mutable) for mutable, _, _ in self.set_once()}
        for mutable in self._mutables.changed():
            units = mutable.owners.keys() - {"", _HOOKS}
            if id(mutable.value) in once:
                continue
            if isinstance(mutable.value, Generator):
                changed.append(
                    Changed("the state of a torch.Generator of the model, from which it draws")
                )
            elif "" in mutable.owners and not _is_set_once(mutable.before, read(mutable.value)):
                changed.append(Changed(str(mutable.owners[""])))
            elif len(units) > 1:
                kind, paths = type(mutable.value).__name__, " and ".join(sorted(units)[:2])
                changed.append(Changed(f"an object (a {kind}) that {paths} have", frozenset(units)))
        return changed

    def set_once(self) -> list[tuple[Any, str, Any]]:
        """The attributes that code around the units sets once in objects: object, name and value."""
        mutables = [mutable for mutable in self._mutables.changed() if "" in mutable.owners]
        return [
            (mutable.value, *one)
            for mutable in mutables
            if id(mutable.value) not in self._early
            for one in mutable.set_once().items()
        ]

    def has_changed(self, unit: str) -> bool:
        """Whether anything that a unit has is another now."""
        return bool(self._mutables.changed(unit))

    def after_unit(self) -> None:
        """Note which objects that a unit and the code around have are others before the last unit's end."""
        if self._common is None:
            self._common = self._mutables.common()
        self._early.update(id(mutable.value) for mutable in self._common if mutable.is_changed)

    def outer(self) -> set[str]:
        """The units whose code changes global or enclosing containers."""
        return {
            unit
            for mutable in self._mutables.changed()
            for unit, words in mutable.owners.items()
            if words.module is None and unit not in ("", _HOOKS)
        }

    def attributes(self) -> Iterator[tuple[nn.Module, str, str, Any, Any]]:
        """The attributes around the units that are others now: module, its name, attribute, before, now."""
        names = {id(module): name for module, name in self.outside}
        for module, before, _ in self._modules:
            now = attributes_of(module)
            for name in {**before, **now} if id(module) in names else ():
                old, new = before.get(name, MISSING), now.get(name, MISSING)
                alike = type(old) is type(new) and isinstance(new, (*CONTAINERS, tuple))
                if not (same(old, new) if alike else is_equal(old, new)):
                    yield module, names[id(module)], name, old, new

    def restore(self) -> None:
        """Put back everything."""
        for module, before, registries in self._modules:
            state = vars(module)
            for name in attributes_of(module).keys() - before.keys():
                del state[name]
            state.update(before)
            for name, held in registries.items():
                table = state[name]
                if len(table) != len(held) or any(table[n] is not v for n, v in held.items()):
                    table.clear()
                    table.update(held)
        self._mutables.restore()


_HOOKS = ":hooks"
"""Stands for a unit: what only hooks have."""


def _is_set_once(before: Any, after: Any) -> bool:
    """Whether a dictionary only has more tensors, not made from data, as a cache of tables."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return False
    new = [value for name, value in after.items() if name not in before]
    kept = all(name in after and is_equal(value, after[name]) for name, value in before.items())
    tensors = [value for value in new if isinstance(value, Tensor)]
    return kept and len(tensors) == len(new) and not any(isinstance(t, FakeTensor) for t in tensors)


def may_be_set(old: Any, new: Any) -> bool:
    """Whether an attribute may become this once: it was not set, and is not a count."""
    if type(new) in (int, float) or new is MISSING:
        return False
    return old is MISSING or old is None or type(old) is bool or _is_converted(old, new)


def _is_converted(old: Any, new: Any) -> bool:
    """Whether a list of tensors, such as of anchors, has become one of the same in another type."""
    if not (type(old) is type(new) is list and len(old) == len(new) > 0):
        return False
    return all(
        isinstance(was, Tensor)
        and isinstance(now, Tensor)
        and was.shape == now.shape
        and (was.dtype, was.device) != (now.dtype, now.device)
        for was, now in zip(old, new, strict=True)
    )


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The author's attributes of a module, without parameters, buffers, modules and hooks."""
    return {n: v for n, v in vars(module).items() if n not in REGISTRIES}


def _registries(module: nn.Module) -> dict[str, dict[str, Any]]:
    state = vars(module)
    return {name: dict(state[name]) for name in REGISTRIES if isinstance(state.get(name), dict)}


def _classes(module: nn.Module) -> list[type]:
    """The classes of a module that the author wrote."""
    kinds = type(module).__mro__
    return [k for k in kinds if not k.__module__.startswith(("torch.", "builtins", "penstock."))]
