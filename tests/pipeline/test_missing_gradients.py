"""Gradients that are missing: for some microbatches, or for good, as in a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.testing import Case, WorkerPool, compare
from tests.pipeline.models import mean_loss

WIDTH = 3
SAMPLES = 8
X = torch.linspace(-1, 1, SAMPLES * WIDTH, dtype=torch.float64).reshape(SAMPLES, WIDTH)
# Microbatch 2 of 4 alone has a negative sum.
MARKED = X.abs() * torch.where(torch.arange(SAMPLES) // 2 == 2, -1, 1)[:, None]
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "ZB-V", "DualPipeV"]


class Fork(nn.Module):
    """Gives two values, each from a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.b = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Any) -> dict[str, Tensor]:
        if isinstance(x, dict):
            return {"a": self.a(x["a"]).tanh(), "b": self.b(x["b"]).tanh(), "sign": x["sign"]}
        return {"a": self.a(x).tanh(), "b": self.b(x).tanh(), "sign": x.sum(1)}


class Join(nn.Module):
    def __init__(self, use: Callable[[dict[str, Tensor]], Tensor]) -> None:
        super().__init__()
        self.use = use
        self.lin = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, value: dict[str, Tensor]) -> Any:
        return self.lin(self.use(value))


def on_a_branch(value: dict[str, Tensor], bound: float = 0.0) -> Tensor:
    """Rows with a negative mark use b; a microbatch without any takes no look at it."""
    chosen = value["sign"] < bound
    if not bool(chosen.any()):
        return value["a"]
    return value["a"] + value["b"] * chosen[:, None]


def in_a_checkpoint(value: dict[str, Tensor]) -> Tensor:
    found: Tensor = checkpoint(lambda a, b: a.tanh(), value["a"], value["b"], use_reentrant=True)
    return found


class First(torch.autograd.Function):
    """The first of two; the other gets no gradient."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0], None


USES: dict[str, tuple[Callable[[dict[str, Tensor]], Tensor], Tensor, set[str]]] = {
    "a branch of microbatch 2": (on_a_branch, MARKED, set()),
    "a branch never taken": (on_a_branch, MARKED.abs(), {"b"}),
    "a branch taken for zeros alone": (lambda v: on_a_branch(v, 1e-9), X.abs() + 1, {"b"}),
    "never": (lambda value: value["a"], X, {"b"}),
    "detached": (lambda value: value["a"] + value["b"].detach(), X, {"b"}),
    "neither": (lambda value: value["a"].detach(), X, {"a", "b"}),
    "a reentrant checkpoint that leaves it alone": (in_a_checkpoint, X, {"b"}),
    "a function without a gradient": (lambda v: First.apply(v["a"], v["b"]), X, {"b"}),  # type: ignore[no-untyped-call]
}


def case_of(use: str) -> Case:
    torch.manual_seed(0)
    function, x, _ = USES[use]
    model = nn.Sequential(Fork(), Fork(), Fork(), Join(function))
    return Case(model, (x,), X.flip(0), mean_loss)


def compared(use: str, schedule: str, group: Any = None) -> dict[str, Tensor | None]:
    verdict = compare(
        case_of(use), schedule=schedule, ranks=2, microbatches=4, group=group, steps=2
    )
    verdict.check(1e-12)
    return verdict.gradients


@pytest.mark.parametrize(("use", "schedule"), list(product(USES, SCHEDULES)))
def test_gradients_are_those_of_the_plain_loop(use: str, schedule: str) -> None:
    found = compared(use, schedule)
    without = {name.split(".")[1] for name, grad in found.items() if grad is None}
    assert without == USES[use][2]


def run_uses(group: Any, schedule: str) -> list[list[str]]:
    """A worker's task: for each case the names of the parameters here without a gradient."""
    found = [compared(use, schedule, group) for use in USES]
    return [[name for name, grad in of.items() if grad is None] for of in found]


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
def test_on_gloo(workers: WorkerPool, schedule: str) -> None:
    answers = workers.run("tests.pipeline.test_missing_gradients:run_uses", 2, schedule=schedule)
    for position, use in enumerate(USES):
        names = {name.split(".")[1] for answer in answers for name in answer[position]}
        assert names == USES[use][2]


class Halves(nn.Module):
    """Gives what needs no gradient beside what does."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.lin(x)
        return {"a": hidden, "b": hidden.detach(), "mask": hidden > 0, "n": 3}
