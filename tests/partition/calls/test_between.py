"""What a forward does between its modules happens once, in the stage it belongs to, for every cut."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import relu
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import PartitionError, StageError
from penstock.partition import partition

WIDTH, SAMPLES, PARTS = 4, 4, 2
Body = Callable[["Model", Tensor], Any]
BODIES: dict[str, tuple[Body, Callable[[int], nn.Module]]] = {}


class Model(nn.Module):
    """Four modules, and a function for what happens between them."""

    def __init__(self, body: Body, unit: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.l = nn.ModuleList(unit(index) for index in range(4))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor
        self.body = body
        self.called: Counter[str] = Counter()

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)

    def hook(self, name: str) -> Callable[[Tensor], Tensor]:
        """Counts its calls, and is not linear: it must see the whole gradient, once."""

        def clip(grad: Tensor) -> Tensor:
            self.called[name] += 1
            return grad.clamp(-0.02, 0.03)

        return clip


class Unit(nn.Module):
    """Does something to its input first."""

    def __init__(self, first: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.lin, self.first = nn.Linear(WIDTH, WIDTH), first

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.lin(self.first(x))
        return found


def linear(index: int) -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def program(unit: Callable[[int], nn.Module] = linear) -> Callable[[Body], Body]:
    def note(body: Body) -> Body:
        BODIES[body.__name__] = body, unit
        return body

    return note


def first_at(place: int, first: Callable[[Tensor], Tensor]) -> Callable[[int], nn.Module]:
    return lambda index: Unit(first) if index == place else linear(index)


def through(m: Model, h: Tensor, start: int, stop: int = 4) -> Tensor:
    for index in range(start, stop):
        h = torch.tanh(m.l[index](h))
    return h


# ---- hooks


@program()
def hooks(m: Model, x: Tensor) -> Tensor:
    h = m.l[0](x)
    if h.requires_grad:
        h.register_hook(m.hook("gives"))
    h = torch.tanh(m.l[1](h))
    if h.requires_grad:
        h.register_hook(m.hook("between"))
        h.register_hook(m.hook("removed")).remove()
    return m.l[3](m.l[2](h)) + h  # type: ignore[no-any-return]


@program()
def a_hook_removed_in_a_later_stage(m: Model, x: Tensor) -> Tensor:
    h = torch.tanh(m.l[0](x))
    handle = h.register_hook(m.hook("removed")) if h.requires_grad else None
    h = through(m, h, 1, 3)
    if handle is not None:
        handle.remove()
    return m.l[3](h)  # type: ignore[no-any-return]


@program()
def hooks_on_what_changes(m: Model, x: Tensor) -> Tensor:
    h = m.l[0](x) * 1.0
    if h.requires_grad:
        h.register_hook(m.hook("before"))
    h.mul_(2)
    if h.requires_grad:
        h.register_hook(m.hook("after"))
        h.retain_grad()
    return through(m, h, 1)


@program()
def hooks_on_parameters_and_nodes(m: Model, x: Tensor) -> Tensor:
    scale, clip = m.scale * 2, m.hook("node")
    if scale.requires_grad:
        scale.register_hook(m.hook("parameter"))
    h = torch.tanh(m.l[0](x) * scale)
    if h.grad_fn is not None:
        h.grad_fn.register_prehook(lambda grads: tuple(map(clip, grads)))
    return through(m, h * scale, 1) * scale


# ---- gradients that are missing


@program(first_at(2, lambda x: x.detach()))
def a_module_that_detaches(m: Model, x: Tensor) -> Tensor:
    return through(m, x, 0)


@program()
def detached_between(m: Model, x: Tensor) -> Tensor:
    return through(m, through(m, x, 0, 3).detach(), 3)


@program()
def a_gradient_is_asked_for(m: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        frozen, other = m.l[0](x), torch.tanh(m.l[0](x))
    before = torch.tanh(frozen)
    frozen.requires_grad_()
    other.requires_grad = True
    if torch.is_grad_enabled():
        frozen.register_hook(m.hook("asked"))
    return m.l[3](m.l[2](m.l[1](frozen) * other)) + before + frozen  # type: ignore[no-any-return]


@program()
def views_of_weights_without_a_gradient(m: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        row, turned = m.scale[None], m.l[1].weight.T
    h = m.l[1](m.l[0](x * m.scale[None])) * row @ turned
    return through(m, h, 2) * (row * m.scale[None])


@program()
def views_made_at_once_of_what_changes(m: Model, x: Tensor) -> Tensor:
    h = m.l[0](x)
    _column, *_ = h.unbind(1)
    y: Tensor = h.relu_()
    return through(m, h.clone(), 1) + y


@program()
def a_result_that_nobody_uses(m: Model, x: Tensor) -> dict[str, Tensor]:
    h = m.l[0](x)
    unused = torch.tanh(m.l[1](h))
    return {"out": m.l[3](h), "aux": m.l[2](unused), "detached": unused.detach()}


@program(first_at(2, torch.zeros_like))
def nothing_travels(m: Model, x: Tensor) -> Tensor:
    through(m, x, 0, 2)
    return m.l[3](m.l[2](x))  # type: ignore[no-any-return]


@program()
def overwritten_through_a_view(m: Model, x: Tensor) -> Tensor:
    h = m.l[0](x)
    lost = m.l[1](h)
    lost.view(-1, WIDTH).copy_(m.l[2](h))
    return m.l[3](lost) + h  # type: ignore[no-any-return]


# ---- writes


class Part(nn.Module):
    """Gives a view of what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH + 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.lin(x)[:, 1:-1]
        return found


