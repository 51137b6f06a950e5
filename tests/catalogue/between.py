"""What people write between the units of a model: what happens once, in the stage it belongs to, or is refused."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import relu
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import PartitionError
from penstock.testing import Case, Refusal

WIDTH = 4
Body = Callable[[Any, Tensor], Any]


class Program(NamedTuple):
    """What happens between four modules, and the words by which it is refused, if it is.

    ``refused`` is for two stages, ``in_four`` for four. If ``recomputed``, units are checkpointed too.
    """

    body: Body
    unit: Callable[[int], nn.Module]
    refused: str
    in_four: str
    recomputed: bool


PROGRAMS: dict[str, Program] = {}


class Model(nn.Module):
    """Four modules, and a function for what happens between them."""

    def __init__(self, body: Body, unit: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.l = nn.ModuleList(unit(index) for index in range(4))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor
        self.register_buffer("table", None, persistent=False)
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
        output: Tensor = self.lin(self.first(x))
        return output


def linear(index: int) -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def program(
    unit: Callable[[int], nn.Module] = linear,
    refused: str = "",
    in_four: str = "",
    recomputed: bool = False,
) -> Callable[[Body], Body]:
    def note(body: Body) -> Body:
        name = body.__name__.replace("_", " ")
        PROGRAMS[name] = Program(body, unit, refused, in_four or refused, recomputed)
        return body

    return note


def first_at(place: int, first: Callable[[Tensor], Tensor]) -> Callable[[int], nn.Module]:
    return lambda index: Unit(first) if index == place else linear(index)


def through(m: Any, h: Tensor, start: int, stop: int = 4) -> Tensor:
    for index in range(start, stop):
        h = torch.tanh(m.l[index](h))
    return h


def through_all(m: Any, x: Tensor) -> Tensor:
    return through(m, x, 0)


def rows(samples: int = 4) -> Tensor:
    wave = torch.linspace(-1, 2, samples * WIDTH, dtype=torch.float64)
    return wave.reshape(samples, WIDTH).sin()


def make(body: Body, unit: Callable[[int], nn.Module] = linear) -> Model:
    torch.manual_seed(0)
    return Model(body, unit).double()


def score(output: Any, _: Any = None) -> Tensor:
    main: Tensor = output["out"] if isinstance(output, dict) else output
    return (main - 0.3).square().mean()


def between(name: str, stages: int = 4) -> Case:
    """A program on four microbatches of two samples, and how it is refused in so many stages."""
    body, unit, refused, in_four, _ = PROGRAMS[name]
    words = in_four if stages == 4 else refused
    batch = penstock.Microbatches([*rows(8).split(2)], samples=[2] * 4)
    loss = penstock.Loss(score, check=False)
    return Case(
        make(body, unit), [batch], None, loss, counts=lambda model: dict(model.called),
        refused=Refusal(PartitionError, words) if words else None,
    )  # fmt: skip


# ---- hooks

REMOVES = "uses 'remove' of what register_hook gives"


@program(refused=REMOVES)
def hooks(m: Any, x: Tensor) -> Tensor:
    h = m.l[0](x)
    if h.requires_grad:
        h.register_hook(m.hook("gives"))
    h = torch.tanh(m.l[1](h))
    if h.requires_grad:
        h.register_hook(m.hook("between"))
        h.register_hook(m.hook("removed")).remove()
    return m.l[3](m.l[2](h)) + h


@program(refused=REMOVES)
def a_hook_removed_in_a_later_stage(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.l[0](x))
    handle = h.register_hook(m.hook("removed")) if h.requires_grad else None
    h = through(m, h, 1, 3)
    if handle is not None:
        handle.remove()
    return m.l[3](h)


@program()
def hooks_on_what_changes(m: Any, x: Tensor) -> Tensor:
    h = m.l[0](x) * 1.0
    if h.requires_grad:
        h.register_hook(m.hook("before"))
    h.mul_(2)
    if h.requires_grad:
        h.register_hook(m.hook("after"))
        h.retain_grad()
    return through(m, h, 1)


@program(refused="uses 'register_prehook' of what grad_fn gives")
def hooks_on_parameters_and_nodes(m: Any, x: Tensor) -> Tensor:
    scale, clip = m.scale * 2, m.hook("node")
    if scale.requires_grad:
        scale.register_hook(m.hook("parameter"))
    h = torch.tanh(m.l[0](x) * scale)
    if h.grad_fn is not None:
        h.grad_fn.register_prehook(lambda grads: tuple(map(clip, grads)))
    return through(m, h * scale, 1) * scale


# ---- gradients that are missing


@program(first_at(2, lambda x: x.detach()))
def a_module_that_detaches(m: Any, x: Tensor) -> Tensor:
    return through(m, x, 0)


@program()
def a_gradient_is_asked_for(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        frozen, other = m.l[0](x), torch.tanh(m.l[0](x))
    before = torch.tanh(frozen)
    frozen.requires_grad_()
    other.requires_grad = True
    if torch.is_grad_enabled():
        frozen.register_hook(m.hook("asked"))
    return m.l[3](m.l[2](m.l[1](frozen) * other)) + before + frozen


@program()
def views_of_weights_without_a_gradient(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        row, turned = m.scale[None], m.l[1].weight.T
    h = m.l[1](m.l[0](x * m.scale[None])) * row @ turned
    return through(m, h, 2) * (row * m.scale[None])


@program()
def views_made_at_once_of_what_changes(m: Any, x: Tensor) -> Tensor:
    h = m.l[0](x)
    _column, *_ = h.unbind(1)
    y: Tensor = h.relu_()
    return through(m, h.clone(), 1) + y


@program()
def a_result_that_nobody_uses(m: Any, x: Tensor) -> dict[str, Tensor]:
    h = m.l[0](x)
    unused = torch.tanh(m.l[1](h))
    return {"out": m.l[3](h), "aux": m.l[2](unused), "detached": unused.detach()}


@program(first_at(2, torch.zeros_like))
def nothing_travels(m: Any, x: Tensor) -> Tensor:
    through(m, x, 0, 2)
    return m.l[3](m.l[2](x))


# ---- writes


BEFORE = "read through another that was made of it before"


@program(refused=r"between\.py.*copy_ in stage \d.*shares")
def overwritten_through_a_view(m: Any, x: Tensor) -> Tensor:
    h = m.l[0](x)
    lost = m.l[1](h)
    lost.view(-1, WIDTH).copy_(m.l[2](h))
    return m.l[3](lost) + h


@program(refused=BEFORE)
def writes_into_what_all_stages_have(m: Any, x: Tensor) -> Tensor:
    kept = x.new_zeros(len(x), 4, WIDTH)
    flat, h = kept.view(len(x), -1), x
    for index, unit in enumerate(m.l):
        row, h = kept[:, index], unit(h)
        row.copy_(h)
        kept.movedim(1, 0)[index].mul_(2)
    return kept.sum(1) + flat[:, 3:7]


@program(refused=BEFORE)
def writes_through_another(m: Any, x: Tensor) -> Tensor:
    kept = torch.zeros_like(x)
    kept.detach().copy_(m.l[0](x))
    return through(m, kept * 2, 1)


@program(first_at(0, Tensor.relu_))
def a_module_that_changes_an_argument_read_before(m: Any, x: Tensor) -> Tensor:
    before = torch.tanh(x)
    return through_all(m, x) + before


@program()
def fills_what_all_stages_have(m: Any, x: Tensor) -> Tensor:
    kept, h = x.new_zeros(2, *x.shape), m.l[0](x)
    kept[0] = h
    h = m.l[2](m.l[1](h))
    kept[1] = h
    kept.mul_(2)
    return m.l[3](h) + kept.sum(0)


class Shifts(nn.Module):
    """Its backward needs nothing of its input, which may be written into."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


