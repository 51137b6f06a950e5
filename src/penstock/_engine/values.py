"""Values that travel between stages.

A value is tensors and plain values in containers, nested in any way. One walker takes containers apart, one
level at a time, and puts them together again; everything else here stands on it. What a value looks like
without its tensors' data is its :class:`Layout`, which travels once, as JSON; afterwards only bytes travel.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property, partial
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils import (
    _pytree as pytree,
)  # knows the classes that users register; it has no public name

from penstock._engine.masks import BlockMask, MaskContext, put_together, take_apart
from penstock.errors import SpecError, UsageError

# ---- the walker: one level of a value

PLAIN: frozenset[type] = frozenset({bool, int, float, str, type(None)})
"""The types of leaves that can travel beside tensors."""
_ATOMS: frozenset[type] = PLAIN | {complex, bytes, torch.dtype, torch.device, slice}
Leaves = list[Any]
Place: TypeAlias = tuple[Any, ...]
"""The path to a leaf inside a value: indices of sequences, keys of mappings, names of attributes."""


class _Name(str):
    """The key of an attribute."""

    __slots__ = ()


def path_of(place: Place) -> str:
    """A place as text."""
    return "".join(f".{key}" if type(key) is _Name else f"[{key!r}]" for key in place)


class _Container(NamedTuple):
    """How containers of some classes come apart, one level, and together again.

    What a container holds besides its children, such as the keys of a dict, is its *context*.

    Attributes:
        apart: (container) -> its context, and its children.
        together: (class, context, children) -> a container.
        keys: (container, context) -> the keys of its children.
        to_json: (class, context) -> the context as JSON data.
        of_json: (class, JSON data) -> the context.
    """

    apart: Callable[[Any], tuple[Any, Iterable[Any]]]
    together: Callable[[Any, Any, list[Any]], Any]
    keys: Callable[[Any, Any], Iterable[Any]] = lambda value, context: count()
    to_json: Callable[[Any, Any], Any] = lambda kind, context: context
    of_json: Callable[[Any, Any], Any] = lambda kind, data: None if data is None else tuple(data)


def _mapping_of(kind: Any, keys: Any, children: list[Any]) -> Any:
    items = dict(zip(keys, children, strict=True))
    return items if kind is dict else kind(items)


def _attributes(value: Any) -> tuple[Any, Iterable[Any]]:
    others = vars(value) if hasattr(value, "__dict__") else ()
    names = tuple(dict.fromkeys([*(f.name for f in fields(value)), *others]))
    return names, [getattr(value, name, None) for name in names]


def _dataclass_of(kind: Any, names: Any, children: list[Any]) -> Any:
    # Its ``__init__`` does not run, as the fields may be set otherwise.
    filled: Any = object.__new__(kind)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(filled, name, child)
    return filled


def _keys_of_registered(value: Any, context: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return tuple(value.keys())
    return map(_Name, value._fields) if hasattr(value, "_fields") else count()


def _registered_to_json(kind: Any, context: Any) -> Any:
    entry = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    write = None if entry is None else entry.to_dumpable_context
    return context if write is None else write(context)


def _registered_of_json(kind: Any, data: Any) -> Any:
    entry = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    read = None if entry is None else entry.from_dumpable_context
    return data if read is None else read(data)


_SEQUENCE = _Container(lambda value: (None, value), lambda kind, _, children: kind(children))
_NAMED_TUPLE = _SEQUENCE._replace(
    # This way also for a subclass such as PackedSequence, whose constructor does other things.
    together=lambda kind, _, children: tuple.__new__(kind, children),
    keys=lambda value, _: map(_Name, value._fields),
)
_MAPPING = _Container(
    lambda value: (tuple(value.keys()), value.values()), _mapping_of, lambda _, keys: keys
)
_DATACLASS = _Container(_attributes, _dataclass_of, lambda _, names: map(_Name, names))
_MASK = _Container(
    lambda mask: take_apart(mask)[::-1],
    lambda _, context, children: put_together(children, context),
    to_json=lambda _, context: context.facts,
    of_json=lambda _, facts: MaskContext(facts),
)
_REGISTERED = _Container(
    lambda value: pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[::-1],
    lambda kind, context, children: pytree.SUPPORTED_NODES[kind].unflatten_fn(children, context),
    _keys_of_registered,
    _registered_to_json,
    _registered_of_json,
)
"""For classes that are registered with ``torch.utils._pytree``."""


def _unregistered(kind: type) -> _Container | None:
    """Return how containers of a class come apart that nobody has registered; None if they are leaves."""
    if issubclass(kind, tuple | list):
        return _NAMED_TUPLE if hasattr(kind, "_fields") else _SEQUENCE
    if issubclass(kind, Mapping):
        return _MAPPING
    if issubclass(kind, BlockMask):
        return _MASK
    return _DATACLASS if is_dataclass(kind) else None


class _Containers(dict[type, _Container | None]):
    """How the containers of each class come apart; None for the classes of leaves.

    Only the commonest classes are kept, since others may be registered later.
    """

    def __missing__(self, kind: type) -> _Container | None:
        if issubclass(kind, Tensor):
            return None
        return _REGISTERED if kind in pytree.SUPPORTED_NODES else _unregistered(kind)


_COMMON: tuple[type, ...] = (
    Tensor, torch.nn.Parameter, *_ATOMS, tuple, list, dict, BlockMask
)  # fmt: skip
_CONTAINERS = _Containers({kind: _unregistered(kind) for kind in _COMMON})
_WITH_WHOLE_MASKS = _Containers({**_CONTAINERS, BlockMask: None})


def _like(value: Any, rule: _Container, context: Any, children: list[Any]) -> Any:
    """A container like ``value`` with other children; what else the object holds is the same."""
    kind = type(value)
    if kind in (tuple, list, dict):
        return rule.together(kind, context, children)
    is_mapping = isinstance(value, MutableMapping)
    # The copy of another mapping may share what it keeps its items in.
    is_copied = isinstance(value, dict | list) or (is_mapping and hasattr(kind, "__copy__"))
    if not is_copied:
        return rule.together(kind, context, children)
    twin: Any = copy.copy(value)
    if is_mapping:
        for key, child in zip(tuple(value.keys()), children, strict=True):
            twin[key] = child
    else:
        twin[:] = children
    return twin


# ---- whole values


class Structure(NamedTuple):
    """A value without its leaves.

    Args:
        kind: the class of the container; None for a leaf.
        context: what it holds besides its children, such as the keys of a dict.
        children: their structures.
    """

    kind: Any
    context: Any
    children: tuple[Any, ...]

    def __hash__(self) -> int:
        # A context need not be hashable.
        return hash((self.kind, self.children))

    def describe(self, what: str) -> Any:
        """The structure as JSON data.

        Raises:
            SpecError: there is no name for a class, or for something that it holds, in JSON.
        """
        if self.kind is None:
            return None
        children = [child.describe(what) for child in self.children]
        return [
            _class_name(self.kind, what),
            _context_as_json(self.kind, self.context, what),
            children,
        ]

    @staticmethod
    def read(text: Any) -> Structure:
        """The structure that :meth:`describe` told.

        Raises:
            SpecError: a class in it is not known in this process.
        """
        if text is None:
            return LEAF
        name, context, children = text
        kind = _find_class(name)
        return Structure(kind, _context_of(kind, context), tuple(map(Structure.read, children)))


LEAF = Structure(None, None, ())
"""The structure of a value that is one leaf."""


def flatten(value: Any, *, with_whole_masks: bool = False) -> tuple[Leaves, Structure]:
    """The leaves of a value, and its structure; block masks may count as leaves."""
    leaves: Leaves = []
    containers = _WITH_WHOLE_MASKS if with_whole_masks else _CONTAINERS
    return leaves, _flatten(value, leaves.append, containers)


def _flatten(value: Any, add: Callable[[Any], None], containers: _Containers) -> Structure:
    kind = type(value)
    rule = containers[kind]
    if rule is None:
        add(value)
        return LEAF
    context, children = rule.apart(value)
    return Structure(kind, context, tuple([_flatten(x, add, containers) for x in children]))


def unflatten(leaves: Leaves, structure: Structure) -> Any:
    """The value with these leaves."""
    return leaves[0] if structure is LEAF else _unflatten(iter(leaves), structure)


def _unflatten(leaves: Iterator[Any], structure: Structure) -> Any:
    kind, context, children = structure
    rule = None if kind is None else _CONTAINERS[kind]
    if rule is None:
        return next(leaves)
    return rule.together(kind, context, [_unflatten(leaves, child) for child in children])


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """The value with ``function`` applied to each tensor: new containers, all else is the same object."""
    rule = _CONTAINERS[type(value)]
    if rule is None:
        return function(value) if isinstance(value, Tensor) else value
    context, children = rule.apart(value)
    return _like(value, rule, context, [map_tensors(child, function) for child in children])


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a value, in order."""
    if isinstance(value, Tensor):
        return [value]
    tensors: list[Tensor] = []
    _collect(value, tensors.append)
    return tensors


