"""Values on their way to users, and gradients on their way back."""

from __future__ import annotations

import gc
import weakref
from itertools import permutations

import pytest
import torch
from torch import Tensor

from penstock.errors import InternalError
from penstock.runtime.values import GradientSums, Values


def test_a_value_is_kept_for_its_reads() -> None:
    values = Values()
    values.put("x", 0, "value", 2)
    assert [values.take("x", 0), values.take("x", 0)] == ["value", "value"]
    assert len(values) == 0


def test_a_value_that_nobody_reads_is_not_kept() -> None:
    values = Values()
    values.put("x", 0, "value", 0)
    assert len(values) == 0


def test_microbatches_have_their_own() -> None:
    values = Values()
    for microbatch in range(2):
        values.put("x", microbatch, microbatch, 1)
    assert [values.take("x", 1), values.take("x", 0)] == [1, 0]


def test_one_read_too_many_is_a_bug() -> None:
    values = Values()
    values.put("x", 0, "value", 1)
    values.take("x", 0)
    with pytest.raises(InternalError, match="value 'x' of microbatch 0 is not here"):
        values.take("x", 0)


def test_the_last_read_lets_go() -> None:
    gc.disable()
    values = Values()
    values.put("x", 0, torch.zeros(1), 1)
    alive = weakref.ref(values.take("x", 0))
    assert alive() is None
    gc.enable()


def summed(owed: dict[int, list[Tensor | None]], order: tuple[int, ...]) -> list[Tensor | None]:
    sums = GradientSums()
    for user in order:
        sums.put("x", 0, user, owed[user])
    found = sums.take("x", 0)
    assert len(sums) == 0
    return found


OWED: dict[int, list[Tensor | None]] = {
    1: [torch.tensor(1e8), None, None],
    2: [torch.tensor(1.0), torch.tensor(2.0), None],
    3: [torch.tensor(-1e8), None, None],
}


@pytest.mark.parametrize("order", list(permutations(OWED)))
def test_the_sum_does_not_depend_on_the_order_of_arrival(order: tuple[int, ...]) -> None:
    first, second, third = summed(OWED, order)
    # From the last stage to the first: (-1e8 + 1) + 1e8, which float32 rounds to 0.
    assert first == 0.0
    assert second == 2.0
    assert third is None


def test_one_gradient_is_passed_on_as_it_is() -> None:
    gradient = torch.ones(2)
    assert summed({1: [gradient]}, (1,))[0] is gradient


def test_the_users_gradients_are_left_alone() -> None:
    a, b = torch.ones(2), torch.ones(2)
    summed({1: [a], 2: [b]}, (1, 2))
    assert a.tolist() == b.tolist() == [1, 1]


def test_without_users_there_is_no_gradient() -> None:
    assert GradientSums().take("x", 0) == []
