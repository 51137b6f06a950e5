"""What `SplitBackward` does beyond the right gradients of one graph."""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils import checkpoint

from penstock.backward import SplitBackward, search
from penstock.errors import StageError, UsageError
from tests.backward.graphs import Stage, TransformerBlock, linear, rerun, weight, x
from tests.backward.probes import Probe

Run = Callable[[Any, Tensor], Any]


def compare(split: SplitBackward, model: nn.Module, value: Tensor, run: Run | None = None) -> int:
    """Compares the halves of one microbatch with autograd, bit by bit; returns the uses that waited."""
    run = run or (lambda m, v: m(v))
    output = run(model, value)
    seed = torch.randn_like(output)
    weights = list(model.parameters())
    wanted = [one for one in (value, *weights) if one.requires_grad]
    expected = torch.autograd.grad(output, wanted, seed, allow_unused=True)
    model.zero_grad()
    (gradient,), pending = split.input_half([run(model, value)], [seed], [value])
    waiting = len(pending)
    split.weight_half(pending)
    assert len(pending) == 0
    actual = [gradient, *(one.grad for one in weights)]
    trained = [
        grad for one, grad in zip((value, *weights), actual, strict=True) if one.requires_grad
    ]
    torch.testing.assert_close(trained, list(expected), rtol=0, atol=0)
    return waiting


def mlp() -> nn.Sequential:
    return nn.Sequential(linear(), nn.Tanh(), linear())


def test_products_that_are_cheaper_than_to_keep_them_do_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "CHEAP", 2**14)
    wide = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 8))
    split = SplitBackward(wide)
    for rows, waiting in [(2, 0), (8, 1), (64, 3), (2, 0)]:
        assert compare(split, wide, torch.randn(rows, 8, requires_grad=True)) == waiting


# ---- what is remembered from one microbatch to the next


def product(m: Any, v: Tensor) -> Any:
    return (v @ m.w).tanh() @ m.u


def hooked(m: Any, v: Tensor) -> Any:
    with saved_tensors_hooks(lambda saved: [saved], list.pop):
        return product(m, v)


RUNS: dict[str, tuple[Run, int]] = {
    "once": (product, 2),
    "the other way round": (lambda m, v: (m.w @ v).tanh() @ m.u, 2),
    "one weight twice": (lambda m, v: (v @ m.w).tanh() @ m.w, 2),
    "one weight in two ways": (lambda m, v: (v @ m.w).tanh() @ m.u * m.w.sum(), 1),
    "one alone": (lambda m, v: (v @ m.w).tanh(), 1),
    "transposed": (lambda m, v: functional.linear(v, m.w).tanh() @ m.u, 2),
    "a computed weight": (lambda m, v: (v @ (m.w * m.u)).tanh() @ m.u, 2),
    "with hooks on what is saved": (hooked, 0),
    "checkpointed": (lambda m, v: rerun(lambda u: product(m, u), v), 2),
    "checkpointed in part": (lambda m, v: rerun(lambda u: (u @ m.w).tanh(), v) @ m.u, 2),
    "frozen": (lambda m, v: (v @ m.w.detach()).tanh() @ m.u, 1),
}


@pytest.mark.parametrize("first", RUNS)
def test_microbatches_may_have_different_graphs(first: str) -> None:
    model = Stage(product, w=weight(), u=weight())
    split = SplitBackward(model)
    for second in RUNS:
        for name in first, second, first:
            run, waiting = RUNS[name]
            for _ in range(2):
                assert compare(split, model, x(6, 6), run) == waiting
    assert compare(split, model, nn.Parameter(weight())) == 2, "an input may be a parameter"


def test_what_an_input_had_for_a_gradient_is_not_in_its_gradient() -> None:
    model, value = mlp(), x()
    (expected,) = torch.autograd.grad(model(value).sum(), [value])
    for split in SplitBackward(model).full, SplitBackward(model).input_half:
        value.grad = torch.ones_like(value)
        gradients: Any = split(model(value).sum(), None, [value])
        actual = gradients[0] if split.__name__ == "full" else gradients[0][0]
        assert torch.equal(actual, expected)
        assert value.grad is None


