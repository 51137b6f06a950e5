"""What programs that run with either package share: its names, a model in stages, and the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

PACKAGES = {"torch": "torch.distributed.pipelining", "penstock": "penstock.pipelining"}
SINGLE = ("GPipe", "1F1B")
IN_A_V = ("ZBVZeroBubble", "DualPipeV")
MULTI = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", *IN_A_V)
WIDTH, CHUNKS = 4, 4
CPU = torch.device("cpu")
X = torch.linspace(-1, 1, 2 * CHUNKS * WIDTH).reshape(2 * CHUNKS, WIDTH)
Y = X.flip(0)
MODULES = (
    *("_utils", "microbatch", "schedules", "stage", "_IR", "_backward"),
    "_schedule_visualizer",
)
mean_loss, sum_loss = nn.MSELoss(), nn.MSELoss(reduction="sum")


# ---- a package's names


class Names:
    """A package and its modules; a name that the package does not have is one of theirs."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.top: Any = import_module(PACKAGES[package])
        for name in MODULES:
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


@contextmanager
def alone() -> Iterator[None]:
    """A process group of one, which torch's package needs."""
    dist.init_process_group(backend="fake", rank=0, world_size=1, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


# ---- a model in stages, and the plain model to compare with


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, scale: Tensor | None = None) -> Tensor:
        out: Tensor = self.second(torch.relu(self.first(hidden)))
        return out if scale is None else out * scale


def placed(schedule: str, ranks: int) -> dict[int, list[int]]:
    """The stages of each rank."""
    if schedule in SINGLE:
        return {rank: [rank] for rank in range(ranks)}
    if schedule in IN_A_V:
        return {rank: [rank, 2 * ranks - 1 - rank] for rank in range(ranks)}
    return {rank: [rank, rank + ranks] for rank in range(ranks)}


Make = Callable[[], Sequence[nn.Module]]


class Seat:
    """This process's stages of a model, and the plain model.

    Args:
        package: whose names.
        group: the process group; None for one process that holds all stages.
        held: the stages of each rank, or the name of the schedule that places them.
        make: makes the stages' modules; by default layers.
        loss: a sum or a mean over the samples.
        options: of the stages; ``each=`` gives those of one stage by its index and module.
    """

    half = slice(None)
    """The part of the batch that this replica has."""

    def __init__(
        self,
        package: str,
        group: Any,
        held: Mapping[int, Sequence[int]] | str,
        make: Make | None = None,
        loss: Callable[..., Tensor] = sum_loss,
        **options: Any,
    ) -> None:
        self.names, self.loss = Names(package), loss
        self.rank = 0 if group is None else dist.get_rank(group)
        self.ranks = 1 if group is None else dist.get_world_size(group)
        held = placed(held, self.ranks) if isinstance(held, str) else held
        self.mine = list(held[self.rank])
        self.count = sum(map(len, held.values()))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            modules = [Layer() for _ in range(self.count)] if make is None else make()
        self.reference = nn.ModuleList(copy.deepcopy(modules))
        self.modules: list[Any] = [modules[index] for index in self.mine]
        each = options.pop("each", lambda index, module: {})
        self.stages: list[Any] = [
            self.names.PipelineStage(
                *(module, index, self.count, CPU), group=group, **options, **each(index, module)
            )
            for index, module in zip(self.mine, self.modules, strict=True)
        ]
        self.is_first, self.is_last = 0 in self.mine, self.count - 1 in self.mine

    def schedule(self, name: Any, chunks: int = CHUNKS, **options: Any) -> Any:
        """A schedule over the stages, by its name or class; by default with the loss."""
        options = {"loss_fn": self.loss, "scale_grads": self.loss is not sum_loss, **options}
        kind = self.names.get_schedule_class(name) if isinstance(name, str) else name
        several = issubclass(kind, self.names.PipelineScheduleMulti)
        return kind(self.stages if several else self.stages[0], chunks, **options)

    def step(self, schedule: Any, call: str = "step", **more: Any) -> tuple[Any, list[Any]]:
        """Run a batch; the output, and the losses on the last stage's rank."""
        losses: list[Any] = []
        if self.is_last and schedule._loss_fn is not None:
            more |= {"target": Y[self.half].clone(), "losses": losses}
        args = (X[self.half].clone(),) if self.is_first else ()
        return getattr(schedule, call)(*args, **more), losses

    def zero(self) -> None:
        for module in self.modules:
            module.zero_grad()

    def expected(self, x: Tensor = X, **more: Any) -> Any:
        """The plain model's output."""
        value: Any = x
        for module in self.reference:
            value = (
                module(*value, **more) if type(value) in (tuple, list) else module(value, **more)
            )
        return value

    def check(self, output: Any, losses: list[Tensor]) -> None:
        """Compare output, losses and gradients with the plain model's."""
        self.reference.zero_grad()
        expected = self.expected()
        self.loss(expected, Y).backward()
        if self.is_last and output is not None:
            wanted = expected[self.half] if isinstance(expected, Tensor) else expected
            torch.testing.assert_close(output, wanted)
            part = self.loss(wanted, Y[self.half])
            total = torch.stack(losses).sum() / (1 if self.loss is not mean_loss else len(losses))
            torch.testing.assert_close(total, part)
        for index, module in zip(self.mine, self.modules, strict=True):
            theirs = self.reference[index].parameters()
            for mine, other in zip(module.parameters(), theirs, strict=True):
                grad = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
                torch.testing.assert_close(grad, other.grad, rtol=1e-5, atol=4e-5)

    def check_steps(self, schedule: Any, times: int = 2) -> None:
        """Some steps; the last one is as the plain model's."""
        for _ in range(times):
            self.zero()
            result = self.step(schedule)
        self.check(*result)

    def gradients(self) -> list[Tensor | None]:
        return [p.grad for module in self.modules for p in module.parameters()]


class Replicas(Seat):
    """The same for two replicas or shards of two ranks, which share the batch; the loss is a mean.

    The stages are made without data, wrapped, and filled then.

    Args:
        package: whose names.
        schedule: the name of the schedule that places the stages.
        wrap: replicates or shards a module over a mesh.
    """

    def __init__(self, package: str, schedule: str, wrap: Callable[[nn.Module, Any], Any]) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        part = torch.zeros(1, WIDTH, requires_grad=True)

        def each(index: int, module: nn.Module) -> dict[str, Any]:
            module.to("meta")
            # torch's package needs them here.
            examples = {"input_args": part if index else part.detach(), "output_args": part}
            return examples if wrap is ddp else {}

        super().__init__(package, mesh["pp"].get_group(), schedule, loss=mean_loss, each=each)
        start = 4 * mesh["dp"].get_local_rank()
        self.half = slice(start, start + 4)
        for place, stage in enumerate(self.stages):
            module, values = self.modules[place], self.reference[self.mine[place]].state_dict()
            if wrap is ddp:
                # It compares the replicas' values, so there must be some.
                fill(module, values)
            self.modules[place] = stage.submod = wrap(module, mesh["dp"])
            if wrap is not ddp:
                fill(module, values)


def fill(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give parameters that have no memory yet their values."""
    module.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            value = values[name]
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                value = distribute_tensor(value, mesh, placements, src_data_rank=None)
            parameter.copy_(value)


def ddp(module: nn.Module, mesh: Any) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh.get_group())
