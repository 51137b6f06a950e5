"""Stages whose graphs a split backward pass is easily wrong about; each entry makes a fresh one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils import checkpoint

WIDTH = 6


class Stage(nn.Module):
    """A function of modules, parameters and inputs, in float64 unless a parameter is complex.

    Args:
        run: takes the stage and the inputs.
        inputs: makes a microbatch's input, or a tuple of them.
        waits: how many uses of weights wait in each microbatch, where that matters.
        unused: by microbatch, which of the output's tensors get no gradient.
        members: what ``run`` uses; tensors become parameters.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        inputs: Callable[[], Any] | None = None,
        *,
        waits: int | None = None,
        unused: Mapping[int, Collection[int]] | None = None,
        **members: nn.Module | Tensor,
    ) -> None:
        super().__init__()
        self.run, self.make, self.waits, self.unused = run, inputs or x, waits, unused or {}
        for name, member in members.items():
            setattr(self, name, nn.Parameter(member) if isinstance(member, Tensor) else member)
        if not any(parameter.is_complex() for parameter in self.parameters()):
            self.double()

    def inputs(self) -> list[Any]:
        values = self.make()
        return list(values) if isinstance(values, tuple) else [values]

    def forward(self, *inputs: Any) -> Any:
        return self.run(self, *inputs)


Make = Callable[[], Stage]


def of(module: nn.Module, inputs: Callable[[], Any] | None = None, **options: Any) -> Stage:
    """A stage that calls a module."""
    return Stage(lambda m, *values: m.module(*values), inputs, module=module, **options)


def x(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape or (4, WIDTH), dtype=dtype, requires_grad=grad)


def ids() -> Tensor:
    return torch.randint(0, 11, (2, 5))


def linear(out: int = WIDTH, **options: Any) -> nn.Linear:
    return nn.Linear(WIDTH, out, dtype=torch.float64, **options)


def weight(*shape: int) -> Tensor:
    return torch.randn(*shape or (WIDTH, WIDTH), dtype=torch.float64) / 3


def looped(module: Callable[[Any], Any], value: Any) -> Any:
    return module(module(module(value)))


