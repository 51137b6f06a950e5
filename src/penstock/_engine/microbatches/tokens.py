"""Sequences of tokens: packed one after the other into a row, or padded; how microbatches share them.

The names are those of transformers, TRL and flash-attn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock._engine.masks import BlockMask, mask_of_tokens
from penstock.errors import MicrobatchError

BOUNDS = frozenset(
    ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k")
)
"""Names of the places where sequences begin, and where the last one ends."""
LONGEST = frozenset(("max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_length_q", "max_length_k"))
"""Names of the length of the longest sequence."""
POSITIONS, ORDINALS, MASK = "position_ids", "seq_idx", "attention_mask"
IGNORED = -100
"""The label of a token that no loss counts, in torch and transformers."""
_MULTIPLE = 8
"""What the lengths of padded microbatches are multiples of, so that few lengths occur."""


class Share(NamedTuple):
    """The tokens and sequences of a microbatch: each from one number up to another.

    Attributes:
        begin: its first token.
        end: the token after its last one.
        first: its first sequence.
        after: the sequence after its last one.
    """

    begin: int
    end: int
    first: int
    after: int


@dataclass(frozen=True)
class Row:
    """Sequences packed one after the other into one row of tokens.

    Attributes:
        bounds: where each sequence begins, and where the last one ends.
        dim: the dimension of the tokens: 1 after a dimension of size 1, else 0.
    """

    bounds: tuple[int, ...]
    dim: int

    @property
    def length(self) -> int:
        """The number of tokens."""
        return self.bounds[-1]

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        return len(self.bounds) - 1

    def shares(self, count: int) -> list[Share]:
        """Up to ``count`` microbatches of whole sequences, with about as many tokens each."""
        lengths = [end - begin for begin, end in pairwise(self.bounds)]
        ends = [0, *accumulate(even_sizes(lengths, min(count, len(lengths))))]
        return [Share(self.bounds[a], self.bounds[b], a, b) for a, b in pairwise(ends)]

    def part(self, path: str, share: Share, name: str, value: Any) -> Any:
        """A microbatch's part of a value.

        Raises:
            MicrobatchError: it is a tensor that has neither a place for each token nor for each sequence.
        """
        if isinstance(value, BlockMask):
            return mask_of_tokens(value, share.begin, share.end)
        if not isinstance(value, Tensor):
            # An upper bound; each other number would be a kind of its own.
            is_longest = name in LONGEST and type(value) is int and value > 0
            return 1 << (value - 1).bit_length() if is_longest else value
        if not value.dim():
            return value
        if name in BOUNDS and value.dim() == 1 and len(value) == len(self.bounds):
            return value[share.first : share.after + 1] - value[share.first]
        dim = self.dim_of(value)
        if dim is not None:
            part = narrowed(value, dim, share.begin, share.end)
            if value.shape[-2:] == (self.length, self.length) and dim < value.dim() - 1:
                part = narrowed(part, -1, share.begin, share.end)  # a mask from token to token
            return part - part.select(dim, 0).unsqueeze(dim) if name == ORDINALS else part
        if len(value) == self.sequences:
            return narrowed(value, 0, share.first, share.after)
        raise MicrobatchError(
            f"{path} of shape {list(value.shape)} has neither a dimension of the {self.length} tokens of "
            f"the packed row nor one of its {self.sequences} sequences; say in split= how to split it: "
            "REPLICATE, or a function (value, sizes) -> parts, which gets the number of sequences in each"
        )

    def dim_of(self, value: Tensor) -> int | None:
        """The dimension of a tensor that has a place for each token; None if it has none."""
        if value.shape[-2:] == (self.length, self.length):
            return value.dim() - 2
        places = value.shape[:3]
        return places.index(self.length) if self.length in places else None


def find_row(named: Iterable[tuple[str, Any]]) -> Row | None:
    """The packed row that a batch consists of; None if it is no such batch.

    Bounds say it, or else positions that start again; these only where no mask says what tokens see.

    Args:
        named: the tensors and plain values of the model's arguments, with their names.
    """
    tensors = [(name, value) for name, value in named if isinstance(value, Tensor)]
    first = dict(reversed(tensors))
    stated = next((first[n] for n in BOUNDS & first.keys() if first[n].dim() == 1), None)
    bounds = _restarts(first) if stated is None else stated.tolist()
    if len(bounds) < 2 or bounds[0]:
        return None
    shapes = [value.shape for name, value in tensors if name not in BOUNDS]
    if any(shape[:2] == (1, bounds[-1]) for shape in shapes):
        return Row(tuple(bounds), 1)
    rows = any(len(s) > 1 and s[0] > 1 and s[0] * s[1] == bounds[-1] for s in shapes)
    return Row(tuple(bounds), 0) if not rows and stated is not None else None


def _restarts(named: dict[str, Tensor]) -> list[int]:
    """Where a row's positions or numbers of sequences start again, and its end; nothing for one sequence."""
    for name, step in ((POSITIONS, 1), (ORDINALS, 0)):
        row = named.get(name)
        if row is None or row.dim() != 2 or len(row) != 1 or MASK in named:
            continue
        starts = (row[0].diff() != step).nonzero().flatten() + 1
        if len(starts):
            return [0, *starts.tolist(), row.shape[1]]
    return []


