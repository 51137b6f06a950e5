"""Set-up leaves no trace, the first step equals every later one, and stages touch nothing but their own."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock import Pipeline
from tests.pipeline.models import assert_same, gradients, mean_loss

WIDTH = 4
X = torch.linspace(-1, 1, 8 * WIDTH, dtype=torch.float64).reshape(8, WIDTH)
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "ZB-V", "DualPipeV"]


class Restless(nn.Module):
    """Changes itself whenever it is called, and looks at data where asked."""

    def __init__(self, *, looks: bool) -> None:
        super().__init__()
        self.lin = nn.utils.parametrizations.spectral_norm(
            nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        )
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        self.calls, self.looks = 0, looks

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.looks and bool(torch.isnan(x).any()):
            raise ValueError("not a number")
        hidden: Tensor = self.norm(self.lin(x)) + random.random() + np.random.rand()
        return hidden + torch.rand(WIDTH, dtype=x.dtype, device=x.device)


def restless(looks: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Restless(looks=looks) for _ in range(4)))


def seeded() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def part(module: nn.Module, index: int) -> Restless:
    found = module[index]  # type: ignore[index] # a Sequential
    assert isinstance(found, Restless)
    return found


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_calls_each_module_once_a_microbatch(schedule: str, looks: bool) -> None:
    model = restless(looks)
    fired = {"forward": 0, "pre": 0}
    for module in model:
        module.register_forward_hook(lambda *_: fired.update(forward=fired["forward"] + 1))
        module.register_forward_pre_hook(lambda *_: fired.update(pre=fired["pre"] + 1))
    pipe = Pipeline(model, schedule=schedule, ranks=2, microbatches=4, loss_fn=mean_loss)
    for step in (1, 2):
        if step == 2:
            fired |= dict.fromkeys(fired, 0)  # in the first step hooks also saw a run without data
        pipe.step(X, target=X)
        assert step == 1 or fired == dict.fromkeys(fired, 4 * 4)
        assert [part(model, i).calls for i in range(4)] == [step * 4] * 4
        assert [int(part(model, i).norm.num_batches_tracked or 0) for i in range(4)] == [
            step * 4
        ] * 4


@pytest.mark.parametrize("looks", [False, True])
def test_a_first_step_is_like_one_whose_shapes_are_known(looks: bool) -> None:
    expected, model = restless(looks), restless(looks)
    for module in (expected, model):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
    versions = [parameter._version for parameter in model.parameters()]
    pipes = [
        Pipeline(of, schedule="DualPipeV", ranks=1, microbatches=2, loss_fn=mean_loss)
        for of in (model, expected)
    ]
    # This one has found all shapes before.
    pipes[1].predict(X)
    pipes[1].eval(X, target=X)
    for pipe in pipes:
        seeded()
        pipe.step(X, target=X)
    assert [parameter._version for parameter in model.parameters()] == versions
    states = [module.state_dict() for module in (expected, model)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        assert torch.equal(found.grad, wanted.grad)


# ---- what stages do to what they are given


class InPlace(nn.Module):
    """Changes what it is given before it does anything else, and looks at gradients by a hook."""

    def __init__(self, fired: list[int]) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.fired = fired

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: self.fired.append(1))
        hidden: Tensor = self.lin(x.mul_(2))
        return hidden


def in_place(fired: list[int]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(InPlace(fired) for _ in range(4)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_in_place_as_first_op_and_hooks_in_every_step(schedule: str) -> None:
    fired: list[int] = []
    expected = in_place([])
    mean_loss(expected(X.clone()), X).backward()
    pipe = Pipeline(in_place(fired), schedule=schedule, ranks=2, microbatches=4, loss_fn=mean_loss)
    batch = X.clone()
    stages = pipe.schedule.stages
    for step in range(1, 5):
        pipe.zero_grad()
        pipe.step(batch, target=X)
        # Inside a stage of two modules the second one's input has a graph too.
        assert len(fired) == step * 4 * 3, stages
        assert torch.equal(batch, X)
        assert_same(gradients(pipe), gradients(expected))
