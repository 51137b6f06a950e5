"""Splitting batches and merging outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.errors import MicrobatchError
from penstock.values import REPLICATE, Rules, Split, merge, split, tensors_in


class Point(NamedTuple):
    x: Tensor
    y: Tensor


class Refusal(NamedTuple):
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    parts: int
    rules: Rules
    says: str


def rows(count: int, width: int = 2) -> Tensor:
    return torch.arange(float(count * width)).reshape(count, width)


def sizes(batch: int, count: int) -> list[int]:
    return [part.samples for part in split((rows(batch),), {}, count)]


# ---- splitting


@given(st.integers(1, 40), st.integers(1, 40))
def test_every_sample_is_in_one_microbatch_in_order(batch: int, count: int) -> None:
    if count > batch:
        return
    whole = rows(batch)
    parts = split((whole,), {}, count)
    assert torch.equal(torch.cat([part.args[0] for part in parts]), whole)
    assert max(sizes(batch, count)) - min(sizes(batch, count)) <= 1


def test_parts_are_views_of_the_batch() -> None:
    whole = rows(4)
    parts = split((whole,), {}, 2)
    assert parts[1].args[0].data_ptr() == whole[2:].data_ptr()


@pytest.mark.parametrize("dim", [1, -1])
def test_another_dimension(dim: int) -> None:
    parts = split((rows(3, 4),), {}, 2, {0: Split(dim)})
    assert [list(part.args[0].shape) for part in parts] == [[3, 2], [3, 2]]


def test_replicated_arguments_go_whole_to_every_microbatch() -> None:
    mask = torch.ones(3)
    parts = split((rows(4),), {"mask": mask}, 2, {"mask": REPLICATE})
    assert all(part.kwargs["mask"] is mask for part in parts)


def test_arguments_by_name_are_split_too() -> None:
    parts = split((), {"x": rows(4), "scale": 2.0}, 2)
    assert [part.args for part in parts] == [(), ()]
    assert torch.equal(parts[1].kwargs["x"], rows(4)[2:])
    assert parts[1].kwargs["scale"] == 2.0


NESTED: dict[str, Callable[[], Any]] = {
    "tuple": lambda: (rows(4), rows(4)),
    "list": lambda: [rows(4), None, 3],
    "dict": lambda: {"a": rows(4), "b": {"c": rows(4)}},
    "named tuple": lambda: Point(rows(4), rows(4)),
}


@pytest.mark.parametrize("name", sorted(NESTED))
def test_nested_arguments_keep_their_structure_and_are_merged(name: str) -> None:
    value = NESTED[name]()
    parts = [part.args[0] for part in split((value,), {}, 2)]
    assert type(parts[0]) is type(value)
    flat, halves = tensors_in(value), [tensors_in(part) for part in parts]
    assert all(torch.equal(torch.cat(both), t) for t, *both in zip(flat, *halves, strict=True))
    merged = merge(parts)
    assert type(merged) is type(value)
    assert all(map(torch.equal, tensors_in(merged), flat))


def test_without_tensors_each_microbatch_gets_everything() -> None:
    parts = split((3, "text"), {}, 3)
    assert [(part.args, part.samples) for part in parts] == [((3, "text"), 0)] * 3


REFUSALS = {
    "too few samples": Refusal((rows(3),), {}, 4, {}, "3 samples cannot be split into 4"),
    "no microbatches": Refusal((rows(3),), {}, 0, {}, "into 0 microbatches; use at least 1"),
    "a rule for nothing": Refusal((rows(3),), {}, 1, {"mask": REPLICATE}, r"rules for \['mask'\]"),
    "no such dimension": Refusal((rows(3),), {}, 1, {0: Split(2)}, r"\[3, 2\] has no dimension 2"),
    "a scalar that shall be split": Refusal(
        (torch.tensor(1.0),), {}, 1, {0: Split()}, "keep it whole with REPLICATE"
    ),
    "other sizes": Refusal(
        (rows(3),),
        {"y": [rows(4)]},
        1,
        {},
        r"3 samples \(argument 0 of shape \[3, 2\] .* but argument 'y'\[0\] of shape \[4, 2\] has 4",
    ),
}


@pytest.mark.parametrize("name", sorted(REFUSALS))
def test_what_cannot_be_split_is_refused(name: str) -> None:
    args, kwargs, count, rules, says = REFUSALS[name]
    with pytest.raises(MicrobatchError, match=says):
        split(args, kwargs, count, rules)


# ---- merging


def test_tensors_are_concatenated() -> None:
    assert torch.equal(merge([rows(4)[:3], rows(4)[3:]]), rows(4))


def test_along_another_dimension_and_scalars() -> None:
    assert merge([rows(2), rows(2)], dim=1).shape == (2, 4)
    assert merge([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]


def test_equal_values_are_given_once() -> None:
    assert merge([{"loss": None, "kind": "a"}] * 3) == {"loss": None, "kind": "a"}


UNLIKE: dict[str, tuple[list[Any], str]] = {
    "types": ([rows(1), (rows(1),)], "different structures"),
    "lengths": ([(1,), (1, 2)], "different structures"),
    "keys": ([{"a": 1}, {"b": 1}], "different structures"),
    "values": ([1, 2], "not tensors and differ"),
    "shapes": ([rows(1, 2), rows(1, 3)], r"shapes \[\[1, 2\], \[1, 3\]\] cannot be merged"),
}


@pytest.mark.parametrize("name", sorted(UNLIKE))
def test_outputs_that_differ_are_refused(name: str) -> None:
    outputs, says = UNLIKE[name]
    with pytest.raises(MicrobatchError, match=says):
        merge(outputs)