@program(
    lambda index: Shifts() if index == 1 else linear(index),
)
def a_write_after_another_stage_has_used_it(m: Any, x: Tensor) -> Tensor:
    h = m.l[0](x) * 1
    h.add_(1)
    y = m.l[1](h)
    h.mul_(2)
    return m.l[3](m.l[2](y) + h)


@program()
def noise_of_a_function_that_draws_inside(m: Any, x: Tensor) -> Tensor:
    noise = nn.functional.gumbel_softmax(x)
    return through_all(m, x + noise) - noise


class Part(nn.Module):
    """Gives a view of what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH + 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.lin(x)[:, 1:-1]
        return output


@program(lambda index: Part())
def writes_through_temporary_views(m: Any, x: Tensor) -> Tensor:
    h = m.l[1](m.l[0](x))
    h.movedim(-1, 0)[1].add_(0.5)
    h[..., 0] = 0
    h.t()[2:, 1:].fill_(1)
    return m.l[3](m.l[2](h.clone())) + h


@program(lambda index: Part())
def writes_of_one_value_into_another(m: Any, x: Tensor) -> Tensor:
    w, v = m.l[0](x), m.l[1](x)
    v[..., 2] = w[..., 2]
    v[..., 1] = m.l[2](v.clone())[..., 1]
    return m.l[3](v.clone()) + w + v


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.movedim(-1, 0)[0].mul_(x.movedim(-1, 0)[0]),
    lambda x: x.detach().view(-1)[1:].sin_(),
]


class Afterwards(Unit):
    """Does something to its input when it has used it."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.lin(x.clone())
        self.first(x)
        return output


