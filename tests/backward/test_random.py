"""Random stages, whose weights are used in ways that can wait and in ways that cannot, against autograd.

Compared are the bits of the gradients, which of them are None, and what hooks saw.
"""

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

from penstock.backward import SplitBackward
from tests.backward.blocks import counted_linear, standardise
from tests.backward.making import WIDTH, linear, weight, x

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
        lambda m: m.frozen,
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
        lambda m, v: v + m.unused.detach().sum(),
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
        (found,) = torch.autograd.grad(out.square().sum(), of, create_graph=True, allow_unused=True)
        return out if found is None else out * found.square().mean()

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


class Program(nn.Module):
    """A random stage; its loss may use its weights too."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = Random(seed)
        reentrant = draw.random() < 0.15
        self.step = chain(draw, 5, nested=True, reentrant=reentrant)
        self.of_loss = (
            chain(draw, 3, nested=True, reentrant=reentrant) if draw.random() < 0.5 else None
        )
        penalty, self.penalised = matrix(draw), draw.random() < 0.4
        self.penalty = lambda: 0.1 * penalty(self).norm()
        self.layer, self.table = linear(), nn.Embedding(11, WIDTH, dtype=torch.float64)
        self.w, self.u, self.b = (nn.Parameter(w) for w in (weight(), weight(), weight(WIDTH)))
        self.always = nn.Parameter(weight(1))
        self.kernel, self.unused = nn.Parameter(weight(4, 4, 3)), nn.Parameter(weight())
        self.frozen = nn.Parameter(weight(), requires_grad=False)
        self.tied = nn.Parameter(weight()) if draw.random() < 0.7 else self.layer.weight
        self.gets_gradient = draw.random() < 0.8

    def forward(self, value: Tensor) -> Tensor:
        return self.step(self, value)

    def loss(self, output: Tensor) -> Tensor:
        output = output if self.of_loss is None else self.of_loss(self, output)
        loss = output.square().sum() + self.always.sum()
        return loss + self.penalty() if self.penalised else loss  # type: ignore[no-untyped-call]


Found = dict[str, Any]


def watched(model: Program) -> tuple[list[Any], dict[str, list[Tensor]]]:
    calls: dict[str, list[Tensor]] = {}

    def note(name: str, kind: str, tensor: Tensor) -> None:
        value = tensor if kind == "hook" else tensor.grad
        assert value is not None
        calls.setdefault(f"{name} {kind}", []).append(value.detach().clone())

    handles: list[Any] = []
    for name, one in model.named_parameters():
        if one.requires_grad:
            handles.append(one.register_hook(partial(note, name, "hook")))
            handles.append(one.register_post_accumulate_grad_hook(partial(note, name, "post")))
    return handles, calls


def found(model: Program, run: Callable[[], list[Tensor | None]], *, hooks: bool) -> Found:
    """What a run of two microbatches leaves."""
    model.zero_grad()
    handles, calls = watched(model) if hooks else ([], {})
    result = {f"input {index}": grad for index, grad in enumerate(run())}
    for handle in handles:
        handle.remove()
    return {**result, **{name: one.grad for name, one in model.named_parameters()}, "calls": calls}


def by_autograd(model: Program, values: list[Tensor]) -> list[Tensor | None]:
    leaves = [value.detach().requires_grad_(model.gets_gradient) for value in values]
    losses = [model.loss(model(leaf * 1)) for leaf in leaves]
    for loss in losses:
        loss.backward()
    return [leaf.grad for leaf in leaves]


def by_halves(model: Program, values: list[Tensor]) -> list[Tensor | None]:
    split = SplitBackward(model)
    leaves = [value.detach().requires_grad_(model.gets_gradient) for value in values]
    losses = [model.loss(model(leaf * 1)) for leaf in leaves]
    halves = [
        split.input_half([loss], None, [leaf]) for loss, leaf in zip(losses, leaves, strict=True)
    ]
    for _, pending in halves:
        split.weight_half(pending)
    return [grads[0] for grads, _ in halves]


def check(seed: int) -> None:
    torch.manual_seed(seed)
    model = Program(seed)
    values = [x(grad=False), x(grad=False)]
    for hooks in False, True:
        try:
            expected = found(model, lambda: by_autograd(model, values), hooks=hooks)
        except RuntimeError:
            return
        actual = found(model, partial(by_halves, model, values), hooks=hooks)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*requires_grad=True. Gradients will be None")
@pytest.mark.parametrize("batch", range(4))
def test_halves_equal_plain_autograd(batch: int) -> None:
    for seed in range(batch * 15, batch * 15 + 15):
        check(seed)
