"""Split batches into microbatches by rules, and merge their outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from penstock.errors import MicrobatchError
from penstock.values.structure import Opened, opened, tensors_of

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
        aside: keyword arguments of any type that stay in this process and are not described to others.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    samples: int
    kind: int | None = None
    aside: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """What a process brings to a call of the pipeline.

    Args:
        parts: the microbatches; ``None`` if this process was given no arguments.
        targets: for each microbatch, what the loss compares with; ``None`` if no target was given.
        samples: the number of samples of each microbatch; ``None`` if that is not known here.
        count: the number of microbatches; ``None`` if that is not known here.
        ready: whether the user has split the batch; its outputs are then not merged either.
    """

    parts: Sequence[Microbatch] | None = None
    targets: Sequence[Any] | None = None
    samples: Sequence[int] | None = None
    count: int | None = None
    ready: bool = False


class _Missing:
    """The type of :data:`MISSING`."""

    def __repr__(self) -> str:
        return "nothing"


MISSING: Any = _Missing()
"""Stands for an argument that was not given, since ``None`` is a value that may be given."""


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
        given = {"samples": samples, "targets": targets}
        lengths = {name: len(found) for name, found in given.items() if found is not None}
        wrong = {name: length for name, length in lengths.items() if length != len(calls)}
        if wrong:
            raise MicrobatchError(f"{len(calls)} microbatches, but {wrong}; give one for each")
        self.calls = calls
        self.targets = targets
        split = [_call_of(call) for call in calls]
        counts = samples or [_samples_of(args, kwargs) for args, kwargs in split]
        self.parts = tuple(
            Microbatch(args, kwargs, count)
            for (args, kwargs), count in zip(split, counts, strict=True)
        )

    def __len__(self) -> int:
        return len(self.parts)

    def batch(self, target: Any) -> Batch:
        """What the pipeline takes.

        Raises:
            MicrobatchError: targets were given twice, or not one for each microbatch.
        """
        if target is not MISSING and target is not None and self.targets is not None:
            raise MicrobatchError(
                "targets were given both in Microbatches(targets=...) and as target=; give one of them"
            )
        found = target if self.targets is None else self.targets
        if found is None:
            found = [None] * len(self)
        samples = [part.samples for part in self.parts]
        if found is MISSING:
            return Batch(self.parts, None, samples, len(self), ready=True)
        if not isinstance(found, Sequence) or len(found) != len(self):
            what = f"{len(found)}" if isinstance(found, Sequence) else type(found).__name__
            raise MicrobatchError(
                f"{len(self)} microbatches, but target={what}; give a list of one target for each"
            )
        return Batch(self.parts, found, samples, len(self), ready=True)


def _call_of(call: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if type(call) is tuple:
        return call, {}
    if type(call) is dict and all(isinstance(key, str) for key in call):
        return (), call
    return (call,), {}


def _samples_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    found: list[Tensor] = [tensor for _, tensor in tensors_of((args, kwargs)) if tensor.dim()]
    return found[0].shape[0] if found else 0


# ---- rules


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


TARGET = "target"
"""The name of ``target=`` in rules."""
OUTPUT = "output"
"""The name in rules of the dimension along which outputs are merged."""


# ---- split a batch into microbatches


_Name = int | str
_Table: TypeAlias = "Mapping[_Name, tuple[Any, Rule | None]]"
"""The value and the rule of each argument; the rule may be None."""


class _Leaf(NamedTuple):
    """A tensor that is split."""

    path: str
    shape: list[int]
    dim: int
    asked: bool

    @property
    def size(self) -> int:
        return self.shape[self.dim]

    def __str__(self) -> str:
        return f"{self.path} of shape {self.shape} has {self.size} in dimension {self.dim}"


def split(
    args: Sequence[Any], kwargs: Mapping[str, Any], count: int, rules: Rules | None = None
) -> list[Microbatch]:
    """Split the arguments of a call into ``count`` microbatches, whose sizes differ by at most one.

    Args:
        args: positional arguments. Tensors in them (also nested in tuples, lists, dicts, dataclasses) are
            split along dimension 0, or as ``rules`` say. Values that are not tensors, and tensors without
            dimensions, go to every microbatch.
        kwargs: keyword arguments, likewise.
        count: the number of microbatches.
        rules: by position or name of the argument.

    Raises:
        MicrobatchError: a rule is for no argument, a tensor lacks the dimension to split, tensors
            disagree about the number of samples, there are fewer samples than microbatches, or
            ``count`` is below 1.
    """
    found = split_batch(args, kwargs, MISSING, rules, count)
    if found.parts is None:
        return [Microbatch((), {}, 0, kind=0) for _ in range(count)]
    return list(found.parts)


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

    Args:
        args: positional arguments; or :class:`Microbatches` as the only one.
        kwargs: keyword arguments.
        target: what the loss compares with; :data:`MISSING` if there is none.
        rules: by argument, also for :data:`TARGET`; or a function that splits the whole call.
        count: the number of microbatches.
        fewer: whether there may be fewer microbatches, if there are fewer samples.

    Raises:
        MicrobatchError: as for :func:`split`, or the target has another number of samples.
    """
    if any(isinstance(given, Microbatches) for given in (*args, *kwargs.values(), target)):
        return _ready(args, kwargs, target)
    if count < 1:
        raise MicrobatchError(f"a batch cannot be split into {count} microbatches; use at least 1")
    if not args and not kwargs and target is MISSING:
        return Batch()
    if rules is not None and not isinstance(rules, Mapping):
        return _split_by(rules(tuple(args), dict(kwargs), target, count), target, count)
    return _split_table(len(args), _table(args, kwargs, target, rules or {}), count, fewer=fewer)