@program(
    lambda index: Afterwards(VIEWS[index]) if index < 2 else linear(index),
    in_four="writes into memory that .* shares",
)
def modules_that_change_arguments_through_views(m: Any, x: Tensor) -> Tensor:
    doubled = x * 2
    h, y = m.l[0](x), m.l[1](x[:1])
    m.l[0](doubled)
    return m.l[3](m.l[2](x + h + doubled)) + x + y


FIRST: list[Callable[[Tensor], Tensor]] = [relu, Tensor.relu_, nn.ReLU(inplace=True), Tensor.tanh_]


@program(lambda index: Unit(FIRST[index]))
def modules_that_begin_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.l[1](m.l[0](x).view(-1, WIDTH))
    y = m.l[2](h)
    return m.l[3](y) + h + y


@program(lambda index: [Part(), Unit(Tensor.relu_), linear(2), linear(3)][index])
def modules_that_change_a_part(m: Any, x: Tensor) -> Tensor:
    h = m.l[0](x)
    changed = m.l[1](h)
    return through(m, changed, 2) + h


@program(recomputed=True)
def parts_of_what_travels(m: Any, x: Tensor) -> Tensor:
    h = m.l[0](x)
    a, b = h.chunk(2)
    a = m.l[1](a).contiguous()
    a.mul_(2)
    h.t().contiguous().add_(1)
    return m.l[3](m.l[2](torch.cat([a, b]))) + h


@program(recomputed=True)
def rows_one_by_one(m: Any, x: Tensor) -> Tensor:
    return m.l[3](torch.stack([row * 2 for row in m.l[2](m.l[1](m.l[0](x)))]))


# ---- losses, checkpoints, custom functions


@program()
def losses(m: Any, x: Tensor) -> Tensor:
    h = m.l[0](x)
    penstock.add_loss("a", h.square().mean(), 0.1)
    penstock.add_loss("a", m.l[1](h).square().mean(), 0.3)
    penstock.add_loss("weight", m.scale.square().mean())
    penstock.add_loss("arguments", x.square().mean())
    return m.l[3](m.l[2](h))


@program()
def a_loss_of_what_nothing_else_uses(m: Any, x: Tensor) -> Tensor:
    h = m.l[0](x)
    aside = m.l[2](m.l[1](h))
    penstock.add_loss("aside", aside.square().mean())
    return m.l[3](h)


