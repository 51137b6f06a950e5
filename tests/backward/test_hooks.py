"""Hooks run as often, and with the same values, as in a plain backward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.backward import (
    SplitBackward,
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from tests.backward.blocks import Lambda, TransformerBlock, counted_linear
from tests.backward.making import linear, looped, weight, x

Calls = defaultdict[str, list[Tensor]]


def by_engine(output: Tensor, leaf: Tensor, model: nn.Module) -> None:
    engine = SplitBackward(model)
    _, pending = engine.input_half([output], [torch.ones_like(output)], [leaf])
    engine.weight_half(pending)


def by_functions(output: Tensor, leaf: Tensor, model: nn.Module) -> None:
    grad = torch.ones_like(output)
    _, groups = stage_backward_input([output], [grad], [leaf], model.parameters())
    stage_backward_weight(model.parameters(), groups)


Split = Callable[[Tensor, Tensor, nn.Module], None]
both_ways = pytest.mark.parametrize("split", [by_engine, by_functions])


def full(output: Tensor, leaf: Tensor, _: nn.Module) -> None:
    stage_backward(output, torch.ones_like(output), [leaf])


def observe(model: nn.Module, calls: Calls) -> list[Any]:
    """Registers every kind of hook on the model's parameters and modules."""

    def record(name: str, value: Tensor) -> None:
        calls[name].append(value.detach().clone())

    def halve(name: str, grad: Tensor) -> Tensor:
        record(name, grad)
        return grad / 2

    def written(name: str, leaf: Tensor) -> None:
        assert leaf.grad is not None
        record(f"{name} post", leaf.grad)

    def passed(name: str, _: Any, grads: Any, __: Any) -> None:
        record(f"{name} module", grads[0])

    def tapped(name: str, _: Any, __: Any, output: Tensor) -> None:
        output.register_hook(partial(halve, f"{name} output"))

    handles: list[Any] = []
    for name, parameter in model.named_parameters():
        handles.append(parameter.register_hook(partial(halve, name)))
        handles.append(parameter.register_post_accumulate_grad_hook(partial(written, name)))
    for name, module in model.named_children():
        handles.append(module.register_full_backward_hook(partial(passed, name)))
        handles.append(module.register_forward_hook(partial(tapped, name)))
    return handles


def calls_of(
    backward: Callable[[Tensor, Tensor, nn.Module], None], model: nn.Module, value: Tensor
) -> Calls:
    calls: Calls = defaultdict(list)
    model.zero_grad()
    handles = observe(model, calls)
    leaf = value.detach().clone().requires_grad_()
    backward(model(leaf), leaf, model)
    for handle in handles:
        handle.remove()
    return calls


def simple() -> nn.Module:
    return nn.Sequential(linear(), nn.Tanh(), linear(), nn.LayerNorm(6, dtype=torch.float64))


def blocks() -> nn.Module:
    return nn.Sequential(TransformerBlock(6), TransformerBlock(6)).double()


def shared() -> nn.Module:
    return Lambda(lambda m, v: looped(m.layer, v) @ m.matrix, layer=nn.Identity(), matrix=weight())


def reused() -> nn.Module:
    bare = linear()
    return Lambda(lambda m, v: looped(lambda u: u @ m.w.t() + m.b, v), w=bare.weight, b=bare.bias)


def python() -> nn.Module:
    return Lambda(
        lambda m, v: counted_linear(counted_linear(v, m.w, m.b), m.w, m.b), w=weight(), b=weight(6)
    )


def checkpointed() -> nn.Module:
    def run(m: Any, v: Tensor) -> Any:
        return checkpoint(lambda u: torch.tanh(u @ m.w + m.b) @ m.w, v, use_reentrant=False)

    return Lambda(run, w=weight(), b=weight(6))


@both_ways
@pytest.mark.parametrize("make", [simple, blocks, shared, reused, python, checkpointed])
def test_hooks_run_as_in_a_plain_backward_pass(make: Callable[[], nn.Module], split: Split) -> None:
    model = make()
    value = x(4, 6) if make is not blocks else x(2, 4, 6)
    expected, actual = calls_of(full, model, value), calls_of(split, model, value)
    assert expected.keys() == actual.keys()
    for name, values in expected.items():
        torch.testing.assert_close(actual[name], values, rtol=1e-12, atol=1e-12)


@both_ways
def test_hooks_on_inputs_run_once(split: Split) -> None:
    leaf, model = x(), linear()
    calls: list[Tensor] = []
    leaf.register_hook(calls.append)
    split(model(leaf), leaf, model)
    assert len(calls) == 1


@both_ways
def test_retained_gradients_of_activations_are_right(split: Split) -> None:
    leaf, model = x(), linear()
    hidden = model(leaf)
    hidden.retain_grad()
    split(hidden * 2, leaf, model)
    assert torch.equal(hidden.grad, torch.full_like(hidden, 2))


@both_ways
def test_an_optimizer_may_step_in_backward(split: Split) -> None:
    leaf, model = x(), nn.Sequential(linear(), nn.Tanh(), linear())

    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad)  # type: ignore[arg-type]
        parameter.grad = None

    before = [parameter.detach().clone() for parameter in model.parameters()]
    expected = torch.autograd.grad(model(leaf).sum(), list(model.parameters()))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    split(model(leaf), leaf, model)
    for parameter, old, grad in zip(model.parameters(), before, expected, strict=True):
        torch.testing.assert_close(parameter.detach(), old - grad, rtol=1e-12, atol=1e-12)
