"""Stages that a split backward pass is easily wrong about; each entry makes a fresh one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils import checkpoint

from tests.backward.blocks import (
    Experts,
    LoRA,
    TransformerBlock,
    counted_linear,
    standardise,
)
from tests.backward.making import WIDTH, fresh_inputs, ids, linear, looped, rerun, stage, weight, x
from tests.backward.oracle import Stage

# ---- plain layers


def mlp() -> Stage:
    return stage(nn.Sequential(linear(), nn.GELU(), linear(), nn.Tanh(), linear(3)))


def transformer() -> Stage:
    blocks = nn.Sequential(TransformerBlock(8), TransformerBlock(8))
    return stage(blocks, lambda: x(2, 5, 8))


def multihead_attention() -> Stage:
    return stage(
        lambda m, v: m.attention(v, v, v, need_weights=True),
        lambda: x(2, 5, WIDTH),
        attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    )


def lstm() -> Stage:
    return stage(nn.LSTM(WIDTH, 5, num_layers=2, bidirectional=True), lambda: x(4, 2, WIDTH))


def gru() -> Stage:
    return stage(nn.GRU(WIDTH, 5, num_layers=2), lambda: x(4, 2, WIDTH))


def conv_bn_relu() -> Stage:
    layers = (nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3, groups=1))
    return stage(nn.Sequential(*layers), lambda: x(2, 2, 6, 6))


def experts() -> Stage:
    return stage(Experts(WIDTH), lambda: x(3, 5, WIDTH))


def first_stage() -> Stage:
    layers = nn.Embedding(11, 8), TransformerBlock(8), nn.Linear(8, 3)
    return stage(nn.Sequential(*layers), ids)


def scalar_loss() -> Stage:
    return stage(
        lambda m, v: functional.cross_entropy(m.head(v), torch.arange(4)),
        head=linear(5),
    )


# ---- weights used more than once, or computed


def reused_linear() -> Stage:
    return stage(lambda m, v: looped(m.layer, v), layer=linear())


def looped_block() -> Stage:
    block = TransformerBlock(8)
    return stage(lambda m, v: looped(m.block, v), lambda: x(2, 5, 8), block=block)


def looped_conv() -> Stage:
    conv = nn.Conv2d(2, 2, 3, padding=1)
    return stage(lambda m, v: looped(m.conv, v).relu(), lambda: x(2, 2, 5, 5), conv=conv)


def parallel_uses() -> Stage:
    return stage(lambda m, v: m.layer(v.sin()) * m.layer(v.cos()) @ m.layer.weight, layer=linear())


def tied_embedding() -> Stage:
    def run(m: Any, v: Tensor, tokens: Tensor) -> Any:
        hidden = m.block(v + m.embedding(tokens))
        return hidden @ m.embedding.weight.t()

    return stage(
        run,
        lambda: (x(2, 5, 8), ids()),
        embedding=nn.Embedding(11, 8),
        block=TransformerBlock(8),
    )


def sparse_embedding() -> Stage:
    return stage(
        lambda m, v, tokens: v * m.embedding(tokens),
        lambda: (x(2, 5, 8), ids()),
        embedding=nn.Embedding(11, 8, sparse=True),
    )


def weight_norm() -> Stage:
    layers = parametrizations.weight_norm(linear()), nn.Tanh(), linear()
    return stage(nn.Sequential(*layers))


def cached_parametrization() -> Stage:
    def run(m: Any, v: Tensor) -> Any:
        with parametrize.cached():
            return looped(m.layer, v)

    return stage(run, layer=parametrizations.orthogonal(linear()))


def shared_expression() -> Stage:
    def run(m: Any, v: Tensor) -> Any:
        scale = m.scale.exp()
        return looped(lambda value: (value @ m.matrix * scale).tanh(), v)

    return stage(run, matrix=weight(), scale=weight(WIDTH))


def used_in_two_ways() -> Stage:
    return stage(
        lambda m, v: m.layer(v) @ m.layer.weight + m.layer.weight.sum(0) + m.layer.bias.exp(),
        layer=linear(),
    )


def weights_through_python() -> Stage:
    return stage(
        lambda m, v: counted_linear(v, standardise(m.matrix), standardise(m.bias)) @ m.matrix,
        matrix=weight(),
        bias=weight(WIDTH),
    )


def detached_use() -> Stage:
    return stage(lambda m, v: m.layer(v) @ m.layer.weight.detach(), layer=linear())


# ---- what is trained, and what needs gradients


def lora() -> Stage:
    return stage(nn.Sequential(LoRA(WIDTH), nn.Tanh(), LoRA(WIDTH)))


def frozen() -> Stage:
    return stage(nn.Sequential(linear(), nn.Tanh(), linear()).requires_grad_(False))


def no_weights() -> Stage:
    return stage(nn.Sequential(nn.Tanh(), nn.Softmax(-1)))


def unused_weight() -> Stage:
    return stage(lambda m, v: m.used(v), used=linear(), unused=linear())


def inputs_without_gradient() -> Stage:
    return stage(
        lambda m, v, mask, factor: m.b(m.a(v) * mask).tanh() * factor,
        lambda: (x(), x(grad=False), 2),
        a=linear(),
        b=linear(),
    )


def unused_input() -> Stage:
    return stage(lambda m, v, _: m.layer(v), lambda: (x(), x()), layer=linear())


def double_use_of_input() -> Stage:
    return stage(lambda m, v: m.a(v) * m.b(v) + v, a=linear(), b=linear())


# ---- outputs


def outputs_in_dict() -> Stage:
    def run(m: Any, v: Tensor) -> Any:
        hidden = m.a(v)
        nested = {"deep": [m.b(hidden), {"none": None, "length": 3}], "detached": hidden.detach()}
        return {"hidden": hidden, "count": 7, "nothing": None, "nested": nested, "text": "x"}

    return stage(run, a=linear(), b=linear())


def chunked_output() -> Stage:
    return stage(lambda m, v: m.layer(v).chunk(2, dim=-1), layer=linear())


def glu_transposed_output() -> Stage:
    return stage(lambda m, v: functional.glu(m.layer(v)).transpose(0, 1), layer=linear(8))


def one_chunk_output() -> Stage:
    return stage(lambda m, v: m.head(m.layer(v).split(3, dim=-1)[1]), layer=linear(9), head=head())


def head() -> nn.Linear:
    return nn.Linear(3, 2)


def output_of_weights_only() -> Stage:
    return stage(
        lambda m, v: (m.layer(v), m.layer.weight.square().sum(), m.other.exp()),
        layer=linear(),
        other=weight(3),
    )


def output_is_weight() -> Stage:
    return stage(
        lambda m, v: (m.layer(v), m.layer.weight, m.other), layer=linear(), other=weight(3)
    )


def nested_weight_outputs() -> Stage:
    def run(m: Any, v: Tensor) -> Any:
        first = m.matrix.exp()
        second = first.sin()
        return v @ second, second, first, standardise(second)

    return stage(run, matrix=weight())


def pass_through() -> Stage:
    return stage(lambda m, v, w: (v, m.layer(v * w), w), lambda: (x(), x()), layer=linear())


def same_output_twice() -> Stage:
    def run(m: Any, v: Tensor) -> Any:
        hidden = m.layer(v)
        return hidden, hidden, hidden.view(-1)

    return stage(run, layer=linear())


def output_not_always_used() -> Stage:
    made = stage(lambda m, v: (m.a(v), m.b(v), m.c.exp()), a=linear(), b=linear(), c=weight(2))
    return Stage(made.model, made.inputs, unused={0: frozenset({1, 2}), 1: frozenset({0})})


def outputs_never_used() -> Stage:
    made = stage(lambda m, v: (m.a(v), m.a(v)), a=linear())
    return Stage(made.model, made.inputs, unused={0: frozenset({0, 1}), 1: frozenset({0, 1})})


# ---- odd things in forward


def in_place_first() -> Stage:
    return fresh_inputs(stage(lambda m, v: m.b(m.a(v.relu_()).sigmoid_()), a=linear(), b=linear()))


def in_place_on_view() -> Stage:
    def run(m: Any, v: Tensor) -> Any:
        hidden = m.a(v)
        hidden[:, :2] *= m.scale
        hidden[:, 1:].add_(m.scale.sum())
        return m.b(hidden)

    return stage(run, a=linear(), b=linear(), scale=weight(2))


def complex_weights() -> Stage:
    def run(m: Any, v: Tensor) -> Any:
        hidden = v @ m.matrix + m.shift
        return hidden.real, (hidden * m.matrix[0]).tanh()

    matrix = torch.randn(WIDTH, WIDTH, dtype=torch.complex128)
    return stage(run, lambda: (x(dtype=torch.complex128),), matrix=matrix, shift=weight(WIDTH))


def custom_function() -> Stage:
    def run(m: Any, v: Tensor) -> Any:
        hidden = counted_linear(m.a(v), m.weight, m.bias).tanh()
        return m.b(counted_linear(hidden, m.weight, m.bias))

    return stage(run, a=linear(), b=linear(), weight=weight(), bias=weight(WIDTH))


def gradient_in_forward() -> Stage:
    def run(m: Any, v: Tensor) -> Any:
        position = v if v.requires_grad else v.requires_grad_()
        energy = m.b(m.a(position).tanh()).square().sum()
        (force,) = torch.autograd.grad(energy, position, create_graph=True)
        return energy, force

    return stage(run, a=linear(), b=linear())


def gradient_penalty_in_forward() -> Stage:
    def run(m: Any, v: Tensor) -> Any:
        hidden = m.a(v).sin()
        (slope,) = torch.autograd.grad(hidden.sum(), m.a.weight, retain_graph=True)
        return m.a(hidden) * slope.mean()

    return stage(run, a=linear())


def detached_middle() -> Stage:
    return stage(lambda m, v: m.c(m.b(m.a(v).detach())) + v, a=linear(), b=linear(), c=linear())


def detached_branch() -> Stage:
    return stage(lambda m, v: m.b(m.a(v.detach()).tanh()) * v, a=linear(), b=linear())


# ---- checkpoints


def full_checkpoint() -> Stage:
    def run(m: Any, v: Tensor) -> Any:
        return rerun(m.b, rerun(m.a, v))

    blocks = {name: TransformerBlock(8) for name in "ab"}
    return stage(run, lambda: x(2, 5, 8), **blocks)


def selective_checkpoint() -> Stage:
    saved = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    context = partial(checkpoint.create_selective_checkpoint_contexts, saved)

    def run(m: Any, v: Tensor) -> Any:
        return rerun(m.block, v, context_fn=context)

    return stage(run, lambda: x(2, 5, 8), block=TransformerBlock(8))


def nested_checkpoint() -> Stage:
    def inner(m: Any, v: Tensor) -> Any:
        return rerun(m.b, rerun(m.a, v).tanh())

    return stage(lambda m, v: rerun(inner, m, v), a=linear(), b=linear())


def checkpointed_weight() -> Stage:
    layer = parametrizations.weight_norm(linear())
    return stage(lambda m, v: m.after(rerun(m.layer, v)), layer=layer, after=linear())


CHEAP: dict[str, Callable[[], Stage]] = {
    make.__name__: make
    for make in (
        mlp, scalar_loss, reused_linear, parallel_uses, sparse_embedding, weight_norm,
        shared_expression, used_in_two_ways, weights_through_python, detached_use, lora, frozen,
        no_weights, unused_weight, inputs_without_gradient, unused_input, double_use_of_input,
        outputs_in_dict, chunked_output, glu_transposed_output, one_chunk_output,
        output_of_weights_only, output_is_weight, nested_weight_outputs, pass_through,
        same_output_twice, output_not_always_used, outputs_never_used, in_place_first,
        in_place_on_view, complex_weights, custom_function, gradient_in_forward,
        gradient_penalty_in_forward, detached_middle, detached_branch, looped_conv, conv_bn_relu,
    )
}  # fmt: skip

COSTLY: dict[str, Callable[[], Stage]] = {
    make.__name__: make
    for make in (
        transformer, multihead_attention, lstm, gru, experts, first_stage, looped_block,
        tied_embedding, cached_parametrization, full_checkpoint, selective_checkpoint,
        nested_checkpoint, checkpointed_weight,
    )
}  # fmt: skip

ZOO = CHEAP | COSTLY