class AddsLoss(nn.Linear):
    """Adds a loss, and gives nothing that leads back."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        penstock.add_loss("inside", h.square().mean())
        return h.detach()


@program(lambda index: AddsLoss(WIDTH, WIDTH) if index == 2 else linear(index))
def a_loss_inside_of_what_gives_no_gradient(m: Any, x: Tensor) -> Tensor:
    return through_all(m, x)


@program()
def reentrant_checkpoints(m: Any, x: Tensor) -> Tensor:
    h: Tensor = m.l[0](x)
    for unit in m.l[1:]:
        h = checkpoint(unit, h, use_reentrant=True)
    return h


@program()
def checkpoints_of_an_argument(m: Any, x: Tensor) -> Tensor:
    def both(t: Tensor) -> Tensor:
        return torch.tanh(m.l[1](m.l[0](t)))

    # A reentrant one gives no gradient, since its argument needs none.
    h = checkpoint(both, x, use_reentrant=False) + 2 * checkpoint(both, x, use_reentrant=True)
    return through(m, h, 2)


@program(first_at(2, lambda x: x.relu_()))
def checkpoints_across_cuts(m: Any, x: Tensor) -> Tensor:
    def inner(t: Tensor) -> Tensor:
        return torch.tanh(m.l[1](t * m.scale))

    def outer(t: Tensor) -> Tensor:
        output: Tensor = m.l[2](checkpoint(inner, t, use_reentrant=False))
        return output

    h = m.l[0](x)
    h = checkpoint(outer, h, use_reentrant=False) + checkpoint(outer, h, use_reentrant=True)
    return m.l[3](h)


@program()
def a_checkpoint_of_what_another_stage_has_changed(m: Any, x: Tensor) -> Tensor:
    h = m.l[0](x).clone()
    h[..., 0] = 0
    h = checkpoint(lambda t: m.l[2](m.l[1](t)), h, use_reentrant=False)
    return m.l[3](h)


@program()
def a_checkpoint_that_uses_a_parameter_of_another_stage(m: Any, x: Tensor) -> Tensor:
    h = through(m, x * m.scale, 0, 2)
    return through(m, checkpoint(lambda t: m.l[2](t) * m.scale, h, use_reentrant=False), 3)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -ctx.scale * grads[0], None


@program()
def custom_functions(m: Any, x: Tensor) -> Tensor:
    reverse: Any = Reversed.apply
    h = reverse(m.l[0](x), 3.0)
    y = m.l[2](reverse(m.l[1](h), 0.5))
    return m.l[3](reverse(y, 2.0)) + h


NAMED: Any = Reversed.apply


@program(refused="the apply of a custom function that was given another name")
def another_name(m: Any, x: Tensor) -> Tensor:
    return through(m, NAMED(m.l[1](m.l[0](x)), 2.0), 2)


@program()
def a_frozen_teacher_beside_the_model(m: Any, x: Tensor) -> Tensor:
    return through_all(m, x) - TEACHER(x)


TEACHER = nn.Linear(WIDTH, WIDTH).double().requires_grad_(False)


# ---- state that the author's code changes


@program()
def counts_up(m: Any, x: Tensor) -> Any:
    m.count = getattr(m, "count", 0) + 1
    return through_all(m, x) * m.count


@program()
def halves_a_number(m: Any, x: Tensor) -> Any:
    m.share = getattr(m, "share", 1.0) / 2
    return through_all(m, x) * m.share


@program()
def counts_in_a_helper(m: Any, x: Tensor) -> Any:
    m.called["calls"] += 1
    return through_all(m, x) * m.called["calls"]


@program()
def counts_in_a_class(m: Any, x: Tensor) -> Any:
    type(m).count = getattr(type(m), "count", 0) + 1
    return through_all(m, x)


@program()
def counts_in_a_unit(m: Any, x: Tensor) -> Any:
    m.l[3].calls = getattr(m.l[3], "calls", 0) + 1
    return through_all(m, x) * m.l[3].calls


@program()
def changes_a_buffer(m: Any, x: Tensor) -> Tensor:
    return through(m, m.l[0](x) + m.mean.add_(x.mean(0)).clone(), 1)


@program(recomputed=True)
def resets_a_mask(m: Any, x: Tensor) -> Any:
    m.mask = (x > 0).to(x.dtype)
    h = through_all(m, x) * m.mask
    m.mask = None
    return h


@program(recomputed=True)
def makes_a_table_once(m: Any, x: Tensor) -> Any:
    if getattr(m, "table", None) is None:
        m.table = torch.arange(WIDTH).to(x.dtype)
    return through_all(m, x) * m.table


@program()
def sets_the_same_in_every_call(m: Any, x: Tensor) -> Any:
    m.places, m.shape = [0], tuple(x.shape[1:])
    h = through_all(m, x) * m.shape[0]
    m.places = [0]
    return h


@program(recomputed=True)
def converts_a_list_of_tables(m: Any, x: Tensor) -> Any:
    if not hasattr(m, "anchors"):  # as the constructor would
        m.anchors = [torch.arange(WIDTH, dtype=torch.float16)]
    m.anchors = [anchor.to(x.dtype) for anchor in m.anchors]
    return through_all(m, x) * m.anchors[0]


class Caches(nn.Linear):
    """Adds what it gave the last time; whoever calls it may empty the cache, or it does so itself."""

    cache: Any = None

    def __init__(self, _: int = 0, *, empties: bool = False) -> None:
        super().__init__(WIDTH, WIDTH)
        self.empties = empties

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(super().forward(x))
        h = h if self.cache is None else h + self.cache
        self.cache = None if self.empties and self.cache is not None else h
        return h


@program(Caches)
def empties_the_caches_of_units(m: Any, x: Tensor) -> Any:
    for unit in m.l:
        unit.cache = None
    for unit in m.l:
        x = unit(unit(x))
    for unit in m.l:
        unit.cache = None
    return x


@program()
def sets_a_buffer_once(m: Any, x: Tensor) -> Any:
    if m.table is None:
        m.table = torch.arange(WIDTH).to(x.dtype)
    return through_all(m, x) * m.table


class Applies(nn.Linear):
    """Applies a function that it is given."""

    def __init__(self, index: int) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(super().forward(x))


@program(Applies)
def functions_of_one_code(m: Any, x: Tensor) -> Any:
    for index in range(4):
        factor = index + 1.0
        x = m.l[index](x, lambda h: h[:, : 4 - index // 3] * factor)  # noqa: B023
    return x


@program(Applies)
def functions_with_other_defaults(m: Any, x: Tensor) -> Any:
    for index in range(4):
        x = m.l[index](x, lambda h, stop=4 - index // 3: h[:, :stop])
    return x


@program(Applies)
def functions_that_enclose_values(m: Any, x: Tensor) -> Any:
    h = x
    for unit in m.l:
        before = [h, h.sin()]
        h = unit(h, lambda h: torch.tanh(h) + before[0] * before[1])  # noqa: B023
    return h


# ---- numbers that decide, and what no stage has whole


NUMBERS = r"between.py:\d+\): the model's code needs numbers of a tensor of stage"


@program(refused=NUMBERS)
def decides(m: Any, x: Tensor) -> Tensor:
    h = m.l[1](m.l[0](x))
    return m.l[3](m.l[2](h) if h.sum() > 0 else h)


@program(refused=NUMBERS)
def takes_some_rows(m: Any, x: Tensor) -> Tensor:
    h = m.l[1](m.l[0](x))
    h = h[h[:, 0] > 0]
    return m.l[3](m.l[2](h)) / len(h)


@program()
def rows_at_the_end(m: Any, x: Tensor) -> Tensor:
    h = through_all(m, x)
    return torch.tanh(h[h[:, 0] > h[0, 0]].T).sum(1)


@program()
def the_shape_of_rows_at_the_end(m: Any, x: Tensor) -> Tensor:
    first = m.l[0](x)
    row, h = first[:1], through(m, torch.tanh(first), 1)
    kept = h[h[:, 0] >= h[0, 0]]
    return (row.expand_as(kept) * kept).sum(1)


@program(recomputed=True)
def a_number_at_the_end(m: Any, x: Tensor) -> Tensor:
    h = through_all(m, x)
    return h / (1 + h.detach().abs().max().item())


@program()
def a_number_at_the_end_after_a_write(m: Any, x: Tensor) -> Tensor:
    """As the losses of detectors do: targets are filled with what units gave, and a number decides."""
    h = through_all(m, x)
    kept = torch.zeros_like(x)
    kept[0] = h[0]
    kept += h
    return kept - h if h.detach().sum().item() > 0 else kept * h


@program()
def goes_on_as_long_as_a_number_says(m: Any, x: Tensor) -> Tensor:
    """A unit of the last stage, what draws and a custom function follow a number that units made."""
    reverse: Any = Reversed.apply
    h = through_all(m, x)
    while h.sum().item() < 0.5:
        h = m.l[3](nn.functional.dropout(reverse(h, 2.0), 0.5)) + 1
    return h


@program(recomputed=True)
def looks_at_arguments(m: Any, x: Tensor) -> Tensor:
    h = m.l[0](x)
    if x.min() < -5:
        raise AssertionError
    return through(m, h, 1) * (x.abs() < 3).all()


TRANSFORM = r"between.py:\d+\): the model calls sin under a transform of torch.func"


@program(refused=TRANSFORM)
def maps_after_a_write(m: Any, x: Tensor) -> Tensor:
    kept = torch.zeros_like(x)
    kept[0] = m.l[0](x)[0]
    return m.l[3](torch.vmap(torch.sin)(kept))


@program(refused="takes gradients between its units")
def takes_gradients(m: Any, x: Tensor) -> Tensor:
    h = m.l[1](m.l[0](x))
    return m.l[3](m.l[2](torch.autograd.grad(h.sum(), m.l[0].get_parameter("weight"))[0]))


@program(in_four="leave a stage without modules; the model's order is l.1, l.2, l.3, l.0")
def calls_in_another_order(m: Any, x: Tensor) -> Tensor:
    return m.l[0](m.l[3](m.l[2](m.l[1](x))))


# ---- what units keep, and share


class Shares(nn.Linear):
    """Leaves what it made for others, in an object that all have."""

    box: dict[str, Any]

    def __init__(self, index: int) -> None:
        super().__init__(WIDTH, WIDTH)
        self.index, self.__dict__["box"] = index, BOX

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        if self.index == 0:
            self.box["h"] = h
        return h + self.box["h"] if self.index == 3 else h


class Collects(Shares):
    def forward(self, x: Tensor) -> Tensor:
        h = nn.Linear.forward(self, x)
        Outside.items.append(h.square().mean())
        return h


class Holds(nn.Linear):
    """Adds to tensors that its attributes hold inside."""

    def __init__(self, _: int) -> None:
        super().__init__(WIDTH, WIDTH)
        zero = torch.zeros((), dtype=torch.float64)
        self.held = {
            "sum": zero,
            "nested": [zero.clone()],
            "state": SimpleNamespace(sum=zero.clone()),
        }

    def forward(self, x: Tensor) -> Tensor:
        held: Any = self.held
        h = super().forward(x) + held["sum"] * 2 - held["nested"][0] + held["state"].sum
        held["sum"].add_(1)
        held["nested"][0] += 1
        held["state"].sum += 0.5
        return h


@program(Holds)
def adds_to_tensors_inside_attributes(m: Any, x: Tensor) -> Tensor:
    return through_all(m, x)


class Outside:
    """A list that modules of a program fill, such as those of a mixture of experts."""

    items: ClassVar[list[Tensor]] = []


BOX: dict[str, Any] = {}
LEFT = "reads a value that l.0 in stage 0 left somewhere"


@program(Shares, refused=LEFT)
def leaves_a_tensor(m: Any, x: Tensor) -> Tensor:
    return through_all(m, x)


@program(Collects, refused=r"l.0 left in an attribute or a list.*penstock.add_loss")
def adds_what_was_collected(m: Any, x: Tensor) -> Any:
    Outside.items = []
    return through_all(m, x), sum(Outside.items)


class Table(nn.Module):
    """Makes a table at its first call, of numbers and a buffer, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("slope", torch.tensor(0.5))

    def forward(self) -> Any:
        if self.table is None:
            self.register_buffer("table", self.slope * torch.arange(WIDTH), persistent=False)
        return self.table