def _ready(args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> Batch:
    targets = target.calls if isinstance(target, Microbatches) else target
    if not args and not kwargs:
        return Batch(None, targets, None, len(targets), ready=True)
    found = args[0] if args else None
    if not isinstance(found, Microbatches) or len(args) > 1 or kwargs:
        raise MicrobatchError(
            "Microbatches(...) hold all arguments of the model, including keyword arguments; pass no "
            "others beside them"
        )
    return found.batch(targets)


def _split_by(found: Any, target: Any, count: int) -> Batch:
    if not isinstance(found, Microbatches):
        raise MicrobatchError(
            "the rules= function that splits a call returned a "
            f"{type(found).__name__}; it must return Microbatches"
        )
    if len(found) > count:
        raise MicrobatchError(
            f"the rules= function that splits a call returned {len(found)} microbatches of at most {count}"
        )
    return found.batch(MISSING if target is MISSING else None)


# The target's key in the table; no argument can have this name.
_TARGET = "target="


def _table(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Any,
    rules: Mapping[_Name, Rule],
) -> _Table:
    named: dict[_Name, Any] = dict([*enumerate(args), *kwargs.items()])
    spare = {TARGET, OUTPUT} - kwargs.keys()
    unknown = [key for key in rules if key not in named and key not in spare]
    if unknown and named:
        raise MicrobatchError(f"rules for {unknown}, but the arguments are {list(named)}")
    table = {name: (value, rules.get(name)) for name, value in named.items()}
    if target is not MISSING:
        table[_TARGET] = target, rules.get(TARGET)
    return table


def _split_table(positional: int, table: _Table, count: int, *, fewer: bool) -> Batch:
    samples = _samples(table)
    if samples == 0:
        raise MicrobatchError("the batch is empty; give it at least one sample per microbatch")
    if fewer:
        # If nothing is split there is one microbatch, unless a function of the user's may split something.
        count = min(count, samples or (count if _has_splitter(table) else 1))
    if samples is not None and samples < count:
        raise MicrobatchError(
            f"{samples} samples cannot be split into {count} microbatches; "
            f"use at most {samples} microbatches or a larger batch"
        )
    sizes = _sizes(samples or 0, count)
    columns = {name: _cut(value, rule, sizes, _said(name)) for name, (value, rule) in table.items()}
    targets = columns.pop(_TARGET, None)
    parts = [
        _part(positional, columns, i, size, alike=not _has_splitter(table))
        for i, size in enumerate(sizes)
    ]
    return Batch(parts if columns else None, targets, sizes, count)


def _has_splitter(table: _Table) -> bool:
    return any(_functions(rule) for _, rule in table.values())


def _functions(rule: Rule | None) -> bool:
    if isinstance(rule, Mapping):
        return any(map(_functions, rule.values()))
    return not isinstance(rule, Split | Replicate | None)


def _said(name: _Name) -> str:
    return "the target" if name == _TARGET else f"argument {name!r}"


def _samples(table: _Table) -> int | None:
    """The size that all split tensors share, or ``None`` if none is split."""
    leaves = [
        leaf for name, (value, rule) in table.items() for leaf in _leaves(value, rule, _said(name))
    ]
    # Tensors with a rule are right; without rules, the size of most tensors, or of the first one.
    trusted = [leaf for leaf in leaves if leaf.asked] or leaves
    if not leaves:
        return None
    samples = Counter(leaf.size for leaf in trusted).most_common(1)[0][0]
    unlike = [leaf for leaf in leaves if leaf.size != samples]
    if unlike:
        example = next(leaf for leaf in trusted if leaf.size == samples)
        raise MicrobatchError(
            f"the batch has {samples} samples ({example}), but {'; '.join(map(str, unlike))}; use rules= to "
            "split it along another dimension, Split(dim), to keep it whole, REPLICATE, or to split it by a "
            "function (value, sizes) -> parts"
        )
    return samples


def _leaves(value: Any, rule: Rule | None, path: str) -> Iterator[_Leaf]:
    """The tensors in an argument that are split."""
    if isinstance(rule, Mapping):
        for where, item, own in _ruled(value, rule, path):
            yield from _leaves(item, own, where)
    elif isinstance(rule, Split | None):
        for where, tensor in tensors_of(value, path):
            if tensor.dim() or (isinstance(rule, Split) and isinstance(value, Tensor)):
                yield _leaf(tensor, rule, where)


def _leaf(tensor: Tensor, rule: Split | None, path: str) -> _Leaf:
    dim = 0 if rule is None else rule.dim
    if not -tensor.dim() <= dim < tensor.dim():
        raise MicrobatchError(
            f"{path} of shape {list(tensor.shape)} has no dimension {dim} to split; "
            "keep it whole with REPLICATE"
        )
    return _Leaf(path, list(tensor.shape), dim, rule is not None)


def _ruled(
    value: Any, rules: Mapping[Any, Rule], path: str
) -> Iterator[tuple[str, Any, Rule | None]]:
    """The items of an argument, each with its path and its rule."""
    found = opened(value)
    if found is None:
        raise MicrobatchError(
            f"{path} is a {type(value).__name__} without items, but its rule is {dict(rules)}"
        )
    unknown = [key for key in rules if key not in found.keys]
    if unknown:
        raise MicrobatchError(f"rules for {unknown} of {path}, which has {list(found.keys)}")
    for key, item in zip(found.keys, found.items, strict=True):
        yield found.path(path, key), item, rules.get(key)


def _sizes(batch: int, count: int) -> list[int]:
    """The number of samples of each microbatch; the first ones take the remainder."""
    size, rest = divmod(batch, count)
    return [size + (index < rest) for index in range(count)]


def _part(
    positional: int,
    columns: Mapping[_Name, Sequence[Any]],
    index: int,
    samples: int,
    *,
    alike: bool,
) -> Microbatch:
    args = tuple(columns[position][index] for position in range(positional))
    kwargs = {name: column[index] for name, column in columns.items() if isinstance(name, str)}
    return Microbatch(args, kwargs, samples, kind=samples if alike else None)


def _cut(value: Any, rule: Rule | None, sizes: list[int], path: str) -> Sequence[Any]:
    """An argument's part in each microbatch."""
    if rule is REPLICATE or isinstance(rule, Replicate):
        return [value] * len(sizes)
    if isinstance(rule, Mapping):
        columns = [_cut(item, own, sizes, at) for at, item, own in _ruled(value, rule, path)]
        return _rebuilt(value, columns)
    if isinstance(rule, Split | None):
        return _cut_along(value, 0 if rule is None else rule.dim, sizes, path)
    parts = rule(value, sizes)
    if len(parts) != len(sizes):
        raise MicrobatchError(
            f"the function that splits {path} gave {len(parts)} parts for {len(sizes)} microbatches"
        )
    return parts


def _cut_along(value: Any, dim: int, sizes: list[int], path: str) -> Sequence[Any]:
    if isinstance(value, Tensor):
        return _cut_tensor(value, dim, sizes, path)
    if isinstance(value, np.ndarray):
        raise MicrobatchError(
            f"{path} is a numpy array, which cannot be split; make it a tensor with torch.as_tensor"
        )
    found = opened(value)
    if found is None or not found.items:
        return [value] * len(sizes)
    pairs = zip(found.keys, found.items, strict=True)
    return _rebuilt(
        value, [_cut_along(item, dim, sizes, found.path(path, key)) for key, item in pairs]
    )


def _cut_tensor(value: Tensor, dim: int, sizes: list[int], path: str) -> Sequence[Tensor]:
    if not value.dim():
        return [value] * len(sizes)
    try:
        parts: Sequence[Tensor] = value.split(sizes, dim)
    except (RuntimeError, NotImplementedError) as error:
        kind = "nested" if value.is_nested else str(value.layout).rpartition(".")[2]
        raise MicrobatchError(
            f"{path} is a {kind} tensor, which torch does not split along dimension {dim}; use rules= to "
            "split it by a function (value, sizes) -> parts, or to keep it whole, REPLICATE"
        ) from error
    # Views share one version counter, but an in-place change to one microbatch does not change the
    # others. Through .data each part has a counter of its own.
    return parts if value.requires_grad else [part.data for part in parts]


def _rebuilt(value: Any, columns: Sequence[Sequence[Any]]) -> list[Any]:
    found = opened(value)
    made = (lambda items: value) if found is None else found.made
    return [made(items) for items in zip(*columns, strict=True)]


# ---- merge outputs


def output_dim(rules: Rules | None) -> int:
    """The dimension along which outputs are merged.

    Raises:
        MicrobatchError: an argument is split along another dimension than 0, and there is no rule for
            outputs.
    """
    if not isinstance(rules, Mapping):
        return 0
    given = rules.get(OUTPUT)
    if isinstance(given, Split):
        return given.dim
    if given is not None:
        raise MicrobatchError(
            f"rules={{'output': {given!r}}}: the rule for outputs must be Split(dim)"
        )
    dims = sorted({rule.dim for rule in rules.values() if isinstance(rule, Split)} - {0})
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
    first = outputs[0]
    if any(type(output) is not type(first) for output in outputs):
        kinds = sorted({type(output).__name__ for output in outputs})
        raise MicrobatchError(f"microbatches gave outputs of different types: {kinds}")
    if isinstance(first, Tensor):
        return _joined(outputs, dim)
    parts = [found for found in map(opened, outputs) if found is not None]
    if parts:
        return parts[0].made([merge(items, dim) for items in _columns(parts)])
    if any(output != first for output in outputs):
        raise MicrobatchError(f"microbatches gave different values: {list(outputs)}")
    return first


def _joined(tensors: Sequence[Tensor], dim: int) -> Tensor:
    if not tensors[0].dim():
        return torch.stack(list(tensors))
    try:
        return torch.cat(list(tensors), dim)
    except (RuntimeError, IndexError) as error:
        shapes = [list(tensor.shape) for tensor in tensors]
        raise MicrobatchError(
            f"outputs of the shapes {shapes} cannot be merged along dimension {dim}; pass Microbatches(...) "
            "instead of a batch to get them one by one"
        ) from error


def _columns(parts: Sequence[Opened]) -> list[list[Any]]:
    first = parts[0]
    if any(set(part.keys) != set(first.keys) for part in parts):
        lengths = sorted({len(part.keys) for part in parts})
        if all(isinstance(part.keys, range) for part in parts):
            raise MicrobatchError(f"microbatches gave outputs of different lengths: {lengths}")
        raise MicrobatchError("microbatches gave dicts with different keys")
    found = [dict(zip(part.keys, part.items, strict=True)) for part in parts]
    return [[items[key] for items in found] for key in first.keys]
