"""On every graph the halves give the gradients of plain autograd, do nothing twice, and leave nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from penstock.backward import SplitBackward
from tests.backward import oracle
from tests.backward.graphs import (
    CHECKPOINTED,
    GRAPHS,
    OPERATIONS,
    CountedLinear,
    Make,
    Stage,
    Standardise,
    TransformerBlock,
    ids,
    of,
    rerun,
    x,
)
from tests.backward.oracle import WAYS, check, trained
from tests.backward.probes import Probe


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
@pytest.mark.parametrize("name", [*GRAPHS, *OPERATIONS])
def test_every_way_gives_the_bits_of_plain_autograd(name: str) -> None:
    make = (GRAPHS | OPERATIONS)[name]
    for way in WAYS.values() if name in GRAPHS else (oracle.halves,):
        for seed in range(2):
            check(make, way, seed=seed)
    check(make, oracle.halves, hooks=True)
    check(make, oracle.halves_last_first, tolerance=1e-12)


@pytest.mark.parametrize("name", [name for name in GRAPHS if name not in CHECKPOINTED])
def test_no_product_and_no_function_is_computed_twice(name: str) -> None:
    stage, work = GRAPHS[name](), []
    for way in WAYS.values():
        CountedLinear.calls = Standardise.calls = 0
        with Probe() as probe:
            trained(stage, way)
        work.append((probe.products, CountedLinear.calls, Standardise.calls))
    assert set(work) == {work[0]}


@pytest.mark.parametrize("name", GRAPHS)
def test_nothing_of_a_microbatch_survives(name: str) -> None:
    trained(GRAPHS[name]())  # The first pass of a process leaves a tensor in a cycle.
    for way in WAYS.values():
        stage = GRAPHS[name]()
        with Probe() as probe:
            trained(stage, way)
            grads = [parameter.grad for parameter in stage.parameters()]
            assert probe.alive([*stage.parameters(), *grads, *stage.buffers()]) == 0


def test_what_no_weight_needs_is_freed_between_the_halves() -> None:
    stage = of(nn.Sequential(*(TransformerBlock(64) for _ in range(4))), lambda: x(2, 64, 64))
    split, inputs, weights = SplitBackward(stage), stage.inputs(), list(stage.parameters())
    with Probe() as probe:
        output = stage(*inputs)
        after_forward = probe.alive(weights)
        grads, pending = split.input_half(output, torch.ones_like(output), inputs)
        del output, inputs, grads
        assert probe.alive(weights) <= 0.85 * after_forward
        split.weight_half(pending)


class Counted(nn.Module):
    """A checkpointed block that counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.calls = TransformerBlock(8), 0

    def forward(self, value: Any) -> Any:
        return rerun(self.run, value)

    def run(self, value: Any) -> Any:
        self.calls += 1
        return self.block(value)


def first_stage() -> Stage:
    return of(nn.Sequential(nn.Embedding(11, 8), Counted(), Counted()), ids)


def later_stage() -> Stage:
    return of(nn.Sequential(Counted(), Counted()), lambda: x(2, 5, 8))


@pytest.mark.parametrize("make", [first_stage, later_stage])
def test_checkpointed_blocks_are_recomputed_once(make: Make) -> None:
    for way in oracle.halves, oracle.functions:
        stage = make()
        trained(stage, way)
        blocks = [module for module in stage.modules() if isinstance(module, Counted)]
        assert [block.calls for block in blocks] == [4, 4], "two microbatches, each forward twice"
