"""What was found for one microbatch serves for the next, if and only if its graph is the same."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from penstock.backward import SplitBackward
from tests.backward.blocks import Lambda
from tests.backward.making import linear, rerun, weight, x
from tests.backward.probes import OperationCounter

Run = Callable[[Any, Tensor], Any]


def check(split: SplitBackward, model: nn.Module, run: Run, value: Tensor, waiting: int) -> None:
    """Compares one microbatch with autograd, bit by bit."""
    parameters = list(model.parameters())
    output = run(model, value)
    seed = torch.randn_like(output)
    wanted = [value, *parameters] if value.requires_grad else parameters
    expected = torch.autograd.grad(output, wanted, seed, allow_unused=True)
    model.zero_grad()
    found, pending = split.input_half([run(model, value)], [seed], [value])
    assert len(pending) == waiting
    split.weight_half(pending)
    assert len(pending) == 0
    actual = [*(found if value.requires_grad else ()), *(one.grad for one in parameters)]
    torch.testing.assert_close(actual, list(expected), rtol=0, atol=0)


def hooked(run: Run) -> Run:
    def run_hooked(m: Any, v: Tensor) -> Any:
        with saved_tensors_hooks(lambda saved: [saved], list.pop):
            return run(m, v)

    return run_hooked


def product(m: Any, v: Tensor) -> Any:
    return (v @ m.w).tanh() @ m.u


RUNS: dict[str, tuple[Run, int]] = {
    "once": (product, 2),
    "the other way round": (lambda m, v: (m.w @ v).tanh() @ m.u, 2),
    "one weight twice": (lambda m, v: (v @ m.w).tanh() @ m.w, 2),
    "one weight in two ways": (lambda m, v: (v @ m.w).tanh() @ m.u * m.w.sum(), 1),
    "one alone": (lambda m, v: (v @ m.w).tanh(), 1),
    "transposed": (lambda m, v: functional.linear(v, m.w).tanh() @ m.u, 2),
    "a computed weight": (lambda m, v: (v @ (m.w * m.u)).tanh() @ m.u, 2),
    "with hooks on what is saved": (hooked(product), 0),
    "checkpointed": (lambda m, v: rerun(lambda u: product(m, u), v), 2),
    "checkpointed in part": (lambda m, v: rerun(lambda u: (u @ m.w).tanh(), v) @ m.u, 2),
    "frozen": (lambda m, v: (v @ m.w.detach()).tanh() @ m.u, 1),
}


@pytest.mark.parametrize("first", RUNS)
def test_microbatches_may_have_different_graphs(first: str) -> None:
    model = Lambda(product, w=weight(), u=weight())
    split, values = SplitBackward(model), [x(6, 6), x(6, 6)]
    for second in RUNS:
        for name in first, second, first:
            run, waiting = RUNS[name]
            for value in values:
                check(split, model, run, value, waiting)


def test_an_input_may_be_a_parameter() -> None:
    model = Lambda(product, w=weight(), u=weight())
    split = SplitBackward(model)
    for value, waiting in [(x(6, 6), 2), (nn.Parameter(weight()), 2), (x(6, 6), 2)]:
        check(split, model, product, value, waiting)


def test_an_input_may_be_no_leaf() -> None:
    model, split = Lambda(product, w=weight(), u=weight()), None
    split = SplitBackward(model)
    for _ in range(3):
        source = x(6, 6)
        value = source * 2
        output = product(model, value)
        (expected,) = torch.autograd.grad(output.sum(), [value], retain_graph=True)
        (found,), pending = split.input_half([output.sum()], None, [value])
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        split.weight_half(pending)
        torch.testing.assert_close(source.grad, 2 * expected, rtol=0, atol=0)


def test_gradients_of_outputs_may_be_missing() -> None:
    model = Lambda(product, w=weight(), u=weight())
    split, value = SplitBackward(model), x(6, 6)
    for missing in [set[int](), {0}, {1}, {0, 1}, set[int]()]:
        model.zero_grad()
        outputs = [value @ model.w, value @ model.u]  # type: ignore[operator]
        seeds = [None if index in missing else torch.ones(6, 6).double() for index in range(2)]
        _, pending = split.input_half(outputs, seeds, [value])
        split.weight_half(pending)
        assert {i for i, one in enumerate(model.parameters()) if one.grad is None} == missing


def test_weights_may_be_replaced_or_frozen_between_microbatches() -> None:
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    split = SplitBackward(model)
    for change in (
        lambda: None,
        lambda: setattr(model[0], "weight", nn.Parameter(weight())),
        lambda: setattr(model[2].weight, "data", weight().t()),
        lambda: model[0].requires_grad_(False),
        lambda: model[0].requires_grad_(True),
        lambda: model.insert(1, linear()),
    ):
        change()
        value = x()
        trained = sum(layer.weight.requires_grad for layer in model if isinstance(layer, nn.Linear))
        if trained == len([layer for layer in model if isinstance(layer, nn.Linear)]):
            check(split, model, lambda m, v: m(v), value, trained)
        else:
            _, pending = split.input_half([model(value)], [torch.ones(4, 6).double()], [value])
            assert len(pending) == trained
            split.weight_half(pending)


def test_the_engine_keeps_no_weights_alive() -> None:
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    split = SplitBackward(model)
    check(split, model, lambda m, v: m(v), x(), 2)
    kept = weakref.ref(model[0].weight)
    model[0] = linear()
    gc.collect()
    assert kept() is None


def test_a_failure_leaves_the_engine_usable() -> None:
    model, value = nn.Sequential(linear(), nn.Tanh(), linear()), x()
    split = SplitBackward(model)

    def fail(_: Tensor) -> Tensor:
        raise ZeroDivisionError("oops")

    output = model(value)
    hidden = model[0](value)
    hidden.register_hook(fail)
    with pytest.raises(RuntimeError, match=r"inputs' half of backward failed.*oops"):
        split.input_half([model[2](hidden.tanh())], [torch.ones(4, 6).double()], [value])
    assert value.grad is None
    model.zero_grad()
    _, pending = split.input_half([output], [torch.ones(4, 6).double()], [value])
    assert len(pending) == 2
    split.weight_half(pending)


@pytest.mark.parametrize("direct", [False, True])
def test_the_first_gradients_are_not_copied(direct: bool) -> None:
    run: Run = (lambda m, v: v @ m.w @ m.u) if direct else (lambda m, v: v @ m.w.t() @ m.u.t())
    model = Lambda(run, w=weight(), u=weight())
    value = x()
    _, pending = SplitBackward(model).input_half(
        [model(value)], [torch.ones(4, 6).double()], [value]
    )
    with OperationCounter() as counter:
        SplitBackward(model).weight_half(pending)
    assert counter.counts["mm"] == 2
    assert not counter.counts.keys() & {"clone", "copy_", "add", "add_"}


def calls_in(run: Callable[[], object]) -> int:
    """Returns how many functions of the package a call enters."""
    entered: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and "penstock" in frame.f_globals.get("__name__", ""):
            entered.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(entered)


def run_halves(split: SplitBackward, model: nn.Module, values: Sequence[Tensor]) -> None:
    for value in values:
        output = model(value)
        _, pending = split.input_half([output], [torch.ones_like(output)], [value])
        split.weight_half(pending)


def test_a_small_stage_costs_few_calls() -> None:
    model = nn.Sequential(linear(), nn.LayerNorm(6, dtype=torch.float64), nn.ReLU(), linear())
    split, values = SplitBackward(model), [x(), x()]
    run_halves(split, model, values)
    assert calls_in(lambda: run_halves(split, model, values)) <= 2 * 25
