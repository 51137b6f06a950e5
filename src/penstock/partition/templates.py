"""Templates: what a call was made with, as nested tuples that can be compared and filled in again.

A template names the values of a score that stand in it. What differs between microbatches of one call
signature (real tensors, floats, the author's own lists and objects) is *given*: the template has its index,
and each microbatch a list.

A leaf is a tag with what it names. All else is a tag, how it is found or made, its kind, the keys of its
contents, and their templates.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dis import get_instructions
from enum import Enum
from functools import cache, partial
from itertools import chain
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock._engine.values import Items, items_of
from penstock.partition.snapshot import put_back

Template: TypeAlias = tuple[Any, ...]
Number: TypeAlias = tuple[int, int] | str
"""A value: the line that makes it and its place there, or the name of a weight."""
Look: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, bool]
"""The shape, strides, type and device of a tensor, and whether it learns."""
BATCH = -1
"""Stands for the line that makes a tensor of the batch, if that learns."""
VALUE, GIVEN, CONST, TUPLE, NEW, KNOWN, AGAIN, BUILT = (
    "value",
    "given",
    "const",
    "tuple",
    "new",
    "known",
    "again",
    "built",
)
_PLAIN = frozenset({bool, int, str, bytes, complex, type(None), type(Ellipsis)})
_NUMBERS = frozenset({bool, int, float, str})
_TORCHS = frozenset({torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size})
_CODE = (type, BuiltinFunctionType, ModuleType, nn.Module, torch.Generator, Enum)
_FUNCTIONS = (FunctionType, MethodType, partial)


def look_of(tensor: Tensor) -> Look:
    """The look of a tensor."""
    strides = tensor.stride() if tensor.layout is torch.strided else ()
    return tensor.shape, strides, tensor.dtype, tensor.device, tensor.requires_grad


def takes_gradient(tensor: Tensor) -> bool:
    """Tell whether a gradient can come back to a tensor.

    A view of a weight that was made under ``no_grad`` claims to require a gradient, yet has no node.
    """
    try:
        return tensor.requires_grad and not (tensor.grad_fn is None and tensor._is_view())
    except RuntimeError:
        # One of several views that were made at once has no node after its base has changed.
        return True


def contents(thing: Any) -> tuple[tuple[Any, ...], list[Any]]:
    """The keys and the values of a list, a deque, a dictionary or an object."""
    if isinstance(thing, list | deque):
        return (len(thing),), list(thing)
    inside = thing if isinstance(thing, dict) else vars(thing)
    return tuple(inside), list(inside.values())


def put_contents(thing: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
    """Give a list, a deque, a dictionary or an object other contents."""
    if isinstance(thing, list | deque):
        put_back(thing, values)
    elif type(thing) is dict or not isinstance(thing, dict):
        put_back(thing, dict(zip(keys, values, strict=True)))
    else:
        for key in [key for key in thing if key not in keys]:
            dict.__delitem__(thing, key)
        for key, value in zip(keys, values, strict=True):
            thing[key] = value
    return thing


def apart(value: Any) -> Items | None:
    """The items of a container, or what a function encloses with its defaults; None for a leaf.

    A function that writes to what it encloses, such as a counter, is a leaf: the author wants its own one.
    """
    if type(value) is not FunctionType:
        return items_of(value)
    code, cells = value.__code__, value.__closure__ or ()
    if not (cells or value.__defaults__ or value.__kwdefaults__) or _written(code):
        return None
    enclosed = dict(zip(code.co_freevars, cells, strict=True))
    full = {name: cell.cell_contents for name, cell in enclosed.items() if cell != CellType()}
    if any(one is value for one in full.values()):
        return None  # it calls itself

    def build(parts: list[Any]) -> Any:
        """The function with other contents: the author's own stays as it is."""
        defaults, named, *inside = parts
        new = dict(zip(full, map(CellType, inside), strict=True))
        closure = tuple(new.get(name, cell) for name, cell in enclosed.items())
        twin = FunctionType(code, value.__globals__, value.__name__, defaults, closure)
        twin.__kwdefaults__, twin.__qualname__ = named, value.__qualname__
        vars(twin).update(vars(value))
        return twin

    of = {"defaults": value.__defaults__, "keyword defaults": value.__kwdefaults__, **full}
    return Items(of, build)


def written_outside(value: Any) -> tuple[str, ...]:
    """The variables around a function that it sets, such as a counter."""
    return _written(value.__code__) if type(value) is FunctionType else ()