def test_an_input_may_be_no_leaf() -> None:
    model, source = mlp(), x()
    value = source * 2
    (expected,) = torch.autograd.grad(model(value).sum(), [value])
    split = SplitBackward(model)
    (gradient,), pending = split.input_half(model(value).sum(), None, [value])
    split.weight_half(pending)
    assert torch.equal(gradient, expected)  # type: ignore[arg-type]
    assert torch.equal(source.grad, 2 * expected)  # type: ignore[arg-type]


def test_weights_may_be_replaced_or_frozen_between_microbatches() -> None:
    model = mlp()
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
        layers = [layer for layer in model if isinstance(layer, nn.Linear)]
        assert compare(split, model, x()) == sum(one.weight.requires_grad for one in layers)


def test_the_engine_keeps_no_weights_alive() -> None:
    model = mlp()
    split = SplitBackward(model)
    compare(split, model, x())
    kept = weakref.ref(model[0].weight)
    model[0] = linear()
    gc.collect()
    assert kept() is None


def test_a_small_stage_costs_few_calls() -> None:
    model = nn.Sequential(linear(), nn.LayerNorm(6, dtype=torch.float64), nn.ReLU(), linear())
    split, entered = SplitBackward(model), list[str]()

    def run_halves() -> None:
        value = x()
        output = model(value)
        _, pending = split.input_half([output], [torch.ones_like(output)], [value])
        split.weight_half(pending)

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and "penstock" in frame.f_globals.get("__name__", ""):
            entered.append(frame.f_code.co_name)

    run_halves()
    sys.setprofile(note)
    try:
        run_halves()
    finally:
        sys.setprofile(None)
    assert len(entered) <= 25


@pytest.mark.parametrize("run", [RUNS["once"][0], RUNS["transposed"][0]])
def test_the_first_gradients_are_not_copied(run: Run) -> None:
    model = Stage(run, w=weight(), u=weight())
    split, value = SplitBackward(model), x()
    _, pending = split.input_half([model(value)], [torch.ones(4, 6).double()], [value])
    with Probe() as probe:
        split.weight_half(pending)
    assert probe.counts["mm"] == 2
    assert not probe.counts.keys() & {"clone", "copy_", "add", "add_"}


def test_large_gradients_do_not_wait_for_each_other() -> None:
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    split, value = SplitBackward(model), torch.randn(8, 512, requires_grad=True)
    most = 0
    for _ in range(2):
        with Probe() as probe:
            _, pending = split.input_half(model(value).sum(), None, [value])

            def note(_: Tensor, probe: Probe = probe) -> None:
                nonlocal most
                weights = list(model.parameters())
                most = max(most, probe.alive([*weights, *(weight.grad for weight in weights)]))

            hooks = [one.register_post_accumulate_grad_hook(note) for one in model.parameters()]
            split.weight_half(pending)
            for hook in hooks:
                hook.remove()
    # Of the second microbatch, whose gradients are added to those of the first.
    assert 2**20 <= most < 2 * 2**20


# ---- hooks


def observe(model: nn.Module, calls: dict[str, list[Tensor]]) -> None:
    """Registers hooks on the modules and on what they return, which halve the gradients."""

    def halve(name: str, grad: Tensor) -> Tensor:
        calls[name].append(grad.clone())
        return grad / 2

    def passed(name: str, _: Any, grads: Any, __: Any) -> None:
        calls[name].append(grads[0].clone())

    def tapped(name: str, _: Any, __: Any, output: Tensor) -> None:
        output.register_hook(partial(halve, f"{name} output"))

    for name, module in model.named_children():
        module.register_full_backward_hook(partial(passed, name))
        module.register_forward_hook(partial(tapped, name))


