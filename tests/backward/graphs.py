"""A table of programs: stages whose graphs a split backward pass is easily wrong about.

Each is held against the plain loop as the first of two stages, of which the second passes all on.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from penstock import Loss, Microbatches, Pipeline
from penstock.schedule import Schedule
from penstock.testing import Case, Verdict, judge
from tests.catalogue.making import loss_of
from tests.catalogue.models import Attention, Experts

WIDTH = 6


class Stage(nn.Module):
    """A function of modules, parameters and inputs.

    Args:
        run: takes the stage and the inputs.
        inputs: makes a microbatch's input, or a tuple of them.
        waits: how many uses of weights wait in each microbatch, where that matters.
        unused: by microbatch, which of the output's values get no gradient.
        module: what ``run`` uses besides what each stage has.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        inputs: Callable[[], Any] | None = None,
        *,
        waits: int | None = None,
        unused: Mapping[int, Collection[int]] | None = None,
        module: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.run, self.make, self.waits, self.unused = run, inputs or x, waits, unused or {}
        self.layer, self.other, self.block = linear(), linear(), Attention().double()
        self.w, self.u, self.b = (nn.Parameter(weight(*size)) for size in [(6, 6), (6, 6), (6,)])
        self.experts, self.kernel = nn.Parameter(weight(2, 6, 6)), nn.Parameter(weight(2, 4, 3))
        self.embedding, self.module = nn.Embedding(11, 8, dtype=torch.float64), module

    def inputs(self) -> list[Any]:
        values = self.make()
        return list(values) if isinstance(values, tuple) else [values]

    def forward(self, inputs: Any) -> Any:
        return self.run(self, *(inputs if isinstance(inputs, tuple) else (inputs,)))


def loss_of_used(output: Any, unused: Collection[int] = ()) -> Tensor:
    """A number to which those values of an output contribute that are used."""
    used = [value for place, value in enumerate(tree_leaves(output)) if place not in unused]
    return loss_of(used)


def judged(
    stage: Stage, schedule: str | Schedule, *, microbatches: int = 2, steps: int = 1, **options: Any
) -> Verdict:
    """A pipeline whose second stage passes on what the first gives, beside the plain loop."""
    model, loss = nn.Sequential(stage, nn.Identity()), Loss(loss_of_used, check=False)
    plain = copy.deepcopy(model)
    pipe = Pipeline(model, schedule=schedule, ranks=2, stages=2, loss_fn=loss, seed=1, **options)
    inputs = [(tuple(stage.inputs()),) for _ in range(microbatches)]
    targets = [stage.unused.get(microbatch, ()) for microbatch in range(microbatches)]
    batch = Microbatches(inputs, samples=[1] * microbatches)
    return judge(Case(plain, [batch], targets, loss), pipe, steps=steps, evaluate=False)


def of(module: nn.Module, inputs: Callable[[], Any] | None = None, **options: Any) -> Stage:
    """A stage that calls a module."""
    return Stage(lambda m, *values: m.module(*values), inputs, module=module, **options)


def x(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape or (4, WIDTH), dtype=dtype, requires_grad=grad)


def wide() -> Tensor:
    return x(2, 5, 8)


def ids() -> Tensor:
    return torch.randint(0, 11, (2, 5))


def linear(out: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, out, dtype=torch.float64)


def weight(*shape: int) -> Tensor:
    return torch.randn(*shape or (WIDTH, WIDTH), dtype=torch.float64) / 3


def looped(module: Callable[[Any], Any], value: Any) -> Any:
    return module(module(module(value)))