def bounds_by_rows(value: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The bounds of sequences in several rows, for microbatches of some rows each: a rule for splitting."""
    length = int(value[-1]) // sum(sizes)
    ends = [0, *(end * length for end in accumulate(sizes))]
    return [value[(value >= a) & (value <= b)] - a for a, b in pairwise(ends)]


def labels_that_count(labels: Any) -> int | None:
    """Return how many of a tensor of labels no loss ignores; None if it is none of labels."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype is torch.bool:
        return None
    return int((labels != IGNORED).sum())


def narrowed(value: Tensor, dim: int, begin: int, end: int) -> Tensor:
    """A part of a tensor, from one place up to another."""
    part = value.narrow(dim, begin, end - begin)
    return part if value.requires_grad else part.data.contiguous()


# ---- sequences that are padded to one length


def trimmed(mask: Tensor) -> tuple[int, int]:
    """Where the tokens of some sequences begin and end at the latest, without what is padding in all."""
    used = mask.any(0).nonzero()
    begin, after = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 1)
    end = -(-after // _MULTIPLE) * _MULTIPLE
    return begin // _MULTIPLE * _MULTIPLE, min(end, mask.shape[1])


# ---- as much work for each microbatch


def even_sizes(lengths: Sequence[int], count: int) -> list[int]:
    """Return how many neighbours each of ``count`` microbatches gets, so that the largest work is the least.

    Args:
        lengths: of the sequences, of which there are at least ``count``.
        count: the number of microbatches.
    """

    def filled(most: int) -> list[int]:
        sizes, room = [0], most
        for length in lengths:
            if length > room and sizes[-1]:
                sizes.append(0)
                room = most
            sizes[-1] += 1
            room -= length
        return sizes

    least = max(max(lengths), -(-sum(lengths) // count))
    limits = range(least, sum(lengths) + 1)
    # The least limit with which they fit; below it a microbatch more is needed.
    sizes = filled(limits[bisect_left(limits, -count, key=lambda most: -len(filled(most)))])
    ends = [0, *accumulate(sizes)]
    while len(ends) <= count:  # nobody is left without work
        total = [0, *accumulate(lengths)]
        a, b = max(
            ((a, b) for a, b in pairwise(ends) if b - a > 1),
            key=lambda ab: total[ab[1]] - total[ab[0]],
        )
        middle = min(range(a + 1, b), key=lambda at: abs(total[a] + total[b] - 2 * total[at]))
        ends = sorted([*ends, middle])
    return [b - a for a, b in pairwise(ends)]
