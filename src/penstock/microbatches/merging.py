"""Merge the outputs of microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import MicrobatchError
from penstock.values import flatten, unflatten


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
