"""What units and stages cost, and stages that are equal by it."""

from __future__ import annotations

import random
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipeline
from penstock.errors import PartitionError, UsageError
from penstock.partition import partition, table
from penstock.partition.costs import measure_units, weigh_units

LAYERS = [4, 8, 8, 2]
PATHS = ["0", "1", "2"]


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(LAYERS)))


def test_costs_of_a_chain_are_those_one_can_count() -> None:
    units, values = measure_units(layers(), PATHS, (torch.ones(3, 4),))
    sizes = [4 * 8, 8 * 8, 8 * 2]
    assert [unit.by("parameters") for unit in units] == sizes
    assert [unit.by("flops") for unit in units] == [2 * 3 * size for size in sizes]
    assert [unit.by("memory") for unit in units] == [4 * 4 * size for size in sizes]
    assert [unit.by("time") for unit in units] == [0, 0, 0]
    assert [(v.source, v.targets, v.bytes, v.kept) for v in values] == [
        (0, (1,), 3 * 8 * 4, (1,)),
        (1, (2,), 3 * 8 * 4, (2,)),
    ]


class Between(nn.Module):
    """Code of the author between the units: a residual, a product in place, a skip to the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        first = self.first(x)
        hidden = first + 1
        hidden *= scale
        hidden = self.second(hidden) + hidden
        return {"y": self.third(hidden) @ first.t(), "norm": hidden.norm()}


@pytest.mark.parametrize("repeats", [0, 1])
def test_code_between_units_counts_for_the_unit_before_it(repeats: int) -> None:
    paths, call = ["first", "second", "third"], ((torch.ones(3, 4),), {"scale": 0.5})
    units, values = measure_units(Between(), paths, *call, repeats=repeats)
    product = 2 * 3 * 4 * 4
    # The last product is with what the first unit gives; the loss is the last unit's too.
    assert [unit.flops for unit in units] == [product, product, product + 2 * 3 * 4 * 3]
    assert [(v.source, v.targets) for v in values] == [(0, (1,)), (0, (2,)), (1, (2,))]
    times = [time for unit in units for time in (unit.forward, unit.input, unit.weight)]
    assert all(time > 0 for time in times) is bool(repeats)


def test_a_table_shows_each_stage() -> None:
    text = str(table(layers(), [["0", "1"], ["2"]], (torch.ones(3, 4),)))
    head, first, second = text.splitlines()
    assert head.split() == ["stage", "modules", "parameters", "held", "flops", "saved", "sent"]
    assert first.split() == ["0", "0-1", "96", "384", "576", "0", "96"]
    assert second.split()[:3] == ["1", "2", "16"]
    assert "ms" in str(table(layers(), [["0", "1"], ["2"]], (torch.ones(3, 4),), repeats=1))


@pytest.mark.parametrize("balance", ["parameters", "flops", "memory", "time", [1.0, 1.0, 2.0]])
def test_stages_are_equal_by_what_is_measured(balance: Any) -> None:
    example: Any = ((torch.ones(3, 4),), {})
    parts = partition(layers(), 2, example=example, balance=balance)
    assert len(parts.modules) == 2
    if not isinstance(balance, str):
        assert [name for name, _ in parts.modules[1].named_parameters()] == ["2.weight"]


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        used: Tensor = self.used(x)
        return used


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_cannot_be_weighed_is_refused() -> None:
    example: Any = ((torch.ones(3, 4),), {})
    without_data = layers().to("meta")
    assert weigh_units(without_data, PATHS, "flops", example) == [192, 384, 96]
    scripted = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    for model, paths, balance, args, gist in (
        (layers(), PATHS, "flops", None, r"balance='flops' needs a call .* give example="),
        (layers(), PATHS, "speed", example, r"balance='speed': must be one of time, flops"),
        (layers(), PATHS, [1.0, 2.0], None, "2 weights for 3 modules"),
        (without_data, PATHS, "time", example, "meta device"),
        (Idle(), ["used", "idle"], "flops", example, r"does not call these modules.*idle"),
        (scripted, PATHS[:2], "flops", example, "'1' is scripted"),
    ):
        with pytest.raises((PartitionError, UsageError), match=gist):
            weigh_units(model, paths, balance, args)


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


@pytest.mark.parametrize("balance", ["time", "flops"])
def test_measuring_leaves_no_trace(balance: str) -> None:
    counts, heard = [Counts(), Counts()], list[Any]()
    model = nn.Sequential(*counts)
    for hooked in (model[0].register_forward_hook, model[1].register_full_backward_hook):
        hooked(lambda module, args, output: heard.append(args))
    model(torch.ones(3, 4)).sum().backward()
    before = [parameter.grad for parameter in model.parameters()]
    heard.clear()
    for module in counts:
        module.calls, module.sizes, module.steps = 0, [], torch.zeros(())
    state = random.getstate(), torch.get_rng_state()
    weigh_units(model, ["0", "1"], balance, ((torch.ones(3, 4),), {}))
    assert [(m.calls, m.sizes, float(m.steps)) for m in counts] == [(0, list[int](), 0.0)] * 2
    assert heard == []
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])
    assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))
    model(torch.ones(3, 4)).sum().backward()
    assert len(heard) == 2


class Slope(nn.Module):
    """Differentiates inside, where nobody may look at what is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        slope: Tensor = torch.func.grad(lambda row: (row * self.weight).tanh().sum())(x)
        return slope


