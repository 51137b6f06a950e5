"""What a forward does between its units happens once, in the stage it belongs to, or is refused by name."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import relu
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import PartitionError
from penstock.partition import partition
from tests.partition.driver import backwards, check_equal, cut, forwards, square_mean

WIDTH, SAMPLES = 4, 4
Body = Callable[["Model", Tensor], Any]


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
        PROGRAMS[body.__name__] = Program(body, unit, refused, in_four or refused, recomputed)
        return body

    return note


def first_at(place: int, first: Callable[[Tensor], Tensor]) -> Callable[[int], nn.Module]:
    return lambda index: Unit(first) if index == place else linear(index)


def through(m: Model, h: Tensor, start: int, stop: int = 4) -> Tensor:
    for index in range(start, stop):
        h = torch.tanh(m.l[index](h))
    return h


def through_all(m: Model, x: Tensor) -> Tensor:
    return through(m, x, 0)


# ---- hooks

REMOVES = "uses 'remove' of what register_hook gives"


@program(refused=REMOVES)
def hooks(m: Model, x: Tensor) -> Tensor:
    h = m.l[0](x)
    if h.requires_grad:
        h.register_hook(m.hook("gives"))
    h = torch.tanh(m.l[1](h))
    if h.requires_grad:
        h.register_hook(m.hook("between"))
        h.register_hook(m.hook("removed")).remove()
    return m.l[3](m.l[2](h)) + h  # type: ignore[no-any-return]


@program(refused=REMOVES)
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


@program(refused="uses 'register_prehook' of what grad_fn gives")
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


# ---- writes


BEFORE = "read through another that was made of it before"


@program(refused=r"test_between\.py.*copy_ in stage \d.*shares")
def overwritten_through_a_view(m: Model, x: Tensor) -> Tensor:
    h = m.l[0](x)
    lost = m.l[1](h)
    lost.view(-1, WIDTH).copy_(m.l[2](h))
    return m.l[3](lost) + h  # type: ignore[no-any-return]


@program(refused=BEFORE)
def writes_into_what_all_stages_have(m: Model, x: Tensor) -> Tensor:
    kept = x.new_zeros(len(x), 4, WIDTH)
    flat, h = kept.view(len(x), -1), x
    for index, unit in enumerate(m.l):
        row, h = kept[:, index], unit(h)
        row.copy_(h)
        kept.movedim(1, 0)[index].mul_(2)
    return kept.sum(1) + flat[:, 3:7]


@program(refused=BEFORE)
def writes_through_another(m: Model, x: Tensor) -> Tensor:
    kept = torch.zeros_like(x)
    kept.detach().copy_(m.l[0](x))
    return through(m, kept * 2, 1)


@program(first_at(0, Tensor.relu_))
def a_module_that_changes_an_argument_read_before(m: Model, x: Tensor) -> Tensor:
    before = torch.tanh(x)
    return through_all(m, x) + before


class GivesArgument(nn.Linear):
    """Gives a part of its argument itself, beside a result."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x[:, 1:]


@program()
def fills_what_all_stages_have(m: Model, x: Tensor) -> Tensor:
    kept, h = x.new_zeros(2, *x.shape), m.l[0](x)
    kept[0] = h
    h = m.l[2](m.l[1](h))
    kept[1] = h
    kept.mul_(2)
    return m.l[3](h) + kept.sum(0)  # type: ignore[no-any-return]


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
def a_write_after_another_stage_has_used_it(m: Model, x: Tensor) -> Tensor:
    h = m.l[0](x) * 1
    h.add_(1)
    y = m.l[1](h)
    h.mul_(2)
    return m.l[3](m.l[2](y) + h)  # type: ignore[no-any-return]