@program(lambda index: Part())
def writes_through_temporary_views(m: Model, x: Tensor) -> Tensor:
    h = m.l[1](m.l[0](x))
    h.movedim(-1, 0)[1].add_(0.5)
    h[..., 0] = 0
    h.t()[2:, 1:].fill_(1)
    return m.l[3](m.l[2](h.clone())) + h  # type: ignore[no-any-return]


@program()
def writes_into_views_like_a_value(m: Model, x: Tensor) -> Tensor:
    h = m.l[0](x)
    kept, ones = torch.zeros(WIDTH), torch.ones(WIDTH, dtype=x.dtype)
    shown = kept.view_as(h[0])[1:]
    shown.add_(h[0, 1:])
    rows, wide = torch.broadcast_tensors(ones, h)
    h = m.l[1](wide * rows) + kept + ones.expand_as(h)
    shown.mul_(2)
    return m.l[3](m.l[2](h)) + kept * rows  # type: ignore[no-any-return]


@program(lambda index: Part())
def writes_of_one_value_into_another(m: Model, x: Tensor) -> Tensor:
    w, v = m.l[0](x), m.l[1](x)
    v[..., 2] = w[..., 2]
    v[..., 1] = m.l[2](v.clone())[..., 1]
    return m.l[3](v.clone()) + w + v  # type: ignore[no-any-return]


@program()
def a_write_that_shows_in_views(m: Model, x: Tensor) -> Tensor:
    h = m.l[0](x).clone()
    part, rows = h[:, :2], h.t()
    y = m.l[1](torch.tanh(h))
    part.add_(y[:, :2])
    z = m.l[2](rows.t().clone())
    rows[1:].mul_(z.t()[1:])
    return m.l[3](h.clone()) + part.sum(-1, keepdim=True) + h  # type: ignore[no-any-return]


@program()
def writes_into_what_all_stages_have(m: Model, x: Tensor) -> Tensor:
    kept = x.new_zeros(len(x), 4, WIDTH)
    flat, h = kept.view(len(x), -1), x
    for index, unit in enumerate(m.l):
        row, h = kept[:, index], unit(h)
        row.copy_(h)
        kept.movedim(1, 0)[index].mul_(2)
    return kept.sum(1) + flat[:, 3:7]


@program(first_at(1, lambda x: x.relu_()))
def a_module_that_changes_an_argument(m: Model, x: Tensor) -> Tensor:
    h, view = m.l[0](x.clone()), x[:, 1:]
    y = m.l[1](x)
    return m.l[3](m.l[2](h + y)) + x + view.sum()  # type: ignore[no-any-return]


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.movedim(-1, 0)[0].mul_(x.movedim(-1, 0)[0]),
    lambda x: x.detach().view(-1)[1:].sin_(),
]


