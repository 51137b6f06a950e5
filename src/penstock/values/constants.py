"""Values without tensors, each as JSON data under the name of its kind.

Floats and complex numbers stand as text: ``1``, ``1.0`` and ``True`` differ, and not-a-number equals itself.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, Flag
from typing import Any

import torch

from penstock.errors import SpecError
from penstock.values.classes import enum_named, name_of

Structure = dict[str, Any]
"""How a value is nested, as JSON data."""


def _named(kind: type) -> dict[str, Any]:
    """Torch's own objects of a type, such as all dtypes, by name."""
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
    """A member of an enum by its class and name; flags put together by their number.

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