@program()
def noise_of_a_function_that_draws_inside(m: Model, x: Tensor) -> Tensor:
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
def writes_through_temporary_views(m: Model, x: Tensor) -> Tensor:
    h = m.l[1](m.l[0](x))
    h.movedim(-1, 0)[1].add_(0.5)
    h[..., 0] = 0
    h.t()[2:, 1:].fill_(1)
    return m.l[3](m.l[2](h.clone())) + h  # type: ignore[no-any-return]


@program(lambda index: Part())
def writes_of_one_value_into_another(m: Model, x: Tensor) -> Tensor:
    w, v = m.l[0](x), m.l[1](x)
    v[..., 2] = w[..., 2]
    v[..., 1] = m.l[2](v.clone())[..., 1]
    return m.l[3](v.clone()) + w + v  # type: ignore[no-any-return]


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
def modules_that_change_arguments_through_views(m: Model, x: Tensor) -> Tensor:
    doubled = x * 2
    h, y = m.l[0](x), m.l[1](x[:1])
    m.l[0](doubled)
    return m.l[3](m.l[2](x + h + doubled)) + x + y  # type: ignore[no-any-return]


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


@program(recomputed=True)
def parts_of_what_travels(m: Model, x: Tensor) -> Tensor:
    h = m.l[0](x)
    a, b = h.chunk(2)
    a = m.l[1](a).contiguous()
    a.mul_(2)
    h.t().contiguous().add_(1)
    return m.l[3](m.l[2](torch.cat([a, b]))) + h  # type: ignore[no-any-return]


@program(recomputed=True)
def rows_one_by_one(m: Model, x: Tensor) -> Tensor:
    return m.l[3](torch.stack([row * 2 for row in m.l[2](m.l[1](m.l[0](x)))]))  # type: ignore[no-any-return]


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
def a_loss_of_what_nothing_else_uses(m: Model, x: Tensor) -> Tensor:
    h = m.l[0](x)
    aside = m.l[2](m.l[1](h))
    penstock.add_loss("aside", aside.square().mean())
    return m.l[3](h)  # type: ignore[no-any-return]