def _collect(value: Any, add: Callable[[Tensor], None]) -> None:
    if isinstance(value, Tensor):
        add(value)
    elif (rule := _CONTAINERS[type(value)]) is not None:
        for child in rule.apart(value)[1]:
            _collect(child, add)


def leaves_in(value: Any, *, with_whole_masks: bool = False) -> list[tuple[Place, Any]]:
    """The leaves of a value with their places, in order; block masks may count as leaves."""
    leaves: list[tuple[Place, Any]] = []
    _place(value, (), leaves.append, _WITH_WHOLE_MASKS if with_whole_masks else _CONTAINERS)
    return leaves


def _place(
    value: Any, at: Place, add: Callable[[tuple[Place, Any]], None], containers: _Containers
) -> None:
    rule = containers[type(value)]
    if rule is None:
        add((at, value))
        return
    context, children = rule.apart(value)
    for key, child in zip(rule.keys(value, context), children, strict=False):
        _place(child, (*at, key), add, containers)


class Items(NamedTuple):
    """A container one level apart.

    Attributes:
        of: its children by their keys.
        build: returns a container like it with other children.
    """

    of: dict[Any, Any]
    build: Callable[[list[Any]], Any]


def items_of(value: Any) -> Items | None:
    """The items of a container; None for a leaf."""
    rule = _CONTAINERS[type(value)]
    if rule is None:
        return None
    context, children = rule.apart(value)
    keys = rule.keys(value, context)
    return Items(dict(zip(keys, children, strict=False)), partial(_like, value, rule, context))


