"""What stages cost, whichever way they were cut, and stages that are equal by it."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import PartitionError, UsageError
from penstock.partition import cut_chain, partition, stage_costs
from tests.partition.traced.models import EXAMPLES, Words

LAYERS = [4, 8, 8, 2]


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(LAYERS)))


def test_costs_of_a_chain_are_those_one_can_count() -> None:
    model = layers()
    costs = stage_costs(cut_chain(model, [["0"], ["1"], ["2"]]), (torch.ones(3, 4),))
    sizes = [4 * 8, 8 * 8, 8 * 2]
    assert [cost.parameters for cost in costs] == sizes
    assert [cost.flops for cost in costs] == [2 * 3 * size for size in sizes]
    assert [cost.by("memory") for cost in costs] == [
        4 * 4 * s + cost.saved for s, cost in zip(sizes, costs, strict=True)
    ]
    assert [cost.saved for cost in costs][1:] == [3 * 8 * 4, 3 * 8 * 4]
    assert all(cost.seconds == 0 for cost in costs)


def test_times_are_taken_of_forward_and_of_both_halves_of_backward() -> None:
    costs = stage_costs(cut_chain(layers(), [["0", "1"], ["2"]]), (torch.ones(3, 4),), repeats=2)
    assert all(cost.forward > 0 for cost in costs)
    assert costs[1].backward_input > 0
    with pytest.raises(UsageError, match="cannot measure a model on the meta device"):
        stage_costs(
            cut_chain(layers().to("meta"), [["0", "1"], ["2"]]), (torch.ones(3, 4),), repeats=1
        )


@pytest.mark.parametrize("how", ["calls", "traced"])
@pytest.mark.parametrize("balance", ["parameters", "flops", "memory", "time"])
def test_both_ways_cut_by_what_is_measured(how: str, balance: Any) -> None:
    example = EXAMPLES["words"]
    model = example.model()
    args, kwargs = example.microbatch()
    made = partition(model, 2, how=how, example=(args, kwargs), balance=balance)
    found = [cost.by(balance) for cost in stage_costs(made, args, kwargs, repeats=2)]
    assert len(found) == 2
    assert balance == "time" or max(found) < 0.7 * sum(found)


def test_a_measure_needs_an_example_and_a_name() -> None:
    with pytest.raises(
        PartitionError, match=r"balance='flops' needs a call of the model to measure: give example="
    ):
        partition(Words(), 2, how="calls", balance="flops")
    with pytest.raises(UsageError, match=r"balance='speed': must be one of time, flops"):
        partition(Words(), 2, how="calls", balance="speed")


def test_without_data_only_traces_are_measured() -> None:
    model = Words().to("meta")
    args, kwargs = EXAMPLES["words"].microbatch()
    with pytest.raises(PartitionError, match=r"runs the model, which has no data: .* how=.traced."):
        partition(model, 2, how="calls", example=(args, kwargs), balance="flops")
    assert len(partition(model, 2, how="calls", example=(args, kwargs)).modules) == 2


class Counts(nn.Linear):
    """Counts its calls in an attribute, a list and a buffer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls, self.sizes = 0, list[int]()
        self.register_buffer("steps", torch.zeros(()))
        self.steps: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.sizes.append(len(x))
        self.steps += 1
        return super().forward(x) * random.random()


@pytest.mark.parametrize("how", ["calls", "chain"])
def test_measuring_leaves_no_trace(how: Literal["calls", "chain"]) -> None:
    counts, heard = [Counts(), Counts()], list[Any]()
    model = nn.Sequential(*counts)
    for hooked in (model[0].register_forward_hook, model[1].register_full_backward_hook):
        hooked(lambda module, args, output: heard.append(args))
    model[1].register_forward_hook(lambda module, args, output: heard.extend([args]))
    state = random.getstate()
    partition(model, 2, how=how, example=((torch.ones(3, 4),), {}), balance="time")
    assert [(m.calls, m.sizes, float(m.steps)) for m in counts] == [(0, list[int](), 0.0)] * 2
    assert heard == []
    assert random.getstate() == state
    model(torch.ones(3, 4)).sum().backward()
    assert len(heard) == 3


class Slope(nn.Module):
    """Differentiates inside, where nobody may look at what is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.func.grad(lambda row: (row * self.weight).tanh().sum())(x)
        return found


@pytest.mark.parametrize("how", ["chain", "calls"])
def test_a_stage_that_differentiates_inside_is_measured(how: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Slope(), nn.Linear(4, 4))
    parts = partition(model, 2, how=how, example=((torch.ones(2, 4),), {}), balance="memory")
    assert len(parts.modules) == 2
    assert torch.equal(model(torch.ones(2, 4)), model(torch.ones(2, 4)))
