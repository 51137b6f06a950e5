"""The halves together do the work of one backward pass, and none of it twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backward import blocks, making, zoo
from tests.backward.oracle import Engine, FullEngine, GraphEngine, SplitEngine, Stage, seeds
from tests.backward.probes import OperationCounter


def matmuls(engine: Engine, make_stage: Callable[[], Stage]) -> tuple[int, int]:
    """Returns how many matrix products each half runs."""
    torch.manual_seed(0)
    stage = make_stage()
    inputs, weights = stage.inputs(), list(stage.model.parameters())
    output = engine.forward(stage, inputs)
    with OperationCounter() as first:
        _, state = engine.input_half(output, seeds(stage, output, 0), inputs, weights)
    with OperationCounter() as second:
        engine.weight_half(weights, state)
    return first.matmuls, second.matmuls


@pytest.mark.parametrize("engine", [GraphEngine, SplitEngine])
@pytest.mark.parametrize("name", [name for name in zoo.ZOO if "checkpoint" not in name])
def test_halves_run_as_many_matmuls_as_full_backward(
    name: str, engine: Callable[[], Engine]
) -> None:
    expected, _ = matmuls(FullEngine(), zoo.ZOO[name])
    assert sum(matmuls(engine(), zoo.ZOO[name])) == expected


@pytest.mark.parametrize("engine", [GraphEngine, SplitEngine])
@pytest.mark.parametrize("name", ["mlp", "transformer", "reused_linear", "looped_block", "lora"])
def test_weight_gradients_are_left_to_the_second_half(
    name: str, engine: Callable[[], Engine]
) -> None:
    first, second = matmuls(engine(), zoo.ZOO[name])
    assert 0 < second <= first


def test_first_stage_leaves_everything_to_the_second_half() -> None:
    assert matmuls(GraphEngine(), zoo.ZOO["first_stage"])[0] == 0


@pytest.mark.parametrize("make", [zoo.ZOO["custom_function"], zoo.ZOO["weights_through_python"]])
def test_python_functions_run_backward_once(make: Callable[[], Stage]) -> None:
    calls = []
    for engine in FullEngine(), GraphEngine(), SplitEngine():
        blocks.CountedLinear.calls = blocks.Standardise.calls = 0
        matmuls(engine, make)
        calls.append((blocks.CountedLinear.calls, blocks.Standardise.calls))
    assert calls[0] == calls[1] == calls[2]


class Counted(nn.Module):
    """A checkpointed block that counts its forwards."""

    def __init__(self, block: nn.Module, **options: Any) -> None:
        super().__init__()
        self.block = block
        self.options = options
        self.calls = 0

    def forward(self, value: Tensor) -> Any:
        return making.rerun(self.run, value, **self.options)

    def run(self, value: Tensor) -> Any:
        self.calls += 1
        return self.block(value)


@pytest.mark.parametrize("engine", [GraphEngine, SplitEngine])
def test_checkpointed_blocks_are_recomputed_once(engine: Callable[[], Engine]) -> None:
    made = [Counted(blocks.TransformerBlock(8)) for _ in range(3)]
    matmuls(engine(), lambda: making.stage(nn.Sequential(*made), lambda: making.x(2, 5, 8)))
    assert [block.calls for block in made] == [2, 2, 2]


def test_checkpointed_first_stage_is_recomputed_once_in_the_second_half() -> None:
    block = Counted(blocks.TransformerBlock(8))
    layers = nn.Embedding(11, 8), block
    first, _ = matmuls(GraphEngine(), lambda: making.stage(nn.Sequential(*layers), making.ids))
    assert first == 0
    assert block.calls == 2
