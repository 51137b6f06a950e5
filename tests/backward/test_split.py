"""What `SplitBackward` does beyond the right gradients of one graph."""

from __future__ import annotations

import gc
import logging
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

from penstock.backward import SplitBackward, search
from penstock.errors import StageError, UsageError
from tests.backward.graphs import Stage, linear, rerun, weight, x
from tests.backward.probes import Probe
from tests.catalogue.making import Does
from tests.catalogue.models import Attention

Run = Callable[[Any, Tensor], Any]


def waiting(split: SplitBackward, model: nn.Module, value: Tensor, run: Run | None = None) -> int:
    """How many uses of weights wait in one microbatch, whose gradients have all bits of autograd's."""
    run = run or (lambda m, v: m(v))
    output = run(model, value)
    seed, weights = torch.randn_like(output), list(model.parameters())
    wanted = [one for one in (value, *weights) if one.requires_grad]
    expected = torch.autograd.grad(output, wanted, seed, allow_unused=True)
    model.zero_grad()
    (gradient,), pending = split.input_half([run(model, value)], [seed], [value])
    uses = len(pending)
    split.weight_half(pending)
    pairs = zip((value, *weights), [gradient, *(one.grad for one in weights)], strict=True)
    actual = [grad for one, grad in pairs if one.requires_grad]
    torch.testing.assert_close(actual, list(expected), rtol=0, atol=0)
    return uses


def mlp() -> nn.Sequential:
    return nn.Sequential(linear(), nn.Tanh(), linear())


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


def test_microbatches_may_have_different_graphs() -> None:
    for first in RUNS:
        model = Stage(product)
        split = SplitBackward(model)
        for second in RUNS:
            for name in first, first, second, second, first:
                run, uses = RUNS[name]
                assert waiting(split, model, x(6, 6), run) == uses
        assert waiting(split, model, nn.Parameter(weight())) == 2, "an input may be a parameter"


def test_weights_may_be_replaced_or_frozen_and_are_not_kept_alive() -> None:
    model = mlp()
    split, first = SplitBackward(model), weakref.ref(model[0].weight)
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
        assert waiting(split, model, x()) == sum(one.weight.requires_grad for one in layers)
    gc.collect()
    assert first() is None


def test_products_that_are_cheaper_than_to_keep_them_do_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "CHEAP", 2**14)
    wide = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 8))
    split = SplitBackward(wide)
    for rows, uses in [(2, 0), (8, 1), (64, 3), (2, 0)]:
        assert waiting(split, wide, torch.randn(rows, 8, requires_grad=True)) == uses


# ---- inputs


def test_an_inputs_gradient_is_of_this_microbatch_alone() -> None:
    model, value = mlp(), x()
    (expected,) = torch.autograd.grad(model(value).sum(), [value])
    split = SplitBackward(model)
    value.grad = torch.ones_like(value)
    (whole,) = split.full(model(value).sum(), None, [value])
    value.grad = torch.ones_like(value)
    (half,), _ = split.input_half(model(value).sum(), None, [value])
    source = x()
    no_leaf = source + (value.detach() - source.detach())
    (of_no_leaf,), _ = split.input_half(model(no_leaf).sum(), None, [no_leaf])
    assert value.grad is None
    torch.testing.assert_close([whole, half, of_no_leaf, source.grad], [expected] * 4)


# ---- memory


@pytest.mark.parametrize("name", ["once", "transposed"])
def test_the_first_gradients_are_not_copied(name: str) -> None:
    model, run = Stage(product), RUNS[name][0]
    split, value = SplitBackward(model), x()
    _, pending = split.input_half([run(model, value)], [torch.ones(4, 6).double()], [value])
    with Probe() as probe:
        split.weight_half(pending)
    assert probe.counts["mm"] == 2
    assert not probe.counts.keys() & {"clone", "copy_", "add", "add_"}


def test_large_gradients_do_not_wait_for_each_other() -> None:
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    split, value = SplitBackward(model), torch.randn(8, 512, requires_grad=True)
    weights, alive = list(model.parameters()), [0]
    for _ in range(2):
        with Probe() as probe:
            _, pending = split.input_half(model(value).sum(), None, [value])

            def note(_: Tensor, probe: Probe = probe) -> None:
                alive.append(probe.alive([*weights, *(weight.grad for weight in weights)]))

            hooks = [one.register_post_accumulate_grad_hook(note) for one in weights]
            split.weight_half(pending)
            for hook in hooks:
                hook.remove()
    # Of the second microbatch, whose gradients are added to those of the first.
    assert 2**20 <= max(alive) < 2 * 2**20


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
    blocks = Attention(6), nn.Linear(6, 6), Attention(6)
    model = nn.Sequential(*blocks).double()
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

    def step(parameter: Any) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad)
        parameter.grad = None

    before = [parameter.detach().clone() for parameter in model.parameters()]
    grads = torch.autograd.grad(model(value).sum(), list(model.parameters()))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    split = SplitBackward(model)
    split.weight_half(split.input_half(model(value).sum(), None, [value])[1])
    for parameter, old, grad in zip(model.parameters(), before, grads, strict=True):
        assert torch.equal(parameter, old - grad)


# ---- types: a model, its input, how it runs, and how many uses wait


