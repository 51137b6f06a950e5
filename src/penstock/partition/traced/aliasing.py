"""Which nodes of a graph may share memory, and which change what they are given."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx, nn

_SAME_WITHOUT_SAYING = {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}
"""Operators that may give their first argument itself, though their schema does not tell."""

_STATISTICS = {"batch_norm": (3, 4, 5), "instance_norm": (3, 4, 5), "cudnn_batch_norm": (3, 4, 5)}
"""Operators that change two buffers if a flag is set, though their schema does not tell."""


class Aliases:
    """The nodes of a graph in sets whose members may share memory.

    Args:
        graph: of a call.
        root: holds the graphs of regions, such as those under ``torch.no_grad()``.
    """

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        self._root = root
        self._parent: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            for other in self._shared_by(node):
                self._parent[self._top(node)] = self._top(other)
        self._sets: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            self._sets.setdefault(self._top(node), []).append(node)

    def of(self, node: fx.Node) -> list[fx.Node]:
        """What may share memory with a node, the node included, in the graph's order."""
        return self._sets[self._top(node)]

    def written(self, node: fx.Node) -> list[fx.Node]:
        """What a node changes in place."""
        if node.op != "call_function":
            return []
        if isinstance(node.target, torch._ops.OpOverload):
            return [*_by_schema(node), *_statistics(node)]
        return list(self._written_inside(node))

    def _written_inside(self, node: fx.Node) -> Iterator[fx.Node]:
        for region in self._regions(node):
            inner = Aliases(region.graph, region)
            changed = [w for n in region.graph.nodes for w in inner.written(n)]
            yield from _given_for(node, inner, region, changed)

    def _shown_outside(self, node: fx.Node) -> Iterator[fx.Node]:
        """What a region is given and gives back, or a view of it."""
        for region in self._regions(node):
            inner = Aliases(region.graph, region)
            output = next(n for n in region.graph.nodes if n.op == "output")
            yield from _given_for(node, inner, region, output.all_input_nodes)

    def _regions(self, node: fx.Node) -> Iterator[fx.GraphModule]:
        for argument in node.args:
            if isinstance(argument, fx.Node) and argument.op == "get_attr":
                held = attribute(self._root, str(argument.target))
                if isinstance(held, fx.GraphModule):
                    yield held

    def _shared_by(self, node: fx.Node) -> Iterable[fx.Node]:
        if node.op == "get_attr":
            return ()
        if next(self._regions(node), None) is not None:
            return self._shown_outside(node)
        if node.target is operator.getitem or not isinstance(node.target, torch._ops.OpOverload):
            return [n for n in node.all_input_nodes if n.op != "get_attr" or _is_tensor(n)]
        return _shared_by_schema(node)

    def _top(self, node: fx.Node) -> fx.Node:
        while node in self._parent and self._parent[node] is not node:
            node = self._parent[node]
        return node


def _given_for(
    node: fx.Node, inner: Aliases, region: fx.GraphModule, found: Iterable[fx.Node]
) -> Iterator[fx.Node]:
    """What a region is called with that shares its memory with some of the nodes inside."""
    shared = {n for one in found for n in inner.of(one)}
    inputs = [n for n in region.graph.nodes if n.op == "placeholder"]
    given = list(node.args)[-len(inputs) :] if inputs else []
    for own, outer in zip(inputs, given, strict=True):
        if own in shared and isinstance(outer, fx.Node):
            yield outer


def attribute(root: nn.Module, path: str) -> Any:
    """What stands at a path in a module."""
    return operator.attrgetter(path)(root)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _by_schema(node: fx.Node) -> Iterator[fx.Node]:
    for argument, value in _arguments(node):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _nodes_in(value)


def _shared_by_schema(node: fx.Node) -> Iterator[fx.Node]:
    schema = node.target._schema  # type: ignore[union-attr]
    if schema.name.removeprefix("aten::") in _SAME_WITHOUT_SAYING:
        yield from _nodes_in(node.args[0])
    if not any(given.alias_info for given in schema.returns):
        return
    for argument, value in _arguments(node):
        if argument.alias_info is not None:
            yield from _nodes_in(value)


def _statistics(node: fx.Node) -> Iterator[fx.Node]:
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    if name in _STATISTICS:
        mean, variance, flag = _STATISTICS[name]
        if node.args[flag]:
            yield from _nodes_in([node.args[mean], node.args[variance]])


def _arguments(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    for position, argument in enumerate(arguments):
        if position < len(node.args):
            yield argument, node.args[position]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def _nodes_in(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _nodes_in(item)