class AddsLoss(nn.Linear):
    """Adds a loss, and gives nothing that leads back."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        penstock.add_loss("inside", h.square().mean())
        return h.detach()


@program(lambda index: AddsLoss(WIDTH, WIDTH) if index == 2 else linear(index))
def a_loss_inside_of_what_gives_no_gradient(m: Model, x: Tensor) -> Tensor:
    return through_all(m, x)


@program()
def reentrant_checkpoints(m: Model, x: Tensor) -> Tensor:
    h: Tensor = m.l[0](x)
    for unit in m.l[1:]:
        h = checkpoint(unit, h, use_reentrant=True)
    return h


@program()
def checkpoints_of_an_argument(m: Model, x: Tensor) -> Tensor:
    def both(t: Tensor) -> Tensor:
        return torch.tanh(m.l[1](m.l[0](t)))

    # A reentrant one gives no gradient, since its argument needs none.
    h = checkpoint(both, x, use_reentrant=False) + 2 * checkpoint(both, x, use_reentrant=True)
    return through(m, h, 2)


@program(first_at(2, lambda x: x.relu_()))
def checkpoints_across_cuts(m: Model, x: Tensor) -> Tensor:
    def inner(t: Tensor) -> Tensor:
        return torch.tanh(m.l[1](t * m.scale))

    def outer(t: Tensor) -> Tensor:
        output: Tensor = m.l[2](checkpoint(inner, t, use_reentrant=False))
        return output

    h = m.l[0](x)
    h = checkpoint(outer, h, use_reentrant=False) + checkpoint(outer, h, use_reentrant=True)
    return m.l[3](h)  # type: ignore[no-any-return]


@program()
def a_checkpoint_of_what_another_stage_has_changed(m: Model, x: Tensor) -> Tensor:
    h = m.l[0](x).clone()
    h[..., 0] = 0
    h = checkpoint(lambda t: m.l[2](m.l[1](t)), h, use_reentrant=False)
    return m.l[3](h)  # type: ignore[no-any-return]


@program()
def a_checkpoint_that_uses_a_parameter_of_another_stage(m: Model, x: Tensor) -> Tensor:
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
def custom_functions(m: Model, x: Tensor) -> Tensor:
    reverse: Any = Reversed.apply
    h = reverse(m.l[0](x), 3.0)
    y = m.l[2](reverse(m.l[1](h), 0.5))
    return m.l[3](reverse(y, 2.0)) + h  # type: ignore[no-any-return]


NAMED: Any = Reversed.apply


@program(refused="the apply of a custom function that was given another name")
def another_name(m: Model, x: Tensor) -> Tensor:
    return through(m, NAMED(m.l[1](m.l[0](x)), 2.0), 2)


@program()
def a_frozen_teacher_beside_the_model(m: Model, x: Tensor) -> Tensor:
    return through_all(m, x) - TEACHER(x)  # type: ignore[no-any-return]


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
def changes_a_buffer(m: Model, x: Tensor) -> Tensor:
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


# ---- numbers that decide, and what no stage has whole


NUMBERS = r"test_between.py:\d+\): the model's code needs numbers of a tensor of stage"


@program(refused=NUMBERS)
def decides(m: Model, x: Tensor) -> Tensor:
    h = m.l[1](m.l[0](x))
    return m.l[3](m.l[2](h) if h.sum() > 0 else h)  # type: ignore[no-any-return]


@program(refused=NUMBERS)
def takes_some_rows(m: Model, x: Tensor) -> Tensor:
    h = m.l[1](m.l[0](x))
    h = h[h[:, 0] > 0]
    return m.l[3](m.l[2](h)) / len(h)  # type: ignore[no-any-return]


@program()
def rows_at_the_end(m: Model, x: Tensor) -> Tensor:
    h = through_all(m, x)
    return torch.tanh(h[h[:, 0] > h[0, 0]].T).sum(1)


@program()
def the_shape_of_rows_at_the_end(m: Model, x: Tensor) -> Tensor:
    first = m.l[0](x)
    row, h = first[:1], through(m, torch.tanh(first), 1)
    kept = h[h[:, 0] >= h[0, 0]]
    return (row.expand_as(kept) * kept).sum(1)  # type: ignore[no-any-return]


@program(recomputed=True)
def a_number_at_the_end(m: Model, x: Tensor) -> Tensor:
    h = through_all(m, x)
    return h / (1 + h.detach().abs().max().item())


@program(recomputed=True)
def looks_at_arguments(m: Model, x: Tensor) -> Tensor:
    h = m.l[0](x)
    if x.min() < -5:
        raise AssertionError
    return through(m, h, 1) * (x.abs() < 3).all()


TRANSFORM = r"test_between.py:\d+\): the model calls sin under a transform of torch.func"


@program(refused=TRANSFORM)
def maps_after_a_write(m: Model, x: Tensor) -> Tensor:
    kept = torch.zeros_like(x)
    kept[0] = m.l[0](x)[0]
    return m.l[3](torch.vmap(torch.sin)(kept))  # type: ignore[no-any-return]


@program(refused="takes gradients between its units")
def takes_gradients(m: Model, x: Tensor) -> Tensor:
    h = m.l[1](m.l[0](x))
    return m.l[3](m.l[2](torch.autograd.grad(h.sum(), m.l[0].get_parameter("weight"))[0]))  # type: ignore[no-any-return]


@program(in_four="leave a stage without modules; the model's order is l.1, l.2, l.3, l.0")
def calls_in_another_order(m: Model, x: Tensor) -> Tensor:
    return m.l[0](m.l[3](m.l[2](m.l[1](x))))  # type: ignore[no-any-return]


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


class Counts(Shares):
    def forward(self, x: Tensor) -> Tensor:
        self.box["n"] = self.box.get("n", 0) + 1
        return nn.Linear.forward(self, x) * int(self.box["n"])


class Collects(Shares):
    def forward(self, x: Tensor) -> Tensor:
        h = nn.Linear.forward(self, x)
        Outside.items.append(h.square().mean())
        return h


class Outside:
    """A list that modules of a program fill, such as those of a mixture of experts."""

    items: ClassVar[list[Tensor]] = []


BOX: dict[str, Any] = {}
LEFT = "reads a value that l.0 in stage 0 left somewhere"


@program(Shares, refused=LEFT)
def leaves_a_tensor(m: Model, x: Tensor) -> Tensor:
    return through_all(m, x)


@program(Counts)
def leaves_a_number(m: Model, x: Tensor) -> Tensor:
    return through_all(m, x)


@program(Collects, refused=r"l.0 left in an attribute or a list.*penstock.add_loss")
def adds_what_was_collected(m: Model, x: Tensor) -> Any:
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
        return super().forward(x) * self.table()  # type: ignore[no-any-return]


COMMON: list[Table] = []


@program(Asks)
def asks_a_table_that_all_have(m: Model, x: Tensor) -> Tensor:
    return through_all(m, x)


# ---- each program as the plain model, or refused


def score(output: Any) -> Tensor:
    main: Tensor = output["out"] if isinstance(output, dict) else output
    return (main - 0.3).square().mean()


def rows() -> Tensor:
    wave = torch.linspace(-1, 2, SAMPLES * WIDTH, dtype=torch.float64)
    return wave.reshape(SAMPLES, WIDTH).sin()


def make(body: Body, unit: Callable[[int], nn.Module] = linear) -> Model:
    torch.manual_seed(0)
    return Model(body, unit).double()


def held(model: nn.Module) -> list[dict[str, Any]]:
    return [{**vars(module), "box": dict(BOX)} for module in model.modules()]


# Torch says so of a reentrant checkpoint in evaluation, in the plain model too.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("cuts", [["l.1", "l.2", "l.3"], ["l.2"]], ids=len)
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_the_plain_model_or_refused(name: str, cuts: list[str]) -> None:
    body, unit, refused, in_four, recomputed = PROGRAMS[name]
    model = make(body, unit)
    words = refused if len(cuts) == 1 else in_four
    if words:
        before = held(model)
        with pytest.raises(PartitionError, match=words):
            cut(model, cuts, (rows(),))
        assert held(model) == before
        # In one stage the model runs as it is.
        forwards(partition(make(body, unit), 1), (rows(),))
        BOX.clear()
        return
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"score": score, "draws": True, "tolerance": 1e-12}
    check_equal(model, cuts, (rows(),), **options)
    (score(plain(rows())) + 0).backward()
    assert model.called == plain.called
    if recomputed:
        check_equal(make(body, unit), cuts, (rows(),), repeat=2, recompute=True, **options)


def test_numbers_may_not_decide_just_before_the_last_stage() -> None:
    with pytest.raises(PartitionError, match=NUMBERS):
        cut(make(decides), ["l.2"], (rows(),))


@pytest.mark.parametrize("folder", ["torch", "penstock"])
def test_lines_are_the_authors_though_their_folder_is_called_like_a_library(folder: str) -> None:
    names: dict[str, Any] = {}
    code = "def body(m, x):\n    return m.l[3](m.l[2](x) if m.l[0](x).sum() > 0 else x)\n"
    exec(compile(code, f"/home/someone/{folder}/train.py", "exec"), names)
    with pytest.raises(PartitionError, match=r"train\.py:2\): the model's code needs numbers"):
        cut(make(names["body"]), ["l.2"], (rows(),))


# ---- state that a forward advances


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        return self.calls


class Advancing(nn.Module):
    """Takes from an iterator in each call, and keeps what a list holds."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.ModuleList(map(linear, range(4)))
        self.factors, self.counts = itertools.cycle((1.0, 0.5)), [0]

    def forward(self, x: Tensor) -> Tensor:
        return through_all(self, x) * next(self.factors)  # type: ignore[arg-type]


