"""Cut the sequences of microbatches into slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from penstock._engine.microbatches.batch import Batch
from penstock._engine.values import map_tensors, tensors_in
from penstock.errors import MicrobatchError


def sliced(batch: Batch, slices: int) -> Batch:
    """A batch whose microbatches are cut along the sequence, which is dimension 1, into equal slices.

    Every tensor of two or more dimensions is cut; other values go to each slice. The slices of a microbatch
    follow each other, and each counts as a microbatch with its samples.

    Raises:
        MicrobatchError: sequences cannot be cut into so many equal slices, tensors have sequences of
            different lengths, or microbatches are weighed by their tokens.
    """
    if batch.count is None:
        return batch
    if batch.weights is not None or batch.dim is not None:
        raise MicrobatchError(
            "the schedule cuts sequences, and this batch is split by tokens; give it rows of equal length"
        )
    parts = targets = samples = None
    if batch.parts is not None:
        parts = [
            replace(part, args=tuple(args), kwargs=kwargs)
            for part in batch.parts
            for args, kwargs in _cut(
                [list(part.args), part.kwargs], slices, "the model's arguments"
            )
        ]
    if batch.targets is not None:
        targets = [cut for target in batch.targets for cut in _cut(target, slices, "the target")]
    if batch.samples is not None:
        samples = [count for count in batch.samples for _ in range(slices)]
    return replace(
        batch, parts=parts, targets=targets, samples=samples, count=batch.count * slices, presplit=True,
        counted=False,
    )  # fmt: skip


def _cut(value: Any, slices: int, what: str) -> Sequence[Any]:
    lengths = {tensor.shape[1] for tensor in tensors_in(value) if tensor.dim() > 1}
    if len(lengths) > 1 or any(length % slices for length in lengths):
        raise MicrobatchError(
            f"{what} cannot be cut into {slices} slices of equal length: dimension 1 of the tensors, the "
            f"sequence, has {' and '.join(map(str, sorted(lengths)))} elements; pad it to a multiple of "
            f"{slices}, the same in all of them"
        )
    size = next(iter(lengths), 0) // slices

    def cut(tensor: Tensor, number: int) -> Tensor:
        return tensor.narrow(1, number * size, size) if tensor.dim() > 1 else tensor

    return [map_tensors(value, partial(cut, number=number)) for number in range(slices)]