@pytest.mark.parametrize("rerun_model", [False, True])
def test_hooks_of_modules_and_activations_run_once(rerun_model: bool) -> None:
    model: nn.Module = nn.Sequential(
        TransformerBlock(6), nn.Linear(6, 6), TransformerBlock(6)
    ).double()
    calls: dict[str, list[Tensor]] = defaultdict(list)
    observe(model, calls)
    run: Run = (lambda m, v: rerun(m, v)) if rerun_model else (lambda m, v: m(v))
    value, of_input = x(2, 4, 6), list[Tensor]()
    value.register_hook(of_input.append)
    run(model, value).sum().backward()
    expected, before = {name: list(grads) for name, grads in calls.items()}, len(of_input)
    calls.clear()
    split = SplitBackward(model)
    _, pending = split.input_half([run(model, value).sum()], None, [value])
    split.weight_half(pending)
    torch.testing.assert_close(dict(calls), expected, rtol=0, atol=0)
    assert len(of_input) == 2 * before == 2


def test_an_optimizer_may_step_in_backward() -> None:
    value, model = x(), mlp()

    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad)  # type: ignore[arg-type]
        parameter.grad = None

    before = [parameter.detach().clone() for parameter in model.parameters()]
    grads = torch.autograd.grad(model(value).sum(), list(model.parameters()))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    split = SplitBackward(model)
    split.weight_half(split.input_half(model(value).sum(), None, [value])[1])
    for parameter, old, grad in zip(model.parameters(), before, grads, strict=True):
        assert torch.equal(parameter, old - grad)


# ---- types


@pytest.mark.parametrize("rerun_block", [False, True])
def test_autocast_gives_the_bits_of_autograd(rerun_block: bool) -> None:
    def run(m: Any, value: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return (rerun(m, value) if rerun_block else m(value)).float().sum()

    block, value = TransformerBlock(8), x(2, 5, 8, dtype=torch.float32)
    assert compare(SplitBackward(block), block, value, run) == 4


def test_autocast_knows_what_a_frozen_convolution_runs() -> None:
    layers = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 3).requires_grad_(False), nn.Flatten()
    model, types = nn.Sequential(*layers), list[torch.dtype]()
    model[1].register_forward_hook(lambda *args: types.append(args[2].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert compare(SplitBackward(model), model, x(2, 2, 6, 6, dtype=torch.float32)) == 1
    assert set(types) == {torch.bfloat16}


CONVOLUTIONS: list[Callable[[], nn.Module]] = [
    lambda: nn.Conv2d(2, 3, 3, padding=1),
    lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False),
    lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
    lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, output_padding=1),
    lambda: nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
]


@pytest.mark.parametrize("make", CONVOLUTIONS)
def test_weight_and_bias_of_a_convolution_in_float32(make: Callable[[], Any]) -> None:
    layer = make()
    value = x(2, layer.in_channels, 7, 7, dtype=torch.float32)
    assert compare(SplitBackward(layer), layer, value, lambda m, v: m(v).tanh()) == 1


def test_bfloat16() -> None:
    block = TransformerBlock(8).bfloat16()
    assert compare(SplitBackward(block), block, x(2, 5, 8, dtype=torch.bfloat16)) == 4


@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_products_wait(transposed: bool) -> None:
    experts = torch.randn(2, 16, 16, dtype=torch.bfloat16)
    model = nn.ParameterList([nn.Parameter(experts)])
    ends = torch.tensor([3, 8], dtype=torch.int32)

    def run(m: Any, v: Tensor) -> Any:
        return functional.grouped_mm(v, m[0].mT if transposed else m[0], offs=ends)

    value = x(8, 16, dtype=torch.bfloat16)
    assert compare(SplitBackward(model), model, value, run) == 1


# ---- outputs and their gradients

ONE, GRAD = torch.ones(2, requires_grad=True), torch.zeros(2)