class Aliases(Advancing):
    def forward(self, x: Tensor) -> Tensor:
        counts = self.counts
        counts[0] += 1
        return through_all(self, x)  # type: ignore[arg-type]


# ---- numbers of the arguments, which the run without data takes for ones


def is_one(x: Tensor) -> bool:
    return bool((x == 1).all())


class Sometimes(Unit):
    """Changes its input if it does not like it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if is_one(x) else x.relu_())


def returns_what_was_changed(m: Model, x: Tensor) -> Any:
    kept = x * 2 if is_one(x) else x
    return through_all(m, x) + kept


def gives_another(m: Model, x: Tensor) -> Any:
    ones, h = is_one(x), m.l[0](x.clone())
    y = m.l[1](h.detach())
    return through(m, y if ones else h, 2)


@pytest.mark.parametrize("body", [returns_what_was_changed, gives_another])
def test_code_between_units_may_decide_by_the_numbers_of_arguments(body: Body) -> None:
    for x in (torch.ones(4, WIDTH).double(), rows()):
        check_equal(make(body), ["l.1", "l.3"], (x,))


# ---- what a unit keeps in attributes


class Notes(nn.Linear):
    """Keeps what it was given, what it gives, and numbers."""

    other: Any = None
    reads = ""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        self.given, self.loss, self.number = x, h.square().mean(), float(h.detach().mean())
        self.calls = getattr(self, "calls", 0) + 1
        self.scale = self.calls
        read = getattr(self.other[0], self.reads) if self.other else 0
        return h * self.scale + torch.as_tensor(read).sum()

    def __init__(self, index: int) -> None:
        super().__init__(WIDTH, WIDTH)


def a_loss_that_reads(unit: int, name: str, model: Any) -> Any:
    return lambda output, _=None: (
        output.mean() + torch.as_tensor(getattr(model.l[unit], name)).sum()
    )


@pytest.mark.parametrize("name", ["given", "loss", "number", "calls", "scale"])
def test_what_a_unit_keeps_is_for_its_stage_alone(name: str) -> None:
    model = make(through_all, Notes)
    vars(model).update(
        body=lambda m, x: through_all(m, x) * torch.as_tensor(getattr(m.l[0], name)).sum()
    )
    if name in ("given", "loss"):  # a tensor travels
        check_equal(model, ["l.1", "l.3"], (rows(),))
    else:
        with pytest.raises(PartitionError, match=f"the model uses the attribute '{name}' of l.0"):
            cut(model, ["l.1", "l.3"], (rows(),))
    model = make(through_all, Notes)
    vars(model.l[3]).update(other=(model.l[0],), reads=name)
    if name != "given":  # an argument of the model, which all stages have
        says = r"l.3 in stage 2 reads a value that l.0 in stage 0 left"
        with pytest.raises(PartitionError, match=says):
            cut(model, ["l.1", "l.3"], (rows(),))
        model = make(through_all, Notes)
        vars(model.l[3]).update(other=(model.l[2],), reads=name)
        check_equal(model, ["l.2"], (rows(),))


@pytest.mark.parametrize("empties", [True, False])
def test_calls_that_share_what_a_unit_keeps_are_in_one_stage(empties: bool) -> None:
    class Rounds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Caches(empties=empties), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            self.one.cache = None
            return self.other(self.one(self.other(self.one(x))))  # type: ignore[no-any-return]

    pipe = penstock.Pipeline(Rounds(), ranks=2, microbatches=2, loss_fn=nn.functional.mse_loss)
    with pipe, pytest.raises(PartitionError, match=r"one in stage 1 reads .* one in stage 0 left"):
        pipe.step(rows(), target=rows())


class Masked(nn.Module):
    """Checks its labels, which may not be alike, and compares the rows that have one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if (labels == labels[0]).all():
            raise ValueError("degenerate labels")
        mask = labels >= 0
        h: Tensor = self.last(torch.tanh(self.first(x)))
        if h[mask.unsqueeze(1).expand_as(h)].numel() != int(mask.sum()) * WIDTH:
            raise ValueError("other rows")
        return (h[mask] - labels[mask].unsqueeze(1)).square().mean()


