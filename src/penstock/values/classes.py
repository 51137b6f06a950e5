"""The classes that values may be of, beside Python's and torch's own: how they come apart and together.

Between ranks a class travels as its module and name. The rank that receives one never imports by such a name,
for that would run whatever a message asks for: it looks among the modules that its own program has imported,
and takes only what is a dataclass, a named tuple, a mapping or an enum of exactly that name, or a class that
was registered here. Ranks run the same program, so what one has imported the others have too.
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
    """How the values of a class come apart into named parts, and together again."""

    name: str
    take: Callable[[Any], Fields]
    make: Callable[[Fields], Any]


_KNOWN: WeakKeyDictionary[type, Record] = WeakKeyDictionary()
_REGISTERED: dict[str, type] = {}
SPREAD: set[type] = set()
"""The registered classes of tensors, which come apart too."""


def register_type(
    kind: type,
    take_apart: Callable[[Any], Any] | None = None,
    put_together: Callable[[Any], Any] | None = None,
) -> None:
    """Let values of a class travel between stages; every rank registers it.

    Dataclasses, named tuples and enums at the top level of a module need no registration.

    Args:
        kind: the class.
        take_apart: gives, for a value of the class, one that can travel: tensors and plain values in tuples,
            lists, dicts. Only a dataclass, named tuple or enum does without.
        put_together: makes a value of the class of that.

    Raises:
        UsageError: it is no class, or the functions are missing.
    """
    if not isinstance(kind, type):
        raise UsageError(f"register_type takes a class, not {kind!r}")
    if (take_apart is None) != (put_together is None):
        raise UsageError(f"register_type({kind.__name__}): give both functions or none")
    if take_apart is not None and put_together is not None:
        _KNOWN[kind] = _custom(kind, take_apart, put_together)
    elif not issubclass(kind, Enum) and _own_record(kind) is None:
        raise UsageError(
            f"register_type({kind.__name__}): give take_apart and put_together; only dataclasses, named "
            "tuples, mappings and enums do without"
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
    """How values of a class come apart; ``None`` where that is not known.

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
    """The same for a name that came from another rank.

    Raises:
        SpecError: this program has no such class, or it is none of those that may travel.
    """
    kind = _find(name)
    found = None if kind is None else record_of(kind)
    if found is None:
        raise _not_found(name, "dataclass or named tuple")
    return found


def enum_named(name: str) -> type[Enum]:
    """The enum of a name that came from another rank.

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
        SpecError: it would not be found.
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
    """The class of this name in what has been imported."""
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
        f"this rank knows no {what} {name!r}, which another rank gave; import its module on every rank, or "
        "call penstock.values.register_type there"
    )


# ---- what classes say about themselves


def _own_record(kind: type) -> Record | None:
    if dataclasses.is_dataclass(kind):
        if issubclass(kind, dict):
            return _mapping_dataclass(kind)
        # One that derives from a type with content of its own would come back without that.
        return None if issubclass(kind, _WITH_CONTENT) else _dataclass(kind)
    if issubclass(kind, tuple):
        return _named_tuple(kind)
    is_mapping = issubclass(kind, Mapping) and kind not in _PLAIN
    return _mapping(kind) if is_mapping else None


_PLAIN = (dict, OrderedDict, defaultdict)
_WITH_CONTENT = (list, tuple, set, frozenset, str, bytes, int, float, complex)


def _dataclass(kind: type) -> Record:
    """Without a call of ``__init__`` or ``__post_init__``: what they have set is taken along."""
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
    """Whether an attribute holds something that no field does; what was computed once can be again."""
    return name not in fields and not isinstance(getattr(kind, name, None), cached_property)


def _mapping_dataclass(kind: type) -> Record:
    """A dict whose items are its fields, such as the outputs of transformers' models."""
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
    """A mapping of a class of its own, such as a tokenizer's batch: the class makes one of a dict."""

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
    """``typing.NamedTuple``, ``collections.namedtuple``, and what ``torch.max`` and others give."""
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
