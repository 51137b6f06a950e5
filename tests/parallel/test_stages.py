"""Wrapped stages under torch's names: equal to one process, and reduced once a step; DTensors that travel."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss

from penstock import add_loss
from penstock.pipelining import PipelineStage, SplitPoint, build_stage, pipeline
from penstock.pipelining.schedules import get_schedule_class
from tests.parallel.bodies import Collectives, X, Y, chain, gap_of, half_of, mesh_of, wrap
from tests.processes import in_processes

IN_A_V = ("ZBVZeroBubble", "DualPipeV")
BY_DAY = [
    "1F1B",
    "ZBVZeroBubble",
    pytest.param("Interleaved1F1B", marks=pytest.mark.nightly),
    pytest.param("DualPipeV", marks=pytest.mark.nightly),
]
REDUCES = {"ddp": "allreduce", "fsdp": "reduce_scatter"}


def stages_on(rank: int, schedule: str) -> tuple[list[int], int]:
    """The stages of one of two ranks, and how many there are."""
    if schedule == "1F1B":
        return [rank], 2
    return [rank, 3 - rank if schedule in IN_A_V else rank + 2], 4


def schedule_of(name: str, stages: list[Any], loss_fn: Any = mse_loss) -> Any:
    kind: Any = get_schedule_class(name)
    return kind(stages[0] if name == "1F1B" else stages, 4, loss_fn=loss_fn)


def arguments(stages: list[Any], x: Tensor, y: Tensor) -> tuple[Any, dict[str, Any]]:
    """What these stages are given of a batch."""
    args = (x,) if any(stage.is_first for stage in stages) else ()
    return args, {"target": y} if any(stage.is_last for stage in stages) else {}


def train(schedule: str, stages: list[Any], x: Tensor, y: Tensor) -> dict[str, int]:
    """Two steps without zeroing gradients; what was communicated in the second beside messages."""
    runs = schedule_of(schedule, stages)
    args, target = arguments(stages, x, y)
    for _ in range(2):
        with Collectives() as collectives:
            runs.step(*args, **target)
    return dict(collectives.counts)


@pytest.mark.parametrize(
    "traced", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["", "traced"]
)
@pytest.mark.parametrize("how", ["ddp", "fsdp", "nameless fsdp"])
@pytest.mark.parametrize("schedule", BY_DAY)
@in_processes(4, 100.0)
def test_replicas_equal_one_process(group: Any, schedule: str, how: str, traced: bool) -> None:
    """Two of a pipeline of two ranks."""
    mesh = mesh_of("dp", "pp")
    half = half_of(mesh)
    here, count = stages_on(mesh.get_local_rank("pp"), schedule)
    whole = chain(count)
    split = {str(index): SplitPoint.BEGINNING for index in range(1, count)}
    pipe = pipeline(copy.deepcopy(whole), (X[:2],), split_spec=split) if traced else None
    modules = {i: pipe.get_stage_module(i) if pipe else copy.deepcopy(whole[i]) for i in here}
    parts = {i: wrap(module, how, mesh) for i, module in modules.items()}
    stages = [
        build_stage(part, i, pipe.info(), "cpu", mesh["pp"].get_group())
        if pipe
        else PipelineStage(part, i, count, "cpu", group=mesh)
        for i, part in parts.items()
    ]
    counts = train(schedule, stages, X[half], Y[half])
    for _ in range(2):
        mse_loss(whole(X), Y).backward()
    reductions = sum(n for op, n in counts.items() if REDUCES[how.split()[-1]] in op)
    assert gap_of(names_in(modules, traced), whole) < 1e-12
    assert reductions == len(stages)


def names_in(modules: dict[int, nn.Module], traced: bool = False) -> list[tuple[str, nn.Parameter]]:
    """The parameters of stages by their names in the whole model, which traced modules have kept."""
    pairs = [(i, *pair) for i, module in modules.items() for pair in module.named_parameters()]
    return [(name if traced else f"{i}.{name}", parameter) for i, name, parameter in pairs]


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
        used, unused = self.module.down(torch.tanh(inner)), self.module.down(torch.sin(inner))
        add_loss("size", used.square().mean(), weight=0.0)
        return used, unused


def ending_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Of DTensors it is one itself, and a sum that is still to be made where they are sharded."""
    used = output[0]
    if isinstance(used, DTensor):
        spread = DTensor.from_local(target, used.device_mesh, [Replicate()])
        target = spread.redistribute(placements=used.placements)
    return (used - target).square().mean()


@pytest.mark.parametrize("layout", ["tensors", "replicated", "sharded"])
@pytest.mark.parametrize("schedule", BY_DAY)
@in_processes(4, 100.0)
def test_what_leaves_a_stage_may_still_be_arriving(group: Any, schedule: str, layout: str) -> None:
    """Gradients, losses and outputs are those of one process; the second batch is of another size."""
    mesh = mesh_of("pp", "tp")
    of: Any = {"tensors": None, "replicated": Replicate(), "sharded": Shard(1)}[layout]
    here, count = stages_on(mesh.get_local_rank("pp"), schedule)
    whole: Any = chain(count)
    modules = {i: copy.deepcopy(whole[i]) for i in here}
    parts = {i: Ending(module, mesh["tp"], of, i == 0) for i, module in modules.items()}
    stages = [PipelineStage(part, i, count, "cpu", group=mesh) for i, part in parts.items()]
    runs = schedule_of(schedule, stages, ending_loss)
    for size in (16, 8):
        args, target = arguments(stages, X[:size, :2], Y[:size, :2])
        losses: list[Tensor] = []
        runs.step(*args, **target, losses=losses)
        output = runs.eval(*args, **target)
        expected = X[:size, :2]
        for module in whole:
            expected = module.down(torch.tanh(module.up(expected)))
        loss = mse_loss(expected, Y[:size, :2])
        loss.backward()
        if output is not None:
            mean = sum(float(one) for one in losses) / 4
            actual = output[0].full_tensor() if of is not None else output[0]
            assert mean == pytest.approx(float(loss), abs=1e-12)
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    assert gap_of(names_in(modules), whole) < 1e-12


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
        result: Tensor = out.full_tensor() if self.last else out
        return result


@pytest.mark.parametrize(
    "schedule", [pytest.param("Interleaved1F1B", marks=pytest.mark.nightly), "ZBVZeroBubble"]
)
@in_processes(4)
def test_sums_stay_pending_as_in_a_plain_loop(group: Any, schedule: str) -> None:
    """Placements and values of gradients."""
    mesh = mesh_of("pp", "tp")
    places = [Replicate(), Shard(0), Shard(1), Replicate()]
    here, _ = stages_on(mesh.get_local_rank("pp"), schedule)
    sides = [
        [Spreading(mesh["tp"], of, i == 0, i == 3) for i, of in enumerate(places)] for _ in "ab"
    ]
    stages = [PipelineStage(sides[0][i], i, 4, "cpu", group=mesh) for i in here]
    train(schedule, stages, X[:, 0], Y[:, 0])
    for _ in range(2):
        mse_loss(nn.Sequential(*sides[1])(X[:, 0]), Y[:, 0]).backward()
    grads: list[list[Any]] = [[modules[i].weight.grad for modules in sides] for i in here]
    for piped, plain in grads:
        assert piped.placements == plain.placements
        torch.testing.assert_close(piped.full_tensor(), plain.full_tensor(), rtol=0, atol=1e-12)
    pending = any(isinstance(of, Partial) for piped, _ in grads for of in piped.placements)
    assert pending == any(isinstance(places[i], Replicate) for i in here)
