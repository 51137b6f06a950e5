"""The pieces of arguments, and how each is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from penstock._engine.masks import BlockMask, samples_of, split_mask
from penstock._engine.microbatches.rules import (
    REPLICATE,
    ItemRule,
    Replicate,
    Rule,
    Split,
    Splitter,
)
from penstock._engine.values import (
    Place,
    flatten,
    items_of,
    leaves_in,
    path_of,
    storage_of,
    unflatten,
)
from penstock.errors import MicrobatchError


class SplitPiece(NamedTuple):
    """A piece of an argument that is split in one way: a leaf, or what a rule is for.

    Attributes:
        path: where it is, for messages.
        value: the piece.
        rule: how it is split; None if nobody said so.
        cut: returns its part in each microbatch, from the piece and the samples of each.
        samples: how many samples it has, if it is split by its entries or along a dimension.
    """

    path: str
    value: Any
    rule: ItemRule | None
    cut: Callable[[Any, Sequence[int]], Sequence[Any]]
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


def _piece(path: str, value: Any, rule: ItemRule | None, *, alone: bool = True) -> SplitPiece:
    """Return how a piece is cut.

    Args:
        path: where it is.
        value: the piece.
        rule: how it is to be split.
        alone: whether the rule is for this piece, and not for all that an argument holds.
    """
    if isinstance(rule, Replicate):
        return SplitPiece(path, value, rule, _repeated)
    if not isinstance(rule, Split | None):
        return SplitPiece(path, value, rule, partial(_cut_by_function, rule, path))
    if rule is not None and rule.dim is None:
        return SplitPiece(path, value, rule, _cut_entries, len(value))
    if isinstance(value, BlockMask):
        samples = samples_of(value)
        return SplitPiece(path, value, rule, _repeated if samples is None else split_mask, samples)
    if isinstance(value, np.ndarray):
        raise MicrobatchError(
            f"{path} is a numpy array, which cannot be split; make it a tensor with torch.as_tensor"
        )
    if not isinstance(value, Tensor) or not (value.dim() or (rule is not None and alone)):
        return SplitPiece(path, value, REPLICATE, _repeated)
    dim, chunks = (
        0 if rule is None or rule.dim is None else rule.dim,
        1 if rule is None else rule.chunks,
    )
    if not -value.dim() <= dim < value.dim():
        raise MicrobatchError(
            f"{path} of shape {list(value.shape)} has no dimension {dim} to split; "
            "keep it whole with REPLICATE"
        )
    samples, rest = divmod(value.shape[dim], chunks)
    if rest:
        raise MicrobatchError(
            f"{path} of shape {list(value.shape)} does not consist of {chunks} chunks in dimension {dim}"
        )
    return SplitPiece(path, value, rule, partial(_cut_tensor, dim, chunks, path), samples)


def _repeated(value: Any, sizes: Sequence[int]) -> Sequence[Any]:
    return [value] * len(sizes)


def _cut_entries(value: Any, sizes: Sequence[int]) -> Sequence[Any]:
    return [value[begin:end] for begin, end in pairwise([0, *accumulate(sizes)])]


def _cut_by_function(
    function: Splitter, path: str, value: Any, sizes: Sequence[int]
) -> Sequence[Any]:
    parts: Sequence[Any] = function(value, sizes)
    if len(parts) != len(sizes):
        raise MicrobatchError(
            f"the function that splits {path} gave {len(parts)} parts for {len(sizes)} microbatches"
        )
    return parts


def _cut_tensor(
    dim: int, chunks: int, path: str, value: Tensor, sizes: Sequence[int]
) -> Sequence[Tensor]:
    try:
        parts: Sequence[Tensor]
        if chunks == 1:
            parts = value.split([*sizes], dim)
        else:
            dim %= value.dim()
            rows = value.unflatten(dim, (chunks, -1)).split([*sizes], dim + 1)
            parts = [part.flatten(dim, dim + 1) for part in rows]
    except (RuntimeError, NotImplementedError) as error:
        raise MicrobatchError(
            f"{path} is a {storage_of(value)} tensor, which torch does not split along dimension {dim}; use "
            "split= to split it by a function (value, sizes) -> parts, or to keep it whole, REPLICATE"
        ) from error
    # Views share one version counter, but an in-place change to one microbatch does not change the
    # others. Through .data each part has a counter of its own.
    return parts if value.requires_grad else [part.data for part in parts]


class SplitPieces(NamedTuple):
    """The pieces of an argument.

    Attributes:
        pieces: what is known of each.
        apart: takes an argument that looks the same into its pieces.
        build: builds the argument again from a part of each.
    """

    pieces: Sequence[SplitPiece]
    apart: Callable[[Any], Sequence[Any]]
    build: Callable[[Iterator[Any]], Any]


def pieces_of(value: Any, rule: Rule | None, path: str) -> SplitPieces:
    """The pieces of an argument, whose rule may be a mapping with one for each item."""
    if not isinstance(rule, Mapping):
        return _pieces_of_item(value, rule, path)
    items = items_of(value)
    if items is None:
        raise MicrobatchError(
            f"{path} is a {type(value).__name__} without items, but its rule is {dict(rule)}"
        )
    unknown = [key for key in rule if key not in items.of]
    if unknown:
        raise MicrobatchError(f"split= has rules for {unknown} of {path}, which has {[*items.of]}")
    inner = [
        _pieces_of_item(item, rule.get(key), path + path_of((key,)))
        for key, item in items.of.items()
    ]
    pieces = [piece for item in inner for piece in item.pieces]
    return SplitPieces(
        pieces,
        lambda _: [piece.value for piece in pieces],
        lambda parts: items.build([item.build(parts) for item in inner]),
    )


def _pieces_of_item(value: Any, rule: ItemRule | None, path: str) -> SplitPieces:
    by_entry = isinstance(rule, Split) and rule.dim is None
    if by_entry and not isinstance(value, list | tuple):
        raise MicrobatchError(
            f"{path} is a {type(value).__name__}, but its rule Split(None) is for a list or tuple"
        )
    if by_entry or not isinstance(rule, Split | None) or isinstance(value, Tensor):
        return SplitPieces([_piece(path, value, rule)], _alone, next)
    if not any(isinstance(leaf, Tensor | np.ndarray) for leaf in flatten(value)[0]):
        return SplitPieces([_piece(path, value, REPLICATE)], _alone, next)
    return pieces_of_leaves(
        value, lambda place, leaf: _piece(path + path_of(place), leaf, rule, alone=False)
    )


def _alone(value: Any) -> Sequence[Any]:
    return (value,)


def pieces_of_leaves(value: Any, piece: Callable[[Place, Any], SplitPiece]) -> SplitPieces:
    """A piece for each leaf of a value; a block mask is one."""
    pieces = [piece(place, leaf) for place, leaf in leaves_in(value, with_whole_masks=True)]
    (_, structure), count = flatten(value, with_whole_masks=True), len(pieces)
    return SplitPieces(
        pieces,
        lambda value: flatten(value, with_whole_masks=True)[0],
        lambda parts: unflatten([next(parts) for _ in range(count)], structure),
    )


def columns_of(
    arguments: Mapping[int | str, tuple[Any, SplitPieces]], sizes: Sequence[int]
) -> dict[int | str, list[Any]]:
    """Each argument in each microbatch, from the argument and its pieces."""
    columns = {}
    for key, (value, (pieces, apart, build)) in arguments.items():
        parts = []
        for piece, of_piece in zip(pieces, apart(value), strict=True):
            parts.append(piece.cut(of_piece, sizes))
        columns[key] = [*map(build, map(iter, zip(*parts, strict=True)))]
    return columns
