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

from penstock.errors import CheckpointError
from penstock.weights.files import DTYPES, Box

Holder = tuple[int, int]
"""A process, and a tensor's place among those of the process."""
_MOST_DIMS = 8
"""The most dimensions along which one tensor may be divided."""


class HeldTensors(NamedTuple):
    """The tensors of a process, or its parts of them.

    Attributes:
        types: the types and shapes of its tensors, each once.
        tensors: for each key, the number of its type.
        boxes: parts of tensors, each once: the offsets and sizes.
        box_of: for each tensor in order, the number of its part; -1 if it is whole.
    """

    types: Sequence[Any]
    tensors: Mapping[str, int]
    boxes: Sequence[Any]
    box_of: Sequence[int]


class WritePlan(NamedTuple):
    """Who writes what, and the table of it.

    Attributes:
        shares: for each process, the places of the tensors of which it writes what it holds.
        types: the type and shape of tensors, each once.
        divisions: the divisions of tensors: for each part, the process that writes it, offsets and sizes.
        tensors: for each key, the number of its type, and the process that writes it whole; or -1 minus
            the number of its division.
    """

    shares: list[list[int]]
    types: list[Any]
    divisions: list[list[Any]]
    tensors: dict[str, tuple[int, int]]


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
    types, types_of, holders = _collect(held, name)
    shares: list[list[int]] = [[] for _ in held]
    writers = _Writers(len(held))
    tensors: dict[str, tuple[int, int]] = {}
    divisions: dict[Any, int] = {}
    checked: set[Any] = set()
    # What only one process has is settled first, and then what is large, so that the rest evens out.
    for key in sorted(holders, key=lambda key: writers.order(types[types_of[key]], holders[key])):
        dtype, shape = types[types_of[key]]
        parts = []
        for box, having in holders[key].items():
            process, place = writers.choose(having, dtype, box[1])
            shares[process].append(place)
            parts.append((process, box))
        division = tuple(sorted(parts, key=lambda part: part[1]))
        boxes = tuple(box for _, box in division)
        if (types_of[key], boxes) not in checked:
            if not tiles(shape, boxes):
                raise CheckpointError(
                    f"the processes that save do not hold all parts of {key}, or hold some twice; give "
                    "penstock.Checkpoints(group=...) the process group of all processes that hold a part"
                )
            checked.add((types_of[key], boxes))
        if len(division) == 1:
            tensors[key] = types_of[key], division[0][0]
        else:
            tensors[key] = types_of[key], -1 - divisions.setdefault(division, len(divisions))
    listed = [[[process, *map(list, box)] for process, box in one] for one in divisions]
    ordered = {key: tensors[key] for key in holders}
    return WritePlan(
        [sorted(share) for share in shares], [list(one) for one in types], listed, ordered
    )


def _collect(
    held: Sequence[HeldTensors], name: Callable[[int], str]
) -> tuple[list[Any], dict[str, int], dict[str, dict[Box, list[Holder]]]]:
    """The types of all tensors, the number of each tensor's type, and who holds which parts of it."""
    numbers: dict[Any, int] = {}
    types_of: dict[str, int] = {}
    holders: dict[str, dict[Box, list[Holder]]] = {}
    for process, of in enumerate(held):
        types = [(dtype, tuple(shape)) for dtype, shape in of.types]
        boxes: list[Box] = [(tuple(offsets), tuple(sizes)) for offsets, sizes in of.boxes]
        whole: list[Box] = [((0,) * len(shape), shape) for _, shape in types]
        here = [numbers.setdefault(one, len(numbers)) for one in types]
        for place, (key, kind) in enumerate(of.tensors.items()):
            number = of.box_of[place]
            box = whole[kind] if number < 0 else boxes[number]
            if 0 in box[1] and 0 not in types[kind][1]:
                continue  # a process may have nothing of a sharded tensor
            if types_of.setdefault(key, here[kind]) != here[kind]:
                other = list(numbers)[types_of[key]]
                raise CheckpointError(
                    f"{key} is {types[kind][0]} {list(types[kind][1])} on {name(process)} and {other[0]} "
                    f"{list(other[1])} on another; one name must mean one tensor"
                )
            holders.setdefault(key, {}).setdefault(box, []).append((process, place))
    if untyped := [key for key, kind in types_of.items() if list(numbers)[kind][0] not in DTYPES]:
        raise CheckpointError(f"{untyped[0]} has a type that safetensors files cannot hold")
    return list(numbers), types_of, holders


class _Writers:
    """Chooses who writes a part: of those that hold it, the one with the least to write so far."""

    def __init__(self, count: int) -> None:
        self._bytes = [0] * count

    def order(self, kind: Any, holders: Mapping[Box, Sequence[Holder]]) -> tuple[int, int]:
        alone = max(map(len, holders.values())) == 1
        return not alone, -math.prod(kind[1]) * DTYPES[kind[0]].itemsize

    def choose(self, holders: Sequence[Holder], dtype: str, sizes: Sequence[int]) -> Holder:
        loads = self._bytes
        chosen = holders[0]
        if len(holders) > 1:
            chosen = min(holders, key=lambda holder: loads[holder[0]])
        # One more, so that tensors without data are spread too.
        loads[chosen[0]] += math.prod(sizes) * DTYPES[dtype].itemsize + 1
        return chosen


def tiles(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
    """Whether boxes make up a tensor: each of its elements lies in exactly one.

    A sum of boxes is determined by its corners: counted with alternating signs along each dimension, those
    that lie inside cancel out. This takes one look at each box; comparing pairs would take squares.
    """
    dims = len(shape)
    corners: Counter[tuple[int, ...]] = Counter()
    whole: Box = ((0,) * dims, tuple(shape))
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
    for sign, (offsets, sizes) in [(-1, whole), *((1, box) for box in listed)]:
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
