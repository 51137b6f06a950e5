"""Nested values: take them apart, and put them together again.

A value that travels is taken apart into its tensors and a description of the rest. The description is plain
JSON data, so that it can be sent and compared without pickle.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum, Flag
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from penstock.errors import SpecError, UsageError
from penstock.values.classes import SPREAD, Record, enum_named, name_of, record_named, record_of

# ---- plain values, as JSON data under the name of their kind # Floats and complex numbers are texts, so
# that ``1``, ``1.0`` and ``True`` differ, and ``nan`` equals itself.


Structure = dict[str, Any]
"""How a value is nested, as JSON data."""


def _named(kind: type) -> dict[str, Any]:
    """All of torch's objects of a type, such as all dtypes, by name."""
    found = (value for value in vars(torch).values() if isinstance(value, kind))
    return {str(value).removeprefix("torch."): value for value in found}


DTYPES: dict[str, torch.dtype] = _named(torch.dtype)
_LAYOUTS: dict[str, torch.layout] = _named(torch.layout)
_FORMATS: dict[str, torch.memory_format] = _named(torch.memory_format)

DESCRIBE: dict[type, Callable[[Any], Structure]] = {
    type(None): lambda _: {"NoneType": None},
    bool: lambda value: {"bool": value},
    int: lambda value: {"int": value},
    str: lambda value: {"str": value},
    float: lambda value: {"float": repr(value)},
    complex: lambda value: {"complex": [repr(value.real), repr(value.imag)]},
    bytes: lambda value: {"bytes": value.hex()},
    type(...): lambda _: {"ellipsis": None},
    range: lambda value: {"range": [value.start, value.stop, value.step]},
    torch.Size: lambda value: {"Size": list(value)},
    torch.dtype: lambda value: {"dtype": str(value).removeprefix("torch.")},
    torch.layout: lambda value: {"layout": str(value).removeprefix("torch.")},
    torch.memory_format: lambda value: {"memory_format": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"device": str(value)},
}
"""By exact type: a subclass may hold more than its base does."""


def describe_enum(value: Enum) -> Structure:
    """A member of an enum, by its class and name; a combination of flags by its number.

    Raises:
        SpecError: other ranks could not find the class.
    """
    name = name_of(type(value))
    if isinstance(value, Flag) and value.name not in type(value).__members__:
        return {"enum": [name, int(value.value)]}
    return {"enum": [name, value.name]}


def _enum(content: list[Any]) -> Enum:
    name, member = content
    found = enum_named(name)
    if isinstance(member, int):
        return found(member)
    if member not in found.__members__:
        raise SpecError(f"the enum {name} has no member {member!r}")
    return found[member]


BUILD: dict[str, Callable[[Any], Any]] = {
    "NoneType": lambda _: None,
    "bool": bool,
    "int": int,
    "str": str,
    "float": float,
    "complex": lambda parts: complex(*map(float, parts)),
    "bytes": bytes.fromhex,
    "ellipsis": lambda _: ...,
    "range": lambda ends: range(*ends),
    "Size": torch.Size,
    "dtype": lambda name: DTYPES[name],
    "layout": lambda name: _LAYOUTS[name],
    "memory_format": lambda name: _FORMATS[name],
    "device": torch.device,
    "enum": _enum,
}


# ---- the structure of nested values


# Each structure is a dict of one kind and its content: ``{"tensor": 0}``, ``{"int": 3}``,
# ``{"tuple": [...]}``, ``{"dict": [[key, ...]]}``, ``{"record": [class, [[field, ...]]]}``.

_TENSOR: Structure = {"tensor": 0}
_ROWS = [{"tuple": [{"tensor": index} for index in range(length)]} for length in range(17)]
"""The structures of short tuples of tensors, made once."""

_PLAIN = frozenset({Tensor, nn.Parameter})
"""The classes of plain tensors."""


# ---- tensors that an asynchronous collective is still to fill