class Afterwards(Unit):
    """Does something to its input when it has used it."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.lin(x.clone())
        self.first(x)
        return found


@program(lambda index: Afterwards(VIEWS[index]) if index < 2 else linear(index))
def modules_that_change_arguments_through_views(m: Model, x: Tensor) -> Tensor:
    made = x * 2
    h, y = m.l[0](x), m.l[1](x[:1])
    m.l[0](made)
    return m.l[3](m.l[2](x + h + made)) + x + y  # type: ignore[no-any-return]


FIRST: list[Callable[[Tensor], Tensor]] = [relu, Tensor.relu_, nn.ReLU(inplace=True), Tensor.tanh_]


@program(lambda index: Unit(FIRST[index]))
def modules_that_begin_in_place(m: Model, x: Tensor) -> Tensor:
    h = m.l[1](m.l[0](x).view(-1, WIDTH))
    y = m.l[2](h)
    return m.l[3](y) + h + y  # type: ignore[no-any-return]


@program(lambda index: [Part(), Unit(Tensor.relu_), linear(2), linear(3)][index])
def modules_that_change_a_part(m: Model, x: Tensor) -> Tensor:
    h = m.l[0](x)
    changed = m.l[1](h)
    return through(m, changed, 2) + h  # type: ignore[no-any-return]


# ---- losses, checkpoints, custom functions


@program()
def losses(m: Model, x: Tensor) -> Tensor:
    h = m.l[0](x)
    penstock.add_loss("a", h.square().mean(), 0.1)
    penstock.add_loss("a", m.l[1](h).square().mean(), 0.3)
    penstock.add_loss("weight", m.scale.square().mean())
    penstock.add_loss("arguments", x.square().mean())
    return m.l[3](m.l[2](h))  # type: ignore[no-any-return]


@program()
def reentrant_checkpoints(m: Model, x: Tensor) -> Tensor:
    h: Tensor = m.l[0](x)
    for unit in m.l[1:]:
        h = checkpoint(unit, h, use_reentrant=True)
    return h


@program(first_at(2, lambda x: x.relu_()))
def checkpoints_across_cuts(m: Model, x: Tensor) -> Tensor:
    def inner(t: Tensor) -> Tensor:
        return torch.tanh(m.l[1](t * m.scale))

    def outer(t: Tensor) -> Tensor:
        found: Tensor = m.l[2](checkpoint(inner, t, use_reentrant=False))
        return found

    h = m.l[0](x)
    h = checkpoint(outer, h, use_reentrant=False) + checkpoint(outer, h, use_reentrant=True)
    return m.l[3](h)  # type: ignore[no-any-return]


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -ctx.scale * grads[0], None


@program()
def custom_functions(m: Model, x: Tensor) -> Tensor:
    reverse: Any = Reversed.apply
    h = reverse(m.l[0](x), 3.0)
    y = m.l[2](reverse(m.l[1](h), 0.5))
    return m.l[3](reverse(y, 2.0)) + h  # type: ignore[no-any-return]


# ---- against the plain loop


def loss_fn(output: Any, target: Tensor) -> Tensor:
    found: Tensor = output["out"] if isinstance(output, dict) else output
    return (found - target).square().mean()


def batch() -> tuple[Tensor, Tensor]:
    rows = torch.linspace(-1, 2, SAMPLES * WIDTH, dtype=torch.float64).reshape(SAMPLES, WIDTH)
    return rows.sin(), rows.cos()


def made(name: str) -> Model:
    torch.manual_seed(0)
    return Model(*BODIES[name]).double()


def plain_loop(model: nn.Module, step: int = 0) -> float:
    total = 0.0
    for index, (x, target) in enumerate(zip(*(t.chunk(PARTS) for t in batch()), strict=True)):
        with (
            penstock.randomness(model, seed=1, step=step, microbatch=index),
            penstock.collect_losses() as added,
        ):
            loss = (loss_fn(model(x.clone()), target) + added.total()) / PARTS
            loss.backward()
        total += float(loss.detach())
    return total


def differences(model: nn.Module, plain: nn.Module) -> Iterator[str]:
    for (name, mine), (_, theirs) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        if mine.grad is None or theirs.grad is None:
            if mine.grad is not theirs.grad:
                yield f"{name}: {mine.grad}, not {theirs.grad}"
        elif (mine.grad - theirs.grad).abs().max() > 1e-12:
            yield name


IN_HALVES = ("reentrant_checkpoints", "checkpoints_across_cuts", "a_write_that_shows_in_views")
CUTS = [(name, ["l.1", "l.2", "l.3"]) for name in BODIES] + [(name, ["l.2"]) for name in IN_HALVES]


# Torch says so of a reentrant checkpoint in evaluation, in the plain model too.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("name", "cuts"), CUTS, ids=[f"{n}-{len(cuts)}" for n, cuts in CUTS])
def test_as_the_plain_loop(name: str, cuts: list[str]) -> None:
    model, plain = made(name), made(name)
    expected = plain_loop(plain)
    cut = partition(model, cuts)
    x, target = batch()
    with penstock.Pipeline(model, stages=cut, loss_fn=loss_fn, microbatches=PARTS) as pipe:
        result = pipe.step(x, target=target)
        assert abs(result.loss - expected) < 1e-12
        assert list(differences(model, plain)) == []
        assert model.called == plain.called
        output = pipe.predict(x)
    if name != "a_result_that_nobody_uses":
        whole = torch.cat([plain.eval()(part.clone()) for part in x.chunk(PARTS)])
        torch.testing.assert_close(output, whole, rtol=0, atol=1e-12)


def counting(m: Any, x: Tensor) -> Tensor:
    m.count += 1
    h = through(m, x, 0, 3)
    return m.l[3](h * m.count)  # type: ignore[no-any-return]


@pytest.mark.parametrize("cuts", [["l.2"], ["l.1", "l.2", "l.3"]])
def test_an_attribute_that_counts(cuts: list[str]) -> None:
    torch.manual_seed(0)
    plain: Any = Model(counting, linear).double()
    plain.count = 0
    model, (x, target) = copy.deepcopy(plain), batch()
    with penstock.Pipeline(model, stages=cuts, loss_fn=loss_fn, microbatches=PARTS) as pipe:
        for change in (0, 0, -7):
            model.count, plain.count = model.count + change, plain.count + change
            assert abs(pipe.step(x, target=target).loss - plain_loop(plain)) < 1e-12
            assert model.count == plain.count
    assert list(differences(model, plain)) == []


def doubling(m: Model, x: Tensor) -> Tensor:
    x.mul_(2)
    return through(m, x.clone(), 0) + x[..., 1:2].add_(1)


@pytest.mark.parametrize("balance", ["parameters", "flops"])
def test_an_example_stays_as_it_was(balance: Any) -> None:
    torch.manual_seed(0)
    plain = Model(doubling, linear).double()
    model, (x, target) = copy.deepcopy(plain), batch()
    part = x[:PARTS]
    cut = partition(model, 2, how="calls", example=((part,), {}), balance=balance)
    with penstock.Pipeline(model, stages=cut, loss_fn=loss_fn, microbatches=PARTS) as pipe:
        assert abs(pipe.step(x, target=target).loss - plain_loop(plain)) < 1e-12
    assert torch.equal(x, batch()[0])


class Both(nn.Linear):
    """Gives a view of what it is given too."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x[:, 1:]