@cache
def _written(code: CodeType) -> tuple[str, ...]:
    inner = [_written(one) for one in code.co_consts if isinstance(one, CodeType)]
    names = [one.argval for one in get_instructions(code) if one.opname == "STORE_DEREF"]
    return tuple(n for n in [*names, *chain(*inner)] if n in code.co_freevars)


def is_leaf(template: Template) -> bool:
    """Tell whether a template has no other templates in it."""
    return len(template) < _SIZE


def tuple_template(kind: type, inner: Sequence[Template]) -> Template:
    """The template of a tuple, a list that counts by its items alone, or a slice."""
    return (TUPLE, None, kind, (), tuple(inner))


NOTHING = tuple_template(tuple, ())
_SIZE = len(NOTHING)


def _tuple_of(kind: Any, items: list[Any]) -> Any:
    """A tuple, named tuple, list or slice of a kind."""
    if kind is slice:
        return slice(*items)
    return kind._make(items) if hasattr(kind, "_make") else kind(items)


def fill(template: Template, values: Mapping[Any, Any], given: Sequence[Any]) -> Any:
    """Return what a template stands for, with these values."""
    tag = template[0]
    if tag is VALUE:
        return values[template[1]]
    if tag is CONST:
        return template[2]
    if tag is GIVEN or tag is AGAIN:
        return given[template[1]]
    if tag is TUPLE:
        return _tuple_of(template[2], [fill(inner, values, given) for inner in template[4]])
    if tag is BUILT:
        return template[1].build([fill(inner, values, given) for inner in template[4]])
    _, index, kind, keys, inner = template
    thing = given[index] if tag is KNOWN else kind.__new__(kind)
    if tag is NEW and index is not None:
        thing.default_factory = index
    return put_contents(thing, keys, [fill(one, values, given) for one in inner])


def bind(template: Template, actual: Any, line: int, values: dict[Any, Any]) -> None:
    """Note the values that a line has made, where the template of its result has them.

    Raises:
        LookupError: what it has made has another structure.
    """
    tag = template[0]
    if tag is VALUE:
        if template[1][0] == line:
            values[template[1]] = actual
    elif tag is CONST:
        if template[1] in _NUMBERS and actual != template[2]:
            raise LookupError(f"{actual!r} in place of {template[2]!r}")
    elif tag is TUPLE:
        items = _slice_items(actual) if isinstance(actual, slice) else actual
        if not isinstance(items, tuple | list) or len(items) != len(template[4]):
            raise LookupError(_size_of(items) + f" in place of {len(template[4])} items")
        for inner, item in zip(template[4], items, strict=True):
            bind(inner, item, line, values)
    elif tag is BUILT:
        inside = apart(actual)
        if inside is None or len(inside.of) != len(template[4]):
            name = getattr(template[2], "__name__", "function")
            raise LookupError(f"a {type(actual).__name__} in place of a {name}")
        for inner, item in zip(template[4], inside.of.values(), strict=True):
            bind(inner, item, line, values)
    elif tag is NEW or tag is KNOWN:
        if isinstance(actual, Tensor) or not (
            isinstance(actual, list | deque | dict) or hasattr(actual, "__dict__")
        ):
            raise LookupError(f"a {type(actual).__name__} in place of a {template[2].__name__}")
        items = contents(actual)[1]
        if len(items) != len(template[4]):
            raise LookupError(_size_of(items) + f" in place of {len(template[4])} items")
        for inner, item in zip(template[4], items, strict=True):
            bind(inner, item, line, values)


def _slice_items(value: slice) -> tuple[Any, ...]:
    return value.start, value.stop, value.step


def _size_of(actual: Any) -> str:
    return f"{len(actual)} items" if hasattr(actual, "__len__") else f"a {type(actual).__name__}"


def leaves_of(template: Template, *, inside: bool = True) -> Iterator[Template]:
    """The leaves of a template; those inside of the author's lists and objects only if asked for."""
    if is_leaf(template):
        yield template
    elif inside or template[0] is not KNOWN:
        for inner in template[4]:
            yield from leaves_of(inner, inside=inside)


def known_in(template: Template) -> Iterator[Template]:
    """The author's lists, dictionaries and objects in a template."""
    if template[0] is KNOWN:
        yield template
    for inner in () if is_leaf(template) else template[4]:
        yield from known_in(inner)


