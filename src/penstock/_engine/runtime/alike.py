"""What ranks of one pipeline must have alike: the batch that several were given, and optimizers' settings.

Each rank takes samples of what it has. They prove that what differs in them differs, not that the rest is the
same. A hash of them travels beside the digest before a step; only where hashes differ do samples.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from penstock._engine.microbatches import Batch
from penstock._engine.parallel import local_part
from penstock._engine.values import PLAIN, flatten
from penstock.errors import AgreementError, listed

FIRST = 10
"""In so many first calls the ranks compare what they have."""
_AGAIN = frozenset((100, 1000))
"""The calls in which they do once more: a loader may change its ways."""
_MOST_LOOKS = 1024
_EXACT, _ROUNDED = 4096, 256
"""The number of elements that are sampled from integers, and from floating-point numbers."""
_TOLERANCE = 0.01
"""The difference allowed, relative to the largest number: each rank may have computed its batch by itself."""

Samples = Mapping[str, Any]
"""Samples by the name of what they are of, as JSON data: a :class:`_Sample`, or the numbers of a setting."""


class _Sample(TypedDict):
    """A sample of an argument or a target.

    Attributes:
        exact: a hash of shapes, types, and what is equal if it is the same.
        rounded: floating-point numbers.
    """

    exact: str
    rounded: list[float]


class Turns:
    """Decides in which calls this rank compares what it has: the first, and the first of each look."""

    def __init__(self) -> None:
        self._calls = 0
        self._looks = set[int]()

    def come(self, look: int) -> bool:
        """Count a call whose arguments look so; return whether to compare in it."""
        self._calls += 1
        is_new = look not in self._looks
        if len(self._looks) == _MOST_LOOKS:
            self._looks.clear()
        self._looks.add(look)
        return is_new or self._calls <= FIRST or self._calls in _AGAIN


class Sampled:
    """What this rank has that others must have too, if they have any.

    Args:
        samples: samples of it.
        strict: whether every rank must have all of it.

    Attributes:
        mark: a hash of it, which is odd if and only if ``strict``; 0 for nothing.
    """

    def __init__(self, samples: Samples, *, strict: bool = False) -> None:
        self.samples = samples
        digest = hashlib.sha256(json.dumps(sorted(samples.items())).encode()).digest()
        self.mark = (int.from_bytes(digest[:7]) + 1 << 1) + strict if samples or strict else 0


NOTHING = Sampled({})
"""What a rank has that no other must have."""


def may_differ(marks: Sequence[int]) -> bool:
    """Tell whether ranks with these marks must look at each other's samples; the same on all of them."""
    is_strict = any(mark & 1 for mark in marks)
    return len({mark for mark in marks if mark or is_strict}) > 1


def samples_of(batch: Batch) -> Samples:
    """Samples of the arguments and the target that this process was given.

    Of integers about 4,096 elements are looked at, of floating-point numbers about 256, spread over the whole
    batch, so two batches that differ only elsewhere pass. A value without numbers of its own is left out:
    None, or tensors on the meta device or full of zeros, which stand for what only other ranks have.
    """
    values: dict[str, list[Any]] = {}
    for part in batch.parts or ():
        for key, value in (*enumerate(part.args), *part.kwargs.items()):
            values.setdefault(f"argument {key!r}", []).append(value)
    if batch.targets is not None:
        values["the target"] = [*batch.targets]
    samples = {name: _sample_of(parts) for name, parts in values.items()}
    return {name: sample for name, sample in samples.items() if sample is not None}