def rerun(function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    return checkpoint.checkpoint(function, *inputs, **{"use_reentrant": False, **options})


# ---- functions in Python


CALLS: Counter[str] = Counter()
"""How often the backward of each has run."""


class CountedLinear(torch.autograd.Function):
    """A linear layer that leaves the bias unreduced."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, scale: float, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(value, weight)
        ctx.scale = scale
        return value @ weight.t() * scale + bias

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        CALLS["linear"] += 1
        value, weight = ctx.saved_tensors
        return grads[0] @ weight * ctx.scale, None, grads[0].t() @ value * ctx.scale, grads[0]


class Standardise(torch.autograd.Function):
    """A function of a weight alone that saves its result."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        result = weight.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        CALLS["standardise"] += 1
        return grads[0] * ctx.saved_tensors[0]


class Ends(torch.autograd.Function):
    """The identity, through which no gradient comes back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        return None


ended: Callable[[Tensor], Tensor] = Ends.apply
standardise: Callable[[Tensor], Tensor] = Standardise.apply


def counted_linear(value: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return CountedLinear.apply(value, 0.5, weight, bias)  # type: ignore[no-untyped-call]


# ---- graphs that take some lines


def cached_parametrization(m: Any, value: Tensor) -> Any:
    with parametrize.cached():
        return looped(m.module, value)


def shared_expression(m: Any, value: Tensor) -> Any:
    scale = m.b.exp()
    return looped(lambda v: (v @ m.w * scale).tanh(), value)


def outputs_in_dict(m: Any, value: Tensor) -> Any:
    hidden = m.layer(value)
    nested = {"deep": [m.other(hidden), {"none": None, "length": 3}], "detached": hidden.detach()}
    return {"hidden": hidden, "count": 7, "nothing": None, "nested": nested, "text": "x"}


def nested_weight_outputs(m: Any, value: Tensor) -> Any:
    first = m.w.exp()
    second = first.sin()
    return value @ second, second, first, standardise(second)


def same_output_twice(m: Any, value: Tensor) -> Any:
    hidden = m.layer(value)
    return hidden, hidden, hidden.view(-1)


def in_place_on_view(m: Any, value: Tensor) -> Any:
    hidden = m.layer(value)
    hidden[:, :2] *= m.b[:2]
    hidden[:, 1:].add_(m.b.sum())
    return m.other(hidden)


def complex_weights(m: Any, value: Tensor) -> Any:
    hidden = value @ m.module[0] + m.b
    both = (
        torch.bmm(hidden.view(2, 2, 6), m.module[1]),
        torch.bmm(m.module[1], hidden.view(2, 6, 2)),
    )
    return hidden.real, (hidden * m.module[0][0]).tanh(), *both


def custom_function(m: Any, value: Tensor) -> Any:
    hidden = counted_linear(m.layer(value), m.w, m.b).tanh()
    return m.other(counted_linear(hidden, m.w, m.b))


def gradient_in_forward(m: Any, value: Tensor) -> Any:
    energy = m.other(m.layer(value).tanh()).square().sum()
    (force,) = torch.autograd.grad(energy, value, create_graph=True)
    return energy, force


def gradient_penalty_in_forward(m: Any, value: Tensor) -> Any:
    hidden = m.layer(value).sin()
    (slope,) = torch.autograd.grad(hidden.sum(), m.layer.weight, retain_graph=True)
    return m.layer(hidden) * slope.mean()


def selective_checkpoint(m: Any, value: Tensor) -> Any:
    saved = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    context = partial(checkpoint.create_selective_checkpoint_contexts, saved)
    return rerun(m.block, value, context_fn=context)


def long_expression(m: Any, value: Tensor) -> Any:
    return value @ reduce(lambda one, _: one * 1.5, range(70), m.w)


Make = Callable[[], Stage]
GRAPHS: dict[str, Make] = {
    # ---- layers
    "mlp": lambda: of(nn.Sequential(linear(), nn.GELU(), linear(), nn.Tanh(), linear(3)), waits=3),
    "transformer": lambda: Stage(lambda m, v: m.block(v), wide, waits=4),
    "first stage": lambda: Stage(lambda m, v: m.block(m.embedding(v)), ids, waits=5),
    "convolutions": lambda: of(
        nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3)
        ).double(),
        lambda: x(2, 2, 6, 6), waits=2,
    ),
    "attention": lambda: Stage(
        lambda m, v: m.module(v, v, v, need_weights=True), lambda: x(2, 5, WIDTH),
        module=nn.MultiheadAttention(WIDTH, 2, batch_first=True, dtype=torch.float64),
    ),
    "lstm": lambda: of(
        nn.LSTM(WIDTH, 5, num_layers=2, bidirectional=True).double(), lambda: x(4, 2, WIDTH)
    ),
    "gru": lambda: of(nn.GRU(WIDTH, 5, num_layers=2).double(), lambda: x(4, 2, WIDTH)),
    "experts": lambda: of(Experts().double(), wide),
    "sparse embedding": lambda: Stage(
        lambda m, v, tokens: v * m.module(tokens), lambda: (wide(), ids()),
        module=nn.Embedding(11, 8, sparse=True).double(),
    ),
    # ---- weights with several uses, and computed ones
    "reused": lambda: Stage(lambda m, v: looped(m.layer, v)),
    "reused block": lambda: Stage(lambda m, v: looped(m.block, v), wide),
    "reused convolution": lambda: Stage(
        lambda m, v: looped(m.module, v).relu(), lambda: x(2, 2, 5, 5),
        module=nn.Conv2d(2, 2, 3, padding=1).double(),
    ),
    "parallel uses": lambda: Stage(
        lambda m, v: m.layer(v.sin()) * m.layer(v.cos()) @ m.layer.weight
    ),
    "used in two ways": lambda: Stage(
        lambda m, v: m.layer(v) @ m.layer.weight + m.layer.weight.sum(0) + m.layer.bias.exp()
    ),
    "tied embedding": lambda: Stage(
        lambda m, v, tokens: m.block(v + m.embedding(tokens)) @ m.embedding.weight.t(),
        lambda: (wide(), ids()),
    ),
    "weight norm": lambda: of(
        nn.Sequential(parametrizations.weight_norm(linear()), nn.Tanh(), linear()), waits=2
    ),
    "cached parametrization": lambda: Stage(
        cached_parametrization, module=parametrizations.orthogonal(linear())
    ),
    "shared expression": lambda: Stage(shared_expression),
    "low rank": lambda: Stage(
        lambda m, v: m.module(v.tanh()) + v.tanh() @ m.w[:, :2] @ m.u[:2],
        module=linear().requires_grad_(False), waits=2,
    ),
    "frozen": lambda: of(nn.Sequential(linear(), nn.Tanh(), linear()).requires_grad_(False)),
    "no weights": lambda: Stage(lambda m, v: v.tanh().softmax(-1)),
    "a detached use": lambda: Stage(lambda m, v: m.layer(v) @ m.layer.weight.detach()),
    "detached in the middle": lambda: Stage(
        lambda m, v: m.other(m.other(m.layer(v).detach())) + v
    ),
    "a detached branch": lambda: Stage(lambda m, v: m.other(m.layer(v.detach()).tanh()) * v),
    "complex weights": lambda: Stage(
        complex_weights, lambda: x(dtype=torch.complex128),
        module=nn.ParameterList(
            torch.randn(*size, dtype=torch.complex128) for size in [(6, 6), (2, 6, 6)]
        ),
    ),
    "a gradient that ends": lambda: Stage(lambda m, v: ended(m.layer(v)) + m.other(v)),
    "a weight that is a long expression": lambda: Stage(long_expression, waits=0),
    # ---- inputs and outputs
    "a loss": lambda: Stage(
        lambda m, v: functional.cross_entropy(m.layer(v), torch.arange(4)), waits=1
    ),
    "inputs without gradient": lambda: Stage(
        lambda m, v, mask, factor: m.other(m.layer(v) * mask).tanh() * factor,
        lambda: (x(), x(grad=False), 2),
    ),
    "an unused input": lambda: Stage(lambda m, v, _: m.layer(v), lambda: (x(), x())),
    "an input used twice": lambda: Stage(lambda m, v: m.layer(v) * m.other(v) + v),
    "inputs among the outputs": lambda: Stage(
        lambda m, v, w: (v, m.layer(v * w), w), lambda: (x(), x())
    ),
    "outputs in a dict": lambda: Stage(outputs_in_dict),
    "chunks": lambda: Stage(lambda m, v: m.layer(v).chunk(2, dim=-1)),
    "one of the chunks": lambda: Stage(lambda m, v: m.layer(v).split(3, dim=-1)[1] @ m.w[:3]),
    "a transposed output": lambda: Stage(lambda m, v: functional.glu(m.layer(v)).t()),
    "an output of weights": lambda: Stage(
        lambda m, v: (m.layer(v), m.layer.weight.square().sum(), m.b.exp())
    ),
    "a weight as output": lambda: Stage(lambda m, v: (m.layer(v), m.layer.weight, m.b)),
    "nested outputs of weights": lambda: Stage(nested_weight_outputs),
    "an output twice": lambda: Stage(same_output_twice),
    "outputs that are not always used": lambda: Stage(
        lambda m, v: (m.layer(v), m.other(v), m.b.exp()), unused={0: {1, 2}, 1: {0}}
    ),
    # ---- what forward may do
    "changed in place first": lambda: Stage(
        lambda m, v: m.other(m.layer((v * 1).relu_()).sigmoid_())
    ),
    "changed in place through a view": lambda: Stage(in_place_on_view),
    "a function in Python": lambda: Stage(custom_function, waits=2),
    "weights through Python": lambda: Stage(
        lambda m, v: counted_linear(v, standardise(m.w), standardise(m.b)) @ m.w
    ),
    "a gradient in forward": lambda: Stage(gradient_in_forward),
    "a gradient for a weight in forward": lambda: Stage(gradient_penalty_in_forward),
    "full checkpoint": lambda: Stage(lambda m, v: rerun(m.block, rerun(m.block, v)), wide),
    "selective checkpoint": lambda: Stage(selective_checkpoint, wide),
    "nested checkpoint": lambda: Stage(
        lambda m, value: rerun(lambda v: rerun(m.other, rerun(m.layer, v).tanh()), value)
    ),
    "checkpoint whose gradient ends": lambda: Stage(
        lambda m, v: rerun(lambda u: ended(m.layer(u)) + m.other(u).tanh(), v)
    ),
    "checkpointed weight": lambda: Stage(
        lambda m, v: m.other(rerun(m.module, v)), module=parametrizations.weight_norm(linear())
    ),
}  # fmt: skip


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


RUNS = WAITING | AT_ONCE | TRANSFORMED
OPERATIONS: dict[str, Make] = {
    name: partial(Stage, run, waits=1 if name in WAITING else 0 if name in AT_ONCE else None)
    for name, run in RUNS.items()
}