def named_leaves(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """The leaves of a value, each with its path as text, which begins with ``name``."""
    return [(name + path_of(place), leaf) for place, leaf in leaves_in(value)]


# ---- structures as JSON


def _class_name(kind: type, what: str) -> str:
    entry = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    if entry is not None and entry.serialized_type_name != pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
        return entry.serialized_type_name
    name = f"{kind.__module__}:{kind.__qualname__}"
    if not _is_container(kind):
        raise SpecError(
            f"in {what} is a {kind.__module__}.{kind.__qualname__}, which cannot travel between stages: it "
            "is registered with torch.utils._pytree without serialized_type_name=; pass that, or a tuple"
        )
    return name


def _is_container(kind: Any) -> bool:
    """Tell whether objects of a class are taken apart although nobody has registered it."""
    return isinstance(kind, type) and _unregistered(kind) is not None


def is_container(kind: type) -> bool:
    """Tell whether objects of a class are taken apart; others are leaves."""
    return _CONTAINERS[kind] is not None


def _find_class(name: str) -> type:
    """The class that a description names, if this process has imported its module.

    A message never makes a rank import a module.
    """
    if name in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE:
        return pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[name]
    module, _, path = name.partition(":")
    kind: Any = sys.modules.get(module)
    for step in path.split("."):
        kind = getattr(kind, step, None)
    if not _is_container(kind):
        raise SpecError(
            f"a value of another rank has a class that this one does not know ({name}); define it at "
            "the top level of a module that every rank imports"
        )
    container: type = kind
    return container


def _context_as_json(kind: type, context: Any, what: str) -> Any:
    rule = _CONTAINERS[kind]
    assert rule is not None
    data = rule.to_json(kind, context)
    try:
        data = json.loads(json.dumps(data))
        travels = rule is _REGISTERED or rule.of_json(kind, data) == context
    except (TypeError, ValueError):
        travels = False
    if not travels:
        raise SpecError(
            f"in {what} is a {kind.__qualname__} with {context!r}, which cannot travel between stages; use "
            "texts and numbers as keys"
        )
    return data


def _context_of(kind: type, data: Any) -> Any:
    rule = _CONTAINERS[kind]
    assert rule is not None
    return rule.of_json(kind, data)


# ---- what a value looks like


class TensorLayout(NamedTuple):
    """A tensor without its data.

    Attributes:
        shape: its sizes.
        dtype: its type, such as ``float32``.
        strides: its strides where they are not those of a contiguous tensor, in elements.
        learns: whether it requires grad.
        sharding: how it is distributed over a mesh, if it is a DTensor; in JSON.
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None
    learns: bool
    sharding: Any = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its type."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        """The bytes of its data."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.torch_dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        """A contiguous tensor to receive its data into."""
        return torch.empty(self.shape, dtype=self.torch_dtype, device=device)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" + (" that requires grad" if self.learns else "")


def layout_of(tensor: Tensor) -> TensorLayout:
    """The layout of a plain tensor."""
    strides = None if tensor.is_contiguous() else tuple(tensor.stride())
    name = str(tensor.dtype).removeprefix("torch.")
    return TensorLayout(tuple(tensor.shape), name, strides, tensor.requires_grad)


def restrided(tensor: Tensor, strides: Sequence[int] | None) -> Tensor:
    """A contiguous tensor laid out in memory with other strides, as its sender had it.

    Code may ask for ``contiguous()`` and then write in place: whether that writes into a copy depends on the
    strides, so they arrive as they were sent. Elements that overlap hold one number, whichever comes last.
    """
    if strides is None or tuple(tensor.stride()) == tuple(strides):
        return tensor
    expanded = [step == 0 and size > 1 for step, size in zip(strides, tensor.shape, strict=True)]
    compact = tensor
    for dim, repeats in enumerate(expanded):
        if repeats:
            compact = compact.narrow(dim, 0, 1)
    laid = torch.empty_strided(compact.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return laid.copy_(compact).expand(tensor.shape) if any(expanded) else laid.copy_(compact)


@dataclass(frozen=True)
class Layout:
    """What a value looks like: its structure, and for each leaf a tensor's layout or a plain value."""

    tree: Structure
    leaves: tuple[Any, ...]

    def describe(self) -> list[Any]:
        """The layout as JSON data."""
        leaves = [["t", *x] if isinstance(x, TensorLayout) else ["p", x] for x in self.leaves]
        return [self.tree.describe("a value"), leaves]

    @staticmethod
    def read(text: list[Any]) -> Layout:
        """The layout that :meth:`describe` told.

        Raises:
            SpecError: a class in it is not known in this process.
        """
        tree, leaves = text
        return Layout(Structure.read(tree), tuple(map(_leaf_of, leaves)))

    @cached_property
    def tensors(self) -> list[TensorLayout]:
        """The tensors among its leaves."""
        return [x for x in self.leaves if isinstance(x, TensorLayout)]


def _leaf_of(entry: list[Any]) -> Any:
    if entry[0] == "p":
        return entry[1]
    shape, dtype, strides, learns, sharding = entry[1:]
    return TensorLayout(
        tuple(shape), dtype, None if strides is None else tuple(strides), learns, sharding
    )


def layout_in(value: Any) -> Layout:
    """The layout of a value that can travel."""
    leaves, tree = flatten(value)
    return Layout(tree, tuple(layout_of(x) if isinstance(x, Tensor) else x for x in leaves))


def check_plain(value: Any, what: str) -> None:
    """Check that everything in a value can travel.

    Raises:
        SpecError: a leaf is neither a tensor nor a plain value, and the message gives its path; or a class
            has no name that other ranks know.
    """
    flatten(value)[1].describe(what)
    for path, leaf in named_leaves(value, what):
        if isinstance(leaf, Tensor):
            check_tensor(leaf, path)
        elif type(leaf) not in PLAIN:
            raise SpecError(
                f"{path} is a {type(leaf).__name__}, which cannot travel between stages; give tensors, "
                "numbers, texts and None, in tuples, lists, dicts, dataclasses and named tuples, or register "
                "the class with torch.utils._pytree.register_pytree_node on every rank"
            )


def check_tensor(tensor: Tensor, path: str) -> None:
    """Check that a tensor can travel.

    Raises:
        SpecError: it is sparse, nested or quantized.
    """
    kind = storage_of(tensor)
    if kind != "strided":
        raise SpecError(
            f"{path} is a {kind} tensor, which cannot travel between stages; give its parts as plain tensors"
        )


def storage_key(tensor: Tensor) -> int:
    """A number for the memory of a tensor and its views while it is alive; below 0 if it has none."""
    if tensor.layout is not torch.strided:
        return -id(tensor)
    try:
        # No public attribute tells one storage without data from another. As of torch 2.13.
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, UsageError):
        return -id(tensor)


def storage_of(tensor: Tensor) -> str:
    """Return how a tensor holds its data, in a word: ``strided`` if it is an ordinary one."""
    if tensor.is_nested or tensor.is_quantized:
        return "nested" if tensor.is_nested else "quantized"
    return str(tensor.layout).removeprefix("torch.")


# ---- sizes


def bytes_as_text(number: float) -> str:
    """A size in a suitable unit, such as ``1.5 GiB``."""
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.0f} B"