def test_rows_that_the_numbers_of_an_argument_choose() -> None:
    model, labels = Masked().double(), torch.tensor([1.0, -1.0, 0.0, 2.0]).double()
    parts = zip(rows().chunk(2), labels.chunk(2), strict=True)
    expected = sum(model(*part).item() / 2 for part in parts)
    pipe = penstock.Pipeline(
        model,
        ranks=2,
        microbatches=2,
        loss_fn=penstock.Loss(lambda loss, _: loss, check=False),
    )
    with pipe:
        assert pipe.step(rows(), labels, target=labels).loss == pytest.approx(expected, rel=1e-12)


class Strict(nn.Module):
    """A heavy part whose own code fails on made-up numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64 * WIDTH)
        self.back = nn.Linear(64 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        if (gate == 1).all():
            raise ValueError("a gate of ones")
        back: Tensor = self.back(self.wide(x)) * gate
        return back


class Picks(Strict):
    """A heavy part whose own code goes by the numbers of its parts."""

    def forward(self, x: Tensor) -> Tensor:
        gate, back = self.gate(x), self.back(self.wide(x))
        output: Tensor = self.back(self.wide(back)) * gate if gate.sum() > 0 else back
        return output


class Around(nn.Module):
    """Light parts, and a heavy one."""

    def __init__(self, heavy: nn.Module) -> None:
        super().__init__()
        self.first, self.heavy, self.last = linear(0), heavy, linear(1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.heavy(self.first(x)))
        return output


@pytest.mark.parametrize("heavy", [Strict, Picks])
def test_a_heavy_part_stays_whole_whose_code_goes_by_numbers(heavy: type[nn.Module]) -> None:
    model = Around(heavy()).double()
    parts = zip(rows().chunk(2), rows().chunk(2), strict=True)
    expected = sum(nn.functional.mse_loss(model(x), y).item() / 2 for x, y in parts)
    pipe = penstock.Pipeline(model, ranks=2, microbatches=2, loss_fn=nn.functional.mse_loss)
    with pipe:
        assert pipe.step(rows(), target=rows()).loss == pytest.approx(expected, rel=1e-12)
    assert "heavy" in pipe.units


KEPT: ContextVar[list[Tensor] | None] = ContextVar("KEPT", default=None)


class Keeps(nn.Linear):
    """A layer that keeps what it makes inside, and what it gives, for the forward that it runs in."""

    def __init__(self, index: int) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = super().forward(x)
        x = x + torch.tanh(inner)
        kept = KEPT.get()
        if kept is not None:
            kept += [inner, x]
        return x


def collecting(model: Model, x: Tensor) -> Tensor:
    if int(torch.ones(1).item()) != 1:  # a number that decides
        return x
    token = KEPT.set([])
    x = through_all(model, x)
    kept = KEPT.get() or []
    KEPT.reset(token)
    return x[1:].reshape(-1, WIDTH) + kept[1][1:] * kept[-2][1:] + kept[2][1:]


@pytest.mark.parametrize("cuts", [["l.2"], ["l.1", "l.3"], ["l.1", "l.2", "l.3"]])
def test_what_layers_put_into_a_context_variable_reaches_the_last_stage(cuts: list[str]) -> None:
    model = make(collecting, Keeps)
    check_equal(model, cuts, (rows(),))


class Chooses(nn.Module):
    """A layer that keeps what it was given in a cache, and finds its experts by numbers."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({f"expert_{n}": nn.Linear(WIDTH, WIDTH) for n in range(2)})
        self.index = index

    def forward(self, x: Tensor, bias: Tensor, layers: list[Kept]) -> tuple[Tensor, Tensor]:
        x = x * layers[self.index].more(x) + bias
        for number in (x != 0).any().reshape(1).nonzero():
            x = x + self.experts[f"expert_{number[0]}"](x)
        return x, bias


