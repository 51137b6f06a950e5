"""Taking values apart and putting them together."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SpecError
from penstock.specs import flatten, unflatten
from penstock.specs.structure import paths

A, B, C = torch.zeros(1), torch.ones(2), torch.full((3,), 2.0)

VALUES: dict[str, Any] = {
    "a tensor": A,
    "a tuple of tensors": (A, B),
    "an empty tuple": (),
    "a list": [A, [B, []]],
    "a dict": {"x": A, 3: {"y": B}},
    "plain values": (None, True, 2, 0.5, "text"),
    "a mixture": ({"hidden": A, "mask": None}, [B, (C, 1)], "end"),
    "one tensor twice": (A, [A]),
}


@pytest.mark.parametrize("name", sorted(VALUES))
def test_unflatten_undoes_flatten(name: str) -> None:
    tensors, structure = flatten(VALUES[name])
    assert same(unflatten(structure, tensors), VALUES[name])


@pytest.mark.parametrize("name", sorted(VALUES))
def test_structures_survive_json(name: str) -> None:
    _, structure = flatten(VALUES[name])
    assert json.loads(json.dumps(structure)) == structure


def same(found: Any, expected: Any) -> bool:
    """Equal, with the very same tensors."""
    if isinstance(expected, torch.Tensor):
        return found is expected
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[k], expected[k]) for k in expected)
    if isinstance(expected, tuple | list):
        return type(found) is type(expected) and all(map(same, found, expected))
    return bool(found == expected) and type(found) is type(expected)


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
NESTED = st.recursive(
    PLAIN | st.sampled_from([A, B, C]),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=12,
)


@given(NESTED)
def test_any_nested_value_comes_back(value: Any) -> None:
    tensors, structure = flatten(value)
    assert same(unflatten(json.loads(json.dumps(structure)), tensors), value)
    assert len(list(paths(structure))) == len(tensors)


def test_tensors_come_in_order() -> None:
    tensors, _ = flatten({"b": [B, C], "a": A})
    assert tensors == [B, C, A]


def test_paths_say_where_tensors_stand() -> None:
    _, structure = flatten(({"hidden": A, "mask": None}, [B]))
    assert list(paths(structure)) == ["[0]['hidden']", "[1][0]"]


def test_the_path_of_a_bare_tensor() -> None:
    assert list(paths(flatten(A)[1])) == ["the tensor"]


REFUSED: dict[str, tuple[Any, str]] = {
    "a set": ({A}, "a value of type set stands at the top"),
    "deep inside": ([{"x": object()}], r"type object stands at \[0\]\['x'\]"),
    "a subclass": (OrderedDict(x=A), "type OrderedDict"),
    "a tuple as key": ({"x": {(1, 2): A}}, r"the key \(1, 2\) at \['x'\]"),
    "a bool as key": ({True: A}, "the key True at the top must be a string or an int"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_travel_is_named(name: str) -> None:
    value, says = REFUSED[name]
    with pytest.raises(SpecError, match=says):
        flatten(value)
