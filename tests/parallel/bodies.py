"""Stages that are replicated, sharded or tensor-parallel, over two by two processes, beside one process."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from penstock import add_loss
from penstock.pipelining import PipelineStage, Schedule1F1B, SplitPoint, build_stage, pipeline
from penstock.pipelining.schedules import get_schedule_class

SINGLE = ("GPipe", "1F1B")
IN_A_V = ("ZBVZeroBubble", "DualPipeV")
SCHEDULES = (*SINGLE, "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", *IN_A_V)
X = torch.linspace(-1, 1, 16 * 3 * 4, dtype=torch.float64).reshape(16, 3, 4)
Y = X.flip(0)


class Collectives(TorchDispatchMode):
    """Counts what goes to process groups."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "c10d" in name:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, hidden: Tensor) -> Any:
        return hidden + self.down(torch.tanh(self.up(hidden)))


def stages_of(schedule: str) -> tuple[int, list[list[int]]]:
    """How many stages there are, and those of each of the two ranks."""
    if schedule in SINGLE:
        return 2, [[0], [1]]
    return 4, [[0, 3], [1, 2]] if schedule in IN_A_V else [[0, 2], [1, 3]]


def models(count: int) -> tuple[list[nn.Module], nn.Module]:
    """The stages' modules, and a copy of the whole."""
    torch.manual_seed(0)
    modules: list[nn.Module] = [Mlp().double() for _ in range(count)]
    return modules, copy.deepcopy(nn.Sequential(*modules))


def run(
    schedule: str, held: Sequence[tuple[int, nn.Module]], count: int, group: Any, batch: Any
) -> dict[str, int]:
    """Two steps without zeroing gradients; what was communicated in the second beside messages."""
    x, y = batch
    stages = [PipelineStage(module, i, count, "cpu", group=group) for i, module in held]
    chosen: Any = get_schedule_class(schedule)
    made = chosen(stages[0] if schedule in SINGLE else stages, 4, loss_fn=nn.functional.mse_loss)
    for _ in range(2):
        args = (x,) if any(stage.is_first for stage in stages) else ()
        target = {"target": y} if any(stage.is_last for stage in stages) else {}
        with Collectives() as told:
            made.step(*args, **target)
    return dict(told.counts)


def gap(modules: Sequence[tuple[int, nn.Module]], whole: nn.Module) -> float:
    """How far the gradients are from those of the whole model in one process."""
    for _ in range(2):
        nn.functional.mse_loss(whole(X), Y).backward()
    return largest_gap(modules, whole)


