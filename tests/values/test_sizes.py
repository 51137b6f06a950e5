"""What a module gives for ever new sizes: looked at twice, followed once, then told where that is certain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.values import Family, Inferred, ValueSpec, infer, new_family
from penstock.values import inference as inference_module

CPU = torch.device("cpu")


RAN: list[int] = []
"""An entry for each call, of copies too."""


class Counted(nn.Module):
    """Does something to its input, and notes that."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run
        self.linear = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Any:
        RAN.append(x.dim())
        return self.run(self, x)


def ask(module: nn.Module, length: int, family: Family[Inferred] | None) -> Inferred:
    given = ValueSpec.of(((torch.zeros(2, length, 4, requires_grad=True),), {}))
    return infer(module, given, CPU, family=family)


def calls_by_length(run: Callable[..., Any], lengths: range) -> list[int]:
    """How often the module ran for each length; it always gives what it gives when it is looked at."""
    module, family, counts = Counted(run), new_family(), []
    for length in lengths:
        RAN.clear()
        found = ask(module, length, family)
        counts.append(len(RAN))
        fresh = ask(module, length, None)
        assert found.output.digest() == fresh.output.digest()
        assert found.reached == fresh.reached
    return counts


def joined(module: Counted, x: Tensor) -> Any:
    """Sizes that are sums, products and quotients, in several orders of memory."""
    y = module.linear(x)
    pooled = functional.avg_pool1d(y.transpose(1, 2), 3, stride=2)
    both = torch.cat([y, y.detach()], dim=1)
    return {
        "pooled": pooled,
        "pairs": (both.flatten(0, 1), y.transpose(0, 1)),
        "apart": x.new_zeros(x.shape[1], 3).expand(5, -1, -1),
        "number": 7,
    }


def test_from_the_third_size_on_nothing_runs_any_more() -> None:
    assert calls_by_length(joined, range(5, 12)) == [1, 1, 1, 0, 0, 0, 0]


def branching(module: Counted, x: Tensor) -> Any:
    y = module.linear(x)
    return (y, y.detach()) if x.shape[1] > 8 else y.flatten(1)


def test_another_way_through_the_code_is_followed_too() -> None:
    assert calls_by_length(branching, range(5, 14)) == [1, 1, 1, 0, 1, 0, 0, 0, 0]


def listed(module: Counted, x: Tensor) -> Any:
    return [module.linear(part) for part in x.split(3, dim=1)]


def looked_into(module: Counted, x: Tensor) -> Any:
    return module.linear(x)[:, : 2 + int(x.detach().sum())]


@pytest.mark.parametrize("run", [listed, looked_into])
def test_what_asks_for_more_than_sizes_is_looked_at_each_time(run: Callable[..., Any]) -> None:
    assert 0 not in calls_by_length(run, range(5, 9))


def test_two_sizes_are_never_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_module, "_follow", None)
    module, family = Counted(joined), new_family()
    for length in (5, 7, 5, 7, 5):
        ask(module, length, family)


def test_sizes_of_one_are_looked_at() -> None:
    assert calls_by_length(lambda m, x: m.linear(x).squeeze(1), range(4, 0, -1)) == [1, 1, 1, 1]
