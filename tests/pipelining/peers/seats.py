"""This process's stages of a model under either package's names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH = 4
CHUNKS = 4
PACKAGES = {"torch": "torch.distributed.pipelining", "penstock": "penstock.pipelining"}
sum_loss = nn.MSELoss(reduction="sum")


def names_of(package: str) -> Any:
    """Everything of a package and its modules, as one namespace."""
    found: dict[str, Any] = {}
    for module in ("._utils", ".microbatch", ".schedules", ".stage", ""):
        found |= vars(import_module(PACKAGES[package] + module))
    return SimpleNamespace(**found)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(8, WIDTH, generator=generator),
        torch.randn(8, WIDTH, generator=generator),
    )


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        made: Tensor = self.second(torch.relu(self.first(hidden)))
        return made


class Model(nn.Module):
    def __init__(self, layers: int, make: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(make() for _ in range(layers))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Seat:
    """This process's stages of a model, and the model's copy to compare with."""

    def __init__(
        self,
        package: str,
        group: Any,
        held: Mapping[int, Sequence[int]],
        make: Callable[[], nn.Module] = Layer,
        **options: Any,
    ) -> None:
        self.names = names_of(package)
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        count = sum(map(len, held.values()))
        model = Model(count, make)
        self.reference = copy.deepcopy(model)
        self.mine = list(held[self.rank])
        self.modules = [model.get_submodule(f"layers.{index}") for index in self.mine]
        device = torch.device("cpu")
        self.stages = [
            self.names.PipelineStage(module, index, count, device, group=group, **options)
            for index, module in zip(self.mine, self.modules, strict=True)
        ]

    def step(self, schedule: Any, call: str = "step", **more: Any) -> tuple[Any, list[Any]]:
        x, target = batch()
        args = (x,) if self.stages[0].is_first else ()
        losses: list[Any] = []
        if any(stage.is_last for stage in self.stages):
            more |= {"target": target, "losses": losses}
        return getattr(schedule, call)(*args, **more), losses

    def zero(self) -> None:
        for module in self.modules:
            module.zero_grad()

    def check(self, output: Any, losses: list[Any], rtol: float = 1e-5) -> None:
        """The reference's output, loss and gradients."""
        x, target = batch()
        self.reference.zero_grad()
        expected = self.reference(x)
        loss = sum_loss(expected, target)
        loss.backward()
        if any(stage.is_last for stage in self.stages):
            torch.testing.assert_close(output, expected)
            torch.testing.assert_close(sum(losses), loss)
        for index, module in zip(self.mine, self.modules, strict=True):
            other = self.reference.get_submodule(f"layers.{index}")
            for name, parameter in module.named_parameters():
                torch.testing.assert_close(
                    parameter.grad, other.get_parameter(name).grad, rtol=rtol, atol=4e-5
                )


def one_each(group: Any) -> dict[int, list[int]]:
    return {rank: [rank] for rank in range(dist.get_world_size(group))}
