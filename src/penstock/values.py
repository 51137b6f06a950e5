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

PLAIN = frozenset({bool, int, float, str, type(None)})
"""The types of leaves that can travel beside tensors."""
_ATOMS = PLAIN | {complex, bytes, torch.dtype, torch.device, slice}
Leaves = list[Any]
Place: TypeAlias = tuple[Any, ...]
"""The path to a leaf inside a value: indices of sequences, keys of mappings, names of attributes."""


def _apart(value: Any, kind: type) -> tuple[Any, Any] | None:
    """What a container holds besides its children, and the children; None for a leaf.

    Sequences, mappings, dataclasses and what is registered with ``torch.utils._pytree`` are containers.
    """
    if kind is tuple or kind is list:
        return None, value
    if kind is dict:
        return tuple(value), value.values()
    if kind in _ATOMS:
        return None
    if kind is BlockMask:
        children, context = take_apart(value)
        return context, children
    if kind in pytree.SUPPORTED_NODES:
        children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
        return context, children
    if isinstance(value, tuple | list):
        return None, value
    if isinstance(value, Mapping):
        return tuple(value.keys()), list(value.values())
    if is_dataclass(kind):
        attributes = vars(value) if hasattr(value, "__dict__") else ()
        names = tuple(dict.fromkeys([*(f.name for f in fields(kind)), *attributes]))
        return names, [getattr(value, name, None) for name in names]
    return None


def _together(kind: Any, context: Any, children: list[Any]) -> Any:
    """A container of a class with these children."""
    if kind is list:
        return children
    if kind is tuple:
        return tuple(children)
    if kind is dict:
        return dict(zip(context, children, strict=True))
    if kind is BlockMask:
        return put_together(children, context)
    if kind in pytree.SUPPORTED_NODES:
        return pytree.SUPPORTED_NODES[kind].unflatten_fn(children, context)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        # This way also for a subclass such as PackedSequence, whose constructor does other things.
        return tuple.__new__(kind, children)
    if issubclass(kind, tuple | list):
        return kind(children)
    if issubclass(kind, Mapping):
        make: Any = kind
        return make(dict(zip(context, children, strict=True)))
    # Its ``__init__`` does not run, as the fields may be set otherwise.
    filled: Any = object.__new__(kind)
    for name, child in zip(context, children, strict=True):
        object.__setattr__(filled, name, child)
    return filled


def _like(value: Any, kind: Any, context: Any, children: list[Any]) -> Any:
    """A container like ``value`` with other children; what else the object holds is the same."""
    if kind is tuple or kind is list or kind is dict:
        return _together(kind, context, children)
    is_mapping = isinstance(value, MutableMapping)
    if not is_mapping and not isinstance(value, list):
        return _together(kind, context, children)
    twin: Any = copy.copy(value)
    if is_mapping:
        for key, child in zip(tuple(value.keys()), children, strict=True):
            twin[key] = child
    else:
        twin[:] = children
    return twin


class _Name(str):
    """The key of an attribute."""

    __slots__ = ()


def _keys(value: Any, kind: Any, context: Any) -> Iterable[Any]:
    """The keys of a container's children."""
    if kind is tuple or kind is list:
        return count()
    if isinstance(value, Mapping):
        return tuple(value.keys())
    if not hasattr(kind, "_fields"):
        if isinstance(value, tuple | list | BlockMask) or kind in pytree.SUPPORTED_NODES:
            return count()
        return map(_Name, context)
    return map(_Name, kind._fields)


def _at(key: Any) -> str:
    return f".{key}" if type(key) is _Name else f"[{key!r}]"


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
    return leaves, _flatten(value, leaves.append)


def _flatten(value: Any, add: Callable[[Any], None]) -> Structure:
    if not isinstance(value, Tensor):
        kind = type(value)
        apart = _apart(value, kind)
        if apart is not None:
            context, children = apart
            return Structure(kind, context, tuple([_flatten(child, add) for child in children]))
    add(value)
    return LEAF


def unflatten(leaves: Leaves, structure: Structure) -> Any:
    """The value with these leaves."""
    return leaves[0] if structure is LEAF else _unflatten(iter(leaves), structure)


def _unflatten(leaves: Iterator[Any], structure: Structure) -> Any:
    kind, context, children = structure
    if kind is None:
        return next(leaves)
    return _together(kind, context, [_unflatten(leaves, child) for child in children])


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """The value with ``function`` applied to each tensor: new containers, all else is the same object."""
    if isinstance(value, Tensor):
        return function(value)
    kind = type(value)
    apart = _apart(value, kind)
    if apart is None:
        return value
    context, children = apart
    return _like(value, kind, context, [map_tensors(child, function) for child in children])


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
    elif (apart := _apart(value, type(value))) is not None:
        for child in apart[1]:
            _collect(child, add)


