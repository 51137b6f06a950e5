"""What `SplitBackward` does beyond giving the right gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import checkpoint

from penstock.backward import (
    PendingGradients,
    SplitBackward,
)
from penstock.errors import StageError
from tests.backward.blocks import Lambda, TransformerBlock
from tests.backward.making import linear, rerun, weight, x


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


def members() -> dict[str, Any]:
    return {
        "w": weight(), "b": weight(6), "experts": weight(2, 6, 6), "kernel": weight(2, 4, 3),
        "layer": linear(),
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
@pytest.mark.parametrize("name", [*OPERATIONS, *FORMS, *TRANSFORMS, *OTHERS])
def test_an_operation_waits_where_it_can_and_gives_the_bits_of_autograd(name: str) -> None:
    """However it is called; operations of other kinds get their gradients at once."""
    model = Lambda((OPERATIONS | FORMS | TRANSFORMS | OTHERS)[name], **members())
    waited = check_model(model, x(), tolerance=0)
    if name not in TRANSFORMS:
        assert waited == (0 if name in OTHERS else 1)


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


def test_a_loss_with_weights_waits() -> None:
    model, head = linear(), nn.Parameter(weight())
    value = x()
    split = SplitBackward(model)
    for _ in range(2):
        _, pending = halves(split, lambda: (model(value) @ head).sum(), [value])
        assert len(pending) == 2
        split.weight_half(pending)
    assert head.grad is not None


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


# ---- what stays as it was


# ---- hooks


# ---- what differs from one microbatch to the next


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
