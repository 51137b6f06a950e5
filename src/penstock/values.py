"""Values that travel between stages, and batches that are split into microbatches.

A value is tensors and plain values in containers, nested in any way. One walker takes containers apart, one
level at a time, and puts them together again; everything else here stands on it. What a value looks like
without its tensors' data is its :class:`Layout`, which travels once, as JSON; afterwards only bytes travel.
"""

from __future__ import annotations

import copy
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, count, pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils import (
    _pytree as pytree,
)  # knows the classes that users register; it has no public name

from penstock.errors import MicrobatchError, SpecError
from penstock.masks import (
    BlockMask,
    MaskContext,
    put_together,
    samples_of,
    split_mask,
    take_apart,
)
from penstock.tokens import (
    BOUNDS,
    MASK,
    ORDINALS,
    POSITIONS,
    Row,
    Share,
    bounds_by_rows,
    even_sizes,
    find_row,
    labels_that_count,
    narrowed,
    trimmed,
)

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


def _at(key: Any) -> str:
    return f".{key}" if type(key) is _Name else f"[{key!r}]"


def _path(place: Place) -> str:
    """A place as text."""
    return "".join(map(_at, place))


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
    """How containers of a class come apart that nobody has registered; None if they are leaves."""
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
    if not is_mapping and not isinstance(value, list):
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

    def is_leaf(self) -> bool:
        """Whether the value is one leaf."""
        return self.kind is None

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


def flatten(value: Any) -> tuple[Leaves, Structure]:
    """The leaves of a value, and its structure."""
    leaves: Leaves = []
    return leaves, _flatten(value, leaves.append, _CONTAINERS)


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


def located(value: Any) -> dict[Place, Tensor]:
    """The tensors of a value by their places, in order."""
    return {place: leaf for place, leaf in leaves_in(value) if isinstance(leaf, Tensor)}


def plain_in(value: Any) -> list[bool | float | str]:
    """The plain values of a value, in order."""
    return [leaf for _, leaf in leaves_in(value) if type(leaf) in (bool, int, float, str)]


def opaque_in(value: Any) -> dict[Place, Any]:
    """The objects in a value that are not taken apart, such as caches, by their places."""
    return {
        place: leaf
        for place, leaf in leaves_in(value)
        if not isinstance(leaf, Tensor) and type(leaf) not in _ATOMS
    }


def without(value: Any, keys: set[Any]) -> Any:
    """A mapping or sequence with ``None`` under some keys."""
    rule = _CONTAINERS[type(value)]
    if rule is None or not isinstance(value, Mapping | tuple | list):
        return value
    context, children = rule.apart(value)
    pairs = zip(rule.keys(value, context), children, strict=False)
    return _like(value, rule, context, [None if key in keys else child for key, child in pairs])


