"""Split a batch into microbatches, and merge the outputs of microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import MicrobatchError


@dataclass(frozen=True)
class Split:
    """Split every tensor of an argument along a dimension."""

    dim: int = 0


@dataclass(frozen=True)
class Replicate:
    """Give every microbatch the whole argument."""


REPLICATE = Replicate()
Rule = Split | Replicate
Rules = Mapping[int | str, Rule]
"""For an argument, by position or name, how it is split. Without a rule: along dimension 0.

``"target"`` says it of the target, and ``"output"`` along which dimension outputs are put together.
"""
TARGET = "target"
OUTPUT = "output"


@dataclass(frozen=True)
class Microbatch:
    """One part of a batch.

    Args:
        args: positional arguments of the model.
        kwargs: arguments by name.
        samples: how many samples of the batch it holds; 0 where no argument is split.
        kind: parts of one batch and kind are alike in all but data; ``None`` says nothing.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    samples: int
    kind: int | None = None


@dataclass(frozen=True)
class Batch:
    """What a process brings to a call of the pipeline.

    Args:
        parts: the microbatches; ``None`` where this process was given no argument.
        targets: for each microbatch, what the loss compares with; ``None`` where none was given.
        samples: how many samples each microbatch holds; ``None`` where that is not known here.
        count: how many microbatches there are; ``None`` where that is not known here.
    """

    parts: Sequence[Microbatch] | None = None
    targets: Sequence[Any] | None = None
    samples: Sequence[int] | None = None
    count: int | None = None


class _Missing:
    """Nothing was given; ``None`` is something."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()


def split(
    args: Sequence[Any], kwargs: Mapping[str, Any], count: int, rules: Rules | None = None
) -> list[Microbatch]:
    """Split the arguments of a call into ``count`` microbatches, whose sizes differ by at most one.

    Args:
        args: positional arguments. Tensors in them (also nested in tuples, lists, dicts) are split along
            dimension 0 or as ``rules`` say; whatever is no tensor goes to every microbatch.
        kwargs: arguments by name, likewise.
        count: how many microbatches.
        rules: by position or name of the argument.

    Raises:
        MicrobatchError: a rule for no argument, a tensor without its dimension, tensors that disagree
            about the batch size, fewer samples than microbatches, or no microbatch.
    """
    if count < 1:
        raise MicrobatchError(f"a batch cannot be split into {count} microbatches; use at least 1")
    named: dict[int | str, Any] = dict([*enumerate(args), *kwargs.items()])
    found = dict(rules or {})
    unknown = [key for key in found if key not in named]
    if unknown:
        raise MicrobatchError(f"rules for {unknown}, but the arguments are {list(named)}")
    batch = _batch_size(named, found)
    if batch == 0:
        raise MicrobatchError("the batch is empty; give it at least one sample a microbatch")
    if batch is not None and batch < count:
        raise MicrobatchError(
            f"{batch} samples cannot be split into {count} microbatches; "
            f"use at most {batch} microbatches or a larger batch"
        )
    sizes = _sizes(batch or 0, count)
    columns = {key: _cut(value, found.get(key, Split()), sizes) for key, value in named.items()}
    return [_part(len(args), columns, index, size) for index, size in enumerate(sizes)]


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
        args: positional arguments.
        kwargs: arguments by name.
        target: what the loss compares with; :data:`MISSING` where there is none.
        rules: also for :data:`TARGET`.
        count: how many microbatches.
        fewer: whether there may be fewer of them, where there are fewer samples.

    Raises:
        MicrobatchError: as :func:`split`, or the target has another number of samples.
    """
    spare = {TARGET, OUTPUT} - kwargs.keys()
    given = {*range(len(args)), *kwargs}
    own = {k: rule for k, rule in (rules or {}).items() if k not in spare}
    named: Rules = {TARGET: (rules or {}).get(TARGET, Split())}
    asked = None if target is MISSING else {TARGET: target}
    if fewer:
        whole = split(args, kwargs, 1, own) if given else split((), asked or {}, 1, named)
        count = min(count, whole[0].samples or 1)
    parts = split(args, kwargs, count, own) if given else None
    targets = None if asked is None else split((), asked, count, named)
    if parts and targets:
        _check_alike(parts, targets)
    known = parts or targets
    if known is None:
        return Batch()
    found = None if targets is None else [part.kwargs[TARGET] for part in targets]
    return Batch(parts, found, [part.samples for part in known], count)


def _check_alike(parts: Sequence[Microbatch], targets: Sequence[Microbatch]) -> None:
    unlike = [(a.samples, b.samples) for a, b in zip(parts, targets, strict=True)]
    if any(a != b and a and b for a, b in unlike):
        raise MicrobatchError(
            f"{sum(a for a, _ in unlike)} samples, but a target for {sum(b for _, b in unlike)}"
        )