class Kept:
    """What a layer was given."""

    def __init__(self) -> None:
        self.all: Tensor | None = None

    def more(self, x: Tensor) -> Tensor:
        self.all = x if self.all is None else torch.cat([self.all, x])
        return self.all


def through_caches(model: Model, x: Tensor) -> Tensor:
    layers = [Kept() for _ in model.l]
    bias = torch.sin(model.l[0].experts["expert_1"](x))  # type: ignore[index, operator]
    for layer in model.l:
        x, bias = layer(x, bias, layers)
    return x + bias


def test_layers_that_find_experts_by_numbers_fill_their_caches_once() -> None:
    check_equal(make(through_caches, Chooses), ["l.1", "l.2", "l.3"], (rows(),))


@pytest.mark.parametrize("name", ["given", "loss", "number", "calls", "scale"])
def test_a_loss_may_read_what_the_last_stage_keeps(name: str) -> None:
    model, plain = (make(through_all, Notes) for _ in range(2))
    pipe = penstock.Pipeline(
        model, stages=["l.2"], ranks=2, microbatches=2, loss_fn=a_loss_that_reads(3, name, model)
    )
    loss = a_loss_that_reads(3, name, plain)
    expected = sum(loss(plain(half)).item() / 2 for half in rows().chunk(2))
    assert pipe.step(rows()).loss == pytest.approx(expected, abs=1e-12)
    model = make(through_all, Notes)
    pipe = penstock.Pipeline(
        model, stages=["l.2"], ranks=2, microbatches=2, loss_fn=a_loss_that_reads(0, name, model)
    )
    with pytest.raises(penstock.errors.PenstockError, match=f"{name}' of l.0.*penstock.add_loss"):
        pipe.step(rows())


