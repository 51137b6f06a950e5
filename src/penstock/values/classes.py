"""Classes of values other than Python's and torch's own: how to take them apart and put them together.

Between ranks a class travels as its module and name. The receiving rank never imports such a name, since
that would run whatever a message asks for. It looks among the modules that its own program has imported,
and accepts only a dataclass, named tuple, mapping or enum of exactly that name, or a class that was
registered here. Ranks run the same program, so what one rank has imported, the others have too.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor

from penstock.errors import SpecError, UsageError

Fields = Iterable[tuple[str, Any]]


class Record(NamedTuple):
    """How to take the values of a class apart into named parts, and put them together again."""

    name: str
    take: Callable[[Any], Fields]
    make: Callable[[Fields], Any]


_KNOWN: WeakKeyDictionary[type, Record] = WeakKeyDictionary()
_REGISTERED: dict[str, type] = {}
SPREAD: set[type] = set()
"""Registered subclasses of Tensor, which are taken apart too."""


def register_type(
    kind: type,
    take_apart: Callable[[Any], Any] | None = None,
    put_together: Callable[[Any], Any] | None = None,
) -> None:
    """Let values of a class travel between stages; every rank must register it.

    Dataclasses, named tuples and enums at the top level of a module need no registration.

    Args:
        kind: the class.
        take_apart: turns a value of the class into one that can travel: tensors and plain values in tuples,
            lists and dicts. A dataclass, named tuple or enum needs none.
        put_together: makes a value of the class from that.

    Raises:
        UsageError: it is not a class, or the functions are missing.
    """
    if not isinstance(kind, type):
        raise UsageError(f"register_type takes a class, not {kind!r}")
    if (take_apart is None) != (put_together is None):
        raise UsageError(f"register_type({kind.__name__}): give both functions or none")
    if take_apart is not None and put_together is not None:
        _KNOWN[kind] = _custom(kind, take_apart, put_together)
    elif not issubclass(kind, Enum) and _own_record(kind) is None:
        raise UsageError(
            f"register_type({kind.__name__}): pass take_apart and put_together; only dataclasses, named "
            "tuples, mappings and enums need none"
        )
    _REGISTERED[_full_name(kind)] = kind
    if issubclass(kind, Tensor):
        SPREAD.add(kind)


def _custom(
    kind: type, take_apart: Callable[[Any], Any], put_together: Callable[[Any], Any]
) -> Record:
    def take(value: Any) -> Fields:
        return [("parts", take_apart(value))]

    def make(fields: Fields) -> Any:
        ((_, parts),) = fields
        return put_together(parts)

    return Record(_full_name(kind), take, make)


def record_of(kind: type) -> Record | None:
    """How to take values of a class apart; ``None`` if that is not known.

    Raises:
        SpecError: it is known, but other ranks could not find the class.
    """
    found = _KNOWN.get(kind)
    if found is None:
        found = _own_record(kind)
        if found is not None:
            name_of(kind)
            _KNOWN[kind] = found
    return found


def record_named(name: str) -> Record:
    """The record of a class whose name came from another rank.

    Raises:
        SpecError: this program has no such class, or the class may not travel.
    """
    kind = _find(name)
    found = None if kind is None else record_of(kind)
    if found is None:
        raise _not_found(name, "dataclass or named tuple")
    return found


def enum_named(name: str) -> type[Enum]:
    """The enum whose name came from another rank.

    Raises:
        SpecError: this program has no such enum.
    """
    kind = _find(name)
    if kind is None or not issubclass(kind, Enum):
        raise _not_found(name, "enum")
    return kind


def name_of(kind: type) -> str:
    """The name by which every rank finds a class.

    Raises:
        SpecError: other ranks would not find it.
    """
    name = _full_name(kind)
    if _find(name) is not kind:
        raise SpecError(
            f"other ranks cannot find the class {name}; define it at the top level of a module, or call "
            f"penstock.values.register_type({kind.__name__}) on every rank"
        )
    return name


def _full_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _find(name: str) -> type | None:
    """The class of a name, in the modules that have been imported."""
    if name in _REGISTERED:
        return _REGISTERED[name]
    module, _, path = str(name).partition(":")
    found: Any = sys.modules.get(module)
    for step in path.split("."):
        # Not getattr: it would run a module's own __getattr__, which may import.
        found = vars(found).get(step) if hasattr(found, "__dict__") else None
    return found if isinstance(found, type) and _full_name(found) == name else None


def _not_found(name: str, what: str) -> SpecError:
    return SpecError(
        f"this rank knows no {what} {name!r}, which another rank has sent; import its module on every "
        "rank, or call penstock.values.register_type there"
    )


# ---- classes that need no registration


def _own_record(kind: type) -> Record | None:
    if dataclasses.is_dataclass(kind):
        if issubclass(kind, dict):
            return _mapping_dataclass(kind)
        # A subclass of a type with content of its own, such as list, would come back without that content.
        return None if issubclass(kind, _WITH_CONTENT) else _dataclass(kind)
    if issubclass(kind, tuple):
        return _named_tuple(kind)
    is_mapping = issubclass(kind, Mapping) and kind not in _PLAIN
    return _mapping(kind) if is_mapping else None


_PLAIN = (dict, OrderedDict, defaultdict)
_WITH_CONTENT = (list, tuple, set, frozenset, str, bytes, int, float, complex)


def _dataclass(kind: type) -> Record:
    """A dataclass. ``__init__`` and ``__post_init__`` are not called again: what they set travels too."""
    names = [field.name for field in dataclasses.fields(kind)]

    def take(value: Any) -> Fields:
        own = [(name, getattr(value, name)) for name in names if hasattr(value, name)]
        return own + [item for item in _state(value).items() if _is_more(kind, item[0], names)]

    def make(fields: Fields) -> Any:
        made: Any = object.__new__(kind)
        for name, value in fields:
            object.__setattr__(made, name, value)
        return made

    return Record(_full_name(kind), take, make)


def _state(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})


def _is_more(kind: type, name: str, fields: list[str]) -> bool:
    """Whether an attribute is neither a field nor a cached property, which can be computed again."""
    return name not in fields and not isinstance(getattr(kind, name, None), cached_property)


def _mapping_dataclass(kind: type) -> Record:
    """A dict whose items are its fields, such as the outputs of transformers models."""
    names = [field.name for field in dataclasses.fields(kind) if field.init]

    def take(value: Any) -> Fields:
        more = [(key, item) for key, item in value.items() if key not in names]
        return [(name, getattr(value, name)) for name in names] + more

    def make(fields: Fields) -> Any:
        given = dict(fields)
        made: Any = kind(**{name: given.pop(name) for name in names})
        for name, item in given.items():
            made[name] = item
        return made

    return Record(_full_name(kind), take, make)


def _mapping(kind: Callable[[Any], Any]) -> Record:
    """A class of mappings, such as a tokenizer's batch, that can be made from a dict."""

    def put_together(items: dict[Any, Any]) -> Any:
        try:
            return kind(items)
        except Exception as error:
            raise SpecError(
                f"a {kind.__name__} cannot be made from a dict ({error}); call "
                f"penstock.values.register_type({kind.__name__}, take_apart, put_together) on every rank"
            ) from error

    assert isinstance(kind, type)
    return _custom(kind, dict, put_together)


def _named_tuple(kind: type) -> Record | None:
    """``typing.NamedTuple``, ``collections.namedtuple``, and the results of ``torch.max`` and others."""
    own = kind.__module__ == "torch.return_types"
    names = getattr(kind, "__match_args__" if own else "_fields", None)
    if not isinstance(names, tuple):
        return None

    def take(value: Any) -> Fields:
        return zip(names, value, strict=True)

    def make(fields: Fields) -> Any:
        items = tuple(item for _, item in fields)
        return kind(items) if own else tuple.__new__(kind, items)

    return Record(_full_name(kind), take, make)
