"""Attributes that units set: their own stage may read them, other stages and the loss may not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.partition.held import Changed, attributes_of
from penstock.partition.lines import line_of
from penstock.partition.mutables import CONTAINERS, MISSING, is_equal, read, replaced, same

Refuse = Callable[[], Exception]
_ACTS = (
    "bool len iter next call contains getitem setitem delitem eq ne lt le gt ge hash index int float complex "
    "round array enter exit add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow "
    "matmul rmatmul and rand or ror xor rxor neg pos abs invert iadd isub imul itruediv str format"
)


class NotHere:
    """Stands for what another stage has set: whatever uses it is refused."""

    def __init__(self, refuse: Refuse) -> None:
        self.__dict__["refuse"] = refuse

    def __getattr__(self, name: str) -> Any:
        raise self.refuse()


def _used(self: Any, *_: Any) -> Any:
    raise self.refuse()


for _name in _ACTS.split():
    setattr(NotHere, f"__{_name}__", _used)


class Attribute(NamedTuple):
    """An attribute that a unit has set: its module, its name, its value, the unit and the event."""

    module: nn.Module
    name: str
    value: Any
    unit: str
    event: int


@contextmanager
def reads_noted(
    attributes: Sequence[tuple[nn.Module, str, Any]], note: Callable[[Any], None]
) -> Iterator[None]:
    """Note whenever an attribute is read before it is set: each has its module, name, and what to note."""
    events: dict[int, dict[str, Any]] = {}
    for module, name, what in attributes:
        events.setdefault(id(module), {})[name] = what
    modules = {id(module): module for module, _, _ in attributes}
    kinds = {key: type(module) for key, module in modules.items()}
    for key, module in modules.items():
        module.__class__ = _noting(kinds[key], events[key], note)
    try:
        yield
    finally:
        for key, module in modules.items():
            module.__class__ = kinds[key]


def _noting(kind: Any, events: dict[str, Any], note: Callable[[Any], None]) -> Any:
    """A module's class that notes what is read, see :func:`reads_noted`."""

    def read(self: Any, name: str) -> Any:
        if name in events:
            note(events[name])
        return kind.__getattribute__(self, name)

    def write(self: Any, name: str, value: Any) -> None:
        events.pop(name, None)
        kind.__setattr__(self, name, value)

    return type(
        kind.__name__,
        (kind,),
        {"__getattribute__": read, "__setattr__": write, "__module__": kind.__module__},
    )


def hidden(attributes: Sequence[tuple[nn.Module, str, str]]) -> AbstractContextManager[None]:
    """Refuse to use some attributes, given with their units' names: the last stage has other values."""

    def refusal(name: str, unit: str) -> Exception:
        return PartitionError(
            f"the loss uses the attribute {name!r} of {unit}, which is in another stage; return it from "
            "there, or add it as a loss (penstock.add_loss)"
        )

    return replaced(
        (vars(module), name, NotHere(partial(refusal, name, unit)))
        for module, name, unit in attributes
    )


class Private:
    """Hides the attributes that units set from code of other stages, in a run.

    Args:
        units: the units by path.
        together: whether two units are in one stage.
        refuse: makes the error for an attribute that is used elsewhere.

    Attributes:
        between: the changes that code between units made to units' attributes.
    """

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        together: Callable[[str, str], bool],
        refuse: Callable[[Attribute], Exception],
    ) -> None:
        self._together, self._refuse = together, refuse
        self._parts = {path: list(unit.named_modules()) for path, unit in units.items()}
        self._known = {
            id(part): _copied(part) for parts in self._parts.values() for _, part in parts
        }
        self._left: dict[tuple[int, str], Attribute] = {}
        self._resets: dict[tuple[int, str], tuple[nn.Module, str]] = {}
        self.between: list[Changed] = []

    @property
    def left(self) -> list[Attribute]:
        """The attributes that units have set."""
        return list(self._left.values())

    def enter(self, path: str) -> list[Attribute]:
        """Note that a unit is called, and return the attributes that earlier calls left and it may read."""
        left = self._left.values()
        reset = {one.unit for one in left if _is_reset(vars(one.module).get(one.name))}
        for unit in reset | {path}:
            self._note_between(unit)
        near = [one for one in self._left.values() if self._together(one.unit, path)]
        for one in near:
            vars(one.module)[one.name] = one.value
        return near

    def leave(self, path: str, event: int) -> None:
        """Note that the unit has returned."""
        for key, one in self._left.items():
            now = vars(one.module).get(one.name)
            if self._together(one.unit, path):
                self._left[key] = one._replace(value=now)
            elif not isinstance(now, NotHere):
                raise self._refuse(one)
        changed = [(part, name, value) for _, part, name, value in self._changed(path)]
        changed = [one for one in changed if not isinstance(one[2], nn.Module | NotHere)]
        for part, name, value in changed:
            self._left[id(part), name] = Attribute(part, name, value, path, event)
        for one in self._left.values():
            vars(one.module)[one.name] = NotHere(partial(self._refuse, one))

    def _note_between(self, path: str) -> None:
        """Note what code between units, which every stage runs, has done to attributes of a unit.

        It may reset them, such as a cache to None.
        """
        for inner, part, name, value in self._changed(path):
            if _is_reset(value):
                self._left.pop((id(part), name), None)
                self._resets[id(part), name] = part, name
            elif not isinstance(value, Tensor | nn.Module | NotHere):
                owner = ".".join(filter(None, (path, inner)))
                self.between.append(Changed(f"the attribute {name!r} of {owner}{line_of(part)}"))

    def end(self) -> list[tuple[nn.Module, str, Any]]:
        """The attributes that code between units has reset for good: module, name and value."""
        for path in self._parts:
            self._note_between(path)
        now = [(part, name, vars(part).get(name)) for part, name in self._resets.values()]
        return [one for one in now if _is_reset(one[2])]

    def _changed(self, path: str) -> Iterator[tuple[str, nn.Module, str, Any]]:
        """The attributes of a unit's modules that have changed since the last look."""
        for inner, part in self._parts[path]:
            known, now = self._known[id(part)], attributes_of(part)
            for name, value in now.items():
                old = known.get(name, (MISSING, None))
                changed = not is_equal(old[0], value)
                if not changed and old[1] is not None:
                    changed = not same(old[1], read(value))
                if changed and not isinstance(value, NotHere):
                    known[name] = value, read(value) if isinstance(value, CONTAINERS) else None
                    yield inner, part, name, value


def _is_reset(value: Any) -> bool:
    """Whether code between units may give this to an attribute of a unit: it is no count."""
    return value is None or type(value) in (bool, str)


def _copied(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    return {
        name: (value, value.copy() if isinstance(value, CONTAINERS) else None)
        for name, value in attributes_of(module).items()
    }
