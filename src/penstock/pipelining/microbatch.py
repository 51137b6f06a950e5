"""Split arguments into chunks and merge chunks of outputs, under the names of torch's ``microbatch``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

# The only pytree that includes the types that users register. It has no public name in torch 2.13.
from torch.utils import _pytree as pytree

from penstock._engine.masks import BlockMask, split_mask
from penstock._engine.parallel import is_sharded, merge_sharded, split_sharded
from penstock.errors import MicrobatchError
from penstock.pipelining._utils import ChunkError

DEFAULT_CHUNK_DIM = 0


class TensorChunkSpec:
    """The dimension along which to split a tensor."""

    def __init__(self, split_dim: int) -> None:
        self.split_dim = split_dim

    def __repr__(self) -> str:
        return f"TensorChunkSpec({self.split_dim})"

    @staticmethod
    def from_tuple(chunk_dims: tuple[Any, ...]) -> Any:
        """Make a spec for each positional argument from (nested) dimensions."""
        return pytree.tree_map(TensorChunkSpec, chunk_dims)

    @staticmethod
    def from_dict(chunk_dims: Mapping[str, Any]) -> Any:
        """Make a spec for each keyword argument from (nested) dimensions."""
        return pytree.tree_map(TensorChunkSpec, chunk_dims)


class _Replicate:
    """Every chunk gets the whole value."""


class _CustomReducer:
    """Combines the outputs of microbatches.

    Args:
        init_value: the value to start from.
        reduce_fn: ``(so far, next) -> so far``.
    """

    def __init__(self, init_value: Any, reduce_fn: Callable[[Any, Any], Any]) -> None:
        self.init_value = init_value
        self.reduce_fn = reduce_fn


class _LossReducer(_CustomReducer):
    """Combines the losses of microbatches."""


sum_reducer = _LossReducer(torch.tensor(0.0, device="cpu"), operator.add)


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    chunks: int,
    args_chunk_spec: Any = None,
    kwargs_chunk_spec: Any = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Split the arguments of a call.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        chunks: the number of parts. If a tensor has fewer slices, there are only as many parts as slices.
        args_chunk_spec: for each argument, a :class:`TensorChunkSpec` or a tree of them. By default tensors
            and block masks are split along dimension 0, and other values go to every chunk.
        kwargs_chunk_spec: the same for keyword arguments.

    Raises:
        ChunkError: a spec does not fit its value.
    """
    whole = (tuple(args), dict(kwargs or {}))
    specs = (
        _default_specs(whole[0]) if args_chunk_spec is None else tuple(args_chunk_spec),
        _default_specs(whole[1]) if kwargs_chunk_spec is None else dict(kwargs_chunk_spec),
    )
    if specs[1].keys() != whole[1].keys() or len(specs[0]) != len(whole[0]):
        raise ChunkError(
            f"chunk specs for {len(specs[0])} positional arguments and {list(specs[1])}, but there are "
            f"{len(whole[0])} and {list(whole[1])}; give a spec for each"
        )
    specs = (specs[0], {name: specs[1][name] for name in whole[1]})
    leaves, tree = pytree.tree_flatten(whole, is_leaf=_is_mask)
    wanted = pytree.tree_leaves(specs)
    if len(wanted) != len(leaves):
        raise ChunkError(f"{len(wanted)} chunk specs for {len(leaves)} values; give one for each")
    cutters = [_cutter(leaf, spec, chunks) for leaf, spec in zip(leaves, wanted, strict=True)]
    count = min([chunks, *(most for most, _ in cutters)])
    columns = [cut(count) for _, cut in cutters]
    parts = [pytree.tree_unflatten([column[i] for column in columns], tree) for i in range(count)]
    return [part[0] for part in parts], [part[1] for part in parts]


def _is_mask(value: Any) -> bool:
    return isinstance(value, BlockMask)


def _default_specs(values: Any) -> Any:
    def spec(value: Any) -> Any:
        split = isinstance(value, Tensor | BlockMask)
        return TensorChunkSpec(DEFAULT_CHUNK_DIM) if split else _Replicate()

    return pytree.tree_map(spec, values, is_leaf=_is_mask)


