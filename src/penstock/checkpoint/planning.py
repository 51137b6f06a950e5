"""Plan who writes and reads which parts, with the planners of ``torch.distributed.checkpoint``.

The rest of that package is not used: its driver sends plans between processes as pickles, its metadata file
is a pickle, its storages keep no checksums, and their files are visible before all are complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Size, Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from penstock.errors import CheckpointError
from penstock.parallel import region_of
from penstock.weights.files import DTYPES, NAMES, Box

Description = list[Any]
"""A process's part of a tensor, as JSON data: the tensor's type and shape, the part's offsets and sizes."""


def describe_part(tensor: Tensor) -> Description:
    """Describe the part of a tensor that this process holds."""
    offsets, sizes = region_of(tensor) or ((0,) * tensor.dim(), tensor.shape)
    return [NAMES.get(tensor.dtype), list(tensor.shape), list(offsets), list(sizes)]


def file_of(process: int) -> str:
    """The name of a process's file."""
    return f"states-{process + 1:05d}.safetensors"


def part_name(key: str, shape: Sequence[int], box: Box) -> str:
    """Return the name of a tensor's part in a file."""
    return key if list(box[1]) == list(shape) else f"{key}@{','.join(map(str, box[0]))}"


Shares = list[list[tuple[str, str]]]
"""For each process, the parts that it writes: the tensor's key, and the part's name in the file."""


def plan_writes(
    descriptions: Sequence[Mapping[str, Description]], names: Sequence[str]
) -> tuple[Shares, dict[str, Any]]:
    """Assign each part to one process that writes it, so that all write about equally much.

    Args:
        descriptions: each process's parts of tensors, by key.
        names: the names of the processes, for messages.

    Returns:
        The shares of the processes, and the table's entry for each tensor; the same in every process.
    """
    tensors: dict[str, Any] = {}
    plans = []
    for parts, process in zip(descriptions, names, strict=True):
        items = []
        for key, (dtype, shape, offsets, sizes) in parts.items():
            if dtype is None:
                raise CheckpointError(f"{key} has a type that safetensors files cannot hold")
            about = tensors.setdefault(key, {"dtype": dtype, "shape": shape, "pieces": []})
            if [about["dtype"], about["shape"]] != [dtype, shape]:
                raise CheckpointError(
                    f"{key} is {dtype} {shape} on {process} and {about['dtype']} {about['shape']} on "
                    "another; one name must mean one tensor"
                )
            if 0 not in sizes or 0 in shape:
                chunk = ChunkStorageMetadata(Size(offsets), Size(sizes))
                data = TensorWriteData(chunk, TensorProperties(DTYPES[dtype]), Size(shape))
                index = MetadataIndex(key, chunk.offsets)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        plans.append(SavePlan(items))
    try:
        # The planner checks completeness only if there are several plans.
        planner = DefaultSavePlanner(flatten_state_dict=False)
        plans, _ = planner.create_global_plan([*plans, SavePlan([])])
    except ValueError as error:
        raise CheckpointError(
            f"the processes that save do not hold all parts of the tensors ({error}); give "
            "penstock.Checkpoints(group=...) the process group of all processes that hold a part"
        ) from error
    shares: Shares = []
    for number, plan in enumerate(plans[:-1]):
        shares.append([])
        for item in plan.items:
            assert item.tensor_data is not None  # only tensors are planned
            key, chunk = item.index.fqn, item.tensor_data.chunk
            box = tuple(chunk.offsets), tuple(chunk.sizes)
            shares[-1].append((key, part_name(key, item.tensor_data.size, box)))
            piece = {"file": file_of(number), "offsets": box[0], "sizes": box[1]}
            tensors[key]["pieces"].append(piece)
    return shares, tensors


def plan_reads(
    shape: Sequence[int], pieces: Sequence[Box], wanted: Box
) -> Iterator[tuple[int, Box, Box]]:
    """Plan the reads for a part of a tensor that is stored in pieces.

    Yields:
        The index of a piece, a box in it, and the place of that box in the wanted part.
    """
    chunks = [ChunkStorageMetadata(Size(offsets), Size(sizes)) for offsets, sizes in pieces]
    stored = TensorStorageMetadata(TensorProperties(), Size(shape), chunks)
    part = ChunkStorageMetadata(Size(wanted[0]), Size(wanted[1]))
    for item in create_read_items_for_chunk_list("", stored, [part]):
        index, sizes = item.storage_index.index, tuple(item.lengths)
        assert index is not None  # torch sets it
        yield index, (tuple(item.storage_offsets), sizes), (tuple(item.dest_offsets), sizes)
