"""FlexAttention's block masks: taken apart, split with the batch, made anew for packed sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as BlockMask
from torch.nn.attention.flex_attention import create_block_mask, noop_mask

_CONTEXT = 5
"""The length of the context of ``BlockMask._flatten``; its third entry is the function."""


class MaskContext:
    """What a block mask holds besides its tensors and those that its function sees.

    Two are equal whatever their functions are: a function is made anew for each batch, and never sent.

    Args:
        facts: lengths, sizes of blocks, order, and which tensors are absent; JSON data.
        context: torch's context of the mask; None in a process that was not given the mask.
    """

    def __init__(self, facts: Any, context: Any = None) -> None:
        self.facts, self.context = facts, context

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MaskContext) and self.facts == other.facts

    def __hash__(self) -> int:
        return hash(str(self.facts))

    def __repr__(self) -> str:
        return f"MaskContext({self.facts})"


def take_apart(mask: BlockMask) -> tuple[list[Any], MaskContext]:
    """The tensors of a block mask, also those in its function's closure, and what else it holds.

    ``_flatten`` and ``_unflatten`` are for ``torch.utils._pytree``, which gives them no public name (2.13).
    """
    leaves, context = mask._flatten()
    assert len(context) == _CONTEXT
    facts = [
        [*mask.seq_lengths],
        [*mask.BLOCK_SIZE],
        mask.dq_kv_order_spt,
        [*context[-1]],
    ]
    return [*leaves], MaskContext(facts, context)


def put_together(children: Sequence[Any], context: MaskContext) -> BlockMask:
    """A block mask with other tensors; without its function where that is not known."""
    if context.context is not None:
        whole: BlockMask = BlockMask._unflatten(tuple(children), context.context)
        return whole
    lengths, blocks, order, absent = context.facts
    names = [name for name in BlockMask._TENSOR_ATTRS if name not in absent]
    values = dict.fromkeys(absent) | dict(zip(names, children, strict=False))
    return BlockMask(
        tuple(lengths),
        BLOCK_SIZE=tuple(blocks),
        mask_mod=noop_mask,
        dq_kv_order_spt=order,
        **values,
    )


def samples_of(mask: BlockMask) -> int | None:
    """The number of samples that a block mask tells apart; None if it is the same for all."""
    return None if len(mask.kv_num_blocks) == 1 else len(mask.kv_num_blocks)


def split_mask(mask: BlockMask, sizes: Sequence[int]) -> list[BlockMask]:
    """The parts of a block mask for microbatches of some samples each."""
    parts, start = [], 0
    for size in sizes:
        part = mask[start : start + size]
        part.mask_mod = _moved(mask.mask_mod, start, 0)  # torch's slice has none
        parts.append(part)
        start += size
    return parts


def mask_of_tokens(mask: BlockMask, begin: int, end: int) -> BlockMask:
    """The part of a block mask for some tokens of a packed row, which see each other alone."""
    batch, heads = mask.kv_num_blocks.shape[:2]
    return create_block_mask(
        _moved(mask.mask_mod, 0, begin),
        batch if batch > 1 else None,
        heads if heads > 1 else None,
        end - begin,
        end - begin,
        device=mask.kv_num_blocks.device,
        BLOCK_SIZE=mask.BLOCK_SIZE,
    )


def _moved(function: Callable[..., Any], samples: int, tokens: int) -> Callable[..., Any]:
    """A mask's function for indices that count from another sample and token."""
    # Tensors, since microbatches that differ in a number would be of different kinds.
    first, begin = torch.tensor(samples, device="cpu"), torch.tensor(tokens, device="cpu")

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Any:
        return function(b + first.to(b.device), h, q + begin.to(q.device), kv + begin.to(kv.device))

    return mask_mod
