"""Split a batch into microbatches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from torch import Tensor

from penstock.errors import MicrobatchError
from penstock.values.batch import (
    MISSING,
    OUTPUT,
    REPLICATE,
    TARGET,
    Batch,
    Microbatch,
    Microbatches,
    Replicate,
    Rule,
    Rules,
    Split,
)
from penstock.values.trees import opened, tensors_of

_Name = int | str
_Table: TypeAlias = "Mapping[_Name, tuple[Any, Rule | None]]"
"""Of each argument its value and its rule, if any."""


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
            split along dimension 0 or as ``rules`` say; whatever is no tensor, and tensors without
            dimensions, go to every microbatch.
        kwargs: arguments by name, likewise.
        count: how many microbatches.
        rules: by position or name of the argument.

    Raises:
        MicrobatchError: a rule for no argument, a tensor without its dimension, tensors that disagree
            about the batch size, fewer samples than microbatches, or no microbatch.
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
    """Split the arguments of a call and its target, as far as this process was given them.

    Args:
        args: positional arguments; or :class:`Microbatches` as the only one.
        kwargs: arguments by name.
        target: what the loss compares with; :data:`MISSING` where there is none.
        rules: also for :data:`TARGET`; or a function that splits the whole call.
        count: how many microbatches.
        fewer: whether there may be fewer of them, where there are fewer samples.

    Raises:
        MicrobatchError: as :func:`split`, or the target has another number of samples.
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
            "Microbatches(...) hold all arguments of the model, including "
            "those by name; give no others beside them"
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


# The target stands in the table beside the arguments, which may be named so too.
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
        # What is not split at all is one microbatch, unless a function of the user's may split it.
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
    """The size that all split tensors share, or ``None`` where none is split."""
    leaves = [
        leaf for name, (value, rule) in table.items() for leaf in _leaves(value, rule, _said(name))
    ]
    # What the user said a rule for is right; else most tensors, and of two the first.
    trusted = [leaf for leaf in leaves if leaf.asked] or leaves
    if not leaves:
        return None
    samples = Counter(leaf.size for leaf in trusted).most_common(1)[0][0]
    unlike = [leaf for leaf in leaves if leaf.size != samples]
    if unlike:
        example = next(leaf for leaf in trusted if leaf.size == samples)
        raise MicrobatchError(
            f"the batch has {samples} samples ({example}), but {'; '.join(map(str, unlike))}; say with "
            "rules= by which dimension it is split, Split(dim), that it is kept whole, REPLICATE, or give a "
            "function (value, sizes) -> parts"
        )
    return samples


def _leaves(value: Any, rule: Rule | None, path: str) -> Iterator[_Leaf]:
    """The tensors of an argument that are split along a dimension."""
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
    """The items of an argument, each with where it stands and its rule."""
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
    """How many samples each microbatch gets; the first ones take what is left over."""
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
            f"{path} is a {kind} tensor, which torch does not split along dimension {dim}; say with rules= "
            "how it is split, by a function (value, sizes) -> parts, or that it is kept whole, REPLICATE"
        ) from error
    # Views count changes in place together; what a model does to one microbatch is not done to
    # the next one, so each counts for itself.
    return parts if value.requires_grad else [part.data for part in parts]


def _rebuilt(value: Any, columns: Sequence[Sequence[Any]]) -> list[Any]:
    found = opened(value)
    made = (lambda items: value) if found is None else found.made
    return [made(items) for items in zip(*columns, strict=True)]
