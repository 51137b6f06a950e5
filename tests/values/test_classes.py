"""Teaching the specs other classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
import torch

from penstock.errors import SpecError, UsageError
from penstock.values import classes, flatten, register_type, unflatten


class Cache:
    """Neither dataclass nor named tuple."""

    def __init__(self, keys: torch.Tensor, length: int) -> None:
        self.keys = keys
        self.length = length


@pytest.fixture(autouse=True)
def forgets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(classes, "_REGISTERED", {})
    yield
    classes._KNOWN.pop(Cache, None)


def test_a_registered_class_comes_apart_and_together() -> None:
    register_type(
        Cache, lambda c: {"keys": c.keys, "n": c.length}, lambda p: Cache(p["keys"], p["n"])
    )
    tensors, structure = flatten([Cache(torch.ones(2), 7)])
    (found,) = unflatten(structure, tensors)
    assert (type(found), found.keys.tolist(), found.length) == (Cache, [1, 1], 7)


def test_its_parts_are_described_like_any_value() -> None:
    register_type(Cache, lambda c: {c.length}, lambda parts: Cache(parts, 1))
    with pytest.raises(SpecError, match=r"type set at \[0\]\.parts cannot travel between ranks"):
        flatten([Cache(torch.ones(2), 7)])


def test_a_class_inside_a_function_can_be_registered() -> None:
    @dataclass
    class Local:
        x: Any

    class Inner(Enum):
        ONE = 1

    register_type(Local)
    register_type(Inner)
    tensors, structure = flatten((Local(torch.ones(1)), Inner.ONE))
    found, member = unflatten(structure, tensors)
    assert type(found) is Local
    assert member is Inner.ONE


WRONG: dict[str, tuple[Any, ...]] = {
    "takes a class, not 3": (3,),
    "give both functions or none": (Cache, vars),
    "pass take_apart and put_together": (Cache,),
}


@pytest.mark.parametrize("says", sorted(WRONG))
def test_what_cannot_be_registered(says: str) -> None:
    with pytest.raises(UsageError, match=says):
        register_type(*WRONG[says])
