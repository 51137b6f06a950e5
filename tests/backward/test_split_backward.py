"""What `SplitBackward` does beyond giving the right gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils import checkpoint

from penstock.backward import (
    PendingGradients,
    SplitBackward,
    stage_backward,
)
from penstock.errors import StageError
from tests.backward.blocks import Lambda, TransformerBlock
from tests.backward.making import linear, looped, rerun, weight, x
from tests.backward.oracle import Stage
from tests.backward.probes import OperationCounter, no_garbage_collection


def halves(
    split: SplitBackward, run: Callable[[], Any], inputs: list[Tensor]
) -> tuple[Any, PendingGradients]:
    """Runs forward and the inputs' half."""
    output = run()
    return split.input_half(output, torch.ones_like(output), inputs)


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def plain(model: nn.Module, run: Callable[[], Tensor]) -> dict[str, Tensor | None]:
    model.zero_grad()
    output = run()
    output.backward(torch.ones_like(output))
    found = {name: None if g is None else g.clone() for name, g in grads_of(model).items()}
    model.zero_grad()
    return found


def check_model(model: nn.Module, *inputs: Any, tolerance: float = 1e-12) -> int:
    """Compares two microbatches with plain backward; returns the uses that waited."""
    expected = plain(model, lambda: model(*inputs))
    split = SplitBackward(model)
    for _ in range(2):
        model.zero_grad()
        _, pending = halves(split, lambda: model(*inputs), [])
        waited = len(pending)
        split.weight_half(pending)
        assert grads_of(model).keys() == expected.keys()
        for name, grad in grads_of(model).items():
            torch.testing.assert_close(
                grad, expected[name], rtol=tolerance, atol=tolerance, msg=f"{name} differs"
            )
    return waited


# ---- which uses wait


