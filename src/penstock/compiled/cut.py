"""One backward graph cut in two: what the inputs' gradients need, and what only the weights' need.

::

    saved, output gradients ──> inputs' half ──> input gradients
              │                      │
              └──────── kept ────────┘
                          │
                          └──────────> weights' half ──> weight gradients

What is kept between the halves is a smallest cut through the part of the graph that the weights'
gradients depend on. A node is worth its bytes. The weights' half computes again what is cheap, never a
matrix product; the inputs' half computes a norm's weight gradient where that is smaller than what it is
made of, never a matrix product that can wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import networkx
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from penstock.compiled.names import bytes_of, is_light
from penstock.errors import PenstockError

# What the inputs' half would not compute otherwise is dearer to keep, and so is what was made early.
MOVED = 1.1
FARTHER = 0.01


class CutError(PenstockError):
    """A graph that cannot be cut."""


@dataclass(frozen=True)
class Policy:
    """What the weights' half may compute again.

    Args:
        fused: Whether the compiler fuses elementwise operations, so that they cost little.
        checkpoints: Whether to compute checkpointed regions a second time, matrix products included.
    """

    fused: bool
    checkpoints: bool = False


@dataclass(frozen=True)
class Halves:
    """Two graphs in place of one.

    Args:
        inputs: Gives of the arguments ``taken`` the gradients ``given``, and then what else is kept.
        weights: Gives of the arguments ``held``, and what else is kept, the gradients ``left``.
        taken: Positions among the arguments of the backward graph.
        held: Likewise.
        given: Positions among its results.
        left: Likewise.
        count: How many results it has.
        saved: How many of the arguments ``held`` come before the gradients of outputs.
    """

    inputs: GraphModule
    weights: GraphModule
    taken: tuple[int, ...]
    held: tuple[int, ...]
    given: tuple[int, ...]
    left: tuple[int, ...]
    count: int
    saved: int

    def in_order(self, held: Sequence[Any], made: Sequence[Any]) -> list[Any]:
        """Returns the arguments of the weights' half.

        Inductor wants the gradients of outputs to come last.
        """
        return [*held[: self.saved], *made, *held[self.saved :]]


def cut(
    backward: GraphModule, waiting: Collection[int], policy: Policy, free: Collection[str] = ()
) -> Halves:
    """Cuts a backward graph.

    Args:
        backward: Gives one gradient or None for each argument of forward. It is changed.
        waiting: Which of them are those of weights.
        policy: What may be computed twice.
        free: The names of arguments that cost nothing to keep, since they are there in any case.

    Raises:
        CutError: It cannot be cut.
    """
    _separate_convolutions(backward.graph)
    results = list(_output(backward.graph).args[0])  # type: ignore[arg-type]
    left = [i for i in waiting if isinstance(results[i], Node)]
    given = [i for i, made in enumerate(results) if isinstance(made, Node) and i not in left]
    impure = [n for n in backward.graph.nodes if n.op == "call_function" and n.is_impure()]
    now = _above([*(results[i] for i in given), *impure])
    late = _above(results[i] for i in left)
    prices = _Prices(backward.graph, now, late, set(free))
    kept = _cheapest(prices, [results[i] for i in left], policy)
    # What would be kept as it is, or as what it is a view of, can as well be given at once.
    early = [i for i in left if all(map(_is_view, _above([results[i]], stop=set(kept))))]
    given, left = given + early, [i for i in left if i not in early]
    if not policy.fused:
        kept = _with_views(backward.graph, kept, now)
    kept = _needed(kept, [results[i] for i in left])
    arguments = [n for n in backward.graph.nodes if n.op == "placeholder"]
    places = {node: place for place, node in enumerate(arguments)}
    held = [node for node in kept if node in places]
    made = [node for node in kept if node not in places]
    saved = sum("tangents" not in node.name for node in held)
    first = _above([*now, *(results[i] for i in early), *made])
    taken = [node for node in arguments if node in first]
    return Halves(
        _graph_of(backward, taken, [*(results[i] for i in given), *made], impure),
        _graph_of(backward, [*held[:saved], *made, *held[saved:]], [results[i] for i in left]),
        tuple(places[node] for node in taken),
        tuple(places[node] for node in held),
        tuple(given),
        tuple(left),
        len(results),
        saved,
    )


def _output(graph: Graph) -> Node:
    found: Node = next(iter(reversed(graph.nodes)))
    return found


def _reached(
    nodes: Iterable[Any], onward: Callable[[Node], Iterable[Node]], stop: Collection[Node] = ()
) -> dict[Node, None]:
    """Returns the nodes and all that a walk onward from them comes to, up to where it is to stop."""
    found: dict[Node, None] = {}
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found and node not in stop:
            found[node] = None
            pending += onward(node)
    return found


def _above(nodes: Iterable[Any], stop: Collection[Node] = ()) -> dict[Node, None]:
    """Returns the nodes and all that they depend on."""
    return _reached(nodes, lambda node: node.all_input_nodes, stop)


def _separate_convolutions(graph: Graph) -> None:
    """Makes two nodes of each that computes gradients of both input and weight, which share no work."""
    both = torch.ops.aten.convolution_backward.default
    for node in list(graph.nodes):
        if node.target is not both or not (node.args[-1][0] and any(node.args[-1][1:])):
            continue
        of_input, *of_weights = node.args[-1]
        with graph.inserting_after(node):
            other = graph.call_function(both, (*node.args[:-1], [False, *of_weights]))
        other.meta = dict(node.meta)
        for user in list(node.users):
            if user.args[1] > 0:
                user.replace_input_with(node, other)
        node.args = (*node.args[:-1], [of_input, False, False])


# ---- what to keep


@dataclass
class _Prices:
    """What it costs to keep the values that the weights' half depends on.

    Args:
        graph: The backward graph.
        now: What the inputs' half needs.
        late: What the weights' half needs.
        free: The names of what costs nothing.
    """

    graph: Graph
    now: Collection[Node]
    late: Collection[Node]
    free: Collection[str]

    def __post_init__(self) -> None:
        self.waits = self._that_wait()
        self._distances = self._to_what_waits()

    def _that_wait(self) -> set[Node]:
        """Returns the heavy nodes that only the weights' half needs, and what depends on them."""
        waits: set[Node] = set()
        for node in self.graph.nodes:
            if node not in self.late or node in self.now or node.op == "placeholder":
                continue
            if not is_light(node) or any(source in waits for source in node.all_input_nodes):
                waits.add(node)
        return waits

    def _to_what_waits(self) -> dict[Node, int]:
        """Returns how many steps each node is from what waits."""
        found: dict[Node, int] = {}
        for node in reversed(self.graph.nodes):
            if node in self.late:
                users = (user for user in node.users if user in self.late)
                steps = (0 if user in self.waits else 1 + found[user] for user in users)
                found[node] = min(steps, default=0)
        return found

    def of(self, node: Node) -> float | None:
        """Returns what a node costs, or None for one that cannot be kept."""
        value = _value(node)
        if isinstance(value, torch.SymInt | int) or node.name in self.free:
            return 1.0
        if not isinstance(value, Tensor) or (_is_view(node) and node.op != "placeholder"):
            return None
        factor = 1.0 if node in self.now or node.op == "placeholder" else MOVED
        return (1 + bytes_of(node)) * (factor + FARTHER * min(self._distances[node], 100))


