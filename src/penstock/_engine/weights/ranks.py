"""The tensors of all ranks, brought to the first one or to all, a bucket at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock._engine.parallel import whole
from penstock._engine.transport import Job
from penstock._engine.weights.trees import decode, encode

Table = Sequence[Sequence[Any]]
"""Of each tensor of a rank: its name, its shape, and its type as JSON data."""


def table_of(tensors: Mapping[str, Tensor]) -> Table:
    """The table of a rank's tensors."""
    return [[key, list(t.shape), encode(t.dtype, key, None)] for key, t in tensors.items()]


def travel(
    job: Job,
    tensors: Mapping[str, Tensor],
    tables: Sequence[Table],
    *,
    bucket_bytes: int = 0,
    to_all: bool = False,
    is_wanted: bool = True,
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield the whole tensors of all ranks by name, each bucket with its rank, on rank 0 or on all.

    Every rank iterates to the end; only one bucket exists at a time. Tensors of a rank's own are not copied
    if they are whole.

    Args:
        job: the ranks of the pipeline. To rank 0, tensors travel where the ranks are connected already.
        tensors: those of this rank.
        tables: the tables of all ranks; on a rank that receives nothing, only its own counts.
        bucket_bytes: the size of a bucket; one tensor may be larger. By default each travels by itself.
        to_all: whether all ranks receive them.
        is_wanted: whether they travel at all; if not, this rank only helps other pipelines to gather theirs.
    """
    device = next((one.device for one in tensors.values()), torch.device("cpu"))
    receives = is_wanted and (to_all or not job.rank)
    for rank, table in enumerate(tables):
        if rank != job.rank and not receives:
            continue
        for bucket in _buckets(table, bucket_bytes):
            if rank == job.rank:
                part = {key: whole(tensors[key]) for key, *_ in bucket}
            else:
                part = {
                    key: torch.empty(shape, dtype=decode(dtype), device=device)
                    for key, shape, dtype in bucket
                }
            if not is_wanted:
                continue
            if to_all:
                part = {key: job.broadcast(tensor, rank) for key, tensor in part.items()}
            elif job.rank:
                job.swap({0: [*part.values()]}, {})
            elif rank:
                job.swap({}, {rank: [*part.values()]})
            if receives:
                yield rank, part


def _buckets(table: Table, size: int) -> Iterator[Table]:
    bucket: list[Sequence[Any]] = []
    filled = 0
    for row in table:
        _, shape, dtype = row
        needed = torch.Size(shape).numel() * decode(dtype).itemsize
        if bucket and filled + needed > size:
            yield bucket
            bucket, filled = [], 0
        bucket.append(row)
        filled += needed
    if bucket:
        yield bucket


def collect(
    job: Job, bring: Callable[[], tuple[Any, Mapping[str, Any]]]
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Collect the states of all ranks on rank 0, with whole tensors as copies on the CPU.

    Args:
        job: the ranks of the pipeline.
        bring: returns JSON data about this process's state, and the state.

    Returns:
        The data about all states, and the states, in the order of the ranks; none on other ranks than 0.
    """
    tensors: dict[str, Tensor] = {}
    replies: list[Any] = []

    def tell() -> list[Any]:
        head, state = bring()
        trees = {name: encode(value, name, tensors) for name, value in state.items()}
        return [head, trees, table_of(tensors)]

    job.meet(tell, replies.extend, "gather", among=job.pipeline)
    tables = [table for *_, table in replies] or [()] * job.rank + [table_of(tensors)]
    arrived: list[dict[str, Tensor]] = [{} for _ in replies]
    for rank, part in travel(job, tensors, tables):
        # What has travelled is a copy, unless it is on the CPU already.
        copies = {key: tensor.cpu() for key, tensor in part.items()}
        arrived[rank] |= copies if rank else {key: one.clone() for key, one in copies.items()}
    states = [
        {name: decode(tree, of.__getitem__, name) for name, tree in trees.items()}
        for of, (_, trees, _) in zip(arrived, replies, strict=True)
    ]
    return [head for head, *_ in replies], states
