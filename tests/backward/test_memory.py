"""Nothing of a microbatch outlives its halves, without help of the garbage collector."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.backward import making, zoo
from tests.backward.blocks import TransformerBlock
from tests.backward.oracle import Engine, FullEngine, GraphEngine, SplitEngine, Stage, seeds
from tests.backward.probes import StorageProbe, no_garbage_collection


def run(engine: Engine, stage: Stage, probe: StorageProbe) -> tuple[int, int]:
    """Runs one microbatch; returns the bytes alive after F and between the halves."""
    weights = list(stage.model.parameters())
    inputs = stage.inputs()
    output = engine.forward(stage, inputs)
    after_forward = probe.alive(weights)
    grads = seeds(stage, output, 0)
    dinputs, state = engine.input_half(output, grads, inputs, weights)
    del output, inputs, dinputs, grads
    between = probe.alive(weights)
    engine.weight_half(weights, state)
    return after_forward, between


def kept(engine: Engine, stage: Stage) -> int:
    probe = StorageProbe()
    with probe:
        run(engine, stage, probe)
    known: list[Tensor | None] = list(stage.model.parameters())
    known += [parameter.grad for parameter in stage.model.parameters()]
    known += list(stage.model.buffers())
    return probe.alive(known)


@pytest.fixture(scope="module")
def warm() -> None:
    """Runs the first pass of the process, which leaves a tensor in a cycle with any engine."""
    kept(FullEngine(), zoo.mlp())


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("engine", [GraphEngine, SplitEngine])
@pytest.mark.parametrize("name", zoo.ZOO)
def test_nothing_of_a_microbatch_survives(name: str, engine: Callable[[], Engine]) -> None:
    torch.manual_seed(0)
    stage = zoo.ZOO[name]()
    with no_garbage_collection():
        assert kept(engine(), stage) == 0


def test_what_no_weight_needs_is_freed_between_the_halves() -> None:
    blocks = nn.Sequential(*(TransformerBlock(64) for _ in range(4)))
    stage = making.stage(blocks, lambda: making.x(2, 64, 64))
    probe = StorageProbe()
    with no_garbage_collection(), probe:
        after_forward, between = run(SplitEngine(), stage, probe)
    assert between <= 0.85 * after_forward
