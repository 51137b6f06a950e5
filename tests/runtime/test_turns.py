"""Microbatches in their order, in whatever order they come."""

from __future__ import annotations

from itertools import permutations

import pytest

from penstock.runtime.bind import Turns


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_all_come_through_in_order(order: tuple[int, ...]) -> None:
    turns = Turns()
    assert [due for index in order for due in turns.arrived(index)] == [0, 1, 2, 3]


def test_nobody_waits_longer_than_needed() -> None:
    turns = Turns()
    assert [list(turns.arrived(index)) for index in (2, 0, 1, 3)] == [[], [0], [1, 2], [3]]


def test_who_goes_through_by_itself_brings_those_that_waited() -> None:
    turns = Turns()
    assert list(turns.arrived(1)) == []
    assert list(turns.passed()) == [1]
    assert turns.is_next(2)


def test_whose_turn_it_is() -> None:
    turns = Turns()
    assert turns.is_next(0)
    assert list(turns.arrived(0)) == [0]
    assert turns.is_next(1)
    assert not turns.is_next(0)
