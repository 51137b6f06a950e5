"""Values that travel between stages, and batches that are split into microbatches.

A value is a pytree (``torch.utils._pytree``) of tensors and plain values. Dataclasses, named tuples and
mappings that nobody has registered are registered when they are first seen. What a value looks like without
its tensors' data is its :class:`Layout`, which travels once, as JSON; afterwards only bytes travel.
"""

from __future__ import annotations

import sys
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import MicrobatchError, SpecError

# ---- pytrees

_LEAF = pytree.tree_flatten(0)[1]
_PLAIN = (bool, int, float, str, type(None))
Leaves = list[Any]


def flatten(value: Any) -> tuple[Leaves, Any]:
    """The leaves of a value, and its structure."""
    if isinstance(value, Tensor):
        return [value], _LEAF
    leaves, tree = pytree.tree_flatten(value)
    while any([_register(type(leaf), leaf) for leaf in leaves if type(leaf) not in _PLAIN]):
        leaves, tree = pytree.tree_flatten(value)
    return leaves, tree


def unflatten(leaves: Leaves, tree: Any) -> Any:
    """The value with these leaves."""
    return leaves[0] if tree is _LEAF else pytree.tree_unflatten(leaves, tree)


def named_leaves(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """The leaves of a value, each with its path, which begins with ``name``."""
    flatten(value)
    try:
        pairs, _ = pytree.tree_flatten_with_path(value)
    except ValueError:
        # A class was registered without names for what is in it.
        return [(f"{name}, leaf {i}", leaf) for i, leaf in enumerate(flatten(value)[0])]
    return [(name + pytree.keystr(path), leaf) for path, leaf in pairs]


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a value, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """The value with ``function`` applied to each of its tensors."""
    leaves, tree = flatten(value)
    return unflatten([function(x) if isinstance(x, Tensor) else x for x in leaves], tree)


def _register(kind: type, leaf: Any) -> bool:
    """Make the class of a leaf a node of pytrees, if it is a dataclass, a named tuple or a mapping."""
    if isinstance(leaf, Tensor | type) or kind in pytree.SUPPORTED_NODES:
        return False
    if is_dataclass(kind):
        names = tuple(entry.name for entry in fields(kind))

        def items(value: Any) -> list[Any]:
            return [getattr(value, name, None) for name in names]

        pytree.register_pytree_node(
            kind,
            lambda x: (items(x), None),
            lambda values, _: _fill_dataclass(kind, names, list(values)),
            serialized_type_name=_class_name(kind),
            to_dumpable_context=lambda _: None,
            from_dumpable_context=lambda _: None,
            flatten_with_keys_fn=lambda x: (
                [(pytree.GetAttrKey(n), item) for n, item in zip(names, items(x), strict=True)],
                None,
            ),
        )
    elif isinstance(leaf, Mapping):
        pytree.register_pytree_node(
            kind,
            lambda x: (list(x.values()), list(x)),
            lambda values, keys: kind(dict(zip(keys, values, strict=True))),
            serialized_type_name=_class_name(kind),
            flatten_with_keys_fn=lambda x: (
                [(pytree.MappingKey(key), item) for key, item in x.items()],
                list(x),
            ),
        )
    else:
        return False
    return True


def _fill_dataclass(kind: type, names: tuple[str, ...], values: list[Any]) -> Any:
    """An object with these fields; its ``__init__`` does not run, as the fields may be set otherwise."""
    filled: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(filled, name, value)
    return filled


def _class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _find_class(name: str) -> None:
    """Register the class that a description names, if this process has imported its module.

    A message never makes a rank import a module.
    """
    if name in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE or ":" not in name:
        return
    module, _, path = name.partition(":")
    kind: Any = sys.modules.get(module)
    for step in path.split("."):
        kind = getattr(kind, step, None)
    if isinstance(kind, type) and is_dataclass(kind):
        _register(kind, None)
    elif isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        pytree._register_namedtuple(kind, serialized_type_name=name)
    elif isinstance(kind, type) and issubclass(kind, Mapping):
        make: Any = kind
        _register(kind, make({}))


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

    tree: Any
    leaves: tuple[Any, ...]

    def describe(self) -> list[Any]:
        """The layout as JSON data."""
        return [
            pytree.treespec_dumps(self.tree),
            [["t", *x] if isinstance(x, TensorLayout) else ["p", x] for x in self.leaves],
        ]

    @staticmethod
    def read(text: list[Any]) -> Layout:
        """The layout that :meth:`describe` told.

        Raises:
            SpecError: a class in it is not known in this process.
        """
        tree, leaves = text
        for name in _names_in(tree):
            _find_class(name)
        try:
            structure = pytree.treespec_loads(tree)
        except NotImplementedError as error:
            raise SpecError(
                f"a value of another rank has a class that this one does not know ({error}); define it at "
                "the top level of a module that every rank imports"
            ) from error
        return Layout(structure, tuple(map(_leaf_of, leaves)))

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


def _names_in(tree: str) -> Iterator[str]:
    """The names of classes in a dumped structure: all its texts that look like one."""
    return (text for text in tree.split('"') if ":" in text)


def check_plain(value: Any, what: str) -> None:
    """Check that everything in a value can travel.

    Raises:
        SpecError: a leaf is neither a tensor nor a plain value, and the message gives its path; or a class
            has no name that other ranks know.
    """
    _check_names(flatten(value)[1], what)
    for path, leaf in named_leaves(value, what):
        if isinstance(leaf, Tensor):
            check_tensor(leaf, path)
        elif type(leaf) not in _PLAIN:
            raise SpecError(
                f"{path} is a {type(leaf).__name__}, which cannot travel between stages; give tensors, "
                "numbers, texts and None, in tuples, lists, dicts, dataclasses and named tuples, or register "
                "the class with torch.utils._pytree.register_pytree_node on every rank"
            )


def _check_names(tree: Any, what: str) -> None:
    """Check that all classes in a structure can be named in JSON; named tuples get their name here."""
    if tree.is_leaf():
        return
    is_named_tuple = tree.type is namedtuple
    kind = tree.context if is_named_tuple else tree.type
    entry = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    if entry is None and is_named_tuple:
        # It has no public name. As of torch 2.13.
        pytree._register_namedtuple(kind, serialized_type_name=_class_name(kind))
    elif entry is None or entry.serialized_type_name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
        raise SpecError(
            f"in {what} is a {kind.__module__}.{kind.__qualname__}, which cannot travel between stages: it "
            "is registered with torch.utils._pytree without serialized_type_name=; pass that, or a tuple"
        )
    for child in tree.children():
        _check_names(child, what)


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


@dataclass(frozen=True)
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
    """

    parts: Sequence[Microbatch] | None = None
    targets: Sequence[Any] | None = None
    samples: Sequence[int] | None = None
    count: int | None = None
    presplit: bool = False

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
            first tensor in dimension 0.

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
        if targets is MISSING:
            return Batch(self.parts, None, samples, len(self), presplit=True)
        if not isinstance(targets, Sequence) or len(targets) != len(self):
            what = len(targets) if isinstance(targets, Sequence) else type(targets).__name__
            raise MicrobatchError(
                f"{len(self)} microbatches, but target={what}; give a list of one target for each"
            )
        return Batch(self.parts, targets, samples, len(self), presplit=True)


def _arguments(call: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if type(call) is tuple:
        return call, {}
    if type(call) is dict and all(isinstance(key, str) for key in call):
        return (), call
    return (call,), {}


def _count_samples(value: Any) -> int:
    return next((tensor.shape[0] for tensor in tensors_in(value) if tensor.dim()), 0)


# ---- rules: how each argument is split


@dataclass(frozen=True)
class Split:
    """Split every tensor of an argument along a dimension."""

    dim: int = 0


@dataclass(frozen=True)
class Replicate:
    """Give every microbatch the whole argument."""


REPLICATE = Replicate()
"""Give every microbatch the whole argument: a rule for ``Pipeline(rules=...)``."""
Splitter = Callable[[Any, Sequence[int]], Sequence[Any]]
"""``(value, sizes)`` -> the value's part in each microbatch, from the number of samples of each."""
Rule: TypeAlias = "Split | Replicate | Splitter | Mapping[Any, Rule]"
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
        if isinstance(rule, Mapping):
            check_rules(rule)
        elif isinstance(rule, type) or not (isinstance(rule, Split | Replicate) or callable(rule)):
            raise MicrobatchError(
                f"rules={{{name!r}: {rule!r}}}: must be Split(dim), REPLICATE, a function "
                "(value, sizes) -> parts, or a mapping of these"
            )


# ---- split a batch into microbatches

_TARGET_KEY = "target="  # no argument can have this name
_Arguments: TypeAlias = "Mapping[int | str, tuple[Any, Rule | None]]"
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
        return self.value.shape[self.rule.dim] if isinstance(self.rule, Split) else None

    def cut(self, sizes: list[int]) -> Sequence[Any]:
        """Its part in each microbatch."""
        if isinstance(self.rule, Replicate):
            return [self.value] * len(sizes)
        if isinstance(self.rule, Split):
            return _cut_tensor(self.value, self.rule.dim, sizes, self.path)
        parts = self.rule(self.value, sizes)
        if len(parts) != len(sizes):
            raise MicrobatchError(
                f"the function that splits {self.path} gave {len(parts)} parts for {len(sizes)} microbatches"
            )
        return parts

    def __str__(self) -> str:
        dim = self.rule.dim if isinstance(self.rule, Split) else None
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
    if any(isinstance(value, Microbatches) for value in (*args, *kwargs.values(), target)):
        return _presplit(args, kwargs, target)
    if count < 1:
        raise MicrobatchError(f"a batch cannot be split into {count} microbatches; use at least 1")
    if not args and not kwargs and target is MISSING:
        return Batch()
    if rules is not None and not isinstance(rules, Mapping):
        return _split_by(rules(tuple(args), dict(kwargs), target, count), target, count)
    return _split_arguments(len(args), _ruled(args, kwargs, target, rules or {}), count, fewer)


def _presplit(args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> Batch:
    targets = target.calls if isinstance(target, Microbatches) else target
    if not args and not kwargs:
        return Batch(None, targets, None, len(targets), presplit=True)
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
    pieces = {key: _parts_of(*argument, _shown(key)) for key, argument in arguments.items()}
    every = [piece for of_one, _ in pieces.values() for piece in of_one]
    samples = _agreed_samples(every)
    by_function = any(callable(piece.rule) for piece in every)
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
    size, rest = divmod(samples or 0, count)
    sizes = [size + (index < rest) for index in range(count)]
    columns = {
        key: [build(iter(parts)) for parts in zip(*(one.cut(sizes) for one in of_one), strict=True)]
        for key, (of_one, build) in pieces.items()
    }
    targets = columns.pop(_TARGET_KEY, None)
    names = [key for key in columns if isinstance(key, str)]
    parts = [
        Microbatch(
            tuple(columns[position][index] for position in range(positional)),
            {name: columns[name][index] for name in names},
            sizes[index],
            kind=None if by_function else sizes[index],
        )
        for index in range(count)
    ]
    return Batch(parts if columns else None, targets, sizes, count)


def _shown(key: int | str) -> str:
    return "the target" if key == _TARGET_KEY else f"argument {key!r}"


def _agreed_samples(pieces: Sequence[_SplitPart]) -> int | None:
    """The size that all split tensors share, or ``None`` if none is split."""
    tensors = [piece for piece in pieces if piece.samples is not None]
    if not tensors:
        return None
    # Tensors with a rule are right; without rules, the size of most tensors, or of the first one.
    trusted = [tensor for tensor in tensors if tensor.by_rule] or tensors
    samples = Counter(tensor.samples for tensor in trusted).most_common(1)[0][0]
    unlike = [tensor for tensor in tensors if tensor.samples != samples]
    if unlike:
        example = next(tensor for tensor in trusted if tensor.samples == samples)
        raise MicrobatchError(
            f"the batch has {samples} samples ({example}), but {'; '.join(map(str, unlike))}; use rules= to "
            "split it along another dimension, Split(dim), to keep it whole, REPLICATE, or to split it by a "
            "function (value, sizes) -> parts"
        )
    return samples


_Build: TypeAlias = Callable[[Iterator[Any]], Any]
"""Builds an argument of a microbatch from the parts of the whole argument's pieces."""


def _parts_of(value: Any, rule: Rule | None, path: str) -> tuple[list[_SplitPart], _Build]:
    """The pieces of an argument, and what builds it again from their parts."""
    if isinstance(rule, Mapping):
        items, tree = _items(value, rule, path)
        inner = [_parts_of(item, item_rule, at) for at, item, item_rule in items]
        pieces = [piece for of_item, _ in inner for piece in of_item]
        return pieces, lambda parts: pytree.tree_unflatten(
            [build(parts) for _, build in inner], tree
        )
    if not isinstance(rule, Split | None):
        return [_SplitPart(path, value, rule, by_rule=True)], next
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
    if not -leaf.dim() <= rule.dim < leaf.dim():
        raise MicrobatchError(
            f"{path} of shape {list(leaf.shape)} has no dimension {rule.dim} to split; "
            "keep it whole with REPLICATE"
        )
    return _SplitPart(path, leaf, rule, by_rule)


def _items(
    value: Any, rules: Mapping[Any, Rule], path: str
) -> tuple[list[tuple[str, Any, Rule | None]], Any]:
    """The items of an argument, each with its path and its rule; and the structure around them."""
    flatten(value)
    pairs, tree = pytree.tree_flatten_with_path(value, is_leaf=lambda x: x is not value)
    if tree.is_leaf():
        raise MicrobatchError(
            f"{path} is a {type(value).__name__} without items, but its rule is {dict(rules)}"
        )
    keys = [_key(entries[0]) for entries, _ in pairs]
    unknown = [key for key in rules if key not in keys]
    if unknown:
        raise MicrobatchError(f"rules for {unknown} of {path}, which has {keys}")
    items = [
        (path + pytree.keystr(entries), item, rules.get(key))
        for key, (entries, item) in zip(keys, pairs, strict=True)
    ]
    return items, tree


def _key(entry: Any) -> Any:
    if isinstance(entry, pytree.SequenceKey):
        return entry.idx
    return entry.key if isinstance(entry, pytree.MappingKey) else entry.name


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


def output_dim(rules: Rules | None) -> int:
    """The dimension along which outputs are merged.

    Raises:
        MicrobatchError: an argument is split along another dimension than 0, and there is no rule for
            outputs.
    """
    if not isinstance(rules, Mapping):
        return 0
    rule = rules.get(OUTPUT)
    if isinstance(rule, Split):
        return rule.dim
    if rule is not None:
        raise MicrobatchError(
            f"rules={{'output': {rule!r}}}: the rule for outputs must be Split(dim)"
        )
    dims = sorted({entry.dim for entry in rules.values() if isinstance(entry, Split)} - {0})
    if dims:
        raise MicrobatchError(
            f"arguments are split along dimension {dims[0]}; say along which dimension to merge outputs: "
            f"rules={{'output': Split({dims[0]})}} or Split(0)"
        )
    return 0


def merge(outputs: Sequence[Any], dim: int = 0) -> Any:
    """Merge the outputs of microbatches.

    Args:
        outputs: one for each microbatch, all with the same structure. Tensors are concatenated along
            ``dim``, and tensors without dimensions are stacked; other values must be equal in all of them.
        dim: the dimension of the samples.

    Raises:
        MicrobatchError: the structures or values differ.
    """
    flattened = [flatten(output) for output in outputs]
    tree = flattened[0][1]
    if any(other != tree for _, other in flattened):
        kinds = sorted({type(output).__name__ for output in outputs})
        raise MicrobatchError(
            f"microbatches gave outputs of different structures ({', '.join(kinds)}), which cannot be "
            "merged; pass Microbatches(...) instead of a batch to get them one by one"
        )
    columns = zip(*(leaves for leaves, _ in flattened), strict=True)
    return unflatten([_merge_leaves(column, dim) for column in columns], tree)


def _merge_leaves(leaves: Sequence[Any], dim: int) -> Any:
    if not isinstance(leaves[0], Tensor):
        if any(leaf != leaves[0] for leaf in leaves):
            kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves}))
            raise MicrobatchError(
                f"microbatches gave outputs that are not tensors and differ ({kinds}), which cannot be "
                "merged; let the model return tensors, or pass Microbatches(...) to get them one by one"
            )
        return leaves[0]
    if not leaves[0].dim():
        return torch.stack(list(leaves))
    try:
        return torch.cat(list(leaves), dim)
    except (RuntimeError, IndexError) as error:
        shapes = [list(leaf.shape) for leaf in leaves]
        raise MicrobatchError(
            f"outputs of the shapes {shapes} cannot be merged along dimension {dim}; pass Microbatches(...) "
            "instead of a batch to get them one by one"
        ) from error


def bytes_as_text(number: float) -> str:
    """A size in a suitable unit, such as ``1.5 GiB``."""
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.0f} B"
