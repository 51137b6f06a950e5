"""What units cost, seen in runs of whole models, and stages that are equal by it."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import UsageError
from penstock.plan import UnitCosts, measure, predict
from tests.plan.models import SLOW

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
    assert [unit.by("parameters") for unit in costs.units] == sizes
    assert [unit.by("flops") for unit in costs.units] == [2 * 3 * size for size in sizes]
    # Weights and gradients, and what AdamW holds; the loss, a sum, has made a copy of its own.
    assert [unit.by("memory") for unit in costs.units[:2]] == [4 * 4 * size for size in sizes[:2]]
    assert [(v.source, v.targets, v.bytes, v.kept) for v in costs.values] == [
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


@pytest.mark.parametrize("measured", [False, True])
def test_code_between_units_counts_for_the_unit_before_it(measured: bool) -> None:
    costs = costs_of(Between(), torch.ones(3, 4), measured=measured, scale=0.5)
    product = 2 * 3 * 4 * 4
    # The last product is with what the first unit gives; the loss is the last unit's too.
    assert [unit.flops for unit in costs.units] == [product, product, product + 2 * 3 * 4 * 3]
    assert [(v.source, v.targets) for v in costs.values] == [(0, (1,)), (0, (2,)), (1, (2,))]
    times = [time for u in costs.units for time in (u.forward, u.input, u.weight, u.backward)]
    assert all(time > 0 for time in times)


class Fills(nn.Module):
    """Writes what its second unit gives into what its first gave."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) + 1
        hidden[:2] = self.second(x[:2])
        third: Tensor = self.third(hidden)
        return third


@pytest.mark.parametrize("measured", [False, True])
def test_what_is_written_into_another_units_tensor_has_a_backward(measured: bool) -> None:
    costs = costs_of(Fills(), torch.ones(4, 4), measured=measured)
    assert [(v.source, v.targets) for v in costs.values] == [(0, (1,)), (1, (2,))]
    assert all(unit.backward > 0 and unit.stash > 0 for unit in costs.units)


class Lengthy(nn.Linear):
    """Keeps its thread busy for so long that noise does not decide which of two units takes longer."""

    def forward(self, x: Tensor) -> Tensor:
        until = time.thread_time() + 0.005
        while time.thread_time() < until:
            pass
        return super().forward(x)


class Again(nn.Module):
    """Calls its unit three times."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.block, self.leave = (Lengthy(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(3):
            x = self.block(x).tanh()
        leave: Tensor = self.leave(x)
        return leave


@pytest.mark.parametrize("measured", [False, True])
def test_all_calls_of_a_unit_count(measured: bool) -> None:
    enter, block, _ = costs_of(Again(), torch.ones(4, 4), measured=measured).units
    assert block.flops == 3 * enter.flops
    # The batch is there anyway; what comes from another call lies there until W.
    assert block.stash == 3 * (enter.stash + 4 * 4 * 4)
    assert block.forward > 1.5 * enter.forward


def test_stages_are_equal_by_what_was_measured() -> None:
    costs = costs_of(layers(), torch.ones(3, 4), measured=False)
    assert costs.cut(2, by="flops") == [["0"], ["1", "2"]]
    assert costs.cut(2, by="parameters") == [["0"], ["1", "2"]]
    heavy = replace(costs, units=(*costs.units[:2], replace(costs.units[2], backward=1.0)))
    assert heavy.cut(2) == [["0", "1"], ["2"]]
    with pytest.raises(UsageError, match="by='speed': must be one of time, flops"):
        costs.cut(2, by="speed")  # type: ignore[arg-type]


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.also, self.idle = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        used: Tensor = self.also(self.used(x))
        return used


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_what_cannot_be_measured_is_refused() -> None:
    scripted = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4))
    for model, gist in (
        (Idle(), r"does not call these modules.*idle"),
        (scripted, "'1' is scripted"),
    ):
        with pytest.raises(UsageError, match=gist):
            costs_of(model, torch.ones(3, 4), measured=False)


class Tied(nn.Module):
    """Uses the weight of a module that it never calls, as encoder-decoders use that of their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.first, self.second = (nn.Linear(4, 4) for _ in range(3))
        self.first.weight, self.first.bias = self.shared.weight, self.shared.bias

    def forward(self, x: Tensor) -> Tensor:
        second: Tensor = self.second(self.first(x))
        return second


@pytest.mark.parametrize("measured", [False, True])
def test_a_unit_that_is_not_called_costs_nothing_if_its_weights_are_anothers(
    measured: bool,
) -> None:
    costs = {u.path: u for u in costs_of(Tied(), torch.ones(3, 4), measured=measured).units}
    assert costs["shared"].flops == costs["shared"].held == 0
    assert costs["first"].flops == 2 * 3 * 4 * 4


class Routes(nn.Module):
    """Sends rows to the expert that a number of each row names."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights, result = self.gate(x), x
        for index, expert in enumerate(self.experts):
            rows = (weights.argmax(-1) == index).nonzero()[:, 0]
            result = result.index_add(0, rows, expert(x[rows]) * weights[rows, index, None])
        return result


@pytest.mark.parametrize("measured", [False, True])
def test_a_module_whose_code_decides_by_numbers_is_one_unit(measured: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Routes(), nn.Linear(4, 4))
    costs = costs_of(model, torch.ones(3, 4), measured=measured)
    assert [unit.path for unit in costs.units] == ["0", "1", "2"]
    assert all(unit.forward > 0 and unit.backward > 0 for unit in costs.units)


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


class Slope(nn.Module):
    """Differentiates inside, where nobody may look at what is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        slope: Tensor = torch.func.grad(lambda row: (row * self.weight).tanh().sum())(x)
        return slope


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("unit", [Slope(), nn.LSTM(4, 4), nn.ReLU(inplace=True)])
def test_any_module_can_be_a_unit(unit: nn.Module, measured: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.unit, self.last = nn.Linear(4, 4), unit, nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            middle = self.unit(self.first(x))
            last: Tensor = self.last(middle[0] if isinstance(middle, tuple) else middle)
            return last

    costs = costs_of(Model(), torch.ones(2, 4), measured=measured)
    assert costs.units[0].flops == costs.units[-1].flops == 2 * 2 * 4 * 4
    assert [(v.source, v.targets) for v in costs.values] == [
        (n, (n + 1,)) for n in range(len(costs.units) - 1)
    ]


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
        self.first, self.second, self.third = (Remembers(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        third: Tensor = self.third(self.second(self.first(x, cache), cache), cache)
        return third


@pytest.mark.parametrize("measured", [False, True])
def test_each_run_of_a_unit_finds_its_cache_as_it_was(measured: bool) -> None:
    costs = costs_of(Caching(), torch.ones(3, 4), measured=measured)
    assert [unit.flops for unit in costs.units] == [2 * 3 * 4 * 4] * 3


class Moves(nn.Module):
    """Cannot run without data: it looks a name up by a number of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.ModuleDict({"7": nn.Linear(4, 4)})

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second[str(int(x.detach().isnan().sum()) + 7)](x)
        return output


def test_what_cannot_run_without_data_cannot_be_predicted() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Moves())
    x = torch.randn(2, 4)
    profile = predict(model, x, device="h100", loss_fn=lambda y: y.sum())
    with pytest.raises(UsageError, match=r"'1' \(Moves\) does not run without data .*measure runs"):
        profile.at(2)
    assert measure(model, x, loss_fn=lambda y: y.sum(), repeats=1).at(2).units