def arrived(tensor: Tensor) -> Tensor:
    """The tensor itself; for torch's ``AsyncCollectiveTensor``, the tensor inside it, once it has arrived.

    Such a tensor waits by itself before its first use in torch, but not when its memory is sent. Gradients
    flow through the wait, and nothing is copied.
    """
    if type(tensor) in _PLAIN or not hasattr(tensor, "trigger_wait"):
        return tensor
    found: Tensor = cast("Any", _Arrive).apply(tensor)
    return found


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        # No gradient is not the same as zeros.
        ctx.set_materialize_grads(False)
        found: Tensor = tensor.trigger_wait()
        # A new object, since autograd will mark it, and others may hold the wrapped one.
        return found.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0]


# ---- take a value apart


def flatten(value: Any) -> tuple[list[Tensor], Structure]:
    """Take a value apart.

    Args:
        value: tensors and plain values (``None``, bools, numbers, strings, enums, slices, dtypes …), alone
            or in tuples, lists, dicts, named tuples and dataclasses.

    Returns:
        The tensors in order, after :func:`arrived`; and the structure for :func:`unflatten`, which must
        not be changed, as it may be shared.

    Raises:
        SpecError: it holds something of another type; the message says where.
    """
    if type(value) in _PLAIN:
        return [value], _TENSOR
    if type(value) is tuple and len(value) < len(_ROWS):
        for item in value:
            if type(item) not in _PLAIN:
                break
        else:
            return list(value), _ROWS[len(value)]
    tensors: list[Tensor] = []
    try:
        return tensors, _describe(value, tensors)
    except _Refusal as refusal:
        raise SpecError(refusal.told()) from None
    except RecursionError:
        raise SpecError(
            f"a {type(value).__name__} contains itself, or is nested too deeply"
        ) from None