def write_into_second(x: Tensor, given: tuple[Tensor, Tensor]) -> Tensor:
    result, shown = given
    shown.zero_()
    return result + shown.sum() + x


REFUSALS: dict[str, tuple[Body, str]] = {
    "what a module was given": (
        lambda m, x: m.l[1](write_into_second(x, m.l[0](x))),
        "or that a module was given",
    ),
    "gradients": (
        lambda m, x: m.l[1](torch.autograd.grad(m.l[0](x).sum(), m.scale)[0]),
        "after l.0 asks for gradients",
    ),
    "a hook on arguments": (
        lambda m, x: m.l[1](m.l[0](x) + keep_hook((x * 1).requires_grad_())),
        "register_hook on a tensor that it has made of its arguments alone",
    ),
    "another way into the memory": (
        lambda m, x: m.l[1](keep_written(x, m.l[0](x))),
        "reads it through another that shares its memory",
    ),
    "a checkpoint that changes what it is given": (
        lambda m, x: m.l[1](checkpoint(lambda t: t.mul_(2), m.l[0](x), use_reentrant=True)),
        "changes its input in place",
    ),
    "a buffer that is changed": (
        lambda m, x: m.l[1](m.l[0](x) + m.mean.mul_(0.9).add_(m.l[0](x).detach().mean(0))),
        r"changes its buffers \(mean\)",
    ),
    "a buffer that is changed by arguments": (
        lambda m, x: m.l[1](m.l[0](x) + m.mean.add_(x.mean(0)).clone()),
        r"changes its buffers \(mean\)",
    ),
    "another buffer in its place": (
        lambda m, x: m.l[1](keep_mean(m, m.l[0](x))) + m.mean,
        r"changes its buffers \(mean\)",
    ),
}


def keep_hook(h: Tensor) -> Tensor:
    h.register_hook(lambda grad: grad)
    return h


def keep_mean(m: Model, h: Tensor) -> Tensor:
    m.mean = m.mean * 0.9 + h.detach().mean(0)
    return h