def _cheapest(prices: _Prices, results: Iterable[Node], policy: Policy) -> list[Node]:
    """Returns what the weights' half is to be given, in the order of the graph."""
    may_repeat = _repetition(prices.graph, policy)
    net = networkx.DiGraph()
    for node in prices.late:
        price = prices.of(node)
        net.add_edge((node, "in"), (node, "out"), **({} if price is None else {"capacity": price}))
        for source in node.all_input_nodes:
            net.add_edge((source, "out"), (node, "in"))
        if node.op == "placeholder" or (node in prices.now and not may_repeat(node)):
            net.add_edge("inputs' half", (node, "in"))
        if node in prices.waits:
            net.add_edge((node, "in"), "weights' half")
    for node in results:
        net.add_edge((node, "out"), "weights' half")
    if "inputs' half" not in net:
        return []
    try:
        _, (before, _) = networkx.minimum_cut(net, "inputs' half", "weights' half")
    except networkx.NetworkXUnbounded:
        raise CutError("something that is no tensor is needed in both halves") from None
    return [n for n in prices.graph.nodes if (n, "in") in before and (n, "out") not in before]


def _needed(kept: Iterable[Node], results: Iterable[Node]) -> list[Node]:
    """Returns what of that results are computed from."""
    computed = _above(results, stop=dict.fromkeys(kept))
    sources = {source for node in computed for source in node.all_input_nodes}
    return [node for node in kept if node in sources]


def _with_views(graph: Graph, kept: Iterable[Node], now: Collection[Node]) -> list[Node]:
    """Returns what is kept, and the views that the inputs' half has made of it.

    They share its memory, and the weights' half need not make them once more.
    """
    shown = dict.fromkeys(kept)
    for node in graph.nodes:
        is_tensor = isinstance(_value(node), Tensor)
        if node in now and is_tensor and _is_view(node) and shown.keys() >= {*node.all_input_nodes}:
            shown[node] = None
    return list(shown)


def _repetition(graph: Graph, policy: Policy) -> Callable[[Node], bool]:
    gradients = (n for n in graph.nodes if n.op == "placeholder" and "tangents" in n.name)
    of_gradients = _reached(gradients, lambda node: node.users)

    def may_repeat(node: Node) -> bool:
        if (
            node.op == "get_attr"
            or _is_view(node)
            or not isinstance(_value(node), Tensor | list | tuple)
        ):
            return True
        if policy.checkpoints and node not in of_gradients:
            return not node.is_impure()
        return policy.fused and is_light(node) and not _is_reduction(node)

    return may_repeat


def _value(node: Node) -> Any:
    return node.meta.get("val")


def _is_view(node: Node) -> bool:
    """Says whether a node makes another view of a tensor."""
    schema = getattr(node.target, "_schema", None)
    infos = [] if schema is None else [made.alias_info for made in schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def _is_reduction(node: Node) -> bool:
    return 4 * bytes_of(node) < sum(map(bytes_of, node.all_input_nodes))


# ---- the two graphs


def _graph_of(
    whole: GraphModule, arguments: list[Node], results: list[Node], besides: Iterable[Node] = ()
) -> GraphModule:
    """Returns the part of a graph that computes results from arguments, and does what else it must."""
    graph, copies = Graph(), dict[Node, Node]()
    for node in arguments:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    needed = _above([*results, *besides], stop=copies)
    for node in whole.graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    return GraphModule(whole, graph)