def test_a_loss_that_counts_is_not_called_for_a_trial() -> None:
    class Annealed:
        calls = 0

        def __call__(self, output: Tensor, target: Any = None) -> Tensor:
            self.calls += 1
            return output.mean()

    loss = Annealed()
    pipe = penstock.Pipeline(
        make(through_all), stages=["l.2"], ranks=2, microbatches=2, loss_fn=loss
    )
    pipe.step(rows())
    assert loss.calls == 2


# ---- hooks of modules


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
        output: Tensor = self.pair(h * 1) + self.act(h) + early + self.pair[1](early)
        return output

    def listen(self, heard: list[Any]) -> None:
        """Set all kinds of hooks; they note what they hear of it."""

        def hear(name: str) -> Callable[..., None]:
            def note(*arguments: Any) -> None:
                heard.append((name, [float(t.detach().sum()) for t in tensors(arguments[-1])]))

            return note

        def tensors(value: Any) -> list[Tensor]:
            return [t for t in (value if isinstance(value, tuple) else [value]) if t is not None]

        for name in ("act", "drop", "early", "pair", "pair.1", "l.0", "l.2"):
            module = self.get_submodule(name)
            module.register_forward_pre_hook(hear(f"{name} comes"))
            module.register_forward_hook(hear(f"{name} goes"))
        for name in ("act", "drop", "l.1", "l.3"):
            module = self.get_submodule(name)
            module.register_full_backward_pre_hook(hear(f"{name} comes back"))
            module.register_full_backward_hook(hear(f"{name} goes back"))


