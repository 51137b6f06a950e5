"""Changes in place of values that several stages use."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import SpecError
from penstock.runtime import drive
from penstock.schedule import Edge, Placement
from penstock.transport import in_process
from tests.runtime.graphs import BATCH, gradients, make_ranks, order_of, schedule_of, square_loss

EDGES = (Edge("a", 0, (1, 2)), Edge("b", 1, (2,)))
PLACEMENTS = [(0, 0, 0), (0, 1, 2), (0, 1, 0), (0, 0, 1)]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3, dtype=torch.float64)


class First(Layer):
    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.lin(x)
        return hidden


class Middle(Layer):
    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, a: Tensor) -> Tensor:
        hidden: Tensor = self.lin(a.relu_() if self.in_place else a + 1)
        return hidden


class Last(Layer):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        hidden: Tensor = self.lin(a.mul_(2)) + b
        return hidden


def modules(*, early: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    return [First(), Middle(in_place=early), Last()]


@pytest.mark.parametrize(("placement", "halves"), list(product(PLACEMENTS, [False, True])))
def test_the_last_user_may(placement: tuple[int, ...], halves: bool) -> None:
    plain = modules(early=False)
    a = plain[0](BATCH)
    square_loss(plain[2](a * 1, plain[1](a)), BATCH).backward()
    ours = modules(early=False)
    schedule = schedule_of(EDGES, Placement(placement), 3, halves=halves)
    ranks = make_ranks(schedule, ours, in_process(schedule.ranks))
    drive([rank.run(order_of(schedule)) for rank in ranks])
    for found, expected in zip(gradients(ours), gradients(plain), strict=True):
        assert (found - expected).abs().max() < 1e-12


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_earlier_one_may_not(placement: tuple[int, ...]) -> None:
    schedule = schedule_of(EDGES, Placement(placement), 3)
    ranks = make_ranks(schedule, modules(early=True), in_process(schedule.ranks))
    with pytest.raises(
        SpecError, match=r"stage 1 changes the value 'a' in place \(the tensor\), and stages \[2\]"
    ):
        drive([rank.run(order_of(schedule)) for rank in ranks])