def keep_written(x: Tensor, h: Tensor) -> Tensor:
    kept = torch.zeros_like(x)
    kept.detach().copy_(h)
    return kept * 2


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    body, text = REFUSALS[name]
    x, target = batch()
    model = Model(body, linear)
    if name == "what a module was given":
        model.l[0] = Both(WIDTH, WIDTH)
    with (
        penstock.Pipeline(model.double(), stages=["l.1"], loss_fn=loss_fn) as pipe,
        pytest.raises(StageError, match=text),
    ):
        pipe.step(x, target=target)


def test_a_hook_that_a_module_sets_on_what_other_stages_use() -> None:
    def body(m: Model, x: Tensor) -> Any:
        given = m.l[0](x)
        return m.l[2](m.l[1](given)) + m.l[3](given)

    units = first_at(1, lambda h: keep_hook(h) if h.requires_grad else h)
    x, target = batch()
    with penstock.Pipeline(Model(body, units).double(), stages=["l.1"], loss_fn=loss_fn) as pipe:
        pipe.step(x, target=target)
    model = Model(body, units).double()
    with penstock.Pipeline(model, stages=["l.1", "l.2"], loss_fn=loss_fn) as pipe:
        # The second call differs in sizes alone from what is known.
        for rows in (SAMPLES, SAMPLES // 2):
            with pytest.raises(StageError, match=r"l.1 in stage 1 sets a hook .* stage 2 uses"):
                pipe.step(x[:rows], target=target[:rows])


def test_backward_hooks_of_a_module_in_parts() -> None:
    model = nn.Sequential(made("hooks"), nn.Linear(WIDTH, WIDTH).double())
    model[0].register_full_backward_hook(lambda *_: None)
    x, target = batch()
    cut = partition(model, ["0.l.2"], how="calls")
    with (
        penstock.Pipeline(model, stages=cut, loss_fn=loss_fn) as pipe,
        pytest.raises(PartitionError, match="0 has backward hooks, and its parts are placed by"),
    ):
        pipe.step(x, target=target)


class Hooked(nn.Module):
    """Calls modules without weights between its others, some of them several times, one for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.act, self.drop, self.early = nn.Tanh(), nn.Dropout(), nn.Flatten()
        self.pair = nn.Sequential(nn.ReLU(inplace=True), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        h = early = self.early(x)
        for unit in self.l:
            h = self.drop(self.act(unit(h)))
        found: Tensor = self.pair(h * 1) + self.act(h) + early + self.pair[1](early)
        return found

    def listen(self, heard: list[Any]) -> None:
        """Set all kinds of hooks; they note what they hear of it."""

        def hear(name: str) -> Callable[..., None]:
            return lambda *given: heard.append((name, [t.sum().item() for t in tensors(given[-1])]))

        def tensors(value: Any) -> list[Tensor]:
            return [t for t in (value if isinstance(value, tuple) else [value]) if t is not None]

        def weaken(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            if output.requires_grad:
                output.register_hook(lambda grad: heard.append(("gradient", grad.sum().item())))
            return output * 0.9

        for name in ("act", "drop", "early", "pair", "pair.1"):
            module = self.get_submodule(name)
            module.register_forward_pre_hook(hear(f"{name} comes"))
            module.register_forward_hook(hear(f"{name} goes"))
        for name in ("act", "drop"):
            module = self.get_submodule(name)
            module.register_full_backward_pre_hook(hear(f"{name} comes back"))
            module.register_full_backward_hook(hear(f"{name} goes back"))
        self.act.register_forward_hook(weaken)


@pytest.mark.parametrize("since", [0, 1])
def test_hooks_of_modules_without_weights(since: int) -> None:
    """Each hears once what it hears in the plain loop, also if it was set between two steps."""
    torch.manual_seed(0)
    plain = Hooked().double()
    model, heard, expected = copy.deepcopy(plain), list[Any](), list[Any]()
    x, target = batch()
    with penstock.Pipeline(
        model, stages=["l.1", "l.3"], ranks=3, loss_fn=loss_fn, microbatches=PARTS, seed=1
    ) as pipe:
        for step in range(2):
            if step == since:
                plain.listen(expected)
                model.listen(heard)
            plain_loop(plain, step)
            pipe.step(x, target=target)
    assert list(differences(model, plain)) == []
    assert sorted(name for name, _ in heard) == sorted(name for name, _ in expected)
    for mine, theirs in zip(sorted(heard), sorted(expected), strict=True):
        assert mine[1] == pytest.approx(theirs[1], abs=1e-12)
