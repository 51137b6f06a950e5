"""What programs for torch's package share: the names of either package, and the stages that a rank holds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from penstock.testing import Case, plain_loop

PACKAGES = {"torch": "torch.distributed.pipelining", "penstock": "penstock.pipelining"}
MODULES = "_utils", "microbatch", "schedules", "stage", "_IR", "_backward"
SINGLE = ("GPipe", "1F1B")
IN_A_V = ("ZBVZeroBubble", "DualPipeV")
MULTI = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", *IN_A_V)
WIDTH, CHUNKS = 4, 4
X = torch.linspace(-1, 1, 2 * CHUNKS * WIDTH).reshape(2 * CHUNKS, WIDTH)
Y = X.flip(0)
mean_loss, sum_loss = nn.MSELoss(), nn.MSELoss(reduction="sum")


class Names:
    """A package and its modules; a name that the package does not have is one of theirs."""

    def __init__(self, package: str) -> None:
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

    def mock(self, ranks: int, stages: int) -> Any:
        """A stage that says where it is and no more, as tests of schedules make them."""

        class MockStage(self._PipelineStageBase):  # type: ignore[name-defined,misc]
            def __init__(self) -> None:
                self.submod = self.group = None
                self.num_stages, self.group_size, self.group_rank = stages, ranks, 0

            def _create_grad_recv_info(self, *args: Any, **kwargs: Any) -> None: ...

        MockStage.__abstractmethods__ = frozenset()
        return MockStage()

    def scheduled(self, name: str, ranks: int, each: int, microbatches: int) -> Any:
        """A schedule over stages that do nothing."""
        stages = [self.mock(ranks, ranks * each) for _ in range(each)]
        return self.get_schedule_class(name)(stages[0] if name in SINGLE else stages, microbatches)


OURS, THEIRS = Names("penstock"), Names("torch")
EITHER = {"penstock": OURS, "torch": THEIRS}


@contextmanager
def alone() -> Iterator[None]:
    """A process group of one, which torch's package needs."""
    dist.init_process_group(backend="fake", rank=0, world_size=1, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, scale: Tensor | None = None) -> Tensor:
        out: Tensor = self.second(torch.relu(self.first(hidden)))
        return out if scale is None else out * scale


class Chain(nn.ModuleList):
    """The plain model of stages: each takes what the one before gives."""

    def forward(self, *values: Any, **kwargs: Any) -> Any:
        for module in self:
            output = module(*values, **kwargs)
            values = tuple(output) if isinstance(output, tuple | list) else (output,)
        return output


def placed(schedule: str, ranks: int) -> dict[int, list[int]]:
    """The stages of each rank."""
    if schedule in SINGLE:
        return {rank: [rank] for rank in range(ranks)}
    if schedule in IN_A_V:
        return {rank: [rank, 2 * ranks - 1 - rank] for rank in range(ranks)}
    return {rank: [rank, rank + ranks] for rank in range(ranks)}


class Held:
    """The stages of a model that this process holds, and the plain model.

    Args:
        names: of which package.
        group: the process group; None for one process that holds all stages.
        at: the stages of each rank, or the name of the schedule that places them.
        make: makes the stages' modules; by default layers.
        loss: a sum or a mean over the samples.
        options: of the stages; ``each=`` gives those of one stage by its index and module.
    """

    half = slice(None)
    """The part of the batch that this replica has."""

    def __init__(
        self,
        names: Names,
        group: Any = None,
        at: Mapping[int, Sequence[int]] | str = "Interleaved1F1B",
        make: Callable[[], Sequence[nn.Module]] | None = None,
        loss: Callable[..., Tensor] = sum_loss,
        **options: Any,
    ) -> None:
        self.names, self.loss = names, loss
        self.rank, ranks = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
        places = placed(at, ranks) if isinstance(at, str) else at
        self.here, count = [*places[self.rank]], sum(map(len, places.values()))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            modules = [Layer() for _ in range(count)] if make is None else make()
        self.plain = Chain(copy.deepcopy(modules))
        self.modules: list[Any] = [modules[index] for index in self.here]
        each = options.pop("each", lambda index, module: {})
        self.stages: list[Any] = [
            names.PipelineStage(
                *(module, index, count, torch.device("cpu")),
                **{"group": group, **options, **each(index, module)},
            )
            for index, module in zip(self.here, self.modules, strict=True)
        ]
        self.is_first, self.is_last = 0 in self.here, count - 1 in self.here

    def schedule(self, kind: Any, chunks: int = CHUNKS, **options: Any) -> Any:
        """A schedule over the stages, by its name or class; by default with the loss."""
        options = {"loss_fn": self.loss, "scale_grads": self.loss is not sum_loss, **options}
        kind = self.names.get_schedule_class(kind) if isinstance(kind, str) else kind
        several = issubclass(kind, self.names.PipelineScheduleMulti)
        return kind(self.stages if several else self.stages[0], chunks, **options)

    def step(self, schedule: Any, call: str = "step", **more: Any) -> tuple[Any, list[Any]]:
        """Run a batch; the output, and the losses on the last stage's rank."""
        losses: list[Any] = []
        if self.is_last and schedule._loss_fn is not None:
            more |= {"target": Y[self.half].clone(), "losses": losses}
        args = (X[self.half].clone(),) if self.is_first else ()
        return getattr(schedule, call)(*args, **more), losses

    def check(
        self,
        output: Any,
        losses: Sequence[Tensor],
        loss: Callable[..., Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Compare output, losses and gradients with the plain model's; ``loss`` is the whole batch's."""
        loss = loss or self.loss
        _, expected = plain_loop(Case(self.plain, (X,), Y, loss, kwargs))
        if self.is_last:
            wanted = self.plain(X[self.half], **kwargs)
            if output is not None:
                torch.testing.assert_close(output, wanted)
            total = torch.stack([*losses]).sum() / (1 if loss is not mean_loss else len(losses))
            torch.testing.assert_close(total, loss(wanted, Y[self.half]))
        for name, grad in self.gradients().items():
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            torch.testing.assert_close(whole, expected[name], rtol=1e-5, atol=4e-5)

    def check_steps(self, schedule: Any, times: int = 2) -> None:
        """Run some steps; the last one is as the plain model's."""
        for _ in range(times):
            for module in self.modules:
                module.zero_grad()
            result = self.step(schedule)
        self.check(*result)

    def gradients(self) -> dict[str, Any]:
        """The gradients here by their names in the plain model."""
        named = zip(self.here, self.modules, strict=True)
        return {f"{i}.{name}": p.grad for i, m in named for name, p in m.named_parameters()}