class _Refusal(Exception):
    """Something cannot travel; each level that the exception passes adds its step to the path."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.path = ""

    def inside(self, step: str) -> _Refusal:
        self.path = step + self.path
        return self

    def told(self) -> str:
        where = f" at {self.path}" if self.path else ""
        return f"{self.what}{where} cannot travel between ranks; {self.why}"


def _describe(value: Any, tensors: list[Tensor]) -> Structure:
    kind = type(value)
    if kind in DESCRIBE:
        return DESCRIBE[kind](value)
    if isinstance(value, Tensor) and kind not in SPREAD:
        tensors.append(arrived(value))
        return {"tensor": len(tensors) - 1}
    if kind is tuple or kind is list:
        return {kind.__name__: _items(value, tensors)}
    if kind is dict or kind is OrderedDict:
        return {kind.__name__: _pairs(value.items(), tensors)}
    return _describe_rare(value, tensors)


def _describe_rare(value: Any, tensors: list[Tensor]) -> Structure:
    if type(value) is defaultdict:
        return {"defaultdict": [_factory(value), _pairs(value.items(), tensors)]}
    if type(value) is slice:
        return {"slice": _items((value.start, value.stop, value.step), tensors)}
    try:
        if isinstance(value, Enum):
            return describe_enum(value)
        record = record_of(type(value))
    except SpecError as error:
        raise _Refusal(f"a {type(value).__name__}", str(error)) from None
    if record is None:
        raise _Refusal(f"a value of type {type(value).__name__}", _remedy(value))
    return {"record": [record.name, _fields(record, value, tensors)]}


def _items(items: Sequence[Any], tensors: list[Tensor]) -> list[Structure]:
    found: list[Structure] = []
    for item in items:
        try:
            found.append(_describe(item, tensors))
        except _Refusal as refusal:
            raise refusal.inside(f"[{len(found)}]") from None
    return found


def _pairs(items: Any, tensors: list[Tensor]) -> list[list[Any]]:
    found: list[list[Any]] = []
    for key, item in items:
        # Strings and ints stand for themselves, but not bools, although they are ints too.
        named = key if type(key) in (str, int) else _key(key)
        try:
            found.append([named, _describe(item, tensors)])
        except _Refusal as refusal:
            raise refusal.inside(f"[{key!r}]") from None
    return found


def _key(key: Any) -> Structure:
    tensors: list[Tensor] = []
    try:
        found = _describe(key, tensors)
    except _Refusal:
        tensors = [Tensor()]
    if tensors:
        raise _Refusal(f"the key {key!r}", "keys are strings, numbers and other plain values")
    return found


def _fields(record: Record, value: Any, tensors: list[Tensor]) -> list[list[Any]]:
    found: list[list[Any]] = []
    for name, item in record.take(value):
        try:
            found.append([name, _describe(item, tensors)])
        except _Refusal as refusal:
            raise refusal.inside(f".{name}") from None
    return found


_FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (list, dict, tuple, str, bool, int, float, complex)
} | {"": None}


def _factory(value: defaultdict[Any, Any]) -> str:
    for name, factory in _FACTORIES.items():
        if value.default_factory is factory:
            return name
    raise _Refusal(
        f"a defaultdict of {value.default_factory}",
        "its factory can be list, dict, tuple, str, bool, int, float, complex or None; or use a dict",
    )


def _remedy(value: Any) -> str:
    if isinstance(value, set | frozenset):
        return "a set has no order that all ranks share; use a sorted tuple or list"
    if type(value).__module__ == "numpy":
        return "make a tensor of it with torch.as_tensor, or a plain number with .item()"
    return (
        "tensors, None, numbers, strings, enums, slices, torch's dtypes and devices can travel between "
        "stages, and tuples, lists, dicts, named tuples and dataclasses of them; register other types with "
        "penstock.values.register_type"
    )


# ---- and back


def unflatten(structure: Structure, tensors: Sequence[Any]) -> Any:
    """Put a value together from its structure and its tensors, or what stands for them.

    Raises:
        SpecError: it names a class that this program does not have.
    """
    if len(tensors) < len(_ROWS) and structure is _ROWS[len(tensors)]:
        return tuple(tensors)
    ((kind, content),) = structure.items()
    if kind == "tensor":
        return tensors[content]
    if kind in BUILD:
        return BUILD[kind](content)
    return _NEST[kind](content, tensors)


def _build_pairs(content: list[list[Any]], tensors: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    for key, item in content:
        named = unflatten(key, ()) if isinstance(key, dict) else key
        yield named, unflatten(item, tensors)


def _build_record(content: list[Any], tensors: Sequence[Any]) -> Any:
    name, fields = content
    return record_named(name).make(list(_build_pairs(fields, tensors)))


_NEST: dict[str, Callable[[Any, Sequence[Any]], Any]] = {
    "tuple": lambda content, tensors: tuple([unflatten(item, tensors) for item in content]),
    "list": lambda content, tensors: [unflatten(item, tensors) for item in content],
    "slice": lambda content, tensors: slice(*(unflatten(item, tensors) for item in content)),
    "dict": lambda content, tensors: dict(_build_pairs(content, tensors)),
    "OrderedDict": lambda content, tensors: OrderedDict(_build_pairs(content, tensors)),
    "defaultdict": lambda content, tensors: defaultdict(
        _FACTORIES[content[0]], _build_pairs(content[1], tensors)
    ),
    "record": _build_record,
}


# ---- paths


def leaves(structure: Structure, path: str = "") -> Iterator[tuple[str, Structure]]:
    """Each tensor and plain value with its path, such as ``[0]['mask']``, in order."""
    inner = _children(structure)
    if inner is None:
        yield path, structure
    for step, item in inner or ():
        yield from leaves(item, path + step)


def _children(structure: Structure) -> Iterator[tuple[str, Structure]] | None:
    """The items of a container, each with its step in the path; ``None`` for a leaf."""
    ((kind, content),) = structure.items()
    if kind in ("tuple", "list", "slice"):
        return ((f"[{index}]", item) for index, item in enumerate(content))
    if kind in ("dict", "OrderedDict", "defaultdict"):
        pairs = content[1] if kind == "defaultdict" else content
        return ((f"[{_shown(key)}]", item) for key, item in pairs)
    if kind == "record":
        return ((f".{name}", item) for name, item in content[1])
    return None


def _shown(key: Any) -> str:
    return repr(unflatten(key, ()) if isinstance(key, dict) else key)


def paths(structure: Structure) -> Iterator[str]:
    """The path of each tensor, in the order of the tensors."""
    return (path or "the tensor" for path, leaf in leaves(structure) if "tensor" in leaf)


def check(structure: Structure, tensors: int) -> None:
    """Check that a structure from another rank can be put together here, without doing it.

    Raises:
        SpecError: it names a class that this program does not have.
        LookupError, TypeError, ValueError: it is not a structure, or not for this many tensors.
    """
    ((kind, content),) = structure.items()
    inner = _children(structure)
    if kind == "record":
        record_named(content[0])
    if kind == "defaultdict":
        _ = _FACTORIES[content[0]]
    if kind == "tensor":
        _ = range(tensors)[content]
    elif inner is None:
        BUILD[kind](content)
    for _, item in inner or ():
        check(item, tensors)


def difference(expected: Structure, found: Structure) -> str | None:
    """How ``found`` differs from ``expected``, in words, or ``None``."""
    if expected == found:
        return None
    ours, theirs = dict(leaves(expected)), dict(leaves(found))
    for path in [*ours, *(path for path in theirs if path not in ours)]:
        wanted, there = ours.get(path), theirs.get(path)
        if _told(wanted) != _told(there):
            return f"{path or 'the value'}: expected {_told(wanted)}, found {_told(there)}"
    return f"expected the structure {expected}, found {found}"


def _told(leaf: Structure | None) -> str:
    if leaf is None:
        return "nothing there"
    ((kind, content),) = leaf.items()
    return "a tensor" if kind == "tensor" else repr(BUILD[kind](content))


# ---- values of any class, which need not be able to travel, taken apart level by level


class Opened(NamedTuple):
    """A nested value, taken apart by one level.

    Attributes:
        keys: the positions, keys or field names of its items.
        items: its items.
        made: makes a value of the same kind from other items.
        named: whether the items are fields, whose path has a dot.
    """

    keys: Sequence[Any]
    items: Sequence[Any]
    made: Callable[[Sequence[Any]], Any]
    named: bool = False

    def path(self, where: str, key: Any) -> str:
        """The path of an item, such as ``batch['mask']``."""
        return f"{where}.{key}" if self.named else f"{where}[{key!r}]"


def opened(value: Any) -> Opened | None:
    """Take a tuple, list, mapping or dataclass apart, also of a user's class; None for other values."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, Mapping):
        return Opened(
            list(value), list(value.values()), lambda items: _opened_mapping(value, items)
        )
    names = getattr(value, "_fields", None)
    if isinstance(value, tuple) and names is not None:
        return Opened(names, value, getattr(type(value), "_make"), named=True)  # noqa: B009 - no type knows it
    if isinstance(value, tuple | list):
        return Opened(range(len(value)), value, type(value))
    if is_dataclass(value) and not isinstance(value, type):
        return _opened_fields(value)
    return None