def test_hooks_hear_once_what_they_hear_in_the_plain_model() -> None:
    torch.manual_seed(0)
    plain = Hooked().double().eval()
    model, heard, expected = copy.deepcopy(plain), list[Any](), list[Any]()
    parts = cut(model, ["l.1", "l.3"], (rows(),))
    for listens in (False, True):
        if listens:
            plain.listen(expected)
            model.listen(heard)
        square_mean(plain(rows())).backward()
        done = forwards(parts, (rows(),))
        backwards(done, square_mean(done.output))
    assert sorted(name for name, _ in heard) == sorted(name for name, _ in expected)
    for mine, theirs in zip(sorted(heard), sorted(expected), strict=True):
        assert mine[1] == pytest.approx(theirs[1], abs=1e-12)


def test_backward_hooks_of_a_module_in_parts() -> None:
    model = nn.Sequential(make(through_all), nn.Linear(WIDTH, WIDTH).double())
    model[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(PartitionError, match=r"0 has backward hooks, and its parts are placed by"):
        cut(model, ["0.l.2"], (rows(),))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_scripted_units() -> None:
    torch.manual_seed(0)
    plain = make(through_all)
    model = copy.deepcopy(plain)
    model.l[1] = torch.jit.script(model.l[1])
    pipe = penstock.Pipeline(
        model, stages=["l.1", "l.3"], ranks=3, microbatches=1, loss_fn=torch.dist
    )
    assert torch.equal(pipe.predict(rows()), plain(rows()))


class Recurrent(nn.Module):
    """Passes a packed sequence from unit to unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        packed = self.second(self.first(packed)[0])[0]
        return pad_packed_sequence(packed, batch_first=True)[0]


class Encoder(nn.Module):
    """Enters torch's encoder, which has a path of its own for padded batches in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 4, 0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        output: Tensor = self.head(self.encoder(x, src_key_padding_mask=padding))
        return output


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_that_drops_padding_in_evaluation() -> None:
    model = Encoder().double()
    x, padding = rows()[None, :, :].clone(), torch.tensor([[False, False, True, True]])
    parts = cut(model, ["encoder.layers.1"], (x, padding))
    check_equal(model, lambda m: parts, (x, padding))
    with torch.no_grad():
        model.eval()
        with pytest.raises(PartitionError, match=r"encoder.*padded.*use_nested_tensor = False"):
            parts.plan((x, padding), {})
        whole = forwards(partition(model, [["encoder"], ["head"]]), (x, padding))
        assert torch.equal(whole.output, model(x, padding))
        model.encoder.use_nested_tensor = False
        assert torch.equal(forwards(parts, (x, padding)).output, model(x, padding))


def test_compiled_parts_that_are_taken_apart_are_named() -> None:
    inner = make(through_all)
    inner.compile(backend="eager")
    with pytest.raises(PartitionError, match=r"0 \(a Model\) was compiled as a whole"):
        cut(nn.Sequential(inner, nn.Linear(WIDTH, WIDTH)), ["0.l.2"], (rows(),))


def test_hooks_on_the_whole_models_state_run() -> None:
    def double(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        state.update({name: value * 2 for name, value in state.items()})

    model, plain = make(through_all), make(through_all)
    state = copy.deepcopy(plain.state_dict())
    for one in (model, plain):
        one.register_load_state_dict_pre_hook(double)  # type: ignore[no-untyped-call]
    penstock.Pipeline(model, stages=["l.2"], ranks=2, loss_fn=torch.sub).weights.load_state_dict(
        state
    )
    plain.load_state_dict(state)
    assert torch.equal(model(rows()), plain(rows()))


@pytest.mark.filterwarnings("ignore")
def test_units_that_were_compiled() -> None:
    plain = make(through_all)
    model = copy.deepcopy(plain)
    model.l[1].compile(backend="eager")
    model.l[2] = torch.compile(model.l[2], backend="eager")  # type: ignore[assignment]
    done = forwards(cut(model, ["l.1", "l.3"], (rows(),)), (rows(),))
    backwards(done, square_mean(done.output))
    square_mean(plain(rows())).backward()
    assert torch.equal(done.output, plain(rows()))
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
