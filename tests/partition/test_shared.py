"""Weights that stages share are found by identity, whatever their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import PartitionError
from penstock.partition import (
    Partition,
    Shared,
    find_shared,
    find_shared_between,
    partition,
)


class Rotary(nn.Module):
    """A module that only holds a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.arange(3.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


def tied() -> nn.ModuleDict:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 4), "head": nn.Linear(4, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


def twice() -> nn.Sequential:
    one = nn.Linear(2, 2, bias=False)
    return nn.Sequential(one, nn.Tanh(), one)


ROTARY = Rotary()
BLOCKS = [["embed", "block"], ["block"], ["block", "block"]]
LOOPED = nn.ModuleDict({"embed": nn.Linear(4, 4), "block": nn.Linear(4, 4, bias=False)})
NAMES = ("embed.weight", "head.weight")


@pytest.mark.parametrize(
    ("model", "stages", "shared"),
    [
        (tied(), [["embed"], ["head"]], Shared(NAMES, ((0, NAMES[0]), (1, NAMES[1])))),
        # Also where both names are in one stage.
        (tied(), [["embed", "head"]], Shared(NAMES, ((0, NAMES[0]),))),
        (
            LOOPED,
            BLOCKS,
            Shared(("block.weight",), tuple((stage, "block.weight") for stage in range(3))),
        ),
        (twice(), 3, Shared(("0.weight", "2.weight"), ((0, "0.weight"), (2, "0.weight")))),
        (
            nn.ModuleDict({"a": nn.Sequential(ROTARY), "b": nn.Sequential(ROTARY)}),
            [["a"], ["b"]],
            Shared(
                ("a.0.frequencies", "b.0.frequencies"),
                ((0, "a.0.frequencies"), (1, "b.0.frequencies")),
            ),
        ),
    ],
)
def test_what_stages_share(model: nn.Module, stages: Any, shared: Shared) -> None:
    assert partition(model, stages).shared == (shared,)


def test_weights_that_are_equal_but_not_the_same_are_not_shared() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    two.load_state_dict(one.state_dict())
    assert find_shared(nn.Sequential(one, two), (one, two)) == ()


def test_between_stages_without_a_model() -> None:
    model = tied()
    shared = find_shared_between({1: model["head"], 4: model["embed"]})
    assert shared == (Shared(("weight",), ((1, "weight"), (4, "weight"))),)


def test_a_partition_of_the_users_must_hold_everything() -> None:
    model = tied()
    with pytest.raises(PartitionError, match=r"in no stage: embed.weight, head.weight"):
        penstock.Pipeline(model, stages=Partition((nn.Tanh(), nn.Tanh())))


def test_a_users_partition_gets_its_table() -> None:
    model = tied()
    pipe = penstock.Pipeline(model, stages=Partition((model["embed"], model["head"])))
    assert [name for name, _ in pipe.named_parameters()] == ["embed.weight"]
