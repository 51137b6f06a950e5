"""What bodies that run with either package share: its names, a small model in stages, and the oracle."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

PACKAGES = {"torch": "torch.distributed.pipelining", "penstock": "penstock.pipelining"}
SINGLE = ("GPipe", "1F1B")
MULTI = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
IN_A_V = ("ZBVZeroBubble", "DualPipeV")
WIDTH, CHUNKS = 4, 4
CPU = torch.device("cpu")
X = torch.linspace(-1, 1, 2 * CHUNKS * WIDTH).reshape(2 * CHUNKS, WIDTH)
Y = X.flip(0)
MODULES = ("_utils", "microbatch", "schedules", "stage", "_IR", "_backward")
sum_loss = nn.MSELoss(reduction="sum")


# ---- a package's names


class Names:
    """A package and its modules; a name that the package does not have is one of theirs."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.top: Any = import_module(PACKAGES[package])
        for name in (*MODULES, "_schedule_visualizer"):
            setattr(self, name, import_module(f"{PACKAGES[package]}.{name}"))

    def __getattr__(self, name: str) -> Any:
        homes = [self.top, *(vars(self)[module] for module in MODULES)]
        return next(getattr(home, name) for home in homes if hasattr(home, name))

    def row(self, text: str) -> list[Any]:
        """Actions from text; a dash or nothing is an idle step."""
        parts = text.split(",") if "," in text else text.split()
        return [None if part in ("", "-") else self._Action.from_str(part) for part in parts]

    def mock(self, ranks: int, stages: int, rank: int = 0) -> Any:
        """A stage that says where it is and no more, as tests of schedules make them."""

        class MockStage(self._PipelineStageBase):  # type: ignore[name-defined,misc]
            def __init__(self) -> None:
                self.submod = self.group = None
                self.num_stages, self.group_size, self.group_rank = stages, ranks, rank

            def _create_grad_recv_info(self, *args: Any, **kwargs: Any) -> None: ...

        MockStage.__abstractmethods__ = frozenset()
        return MockStage()

    def scheduled(self, name: str, ranks: int, each: int, microbatches: int) -> Any:
        held = [self.mock(ranks, ranks * each) for _ in range(each)]
        return self.get_schedule_class(name)(held[0] if name in SINGLE else held, microbatches)


def texts(row: Sequence[Any]) -> list[str]:
    return ["" if action is None else str(action) for action in row]


def refused(kind: type[Exception], call: Any) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


# ---- a model in stages, and the plain model to compare with


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, scale: Tensor | None = None) -> Tensor:
        made: Tensor = self.second(torch.relu(self.first(hidden)))
        return made if scale is None else made * scale


class Model(nn.Module):
    def __init__(self, layers: int, make: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.ModuleList(make() for _ in range(layers))

    def forward(self, hidden: Tensor, **more: Any) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, **more)
        return hidden


def placed(schedule: str, ranks: int) -> dict[int, list[int]]:
    """The stages of each rank."""
    if schedule in SINGLE:
        return {rank: [rank] for rank in range(ranks)}
    if schedule in IN_A_V:
        return {rank: [rank, 2 * ranks - 1 - rank] for rank in range(ranks)}
    return {rank: [rank, rank + ranks] for rank in range(ranks)}


class Seat:
    """This process's stages of a model, and the plain model.

    Args:
        package: whose names.
        group: the process group; None for one process that holds all stages.
        held: the stages of each rank, or the name of the schedule that places them.
        make: makes a layer.
        options: of the stages.
    """

    def __init__(
        self,
        package: str,
        group: Any,
        held: Mapping[int, Sequence[int]] | str,
        make: Callable[[], nn.Module] = Layer,
        **options: Any,
    ) -> None:
        self.names = Names(package)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.ranks = 1 if group is None else dist.get_world_size(group)
        held = placed(held, self.ranks) if isinstance(held, str) else held
        self.mine = list(held[self.rank])
        model = Model(sum(map(len, held.values())), make)
        self.reference = copy.deepcopy(model)
        self.modules = [model.get_submodule(f"layers.{index}") for index in self.mine]
        self.stages: list[Any] = [
            self.names.PipelineStage(m, i, len(model.layers), CPU, group=group, **options)
            for i, m in zip(self.mine, self.modules, strict=True)
        ]
        self.is_first = any(stage.is_first for stage in self.stages)
        self.is_last = any(stage.is_last for stage in self.stages)

    def schedule(self, name: Any, chunks: int = CHUNKS, **options: Any) -> Any:
        """A schedule over the stages, by its name or class; by default with a loss that is a sum."""
        options = {"loss_fn": sum_loss, "scale_grads": False, **options}
        kind = self.names.get_schedule_class(name) if isinstance(name, str) else name
        several = issubclass(kind, self.names.PipelineScheduleMulti)
        return kind(self.stages if several else self.stages[0], chunks, **options)

    def step(self, schedule: Any, call: str = "step", **more: Any) -> tuple[Any, list[Any]]:
        """Run a batch; the output, and the losses on the last stage's rank."""
        losses: list[Any] = []
        if self.is_last and schedule._loss_fn is not None:
            more |= {"target": Y.clone(), "losses": losses}
        args = (X.clone(),) if self.is_first else ()
        return getattr(schedule, call)(*args, **more), losses

    def zero(self) -> None:
        for module in self.modules:
            module.zero_grad()

    def check(self, output: Any, losses: Sequence[Tensor], **more: Any) -> None:
        """Compare output, losses and gradients with the plain model's."""
        self.reference.zero_grad()
        expected = self.reference(X, **more)
        loss = sum_loss(expected, Y)
        loss.backward()
        if self.is_last:
            torch.testing.assert_close(output, expected)
            torch.testing.assert_close(sum(losses), loss)
        for index, module in zip(self.mine, self.modules, strict=True):
            other = self.reference.get_submodule(f"layers.{index}")
            for name, parameter in module.named_parameters():
                wanted = other.get_parameter(name).grad
                torch.testing.assert_close(parameter.grad, wanted, rtol=1e-5, atol=4e-5)

    def gradients(self) -> list[Tensor | None]:
        return [p.grad for module in self.modules for p in module.parameters()]


@contextmanager
def alone() -> Iterator[None]:
    """A process group of one, which torch's package needs."""
    dist.init_process_group(backend="fake", rank=0, world_size=1, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