def with_leaves(template: Template, leaf: Callable[[Template], Template]) -> Template:
    """A template with other leaves, each made of the one in its place."""
    if is_leaf(template):
        return leaf(template)
    return (*template[:4], tuple([with_leaves(one, leaf) for one in template[4]]))


def text_of(template: Any) -> str:
    """A text that is equal in all processes for equal templates."""
    if not isinstance(template, tuple):
        return _text(template)
    if template and template[0] is CONST:
        return f"{template[1].__qualname__}:{_text(template[2])}"
    return f"({','.join(map(text_of, template))})"


def _text(value: Any) -> str:
    if type(value) in _PLAIN or type(value) is float:
        return repr(value)
    if isinstance(value, torch.device):
        return value.type
    if type(value) in _TORCHS:
        return str(value)
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else type(value).__qualname__


class _Builder:
    """Builds a function, or a container that holds its items in no dictionary; equal to any other."""

    def __init__(self, items: Items) -> None:
        self.build = items.build

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Builder)

    def __hash__(self) -> int:
        return 0


class Reader:
    """Reads the templates of values.

    Args:
        number_of: the number of a tensor that is a value; None for others.
        other: reads a tensor that is none, and may add it to what is given.
        fixed: the identities of objects that are the same in every call.
        as_call: whether floats and functions are given, as in a call; else they are part of the template.
        opaque: reads a value that cannot be looked into, such as a set; by default it is given.
    """

    def __init__(
        self,
        number_of: Callable[[int], Any],
        other: Callable[[Tensor, list[Any]], Template],
        fixed: Mapping[int, Any],
        *,
        as_call: bool = True,
        opaque: Callable[[Any], Template] | None = None,
    ) -> None:
        self._number_of, self._other, self._fixed = number_of, other, fixed
        self._as_call, self._opaque_as = as_call, opaque

    def read(self, value: Any, given: list[Any], *, copies: bool = False) -> Template:
        """The template of a value."""
        if isinstance(value, Tensor):
            number = self._number_of(id(value))
            return (VALUE, number) if number is not None else self._other(value, given)
        kind = type(value)
        if kind in _PLAIN:
            return (CONST, kind, value)
        if kind is float:
            if not self._as_call:
                return (CONST, kind, value)
            given.append(value)
            return (GIVEN, len(given) - 1, float)
        if kind is tuple:
            return tuple_template(kind, [self.read(one, given, copies=copies) for one in value])
        if kind is slice:
            return tuple_template(kind, [self.read(one, given) for one in _slice_items(value)])
        if kind in _TORCHS or isinstance(value, _CODE) or id(value) in self._fixed:
            return (CONST, kind, value)
        if isinstance(value, tuple) or (kind is list and copies):
            return tuple_template(kind, [self.read(one, given, copies=copies) for one in value])
        if isinstance(value, _FUNCTIONS) or not (
            isinstance(value, list | deque | dict) or hasattr(value, "__dict__")
        ):
            items = apart(value)
            if items is None:
                return self._opaque(kind, value, given)
            # What a function encloses when it is given counts, not when it is played.
            of_kind = value.__code__ if isinstance(value, FunctionType) else kind
            inner = tuple([self.read(one, given, copies=copies) for one in items.of.values()])
            return (BUILT, _Builder(items), of_kind, tuple(items.of), inner)
        index = next((i for i, one in enumerate(given) if one is value), None)
        if index is not None and self._as_call:
            return (AGAIN, index)
        tag = NEW
        if index is not None or self._as_call:
            tag = KNOWN
        if tag is KNOWN and index is None:
            index = len(given)
            given.append(value)
        like: Any = value.default_factory if isinstance(value, defaultdict) else None
        keys, held = contents(value)
        templates = tuple([self.read(one, given) for one in held])
        return (tag, index if tag is KNOWN else like, kind, keys, templates)

    def _opaque(self, kind: type, value: Any, given: list[Any]) -> Template:
        """A value that cannot be looked into; of methods, the code counts."""
        number = self._number_of(id(value))
        if number is not None:
            return (VALUE, number)
        if self._opaque_as is not None and not isinstance(value, _FUNCTIONS):
            return self._opaque_as(value)
        if not self._as_call:
            return (CONST, kind, value)
        given.append(value)
        code = getattr(value, "__code__", None)
        return (GIVEN, len(given) - 1, kind if code is None else code)
