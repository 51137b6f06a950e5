"""Who writes what, and what is read for which part: by the planners of ``torch.distributed.checkpoint``.

The rest of that package is not used: its driver sends plans between processes as pickles, its metadata file
is one, its storages keep no checksums, and their files are visible before all of them are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Size
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from penstock.checkpoint.contents import Description
from penstock.errors import CheckpointError
from penstock.weights.files import DTYPES

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A part of a tensor: its offsets and its sizes."""


class Share(NamedTuple):
    """A part of a tensor that one process writes.

    Attributes:
        key: of the tensor.
        box: the part.
        name: of the part in the process's file.
    """

    key: str
    box: Box
    name: str


def plan_writes(
    descriptions: Sequence[Mapping[str, Description]], names: Sequence[str]
) -> list[list[Share]]:
    """Which process writes which parts: each part once, and all about equally much.

    Every process computes this, with the same result.

    Args:
        descriptions: of the tensors of each process, by key.
        names: of the processes, for messages.

    Raises:
        CheckpointError: the parts of the processes do not make up a tensor.
    """
    known: dict[str, Description] = {}
    plans = []
    for tensors, process in zip(descriptions, names, strict=True):
        items = []
        for key, (dtype, shape, offsets, sizes) in tensors.items():
            if dtype is None:
                raise CheckpointError(f"{key} has a type that safetensors files cannot hold")
            about = known.setdefault(key, [dtype, shape])
            if about != [dtype, shape]:
                raise CheckpointError(
                    f"{key} is {dtype} {shape} on {process} and {about[0]} {about[1]} on another; one name "
                    "must mean one tensor"
                )
            if 0 not in sizes or 0 in shape:
                items.append(_write_item(key, dtype, shape, offsets, sizes))
        plans.append(SavePlan(items))
    try:
        # The planner checks that the parts are complete only if there are several plans.
        planner = DefaultSavePlanner(flatten_state_dict=False)
        plans, _ = planner.create_global_plan([*plans, SavePlan([])])
    except ValueError as error:
        raise CheckpointError(
            f"the processes that save do not hold all parts of the tensors ({error}); give "
            "penstock.Checkpoints(group=...) the process group of all processes that hold a part"
        ) from error
    return [[_share(item) for item in plan.items] for plan in plans[:-1]]


def _write_item(
    key: str, dtype: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> WriteItem:
    chunk = ChunkStorageMetadata(Size(offsets), Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=DTYPES[dtype]), Size(shape))
    return WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _share(item: WriteItem) -> Share:
    data, key = item.tensor_data, item.index.fqn
    assert data is not None  # only tensors are planned
    box = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    return Share(key, box, key if box[1] == data.size else f"{key}@{','.join(map(str, box[0]))}")


class Read(NamedTuple):
    """A box of a piece that is read, and where it goes.

    Attributes:
        piece: the index of the piece.
        source: the box in the piece.
        offsets: where it begins in the part that is wanted.
    """

    piece: int
    source: Box
    offsets: tuple[int, ...]


def plan_reads(shape: Sequence[int], pieces: Sequence[Box], wanted: Box) -> Iterator[Read]:
    """What is to be read for a part of a tensor, of which the pieces are stored."""
    chunks = [ChunkStorageMetadata(Size(offsets), Size(sizes)) for offsets, sizes in pieces]
    stored = TensorStorageMetadata(TensorProperties(), Size(shape), chunks)
    part = ChunkStorageMetadata(Size(wanted[0]), Size(wanted[1]))
    for item in create_read_items_for_chunk_list("", stored, [part]):
        index = item.storage_index.index
        assert index is not None  # torch sets it
        yield Read(
            index, (tuple(item.storage_offsets), tuple(item.lengths)), tuple(item.dest_offsets)
        )