@pytest.mark.parametrize("repeats", [0, 1])
@pytest.mark.parametrize("unit", [Slope(), nn.LSTM(4, 4), nn.ReLU(inplace=True)])
def test_any_module_can_be_a_unit(unit: nn.Module, repeats: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.unit, self.last = nn.Linear(4, 4), unit, nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            middle = self.unit(self.first(x))
            last: Tensor = self.last(middle[0] if isinstance(middle, tuple) else middle)
            return last

    paths = ["first", "unit", "last"]
    units, values = measure_units(Model(), paths, (torch.ones(2, 4),), repeats=repeats)
    assert units[0].flops == units[2].flops == 2 * 2 * 4 * 4
    assert [(value.source, value.targets) for value in values] == [(0, (1,)), (1, (2,))]


class Cache:
    """Not looked into: it holds what each layer has seen."""

    def __init__(self) -> None:
        self.seen: dict[int, Tensor] = {}


class Remembers(nn.Linear):
    def forward(self, x: Tensor, cache: Cache) -> Tensor:  # type: ignore[override]
        before = [cache.seen[id(self)]] if id(self) in cache.seen else []
        cache.seen[id(self)] = torch.cat([*before, x])
        return super().forward(cache.seen[id(self)])[-len(x) :]


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Remembers(4, 4), Remembers(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        second: Tensor = self.second(self.first(x, cache), cache)
        return second


@pytest.mark.parametrize("repeats", [0, 2])
def test_each_run_of_a_unit_finds_its_cache_as_it_was(repeats: int) -> None:
    units, _ = measure_units(Caching(), ["first", "second"], (torch.ones(3, 4),), repeats=repeats)
    assert [unit.flops for unit in units] == [2 * 3 * 4 * 4] * 2


class Notes:
    """Whether something was freed, each time."""

    freed: tuple[bool, ...] = ()

    def note(self, freed: bool) -> None:
        self.freed = (*self.freed, freed)


NOTES = Notes()


class Drops(nn.Module):
    """Notes whether what it drops between its units is freed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        doubled = self.first(x) * 2
        there = weakref.ref(doubled)
        more = doubled + 1
        del doubled
        NOTES.note(there() is None)
        second: Tensor = self.second(more)
        return second


def test_a_stage_holds_nothing_that_the_code_between_units_has_dropped() -> None:
    x = torch.ones(3, 4)
    stages = [["first"], ["second"]]
    with Pipeline(Drops(), stages=stages, ranks=2, loss_fn=nn.functional.mse_loss) as pipe:
        pipe.step(x, target=x)
    # The other stage has a placeholder, which it keeps.
    assert any(NOTES.freed)
