"""Plan who writes which parts of tensors, and check that parts make up whole tensors.

Work and memory grow with the number of parts alone: those of sharded tensors are compared by their corners,
and tensors that are divided alike share one division.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from penstock._engine.weights.files import DTYPES, Box, whole_box
from penstock.errors import CheckpointError

_Type = tuple[str, tuple[int, ...]]
Holder = tuple[int, int]
"""A process, and a tensor's place among those of the process."""
_MOST_DIMS = 8
"""The most dimensions along which one tensor may be divided."""


class HeldTensors(NamedTuple):
    """What a process holds of tensors.

    Attributes:
        parts: the parts that it holds, each once: the type and shape of a tensor, offsets and sizes.
        tensors: for each key, the number of its part.
    """

    parts: Sequence[Any]
    tensors: Mapping[str, int]


class WritePlan(NamedTuple):
    """Who writes what, and what the table says of it.

    Attributes:
        shares: for each process, the places of the tensors of which it writes what it holds.
        writers: the processes that write a file, in the order of the table's files.
        table: the ``types``, ``divisions`` and ``tensors`` of the table.
    """

    shares: list[list[int]]
    writers: list[int]
    table: dict[str, Any]


def file_of(process: int) -> str:
    """The name of a process's file."""
    return f"states-{process + 1:05d}.safetensors"


def part_name(key: str, shape: Sequence[int], box: Box) -> str:
    """Return the name of a tensor's part in a file."""
    return key if list(box[1]) == list(shape) else f"{key}@{','.join(map(str, box[0]))}"


def plan_writes(held: Sequence[HeldTensors], name: Callable[[int], str]) -> WritePlan:
    """Assign each part to one process that writes it, so that all write about equally much.

    Args:
        held: what each process has.
        name: names a process, for messages.

    Raises:
        CheckpointError: the parts do not make up the tensors, or a type cannot be written.
    """
    types, holders = _collect(held, name)
    shares: list[list[int]] = [[] for _ in held]
    loads = [0] * len(held)
    divisions: dict[Any, int] = {}
    place_of: dict[str, int] = {}
    checked: set[Any] = set()

    def order(key: str) -> tuple[bool, int]:
        shared = max(map(len, holders[key].values())) > 1
        return shared, -_nbytes(types[key][0], types[key][1])

    # What only one process has is settled first, and then what is large, so that the rest evens out.
    for key in sorted(holders, key=order):
        dtype, shape = types[key]
        pieces = []
        for box, having in sorted(holders[key].items()):
            # Of those that hold it, the one with the least to write so far.
            process, place = min(having, key=lambda holder: loads[holder[0]])
            # One more, so that tensors without data are spread too.
            loads[process] += _nbytes(dtype, box[1]) + 1
            shares[process].append(place)
            pieces.append((process, box))
        boxes = tuple(box for _, box in pieces)
        if (shape, boxes) not in checked:
            if not tiles(shape, boxes):
                raise CheckpointError(
                    f"the processes that save do not hold all parts of {key}, or hold some twice; give "
                    "penstock.Checkpoints(group=...) the process group of all processes that hold a part"
                )
            checked.add((shape, boxes))
        if len(pieces) == 1:
            place_of[key] = pieces[0][0]
        else:
            place_of[key] = -1 - divisions.setdefault(tuple(pieces), len(divisions))
    writers = [process for process, share in enumerate(shares) if share]
    ordered = {key: place_of[key] for key in holders}
    return WritePlan(
        [sorted(share) for share in shares], writers, _table(types, ordered, divisions, writers)
    )


def _table(
    types: Mapping[str, _Type],
    place_of: Mapping[str, int],
    divisions: Iterable[Any],
    writers: Sequence[int],
) -> dict[str, Any]:
    """What the table says of tensors, of which ``place_of`` has the process or the division."""
    file_of_process = {process: number for number, process in enumerate(writers)}
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(types.values()))}
    return {
        "types": [{"dtype": dtype, "shape": list(shape)} for dtype, shape in numbers],
        "divisions": [
            [
                {"file": file_of_process[process], "offsets": list(offsets), "sizes": list(sizes)}
                for process, (offsets, sizes) in pieces
            ]
            for pieces in divisions
        ],
        "tensors": {
            key: [numbers[types[key]], place if place < 0 else file_of_process[place]]
            for key, place in place_of.items()
        },
    }


def _nbytes(dtype: str, sizes: Sequence[int]) -> int:
    return math.prod(sizes) * DTYPES[dtype].itemsize


def _collect(
    held: Sequence[HeldTensors], name: Callable[[int], str]
) -> tuple[dict[str, _Type], dict[str, dict[Box, list[Holder]]]]:
    """The type and shape of each tensor, and who holds which parts of it."""
    types: dict[str, _Type] = {}
    holders: dict[str, dict[Box, list[Holder]]] = {}
    for process, (parts, tensors) in enumerate(held):
        here = [
            ((dtype, tuple(shape)), (tuple(offsets), tuple(sizes)))
            for dtype, shape, offsets, sizes in parts
        ]
        for place, (key, number) in enumerate(tensors.items()):
            kind, box = here[number]
            if 0 in box[1] and 0 not in kind[1]:
                continue  # a process may have nothing of a sharded tensor
            other = types.setdefault(key, kind)
            if other != kind:
                raise CheckpointError(
                    f"{key} is {kind[0]} {list(kind[1])} on {name(process)} and {other[0]} "
                    f"{list(other[1])} on another; one name must mean one tensor"
                )
            holders.setdefault(key, {}).setdefault(box, []).append((process, place))
    if untyped := [key for key, (dtype, _) in types.items() if dtype not in DTYPES]:
        raise CheckpointError(f"{untyped[0]} has a type that safetensors files cannot hold")
    return types, holders


def tiles(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
    """Whether boxes make up a tensor: each of its elements lies in exactly one.

    A sum of boxes is determined by its corners: counted with alternating signs along each dimension, those
    that lie inside cancel out. This takes one look at each box; comparing pairs would take squares.
    """
    dims = len(shape)
    corners: Counter[tuple[int, ...]] = Counter()
    listed = list(boxes)
    if any(not len(offsets) == len(sizes) == dims for offsets, sizes in listed):
        return False
    if any(min((0, *offsets, *sizes)) < 0 for offsets, sizes in listed):
        return False
    divided = [
        dim
        for dim in range(dims)
        if any((offsets[dim], sizes[dim]) != (0, shape[dim]) for offsets, sizes in listed)
    ]
    if len(divided) > _MOST_DIMS:
        return False
    if 0 in shape:
        return all(0 in sizes for _, sizes in listed)
    for sign, (offsets, sizes) in [(-1, whole_box(shape)), *((1, box) for box in listed)]:
        ends = [(offsets[dim], offsets[dim] + sizes[dim]) for dim in divided]
        for sides in product((0, 1), repeat=len(divided)):
            corner = tuple(end[side] for end, side in zip(ends, sides, strict=True))
            corners[corner] += -sign if sum(sides) % 2 else sign
    return not any(corners.values())


def overlap(one: Box, other: Box) -> Box | None:
    """The box that two boxes share; None if they share none."""
    begins = tuple(max(a, b) for a, b in zip(one[0], other[0], strict=True))
    ends = (
        min(a + s, b + t) for a, s, b, t in zip(one[0], one[1], other[0], other[1], strict=True)
    )
    sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    return None if min(sizes, default=1) <= 0 else (begins, sizes)