@pytest.mark.parametrize(
    ("output", "gradient", "message"),
    [
        ({"a": ONE}, {"a": GRAD}, "outputs: a dict; give a tensor, or a flat list"),
        ([{"a": ONE}], None, r"outputs\[0\] is a dict; .* list the tensors in it"),
        ([[ONE]], [[GRAD]], r"outputs\[0\] is a list"),
        ([ONE, ONE], [GRAD], "2 outputs, but 1 gradients"),
        ((ONE,), GRAD, "gradients: a Tensor; give"),
        ([ONE, ONE], [GRAD, 0.5], r"gradients\[1\] is a float"),
        ([ONE], None, "grad can be implicitly created only for scalar outputs"),
    ],
)
def test_nested_values_and_gradients_that_do_not_fit_are_refused(
    output: Any, gradient: Any, message: str
) -> None:
    with pytest.raises((UsageError, StageError), match=message):
        SplitBackward(nn.Identity()).full(output, gradient, ())


# ---- faults


def test_an_input_that_changes_between_the_halves_is_an_error() -> None:
    model, value = linear(), x(grad=False)
    split = SplitBackward(model)
    _, pending = split.input_half([model(value)], [torch.ones(4, 6).double()], [])
    value.add_(1)
    with pytest.raises(StageError, match="changed in place between the inputs' half"):
        split.weight_half(pending)


class Scaled(nn.Module):
    """Multiplies by a buffer, which it then changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(6).double())

    def forward(self, value: Tensor) -> Any:
        scale: Any = self.scale
        result = value * scale
        scale.mul_(2)
        return result


def test_a_tensor_that_changes_before_backward_is_named() -> None:
    model, value = nn.Sequential(linear(), Scaled()), x()
    # A buffer of the same type and shape, but as forward left it, is not blamed.
    model[0].register_buffer("other", torch.ones(6).double())
    says = r"needs 1\.scale \(Scaled\) as forward left it, but it was changed in place since"
    with pytest.raises(UsageError, match=says):
        SplitBackward(model).full(model(value).sum(), None, [value])
    hidden = model[0](value)
    output = hidden.exp()
    output.mul_(2)
    with pytest.raises(StageError, match="forward of a later microbatch may run before"):
        SplitBackward(model).full(output.sum(), None, [value])


def fail(_: Tensor) -> Tensor:
    raise ZeroDivisionError("oops")


def test_a_failure_shows_the_values_and_leaves_the_engine_usable() -> None:
    model, value = mlp(), x()
    split = SplitBackward(model)
    hidden = model[0](value)
    hidden.register_hook(fail)
    says = r"inputs' half of backward failed for output=\(float64\[4, 6\], .*oops"
    with pytest.raises(StageError, match=says):
        split.input_half([model[2](hidden.tanh())], [torch.ones(4, 6).double()], [value])
    assert value.grad is None
    assert compare(split, model, value) == 2
    _, pending = split.input_half(model(value).sum(), None, [value])
    next(model.parameters()).register_hook(fail)
    with pytest.raises(StageError, match=r"weights' half of backward failed: .*oops"):
        split.weight_half(pending)


def test_with_a_reentrant_checkpoint_nothing_waits(caplog: pytest.LogCaptureFixture) -> None:
    def run(m: Any, v: Tensor) -> Any:
        return checkpoint.checkpoint(m.block, m.layer(v), use_reentrant=True)

    model = Stage(run, layer=linear(), block=TransformerBlock(6))
    split, value, seed = SplitBackward(model), x(2, 3, 6), torch.randn(2, 3, 6).double()
    with caplog.at_level(logging.INFO, "penstock"):
        for _ in range(2):
            model.zero_grad()
            gradients, pending = split.input_half([model(value)], [seed], [value])
            assert len(pending) == 0
    actual = [*gradients, *(one.grad for one in model.parameters())]
    model.zero_grad()
    model(value).backward(seed)
    expected = [value.grad, *(one.grad for one in model.parameters())]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert caplog.text.count("CheckpointFunction runs in whole backward passes only") == 1
