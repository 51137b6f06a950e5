"""What units cost, seen in runs of whole models, and stages that are equal by it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import UsageError
from penstock.plan import UnitCosts, measure, predict
from tests.catalogue.making import Does
from tests.plan.models import SLOW, Spins

LAYERS = [4, 8, 8, 2]


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(LAYERS)))


def costs_of(model: nn.Module, x: Tensor, *, measured: bool, **kwargs: Any) -> UnitCosts:
    """What its units cost for this batch as a microbatch."""
    if measured:
        return measure(model, x, stages=3, repeats=1, **kwargs).at(len(x))
    return predict(model, x, stages=3, device=SLOW, **kwargs).at(len(x))


@pytest.mark.parametrize("measured", [False, True])
def test_costs_of_a_chain_are_those_one_can_count(measured: bool) -> None:
    costs = costs_of(layers(), torch.ones(3, 4), measured=measured)
    sizes = [4 * 8, 8 * 8, 8 * 2]
    assert [unit.numbers for unit in costs.units] == sizes
    assert [unit.flops for unit in costs.units] == [2 * 3 * size for size in sizes]
    assert [unit.trained for unit in costs.units] == [4 * size for size in sizes]
    # The loss, a sum, has made a copy of its own.
    assert [unit.held for unit in costs.units[:2]] == [0, 0]
    assert [(v.source, v.targets, v.bytes, v.kept) for v in costs.values] == [
        (0, (1,), 3 * 8 * 4, (1,)),
        (1, (2,), 3 * 8 * 4, (2,)),
    ]


# ---- what models write between their units, and what units are


def made(function: Callable[..., Any], *units: str, **parts: Any) -> nn.Module:
    """A model of small linear layers by these names, and of other parts."""
    return Does(function, **{name: nn.Linear(4, 4) for name in units}, **parts)


def skips(m: Any, x: Tensor, *, scale: float) -> dict[str, Tensor]:
    """A residual, a product in place, a skip to the end."""
    first = m.first(x)
    hidden = first + 1
    hidden *= scale
    hidden = m.second(hidden) + hidden
    return {"y": m.third(hidden) @ first.t(), "norm": hidden.norm()}


def fills(m: Any, x: Tensor) -> Any:
    """Writes what its second unit gives into what its first gave."""
    hidden = m.first(x) + 1
    hidden[:2] = m.second(x[:2])
    return m.third(hidden)


def again(m: Any, x: Tensor) -> Any:
    """Calls a unit three times."""
    x = m.enter(x)
    for _ in range(3):
        x = m.block(x).tanh()
    return m.leave(x)


def tied() -> Any:
    """Uses the weight of a module that it never calls, as encoder-decoders use that of their tokens."""
    model: Any = made(lambda m, x: m.second(m.first(x)), "shared", "first", "second")
    model.first.weight, model.first.bias = model.shared.weight, model.shared.bias
    return model


def routes(m: Any, x: Tensor) -> Tensor:
    """Sends rows to the expert that a number of each row names."""
    weights, result = m.gate(x)[:, :2], x
    for index, expert in enumerate((m.left, m.right)):
        rows = (weights.argmax(-1) == index).nonzero()[:, 0]
        result = result.index_add(0, rows, expert(x[rows]) * weights[rows, index, None])
    return result


def remembers(m: Any, x: Tensor, cache: SimpleNamespace) -> Any:
    """Computes with all that an object, which is not looked into, holds of its layer."""
    before = [cache.seen[id(m)]] if id(m) in cache.seen else []
    cache.seen[id(m)] = torch.cat([*before, x])
    return m.layer(cache.seen[id(m)])[-len(x) :]


def caches(m: Any, x: Tensor) -> Any:
    cache = SimpleNamespace(seen={})
    return m.second(m.first(x, cache), cache)


def around(unit: nn.Module) -> nn.Module:
    def run(m: Any, x: Tensor) -> Any:
        middle = m.unit(m.first(x))
        return m.last(middle[0] if isinstance(middle, tuple) else middle)

    return Does(run, first=nn.Linear(4, 4), unit=unit, last=nn.Linear(4, 4))


def slope() -> nn.Module:
    """Differentiates inside, where nobody may look at what is saved."""
    return Does(
        lambda m, x: torch.func.grad(lambda row: (row * m.weight).tanh().sum())(x),
        weight=nn.Parameter(torch.ones(4)),
    )


ROW = 2 * 4 * 4
"""Operations of a layer for a row."""
CHAIN = [(0, (1,)), (1, (2,))]
MADE: dict[str, tuple[Callable[[], nn.Module], list[float] | None, list[Any] | None]] = {
    # The last product is with what the first unit gives; the loss is the last unit's too.
    "code between units": (
        lambda: made(skips, "first", "second", "third"),
        [3 * ROW, 3 * ROW, 3 * ROW + 2 * 3 * 4 * 3],
        [(0, (1,)), (0, (2,)), (1, (2,))],
    ),
    "writes into another's tensor": (lambda: made(fills, "first", "second", "third"), None, CHAIN),
    "a unit that is not called": (tied, [0, 3 * ROW, 3 * ROW], None),
    "a unit that decides by numbers": (
        lambda: nn.Sequential(
            nn.Linear(4, 4), made(routes, "gate", "left", "right"), nn.Linear(4, 4)
        ),
        None,
        CHAIN,
    ),
    "a cache that each run finds as it was": (
        lambda: Does(caches, **{n: made(remembers, "layer") for n in ("first", "second")}),
        [3 * ROW, 3 * ROW],
        None,
    ),
    "a derivative inside": (lambda: around(slope()), None, CHAIN),
    "a unit of many calls": (lambda: around(nn.LSTM(4, 4)), None, CHAIN),
    "a unit that works in place": (lambda: around(nn.ReLU(inplace=True)), None, CHAIN),
}
"""Models, the operations of their units, and from where to where values go, where that is of interest."""


@pytest.mark.whole
@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_any_model_has_units_with_costs(name: str, measured: bool) -> None:
    make, flops, values = MADE[name]
    more = {"scale": 0.5} if name == "code between units" else {}
    costs = costs_of(make(), torch.ones(3, 4), measured=measured, **more)
    assert flops is None or [unit.flops for unit in costs.units] == flops
    found = [(v.source, v.targets) for v in costs.values]
    assert values is None or found == (
        values if values is not CHAIN else CHAIN[: len(costs.units) - 1]
    )
    called = [unit for unit in costs.units if unit.path != "shared"]
    assert all(t > 0 for u in called for t in (u.forward, u.input, u.backward))
    assert all(unit.held == 0 for unit in costs.units if unit not in called)


@pytest.mark.parametrize("measured", [False, True])
def test_parameters_outside_of_units_are_those_of_the_first_that_uses_them(measured: bool) -> None:
    """Beside units lie a list of parameters, and a module of which only the weight is used."""

    def run(m: Any, x: Tensor) -> Any:
        hidden = m.second(m.first(x) * m.rows[0])
        return m.third(hidden @ m.table.weight) * m.rows[0]

    rows = nn.ParameterList([torch.rand(4)])
    model = made(run, "first", "second", "third", rows=rows, table=nn.Linear(4, 4, bias=False))
    costs = costs_of(model, torch.ones(3, 4), measured=measured)
    numbers = {unit.path: unit.numbers for unit in costs.units}
    layer = 4 * 4 + 4
    assert sum(numbers.values()) == sum(p.numel() for p in model.parameters())
    assert numbers == {"first": layer + 4, "second": layer, "third": layer, "table": 16}


@pytest.mark.parametrize("measured", [False, True])
def test_all_calls_of_a_unit_count(measured: bool) -> None:
    model = Does(again, **{name: Spins(0.005) for name in ("enter", "block", "leave")})
    enter, block, _ = costs_of(model, torch.ones(4, 4), measured=measured).units
    assert block.flops == 3 * enter.flops
    # The batch is there anyway; what comes from another call lies there until W.
    assert block.stash == 3 * (enter.stash + 4 * 4 * 4)
    assert block.forward > 1.5 * enter.forward


def test_stages_take_equally_long() -> None:
    costs = costs_of(layers(), torch.ones(3, 4), measured=False)
    assert costs.cut(2) == [["0"], ["1", "2"]]
    heavy = replace(costs, units=(*costs.units[:2], replace(costs.units[2], backward=1.0)))
    assert heavy.cut(2) == [["0", "1"], ["2"]]


def moves(m: Any, x: Tensor) -> Any:
    """Cannot run without data: it looks a name up by a number of a tensor."""
    return m.layers[str(int(x.detach().isnan().sum()) + 7)](x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_what_cannot_be_measured_or_predicted_is_refused() -> None:
    x = torch.ones(3, 4)
    scripted = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4))
    unused = made(lambda m, x: m.also(m.used(x)), "used", "also", "idle")
    move = Does(moves, layers=nn.ModuleDict({"7": nn.Linear(4, 4)}))
    moving = nn.Sequential(nn.Linear(4, 4), move, nn.Linear(4, 4))
    for model, gist in (
        (unused, r"does not use these modules.*idle"),
        (scripted, "'1' is scripted"),
        (moving, r"'1' \(Does\) does not run without data .*measure runs"),
    ):
        with pytest.raises(UsageError, match=gist):
            costs_of(model, x, measured=False)
    assert measure(moving, x, repeats=1).at(3).units


class Counts(nn.Linear):
    """Counts its calls in an attribute, a list and a buffer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls, self.sizes = 0, list[int]()
        self.register_buffer("steps", torch.zeros(()))
        self.steps: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.sizes.append(len(x))
        self.steps += 1
        return super().forward(x) * random.random()


@pytest.mark.parametrize("measured", [False, True])
def test_measuring_leaves_no_trace(measured: bool) -> None:
    counts, heard = [Counts(), Counts(), Counts()], list[Any]()
    model = nn.Sequential(*counts)
    for hooked in (model[0].register_forward_hook, model[1].register_full_backward_hook):
        hooked(lambda module, args, output: heard.append(args))
    model(torch.ones(3, 4)).sum().backward()
    before = [parameter.grad for parameter in model.parameters()]
    heard.clear()
    for module in counts:
        module.calls, module.sizes, module.steps = 0, [], torch.zeros(())
    state = random.getstate(), torch.get_rng_state()
    costs_of(model, torch.ones(3, 4), measured=measured)
    assert [(m.calls, m.sizes, float(m.steps)) for m in counts] == [(0, list[int](), 0.0)] * 3
    assert heard == []
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])
    assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))
    model(torch.ones(3, 4)).sum().backward()
    assert len(heard) == 2
