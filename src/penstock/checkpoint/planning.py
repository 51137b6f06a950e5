"""Plan who writes which parts of tensors, and check that parts make up whole tensors.

Work and memory grow with the number of parts alone: those of sharded tensors are compared by their corners,
and tensors that are divided alike share one division.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

from penstock._engine.weights.files import DTYPES, Box, whole_box
from penstock.errors import CheckpointError

_Kind = tuple[str, tuple[int, ...]]
"""The type and the shape of tensors."""
_MOST_DIMS = 8
"""The most dimensions along which one tensor may be divided."""


class HeldTensors(NamedTuple):
    """What a process holds of tensors.

    Attributes:
        parts: the parts that it holds, each once: the type and shape of a tensor, offsets and sizes.
        keys: for each of them, the keys of the tensors of which it holds this part.
    """

    parts: Sequence[Any]
    keys: Sequence[Sequence[str]]


class WritePlan(NamedTuple):
    """Who writes what, and what the table says of it.

    Attributes:
        shares: for each process, the places among its keys of the tensors of which it writes its part.
        writers: the processes that write a file, in the order of the table's files.
        tensors: the ``tensors`` of the table.
    """

    shares: list[list[int]]
    writers: list[int]
    tensors: list[dict[str, Any]]


class _Tensor(NamedTuple):
    """A tensor, and for each of its parts, who holds it: processes, and the tensor's place in each."""

    kind: _Kind
    holders: dict[Box, list[tuple[int, int]]]


def file_of(process: int) -> str:
    """The name of a process's file."""
    return f"states-{process + 1:05d}.safetensors"


def part_name(key: str, shape: Sequence[int], box: Box) -> str:
    """Return the name of a tensor's part in a file."""
    return key if list(box[1]) == list(shape) else f"{key}@{','.join(map(str, box[0]))}"


def grouped(pairs: Iterable[tuple[Any, Iterable[str]]]) -> list[tuple[Any, list[str]]]:
    """JSON data and the keys that have it, each once."""
    keys_of: dict[str, dict[str, None]] = {}
    for value, keys in pairs:
        keys_of.setdefault(json.dumps(value), {}).update(dict.fromkeys(keys))
    return [(json.loads(text), list(keys)) for text, keys in keys_of.items()]


def plan_writes(held: Sequence[HeldTensors], name: Callable[[int], str]) -> WritePlan:
    """Assign each part to one process that writes it, so that all write about equally much.

    Args:
        held: what each process has.
        name: names a process, for messages.

    Raises:
        CheckpointError: the parts do not make up the tensors, or a type cannot be written.
    """
    tensors = _collect(held, name)
    shares: list[list[int]] = [[] for _ in held]
    loads = [0] * len(held)
    pieces_of: dict[str, tuple[tuple[int, Box], ...]] = {}
    checked: set[Any] = set()

    def order(tensor: tuple[str, _Tensor]) -> tuple[bool, int]:
        kind, holders = tensor[1]
        return max(map(len, holders.values())) > 1, -_nbytes(*kind)

    # What only one process has is settled first, and then what is large, so that the rest evens out.
    for key, ((dtype, shape), holders) in sorted(tensors.items(), key=order):
        pieces = []
        for box, having in sorted(holders.items()):
            # Of those that hold it, the one with the least to write so far.
            process, place = min(having, key=lambda holder: loads[holder[0]])
            # One more, so that tensors without data are spread too.
            loads[process] += _nbytes(dtype, box[1]) + 1
            shares[process].append(place)
            pieces.append((process, box))
        boxes = tuple(box for _, box in pieces)
        if (shape, boxes) not in checked and not tiles(shape, boxes):
            raise CheckpointError(
                f"the processes that save do not hold all parts of {key}, or hold some twice; give "
                "penstock.Checkpoints(group=...) the process group of all processes that hold a part"
            )
        checked.add((shape, boxes))
        pieces_of[key] = tuple(pieces)
    writers = [process for process, share in enumerate(shares) if share]
    file_of_process = {process: number for number, process in enumerate(writers)}
    alike: dict[Any, list[str]] = {}
    for key, tensor in tensors.items():
        alike.setdefault((tensor.kind, pieces_of[key]), []).append(key)
    rows = [
        {
            "dtype": dtype,
            "shape": shape,
            "pieces": [
                {"file": file_of_process[process], "offsets": offsets, "sizes": sizes}
                for process, (offsets, sizes) in of
            ],
            "keys": keys,
        }
        for ((dtype, shape), of), keys in alike.items()
    ]
    return WritePlan([sorted(share) for share in shares], writers, rows)


def _nbytes(dtype: str, sizes: Sequence[int]) -> int:
    return math.prod(sizes) * DTYPES[dtype].itemsize


def _collect(held: Sequence[HeldTensors], name: Callable[[int], str]) -> dict[str, _Tensor]:
    """All tensors, by key."""
    tensors: dict[str, _Tensor] = {}
    for process, (parts, keys_of) in enumerate(held):
        places = itertools.count()
        for (dtype, of, offsets, sizes), keys in zip(parts, keys_of, strict=True):
            kind, box = (dtype, tuple(of)), (tuple(offsets), tuple(sizes))
            is_nothing = 0 in sizes and 0 not in of  # so a process may have of a sharded tensor
            for key, place in zip(keys, places, strict=False):
                if is_nothing:
                    continue
                tensor = tensors.setdefault(key, _Tensor(kind, {}))
                if tensor.kind != kind:
                    raise CheckpointError(
                        f"{key} is {dtype} {of} on {name(process)} and {tensor.kind[0]} "
                        f"{list(tensor.kind[1])} on another; one name must mean one tensor"
                    )
                tensor.holders.setdefault(box, []).append((process, place))
    if untyped := [key for key, one in tensors.items() if one.kind[0] not in DTYPES]:
        raise CheckpointError(f"{untyped[0]} has a type that safetensors files cannot hold")
    return tensors


def tiles(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
    """Tell whether boxes make up a tensor: each of its elements lies in exactly one.

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