def leaves_in(value: Any) -> list[tuple[Place, Any]]:
    """The leaves of a value with their places, in order."""
    leaves: list[tuple[Place, Any]] = []
    _place(value, (), leaves.append)
    return leaves


def _place(value: Any, at: Place, add: Callable[[tuple[Place, Any]], None]) -> None:
    if not isinstance(value, Tensor):
        kind = type(value)
        apart = _apart(value, kind)
        if apart is not None:
            for key, child in zip(_keys(value, kind, apart[0]), apart[1], strict=False):
                _place(child, (*at, key), add)
            return
    add((at, value))


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
    kind = type(value)
    apart = _apart(value, kind)
    if apart is None or not isinstance(value, Mapping | tuple | list):
        return value
    context, children = apart
    pairs = zip(_keys(value, kind, context), children, strict=False)
    return _like(value, kind, context, [None if key in keys else child for key, child in pairs])


def named_leaves(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """The leaves of a value, each with its path as text, which begins with ``name``."""
    return [(name + "".join(map(_at, place)), leaf) for place, leaf in leaves_in(value)]


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
    return isinstance(kind, type) and (
        issubclass(kind, tuple | list | Mapping | BlockMask) or is_dataclass(kind)
    )


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
    found: type = kind
    return found


def _context_as_json(kind: type, context: Any, what: str) -> Any:
    if isinstance(context, MaskContext):
        return context.facts
    entry = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    if entry is not None and entry.to_dumpable_context is not None:
        return entry.to_dumpable_context(context)
    try:
        text = json.dumps(context)
    except (TypeError, ValueError):
        text = ""
    if not text or (_is_ours(kind) and _context_of(kind, json.loads(text)) != context):
        raise SpecError(
            f"in {what} is a {kind.__qualname__} with {context!r}, which cannot travel between stages; use "
            "texts and numbers as keys"
        )
    return json.loads(text)


def _context_of(kind: type, context: Any) -> Any:
    if kind is BlockMask:
        return MaskContext(context)
    entry = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    if entry is not None and entry.from_dumpable_context is not None:
        return entry.from_dumpable_context(context)
    return tuple(context) if context is not None and _is_ours(kind) else context


def _is_ours(kind: type) -> bool:
    """Whether what containers of a class hold besides their children are keys or names."""
    return kind is dict or kind not in pytree.SUPPORTED_NODES


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
    strides, so they arrive as they were sent. A tensor whose elements overlap otherwise than by expansion
    stays contiguous.
    """
    if strides is None or tuple(tensor.stride()) == tuple(strides):
        return tensor
    expanded = [step == 0 and size > 1 for step, size in zip(strides, tensor.shape, strict=True)]
    compact = tensor
    for dim, repeats in enumerate(expanded):
        if repeats:
            compact = compact.narrow(dim, 0, 1)
    laid = torch.empty_strided(compact.shape, strides, dtype=tensor.dtype, device=tensor.device)
    if torch._debug_has_internal_overlap(laid) == 1:  # there is no public name for it
        return tensor
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
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise SpecError(
            f"{path} is a {kind} tensor, which cannot travel between stages; give its parts as plain tensors"
        )


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


class _SplitPart:
    """A piece of an argument that is split in one way: a leaf, or what a rule is for.

    Args:
        path: where it is, for messages.
        value: the piece.
        rule: how it is split.
        by_rule: whether the user said so.
    """

    def __init__(
        self, path: str, value: Any, rule: Split | Replicate | Splitter, by_rule: bool
    ) -> None:
        self.path, self.value, self.rule, self.by_rule = path, value, rule, by_rule

    @property
    def samples(self) -> int | None:
        """How many samples it has, if it is split along a dimension."""
        if not isinstance(self.rule, Split):
            return None
        if isinstance(self.value, BlockMask):
            return samples_of(self.value)
        return len(self.value) if self.rule.dim is None else self.value.shape[self.rule.dim]

    def cut(self, sizes: list[int]) -> Sequence[Any]:
        """Its part in each microbatch."""
        if isinstance(self.rule, Replicate):
            return [self.value] * len(sizes)
        if isinstance(self.value, BlockMask) and isinstance(self.rule, Split):
            return (
                [self.value] * len(sizes) if self.samples is None else split_mask(self.value, sizes)
            )
        if isinstance(self.rule, Split) and self.rule.dim is None:
            ends = [*accumulate(sizes)]
            return [self.value[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        if isinstance(self.rule, Split):
            return _cut_tensor(self.value, self.rule.dim or 0, sizes, self.path)
        parts = self.rule(self.value, sizes)
        if len(parts) != len(sizes):
            raise MicrobatchError(
                f"the function that splits {self.path} gave {len(parts)} parts for {len(sizes)} microbatches"
            )
        return parts

    def __str__(self) -> str:
        dim = self.rule.dim if isinstance(self.rule, Split) else None
        if dim is None:
            return f"{self.path} has {self.samples} entries"
        return (
            f"{self.path} of shape {list(self.value.shape)} has {self.samples} in dimension {dim}"
        )


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
    return _split_arguments(len(args), arguments, count, fewer)


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


def _split_arguments(positional: int, arguments: _Arguments, count: int, fewer: bool) -> Batch:
    pieces = {
        key: _parts_of(*argument, _shown(key)) for key, argument in _settled(arguments).items()
    }
    every = [piece for of_one, _ in pieces.values() for piece in of_one]
    samples = _agreed_samples(every)
    rules = [piece.rule for piece in every]
    by_function = any(map(callable, rules))
    # Parts with as many samples differ only in their data, unless each entry has a shape of its own.
    has_kind = not by_function and _BY_ENTRY not in rules
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
    has_kind = has_kind and not tokens
    columns = {
        key: [
            build(iter(parts))
            for parts in zip(
                *(_trim(one, one.cut(sizes), masks) if masks else one.cut(sizes) for one in of_one),
                strict=True,
            )
        ]
        for key, (of_one, build) in pieces.items()
    }
    targets = columns.pop(_TARGET_KEY, None)
    weights = _weights(targets, columns, tokens) if tokens else None
    counted = by_function and all(piece.samples is None for piece in every)
    if counted:
        of_parts = [_count_samples(of_one) for of_one in zip(*columns.values(), strict=True)]
        sizes = _counted(targets or (), of_parts or [0] * count)
    parts = _microbatches(positional, columns, sizes, has_kind=has_kind)
    return Batch(
        parts if columns else None, targets, sizes, count, counted=counted, weights=weights
    )


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


# ---- microbatches by tokens


def _is_by_tokens(rule: Any) -> bool:
    return isinstance(rule, Split) and rule.by == "tokens"


def _sizes(
    pieces: Sequence[_SplitPart], arguments: _Arguments, samples: int, count: int
) -> tuple[list[int], list[int], list[Tensor]]:
    """The samples of each microbatch; and, if they are split by tokens, its tokens and its mask."""
    found = [one for one in pieces if isinstance(one.rule, Split) and one.rule.by == "tokens"]
    if not found:
        size, rest = divmod(samples, count)
        return [size + (index < rest) for index in range(count)], [], []
    lengths, mask = _tokens_of(found[0], arguments)
    sizes = even_sizes(lengths, count)
    tokens = [sum(lengths[a:b]) for a, b in pairwise([0, *accumulate(sizes)])]
    return sizes, tokens, [] if mask is None else [*mask.split(sizes)]


def _tokens_of(piece: _SplitPart, arguments: _Arguments) -> tuple[list[int], Tensor | None]:
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


def _trim(piece: _SplitPart, parts: Sequence[Any], masks: Sequence[Tensor]) -> Sequence[Any]:
    """The parts of a padded piece without what is padding in a whole microbatch."""
    dim = piece.rule.dim if isinstance(piece.rule, Split) else None
    if not masks or dim is None or not isinstance(piece.value, Tensor):
        return parts
    dim %= piece.value.dim()
    if piece.value.shape[dim + 1 : dim + 2] != masks[0].shape[1:]:
        return parts
    return [
        narrowed(part, dim + 1, *trimmed(mask)) for part, mask in zip(parts, masks, strict=True)
    ]


def _weights(targets: Sequence[Any] | None, columns: Any, tokens: Sequence[int]) -> Sequence[int]:
    """How much microbatches count: by their labels that count, or where there are none, by their tokens."""
    labels = targets if targets is not None else columns.get("labels")
    counts = [labels_that_count(of) for of in labels or ()]
    known = [number for number in counts if number is not None]
    return known if len(known) == len(tokens) else tokens


_TELLING = {POSITIONS, ORDINALS, *BOUNDS}
"""The arguments that tell how a row is packed."""


def _row_in(arguments: _Arguments) -> Row | None:
    """The packed row that a batch is, unless a rule says how what tells that is split."""
    for key, (value, _) in arguments.items():
        if key in _TELLING or not isinstance(value, Tensor):
            break
    else:
        return None
    told = {
        key for key, (_, rule) in arguments.items() if rule is not None and not _is_by_tokens(rule)
    }
    if told & _TELLING:
        return None
    named: list[tuple[str, Any]] = []
    for key, (value, _) in arguments.items():
        if key != _TARGET_KEY:
            _with_names(value, str(key), lambda name, leaf: named.append((name, leaf)))
    return find_row(named)


def _with_names(value: Any, name: str, function: Callable[[str, Any], Any]) -> Any:
    """A value with ``function`` applied to its leaves, each with the last of the keys that lead to it."""
    kind = type(value)
    apart = None if isinstance(value, Tensor | BlockMask) else _apart(value, kind)
    if apart is None:
        return function(name, value)
    context, children = apart
    keys = zip(_keys(value, kind, context), children, strict=False)
    inner = [
        _with_names(child, str(key) if isinstance(key, str) else name, function)
        for key, child in keys
    ]
    return _like(value, kind, context, inner)


def _split_row(positional: int, arguments: _Arguments, row: Row, count: int, fewer: bool) -> Batch:
    """Split sequences that are packed into one row, with about as many tokens for each microbatch."""
    if row.sequences < count and not fewer:
        raise MicrobatchError(
            f"{row.sequences} packed sequences cannot be split into {count} microbatches; use at most "
            f"{row.sequences} microbatches or more sequences"
        )
    shares = row.shares(count)
    columns = {
        key: _columns_of_row(row, shares, value, rule, key)
        for key, (value, rule) in arguments.items()
    }
    targets = columns.pop(_TARGET_KEY, None)
    tokens = [share.end - share.begin for share in shares]
    parts = _microbatches(positional, columns, tokens, has_kind=False)
    weights = _weights(targets, columns, tokens)
    return Batch(parts, targets, tokens, len(shares), weights=weights, dim=row.dim)


def _columns_of_row(
    row: Row, shares: Sequence[Share], value: Any, rule: Rule | None, key: int | str
) -> list[Any]:
    """An argument of a packed row in each microbatch."""
    if rule is None or _is_by_tokens(rule):
        name = str(key)
        part = partial(row.part, _shown(key))
        return [_with_names(value, name, partial(part, share)) for share in shares]
    pieces, build = _parts_of(value, rule, _shown(key))
    sequences = [share.after - share.first for share in shares]
    tokens = [share.end - share.begin for share in shares]
    of_pieces = [
        piece.cut(tokens if piece.samples == row.length else sequences) for piece in pieces
    ]
    return [build(iter(parts)) for parts in zip(*of_pieces, strict=True)]


def _length(value: Any) -> int:
    """How many samples a value holds that a function splits."""
    if isinstance(value, list | tuple) and not all(isinstance(item, Tensor) for item in value):
        return len(value)
    return _count_samples(value)


def _shown(key: int | str) -> str:
    return "the target" if key == _TARGET_KEY else f"argument {key!r}"


def _settled(arguments: _Arguments) -> _Arguments:
    """The arguments, with a rule for each list of samples."""
    lists = {}
    for key, (value, rule) in arguments.items():
        if rule is None and type(value) is list and tensors_in(value):
            lists[key] = value
    if not lists:
        return arguments
    others = [
        piece
        for key, argument in arguments.items()
        if key not in lists
        for piece in _parts_of(*argument, _shown(key))[0]
    ]
    samples = _agreed_samples(others)
    settled = dict(arguments)
    for key, value in lists.items():
        sizes = {tensor.shape[0] for tensor in tensors_in(value) if tensor.dim()}
        may_be = _are_alike(value) if samples is None else len(value) == samples
        if may_be and sizes and (samples is None or sizes == {samples}):
            name = TARGET if key == _TARGET_KEY else key
            raise MicrobatchError(
                f"{_shown(key)} is a list of {len(value)}, which may be as many samples, or tensors that "
                f"hold all samples in dimension 0; say which: rules={{{name!r}: Split(None)}} splits the "
                f"list by its entries, rules={{{name!r}: Split(0)}} each tensor in it"
            )
        if may_be and samples is not None:
            settled[key] = value, _BY_ENTRY
    return settled


def _are_alike(values: Sequence[Any]) -> bool:
    """Whether values may be samples of one kind."""
    return (
        len({(v.dim(), v.dtype) if isinstance(v, Tensor) else (type(v), None) for v in values}) == 1
    )


def _agreed_samples(pieces: Sequence[_SplitPart]) -> int | None:
    """The size that all split tensors share, or ``None`` if none is split."""
    tensors = [piece for piece in pieces if piece.samples is not None]
    if not tensors:
        return None
    sizes = {tensor.samples for tensor in tensors}
    if len(sizes) == 1:
        return sizes.pop()
    # Tensors with a rule are right; without rules, the size of most tensors, or of the first one.
    trusted = [tensor for tensor in tensors if tensor.by_rule] or tensors
    samples = Counter([tensor.samples for tensor in trusted]).most_common(1)[0][0]
    unlike = [tensor for tensor in tensors if tensor.samples != samples]
    example = next(tensor for tensor in trusted if tensor.samples == samples)
    raise MicrobatchError(
        f"the batch has {samples} samples ({example}), but {'; '.join(map(str, unlike))}; use rules= to "
        "split it along another dimension, Split(dim), to keep it whole, REPLICATE, or to split it by a "
        "function (value, sizes) -> parts"
    )


_Build: TypeAlias = Callable[[Iterator[Any]], Any]
"""Builds an argument of a microbatch from the parts of the whole argument's pieces."""


def _parts_of(value: Any, rule: Rule | None, path: str) -> tuple[list[_SplitPart], _Build]:
    """The pieces of an argument, and what builds it again from their parts."""
    if not isinstance(rule, Mapping):
        return _pieces_of(value, rule, path)
    kind = type(value)
    apart = None if isinstance(value, Tensor) else _apart(value, kind)
    if apart is None:
        raise MicrobatchError(
            f"{path} is a {kind.__name__} without items, but its rule is {dict(rule)}"
        )
    context, children = apart
    items = dict(zip(_keys(value, kind, context), children, strict=False))
    unknown = [key for key in rule if key not in items]
    if unknown:
        raise MicrobatchError(f"rules for {unknown} of {path}, which has {[*items]}")
    inner = [_pieces_of(item, rule.get(key), path + _at(key)) for key, item in items.items()]
    return [piece for of_item, _ in inner for piece in of_item], lambda parts: _together(
        kind, context, [build(parts) for _, build in inner]
    )


def _pieces_of(value: Any, rule: ItemRule | None, path: str) -> tuple[list[_SplitPart], _Build]:
    if not isinstance(rule, Split | None):
        return [_SplitPart(path, value, rule, by_rule=True)], next
    if rule is not None and rule.dim is None:
        if not isinstance(value, list | tuple):
            raise MicrobatchError(
                f"{path} is a {type(value).__name__}, but its rule Split(None) is for a list or tuple"
            )
        return [_SplitPart(path, value, rule, by_rule=True)], next
    if isinstance(value, BlockMask):
        return [_SplitPart(path, value, rule or Split(), by_rule=rule is not None)], next
    if isinstance(value, Tensor):
        return [_part_of(value, rule, path, alone=True)], next
    leaves, tree = flatten(value)
    if not any(isinstance(leaf, Tensor | np.ndarray) for leaf in leaves):
        return [_SplitPart(path, value, REPLICATE, rule is not None)], next
    pieces = [_part_of(leaf, rule, at) for at, leaf in named_leaves(value, path)]
    return pieces, lambda parts: unflatten([next(parts) for _ in leaves], tree)


def _part_of(leaf: Any, rule: Split | None, path: str, *, alone: bool = False) -> _SplitPart:
    by_rule = rule is not None
    if isinstance(leaf, np.ndarray):
        raise MicrobatchError(
            f"{path} is a numpy array, which cannot be split; make it a tensor with torch.as_tensor"
        )
    if not isinstance(leaf, Tensor) or not (leaf.dim() or (by_rule and alone)):
        return _SplitPart(path, leaf, REPLICATE, by_rule)
    rule = rule or Split()
    if rule.dim is None or not -leaf.dim() <= rule.dim < leaf.dim():
        raise MicrobatchError(
            f"{path} of shape {list(leaf.shape)} has no dimension {rule.dim} to split; "
            "keep it whole with REPLICATE"
        )
    return _SplitPart(path, leaf, rule, by_rule)


def _cut_tensor(value: Tensor, dim: int, sizes: list[int], path: str) -> Sequence[Tensor]:
    try:
        parts: Sequence[Tensor] = value.split(sizes, dim)
    except (RuntimeError, NotImplementedError) as error:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise MicrobatchError(
            f"{path} is a {kind} tensor, which torch does not split along dimension {dim}; use rules= to "
            "split it by a function (value, sizes) -> parts, or to keep it whole, REPLICATE"
        ) from error
    # Views share one version counter, but an in-place change to one microbatch does not change the
    # others. Through .data each part has a counter of its own.
    return parts if value.requires_grad else [part.data for part in parts]


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
