"""Traced cuts of models of many kinds: they train as the uncut model does, dropout included."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Pipeline
from penstock.errors import PartitionError, UsageError
from penstock.partition.traced import Cuts, Point, SplitPoint, cut_traced, traces
from penstock.partition.traced.wiring import Program
from penstock.values import spec_of_arguments

MICROBATCHES = 4
X = torch.linspace(-1, 1, 8 * 4, dtype=torch.float64).view(8, 4)
TOKENS = torch.arange(8 * 5).view(8, 5) % 10


class Looped(nn.Module):
    """One module, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = x + self.block(x)
        return self.last(x)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 6), nn.Linear(6, 10)
        self.one, self.two = nn.LSTM(6, 6, batch_first=True), nn.LSTM(6, 6, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, state = self.one(self.embed(tokens))
        hidden, _ = self.two(hidden, state)
        return self.head(hidden)  # type: ignore[no-any-return]


@dataclass
class Given:
    a: Tensor
    b: Tensor
    swap: bool = True


@dataclass
class Made:
    first: Tensor
    second: Tensor


class Records(nn.Module):
    """Dataclasses in and out; what it does depends on a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(8, 4)

    def forward(self, given: Given) -> Made:
        a, b = self.a(given.a), self.b(given.b)
        return Made(self.c(torch.cat([a, b], -1)), b if given.swap else a)


class Noisy(nn.Module):
    """Dropout as a module and as a function; a frozen batch norm in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 4)
        self.norm = nn.BatchNorm1d(4).eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.b(self.drop(self.a(x))))
        return nn.functional.dropout(x, 0.3, self.training) + torch.arange(4, device=x.device)


Loss = Callable[[Any, Any], Tensor]


def square(output: Any, target: Any) -> Tensor:
    found: Tensor = output.square().mean()
    return found


def of_records(output: Made, target: Any) -> Tensor:
    return output.first.square().mean() + output.second.mean()


CASES: dict[str, tuple[Callable[[], nn.Module], list[str], Any, Loss]] = {
    "looped": (Looped, ["block", "last"], X, square),
    "recurrent": (Recurrent, ["two", "head"], TOKENS, square),
    "records": (Records, ["b", "c"], Given(X, X + 1), of_records),
    "noisy": (Noisy, ["drop", "b"], X, square),
}


def part(value: Any, index: int) -> Any:
    if isinstance(value, Given):
        return Given(part(value.a, index), part(value.b, index), value.swap)
    return value.chunk(MICROBATCHES)[index]


@pytest.mark.parametrize("name", CASES)
def test_a_cut_model_trains_as_the_uncut_one(name: str) -> None:
    make, paths, given, loss = CASES[name]
    torch.manual_seed(0)
    model = make().double()
    expected = copy.deepcopy(model)
    cuts = Cuts(tuple(map(Point, paths)))
    partition = cut_traced(model, (part(given, 0),), cuts=cuts).partition
    pipe = Pipeline(
        model,
        schedule="1F1B",
        stages=partition,
        microbatches=MICROBATCHES,
        loss_fn=loss,
        seed=3,
    )
    pipe.step(given, target=torch.zeros(8))
    for index in range(MICROBATCHES):
        with penstock.randomness(expected, seed=3, step=0, microbatch=index):
            (loss(expected(part(given, index)), None) / MICROBATCHES).backward()
    found = {n: p.grad for n, p in model.named_parameters()}
    wanted = {n: p.grad for n, p in expected.named_parameters()}
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        dict(model.named_buffers()), dict(expected.named_buffers()), rtol=0, atol=1e-12
    )


def test_a_module_that_is_called_again_is_cut_at_each_call() -> None:
    cut = cut_traced(Looped().double(), (X,), cuts=Cuts((Point("block"),)))
    assert len(cut.modules) == 4
    assert [one.stages for one in cut.shared] == [(1, 2, 3)] * 2
    second = cut_traced(Looped().double(), (X,), cuts=Cuts((Point("block", call=1),)))
    assert len(second.modules) == 2


def test_a_stage_may_be_moved_to_another_device() -> None:
    cut = cut_traced(Noisy().double(), (X,), cuts=Cuts((Point("b"),)))
    stages = [module.to("meta") for module in cut.modules]
    given = stages[0]({}, (X.to("meta"),), {})
    assert stages[1](given, (X.to("meta"),), {}).shape == (8, 4)


def test_a_stage_asks_for_the_batch_that_it_uses() -> None:
    cut = cut_traced(Records().double(), (Given(X, X),), cuts=Cuts((Point("b"),)))
    absent = Given(X.to("meta"), X.to("meta"))
    with pytest.raises(
        UsageError, match="tensor 0 of the model's arguments, which this process was"
    ):
        cut.modules[0]({}, (absent,), {})


def test_what_travels_is_told_for_frozen_weights_too() -> None:
    model = Looped().double()
    cut = cut_traced(model, (X,), cuts=Cuts((Point("last", SplitPoint.BEGINNING),)))
    call = spec_of_arguments((X,), {})
    assert [edge.gradient for edge in cut.partition.edges] == [True]
    model.first.requires_grad_(False)
    model.block.requires_grad_(False)
    describe = cut.partition.describe
    assert describe is not None
    assert [edge.gradient for edge in describe(call, True).edges] == [False]
    assert not describe(call, False).specs["output"].tensors[0].requires_grad


def test_a_graph_that_meets_other_cuts_is_refused() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, short: bool = False) -> Tensor:
            x = self.a(x)
            return self.c(x if short else self.b(x))  # type: ignore[no-any-return]

    cut = cut_traced(Skips().double(), (X,), cuts=Cuts((Point("b"),)))
    with pytest.raises(PartitionError, match=r"b \(BEGINNING\): the module was not called"):
        cut.modules[0]({}, (X,), {"short": True})


def test_graphs_of_many_calls_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_KEPT", 2)

    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, times: int) -> Tensor:
            return self.b(self.a(x) * times)  # type: ignore[no-any-return]

    cut = cut_traced(Sized().double(), (X, 0), cuts=Cuts((Point("b"),)))
    for times in range(4):
        cut.modules[0]({}, (X, times), {})
    assert cut.traces.count == 2


def test_what_travels_is_told_for_new_lengths_without_running_a_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut = cut_traced(Looped().double(), (X,), cuts=Cuts((Point("last"),))).partition
    fresh = cut_traced(Looped().double(), (X,), cuts=Cuts((Point("last"),))).partition
    assert cut.describe is not None
    assert fresh.describe is not None
    found = []
    calls = [
        spec_of_arguments((torch.zeros(rows, *X.shape[1:]).double(),), {}) for rows in (3, 4, 5, 6)
    ]
    for call in calls:
        if call is calls[-1]:
            monkeypatch.setattr(Program, "__call__", None)
        found.append(cut.describe(call, True))
    monkeypatch.undo()
    assert found[-1] == fresh.describe(calls[-1], True)
    assert found[-1] != found[0]


class Counting(nn.Module):
    """Remembers how often it was called; what is remembered once is no hindrance."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls, self.width = 1, 0

    def forward(self, x: Tensor) -> Tensor:
        self.width = x.shape[1]
        self.calls += 1
        return self.b(self.a(x) * self.calls)  # type: ignore[no-any-return]


def test_a_number_that_every_call_changes_is_not_frozen_into_the_graph() -> None:
    model = Counting().double()
    with pytest.raises(PartitionError, match=r"the attribute calls, which every call changes"):
        cut_traced(model, (X,), cuts=Cuts((Point("b"),)))
    assert (model.calls, model.width) == (1, 0)
