"""The backward of a compiled graph in halves: how it is cut, and how its halves are compiled and run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import networkx
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from penstock._engine.compiled import names
from penstock._engine.compiled.names import bytes_of, is_light
from penstock.errors import PenstockError, StageError

log = logging.getLogger("penstock")

Function = Callable[[list[Any]], Any]
"""Takes a list of arguments, and empties it, so that each argument is freed after its last use."""

# ---- cut a backward graph in two: what the inputs' gradients need, and what only the weights' need
#
#     saved, output gradients ──> inputs' half ──> input gradients
#               │                      │
#               └──────── kept ────────┘
#                           │
#                           └──────────> weights' half ──> weight gradients
#
# What is kept between the halves is a smallest cut through the part of the graph on which the weights'
# gradients depend. A node is worth its bytes. The weights' half computes again what is cheap, never a matrix
# product; the inputs' half computes a norm's weight gradient if that is smaller than what it is made of,
# never a matrix product that can wait.


# It costs a little more to keep what the inputs' half would not compute otherwise.
MOVED = 1.1


class HalvesError(PenstockError):
    """A graph cannot be cut."""


class HalfGraph(NamedTuple):
    """One of two graphs in place of a backward graph.

    Args:
        graph: computes it.
        arguments: which arguments of the backward graph it takes.
        results: which of its gradients it computes.
    """

    graph: GraphModule
    arguments: tuple[int, ...]
    results: tuple[int, ...]


class Halves(NamedTuple):
    """Two graphs in place of one.

    Args:
        inputs: the inputs' half. After its gradients it returns values that are kept for the weights' half.
        weights: the weights' half. It takes those values too.
        saved: how many of its other arguments come before them: inductor expects gradients to come last.
        total: how many results the backward has, None among them.
    """

    inputs: HalfGraph
    weights: HalfGraph
    saved: int
    total: int


def halved(
    backward: GraphModule, waiting: Collection[int], *, fused: bool, free: Collection[str] = ()
) -> Halves:
    """Cut a backward graph.

    Args:
        backward: computes one gradient or None for each argument of forward. It is changed.
        waiting: which of these are the gradients of weights.
        fused: whether the compiler fuses elementwise operations, so that they may be computed in both halves.
        free: the names of arguments that cost nothing to keep, since they are kept in any case.

    Raises:
        HalvesError: the graph cannot be cut.
    """
    graph = backward.graph
    _separate_convolutions(graph)
    gradients: Any = next(iter(reversed(graph.nodes))).args[0]
    results = {place: node for place, node in enumerate(gradients) if isinstance(node, Node)}
    late = {place: results[place] for place in waiting if place in results}
    now = {place: node for place, node in results.items() if place not in late}
    impure = [n for n in graph.nodes if n.op == "call_function" and n.is_impure()]
    of_inputs = _above([*now.values(), *impure])
    kept = _smallest_cut(graph, of_inputs, _above(late.values()), late.values(), fused, free)
    # A gradient that would itself be kept, or of which it would be a view, can be returned at once.
    early = [p for p, node in late.items() if all(map(_is_view, _above([node], stop=set(kept))))]
    now |= {place: late.pop(place) for place in early}
    if not fused:
        kept = _with_views(graph, kept, of_inputs)
    kept = _needed(kept, late.values())
    arguments = {n: p for p, n in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    passed = [node for node in kept if node in arguments]
    computed = [node for node in kept if node not in arguments]
    saved = sum("tangents" not in node.name for node in passed)
    first = _above([*now.values(), *impure, *computed])
    taken = [node for node in arguments if node in first]
    return Halves(
        HalfGraph(
            _graph_of(backward, taken, [*now.values(), *computed], impure),
            tuple(arguments[node] for node in taken),
            tuple(now),
        ),
        HalfGraph(
            _graph_of(backward, [*passed[:saved], *computed, *passed[saved:]], [*late.values()]),
            tuple(arguments[node] for node in passed),
            tuple(late),
        ),
        saved,
        len(gradients),
    )


def _reached(
    nodes: Iterable[Any], onward: Callable[[Node], Iterable[Node]], stop: Collection[Node] = ()
) -> dict[Node, None]:
    """The nodes and all that can be reached from them without passing those at which to stop."""
    reached: dict[Node, None] = {}
    ahead = list(nodes)
    while ahead:
        node = ahead.pop()
        if node not in reached and node not in stop:
            reached[node] = None
            ahead += onward(node)
    return reached


def _above(nodes: Iterable[Any], stop: Collection[Node] = ()) -> dict[Node, None]:
    """The nodes and all that they depend on."""
    return _reached(nodes, lambda node: node.all_input_nodes, stop)


def _separate_convolutions(graph: Graph) -> None:
    """Split each node that computes the gradients of input and weight, which share no work."""
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


def _smallest_cut(
    graph: Graph,
    of_inputs: Collection[Node],
    of_weights: Collection[Node],
    results: Iterable[Node],
    fused: bool,
    free: Collection[str],
) -> list[Node]:
    """The nodes to keep for the weights' half, in the order of the graph.

    Args:
        graph: the backward graph.
        of_inputs: the nodes that the inputs' half needs.
        of_weights: the nodes that the weights' half needs.
        results: the weights' gradients.
        fused: whether elementwise operations cost little.
        free: the names of nodes that cost nothing to keep.
    """
    waits: set[Node] = set()
    net = networkx.DiGraph()
    for node in (node for node in graph.nodes if node in of_weights):
        is_now, is_argument = node in of_inputs, node.op == "placeholder"
        # What is heavy waits if only the weights' half needs it, and so does what depends on that.
        sources = node.all_input_nodes
        if not (is_now or is_argument) and not (is_light(node) and waits.isdisjoint(sources)):
            waits.add(node)
            net.add_edge((node, "in"), "weights' half")
        if is_argument or (is_now and not _may_repeat(node, fused)):
            net.add_edge("inputs' half", (node, "in"))
        price = 1.0 if node.name in free else _price(node)
        if price is not None:
            price *= 1.0 if is_now or is_argument else MOVED
        net.add_edge((node, "in"), (node, "out"), **({} if price is None else {"capacity": price}))
        net.add_edges_from(((source, "out"), (node, "in")) for source in sources)
    net.add_edges_from(((node, "out"), "weights' half") for node in results)
    if "inputs' half" not in net:
        return []
    try:
        _, (before, _) = networkx.minimum_cut(net, "inputs' half", "weights' half")
    except networkx.NetworkXUnbounded:
        raise HalvesError("both halves need something that is not a tensor") from None
    return [n for n in graph.nodes if (n, "in") in before and (n, "out") not in before]


def _price(node: Node) -> float | None:
    """Return what it costs to keep a node, or None for one that cannot be kept."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt | int):
        return 1.0
    if not isinstance(value, Tensor) or (_is_view(node) and node.op != "placeholder"):
        return None
    return 1.0 + bytes_of(node)


