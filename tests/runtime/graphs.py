"""Models whose stages are no chain: edge tables, a plain run of them, and ranks built by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock import PipelineStage
from penstock.pipeline.plan import prove
from penstock.runtime import Call, Rank, channels, drive, reports_of
from penstock.schedule import Action, Edge, Op, Placement, Schedule
from penstock.step import Loss
from penstock.transport import Transport, connect, in_process
from penstock.values import Batch, split

WIDTH = 3


class Join(nn.Module):
    """Adds up whatever tensors it is given, each through a layer of its own; gives named parts."""

    def __init__(self, *gives: str) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.gives = gives

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = list(tensors_in([*args, *kwargs.values()]))
        masks = [tensor for tensor in tensors if not tensor.is_floating_point()]
        hidden = self.lin(sum(t * (i + 1) for i, t in enumerate(tensors) if t.is_floating_point()))
        for mask in masks:
            hidden = hidden * mask
        return {name: MAKE[name](hidden) for name in self.gives} or torch.tanh(hidden)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    nested = [item for item in items if isinstance(item, Tensor | tuple | list | dict)]
    return [tensor for item in nested for tensor in tensors_in(item)]


MAKE: dict[str, Callable[[Tensor], Any]] = {
    "x": torch.tanh,
    "y": lambda hidden: {"deep": [hidden * 2, "text", (hidden.sin(), None)]},
    "m": lambda hidden: hidden.detach() > 0,
}


@dataclass(frozen=True)
class Graph:
    """An edge table and what each of four stages gives, where it gives several values."""

    edges: tuple[Edge, ...]
    gives: Mapping[int, tuple[str, ...]]

    def modules(self) -> list[nn.Module]:
        torch.manual_seed(0)
        return [Join(*self.gives.get(stage, ())) for stage in range(4)]


def chain_of(*skips: Edge) -> tuple[Edge, ...]:
    """The chain of the last stages and some more edges."""
    return (*skips, Edge("b", 1, (2,)), Edge("c", 2, (3,)))


GRAPHS = {
    "chain": Graph(chain_of(Edge("a", 0, (1,))), {}),
    "skip": Graph(chain_of(Edge("a", 0, (1, 2))), {}),
    "used by all": Graph(chain_of(Edge("a", 0, (1, 2, 3))), {}),
    "two values": Graph(chain_of(Edge("x", 0, (1, 3)), Edge("y", 0, (2,))), {0: ("x", "y")}),
    "in another order": Graph(
        chain_of(Edge("x", 0, (1, 3)), Edge("y", 0, (2,))), {0: ("y", "m", "x")}
    ),
    "a mask": Graph(chain_of(Edge("x", 0, (1,)), Edge("m", 0, (2, 3), False)), {0: ("x", "m")}),
    "cut off": Graph(chain_of(Edge("a", 0, (1,)), Edge("d", 0, (3,), False)), {0: ("a", "d")}),
    "without a user in between": Graph(
        (Edge("a", 0, (3,)), Edge("b", 1, (3,)), Edge("c", 2, (3,)), Edge("s", 0, (1, 2))),
        {0: ("a", "s")},
    ),
}
MAKE |= dict.fromkeys(("a", "d", "s"), torch.sigmoid)

PLACEMENTS = [(0, 1, 2, 3), (0, 0, 0, 0), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1), (0, 1, 1, 1)]

BATCH = torch.linspace(-1, 1, 5 * WIDTH, dtype=torch.float64).reshape(5, WIDTH)


def square_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


# ---- the plain run


def plain(graph: Graph, batch: Tensor = BATCH) -> tuple[float, list[Tensor]]:
    """The loss and all gradients by plain autograd, stage after stage."""
    modules = graph.modules()
    values: dict[str, Any] = {}
    for stage, module in enumerate(modules):
        used = [edge for edge in graph.edges if stage in edge.targets]
        named = {e.value: values[e.value] if e.gradient else cut(values[e.value]) for e in used}
        output = call(module, named) if used else module(batch)
        made = [edge.value for edge in graph.edges if edge.source == stage]
        values |= {name: output[name] if len(made) > 1 else output for name in made}
    loss = square_loss(output, batch)
    loss.backward()
    return float(loss.detach()), gradients(modules)


def call(module: nn.Module, named: dict[str, Any]) -> Any:
    if len(named) > 1:
        return module(**named)
    (value,) = named.values()
    return module(*value) if isinstance(value, tuple) else module(value)


def cut(value: Tensor) -> Tensor:
    return value.detach()


def gradients(modules: Sequence[nn.Module]) -> list[Tensor]:
    return [p.grad for module in modules for p in module.parameters() if p.grad is not None]


# ---- the pipelined run


def schedule_of(
    edges: Sequence[Edge], placement: Placement, microbatches: int, *, halves: bool = False
) -> Schedule:
    """All forwards, then all backwards, in an order that suits any placement and table."""
    stages = range(placement.stages)
    forwards = [Action(s, Op.F, m) for m in range(microbatches) for s in stages]
    ops = (Op.I, Op.W) if halves else (Op.B,)
    backwards = [
        Action(s, op, m) for m in range(microbatches) for s in reversed(stages) for op in ops
    ]
    programs = tuple(
        tuple(a for a in (*forwards, *backwards) if placement.rank_of[a.stage] == rank)
        for rank in range(placement.ranks)
    )
    return prove(Schedule("by hand", placement, microbatches, programs, tuple(edges)))


def make_ranks(
    schedule: Schedule, modules: Sequence[nn.Module], ends: Sequence[Transport]
) -> list[Rank]:
    """Ranks with their stages, and their channels opened."""
    for end in ends:
        end.open(channels(schedule))
    return [
        Rank(end, [PipelineStage(modules[i], i, len(modules)) for i in held(schedule, end.rank)])
        for end in ends
    ]


def held(schedule: Schedule, rank: int) -> tuple[int, ...]:
    return schedule.placement.stages_on(rank)


def order_of(schedule: Schedule, batch: Tensor = BATCH, *, loss: bool = True) -> Call:
    parts = split((batch,), {}, schedule.microbatches)
    brought = Batch(
        parts, [p.args[0] for p in parts], [p.samples for p in parts], schedule.microbatches
    )
    if not loss:
        return Call(lambda *_: schedule, brought, trains=False, outputs=True)
    return Call(lambda *_: schedule, brought, Loss(square_loss), trains=schedule.trains)


def pipelined(
    graph: Graph, schedule: Schedule, ends: Sequence[Transport] | None = None
) -> tuple[float, list[Tensor], list[int]]:
    """The loss, the gradients of the stages here, and what is in flight in them after the step."""
    modules = graph.modules()
    ranks = make_ranks(schedule, modules, ends or in_process(schedule.ranks))
    reports = reports_of(drive([rank.run(order_of(schedule)) for rank in ranks]))
    stages = [stage for rank in ranks for stage in rank.stages.values()]
    return reports[0].numbers.loss, gradients(modules), [stage.in_flight for stage in stages]


def run_graph(group: Any, name: str, rank_of: list[int], halves: bool) -> dict[str, Any]:
    """A worker's task: how far the loss and this rank's gradients are from the plain run."""
    graph = GRAPHS[name]
    schedule = schedule_of(graph.edges, Placement(tuple(rank_of)), 3, halves=halves)
    end = connect(torch.device("cpu"), group)
    modules = graph.modules()
    (rank,) = make_ranks(schedule, modules, [end])
    report = reports_of(drive([rank.run(order_of(schedule))]))[0]
    loss, expected = plain(graph)
    mine = [p for i in held(schedule, end.rank) for p in range(2 * i, 2 * i + 2)]
    gaps = [gap(f, expected[i]) for f, i in zip(gradients(modules), mine, strict=True)]
    return {"loss": abs(report.numbers.loss - loss), "gap": max(gaps)}


def gap(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max())
