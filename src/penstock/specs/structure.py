"""Take a nested value apart into its tensors and a description of the rest, and put it together again.

The description is plain JSON data, so that it can be sent and compared without pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from penstock.errors import SpecError

Structure = dict[str, Any]
"""JSON data: ``{"tensor": 0}``, ``{"int": 3}``, ``{"tuple": [...]}``, ``{"dict": [[key, ...]]}``.

Plain values stand under their type, floats as text: ``1``, ``1.0`` and ``True`` differ, and not-a-number
equals itself.
"""

_TENSOR: Structure = {"tensor": 0}


def flatten(value: Any) -> tuple[list[Tensor], Structure]:
    """Take a value apart.

    Args:
        value: a tensor, ``None``, bool, int, float or string, or tuples, lists and dicts of such.

    Returns:
        The tensors in order, and the structure that :func:`unflatten` takes.

    Raises:
        SpecError: something of another type; the message says where it stands.
    """
    if isinstance(value, Tensor):
        return [value], _TENSOR
    if type(value) is tuple and all(isinstance(item, Tensor) for item in value):
        return list(value), {"tuple": [{"tensor": index} for index in range(len(value))]}
    tensors: list[Tensor] = []
    return tensors, _describe(value, tensors, "")


def _describe(value: Any, tensors: list[Tensor], path: str) -> Structure:
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if value is None or type(value) in (bool, int, str):
        return {type(value).__name__: value}
    if type(value) is float:
        return {"float": repr(value)}
    if type(value) in (tuple, list):
        items = [_describe(item, tensors, f"{path}[{i}]") for i, item in enumerate(value)]
        return {type(value).__name__: items}
    if type(value) is dict:
        return {"dict": [_describe_item(key, item, tensors, path) for key, item in value.items()]}
    raise SpecError(
        f"a value of type {type(value).__name__} stands at {path or 'the top'}; between stages travel "
        "tensors, None, bools, ints, floats, strings, and tuples, lists and dicts of them"
    )


def _describe_item(key: Any, item: Any, tensors: list[Tensor], path: str) -> list[Any]:
    if type(key) not in (str, int):
        raise SpecError(f"the key {key!r} at {path or 'the top'} must be a string or an int")
    return [key, _describe(item, tensors, f"{path}[{key!r}]")]


def unflatten(structure: Structure, tensors: Sequence[Any]) -> Any:
    """Put a value together from its structure and what stands for its tensors."""
    ((kind, content),) = structure.items()
    return _BUILD[kind](content, tensors)


def _build_tuple(content: list[Structure], tensors: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(unflatten(item, tensors) for item in content)


def _build_list(content: list[Structure], tensors: Sequence[Any]) -> list[Any]:
    return [unflatten(item, tensors) for item in content]


def _build_dict(content: list[list[Any]], tensors: Sequence[Any]) -> dict[Any, Any]:
    return {key: unflatten(item, tensors) for key, item in content}


_BUILD: dict[str, Callable[[Any, Sequence[Any]], Any]] = {
    "tensor": lambda index, tensors: tensors[index],
    "NoneType": lambda _, __: None,
    "bool": lambda value, _: value,
    "int": lambda value, _: value,
    "str": lambda value, _: value,
    "float": lambda text, _: float(text),
    "tuple": _build_tuple,
    "list": _build_list,
    "dict": _build_dict,
}


def paths(structure: Structure, path: str = "") -> Iterator[str]:
    """Where each tensor stands, in the order of the tensors, such as ``[0]['mask']``."""
    ((kind, content),) = structure.items()
    if kind == "tensor":
        yield path or "the tensor"
    elif kind in ("tuple", "list"):
        for index, item in enumerate(content):
            yield from paths(item, f"{path}[{index}]")
    elif kind == "dict":
        for key, item in content:
            yield from paths(item, f"{path}[{key!r}]")