class Conv1D(nn.Module):
    """A linear layer with a transposed weight, as transformers has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight()), nn.Parameter(weight(6))

    def forward(self, value: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, value.view(-1, value.size(-1)), self.weight)
        return flat.view(value.shape)


OPERATIONS: dict[str, Callable[[Any, Tensor], Any]] = {
    "linear": lambda m, v: functional.linear(v, m.w, m.b),
    "linear of three dimensions": lambda m, v: functional.linear(v.view(2, 2, 6), m.w, m.b),
    "linear of a transposed input": lambda m, v: functional.linear(v[:, :4].t() @ v, m.w),
    "linear of a permuted input": lambda m, v: functional.linear(
        v.view(2, 2, 6).transpose(0, 1), m.w, m.b
    ),
    "matmul": lambda m, v: v @ m.w,
    "folded matmul": lambda m, v: torch.matmul(v.view(2, 2, 6), m.w),
    "weight first": lambda m, v: m.w @ v.t(),
    "mm": lambda m, v: v.mm(m.w),
    "mm by name": lambda m, v: torch.mm(v, mat2=m.w),
    "transposed weight": lambda m, v: v @ m.w.t(),
    "addmm": lambda m, v: torch.addmm(m.b, v, m.w),
    "bmm": lambda m, v: torch.bmm(v.view(1, 4, 6), m.w[None]),
    "batched experts": lambda m, v: v.view(2, 2, 6) @ m.experts,
    "batched experts with bias": lambda m, v: torch.baddbmm(m.b, v.view(2, 2, 6), m.experts),
    "conv1d": lambda m, v: functional.conv1d(v.view(1, 4, 6), m.kernel, padding=1),
    "conv1d, strided": lambda m, v: functional.conv1d(v.view(1, 4, 6), m.kernel, None, 2, 1, 2),
    "conv transpose": lambda m, v: functional.conv_transpose1d(v.view(1, 2, 12), m.kernel),
    "conv2d": lambda m, v: functional.conv2d(v.view(1, 4, 3, 2), m.kernel[..., None], m.b[:2]),
    "conv3d": lambda m, v: functional.conv3d(v.view(1, 4, 3, 2, 1), m.kernel[..., None, None]),
    "conv transpose 2d": lambda m, v: functional.conv_transpose2d(
        v.view(1, 2, 3, 4), m.kernel[..., None]
    ),
    "conv transpose 3d": lambda m, v: functional.conv_transpose3d(
        v.view(1, 2, 3, 2, 2), m.kernel[..., None, None]
    ),
    "embedding": lambda m, v: functional.embedding(torch.tensor([[1, 3], [3, 5]]), m.w, 5),
    "scaled embedding": lambda m, v: functional.embedding(
        torch.tensor([1, 1, 3]), m.w, scale_grad_by_freq=True
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_waits_and_gives_the_bits_of_autograd(name: str) -> None:
    members = {"w": weight(), "b": weight(6), "experts": weight(2, 6, 6), "kernel": weight(2, 4, 3)}
    model = Lambda(OPERATIONS[name], **members)
    assert check_model(model, x(), tolerance=0) == 1


FORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "product with a vector": lambda m, v: functional.linear(v[0], m.w),
    "broadcast product": lambda m, v: m.w @ v.view(2, 6, 2),
    "scaled addmm": lambda m, v: torch.addmm(m.b, v, m.w, beta=2, alpha=3),
    "addmm in place": lambda m, v: v.sin().addmm_(v, m.w, alpha=2),
    "addmm by names": lambda m, v: m.b.addmm(mat2=m.w, mat1=v, beta=0.5),
    "addmm, weight first": lambda m, v: torch.addmm(m.b[:4], m.w, v.t(), alpha=2),
    "baddbmm by names": lambda m, v: m.b.baddbmm(
        batch1=v.view(2, 2, 6), batch2=m.experts, beta=0.5, alpha=2
    ),
    "baddbmm, weight first": lambda m, v: torch.baddbmm(
        m.b[:2], m.experts, v.view(2, 6, 2), alpha=2
    ),
    "the operator": lambda m, v: v.__matmul__(m.w),
    "the operator, reversed": lambda m, v: m.w.__rmatmul__(v),
    "linear by names": lambda m, v: functional.linear(weight=m.w, bias=m.b, input=v),
    "an operator of aten": lambda m, v: torch.ops.aten.mm(v, m.w),
    "changed in place": lambda m, v: functional.linear(v.view(2, 2, 6), m.w, m.b).relu_(),
    "added to in place": lambda m, v: functional.linear(v.view(2, 2, 6), m.w).add_(v.view(2, 2, 6)),
    "einsum": lambda m, v: torch.einsum("ij,jk->ik", v, m.w),
    "chained product": lambda m, v: torch.linalg.multi_dot([v, m.w]),
    "embedding by names": lambda m, v: functional.embedding(
        weight=m.w, input=torch.tensor([1, 3]), scale_grad_by_freq=True
    ),
    "embedding that is renormed": lambda m, v: functional.embedding(
        torch.tensor([1, 3]), m.w * 1, max_norm=100.0
    ),
    "same padding": lambda m, v: functional.conv1d(v.view(1, 4, 6), m.kernel, padding="same"),
    "conv by names": lambda m, v: functional.conv1d(
        weight=m.kernel, input=v.view(1, 4, 6), groups=1, dilation=(2,), bias=m.b[:2]
    ),
    "the operator of convolution": lambda m, v: torch.convolution(
        v.view(1, 4, 6), m.kernel, None, [1], [0], [1], False, [0], 1
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_it_makes_no_difference_how_an_operation_is_called(name: str) -> None:
    members = {"w": weight(), "b": weight(6), "experts": weight(2, 6, 6), "kernel": weight(2, 4, 3)}
    model = Lambda(FORMS[name], **members)
    assert check_model(model, x(), tolerance=0) == 1


TRANSFORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "vmap": lambda m, v: torch.vmap(m.layer)(v),
    "vmap over weights": lambda m, v: torch.vmap(lambda w: v @ w)(m.experts),
    "grad": lambda m, v: v + torch.func.grad(lambda value: m.layer(value).sin().sum())(v),
    "grad for a weight": lambda m, v: (
        v @ torch.func.grad(lambda w: functional.linear(v, w).sin().sum())(m.w)
    ),
    "jvp": lambda m, v: torch.func.jvp(m.layer, (v,), (v.sin(),))[1].sin() + m.layer(v),
    "vjp": lambda m, v: torch.func.vjp(m.layer, v)[1](v.sin())[0],
    "jacrev": lambda m, v: torch.vmap(torch.func.jacrev(lambda row: m.layer(row).tanh()))(v),
    "functional call": lambda m, v: torch.func.functional_call(
        m.layer, {"weight": m.layer.weight * 2, "bias": m.layer.bias}, (v,)
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_inside_a_stage(name: str) -> None:
    model = Lambda(TRANSFORMS[name], w=weight(), experts=weight(2, 6, 6), layer=linear())
    check_model(model, x(), tolerance=0)


OTHERS: dict[str, Callable[[Any, Tensor], Any]] = {
    "elementwise": lambda m, v: v * m.b,
    "matrix and vector": lambda m, v: torch.mv(m.w, v[0]),
    "bilinear": lambda m, v: functional.bilinear(v, v, m.experts),
    "sums of products": lambda m, v: torch.addbmm(m.b, v.view(2, 2, 6), m.experts),
    "bag of embeddings": lambda m, v: functional.embedding_bag(torch.tensor([[1, 3]]), m.w),
    "product of a weight with itself": lambda m, v: m.w @ m.w,
    "used in another way too": lambda m, v: v @ m.w + m.w.norm(),
    "product in place on a view": lambda m, v: v.sin().view(4, 6)[:2].addmm_(v[:2], m.w),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_operations_get_their_gradients_at_once(name: str) -> None:
    members = {"w": weight(), "b": weight(6), "experts": weight(2, 6, 6)}
    model = Lambda(OTHERS[name], **members)
    assert check_model(model, x(), tolerance=0) == 0


def test_grouped_matmul_waits() -> None:
    ends = torch.tensor([3, 8], dtype=torch.int32)

    def run(m: Any, v: Tensor) -> Tensor:
        return functional.grouped_mm(v, m.experts, offs=ends)

    model = Lambda(run, experts=torch.randn(2, 16, 16, dtype=torch.bfloat16))
    value = torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True)
    split = SplitBackward(model)
    _, pending = halves(split, lambda: model(value), [value])
    assert len(pending) == 1
    split.weight_half(pending)
    expected = [
        value[:3].float().t().sum(1, keepdim=True),
        value[3:].float().t().sum(1, keepdim=True),
    ]
    grad = model.get_parameter("experts").grad
    assert grad is not None
    torch.testing.assert_close(
        grad.float(), torch.stack(expected).expand(2, 16, 16), rtol=0.02, atol=0.05
    )


def test_transformers_conv1d_waits() -> None:
    assert check_model(nn.Sequential(Conv1D(), nn.Tanh(), Conv1D()), x(2, 2, 6), tolerance=0) == 2


def test_weights_under_checkpointed_functions_wait() -> None:
    def run(m: Any, v: Tensor) -> Any:
        return rerun(lambda u: (u @ m.w).tanh() @ m.w, v)

    assert check_model(Lambda(run, w=weight()), x()) == 2


def test_a_loss_with_weights_waits() -> None:
    model, head = linear(), nn.Parameter(weight())
    value = x()
    split = SplitBackward(model)
    for _ in range(2):
        _, pending = halves(split, lambda: (model(value) @ head).sum(), [value])
        assert len(pending) == 2
        split.weight_half(pending)
    assert head.grad is not None


def test_frozen_weights_leave_nothing() -> None:
    model = nn.Sequential(linear(), linear()).requires_grad_(False)
    value = x()
    _, pending = halves(SplitBackward(model), lambda: model(value), [value])
    assert len(pending) == 0


def test_low_rank_updates_wait_and_their_base_does_not() -> None:
    model = Lambda(lambda m, v: m.base(v) + m.b(m.a(v)), base=linear(), a=linear(2), b=linear2())
    model.get_submodule("base").requires_grad_(False)
    assert check_model(model, x()) == 2


def linear2() -> nn.Linear:
    return nn.Linear(2, 6, dtype=torch.float64)


# ---- types


@pytest.mark.parametrize("rerun_block", [False, True])
def test_autocast_gives_the_bits_of_autograd(rerun_block: bool) -> None:
    block = TransformerBlock(8)

    def run(value: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            result: Tensor = rerun(block, value) if rerun_block else block(value)
            return result.float().sum()

    value = torch.randn(2, 5, 8)
    expected = plain(block, lambda: run(value))
    split = SplitBackward(block)
    for _ in range(2):
        block.zero_grad()
        _, pending = halves(split, lambda: run(value), [])
        assert len(pending) == 4
        split.weight_half(pending)
        torch.testing.assert_close(grads_of(block), expected, rtol=0, atol=0)


def test_autocast_knows_what_a_frozen_convolution_runs() -> None:
    layers = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 3).requires_grad_(False), nn.Flatten()
    model = nn.Sequential(*layers)
    types: list[torch.dtype] = []
    model[1].register_forward_hook(lambda *args: types.append(args[2].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert check_model(model, torch.randn(2, 2, 6, 6), tolerance=0) == 1
    assert set(types) == {torch.bfloat16}


CONVOLUTIONS: list[Callable[[], nn.Module]] = [
    lambda: nn.Conv2d(2, 3, 3, padding=1),
    lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False),
    lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
    lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, output_padding=1),
    lambda: nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
]


@pytest.mark.parametrize("make", CONVOLUTIONS)
def test_weight_and_bias_of_a_convolution_have_the_bits_of_autograd(
    make: Callable[[], Any],
) -> None:
    layer = make()
    model = nn.Sequential(layer, nn.Tanh())
    assert check_model(model, torch.randn(2, layer.in_channels, 7, 7), tolerance=0) == 1


def test_bfloat16_gives_the_bits_of_autograd() -> None:
    model = TransformerBlock(8).bfloat16()
    assert check_model(model, x(2, 5, 8, dtype=torch.bfloat16), tolerance=0) == 4


def test_moving_the_model_between_steps_is_noticed() -> None:
    model = linear()
    split = SplitBackward(model)
    for dtype in torch.float64, torch.float32:
        model.to(dtype).zero_grad()
        value = x(dtype=dtype)
        _, pending = halves(split, lambda value=value: model(value), [value])  # type: ignore[misc]
        split.weight_half(pending)
        assert model.weight.grad is not None
        assert model.weight.grad.dtype == dtype


# ---- what stays as it was


def test_module_hooks_run() -> None:
    model, calls = linear(), list[str]()
    model.register_forward_hook(lambda *_: calls.append("forward"))
    model.register_full_backward_hook(lambda *_: calls.append("backward"))
    value = x()
    _, pending = halves(SplitBackward(model), lambda: model(value), [value])
    assert calls == ["forward", "backward"]
    assert len(pending) > 0


# ---- hooks


HOOKED: dict[str, Callable[[], Stage]] = {
    "once": lambda: Stage(linear(), lambda: [x()]),
    "looped": lambda: Stage(Lambda(lambda m, v: looped(m.layer, v), layer=linear()), lambda: [x()]),
    "both ways": lambda: Stage(
        Lambda(lambda m, v: m.layer(v) @ m.layer.weight.exp(), layer=linear()), lambda: [x()]
    ),
    "checkpointed": lambda: Stage(
        Lambda(lambda m, v: rerun(m.layer, v), layer=linear()), lambda: [x()]
    ),
    "computed": lambda: Stage(
        Lambda(lambda m, v: v @ (m.w * 2) @ (m.w * 3), w=weight()), lambda: [x()]
    ),
    "also at once": lambda: Stage(
        Lambda(lambda m, v: m.layer(v) * m.layer.weight.sum(), layer=linear()), lambda: [x()]
    ),
}


@pytest.mark.parametrize("name", HOOKED)
def test_hooks_run_once_and_see_the_whole_gradient(name: str) -> None:
    stage = HOOKED[name]()
    split, value = SplitBackward(stage.model), x()
    calls: list[str] = []
    before: dict[str, Tensor] = {}

    def look(kind: str, tensor: Tensor) -> None:
        calls.append(kind)
        before[kind] = (tensor if kind == "tensor" else tensor.grad).detach().clone()  # type: ignore[union-attr]

    matrix = next(p for p in stage.model.parameters() if p.dim() == 2)
    expected = plain(stage.model, lambda: stage.model(value))
    matrix.register_hook(partial(look, "tensor"))
    matrix.register_post_accumulate_grad_hook(partial(look, "post"))
    for _ in range(2):
        stage.model.zero_grad()
        calls.clear()
        _, pending = halves(split, lambda: stage.model(value), [value])
        assert calls == (["tensor", "post"] if name == "also at once" else [])
        split.weight_half(pending)
        assert calls == ["tensor", "post"]
        (wanted,) = (expected[n] for n, p in stage.model.named_parameters() if p is matrix)
        torch.testing.assert_close(
            before, {"tensor": wanted, "post": wanted}, rtol=1e-12, atol=1e-12
        )


# ---- what differs from one microbatch to the next


def test_a_gradient_inside_some_of_the_forwards() -> None:
    def run(m: Any, v: Tensor, penalised: bool) -> Tensor:
        hidden = m.layer(v).sin()
        if not penalised:
            return m.layer(hidden)  # type: ignore[no-any-return]
        slope = torch.autograd.grad(hidden.square().sum(), m.layer.weight, create_graph=True)[0]
        return m.layer(hidden) * slope.square().sum()  # type: ignore[no-any-return]

    model = Lambda(run, layer=linear())
    for penalised in False, True, False:
        check_model(model, x(), penalised, tolerance=0)


# ---- faults


def test_an_input_that_changes_between_the_halves_is_an_error() -> None:
    model, value = linear(), x(grad=False)
    split = SplitBackward(model)
    _, pending = halves(split, lambda: model(value), [])
    value.add_(1)
    with pytest.raises(StageError, match="changed in place"):
        split.weight_half(pending)


def test_with_a_reentrant_checkpoint_nothing_waits(caplog: pytest.LogCaptureFixture) -> None:
    def run(m: Any, v: Tensor) -> Any:
        return checkpoint.checkpoint(m.block, m.layer(v), use_reentrant=True)

    model = Lambda(run, layer=linear(), block=TransformerBlock(6).double())
    with caplog.at_level(logging.INFO, "penstock"):
        assert check_model(model, x(2, 3, 6)) == 0
    assert caplog.text.count("CheckpointFunction runs in whole backward passes only") == 1


def test_saved_tensors_with_hooks_are_read_by_their_node_alone() -> None:
    def run(m: Any, v: Tensor) -> Any:
        with saved_tensors_hooks(lambda saved: [saved], list.pop):
            hidden = m.first(v)
        return m.second(hidden)

    assert check_model(Lambda(run, first=linear(), second=linear()), x()) == 1


def test_the_peak_does_not_grow_from_step_to_step() -> None:
    model, value = nn.Sequential(linear(), nn.Tanh(), linear()), x()
    split = SplitBackward(model)
    with no_garbage_collection(), OperationCounter():
        for _ in range(3):
            _, pending = halves(split, lambda: model(value), [value])
            split.weight_half(pending)
            assert len(pending) == 0


def test_the_halves_equal_the_full_pass_bit_by_bit() -> None:
    model = TransformerBlock(8)
    value = torch.randn(2, 5, 8, requires_grad=True)
    expected_output = model(value)
    seed = torch.ones_like(expected_output)
    (expected,) = stage_backward(expected_output, seed, [value])
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    split = SplitBackward(model)
    (found,), pending = halves(split, lambda: model(value), [value])
    split.weight_half(pending)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(grads_of(model), grads, rtol=0, atol=0)