def rerun(function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    return checkpoint.checkpoint(function, *inputs, use_reentrant=False, **options)


# ---- modules and functions


class TransformerBlock(nn.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.RMSNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.gate_up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        value = value + self.attend(self.norms[0](value))
        gate, up = self.gate_up(self.norms[1](value)).chunk(2, dim=-1)
        hidden: Tensor = value + self.down(functional.silu(gate) * up)
        return hidden

    def attend(self, value: Tensor) -> Tensor:
        batch, length, width = value.shape
        split = self.qkv(value).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value_ = split.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value_, is_causal=True)
        out: Tensor = self.out(attended.transpose(1, 2).reshape(value.shape))
        return out


def experts(m: Any, value: Tensor) -> Any:
    """A mixture of four experts; the last gets no tokens, the others unequal numbers."""
    tokens = value.reshape(-1, value.shape[-1])
    weights = m.router(tokens).softmax(dim=-1)
    choice = torch.arange(len(tokens)).remainder(6).clamp(max=2)
    out = torch.zeros_like(tokens)
    for index, expert in enumerate(m.experts):
        rows = (choice == index).nonzero().squeeze(-1)
        out = out.index_add(0, rows, expert(tokens[rows]) * weights[rows, index, None])
    return out.view_as(value)


class CountedLinear(torch.autograd.Function):
    """A linear layer in Python that counts its backward calls and leaves the bias unreduced."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, value: Tensor, scale: float, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(value, weight)
        ctx.scale = scale
        return value @ weight.t() * scale + bias

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        CountedLinear.calls += 1
        value, weight = ctx.saved_tensors
        grad = grad_outputs[0]
        return grad @ weight * ctx.scale, None, grad.t() @ value * ctx.scale, grad


class Standardise(torch.autograd.Function):
    """A function of a weight alone, in Python, that saves its result."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        result = weight.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        Standardise.calls += 1
        return grad_outputs[0] * ctx.saved_tensors[0]


class Ends(torch.autograd.Function):
    """The identity, through which no gradient comes back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> None:
        return None


def ended(value: Tensor) -> Tensor:
    result: Tensor = Ends.apply(value)  # type: ignore[no-untyped-call]
    return result


def counted_linear(value: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    result: Tensor = CountedLinear.apply(value, 0.5, weight, bias)  # type: ignore[no-untyped-call]
    return result


def standardise(weight: Tensor) -> Tensor:
    result: Tensor = Standardise.apply(weight)  # type: ignore[no-untyped-call]
    return result


# ---- graphs that take some lines


def tied_embedding(m: Any, value: Tensor, tokens: Tensor) -> Any:
    return m.block(value + m.embedding(tokens)) @ m.embedding.weight.t()


def cached_parametrization(m: Any, value: Tensor) -> Any:
    with parametrize.cached():
        return looped(m.layer, value)


def shared_expression(m: Any, value: Tensor) -> Any:
    scale = m.scale.exp()
    return looped(lambda v: (v @ m.matrix * scale).tanh(), value)


def outputs_in_dict(m: Any, value: Tensor) -> Any:
    hidden = m.a(value)
    nested = {"deep": [m.b(hidden), {"none": None, "length": 3}], "detached": hidden.detach()}
    return {"hidden": hidden, "count": 7, "nothing": None, "nested": nested, "text": "x"}


def nested_weight_outputs(m: Any, value: Tensor) -> Any:
    first = m.matrix.exp()
    second = first.sin()
    return value @ second, second, first, standardise(second)


def same_output_twice(m: Any, value: Tensor) -> Any:
    hidden = m.layer(value)
    return hidden, hidden, hidden.view(-1)


def in_place_on_view(m: Any, value: Tensor) -> Any:
    hidden = m.a(value)
    hidden[:, :2] *= m.scale
    hidden[:, 1:].add_(m.scale.sum())
    return m.b(hidden)


def complex_weights(m: Any, value: Tensor) -> Any:
    hidden = value @ m.matrix + m.shift
    return hidden.real, (hidden * m.matrix[0]).tanh()


def custom_function(m: Any, value: Tensor) -> Any:
    hidden = counted_linear(m.a(value), m.weight, m.bias).tanh()
    return m.b(counted_linear(hidden, m.weight, m.bias))


def gradient_in_forward(m: Any, value: Tensor) -> Any:
    energy = m.b(m.a(value).tanh()).square().sum()
    (force,) = torch.autograd.grad(energy, value, create_graph=True)
    return energy, force


def gradient_penalty_in_forward(m: Any, value: Tensor) -> Any:
    hidden = m.a(value).sin()
    (slope,) = torch.autograd.grad(hidden.sum(), m.a.weight, retain_graph=True)
    return m.a(hidden) * slope.mean()


def selective_checkpoint(m: Any, value: Tensor) -> Any:
    saved = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    context = partial(checkpoint.create_selective_checkpoint_contexts, saved)
    return rerun(m.block, value, context_fn=context)


def nested_checkpoint(m: Any, value: Tensor) -> Any:
    return rerun(lambda v: rerun(m.b, rerun(m.a, v).tanh()), value)


def ab(run: Callable[..., Any], **options: Any) -> Make:
    """A stage with two linear layers."""
    return lambda: Stage(run, a=linear(), b=linear(), **options)


def layer(
    run: Callable[..., Any], inputs: Callable[[], Any] | None = None, out: int = WIDTH
) -> Make:
    """A stage with a linear layer."""
    return lambda: Stage(run, inputs, layer=linear(out))


def block(run: Callable[..., Any], **members: Any) -> Make:
    """A stage with a block, and things to make."""
    return lambda: Stage(
        run,
        lambda: x(2, 5, 8),
        block=TransformerBlock(8),
        **{name: make() for name, make in members.items()},
    )


CHECKPOINTED: dict[str, Make] = {
    "full checkpoint": block(
        lambda m, v: rerun(m.other, rerun(m.block, v)), other=lambda: TransformerBlock(8)
    ),
    "selective checkpoint": block(selective_checkpoint),
    "nested checkpoint": ab(nested_checkpoint),
    "checkpoint whose gradient ends": ab(
        lambda m, v: rerun(lambda u: ended(m.a(u)) + m.b(u).tanh(), v)
    ),
    "checkpointed weight": lambda: Stage(
        lambda m, v: m.after(rerun(m.layer, v)),
        layer=parametrizations.weight_norm(linear()),
        after=linear(),
    ),
}

GRAPHS: dict[str, Make] = {
    # ---- layers
    "mlp": lambda: of(nn.Sequential(linear(), nn.GELU(), linear(), nn.Tanh(), linear(3)), waits=3),
    "transformer": lambda: of(
        nn.Sequential(TransformerBlock(8), TransformerBlock(8)), lambda: x(2, 5, 8), waits=8
    ),
    "first stage": lambda: of(
        nn.Sequential(nn.Embedding(11, 8), TransformerBlock(8), nn.Linear(8, 3)), ids, waits=6
    ),
    "convolutions": lambda: of(
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3)),
        lambda: x(2, 2, 6, 6),
        waits=2,
    ),
    "attention": lambda: Stage(
        lambda m, v: m.attention(v, v, v, need_weights=True),
        lambda: x(2, 5, WIDTH),
        attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    ),
    "lstm": lambda: of(nn.LSTM(WIDTH, 5, num_layers=2, bidirectional=True), lambda: x(4, 2, WIDTH)),
    "gru": lambda: of(nn.GRU(WIDTH, 5, num_layers=2), lambda: x(4, 2, WIDTH)),
    "experts": lambda: Stage(
        experts,
        lambda: x(3, 5, WIDTH),
        router=linear(4),
        experts=nn.ModuleList(linear() for _ in range(4)),
    ),
    "sparse embedding": lambda: Stage(
        lambda m, v, tokens: v * m.embedding(tokens),
        lambda: (x(2, 5, 8), ids()),
        embedding=nn.Embedding(11, 8, sparse=True),
    ),
    # ---- weights with several uses, and computed ones
    "reused": layer(lambda m, v: looped(m.layer, v)),
    "reused block": block(lambda m, v: looped(m.block, v)),
    "reused convolution": lambda: Stage(
        lambda m, v: looped(m.conv, v).relu(),
        lambda: x(2, 2, 5, 5),
        conv=nn.Conv2d(2, 2, 3, padding=1),
    ),
    "parallel uses": layer(lambda m, v: m.layer(v.sin()) * m.layer(v.cos()) @ m.layer.weight),
    "used in two ways": layer(
        lambda m, v: m.layer(v) @ m.layer.weight + m.layer.weight.sum(0) + m.layer.bias.exp()
    ),
    "tied embedding": lambda: Stage(
        tied_embedding,
        lambda: (x(2, 5, 8), ids()),
        embedding=nn.Embedding(11, 8),
        block=TransformerBlock(8),
    ),
    "weight norm": lambda: of(
        nn.Sequential(parametrizations.weight_norm(linear()), nn.Tanh(), linear()), waits=2
    ),
    "cached parametrization": lambda: Stage(
        cached_parametrization, layer=parametrizations.orthogonal(linear())
    ),
    "shared expression": lambda: Stage(shared_expression, matrix=weight(), scale=weight(WIDTH)),
    "low rank": lambda: Stage(
        lambda m, v: m.base(v.tanh()) + functional.linear(functional.linear(v.tanh(), m.a), m.b),
        base=linear().requires_grad_(False),
        a=weight(2, WIDTH),
        b=weight(WIDTH, 2),
        waits=2,
    ),
    "frozen": lambda: of(nn.Sequential(linear(), nn.Tanh(), linear()).requires_grad_(False)),
    "no weights": lambda: of(nn.Sequential(nn.Tanh(), nn.Softmax(-1))),
    "an unused weight": ab(lambda m, v: m.a(v)),
    "a detached use": layer(lambda m, v: m.layer(v) @ m.layer.weight.detach()),
    "detached in the middle": ab(lambda m, v: m.b(m.b(m.a(v).detach())) + v),
    "a detached branch": ab(lambda m, v: m.b(m.a(v.detach()).tanh()) * v),
    "complex weights": lambda: Stage(
        complex_weights,
        lambda: x(dtype=torch.complex128),
        matrix=torch.randn(WIDTH, WIDTH, dtype=torch.complex128),
        shift=weight(WIDTH),
    ),
    "a gradient that ends": ab(lambda m, v: ended(m.a(v)) + m.b(v)),
    "a weight that is a long expression": lambda: Stage(
        lambda m, v: v @ reduce(lambda value, _: value * 1.5, range(70), m.matrix),
        matrix=weight(),
        waits=0,
    ),
    # ---- inputs and outputs
    "a loss": lambda: Stage(
        lambda m, v: functional.cross_entropy(m.head(v), torch.arange(4)), head=linear(5), waits=1
    ),
    "inputs without gradient": ab(
        lambda m, v, mask, factor: m.b(m.a(v) * mask).tanh() * factor,
        inputs=lambda: (x(), x(grad=False), 2),
    ),
    "an unused input": layer(lambda m, v, _: m.layer(v), lambda: (x(), x())),
    "an input used twice": ab(lambda m, v: m.a(v) * m.b(v) + v),
    "inputs among the outputs": layer(lambda m, v, w: (v, m.layer(v * w), w), lambda: (x(), x())),
    "outputs in a dict": ab(outputs_in_dict),
    "chunks": layer(lambda m, v: m.layer(v).chunk(2, dim=-1)),
    "one of the chunks": lambda: Stage(
        lambda m, v: m.head(m.layer(v).split(3, dim=-1)[1]), layer=linear(9), head=nn.Linear(3, 2)
    ),
    "a transposed output": layer(lambda m, v: functional.glu(m.layer(v)).t(), out=8),
    "an output of weights": lambda: Stage(
        lambda m, v: (m.layer(v), m.layer.weight.square().sum(), m.other.exp()),
        layer=linear(),
        other=weight(3),
    ),
    "a weight as output": lambda: Stage(
        lambda m, v: (m.layer(v), m.layer.weight, m.other), layer=linear(), other=weight(3)
    ),
    "nested outputs of weights": lambda: Stage(nested_weight_outputs, matrix=weight()),
    "an output twice": layer(same_output_twice),
    "outputs that are not always used": lambda: Stage(
        lambda m, v: (m.a(v), m.b(v), m.c.exp()),
        a=linear(),
        b=linear(),
        c=weight(2),
        unused={0: {1, 2}, 1: {0}},
    ),
    "outputs that are never used": ab(lambda m, v: (m.a(v), m.b(v)), unused={0: {0, 1}, 1: {0, 1}}),
    # ---- what forward may do
    "changed in place first": ab(lambda m, v: m.b(m.a((v * 1).relu_()).sigmoid_())),
    "changed in place through a view": lambda: Stage(
        in_place_on_view, a=linear(), b=linear(), scale=weight(2)
    ),
    "a function in Python": lambda: Stage(
        custom_function, a=linear(), b=linear(), weight=weight(), bias=weight(WIDTH), waits=2
    ),
    "weights through Python": lambda: Stage(
        lambda m, v: counted_linear(v, standardise(m.w), standardise(m.b)) @ m.w,
        w=weight(),
        b=weight(WIDTH),
    ),
    "a gradient in forward": ab(gradient_in_forward),
    "a gradient for a weight in forward": ab(gradient_penalty_in_forward),
    **CHECKPOINTED,
}


# ---- operations with a weight: those of which a gradient waits, and others


def rows(value: Tensor) -> Tensor:
    return value.view(2, 2, 6)


WAITING: dict[str, Callable[[Any, Tensor], Any]] = {
    "linear": lambda m, v: functional.linear(v, m.w, m.b),
    "linear in three dimensions": lambda m, v: functional.linear(rows(v), m.w, m.b),
    "linear of a transposed input": lambda m, v: functional.linear(v[:, :4].t() @ v, m.w),
    "linear of a permuted input": lambda m, v: functional.linear(rows(v).transpose(0, 1), m.w, m.b),
    "linear of a vector": lambda m, v: functional.linear(v[0], m.w),
    "linear, changed in place": lambda m, v: functional.linear(rows(v), m.w, m.b).relu_(),
    "linear, added to in place": lambda m, v: functional.linear(rows(v), m.w).add_(rows(v)),
    "matmul": lambda m, v: v @ m.w,
    "folded matmul": lambda m, v: torch.matmul(rows(v), m.w),
    "weight first": lambda m, v: m.w @ v.t(),
    "broadcast weight first": lambda m, v: m.w @ v.view(2, 6, 2),
    "transposed weight": lambda m, v: v @ m.w.t(),
    "einsum": lambda m, v: torch.einsum("ij,jk->ik", v, m.w),
    "scaled addmm": lambda m, v: torch.addmm(m.b, v, m.w, beta=2, alpha=3),
    "addmm in place": lambda m, v: v.sin().addmm_(v, m.w, alpha=2),
    "addmm, weight first": lambda m, v: torch.addmm(m.b[:4], m.w, v.t(), alpha=2),
    "bmm": lambda m, v: torch.bmm(v.view(1, 4, 6), m.w[None]),
    "batched experts": lambda m, v: rows(v) @ m.experts,
    "baddbmm": lambda m, v: torch.baddbmm(m.b, rows(v), m.experts, beta=0.5, alpha=2),
    "baddbmm, weight first": lambda m, v: torch.baddbmm(
        m.b[:2], m.experts, v.view(2, 6, 2), alpha=2
    ),
    "conv1d": lambda m, v: functional.conv1d(v.view(1, 4, 6), m.kernel, padding="same"),
    "conv1d with options": lambda m, v: functional.conv1d(
        v.view(1, 4, 6), m.kernel[:, :2], m.b[:2], stride=2, padding=1, dilation=2, groups=2
    ),
    "conv2d": lambda m, v: functional.conv2d(v.view(1, 4, 3, 2), m.kernel[..., None], m.b[:2]),
    "conv3d": lambda m, v: functional.conv3d(v.view(1, 4, 3, 2, 1), m.kernel[..., None, None]),
    "transposed conv1d": lambda m, v: functional.conv_transpose1d(v.view(1, 2, 12), m.kernel),
    "transposed conv2d": lambda m, v: functional.conv_transpose2d(
        v.view(1, 2, 3, 4), m.kernel[..., None]
    ),
    "channels last": lambda m, v: functional.conv2d(
        v.view(1, 4, 3, 2), m.kernel[..., None].contiguous(memory_format=torch.channels_last)
    ),
    "embedding": lambda m, v: functional.embedding(torch.tensor([[1, 3], [3, 5]]), m.w, 5),
    "scaled embedding": lambda m, v: functional.embedding(
        torch.tensor([1, 1, 3]), m.w, scale_grad_by_freq=True
    ),
    "renormed embedding": lambda m, v: functional.embedding(
        torch.tensor([1, 3]), m.w * 1, max_norm=100.0
    ),
}

AT_ONCE: dict[str, Callable[[Any, Tensor], Any]] = {
    "elementwise": lambda m, v: v * m.b,
    "matrix and vector": lambda m, v: torch.mv(m.w, v[0]),
    "bilinear": lambda m, v: functional.bilinear(v, v, m.experts),
    "sums of products": lambda m, v: torch.addbmm(m.b, rows(v), m.experts),
    "bag of embeddings": lambda m, v: functional.embedding_bag(torch.tensor([[1, 3]]), m.w),
    "product of a weight with itself": lambda m, v: m.w @ m.w,
    "used in another way too": lambda m, v: v @ m.w + m.w.norm(),
    "product in place on a view": lambda m, v: v.sin().view(4, 6)[:2].addmm_(v[:2], m.w),
}

TRANSFORMED: dict[str, Callable[[Any, Tensor], Any]] = {
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


def _operation(run: Callable[[Any, Tensor], Any], waits: int | None) -> Make:
    return lambda: Stage(
        run,
        waits=waits,
        w=weight(),
        b=weight(6),
        experts=weight(2, 6, 6),
        kernel=weight(2, 4, 3),
        layer=linear(),
    )


OPERATIONS: dict[str, Make] = {
    name: _operation(run, waits)
    for table, waits in ((WAITING, 1), (AT_ONCE, 0), (TRANSFORMED, None))
    for name, run in table.items()
}