def _opened_fields(value: Any) -> Opened:
    names = [field.name for field in fields(value) if field.init]
    items = [getattr(value, name) for name in names]

    def made(changed: Sequence[Any]) -> Any:
        return replace(value, **dict(zip(names, changed, strict=True)))

    return Opened(names, items, made, named=True)


def _opened_mapping(value: Mapping[Any, Any], items: Sequence[Any]) -> Any:
    pairs = zip(value, items, strict=True)
    if not isinstance(value, MutableMapping):
        try:
            return type(value)(dict(pairs))  # type: ignore[call-arg] # a mapping's class makes one of a dict
        except Exception as error:
            raise UsageError(
                f"a {type(value).__name__} can neither be changed nor made from a dict ({error}), so it "
                "cannot be made for each microbatch: use a dict instead"
            ) from error
    # A copy keeps what else is in it, such as a defaultdict's factory or a tokenizer batch's encodings.
    made = copy.copy(value)
    for key, item in list(pairs):
        made[key] = item
    return made


def tensors_of(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in a value, each with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif found := opened(value):
        for key, item in zip(found.keys, found.items, strict=True):
            yield from tensors_of(item, found.path(path, key))


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A copy of a value, with every tensor replaced by ``change``."""
    if isinstance(value, Tensor):
        return change(value)
    found = opened(value)
    if found is None:
        return value
    return found.made([mapped(item, change) for item in found.items])
