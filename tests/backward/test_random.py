"""Random stages, whose weights are used in ways that can wait and in ways that cannot, against autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.backward.graphs import WIDTH, Stage, counted_linear, linear, standardise, weight, x
from tests.backward.oracle import halves, trained

Step = Callable[[Any, Tensor], Tensor]
Weight = Callable[[Any], Tensor]

# ---- weights of four by six things, six by six


def matrix(draw: Random) -> Weight:
    """A matrix that is a parameter, computed from some, or frozen."""
    plain: list[Weight] = [
        lambda m: m.w, lambda m: m.u, lambda m: m.layer.weight, lambda m: m.table.weight[:WIDTH],
    ]  # fmt: skip
    first, second = draw.choice(plain), draw.choice(plain)
    computed: list[Weight] = [
        first, first, first,
        lambda m: first(m).t(),
        lambda m: first(m).exp(),
        lambda m: first(m) @ second(m),
        lambda m: first(m) + 0.5 * second(m),
        lambda m: functional.normalize(first(m), dim=draw_dim),
        lambda m: standardise(first(m)),
        lambda m: first(m).float().double(),
        lambda m: m.frozen[0],
        lambda m: first(m).detach(),
    ]  # fmt: skip
    draw_dim = draw.randrange(2)
    return draw.choice(computed)


def vector(draw: Random) -> Weight:
    """A vector of six."""
    full = matrix(draw)
    return draw.choice([lambda m: m.b, lambda m: m.layer.bias, lambda m: full(m).sum(0)])


# ---- steps


def simple(draw: Random) -> Step:
    """One operation with weights."""
    w, b, tokens = matrix(draw), vector(draw), torch.tensor([draw.randrange(11) for _ in range(4)])
    alpha = draw.choice([1, 2, -0.5])
    return draw.choice([
        lambda m, v: v @ w(m),
        lambda m, v: functional.linear(v, w(m), b(m)),
        lambda m, v: functional.linear(v.view(2, 2, 6), w(m), b(m)).relu_().view(4, 6),
        lambda m, v: functional.linear(v.view(2, 2, 6), w(m)).add_(v.view(2, 2, 6)).view(4, 6),
        lambda m, v: m.layer(v),
        lambda m, v: m.layer(v.view(2, 2, 6)).mul_(0.5).view(4, 6),
        lambda m, v: torch.addmm(b(m), v, w(m), alpha=alpha),
        lambda m, v: (w(m) @ v.t()).t(),
        lambda m, v: torch.baddbmm(b(m), v.view(2, 2, 6), w(m).expand(2, 6, 6), alpha=alpha).view(4, 6),
        lambda m, v: torch.einsum("ij,kj->ik", v, w(m)),
        lambda m, v: functional.conv1d(v.view(1, 4, 6), m.kernel, b(m)[:4], padding=1).view(4, 6),
        lambda m, v: v + m.table(tokens),
        lambda m, v: v * b(m),
        lambda m, v: v + 0.1 * w(m).norm(),
        lambda m, v: counted_linear(v, w(m), b(m)),
        lambda m, v: torch.func.vmap(lambda row: functional.linear(row, w(m)))(v),
        lambda m, v: v + torch.func.grad(lambda row: (row @ w(m)).sin().sum())(v),
        lambda m, v: v + m.spare.detach().sum(),
    ])  # fmt: skip


def hooked(draw: Random) -> Step:
    step = simple(draw)

    def run(m: Any, v: Tensor) -> Tensor:
        v = step(m, v)
        if v.requires_grad:
            v.register_hook(lambda grad: grad * 0.5)
        return v

    return run


def sliced(draw: Random) -> Step:
    step, b = simple(draw), vector(draw)

    def run(m: Any, v: Tensor) -> Tensor:
        v = step(m, v).clone()
        v[:, :2] *= b(m)[:2]
        v[1:].add_(b(m))
        return v

    return run


def slope(draw: Random) -> Step:
    """A gradient inside forward, for a weight or for the input."""
    step, of_weight = simple(draw), draw.random() < 0.5

    def run(m: Any, v: Tensor) -> Tensor:
        out = step(m, v).sin()
        of = m.w if of_weight else v
        if not (out.requires_grad and of.requires_grad):
            return out
        (grad,) = torch.autograd.grad(out.square().sum(), of, create_graph=True, allow_unused=True)
        return out if grad is None else out * grad.square().mean()

    return run


def region(draw: Random, *, reentrant: bool) -> Step:
    """A part that is run again in backward, or whose saved tensors pass through hooks."""
    inner, ways = chain(draw, 2), ["again", "hooks"]
    kind = "reentrant" if reentrant else draw.choice(ways)

    def run(m: Any, v: Tensor) -> Tensor:
        if kind == "hooks":
            with saved_tensors_hooks(lambda saved: saved * 1, lambda packed: packed):
                return inner(m, v)
        return checkpoint(inner, m, v, use_reentrant=kind == "reentrant")  # type: ignore[no-any-return]

    return run


def chain(draw: Random, length: int, *, nested: bool = False, reentrant: bool = False) -> Step:
    kinds = [simple] * 6 + [hooked, sliced]
    if nested:
        kinds += [partial(region, reentrant=reentrant)] * 3 + ([] if reentrant else [slope])
    steps = [draw.choice(kinds)(draw) for _ in range(draw.randint(1, length))]
    return lambda m, v: reduce(lambda value, step: step(m, value).tanh(), steps, v)


def program(seed: int) -> Stage:
    """A random stage; its loss may use its weights too."""
    draw = Random(seed)
    reentrant = draw.random() < 0.15
    step = chain(draw, 5, nested=True, reentrant=reentrant)
    of_loss = chain(draw, 3, nested=True, reentrant=reentrant) if draw.random() < 0.5 else None
    penalty = matrix(draw) if draw.random() < 0.4 else None

    def run(m: Any, value: Tensor) -> Any:
        output = step(m, value * 1)
        output = output if of_loss is None else of_loss(m, output)
        loss = output.square().sum() + m.always.sum()
        return loss if penalty is None else loss + 0.1 * penalty(m).norm()

    gets_gradient = draw.random() < 0.8
    return Stage(
        run,
        lambda: x(grad=gets_gradient),
        layer=linear(),
        table=nn.Embedding(11, WIDTH),
        w=weight(),
        u=weight(),
        b=weight(WIDTH),
        always=weight(1),
        kernel=weight(4, 4, 3),
        spare=weight(),
        frozen=nn.ParameterList([nn.Parameter(weight(), requires_grad=False)]),
    )


@pytest.mark.filterwarnings("ignore:.*requires_grad=True. Gradients will be None")
@pytest.mark.parametrize("batch", range(4))
def test_halves_equal_plain_autograd(batch: int) -> None:
    compared = 0
    for seed in range(batch * 15, batch * 15 + 15):
        torch.manual_seed(seed)
        stage = program(seed)
        for hooks in False, True:
            try:
                expected = trained(stage, seed=seed, hooks=hooks)
            except RuntimeError:
                continue
            actual = trained(stage, halves, seed=seed, hooks=hooks)
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)
            compared += 1
    assert compared >= 20
