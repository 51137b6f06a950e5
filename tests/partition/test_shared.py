"""Weights that stages share are found by identity, whatever their names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.partition import (
    Partition,
    Shared,
    find_shared,
    find_shared_between,
    partition,
)
from penstock.pipeline.plan import cut


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


def looped() -> nn.ModuleDict:
    return nn.ModuleDict({"embed": nn.Linear(4, 4), "block": nn.Linear(4, 4)})


BLOCKS = [["embed", "block"], ["block"], ["block", "block"]]


def test_a_tied_weight_has_two_names() -> None:
    made = partition(tied(), [["embed"], ["head"]])
    names = ("embed.weight", "head.weight")
    assert made.shared == (Shared(names, ((0, "embed.weight"), (1, "head.weight"))),)


def test_a_shared_module_has_one_name_in_several_stages() -> None:
    shared = partition(looped(), BLOCKS).shared
    assert [one.names for one in shared] == [("block.weight",), ("block.bias",)]
    assert [one.stages for one in shared] == [(0, 1, 2)] * 2


def test_a_module_at_two_places_of_a_sequential() -> None:
    one = nn.Linear(2, 2)
    shared = partition(nn.Sequential(one, nn.Tanh(), one), 3).shared
    assert shared[0] == Shared(("0.weight", "2.weight"), ((0, "0.weight"), (2, "0.weight")))


def test_buffers_are_found_too() -> None:
    rotary = Rotary()
    model = nn.ModuleDict({"a": nn.Sequential(rotary), "b": nn.Sequential(rotary)})
    (found,) = partition(model, [["a"], ["b"]]).shared
    assert found.names == ("a.0.frequencies", "b.0.frequencies")


def test_two_names_in_one_stage_are_in_the_table_with_that_stage() -> None:
    (found,) = partition(tied(), [["embed", "head"]]).shared
    assert found == Shared(("embed.weight", "head.weight"), ((0, "embed.weight"),))


def test_nothing_is_shared_in_most_models() -> None:
    assert partition(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), 2).shared == ()


def test_weights_that_are_equal_but_not_the_same_are_not_shared() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    two.load_state_dict(one.state_dict())
    assert find_shared(nn.Sequential(one, two), (one, two)) == ()


def test_between_stages_without_a_model() -> None:
    model = tied()
    found = find_shared_between({1: model["head"], 4: model["embed"]})
    assert found == (Shared(("weight",), ((1, "weight"), (4, "weight"))),)


# ---- what is not in the table is refused


def test_a_partition_without_a_table_is_refused() -> None:
    model = tied()
    made = replace(partition(model, [["embed"], ["head"]]), shared=())
    with pytest.raises(PartitionError, match=r"'head.weight': \[0, 1\].*find_shared"):
        made.check_covers(model)


@pytest.mark.parametrize("holder", [(1, "embed.weight"), (2, "head.weight"), (-1, "head.weight")])
def test_a_table_that_is_not_true_is_refused(holder: tuple[int, str]) -> None:
    model = tied()
    made = partition(model, [["embed"], ["head"]])
    table = (Shared(("embed.weight", "head.weight"), ((0, "embed.weight"), holder)),)
    with pytest.raises(PartitionError, match=r"which they do not"):
        replace(made, shared=table).check_covers(model)


def test_a_table_that_leaves_a_stage_out_is_refused() -> None:
    model = looped()
    made = partition(model, BLOCKS)
    short = tuple(Shared(one.names, one.holders[:2]) for one in made.shared)
    with pytest.raises(PartitionError, match=r"'block.weight': \[0, 1, 2\]"):
        replace(made, shared=short).check_covers(model)


def test_a_users_partition_gets_its_table() -> None:
    model = tied()
    given = Partition((model["embed"], model["head"]))
    assert [one.stages for one in cut(model, given, 2).shared] == [(0, 1)]