def _may_repeat(node: Node, fused: bool) -> bool:
    """Tell whether the weights' half may compute a node once more."""
    is_number = not isinstance(node.meta.get("val"), Tensor | list | tuple)
    if node.op == "get_attr" or _is_view(node) or is_number:
        return True
    is_reduction = 4 * bytes_of(node) < sum(map(bytes_of, node.all_input_nodes))
    return fused and is_light(node) and not is_reduction


def _needed(kept: Iterable[Node], results: Iterable[Node]) -> list[Node]:
    """Those of the kept nodes from which results are computed."""
    computed = _above(results, stop=dict.fromkeys(kept))
    sources = {source for node in computed for source in node.all_input_nodes}
    return [node for node in kept if node in sources]


def _with_views(graph: Graph, kept: Iterable[Node], now: Collection[Node]) -> list[Node]:
    """Return what is kept, and the views of it that the inputs' half makes.

    These share its memory, and the weights' half need not make them again.
    """
    shown = dict.fromkeys(kept)
    for node in graph.nodes:
        is_tensor = isinstance(node.meta.get("val"), Tensor)
        if node in now and is_tensor and _is_view(node) and shown.keys() >= {*node.all_input_nodes}:
            shown[node] = None
    return list(shown)


def _is_view(node: Node) -> bool:
    """Tell whether a node makes a view of a tensor."""
    schema = getattr(node.target, "_schema", None)
    infos = [] if schema is None else [one.alias_info for one in schema.returns]
    return any(info is not None and not info.is_write for info in infos)


# ---- the two graphs


def _graph_of(
    whole: GraphModule, arguments: list[Node], results: list[Node], besides: Iterable[Node] = ()
) -> GraphModule:
    """The part of a graph that computes results from arguments, and has certain effects besides."""
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


# ---- find the backward of a compiled graph, compile its halves, and run them
# AOT autograd makes one autograd node of a compiled graph; its backward is a graph as well, which is kept.
# When a walk over autograd's graph meets a node of a kind for the first time, that graph is cut in two, and
# both halves are compiled. From then on each node of the kind runs it whole, or leaves the weights' half to
# whoever asks for it.


WeightsHalf = Callable[[], Sequence[Tensor | None]]
"""Computes a gradient or None for each of the edges that wait."""


def places_in(node: Any) -> Sequence[int]:
    """Which edges of a compiled node lead to weights that can wait; none if it is not cut."""
    kind = type(node)
    if not hasattr(kind, _PLACES):
        setattr(kind, _PLACES, _cut_kind(node))
    places: Sequence[int] = getattr(kind, _PLACES)
    return places


