"""Where the inputs' half and the weights' half of a backward pass meet in the autograd graph.

Let *between* be the nodes from which an input can be reached. They carry the inputs' gradients. The
*weight side* is every other node from which a weight can be reached. The two touch in few places::

    loss ── … ── MmBackward ── … ── MmBackward ── … ── input        between
                     │                   │
                 TBackward           TBackward                      weight side
                     │                   │
                 weight 1            weight 2

A node between that has an edge into the weight side is an *intermediate*: the gradients that flow
into it are all that the weight side ever needs. An output that is itself on the weight side (it
depends on weights only) is where that side begins, so it counts as an intermediate as well.

The split is the one of Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

ParamGroup: TypeAlias = dict[str, Any]
"""Weights whose gradients come from the same intermediates; see `get_param_groups` for the keys."""

ReverseGraph: TypeAlias = dict[Node, list[Node]]


def _get_grad_fn_or_grad_acc(t: Tensor) -> Node | None:
    """Returns the node that receives the gradient of ``t``.

    Args:
        t: Any tensor. Autograd makes the accumulator of a leaf lazily, so that is found through a
            view of the leaf, also where gradients are off.

    Returns:
        The function that made ``t``, the accumulator of a leaf, or None without ``requires_grad``.
    """
    if not t.requires_grad or t.grad_fn is not None:
        return t.grad_fn
    with torch.enable_grad():
        view = t.view_as(t).grad_fn
    return view.next_functions[0][0] if view is not None else None


def _null_coalesce_accumulate(lhs: Tensor | None, rhs: Tensor | None) -> Tensor | None:
    """Returns the sum of two gradients of one shape, either of which may be missing."""
    if lhs is None or rhs is None:
        return rhs if lhs is None else lhs
    return lhs + rhs


def nodes_of(tensors: Iterable[Any]) -> list[Node]:
    """Returns the gradient nodes of those values that are tensors and require a gradient."""
    nodes = (_get_grad_fn_or_grad_acc(t) for t in tensors if isinstance(t, Tensor))
    return [node for node in nodes if node is not None]


def construct_reverse_graph(roots: Iterable[Node | None]) -> ReverseGraph:
    """Reverses the edges of the graph below ``roots``.

    Args:
        roots: Nodes to start from, usually those of a stage's outputs. None is skipped.

    Returns:
        For each node that can be reached, one entry per edge into it: the node the edge comes from.
        A root that nothing leads to has an empty list.
    """
    reverse: ReverseGraph = defaultdict(list)
    queue = deque(dict.fromkeys(root for root in roots if root is not None))
    reverse.update((root, []) for root in queue)
    while queue:
        node = queue.popleft()
        for successor, _ in node.next_functions:
            if successor is None:
                continue
            if successor not in reverse:
                queue.append(successor)
            reverse[successor].append(node)
    return reverse


def reverse_closure(
    roots: Iterable[Node | None],
    target_nodes: Collection[Node],
    reverse_edges_dict: Mapping[Node, list[Node]],
) -> tuple[set[Node], set[Node]]:
    """Walks the reversed edges from ``roots`` and stops at ``target_nodes``.

    Args:
        roots: Nodes to start from; they are always part of the closure. None is skipped.
        target_nodes: Nodes at which the walk stops.
        reverse_edges_dict: What `construct_reverse_graph` returned.

    Returns:
        The nodes walked through (no targets among them but roots), and the targets that were met.
    """
    closure = {root for root in roots if root is not None}
    visited_targets: set[Node] = set()
    pending = list(closure)
    while pending:
        for node in reverse_edges_dict.get(pending.pop(), ()):
            if node in closure:
                continue
            if node in target_nodes:
                visited_targets.add(node)
                continue
            closure.add(node)
            pending.append(node)
    return closure, visited_targets


def get_param_groups(
    inputs: Iterable[Node],
    params: Iterable[Node],
    reverse_edges_dict: Mapping[Node, list[Node]],
    roots: Iterable[Node] = (),
) -> list[ParamGroup]:
    """Groups the weights by the nodes at which their gradients leave the path to the inputs.

    Weights that share an intermediate, or a node on the way to one, form one group.

    Args:
        inputs: Nodes of the inputs.
        params: Nodes of the weights. One that is an input too counts as an input; one that no
            gradient reaches is left out.
        reverse_edges_dict: What `construct_reverse_graph` returned.
        roots: Nodes of the outputs; one that depends on weights only becomes an intermediate.

    Returns:
        In the order of ``params``, dicts with the sets of nodes ``params``, ``intermediates`` and
        ``weight_side``: all nodes from below the intermediates down to the params.
    """
    between, _ = reverse_closure(inputs, (), reverse_edges_dict)
    wanted = [p for p in params if p in reverse_edges_dict and p not in between]
    sets = _connect(wanted, between, reverse_edges_dict)
    groups: dict[Node, ParamGroup] = {sets.find(param): _empty_group() for param in wanted}
    for node in sets:
        groups[sets.find(node)]["intermediates" if node in between else "weight_side"].add(node)
    for param in wanted:
        groups[sets.find(param)]["params"].add(param)
    for root in (root for root in roots if root in sets and root not in between):
        groups[sets.find(root)]["intermediates"].add(root)
    return [group for group in groups.values() if group["intermediates"]]


def _empty_group() -> ParamGroup:
    return {"params": set(), "intermediates": set(), "weight_side": set()}


def _connect(
    params: Iterable[Node], between: set[Node], reverse_edges_dict: Mapping[Node, list[Node]]
) -> _DisjointSets:
    """Joins each weight with the weight-side nodes above it and the intermediates over those."""
    sets = _DisjointSets()
    walked = set(between)
    for param in params:
        closure, met = reverse_closure((param,), walked, reverse_edges_dict)
        for node in chain(closure, met):
            sets.join(param, node)
        # The next weight stops where this one has been, so each node is walked once.
        walked |= closure
    return sets


class _DisjointSets:
    """Union-find over nodes (Galler and Fischer, 1964), with path halving."""

    def __init__(self) -> None:
        self._parents: dict[Node, Node] = {}

    def __contains__(self, node: Node) -> bool:
        return node in self._parents

    def __iter__(self) -> Iterator[Node]:
        return iter(self._parents)

    def find(self, node: Node) -> Node:
        """Returns the node that stands for the set of ``node``; a new node is a set of its own."""
        parents = self._parents
        parents.setdefault(node, node)
        while parents[node] is not node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    def join(self, left: Node, right: Node) -> None:
        """Makes one set of the sets of two nodes."""
        self._parents[self.find(right)] = self.find(left)