def output_dim(rules: Rules | None) -> int:
    """Along which dimension outputs are put together.

    Raises:
        MicrobatchError: arguments are split along another dimension than 0, and no rule says it of outputs.
    """
    given = (rules or {}).get(OUTPUT)
    if isinstance(given, Split):
        return given.dim
    dims = sorted({rule.dim for rule in (rules or {}).values() if isinstance(rule, Split)} - {0})
    if dims:
        raise MicrobatchError(
            f"arguments are split along dimension {dims[0]}; say along which one outputs are put "
            f"together: rules={{'output': Split({dims[0]})}} or Split(0)"
        )
    return 0


def _batch_size(named: Mapping[int | str, Any], rules: Rules) -> int | None:
    """The size that all split tensors share, or ``None`` where none is split."""
    sizes: dict[str, int] = {}
    for key, value in named.items():
        rule = rules.get(key, Split())
        if isinstance(rule, Split):
            for path, tensor in _tensors(value, f"argument {key!r}"):
                sizes[path] = _size(tensor, rule.dim, path)
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{path}: {size}" for path, size in sizes.items())
        raise MicrobatchError(
            f"the arguments disagree about the batch size ({listed}); name the dimension to split "
            "with Split(dim) or keep an argument whole with REPLICATE"
        )
    return next(iter(sizes.values()), None)


def _size(tensor: Tensor, dim: int, path: str) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise MicrobatchError(
            f"{path} of shape {list(tensor.shape)} has no dimension {dim} to split; "
            "keep it whole with REPLICATE"
        )
    return tensor.shape[dim]


def _tensors(value: Any, path: str) -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(path, value)]
    if isinstance(value, (tuple, list)):
        items: Any = enumerate(value)
    elif isinstance(value, dict):
        items = value.items()
    else:
        return []
    return [found for key, item in items for found in _tensors(item, f"{path}[{key!r}]")]


def _sizes(batch: int, count: int) -> list[int]:
    """How many samples each microbatch gets; the first ones take what is left over."""
    size, rest = divmod(batch, count)
    return [size + (index < rest) for index in range(count)]


def _part(
    positional: int, columns: Mapping[int | str, Sequence[Any]], index: int, samples: int
) -> Microbatch:
    args = tuple(columns[position][index] for position in range(positional))
    kwargs = {key: column[index] for key, column in columns.items() if isinstance(key, str)}
    return Microbatch(args, kwargs, samples, kind=samples)


def _cut(value: Any, rule: Rule, sizes: list[int]) -> Sequence[Any]:
    """An argument's part in each microbatch."""
    if isinstance(rule, Split):
        if isinstance(value, Tensor):
            parts: Sequence[Tensor] = value.split(sizes, rule.dim)
            # Views count changes in place together; what a model does to one microbatch is not done to
            # the next one, so each counts for itself.
            return parts if value.requires_grad else [part.data for part in parts]
        if isinstance(value, (tuple, list)) and value:
            columns = zip(*(_cut(item, rule, sizes) for item in value), strict=True)
            # A named tuple is made by a method of its own.
            make = getattr(value, "_make", type(value))
            return [make(items) for items in columns]
        if isinstance(value, dict) and value:
            rows = zip(*(_cut(item, rule, sizes) for item in value.values()), strict=True)
            return [dict(zip(value, items, strict=True)) for items in rows]
    return [value] * len(sizes)


def merge(outputs: Sequence[Any], dim: int = 0) -> Any:
    """Put the outputs of microbatches together.

    Args:
        outputs: one for each microbatch, all of one structure. Tensors with dimensions are concatenated
            along ``dim``, those without are stacked; other values must be equal in all.
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
    if isinstance(first, (tuple, list)):
        return type(first)(merge(items, dim) for items in _columns(outputs))
    if isinstance(first, dict):
        return {key: merge(_items(outputs, key), dim) for key in first}
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
            f"outputs of the shapes {shapes} cannot be put together along dimension {dim}"
        ) from error


def _columns(outputs: Sequence[Any]) -> list[tuple[Any, ...]]:
    lengths = sorted({len(output) for output in outputs})
    if len(lengths) > 1:
        raise MicrobatchError(f"microbatches gave outputs of different lengths: {lengths}")
    return list(zip(*outputs, strict=True))


def _items(outputs: Sequence[Any], key: Any) -> list[Any]:
    if any(key not in output or len(output) != len(outputs[0]) for output in outputs):
        raise MicrobatchError("microbatches gave dicts with different keys")
    return [output[key] for output in outputs]