def autocast(m: Any, value: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return m(value).float().sum()


def grouped(m: Any, v: Tensor, *, transposed: bool) -> Any:
    ends = torch.tensor([3, 8], dtype=torch.int32)
    return functional.grouped_mm(v, m[0].mT if transposed else m[0], offs=ends)


def experts() -> nn.Module:
    return nn.ParameterList([nn.Parameter(torch.randn(2, 16, 16, dtype=torch.bfloat16))])


def frozen() -> nn.Module:
    second = nn.Conv2d(3, 2, 3).requires_grad_(False)
    return nn.Sequential(nn.Conv2d(2, 3, 3), second, nn.Flatten())


BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
TYPES: dict[str, tuple[Callable[[], Any], tuple[int, ...], torch.dtype, Run, int]] = {
    "autocast": (lambda: Attention(8), (2, 5, 8), FLOAT32, autocast, 4),
    "autocast, run again": (
        lambda: Attention(8), (2, 5, 8), FLOAT32, lambda m, v: autocast(partial(rerun, m), v), 4,
    ),
    "autocast of a frozen convolution": (frozen, (2, 2, 6, 6), FLOAT32, autocast, 1),
    "bfloat16": (lambda: Attention(8).bfloat16(), (2, 5, 8), BFLOAT16, lambda m, v: m(v), 4),
    "grouped products": (experts, (8, 16), BFLOAT16, partial(grouped, transposed=False), 1),
    "transposed experts": (experts, (8, 16), BFLOAT16, partial(grouped, transposed=True), 1),
    **{
        f"a convolution {name}": (make, (2, 4, 7, 7), FLOAT32, lambda m, v: m(v).tanh(), 1)
        for name, make in {
            "with a bias": lambda: nn.Conv2d(4, 3, 3, padding=1),
            "in groups": lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False),
            "in a circle": lambda: nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular"),
            "transposed": lambda: nn.ConvTranspose2d(4, 3, 3, stride=2, output_padding=1),
            "of channels last": lambda: nn.Conv2d(4, 3, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_types_have_the_bits_of_autograd(name: str) -> None:
    make, shape, dtype, run, uses = TYPES[name]
    model = make()
    assert waiting(SplitBackward(model), model, x(*shape, dtype=dtype), run) == uses


# ---- outputs and their gradients

ONE, GRAD = torch.ones(2, requires_grad=True), torch.zeros(2)


@pytest.mark.parametrize(
    ("output", "gradient", "message"),
    [
        ({"a": ONE}, {"a": GRAD}, "outputs: a dict; give a tensor, or a flat list"),
        ([{"a": ONE}], None, r"outputs\[0\] is a dict"),
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


def scales(m: Any, value: Tensor) -> Tensor:
    """Multiplies by a buffer, which it then changes in place."""
    result: Tensor = value * m.scale
    m.scale.mul_(2)
    return result


def test_a_tensor_that_changes_before_backward_is_named() -> None:
    model, value = nn.Sequential(linear(), Does(scales, scale=torch.ones(6).double())), x()
    # A buffer of the same type and shape, but as forward left it, is not blamed.
    model[0].register_buffer("other", torch.ones(6).double())
    with pytest.raises(UsageError, match=r"needs 1\.scale \(Does\) as forward left it"):
        SplitBackward(model).full(model(value).sum(), None, [value])
    output = model[0](value).exp()
    output.mul_(2)
    with pytest.raises(StageError, match="forward of a later microbatch may run before"):
        SplitBackward(model).full(output.sum(), None, [value])


def test_a_failure_shows_the_values_and_leaves_the_engine_usable() -> None:
    def fail(_: Tensor) -> Tensor:
        raise ZeroDivisionError("oops")

    model, value = mlp(), x()
    split = SplitBackward(model)
    hidden = model[0](value)
    hidden.register_hook(fail)
    says = r"inputs' half of backward failed for output=\(float64\[4, 6\], .*oops"
    with pytest.raises(StageError, match=says):
        split.input_half([model[2](hidden.tanh())], [torch.ones(4, 6).double()], [value])
    assert value.grad is None
    assert waiting(split, model, value) == 2
    _, pending = split.input_half(model(value).sum(), None, [value])
    next(model.parameters()).register_hook(fail)
    with pytest.raises(StageError, match=r"weights' half of backward failed: .*oops"):
        split.weight_half(pending)


def test_with_a_reentrant_checkpoint_nothing_waits(caplog: pytest.LogCaptureFixture) -> None:
    def run(m: Any, v: Tensor) -> Any:
        return rerun(m.block, m.block(v), use_reentrant=True)

    model = Stage(run)
    split, value, seed = SplitBackward(model), x(2, 3, 8), torch.randn(2, 3, 8).double()
    with caplog.at_level(logging.INFO, "penstock"):
        for _ in range(2):
            model.zero_grad()
            (gradient,), pending = split.input_half([model(value)], [seed], [value])
            assert len(pending) == 0
    actual = [gradient, *(one.grad for one in model.parameters())]
    model.zero_grad()
    model(value).backward(seed)
    expected = [value.grad, *(one.grad for one in model.parameters())]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert caplog.text.count("CheckpointFunction runs in whole backward passes only") == 1