def named_leaves(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """The leaves of a value, each with its path as text, which begins with ``name``."""
    return [(name + _path(place), leaf) for place, leaf in leaves_in(value)]


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
    """Whether objects of a class are taken apart although nobody has registered it."""
    return isinstance(kind, type) and _unregistered(kind) is not None


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
    kind = _kind_of(tensor)
    if kind != "strided":
        raise SpecError(
            f"{path} is a {kind} tensor, which cannot travel between stages; give its parts as plain tensors"
        )


def _kind_of(tensor: Tensor) -> str:
    """How a tensor holds its data, in a word: ``strided`` if it is an ordinary one."""
    if tensor.is_nested or tensor.is_quantized:
        return "nested" if tensor.is_nested else "quantized"
    return str(tensor.layout).removeprefix("torch.")


# ---- a batch that is split


@dataclass
class Microbatch:
    """One part of a batch.

    Args:
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        samples: the number of samples that it holds; 0 if no argument is split.
        kind: parts of a batch that have the same kind differ only in their data; ``None`` if that is
            unknown.
        local: keyword arguments of any type that stay in this process and are not described to others.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    samples: int
    kind: int | None = None
    local: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """What a process brings to a call of the pipeline.

    Args:
        parts: the microbatches; ``None`` if this process was given no arguments.
        targets: for each microbatch, what the loss compares with; ``None`` if no target was given.
        samples: the number of samples of each microbatch; ``None`` if that is not known here.
        count: the number of microbatches; ``None`` if that is not known here.
        presplit: whether the user has split the batch; its outputs are then not merged either.
        counted: whether the samples are those of first tensors, since nobody said what counts them.
        weights: how much each microbatch counts in a mean, where that is not its samples.
        dim: the dimension along which outputs are put together, where rules do not say it.
    """

    parts: Sequence[Microbatch] | None = None
    targets: Sequence[Any] | None = None
    samples: Sequence[int] | None = None
    count: int | None = None
    presplit: bool = False
    counted: bool = False
    weights: Sequence[int] | None = None
    dim: int | None = None

    @property
    def values(self) -> Any:
        """All that this process was given."""
        return [(part.args, part.kwargs) for part in self.parts or ()], self.targets


class _Missing:
    """The type of :data:`MISSING`."""

    def __repr__(self) -> str:
        return "nothing"


MISSING: Any = _Missing()
"""Stands for an argument that was not passed, since ``None`` is a value that may be passed."""


class Microbatches:
    """A batch that is already split, possibly into microbatches of different lengths.

    It takes the place of the model's arguments: ``pipe.step(Microbatches(calls), target=targets)``, where
    ``targets`` is a list with one target for each. A rank that needs only the targets is given
    ``target=Microbatches(targets)``.

    Args:
        calls: the arguments of each microbatch: a tuple, a dict by name, or the only argument itself.
        targets: what the loss compares with in each microbatch; may be passed as ``target=`` instead.
        samples: the number of samples of each, which is its weight in a mean; by default, the size of its
            target's first tensor in dimension 0, or of its own where there is none in the target.

    Raises:
        MicrobatchError: there are no microbatches, or the lists have different lengths.
    """

    def __init__(
        self,
        calls: Sequence[Any],
        *,
        targets: Sequence[Any] | None = None,
        samples: Sequence[int] | None = None,
    ) -> None:
        if not calls:
            raise MicrobatchError("Microbatches([]) holds no microbatches; give at least one")
        lists = {"samples": samples, "targets": targets}
        wrong = {n: len(x) for n, x in lists.items() if x is not None and len(x) != len(calls)}
        if wrong:
            raise MicrobatchError(f"{len(calls)} microbatches, but {wrong}; give one for each")
        self.calls = calls
        self.targets = targets
        split = [_arguments(call) for call in calls]
        counts = samples or [_count_samples(pair) for pair in split]
        self._counted = not samples
        self.parts = tuple(
            Microbatch(args, kwargs, count)
            for (args, kwargs), count in zip(split, counts, strict=True)
        )

    def __len__(self) -> int:
        return len(self.parts)

    def batch(self, target: Any) -> Batch:
        """What the pipeline takes.

        Raises:
            MicrobatchError: targets were passed twice, or not one for each microbatch.
        """
        if target is not MISSING and target is not None and self.targets is not None:
            raise MicrobatchError(
                "targets were passed both in Microbatches(targets=...) and as target=; pass one of them"
            )
        targets = target if self.targets is None else self.targets
        if targets is None:
            targets = [None] * len(self)
        samples = [part.samples for part in self.parts]
        batch = Batch(self.parts, None, samples, len(self), presplit=True, counted=self._counted)
        if targets is MISSING:
            return batch
        if not isinstance(targets, Sequence) or len(targets) != len(self):
            what = len(targets) if isinstance(targets, Sequence) else type(targets).__name__
            raise MicrobatchError(
                f"{len(self)} microbatches, but target={what}; give a list of one target for each"
            )
        samples = _counted(targets, samples) if self._counted else samples
        return replace(batch, targets=targets, samples=samples)


def _arguments(call: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if type(call) is tuple:
        return call, {}
    if type(call) is dict and all(isinstance(key, str) for key in call):
        return (), call
    return (call,), {}


def _count_samples(value: Any) -> int:
    """How many samples a value holds that no rule says: the size of its first tensor in dimension 0."""
    return next((tensor.shape[0] for tensor in tensors_in(value) if tensor.dim()), 0)


def _counted(targets: Sequence[Any], samples: Sequence[int]) -> list[int]:
    """The samples of microbatches by their targets, or as they are if these do not say.

    Arguments may be larger than what they are about: a graph has one target, and many nodes.
    """
    of_targets = [_count_samples(target) for target in targets]
    return of_targets if of_targets and all(of_targets) else list(samples)


# ---- rules: how each argument is split


@dataclass(frozen=True)
class Split:
    """Split every tensor of an argument along a dimension.

    Args:
        dim: the dimension; None splits a list or tuple by its entries, each of which is one sample.
        by: what microbatches have about the same number of: ``"samples"`` or ``"tokens"``. The tokens of
            padded sequences are those in ``attention_mask``, or in the argument if it is such a mask;
            what is padding in all sequences of a microbatch is left out. The tokens of entries of a list are
            their lengths. Sequences that are packed into one row are always split by tokens.
    """

    dim: int | None = 0
    by: Literal["samples", "tokens"] = "samples"


@dataclass(frozen=True)
class Replicate:
    """Give every microbatch the whole argument."""


_BY_ENTRY = Split(None)
REPLICATE = Replicate()
"""Give every microbatch the whole argument: a rule for ``Pipeline(rules=...)``."""
Splitter = Callable[[Any, Sequence[int]], Sequence[Any]]
"""``(value, sizes)`` -> the value's part in each microbatch, from the number of samples of each."""
ItemRule: TypeAlias = Split | Replicate | Splitter
Rule: TypeAlias = ItemRule | Mapping[Any, ItemRule]
"""How an argument is split. A mapping gives the rules of its items, fields or positions one by one."""
CallSplitter = Callable[[tuple[Any, ...], dict[str, Any], Any, int], Microbatches]
"""``(args, kwargs, target, count)`` -> that number of microbatches, or fewer."""
Rules: TypeAlias = Mapping[int | str, Rule] | CallSplitter
"""How each argument, by position or name, is split; or a function that splits the whole call.

Without a rule a tensor is split along dimension 0, and a tensor without dimensions goes to every microbatch.
The rule for ``"target"`` splits the target, and the one for ``"output"`` says along which dimension outputs
are merged.
"""
TARGET = "target"
"""The name of ``target=`` in rules."""
OUTPUT = "output"
"""The name in rules of the dimension along which outputs are merged."""


def check_rules(rules: Any) -> None:
    """Check that rules are valid.

    Raises:
        MicrobatchError: something is not a rule; the message names the argument that it is for.
    """
    if rules is None or callable(rules):
        return
    if not isinstance(rules, Mapping):
        raise MicrobatchError(
            f"rules={rules!r}: must be a mapping from arguments, by position or name, to how each is split, "
            "or a function that splits the whole call"
        )
    for name, rule in rules.items():
        for item in rule.values() if isinstance(rule, Mapping) else (rule,):
            if isinstance(item, type) or not (
                isinstance(item, Split | Replicate) or callable(item)
            ):
                raise MicrobatchError(
                    f"rules={{{name!r}: {rule!r}}}: must be Split(dim), REPLICATE, a function "
                    "(value, sizes) -> parts, or a mapping of these by item"
                )
            if isinstance(item, Split) and item.by not in ("samples", "tokens"):
                raise MicrobatchError(
                    f"rules={{{name!r}: {rule!r}}}: by= must be 'samples' or 'tokens'"
                )


# ---- split a batch into microbatches

_TARGET_KEY = "target="  # no argument can have this name
_Arguments: TypeAlias = "dict[int | str, tuple[Any, Rule | None]]"
"""The value and the rule of each argument; the rule may be None."""


def split_batch(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Any,
    rules: Rules | None,
    count: int,
    *,
    fewer: bool = False,
) -> Batch:
    """Split those arguments of a call, and its target, that this process was given.

    The sizes of microbatches differ by at most one. Tensors, also nested ones, are split along dimension 0,
    or as ``rules`` say. Other values, and tensors without dimensions, go to every microbatch.

    Args:
        args: positional arguments; or :class:`Microbatches` as the only one.
        kwargs: keyword arguments.
        target: what the loss compares with; :data:`MISSING` if there is none.
        rules: by argument, also for :data:`TARGET`; or a function that splits the whole call.
        count: the number of microbatches.
        fewer: whether there may be fewer microbatches, if there are fewer samples.

    Raises:
        MicrobatchError: a rule is for no argument, a tensor lacks the dimension to split, tensors disagree
            about the number of samples, there are fewer samples than microbatches, or ``count`` is below 1.
    """
    if any([isinstance(value, Microbatches) for value in (*args, *kwargs.values(), target)]):
        return _presplit(args, kwargs, target)
    if count < 1:
        raise MicrobatchError(f"a batch cannot be split into {count} microbatches; use at least 1")
    if not args and not kwargs and target is MISSING:
        return Batch()
    if rules is not None and not isinstance(rules, Mapping):
        return _split_by(rules(tuple(args), dict(kwargs), target, count), target, count)
    arguments = _ruled(args, kwargs, target, rules or {})
    row = _row_in(arguments)
    if row is not None:
        return _split_row(len(args), arguments, row, count, fewer)
    for key in BOUNDS & arguments.keys():
        value, rule = arguments[key]
        arguments[key] = value, rule or (bounds_by_rows if isinstance(value, Tensor) else None)
    return _split_samples(len(args), arguments, count, fewer)


def _presplit(args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> Batch:
    targets = target.calls if isinstance(target, Microbatches) else target
    if not args and not kwargs:
        return Batch(None, targets, _counted(targets, ()) or None, len(targets), presplit=True)
    calls = args[0] if args else None
    if not isinstance(calls, Microbatches) or len(args) > 1 or kwargs:
        raise MicrobatchError(
            "Microbatches(...) hold all arguments of the model, including keyword arguments; pass no "
            "others beside them"
        )
    return calls.batch(targets)


def _split_by(calls: Any, target: Any, count: int) -> Batch:
    said = "the rules= function that splits a call returned"
    if not isinstance(calls, Microbatches):
        raise MicrobatchError(f"{said} a {type(calls).__name__}; it must return Microbatches")
    if len(calls) > count:
        raise MicrobatchError(f"{said} {len(calls)} microbatches of at most {count}")
    return calls.batch(MISSING if target is MISSING else None)


def _ruled(
    args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, rules: Mapping[int | str, Rule]
) -> _Arguments:
    named: dict[int | str, Any] = dict([*enumerate(args), *kwargs.items()])
    unknown = [key for key in rules if key not in named and key not in (TARGET, OUTPUT)]
    if unknown and named:
        raise MicrobatchError(f"rules for {unknown}, but the arguments are {list(named)}")
    arguments = {name: (value, rules.get(name)) for name, value in named.items()}
    if target is not MISSING:
        arguments[_TARGET_KEY] = target, rules.get(TARGET)
    return arguments


def _shown(key: int | str) -> str:
    return "the target" if key == _TARGET_KEY else f"argument {key!r}"


# ---- the pieces of arguments, and how each is cut


class _SplitPiece(NamedTuple):
    """A piece of an argument that is split in one way: a leaf, or what a rule is for.

    Attributes:
        path: where it is, for messages.
        value: the piece.
        rule: how it is split; None if nobody said so.
        cut: returns its part in each microbatch, from the samples of each.
        samples: how many samples it has, if it is split by its entries or along a dimension.
    """

    path: str
    value: Any
    rule: ItemRule | None
    cut: Callable[[Sequence[int]], Sequence[Any]]
    samples: int | None = None

    @property
    def dim(self) -> int:
        """The dimension along which a tensor is split."""
        return (self.rule.dim or 0) if isinstance(self.rule, Split) else 0

    def __str__(self) -> str:
        shape = getattr(self.value, "shape", None)
        if shape is None:
            return f"{self.path} has {self.samples} entries"
        return f"{self.path} of shape {list(shape)} has {self.samples} in dimension {self.dim}"


def _piece(path: str, value: Any, rule: ItemRule | None, *, alone: bool = True) -> _SplitPiece:
    """How a piece is cut.

    Args:
        path: where it is.
        value: the piece.
        rule: how it is to be split.
        alone: whether the rule is for this piece, and not for all that an argument holds.
    """
    if isinstance(rule, Replicate):
        return _SplitPiece(path, value, rule, partial(_repeated, value))
    if not isinstance(rule, Split | None):
        return _SplitPiece(path, value, rule, partial(_cut_by_function, rule, value, path))
    if rule is not None and rule.dim is None:
        return _SplitPiece(path, value, rule, partial(_cut_entries, value), len(value))
    if isinstance(value, BlockMask):
        samples = samples_of(value)
        cut = partial(_repeated if samples is None else split_mask, value)
        return _SplitPiece(path, value, rule, cut, samples)
    if isinstance(value, np.ndarray):
        raise MicrobatchError(
            f"{path} is a numpy array, which cannot be split; make it a tensor with torch.as_tensor"
        )
    if not isinstance(value, Tensor) or not (value.dim() or (rule is not None and alone)):
        return _SplitPiece(path, value, REPLICATE, partial(_repeated, value))
    dim = 0 if rule is None or rule.dim is None else rule.dim
    if not -value.dim() <= dim < value.dim():
        raise MicrobatchError(
            f"{path} of shape {list(value.shape)} has no dimension {dim} to split; "
            "keep it whole with REPLICATE"
        )
    return _SplitPiece(path, value, rule, partial(_cut_tensor, value, dim, path), value.shape[dim])


def _repeated(value: Any, sizes: Sequence[int]) -> Sequence[Any]:
    return [value] * len(sizes)


def _cut_entries(value: Any, sizes: Sequence[int]) -> Sequence[Any]:
    return [value[begin:end] for begin, end in pairwise([0, *accumulate(sizes)])]


def _cut_by_function(
    function: Splitter, value: Any, path: str, sizes: Sequence[int]
) -> Sequence[Any]:
    parts = function(value, sizes)
    if len(parts) != len(sizes):
        raise MicrobatchError(
            f"the function that splits {path} gave {len(parts)} parts for {len(sizes)} microbatches"
        )
    return parts


def _cut_tensor(value: Tensor, dim: int, path: str, sizes: Sequence[int]) -> Sequence[Tensor]:
    try:
        parts: Sequence[Tensor] = value.split([*sizes], dim)
    except (RuntimeError, NotImplementedError) as error:
        raise MicrobatchError(
            f"{path} is a {_kind_of(value)} tensor, which torch does not split along dimension {dim}; use "
            "rules= to split it by a function (value, sizes) -> parts, or to keep it whole, REPLICATE"
        ) from error
    # Views share one version counter, but an in-place change to one microbatch does not change the
    # others. Through .data each part has a counter of its own.
    return parts if value.requires_grad else [part.data for part in parts]


class _SplitPieces(NamedTuple):
    """The pieces of an argument, and what builds it again from a part of each."""

    pieces: Sequence[_SplitPiece]
    build: Callable[[Iterator[Any]], Any]


def _pieces_of(value: Any, rule: Rule | None, path: str) -> _SplitPieces:
    """The pieces of an argument, whose rule may be a mapping with one for each item."""
    if not isinstance(rule, Mapping):
        return _pieces_of_item(value, rule, path)
    kind = type(value)
    container = _CONTAINERS[kind]
    if container is None:
        raise MicrobatchError(
            f"{path} is a {kind.__name__} without items, but its rule is {dict(rule)}"
        )
    context, children = container.apart(value)
    items = dict(zip(container.keys(value, context), children, strict=False))
    unknown = [key for key in rule if key not in items]
    if unknown:
        raise MicrobatchError(f"rules for {unknown} of {path}, which has {[*items]}")
    inner = [_pieces_of_item(x, rule.get(key), path + _at(key)) for key, x in items.items()]
    return _SplitPieces(
        [piece for item in inner for piece in item.pieces],
        lambda parts: container.together(kind, context, [item.build(parts) for item in inner]),
    )


def _pieces_of_item(value: Any, rule: ItemRule | None, path: str) -> _SplitPieces:
    by_entry = isinstance(rule, Split) and rule.dim is None
    if by_entry and not isinstance(value, list | tuple):
        raise MicrobatchError(
            f"{path} is a {type(value).__name__}, but its rule Split(None) is for a list or tuple"
        )
    if by_entry or not isinstance(rule, Split | None) or isinstance(value, Tensor):
        return _SplitPieces([_piece(path, value, rule)], next)
    if not any(isinstance(leaf, Tensor | np.ndarray) for leaf in flatten(value)[0]):
        return _SplitPieces([_piece(path, value, REPLICATE)], next)
    return _pieces_of_leaves(
        value, lambda place, leaf: _piece(path + _path(place), leaf, rule, alone=False)
    )


def _pieces_of_leaves(value: Any, piece: Callable[[Place, Any], _SplitPiece]) -> _SplitPieces:
    """A piece for each leaf of a value; a block mask is one."""
    pieces = [piece(place, leaf) for place, leaf in leaves_in(value, with_whole_masks=True)]
    structure = _flatten(value, lambda leaf: None, _WITH_WHOLE_MASKS)
    return _SplitPieces(pieces, lambda parts: unflatten([next(parts) for _ in pieces], structure))


def _columns(
    arguments: Mapping[int | str, _SplitPieces], cut: Callable[[_SplitPiece], Sequence[Any]]
) -> dict[int | str, list[Any]]:
    """Each argument in each microbatch."""
    return {
        key: [build(iter(parts)) for parts in zip(*map(cut, pieces), strict=True)]
        for key, (pieces, build) in arguments.items()
    }


def _microbatches(
    positional: int,
    columns: Mapping[int | str, Sequence[Any]],
    sizes: Sequence[int],
    *,
    has_kind: bool,
) -> list[Microbatch]:
    names = [key for key in columns if isinstance(key, str)]
    return [
        Microbatch(
            tuple(columns[position][index] for position in range(positional)),
            {name: columns[name][index] for name in names},
            size,
            kind=size if has_kind else None,
        )
        for index, size in enumerate(sizes)
    ]


# ---- microbatches of about as many samples


def _split_samples(positional: int, arguments: _Arguments, count: int, fewer: bool) -> Batch:
    pieces = _pieces_of_all(arguments)
    every = [piece for of_one in pieces.values() for piece in of_one.pieces]
    samples = _agreed_samples(every)
    rules = [piece.rule for piece in every]
    by_function = any(map(callable, rules))
    if samples == 0:
        raise MicrobatchError("the batch is empty; give it at least one sample per microbatch")
    if fewer:
        # If nothing is split there is one microbatch, unless a function of the user's may split something.
        count = min(count, samples or (count if by_function else 1))
    if samples is not None and samples < count:
        raise MicrobatchError(
            f"{samples} samples cannot be split into {count} microbatches; "
            f"use at most {samples} microbatches or a larger batch"
        )
    if samples is None and by_function:
        # Nothing but functions split the batch: what they split says how much there is.
        ruled = [piece.value for piece in reversed(every) if callable(piece.rule)]
        samples = next(filter(None, map(_length, ruled)), None)
    sizes, tokens, masks = _sizes(every, arguments, samples or 0, count)
    columns = _columns(
        pieces,
        lambda piece: _trimmed(piece, piece.cut(sizes), masks) if masks else piece.cut(sizes),
    )
    targets = columns.pop(_TARGET_KEY, None)
    weights = _weights(targets, columns, tokens) if tokens else None
    counted = by_function and all(piece.samples is None for piece in every)
    if counted:
        of_parts = [_count_samples(of_one) for of_one in zip(*columns.values(), strict=True)]
        sizes = _counted(targets or (), of_parts or [0] * count)
    # Parts with as many samples differ only in their data, unless each entry has a shape of its own.
    has_kind = not (by_function or tokens or _BY_ENTRY in rules)
    parts = _microbatches(positional, columns, sizes, has_kind=has_kind)
    return Batch(
        parts if columns else None, targets, sizes, count, counted=counted, weights=weights
    )


def _pieces_of_all(arguments: _Arguments) -> dict[int | str, _SplitPieces]:
    """The pieces of all arguments. The others tell whether a list without a rule holds samples."""
    lists = [
        key
        for key, (value, rule) in arguments.items()
        if rule is None and type(value) is list and tensors_in(value)
    ]
    pieces = {
        key: _pieces_of(*argument, _shown(key))
        for key, argument in arguments.items()
        if key not in lists
    }
    if not lists:
        return pieces
    samples = _agreed_samples([piece for of_one in pieces.values() for piece in of_one.pieces])
    for key in lists:
        value, _ = arguments[key]
        pieces[key] = _pieces_of(value, _rule_of_list(key, value, samples), _shown(key))
    return {key: pieces[key] for key in arguments}


def _rule_of_list(key: int | str, value: Sequence[Any], samples: int | None) -> Split | None:
    """How a list with tensors is split: by its entries if it is one of samples, or else each tensor."""
    sizes = {tensor.shape[0] for tensor in tensors_in(value) if tensor.dim()}
    may_be = _are_alike(value) if samples is None else len(value) == samples
    if may_be and sizes and (samples is None or sizes == {samples}):
        name = TARGET if key == _TARGET_KEY else key
        raise MicrobatchError(
            f"{_shown(key)} is a list of {len(value)}, which may be as many samples, or tensors that "
            f"hold all samples in dimension 0; say which: rules={{{name!r}: Split(None)}} splits the "
            f"list by its entries, rules={{{name!r}: Split(0)}} each tensor in it"
        )
    return _BY_ENTRY if may_be and samples is not None else None


def _are_alike(values: Sequence[Any]) -> bool:
    """Whether values may be samples of one kind."""
    return (
        len({(v.dim(), v.dtype) if isinstance(v, Tensor) else (type(v), None) for v in values}) == 1
    )


def _agreed_samples(pieces: Sequence[_SplitPiece]) -> int | None:
    """The size that all split pieces share, or ``None`` if none is split."""
    split = [piece for piece in pieces if piece.samples is not None]
    if len({piece.samples for piece in split}) < 2:
        return split[0].samples if split else None
    # Pieces with a rule are right; without rules, the size of most pieces, or of the first one.
    trusted = [piece for piece in split if piece.rule is not None] or split
    samples = Counter([piece.samples for piece in trusted]).most_common(1)[0][0]
    unlike = [piece for piece in split if piece.samples != samples]
    example = next(piece for piece in trusted if piece.samples == samples)
    raise MicrobatchError(
        f"the batch has {samples} samples ({example}), but {'; '.join(map(str, unlike))}; use rules= to "
        "split it along another dimension, Split(dim), to keep it whole, REPLICATE, or to split it by a "
        "function (value, sizes) -> parts"
    )


def _length(value: Any) -> int:
    """How many samples a value holds that a function splits."""
    if isinstance(value, list | tuple) and not all(isinstance(item, Tensor) for item in value):
        return len(value)
    return _count_samples(value)


# ---- microbatches of about as many tokens


def _is_by_tokens(rule: Any) -> bool:
    return isinstance(rule, Split) and rule.by == "tokens"


def _sizes(
    pieces: Sequence[_SplitPiece], arguments: _Arguments, samples: int, count: int
) -> tuple[list[int], list[int], list[Tensor]]:
    """The samples of each microbatch; and, if they are split by tokens, its tokens and its mask."""
    by_tokens = [piece for piece in pieces if _is_by_tokens(piece.rule)]
    if not by_tokens:
        size, rest = divmod(samples, count)
        return [size + (index < rest) for index in range(count)], [], []
    lengths, mask = _tokens_of(by_tokens[0], arguments)
    sizes = even_sizes(lengths, count)
    tokens = [sum(lengths[a:b]) for a, b in pairwise([0, *accumulate(sizes)])]
    return sizes, tokens, [] if mask is None else [*mask.split(sizes)]


def _tokens_of(piece: _SplitPiece, arguments: _Arguments) -> tuple[list[int], Tensor | None]:
    """The tokens of each sample, and the mask of those that are not padding, if there is one."""
    if isinstance(piece.value, list | tuple):
        return [max(1, _length(entry)) for entry in piece.value], None
    mask = next((v for key, (v, _) in arguments.items() if key == MASK), piece.value)
    is_mask = isinstance(mask, Tensor) and mask.dim() == 2
    if not is_mask or (mask is piece.value and mask.dtype is not torch.bool and mask.max() > 1):
        raise MicrobatchError(
            f"{piece.path} is to be split by tokens, but nothing says which of its entries are padding; "
            "give attention_mask=, or the rule Split(by='tokens') to a mask [samples, length]"
        )
    mask = mask != 0
    return mask.sum(1).clamp(min=1).tolist(), mask


def _trimmed(piece: _SplitPiece, parts: Sequence[Any], masks: Sequence[Tensor]) -> Sequence[Any]:
    """The parts of a padded piece without what is padding in a whole microbatch."""
    if not isinstance(piece.value, Tensor) or piece.samples is None:
        return parts
    dim = piece.dim % piece.value.dim() + 1
    if piece.value.shape[dim : dim + 1] != masks[0].shape[1:]:
        return parts
    return [narrowed(part, dim, *trimmed(mask)) for part, mask in zip(parts, masks, strict=True)]


def _weights(targets: Sequence[Any] | None, columns: Any, tokens: Sequence[int]) -> Sequence[int]:
    """How much microbatches count: by their labels that count, or where there are none, by their tokens."""
    labels = targets if targets is not None else columns.get("labels")
    counts = [labels_that_count(of) for of in labels or ()]
    known = [number for number in counts if number is not None]
    return known if len(known) == len(tokens) else tokens


# ---- microbatches of sequences that are packed into one row

_TELLING = {POSITIONS, ORDINALS, *BOUNDS}
"""The arguments that tell how a row is packed."""


def _row_in(arguments: _Arguments) -> Row | None:
    """The packed row that a batch is, unless a rule says how what tells that is split."""
    if not any([key in _TELLING or type(x) is not Tensor for key, (x, _) in arguments.items()]):
        return None
    rules = {key: rule for key, (_, rule) in arguments.items() if rule is not None}
    if any(key in _TELLING and not _is_by_tokens(rule) for key, rule in rules.items()):
        return None
    return find_row(
        (_last_name(key, place), leaf)
        for key, (value, _) in arguments.items()
        if key != _TARGET_KEY
        for place, leaf in leaves_in(value, with_whole_masks=True)
    )


def _last_name(key: int | str, place: Place) -> str:
    """The last of the names that lead to a leaf of an argument."""
    return str(next((name for name in reversed(place) if isinstance(name, str)), key))


def _split_row(positional: int, arguments: _Arguments, row: Row, count: int, fewer: bool) -> Batch:
    """Split sequences that are packed into one row, with about as many tokens for each microbatch."""
    if row.sequences < count and not fewer:
        raise MicrobatchError(
            f"{row.sequences} packed sequences cannot be split into {count} microbatches; use at most "
            f"{row.sequences} microbatches or more sequences"
        )
    shares = row.shares(count)
    tokens = [share.end - share.begin for share in shares]
    sequences = [share.after - share.first for share in shares]
    pieces = {
        key: _pieces_of(value, rule, _shown(key))
        if rule is not None and not _is_by_tokens(rule)
        else _pieces_of_leaves(value, partial(_piece_of_row, row, shares, key))
        for key, (value, rule) in arguments.items()
    }
    columns = _columns(
        pieces, lambda piece: piece.cut(tokens if piece.samples == row.length else sequences)
    )
    targets = columns.pop(_TARGET_KEY, None)
    parts = _microbatches(positional, columns, tokens, has_kind=False)
    weights = _weights(targets, columns, tokens)
    return Batch(parts, targets, tokens, len(shares), weights=weights, dim=row.dim)


def _piece_of_row(
    row: Row, shares: Sequence[Share], key: int | str, place: Place, leaf: Any
) -> _SplitPiece:
    """A leaf of an argument without a rule, of which the row knows each share's part."""
    path, name = _shown(key) + _path(place), _last_name(key, place)
    return _SplitPiece(
        path, leaf, None, lambda _: [row.part(path, share, name, leaf) for share in shares]
    )


# ---- merge outputs


def output_dim(rules: Rules | None, of_tokens: int | None = None) -> int:
    """The dimension along which outputs are merged.

    Args:
        rules: the rules by which batches are split.
        of_tokens: the dimension of the tokens in a packed row, which is used where no rule says another one.

    Raises:
        MicrobatchError: an argument is split along another dimension than 0, and there is no rule for
            outputs.
    """
    if not isinstance(rules, Mapping):
        return of_tokens or 0
    rule = rules.get(OUTPUT)
    if isinstance(rule, Split) and rule.dim is not None:
        return rule.dim
    if rule is not None:
        raise MicrobatchError(
            f"rules={{'output': {rule!r}}}: the rule for outputs must be Split(dim)"
        )
    if of_tokens is not None:
        return of_tokens
    dims = sorted({entry.dim or 0 for entry in rules.values() if isinstance(entry, Split)} - {0})
    if dims:
        raise MicrobatchError(
            f"arguments are split along dimension {dims[0]}; say along which dimension to merge outputs: "
            f"rules={{'output': Split({dims[0]})}} or Split(0)"
        )
    return 0


def merge(
    outputs: Sequence[Any],
    dim: int = 0,
    samples: Sequence[int] = (),
    *,
    exact: bool = False,
    tokens: Sequence[int] = (),
) -> Any:
    """Merge the outputs of microbatches, or their targets.

    Args:
        outputs: one for each microbatch, all with the same structure. Tensors are concatenated along
            ``dim``, and tensors without dimensions are stacked; other values must be equal in all of them.
        dim: the dimension of the samples.
        samples: the number of samples of each microbatch, if it is known. Then lists of samples are joined,
            and a tensor that does not consist of samples must be the same in all microbatches.
        exact: whether a tensor of samples has one entry for each, rather than one or several.
        tokens: the number of tokens of each microbatch, if ``dim`` is theirs. A tensor that has other sizes
            there has an entry for each sequence in dimension 0.

    Raises:
        MicrobatchError: the structures or values differ.
    """
    if samples and all(
        type(one) is list and len(one) == n for one, n in zip(outputs, samples, strict=True)
    ):
        return [sample for one in outputs for sample in one]
    flattened = [flatten(output) for output in outputs]
    tree = flattened[0][1]
    if any(other != tree for _, other in flattened):
        kinds = sorted({type(output).__name__ for output in outputs})
        raise MicrobatchError(
            f"microbatches gave outputs of different structures ({', '.join(kinds)}), which cannot be "
            f"merged{_ONE_BY_ONE}"
        )
    columns = zip(*(leaves for leaves, _ in flattened), strict=True)
    merged = [
        _merge_leaves(column, _dim_in(column, dim, tokens), samples, exact) for column in columns
    ]
    return unflatten(merged, tree)


def _dim_in(leaves: Sequence[Any], dim: int, tokens: Sequence[int]) -> int:
    """The dimension along which some tensors are merged: 0 if it is for tokens, which they do not have."""
    if not tokens:
        return dim
    has_dim = all(isinstance(leaf, Tensor) and leaf.dim() > dim for leaf in leaves)
    pairs = zip(leaves, tokens, strict=False)
    # Losses of single labels lack that of the first token.
    missing = {number - leaf.shape[dim] for leaf, number in pairs} if has_dim else set()
    return dim if missing in ({0}, {1}) else 0


_ONE_BY_ONE = "; pass Microbatches(...) instead of a batch to get them one by one"


def _merge_leaves(leaves: Sequence[Any], dim: int, samples: Sequence[int], exact: bool) -> Any:
    first = leaves[0]
    if not isinstance(first, Tensor):
        if any(leaf != first for leaf in leaves):
            kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves}))
            raise MicrobatchError(
                f"microbatches gave outputs that are not tensors and differ ({kinds}), which cannot be "
                "merged; let the model return tensors, or pass Microbatches(...) to get them one by one"
            )
        return first
    if samples:
        sizes = [leaf.shape[dim] if leaf.dim() > dim else 0 for leaf in leaves]
        pairs = zip(sizes, samples, strict=True)
        if not all(n and size and (size == n if exact else size % n == 0) for size, n in pairs):
            if all(torch.equal(leaf, first) for leaf in leaves[1:]):
                return first.clone()  # what comes out may be changed in place
            raise MicrobatchError(
                f"microbatches gave a tensor of shape {list(first.shape)} that is not one entry for each "
                "sample, and not the same in all of them"
            )
    if not first.dim():
        return torch.stack(list(leaves))
    try:
        return torch.cat(list(leaves), dim)
    except (RuntimeError, IndexError) as error:
        shapes = [list(leaf.shape) for leaf in leaves]
        raise MicrobatchError(
            f"outputs of the shapes {shapes} cannot be merged along dimension {dim}{_ONE_BY_ONE}"
        ) from error


def bytes_as_text(number: float) -> str:
    """A size in a suitable unit, such as ``1.5 GiB``."""
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.0f} B"