def largest_gap(modules: Sequence[tuple[int, nn.Module]], whole: nn.Module) -> float:
    largest = 0.0
    for index, module in modules:
        expected = whole.get_submodule(str(index)).parameters()
        for mine, theirs in zip(module.parameters(), expected, strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            found = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
            largest = max(largest, float((found - theirs.grad).abs().max()))
    return largest


def run_replicas(group: Any, schedule: str, how: str) -> dict[str, Any]:
    """A worker's task: two replicas of a pipeline of two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica, rank = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
    count, placed = stages_of(schedule)
    modules, whole = models(count)
    mine = [(index, modules[index]) for index in placed[rank]]
    half = slice(replica * 8, replica * 8 + 8)
    wrapped = [(index, wrap(module, how, mesh["dp"])) for index, module in mine]
    counts = run(schedule, wrapped, count, mesh, (X[half], Y[half]))
    return {"gap": gap(mine, whole), "counts": counts, "stages": len(mine)}


def run_traced_replicas(group: Any, how: str) -> dict[str, Any]:
    """A worker's task: two replicas of a pipeline whose stages were traced and then wrapped."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica, rank = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
    _, whole = models(2)
    pipe = pipeline(copy.deepcopy(whole), (X[:2],), split_spec={"1": SplitPoint.BEGINNING})
    module = pipe.get_stage_module(rank)
    wrapped = wrap(module, how, mesh["dp"])
    stage = build_stage(wrapped, rank, pipe.info(), "cpu", mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    half = slice(replica * 8, replica * 8 + 8)
    for _ in range(2):
        if rank:
            schedule.step(target=Y[half])
        else:
            schedule.step(X[half])
    return {"gap": gap([(rank, module.get_submodule(str(rank)))], whole)}


def wrap(module: nn.Module, how: str, mesh: DeviceMesh) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(module, process_group=mesh.get_group())
    nameless = DeviceMesh.from_group(mesh.get_group(), "cpu")
    fully_shard(module, mesh=nameless if how == "nameless fsdp" else mesh)
    return module


class Spread(nn.Module):
    """Passes DTensors from stage to stage; plain tensors go in and come out."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, first: bool, last: bool) -> None:
        super().__init__()
        self.module, self.mesh, self.first, self.last = module, mesh, first, last

    def forward(self, hidden: Tensor) -> Tensor:
        if self.first:
            hidden = DTensor.from_local(hidden, self.mesh, [Replicate()])
        assert isinstance(hidden, DTensor)
        made: DTensor = self.module(hidden)
        return made.full_tensor() if self.last else made


def run_tensor_parallel(group: Any, schedule: str, crossing: bool) -> dict[str, Any]:
    """A worker's task: a pipeline of two ranks, each of two processes that share its tensors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    count, placed = stages_of(schedule)
    modules, whole = models(count)
    mine = [(index, modules[index]) for index in placed[mesh["pp"].get_local_rank()]]
    row = RowwiseParallel(use_local_output=False) if crossing else RowwiseParallel()
    for _, module in mine:
        parallelize_module(module, mesh["tp"], {"up": ColwiseParallel(), "down": row})
    held = [
        (i, Spread(module, mesh["tp"], i == 0, i == count - 1) if crossing else module)
        for i, module in mine
    ]
    run(schedule, held, count, mesh, (X, Y))
    return {"gap": gap(mine, whole)}


# ---- stages that end in a collective: what leaves them is still arriving


class Ending(nn.Module):
    """Nothing waits for what its last linear layer gives. It passes a second value on that is not used."""

    module: Any

    def __init__(self, module: nn.Module, mesh: DeviceMesh, layout: Any, spread: bool) -> None:
        super().__init__()
        plan = {
            "up": ColwiseParallel(input_layouts=layout or Replicate()),
            "down": RowwiseParallel(
                output_layouts=layout or Replicate(), use_local_output=layout is None
            ),
        }
        self.module = parallelize_module(module, mesh, plan)
        self.mesh, self.layout, self.spread = mesh, layout, spread

    def forward(self, hidden: Tensor, _: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.layout is not None and self.spread:
            hidden = DTensor.from_local(hidden, self.mesh, [Replicate()])
            hidden = hidden.redistribute(placements=[self.layout])
        inner = self.module.up(hidden)
        made, unused = self.module.down(torch.tanh(inner)), self.module.down(torch.sin(inner))
        add_loss("size", made.square().mean(), weight=0.0)
        return made, unused


def ending_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Of DTensors it is one itself, and a sum that is still to be made where they are sharded."""
    made = output[0]
    if isinstance(made, DTensor):
        spread = DTensor.from_local(target, made.device_mesh, [Replicate()])
        target = spread.redistribute(placements=made.placements)
    return (made - target).square().mean()


def without_residuals(modules: Any, hidden: Tensor) -> Tensor:
    for module in modules:
        hidden = module.down(torch.tanh(module.up(hidden)))
    return hidden


def run_ending(group: Any, schedule: str) -> dict[str, dict[str, float]]:
    """A worker's task: for each layout how far gradients, losses and outputs are from one process.

    The second batch is of another size.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    layouts = {"tensors": None, "replicated": Replicate(), "sharded": Shard(1)}
    return {name: _run_ending(schedule, layout, mesh) for name, layout in layouts.items()}


def _run_ending(schedule: str, layout: Placement | None, mesh: DeviceMesh) -> dict[str, float]:
    count, placed = stages_of(schedule)
    modules, whole = models(count)
    mine = [(index, modules[index]) for index in placed[mesh["pp"].get_local_rank()]]
    stages = [
        PipelineStage(
            Ending(module, mesh["tp"], layout, index == 0), index, count, "cpu", group=mesh
        )
        for index, module in mine
    ]
    chosen: Any = get_schedule_class(schedule)
    made = chosen(stages[0] if schedule in SINGLE else stages, 4, loss_fn=ending_loss)
    evaluated = 0.0
    x, y = X[:, :2], Y[:, :2]
    for size in (16, 8):
        args = (x[:size],) if any(stage.is_first for stage in stages) else ()
        target = {"target": y[:size]} if any(stage.is_last for stage in stages) else {}
        losses: list[Tensor] = []
        made.step(*args, **target, losses=losses)
        output = made.eval(*args, **target)
        expected = without_residuals(whole, x[:size])
        loss = nn.functional.mse_loss(expected, y[:size])
        loss.backward()
        if output is not None:
            told = sum(float(one) for one in losses) / 4
            evaluated = max(evaluated, abs(told - float(loss)))
            found = output[0].full_tensor() if layout is not None else output[0]
            evaluated = max(evaluated, float((found - expected).abs().max()))
    return {"gap": largest_gap(mine, whole), "evaluated": evaluated}


# ---- pending sums between stages


class Spreading(nn.Module):
    """A linear layer on DTensors, with a weight that is cut by columns or rows, or replicated."""

    def __init__(self, mesh: DeviceMesh, placement: Placement, first: bool, last: bool) -> None:
        super().__init__()
        self.mesh, self.first, self.last = mesh, first, last
        weight = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4)
        self.weight = nn.Parameter(distribute_tensor(weight, mesh, [placement]))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.first:
            hidden = DTensor.from_local(hidden, self.mesh, [Replicate()], run_check=False)
        out: Any = nn.functional.linear(hidden, self.weight)
        found: Tensor = out.full_tensor() if self.last else out
        return found


def run_pending(group: Any, schedule: str) -> list[dict[str, Any]]:
    """A worker's task: placements and values of gradients, in a pipeline and in a plain loop."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    places = [Replicate(), Shard(0), Shard(1), Replicate()]
    _, placed = stages_of(schedule)
    sides = [
        [Spreading(mesh["tp"], of, i == 0, i == 3) for i, of in enumerate(places)] for _ in "ab"
    ]
    here = placed[mesh["pp"].get_local_rank()]
    run(schedule, [(i, sides[0][i]) for i in here], 4, mesh, (X[:, 0], Y[:, 0]))
    for _ in range(2):
        nn.functional.mse_loss(nn.Sequential(*sides[1])(X[:, 0]), Y[:, 0]).backward()
    found = []
    for modules in sides:
        grads: list[Any] = [modules[i].weight.grad for i in here]
        found.append(
            {
                "placed": [str(g.placements) for g in grads],
                "values": [g.full_tensor().flatten().tolist() for g in grads],
            }
        )
    return found