def leave_weights(node: Any, keep: Callable[[WeightsHalf], Any]) -> None:
    """Make a compiled node pass its weights' half to ``keep`` when it runs, and not run that too."""
    node.keep_weights_half = keep


_PLACES = "places_cut_by_penstock"


def _cut_kind(node: Any) -> Sequence[int]:
    """Cut the backward of a kind of nodes; log it if that is not possible."""
    weights = dict(_weights_of(node))
    if not weights:
        return ()
    started = perf_counter()
    try:
        backward = names.backward_of(node)
        halves = backward.compiled(partial(_compile, weights=weights, backward=backward))
    except Exception as error:
        is_expected = isinstance(error, names.UnknownError | HalvesError)
        reason = str(error) if is_expected else f"{type(error).__name__}: {error}"
        log.warning("weight gradients do not wait in a compiled part of a stage: %s", reason)
        return ()
    waiting = halves.weights.results
    if waiting:
        log.info(
            "compiled a backward pass in two halves in %.1f s; weights that wait: %d",
            perf_counter() - started,
            len(waiting),
        )
    return [weights[place] for place in waiting]


def _weights_of(node: Any) -> Iterator[tuple[int, int]]:
    """For each weight its place among the arguments of forward, and among the node's edges."""
    learning = (place for place, needed in enumerate(node.needs_input_grad) if needed)
    # Only tensors have edges, and the edges of those that need no gradient lead nowhere.
    edges = [(edge, below) for edge, (below, _) in enumerate(node.next_functions) if below]
    for place, (edge, below) in zip(learning, edges, strict=True):
        if isinstance(getattr(below, "variable", None), nn.Parameter):
            yield place, edge


def _compile(
    graph: GraphModule,
    inputs: Sequence[Any],
    compile_: Callable[..., Any],
    *,
    weights: Mapping[int, int],
    backward: names.Backward,
) -> Halves:
    """Cut a backward graph, and compile and install its halves if any weights can wait.

    Args:
        graph: the graph.
        inputs: its inputs, without data.
        compile_: compiles a graph.
        weights: what ``_weights_of`` yields.
        backward: the backward whose graph it is.
    """
    names.propagate(graph, inputs)
    # These are the names that AOT autograd gives to arguments of forward that it saves for backward.
    free = {f"primals_{place + 1}" for place in weights}
    halves = halved(graph, list(weights), fused=backward.is_fused, free=free)
    if halves.weights.results:
        first, second = (
            names.boxed(compile_(half.graph, [n.meta["val"] for n in _arguments(half.graph)]))
            for half in (halves.inputs, halves.weights)
        )
        backward.run_instead(_in_halves(halves, first, second, backward.whole()))
    return halves


def _arguments(graph: GraphModule) -> Iterator[Node]:
    return (node for node in graph.graph.nodes if node.op == "placeholder")


def _in_halves(halves: Halves, inputs: Function, weights: Function, whole: Function) -> Function:
    """The backward pass of a kind of compiled nodes, as AOT autograd calls it.

    Args:
        halves: how it is cut.
        inputs: the inputs' half, compiled.
        weights: the weights' half, compiled.
        whole: both as one.
    """
    places = halves.inputs.results

    def backward(args: list[Any]) -> Any:
        """A gradient or None for each argument of forward; those of weights may be left for later."""
        keep = getattr(names.running_node(), "keep_weights_half", None)
        if keep is None:
            return whole(args)
        later = [args[place] for place in halves.weights.arguments]
        now = [args[place] for place in halves.inputs.arguments]
        args.clear()
        results = inputs(now)
        later[halves.saved : halves.saved] = results[len(places) :]
        versions = _versions(later)

        def run_weights() -> Sequence[Tensor | None]:
            _check_unchanged(later, versions)
            with names.autocast_disabled():
                gradients: Sequence[Tensor | None] = weights(later)
            return gradients

        keep(run_weights)
        gradients: list[Any] = [None] * halves.total
        for place, gradient in zip(places, results, strict=False):
            gradients[place] = gradient
        return gradients

    return backward


def _versions(values: Iterable[Any]) -> list[int]:
    # Some of the values are sizes, which are plain numbers.
    return [getattr(value, "_version", 0) for value in values]


def _check_unchanged(values: Sequence[Any], versions: Sequence[int]) -> None:
    for value, now, before in zip(values, _versions(values), versions, strict=True):
        if now != before:
            raise StageError(
                "an input of a compiled module was changed in place between the inputs' half "
                f"and the weights' half of backward; its shape is {tuple(value.shape)}"
            )
