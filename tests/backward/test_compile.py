from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.backward import SplitBackward, stage_backward_input, stage_backward_weight
from tests.backward.making import linear, x

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


def block() -> nn.Module:
    return nn.Sequential(linear(), nn.Tanh(), linear())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, value: Tensor) -> Any:
        return self.inner(value)


def per_block() -> nn.Module:
    compiled = Block()
    compiled.compile(backend="aot_eager")
    return nn.Sequential(linear(), compiled, linear())


def whole() -> nn.Module:
    return torch.compile(block(), backend="aot_eager")  # type: ignore[return-value]


class CompiledForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    @torch.compile(backend="aot_eager")
    def forward(self, value: Tensor) -> Any:
        return self.second(self.first(value).tanh())


class CallsCompiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.rest = torch.compile(self.run, backend="aot_eager")

    def run(self, value: Tensor) -> Any:
        return self.second(value).tanh()

    def forward(self, value: Tensor) -> Any:
        return self.rest(self.first(value)) @ self.second.weight


def test_compiled_blocks_give_all_gradients_in_the_first_half_of_the_functions() -> None:
    model = nn.Sequential(linear(), Block(), linear())
    leaf, weights = x(), list(model.parameters())
    expected = torch.autograd.grad(model(leaf).square().sum(), [leaf, *weights])
    model[1].compile(backend="aot_eager")
    (dinput,), groups = stage_backward_input([model(leaf).square().sum()], None, [leaf], weights)
    actual: list[Tensor | None] = [dinput, *stage_backward_weight(weights, groups)]
    torch.testing.assert_close(actual, list(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "waiting"),
    [(per_block, 6), (whole, 4), (CompiledForward, 4), (CallsCompiled, 3)],
)
def test_compiled_parts_wait_and_are_right(make: Callable[[], nn.Module], waiting: int) -> None:
    torch.compiler.reset()
    model, leaf = make(), x()
    model(leaf).square().sum().backward()
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    split = SplitBackward(model)
    for _ in range(3):
        model.zero_grad()
        _, pending = split.input_half(model(leaf).square().sum(), None, [leaf])
        assert sum(weight.grad is None for weight in model.parameters()) == waiting
        split.weight_half(pending)
        actual = {name: weight.grad for name, weight in model.named_parameters()}
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
