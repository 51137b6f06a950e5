"""What the bodies for one process share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.pipelining.bodies import PACKAGES


class Names:
    """A package's modules."""

    def __init__(self, package: str) -> None:
        self.top: Any = import_module(PACKAGES[package])
        for name in (
            "schedules",
            "microbatch",
            "stage",
            "_utils",
            "_IR",
            "_backward",
            "_debug",
            "_schedule_visualizer",
        ):
            setattr(self, name, import_module(f"{PACKAGES[package]}.{name}"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.top, name)

    def row(self, text: str) -> list[Any]:
        return [self.schedules._Action.from_str(action) for action in text.split(",")]

    def mock(self, ranks: int, stages: int) -> Any:
        """A stage that says where it is and no more, as tests of schedules make them."""

        class MockStage(self.schedules._PipelineStageBase):  # type: ignore[name-defined,misc]
            def __init__(self, **options: Any) -> None:
                self.submod = None
                self.num_stages = options.get("num_stages", 1)
                self.group_size = options.get("group_size", 1)
                self.group_rank = options.get("group_rank", 0)
                self.group = options.get("group")

            def _create_grad_recv_info(self, *args: Any, **kwargs: Any) -> None:
                return None

            def _prepare_forward_infra(self, *args: Any) -> None:
                pass

            def _prepare_backward_infra(self, *args: Any) -> None:
                pass

        MockStage.__abstractmethods__ = frozenset()
        return MockStage(num_stages=stages, group_size=ranks)

    def scheduled(self, name: str, ranks: int, each: int, microbatches: int) -> Any:
        stages = [self.mock(ranks, ranks * each) for _ in range(each)]
        return self.schedules.get_schedule_class(name)(stages, microbatches)


def texts(row: list[Any]) -> list[str]:
    return ["" if action is None else str(action) for action in row]


def line(row: list[Any]) -> str:
    return " ".join(texts(row))


def refused(kind: type[Exception], call: Any) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


class Mlp(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net1, self.relu, self.net2 = (
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(self.relu(self.net1(x)))  # type: ignore[no-any-return]


class Layers(nn.Module):
    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp() for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@contextmanager
def alone() -> Iterator[None]:
    dist.init_process_group(backend="fake", rank=0, world_size=1, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def check_gradients(model: nn.Module, plain: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
