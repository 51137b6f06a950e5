"""What travels for ever new sequence lengths: for most of them no unit has to run without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import penstock
from penstock.partition import Partition, partition
from tests.partition.calls.driving import check_equal, describe

RAN: list[str] = []
"""What ran without data."""


class Unit(nn.Module):
    def __init__(self, does: Callable[[Unit, Tensor], Any]) -> None:
        super().__init__()
        self.does = does
        self.linear = nn.Linear(4, 4)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Any:
        if isinstance(self.linear.weight.data, FakeTensor):
            RAN.append("unit")
        return self.does(self, x)


class Model(nn.Module):
    """Units with something of the model's own between them."""

    def __init__(self, does: Callable[[Unit, Tensor], Any]) -> None:
        super().__init__()
        self.units = nn.ModuleList([Unit(does) for _ in range(2)])
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], dtype=x.dtype)
        for unit in self.units:
            found = unit(x * 1)
            x = found["main"] + places[:, None] if isinstance(found, dict) else found
        out: Tensor = self.head(x)
        return out


def plain(unit: Unit, x: Tensor) -> Any:
    return {"main": unit.linear(x).tanh(), "more": (x.mean(1), None, 3)}


def branching(unit: Unit, x: Tensor) -> Any:
    more = {"more": x.mean(1)} if x.shape[1] > 7 else {}
    return {"main": unit.linear(x), **more}


def remembering(unit: Unit, x: Tensor) -> Any:
    unit.kept = unit.linear(x)
    return {"main": unit.kept.tanh()}


def changing(unit: Unit, x: Tensor) -> Any:
    main = unit.linear(x)
    x.add_(1)
    return {"main": main}


def viewing(unit: Unit, x: Tensor) -> Any:
    return {"main": x[:, :], "same": unit.linear(x)}


def asking(unit: Unit, x: Tensor) -> Any:
    return {"main": unit.linear(x) * float(x.detach().sum() > 0)}


def losing(unit: Unit, x: Tensor) -> Any:
    main = unit.linear(x)
    penstock.add_loss("size", main.square().mean())
    return {"main": main}


def lengths_looked_at(does: Callable[[Unit, Tensor], Any]) -> list[int]:
    """How many units ran without data for each length; what travels is what it is where all do."""
    cut, counts = partition(Model(does), 2, how="calls"), []
    for length in range(5, 11):
        RAN.clear()
        found = told(cut, length)
        counts.append(len(RAN))
        assert found == told(partition(Model(does), 2, how="calls"), length)
    return counts


def told(cut: Partition, length: int) -> str:
    edges, specs = describe(cut, (torch.zeros(2, length, 4),), {})
    sure = {name: [not tensor.optional for tensor in spec.tensors] for name, spec in specs.items()}
    return f"{edges} {[(name, spec.digest()) for name, spec in specs.items()]} {sure}"


def test_from_the_third_length_on_no_unit_runs() -> None:
    assert lengths_looked_at(plain) == [2, 2, 2, 0, 0, 0]


def test_another_way_through_a_unit_is_followed_too() -> None:
    assert lengths_looked_at(branching) == [2, 2, 2, 2, 0, 0]


@pytest.mark.parametrize("does", [remembering, changing, viewing, asking, losing])
def test_a_unit_that_does_more_is_looked_at_each_time(does: Callable[[Unit, Tensor], Any]) -> None:
    assert all(count >= 2 for count in lengths_looked_at(does))


def test_the_stages_compute_what_the_model_does() -> None:
    model = Model(plain)
    cut = partition(model, 2, how="calls")
    for length in range(5, 9):
        model.zero_grad()
        check_equal(model, lambda _: cut, (torch.randn(2, length, 4),), tolerance=1e-6)