def _cutter(value: Any, spec: Any, chunks: int) -> tuple[int, Callable[[int], Sequence[Any]]]:
    """The largest number of parts that a value can be cut into, and the function that cuts it."""
    if spec is _Replicate or isinstance(spec, _Replicate):
        return chunks, lambda count: [value] * count
    if not isinstance(spec, TensorChunkSpec) or not isinstance(value, Tensor | BlockMask):
        raise ChunkError(
            f"the chunk spec {spec!r} does not fit a value of type {type(value).__name__}; give tensors a "
            "TensorChunkSpec and leave other values to every chunk"
        )
    if isinstance(value, Tensor):
        return value.size(spec.split_dim), partial(_split_tensor, value, spec)
    if spec.split_dim != 0:
        raise ChunkError(f"a BlockMask is split along dimension 0, not {spec.split_dim}")
    batch = value.kv_num_blocks.size(0)
    return chunks if batch == 1 else batch, partial(_split_block_mask, value)


def _split_tensor(tensor: Tensor, spec: TensorChunkSpec, num_chunks: int) -> Sequence[Tensor]:
    """Split a tensor into parts whose sizes differ by at most one; parts of a leaf retain their gradients."""
    if tensor.size(spec.split_dim) < num_chunks:
        raise ChunkError(
            f"a tensor of shape {list(tensor.shape)} cannot be split into {num_chunks} chunks along "
            f"dimension {spec.split_dim}"
        )
    split = split_sharded if is_sharded(tensor) else torch.tensor_split
    parts: Sequence[Tensor] = split(tensor, num_chunks, spec.split_dim)
    for part in parts:
        if tensor.is_leaf and part.requires_grad:
            part.retain_grad()
    return parts


def _split_block_mask(block_mask: BlockMask, num_chunks: int) -> list[BlockMask]:
    """Split a block mask along the batch; a mask for all samples goes to every part."""
    batch = block_mask.kv_num_blocks.size(0)
    if batch == 1:
        return [block_mask] * num_chunks
    if batch < num_chunks:
        raise ChunkError(f"a BlockMask of {batch} samples cannot be split into {num_chunks} chunks")
    return split_mask(
        block_mask, [len(p) for p in torch.arange(batch, device="cpu").tensor_split(num_chunks)]
    )


def merge_chunks(chunks: list[Any], chunk_spec: Any) -> Any:
    """Merge the outputs of microbatches.

    Args:
        chunks: the output of each microbatch.
        chunk_spec: for each leaf a :class:`TensorChunkSpec` or a reducer; for any other value, the leaves
            of all chunks must be equal. ``None`` concatenates all tensors along dimension 0.

    Raises:
        ChunkError: the chunks do not fit the spec, values differ, or DTensors are placed differently.
    """
    leaves, tree = pytree.tree_flatten(chunks[0])
    specs: list[Any] = list(pytree.tree_leaves(_default_specs(leaves)))
    if chunk_spec is not None:
        specs, tree = pytree.tree_flatten(chunk_spec)
    rows = [pytree.tree_flatten(chunk)[0] for chunk in chunks]
    wrong = [len(row) for row in rows if len(row) != len(specs)]
    if wrong:
        raise ChunkError(f"chunks hold {wrong} values, but the chunk spec is for {len(specs)}")
    columns = zip(*rows, strict=True)
    merged = [_merged(list(col), spec) for col, spec in zip(columns, specs, strict=True)]
    return pytree.tree_unflatten(merged, tree)


def _merged(values: list[Any], spec: Any) -> Any:
    if isinstance(spec, _CustomReducer):
        reduced = spec.init_value
        for value in values:
            reduced = spec.reduce_fn(reduced, value)
        return reduced
    if not isinstance(spec, TensorChunkSpec):
        if any(value != values[0] for value in values):
            raise ChunkError(f"microbatches gave different values: {values}")
        return values[0]
    marks = {is_sharded(value) for value in values}
    if marks == {True}:
        try:
            return merge_sharded(values, spec.split_dim)
        except MicrobatchError as error:
            raise ChunkError(f"placement mismatch: {error}") from error
    if marks == {True, False}:
        plain = [index for index, value in enumerate(values) if not is_sharded(value)]
        raise ChunkError(
            f"the outputs of the microbatches are a mix: {plain} gave plain tensors and the others DTensors; "
            "give the same kind in each"
        )
    return torch.cat(values, dim=spec.split_dim)