class Asks(nn.Linear):
    """Asks a table that all layers have."""

    def __init__(self, index: int) -> None:
        super().__init__(WIDTH, WIDTH)
        if not index:
            COMMON[:] = [Table()]
        self.table = COMMON[0]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.table()


COMMON: list[Table] = []


@program(Asks)
def asks_a_table_that_all_have(m: Any, x: Tensor) -> Tensor:
    return through_all(m, x)


KEPT: ContextVar[list[Tensor] | None] = ContextVar("KEPT", default=None)


class Keeps(nn.Linear):
    """Keeps what it makes inside, and what it gives, for the forward that it runs in."""

    def __init__(self, _: int) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = super().forward(x)
        x = x + torch.tanh(inner)
        kept = KEPT.get()
        if kept is not None:
            kept += [inner, x]
        return x


@program(Keeps)
def collects_in_a_context_variable(m: Any, x: Tensor) -> Tensor:
    token = KEPT.set([])
    x = through_all(m, x)
    kept = KEPT.get() or []
    KEPT.reset(token)
    return x[1:].reshape(-1, WIDTH) + kept[1][1:] * kept[-2][1:] + kept[2][1:]


class GivesBack(nn.Linear):
    def __init__(self, _: int) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, kept: list[Tensor]) -> Any:
        return super().forward(x), kept


