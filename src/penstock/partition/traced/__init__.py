"""Cut a model into stages along the graph of a call, which ``torch.export`` makes.

``export`` makes the graph, ``marks`` says where it is cut, ``wiring`` what each stage takes and gives,
``traces`` keeps a graph for each kind of call, and ``stages`` makes modules of all that. This file cuts a
model into a number of stages that cost alike: it finds the blocks of the model, and what they cost.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from torch import fx, nn

from penstock.errors import PartitionError, UsageError
from penstock.partition.balance import choose_cuts
from penstock.partition.base import count_parameters
from penstock.partition.traced.export import Exported, Skeleton, export
from penstock.partition.traced.marks import (
    Layout,
    Point,
    SplitPoint,
    computes,
    lay_out,
    mark_of,
    pipe_split,
)
from penstock.partition.traced.stages import TracedCut, assemble, cut_traced, summary
from penstock.partition.traced.traces import Cuts, Traces
from penstock.schedule import Placement
from penstock.values import spec_of_arguments

__all__ = [
    "Balance",
    "Block",
    "Cuts",
    "Point",
    "SplitPoint",
    "TracedCut",
    "cut_into",
    "cut_traced",
    "pipe_split",
    "summary",
    "weigh_blocks",
]

Balance = str | Sequence[float]
"""What blocks weigh by: ``"parameters"``, or a number for each."""


def cut_into(
    model: nn.Module,
    stages: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    balance: Balance = "parameters",
    placement: Placement | None = None,
) -> TracedCut:
    """Cut a model between its blocks so that the heaviest rank is as light as can be.

    Args:
        model: as for :func:`cut_traced`.
        stages: how many stages to make.
        args: the positional arguments of a call with one microbatch; only ``"time"`` uses their numbers.
        kwargs: its arguments by name.
        balance: ``"parameters"``, or a weight for each block.
        placement: which rank holds which stage; by default each rank holds one.

    Raises:
        PartitionError: the model cannot be traced, or has fewer blocks than stages.
        UsageError: nothing can be balanced by that, or there is not a weight for each block.
    """
    fine = _Fine(model, stages, tuple(args), dict(kwargs or {}))
    if fine.count < stages:
        raise PartitionError(
            f"the {type(model).__name__} has {fine.count} blocks, which cannot be cut into {stages} stages: "
            f"{', '.join(fine.names)}; ask for at most {fine.count}"
        )
    starts = choose_cuts(fine.weights(balance), stages, placement)
    return fine.cut([fine.points[start - 1] for start in starts[1:]])


@dataclass(frozen=True)
class Block:
    """A part of a model between two places where it can be cut.

    Args:
        name: the module that it begins with.
        cost: what it costs, in the unit of what was measured.
    """

    name: str
    cost: float


def weigh_blocks(
    model: nn.Module,
    stages: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    balance: Balance = "parameters",
) -> list[Block]:
    """The blocks that :func:`cut_into` shares out, with their costs.

    Args:
        model: as for :func:`cut_traced`.
        stages: how many stages there are to be; heavy modules are opened if there are too few blocks.
        args: the positional arguments of a call with one microbatch.
        kwargs: its arguments by name.
        balance: what is measured.
    """
    fine = _Fine(model, stages, tuple(args), dict(kwargs or {}))
    return [Block(*pair) for pair in zip(fine.names, fine.weights(balance), strict=True)]


class _Fine:
    """A model cut between all its blocks."""

    def __init__(
        self, model: nn.Module, stages: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._model, self._args, self._kwargs = model, args, kwargs
        self._call = spec_of_arguments(args, kwargs)
        self._skeleton = Skeleton(model)
        paths = [path for path, _ in model.named_modules() if path]
        self._exported: Exported = export(
            self._skeleton, self._call, paths, training=model.training
        )
        self.points = Blocks(model, self._exported.graph, stages).points()

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return len(self.points) + 1

    @property
    def names(self) -> list[str]:
        """The blocks, by the places where they begin."""
        return ["the beginning", *map(str, self.points)]

    def cut(self, points: Iterable[Point]) -> TracedCut:
        """The model cut at some of the points."""
        return assemble(self._model, self._traces(points))

    def weights(self, balance: Balance) -> list[float]:
        """What each block costs.

        Raises:
            UsageError: as :func:`cut_into`.
        """
        if not isinstance(balance, str):
            return self._given(balance)
        if balance != "parameters":
            raise UsageError(
                f"balance={balance!r}: the blocks of a trace weigh by parameters, or by a number for each"
            )
        parts = assemble(self._skeleton.model, self._traces(self.points)).partition
        return [float(count_parameters(module)) for module in parts.modules]

    def _given(self, weights: Sequence[float]) -> list[float]:
        if len(weights) != self.count:
            raise UsageError(
                f"{len(weights)} weights for {self.count} blocks; give one for each, which begin at: "
                f"{', '.join(self.names)}"
            )
        return [float(weight) for weight in weights]

    def _traces(self, points: Iterable[Point]) -> Traces:
        cuts = Cuts(tuple(points), in_code=False)
        return Traces(
            self._skeleton,
            cuts,
            self._call,
            training=self._model.training,
            exported=self._exported,
        )


# ---- the blocks of a traced model, in the order in which they run: it can be cut well between them


@dataclass
class Call:
    """A call of a module in a graph.

    Attributes:
        begin: its first mark.
        end: its last mark.
        start: the position of the first mark.
        stop: the position of the last mark.
        children: the calls within.
    """

    begin: Point
    end: Point
    start: int
    stop: int = 0
    children: list[Call] = field(default_factory=list)


class Blocks:
    """Finds the blocks of a graph in which every call of a module is marked.

    At first the model's direct parts are blocks. A module is opened, so that its parts become blocks, if no
    more values go from one part to the next than into or out of the module (one more if it repeats parts of
    one kind), or if it is heavier than a stage should be. If there are still too few blocks, the heaviest
    are opened.

    Args:
        model: the model.
        graph: its graph.
        stages: how many stages there are to be.
    """

    def __init__(self, model: nn.Module, graph: fx.Graph, stages: int) -> None:
        self._model, self._graph, self._stages = model, graph, stages
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._weights: dict[str, int] = {
            path: count_parameters(module) for path, module in self._modules.items()
        }
        self._live = _live(graph)

    def points(self) -> list[Point]:
        """Where each block but the first begins."""
        calls = _calls(self._graph)
        found = [leaf for call in calls for leaf in self._opened(call)]
        while len(found) < self._stages and (closed := [c for c in found if c.children]):
            heaviest = max(closed, key=lambda call: self._weights[call.begin.path])
            at = found.index(heaviest)
            found[at : at + 1] = heaviest.children
        return self._kept([self._between(a, b) for a, b in pairwise(found)])

    def _kept(self, points: Sequence[Point]) -> list[Point]:
        """The points without those that have nothing between them and the one before."""
        layout: Layout = lay_out(self._graph, set(points).__contains__)
        ordered = [m for m in map(mark_of, self._graph.nodes) if m in set(points)]
        steps = zip(ordered, pairwise(layout.stage_of), strict=True)
        return [point for point, (a, b) in steps if a != b and isinstance(point, Point)]

    def _opened(self, call: Call) -> list[Call]:
        if len(call.children) < 2 or not (self._narrow(call) or self._heavy(call)):
            return [call]
        return [leaf for child in call.children for leaf in self._opened(child)]

    def _narrow(self, call: Call) -> bool:
        outside = max(self._live[call.start], self._live[call.stop], 1)
        widest: int = max(self._width(a, b) for a, b in pairwise(call.children))
        return widest <= outside + self._repeats(call)

    def _repeats(self, call: Call) -> bool:
        """Whether it has parts of one kind, and with parts themselves: such may share one more value."""
        kinds = [type(self._modules[c.begin.path]) for c in call.children if c.children]
        return len(set(kinds)) < len(kinds)

    def _heavy(self, call: Call) -> bool:
        weight, whole = self._weights[call.begin.path], self._weights[""]
        return weight * self._stages > whole

    def _width(self, first: Call, second: Call) -> int:
        return min(self._live[first.stop], self._live[second.start])

    def _between(self, first: Call, second: Call) -> Point:
        """The place between two calls where fewer values are live."""
        fewer = self._live[first.stop] < self._live[second.start]
        return first.end if fewer else second.begin


def _calls(graph: fx.Graph) -> list[Call]:
    """The outermost calls, with those within."""
    top: list[Call] = []
    open_calls: list[Call] = []
    for position, node in enumerate(graph.nodes):
        mark = mark_of(node)
        if not isinstance(mark, Point):
            continue
        if mark.where is SplitPoint.BEGINNING:
            end = Point(mark.path, SplitPoint.END, mark.call)
            made = Call(mark, end, position)
            (open_calls[-1].children if open_calls else top).append(made)
            open_calls.append(made)
        else:
            open_calls.pop().stop = position
    return top


def _live(graph: fx.Graph) -> list[int]:
    """How many values that depend on parameters are still to be used, at each position of a graph."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    changes = [0] * (len(position) + 1)
    made_of: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        made_of[node] = _of_parameters(node, made_of)
        if made_of[node] and computes(node) and not isinstance(node.meta.get("val"), tuple | list):
            changes[_made_at(node, position)] += 1
            changes[max((position[user] for user in node.users), default=position[node])] -= 1
    return list(accumulate(changes))


def _of_parameters(node: fx.Node, made_of: Mapping[fx.Node, bool]) -> bool:
    return node.op == "get_attr" or any(made_of[used] for used in node.all_input_nodes)


def _made_at(node: fx.Node, position: Mapping[fx.Node, int]) -> int:
    taken = node.target is operator.getitem and isinstance(node.args[0], fx.Node)
    return position[node.all_input_nodes[0]] if taken else position[node]