def _sample_of(parts: list[Any]) -> _Sample | None:
    exact = hashlib.sha256()
    chosen: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    leaves = [leaf for leaf in flatten(parts)[0] if leaf is not None]
    is_filled = not all(isinstance(leaf, Tensor) for leaf in leaves)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            # The text of an object may hold its address.
            exact.update(repr(leaf if type(leaf) in PLAIN else type(leaf)).encode())
            continue
        exact.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
        plain = local_part(leaf.detach())
        if plain.layout is not torch.strided or plain.is_nested or plain.is_quantized:
            is_filled = True
        elif not plain.is_meta:
            plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
            most = (_ROUNDED if plain.is_floating_point() else _EXACT) // len(parts) or 1
            sample = _every(plain, plain.numel() // most | 1)
            chosen.setdefault((plain.dtype, plain.device), []).append(sample)
    rounded = list[float]()
    for of_one_kind in chosen.values():
        # Read from the device at once, not microbatch by microbatch.
        sample = torch.cat(of_one_kind).cpu()
        numbers = (sample.double() if sample.is_floating_point() else sample).numpy()
        is_filled |= bool(numbers.any())
        if sample.is_floating_point():
            rounded += numbers.tolist()
        else:
            exact.update(numbers.tobytes())
    return _Sample(exact=exact.hexdigest()[:16], rounded=rounded) if is_filled else None


def _every(tensor: Tensor, stride: int) -> Tensor:
    """Every so many-th element of a tensor; an odd stride reaches all columns in turn."""
    if tensor.is_contiguous():
        return tensor.reshape(-1)[::stride]
    # Without a copy of the whole tensor.
    places, index = torch.arange(0, tensor.numel(), stride, device=tensor.device), list[Tensor]()
    for size in reversed(tensor.shape):
        index.insert(0, places % size)
        places = places // size
    return tensor[tuple(index)]


def check_alike(marks: Sequence[int], rows: Sequence[Samples]) -> None:
    """Check that ranks have the same, each by its mark and its samples.

    Raises:
        AgreementError: they do not. It is the same on all ranks.
    """
    batches, settings = list[str](), list[str]()
    for name in dict.fromkeys(name for row in rows for name in row):
        having = {rank: row[name] for rank, row in enumerate(rows) if name in row}
        first = min(having)
        unlike = [rank for rank, theirs in having.items() if not _same(having[first], theirs)]
        if isinstance(having[first], dict):
            if any(mark & 1 for mark in marks):
                unlike += [rank for rank in range(len(rows)) if rank not in having]
            if unlike:
                batches.append(f"{name} differs between rank {first} and rank {unlike[0]}")
        elif unlike:
            values = (f"{', '.join(f'{x:g}' for x in of)} on rank {r}" for r, of in having.items())
            settings.append(f"{name} is {', '.join(values)}")
    if batches:
        raise AgreementError(
            f"the ranks of one pipeline were given different batches: {listed(batches, 5)}. The inputs "
            "of some ranks would meet the target of another. Give all ranks of a pipeline the same batch: a "
            "sampler that divides the data, such as DistributedSampler, counts replicas, not ranks "
            "(num_replicas=pipe.replicas.number, rank=pipe.replicas.index), and shuffles with the same seed "
            "on all of them. A rank may also be given no arguments, or no target. Where they differ on "
            "purpose, same_batch=False compares nothing"
        )
    if settings:
        raise AgreementError(
            f"an optimizer's settings differ between ranks: {listed(settings, 3)}. An optimizer that "
            "measures all weights sees on each rank those alone that live there: let it add up its sums by "
            "pipe.weights.sum. A scheduler steps on every rank alike; what is only for a log belongs outside "
            "of param_groups"
        )


def _same(one: Any, other: Any) -> bool:
    """Tell whether samples may be of the same; settings must have the same numbers."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return repr(one) == repr(other)
    first, second = (
        torch.tensor(sample["rounded"], dtype=torch.float64, device="cpu")
        for sample in (one, other)
    )
    if one["exact"] != other["exact"] or len(first) != len(second):
        return False
    largest = first[first.isfinite()].abs().max() if first.isfinite().any() else 0.0
    return torch.allclose(first, second, 0.0, _TOLERANCE * float(largest), equal_nan=True)