@program(GivesBack)
def lists_that_layers_give_back(m: Any, x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for layer in m.l:
        x, kept = layer(torch.tanh(x), [x])
        total = total + kept[0].sin()
    return x + total


class Kept:
    """What a layer was given."""

    def __init__(self) -> None:
        self.all: Tensor | None = None

    def more(self, x: Tensor) -> Tensor:
        self.all = x if self.all is None else torch.cat([self.all, x])
        return self.all


class Chooses(nn.Module):
    """Keeps what it was given in a cache, and finds its experts by numbers."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({f"expert_{n}": nn.Linear(WIDTH, WIDTH) for n in range(2)})
        self.index = index

    def forward(self, x: Tensor, bias: Tensor, layers: list[Kept]) -> tuple[Tensor, Tensor]:
        x = x * layers[self.index].more(x) + bias
        for number in (x != 0).any().reshape(1).nonzero():
            x = x + self.experts[f"expert_{number[0]}"](x)
        return x, bias


@program(Chooses)
def fills_caches_of_layers_that_find_experts_by_numbers(m: Any, x: Tensor) -> Tensor:
    layers = [Kept() for _ in m.l]
    bias = torch.sin(m.l[0].experts["expert_1"](x))
    for layer in m.l:
        x, bias = layer(x, bias, layers)
    return x + bias


# ---- tensors of units that change later are taken as they were made


class Acts(nn.Module):
    """A linear layer, and what a program does around it."""

    def __init__(self, act: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.lin, self.act = nn.Linear(WIDTH, WIDTH), act
        self.register_buffer("scale", torch.ones(WIDTH))
        self.scale: Tensor
        self.codes, self.on = torch.ones(WIDTH), False

    def forward(self, x: Tensor, *rest: Any) -> Any:
        return self.lin(x) if self.act is None else self.act(self, x, *rest)


def acting(*acts: Callable[..., Any] | None) -> Callable[[int], nn.Module]:
    """The same for all units, or one for the first and so on."""
    some = [*acts, None, None, None] if len(acts) > 1 or not acts else [*acts] * 4
    return lambda index: Acts(some[index])


def scales(unit: Any, x: Tensor) -> Any:
    h = unit.lin(x)
    unit.scale.mul_(0.5).add_(h.detach().abs().mean())
    return h


def codes(unit: Any, x: Tensor) -> Any:
    h = unit.lin(x)
    unit.codes.add_(h.detach().abs().mean())
    return h


def gives_scale(unit: Any, x: Tensor) -> Any:
    return scales(unit, x), unit.scale


def gives_scale_expanded(unit: Any, x: Tensor) -> Any:
    h = scales(unit, x)
    return h, unit.scale.expand_as(h)


def gives_a_view(unit: Any, x: Tensor) -> Any:
    h = unit.lin(x)
    unit.codes.mul_(0).add_(h.detach().mean())
    return h, unit.codes[None]


@program(acting(scales, None))
def uses_a_buffer_as_made(m: Any, x: Tensor) -> Any:
    return through(m, m.l[0](x), 1) * m.l[0].scale


@program(acting(scales, None))
def uses_a_view_of_a_buffer_as_made(m: Any, x: Tensor) -> Any:
    return through(m, m.l[0](x), 1) * m.l[0].scale[None]


@program(acting(codes, None))
def uses_an_attribute_as_made(m: Any, x: Tensor) -> Any:
    return through(m, m.l[0](x), 1) * m.l[0].codes.double()


@program(acting(gives_scale, None))
def uses_a_buffer_that_it_was_given_as_made(m: Any, x: Tensor) -> Any:
    h, scale = m.l[0](x)
    return through(m, h, 1) * scale


@program(acting(gives_a_view, None))
def uses_a_view_that_it_was_given_as_made(m: Any, x: Tensor) -> Any:
    h, view = m.l[0](x)
    return through(m, h, 1) * view


@program(acting(None, None))
def uses_a_weight_as_made(m: Any, x: Tensor) -> Any:
    return through(m, m.l[0](x), 1) @ m.l[0].lin.weight


@program(acting(gives_scale_expanded, None))
def goes_back_through_a_buffer_that_changes_later(m: Any, x: Tensor) -> Any:
    h, scale = m.l[0](x)
    return through(m, m.l[1](h * scale) * m.l[0].scale, 2)


@program(acting(scales, None), refused=r"l\.0 in stage 0 changes l\.0\.scale", in_four="l.0")
def changes_a_buffer_after_another_stage_has_used_it(m: Any, x: Tensor) -> Any:
    used = torch.tanh(m.l[2](m.l[1](m.l[0](x)) * m.l[0].scale))
    return m.l[3](used * m.l[0].scale) + m.l[0](x)


# ---- objects that the forward makes and units change


class State:
    """What a program keeps in an object."""

    def __init__(self) -> None:
        self.n, self.h = 1, 0.0


def by_list(unit: Any, x: Tensor, c: Any) -> Any:
    c[0] += 1
    return unit.lin(x) * float(c[0])


def by_append(unit: Any, x: Tensor, c: Any) -> Any:
    c.append(x.shape[-1])
    return unit.lin(x) * len(c)


def by_pop(unit: Any, x: Tensor, c: Any) -> Any:
    return unit.lin(x) * c.pop()


def by_key(unit: Any, x: Tensor, c: Any) -> Any:
    c["n"] = c.get("n", 0) + 1
    return unit.lin(x) * c["n"]


def by_object(unit: Any, x: Tensor, c: Any) -> Any:
    c.n += 1
    return unit.lin(x) * c.n


def by_next(unit: Any, x: Tensor, c: Any) -> Any:
    return unit.lin(x) * next(c)


def by_tensor(unit: Any, x: Tensor, c: Any) -> Any:
    h = unit.lin(x) + c.get("h", 0.0)
    c["h"] = h * 0.5
    return h


def by_tensors(unit: Any, x: Tensor, c: Any) -> Any:
    c.append(unit.lin(x))
    return c[-1] + c[0]


def by_pairs(unit: Any, x: Tensor, c: Any) -> Any:
    """Puts another pair of as many things in the place of one, as a cache of keys and values does."""
    h = unit.lin(x)
    c[0] = (c[0][0] + h, c[0][1] + 1)
    return torch.tanh(c[0][0]) * c[0][1]


def by_tensor_of_object(unit: Any, x: Tensor, c: Any) -> Any:
    h = unit.lin(x) + c.h
    c.h = torch.tanh(h)
    return h


def by_set(unit: Any, x: Tensor, c: Any) -> Any:
    c.add(len(c))
    return unit.lin(x) * len(c)


def by_data(unit: Any, x: Tensor, c: Any) -> Any:
    c.append(float(x.detach().sum()))
    return unit.lin(x) * len(c)


def countdown() -> Iterator[int]:
    yield from (1, 2, 3, 4)


def by_call(unit: Any, x: Tensor, c: Any) -> Any:
    return c(unit.lin(x))


def counting() -> Callable[[Tensor], Tensor]:
    n = 0

    def scaled(x: Tensor) -> Tensor:
        nonlocal n
        n += 1
        return x * n

    return scaled


HANDED: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "a counter in a list": (lambda: [0], by_list, ""),
    "a list that grows": (list, by_append, ""),
    "a list that shrinks": (lambda: [1, 2, 3, 4], by_pop, ""),
    "a key": (dict, by_key, ""),
    "an attribute": (State, by_object, ""),
    "a tensor under a key": (dict, by_tensor, ""),
    "tensors in a list": (list, by_tensors, ""),
    "pairs in a list": (lambda: [(torch.zeros(()), 0)], by_pairs, ""),
    "a tensor of an object": (State, by_tensor_of_object, ""),
    "a set": (set, by_set, "gives l.0 a set that it changes"),
    "an array": (lambda: np.zeros(1), by_list, "gives l.0 a ndarray that it changes"),
    "count": (lambda: itertools.count(1), by_next, "gives l.0 an iterator"),
    "an iterator": (lambda: iter([1, 2, 3, 4]), by_next, "gives l.0 an iterator"),
    "a generator": (countdown, by_next, "gives l.0 an iterator"),
    "a function that counts": (
        counting,
        by_call,
        "gives l.0 a function that sets 'n' in the code around it",
    ),
    "a number that depends on data": (list, by_data, "l.0 in stage 0 gave .* in place of"),
}
"""What starts an object, what each unit does with it, and how that is refused, if it is."""


def handing(start: Callable[[], Any]) -> Body:
    def body(m: Any, x: Tensor) -> Any:
        c = start()
        for unit in m.l:
            x = torch.tanh(unit(x, c))
        return x

    return body


for name, (start, act, words) in HANDED.items():
    PROGRAMS[f"hands on {name}"] = Program(handing(start), acting(act), words, words, False)


def by_reading(unit: Any, x: Tensor, c: Any) -> Any:
    return torch.tanh(unit.lin(x) * len(c) + sum(c))


@program(acting(by_reading), recomputed=True)
def fills_a_list_that_units_read(m: Any, x: Tensor) -> Any:
    c: list[Tensor] = []
    for unit in m.l:
        c.append(x.mean(0))
        x = unit(x, c)
    return x


@program(acting(by_key))
def hands_on_an_object_with_an_argument_in_it(m: Any, x: Tensor) -> Any:
    c: dict[str, Any] = {"x": x, "n": 0}
    for unit in m.l:
        x = torch.tanh(unit(x, c)) + c["x"]
    return x * c["n"]


@program(acting(by_list))
def sees_what_units_made_of_an_object(m: Any, x: Tensor) -> Any:
    c = [0]
    h = m.l[1](m.l[0](x, c), c) * c[0]
    return m.l[3](m.l[2](h, c), c) * c[0]


# ---- what the author's code leaves for the next call


@program()
def leaves_what_nobody_reads(m: Any, x: Tensor) -> Any:
    m.deltas = x.mean(0)
    return through_all(m, x) + m.deltas


@program()
def turns_a_switch_in_every_call(m: Any, x: Tensor) -> Any:
    m.turned = not getattr(m, "turned", False)
    return through_all(m, x) * (2 if m.turned else 1)


@program()
def keeps_what_the_first_microbatch_left(m: Any, x: Tensor) -> Any:
    if getattr(m, "first", None) is None:
        m.first = x.mean()
    return through_all(m, x) * m.first


# ---- results


LATER = r"the Model's forward .*between.py.* returns a "


@program(refused=LATER + "generator")
def returns_a_generator(m: Any, x: Tensor) -> Any:
    h = through_all(m, x)
    return (row for row in h)


@program(refused=LATER + "map")
def returns_a_map(m: Any, x: Tensor) -> Any:
    return map(torch.sin, through_all(m, x))


@program(refused=LATER + "zip")
def returns_a_zip(m: Any, x: Tensor) -> Any:
    h = through_all(m, x)
    return zip(h, h, strict=True)


@program()
def checkpoints_the_forwards_of_units(m: Any, x: Tensor) -> Any:
    h = m.l[0](x)
    for place, unit in enumerate(m.l[1:]):
        h = checkpoint(unit.forward, h, use_reentrant=bool(place % 2))
    return h
