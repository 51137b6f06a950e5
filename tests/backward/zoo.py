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


def mlp() -> Stage:
    return stage(nn.Sequential(linear(), nn.GELU(), linear(), nn.Tanh(), linear(3)))


def transformer() -> Stage:
    blocks = nn.Sequential(TransformerBlock(8), TransformerBlock(8))
    return stage(blocks, lambda: x(2, 5, 8))


def conv_bn_relu() -> Stage:
    layers = (nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3, groups=1))
    return stage(nn.Sequential(*layers), lambda: x(2, 2, 6, 6))


def first_stage() -> Stage:
    layers = nn.Embedding(11, 8), TransformerBlock(8), nn.Linear(8, 3)
    return stage(nn.Sequential(*layers), ids)


def looped_block() -> Stage:
    block = TransformerBlock(8)
    return stage(lambda m, v: looped(m.block, v), lambda: x(2, 5, 8), block=block)


def looped_conv() -> Stage:
    conv = nn.Conv2d(2, 2, 3, padding=1)
    return stage(lambda m, v: looped(m.conv, v).relu(), lambda: x(2, 2, 5, 5), conv=conv)


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


def outputs_in_dict() -> Stage:
    def run(m: Any, v: Tensor) -> Any:
        hidden = m.a(v)
        nested = {"deep": [m.b(hidden), {"none": None, "length": 3}], "detached": hidden.detach()}
        return {"hidden": hidden, "count": 7, "nothing": None, "nested": nested, "text": "x"}

    return stage(run, a=linear(), b=linear())


def head() -> nn.Linear:
    return nn.Linear(3, 2)


def nested_weight_outputs() -> Stage:
    def run(m: Any, v: Tensor) -> Any:
        first = m.matrix.exp()
        second = first.sin()
        return v @ second, second, first, standardise(second)

    return stage(run, matrix=weight())


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
    "mlp": mlp,
    "scalar_loss": lambda: stage(
        lambda m, v: functional.cross_entropy(m.head(v), torch.arange(4)),
        head=linear(5),
    ),
    "reused_linear": lambda: stage(lambda m, v: looped(m.layer, v), layer=linear()),
    "parallel_uses": lambda: stage(
        lambda m, v: m.layer(v.sin()) * m.layer(v.cos()) @ m.layer.weight, layer=linear()
    ),
    "sparse_embedding": lambda: stage(
        lambda m, v, tokens: v * m.embedding(tokens),
        lambda: (x(2, 5, 8), ids()),
        embedding=nn.Embedding(11, 8, sparse=True),
    ),
    "weight_norm": weight_norm,
    "shared_expression": shared_expression,
    "used_in_two_ways": lambda: stage(
        lambda m, v: m.layer(v) @ m.layer.weight + m.layer.weight.sum(0) + m.layer.bias.exp(),
        layer=linear(),
    ),
    "weights_through_python": lambda: stage(
        lambda m, v: counted_linear(v, standardise(m.matrix), standardise(m.bias)) @ m.matrix,
        matrix=weight(),
        bias=weight(WIDTH),
    ),
    "detached_use": lambda: stage(
        lambda m, v: m.layer(v) @ m.layer.weight.detach(), layer=linear()
    ),
    "lora": lambda: stage(nn.Sequential(LoRA(WIDTH), nn.Tanh(), LoRA(WIDTH))),
    "frozen": lambda: stage(nn.Sequential(linear(), nn.Tanh(), linear()).requires_grad_(False)),
    "no_weights": lambda: stage(nn.Sequential(nn.Tanh(), nn.Softmax(-1))),
    "unused_weight": lambda: stage(lambda m, v: m.used(v), used=linear(), unused=linear()),
    "inputs_without_gradient": lambda: stage(
        lambda m, v, mask, factor: m.b(m.a(v) * mask).tanh() * factor,
        lambda: (x(), x(grad=False), 2),
        a=linear(),
        b=linear(),
    ),
    "unused_input": lambda: stage(lambda m, v, _: m.layer(v), lambda: (x(), x()), layer=linear()),
    "double_use_of_input": lambda: stage(lambda m, v: m.a(v) * m.b(v) + v, a=linear(), b=linear()),
    "outputs_in_dict": outputs_in_dict,
    "chunked_output": lambda: stage(lambda m, v: m.layer(v).chunk(2, dim=-1), layer=linear()),
    "glu_transposed_output": lambda: stage(
        lambda m, v: functional.glu(m.layer(v)).transpose(0, 1), layer=linear(8)
    ),
    "one_chunk_output": lambda: stage(
        lambda m, v: m.head(m.layer(v).split(3, dim=-1)[1]), layer=linear(9), head=head()
    ),
    "output_of_weights_only": lambda: stage(
        lambda m, v: (m.layer(v), m.layer.weight.square().sum(), m.other.exp()),
        layer=linear(),
        other=weight(3),
    ),
    "output_is_weight": lambda: stage(
        lambda m, v: (m.layer(v), m.layer.weight, m.other), layer=linear(), other=weight(3)
    ),
    "nested_weight_outputs": nested_weight_outputs,
    "pass_through": lambda: stage(
        lambda m, v, w: (v, m.layer(v * w), w), lambda: (x(), x()), layer=linear()
    ),
    "same_output_twice": same_output_twice,
    "output_not_always_used": output_not_always_used,
    "outputs_never_used": outputs_never_used,
    "in_place_first": lambda: fresh_inputs(
        stage(lambda m, v: m.b(m.a(v.relu_()).sigmoid_()), a=linear(), b=linear())
    ),
    "in_place_on_view": in_place_on_view,
    "complex_weights": complex_weights,
    "custom_function": custom_function,
    "gradient_in_forward": gradient_in_forward,
    "gradient_penalty_in_forward": gradient_penalty_in_forward,
    "detached_middle": lambda: stage(
        lambda m, v: m.c(m.b(m.a(v).detach())) + v, a=linear(), b=linear(), c=linear()
    ),
    "detached_branch": lambda: stage(
        lambda m, v: m.b(m.a(v.detach()).tanh()) * v, a=linear(), b=linear()
    ),
    "looped_conv": looped_conv,
    "conv_bn_relu": conv_bn_relu,
}

COSTLY: dict[str, Callable[[], Stage]] = {
    "transformer": transformer,
    "multihead_attention": lambda: stage(
        lambda m, v: m.attention(v, v, v, need_weights=True),
        lambda: x(2, 5, WIDTH),
        attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    ),
    "lstm": lambda: stage(
        nn.LSTM(WIDTH, 5, num_layers=2, bidirectional=True), lambda: x(4, 2, WIDTH)
    ),
    "gru": lambda: stage(nn.GRU(WIDTH, 5, num_layers=2), lambda: x(4, 2, WIDTH)),
    "experts": lambda: stage(Experts(WIDTH), lambda: x(3, 5, WIDTH)),
    "first_stage": first_stage,
    "looped_block": looped_block,
    "tied_embedding": tied_embedding,
    "cached_parametrization": cached_parametrization,
    "full_checkpoint": full_checkpoint,
    "selective_checkpoint": selective_checkpoint,
    "nested_checkpoint": nested_checkpoint,
    "checkpointed_weight": checkpointed_weight,
}

ZOO = CHEAP | COSTLY
