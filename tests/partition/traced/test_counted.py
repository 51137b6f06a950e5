"""Cut a model into a number of stages: where the blocks are, what they cost, and how even it gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from penstock import Pipeline
from penstock.errors import PartitionError, UsageError
from penstock.partition.traced import cut_into, weigh_blocks
from penstock.schedule import v_shaped
from tests.partition.traced.models import EXAMPLES, Words


@pytest.mark.parametrize("name", ["unet", "words"])
def test_a_model_cut_by_count_computes_the_same(name: str) -> None:
    example = EXAMPLES[name]
    model = example.model()
    args, kwargs = example.microbatch()
    cut = cut_into(model, 3, args, kwargs)
    values: dict[str, Any] = {}
    for module in cut.modules[:-1]:
        values.update(module(values, args, kwargs))
    found = cut.modules[-1](values, args, kwargs)
    torch.testing.assert_close(found, model(*args, **kwargs), rtol=0, atol=1e-12)
    names = [name for module in cut.modules for name in module.state_dict()]
    assert sorted(names) == sorted(model.state_dict())


def words(**options: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    args, kwargs = EXAMPLES["words"].microbatch()
    return Words(**options).double(), args, kwargs


def test_blocks_are_the_models_own() -> None:
    model, args, kwargs = words()
    blocks = weigh_blocks(model, 2, args, kwargs, balance="parameters")
    names = [block.name.split(" ")[0] for block in blocks]
    assert names == ["the", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm", "head"]
    block = 24 + 13 * 36 + 144
    assert [b.cost for b in blocks] == [17 * 12, block, block, block, block, 24, 17 * 12]


def test_modules_are_opened_where_there_are_too_few() -> None:
    model, args, kwargs = words(layers=2)
    assert len(weigh_blocks(model, 2, args, kwargs)) == 5
    assert len(weigh_blocks(model, 6, args, kwargs)) == 9
    with pytest.raises(PartitionError, match=r"the Words has 9 blocks, .* into 12 stages: .*norm"):
        cut_into(model, 12, args, kwargs)


class Nested(nn.Module):
    """Two halves that are sequences: the places between their parts are as good as those between them."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(
            nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for half in self.halves:
            x = half(x)
        return x


def test_sequences_inside_are_opened() -> None:
    assert len(weigh_blocks(Nested(), 2, (torch.ones(2, 4),))) == 6


def test_weights_of_ones_own_decide() -> None:
    model, args, kwargs = words()
    cut = cut_into(model, 2, args, kwargs, balance=[0, 9, 1, 1, 1, 1, 1])
    assert "blocks.0.out.weight" in cut.modules[0].state_dict()
    assert "blocks.1.out.weight" in cut.modules[1].state_dict()
    with pytest.raises(
        UsageError, match=r"2 weights for 7 blocks; .* begin at: the beginning, blo"
    ):
        cut_into(model, 2, args, kwargs, balance=[1, 2])
    with pytest.raises(
        UsageError, match="balance='speed': the blocks of a trace weigh by parameters"
    ):
        cut_into(model, 2, args, kwargs, balance="speed")  # type: ignore[arg-type]


def test_a_model_without_data_is_cut_alike() -> None:
    model, args, kwargs = words()
    with torch.device("meta"):
        empty = Words().double()
    found = [list(m.state_dict()) for m in cut_into(empty, 3, args, kwargs).modules]
    assert found == [list(m.state_dict()) for m in cut_into(model, 3, args, kwargs).modules]


def test_a_cut_by_count_trains() -> None:
    example = EXAMPLES["words"]
    model, expected = example.model(), example.model()
    args, kwargs = example.microbatch()
    partition = cut_into(model, 4, args, kwargs, placement=v_shaped(2)).partition
    pipe = Pipeline(
        model, schedule="ZB-V", ranks=2, stages=partition, microbatches=4, loss_fn=example.loss
    )
    pipe.step(*example.args, target=example.target, **example.kwargs)
    example.loss(expected(*example.args, **example.kwargs), example.target).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    wanted = {name: parameter.grad for name, parameter in expected.named_parameters()}
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
