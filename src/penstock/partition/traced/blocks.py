"""The blocks of a traced model: where it can be cut well, in the order in which they run."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import fx, nn

from penstock.partition.traced.layout import Layout, computes, lay_out
from penstock.partition.traced.marks import Point, SplitPoint, mark_of


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

    The model's own parts are blocks. A module is opened, so that its parts are blocks instead, where no more
    goes from one part to the next than goes into it or comes out of it, where it repeats parts of one
    kind, and where it alone is heavier than a stage should be; and further where there are too few blocks.

    Args:
        model: whose graph it is.
        graph: the graph.
        stages: into how many it is to be cut.
    """

    def __init__(self, model: nn.Module, graph: fx.Graph, stages: int) -> None:
        self._model, self._graph, self._stages = model, graph, stages
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._weights: dict[str, int] = {
            path: sum(p.numel() for p in m.parameters()) for path, m in self._modules.items()
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
        """Without those that leave nothing between them and the one before."""
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
        """Whether it has parts of one kind that have parts themselves: they may share one more value."""
        kinds = [type(self._modules[c.begin.path]) for c in call.children if c.children]
        return len(set(kinds)) < len(kinds)

    def _heavy(self, call: Call) -> bool:
        weight, whole = self._weights[call.begin.path], self._weights[""]
        return weight * self._stages > whole

    def _width(self, first: Call, second: Call) -> int:
        return min(self._live[first.stop], self._live[second.start])

    def _between(self, first: Call, second: Call) -> Point:
        """The place between two calls where less is under way."""
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
    """At each position of a graph, how many values that parameters had a part in are still to be used."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    changes = [0] * (len(position) + 1)
    made_of: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        made_of[node] = _of_parameters(node, made_of)
        if made_of[node] and computes(node) and not isinstance(node.meta.get("val"), tuple | list):
            changes[_made_at(node, position)] += 1
            changes[max((position[user] for user in node.users), default=position[node])] -= 1
    return list(_sums(changes))


def _of_parameters(node: fx.Node, made_of: Mapping[fx.Node, bool]) -> bool:
    return node.op == "get_attr" or any(made_of[used] for used in node.all_input_nodes)


def _made_at(node: fx.Node, position: Mapping[fx.Node, int]) -> int:
    taken = node.target is operator.getitem and isinstance(node.args[0], fx.Node)
    return position[node.all_input_nodes[0]] if taken else position[node]


def _sums(changes: Sequence[int]) -> Iterator[int]:
    total = 0
    for change in changes:
        total += change
        yield total
