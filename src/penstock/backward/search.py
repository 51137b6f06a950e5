"""The graph of a microbatch, and the search in it for the weights whose gradients can wait.

A node that runs is freed, so no node may run in both halves. Nor may an accumulator, whose hooks must see the
gradient of a microbatch once. So an edge into a weight waits only if everything below it is reached over
edges that wait, and in no other way. A weight with a use that cannot wait gets its whole gradient in the
inputs' half, and so does everything that is unknown here, with the sums of a plain backward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias, cast

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from penstock._engine import compiled
from penstock.backward.nodes import LEAF, has_hooks, node_of, saved_names
from penstock.backward.operations import OPERATIONS, PRODUCTS, Operation
from penstock.backward.pending import PLAIN, UsePlace, WeightUse

# An expression of more nodes is taken for an activation, not for a weight.
MOST_NODES = 64

# To keep a product for later takes as long as to compute one of so many multiplications: 15 us on a CPU.
CHEAP = 2**20

# A compromise: gradients that wait for a backward pass take memory, and each pass has a fixed cost.
BATCH_BYTES = 2**20


class MicrobatchGraph:
    """The nodes below some outputs.

    Args:
        roots: the edges of the outputs.
        seeds: their gradients; None for a scalar's.
        inputs: the inputs of the stage.

    Attributes:
        nodes: the outputs' nodes first, then in a fixed order.
        edges: for each node, its edges: the node below, or None, and which of its inputs.
        roots: how many of them are outputs' nodes.
        others: where those of inputs are that might pass for weights.
        shape: the kinds of the nodes and where their edges lead, as one flat tuple; equal for equal graphs
            whose ends have about as many elements.
    """

    def __init__(
        self,
        roots: Iterable[GradientEdge],
        seeds: Iterable[Tensor | None],
        inputs: Iterable[Any],
    ) -> None:
        # Edges that lead nowhere have None for a node.
        positions: dict[Any, int] = {None: -1}
        nodes: list[Any] = []
        sizes: list[int] = []
        for (node, _, _), seed in zip(roots, seeds, strict=True):
            sizes.append(1 if seed is None else seed.numel().bit_length())
            if positions.setdefault(node, len(nodes)) == len(nodes):
                nodes.append(node)
        edges: list[Any] = []
        self.nodes, self.edges, self.positions = nodes, edges, positions
        self.roots = total = len(nodes)
        # This loop is most of what a small stage's halves cost beyond a full backward pass.
        shape: list[Any] = []
        note, place, add, keep = shape.append, positions.setdefault, nodes.append, edges.append
        for node in nodes:
            kind = type(node)
            below = node.next_functions
            keep(below)
            note(type(node.variable) if kind is LEAF else kind)
            for successor, _ in below:
                position = place(successor, total)
                note(position)
                if position == total:
                    total += 1
                    add(successor)
        self.others: list[int | None] = []
        for value in inputs:
            if isinstance(value, Tensor):
                sizes.append(value.numel().bit_length())
                # A plain leaf is no weight.
                if not (type(value) is Tensor and value.is_leaf):
                    self.others.append(positions.get(value.grad_fn or node_of(value)))
        self.shape = (self.roots, *sizes, *self.others, *shape)


class SplitPlan(NamedTuple):
    """What waits in graphs of one shape.

    Args:
        places: the uses that wait.
        ends: the positions of the nodes to which the inputs' half goes.
        hooked: the positions of nodes below the uses that have saved tensors, which hooks might handle.
        keeps_outputs: whether nodes of Python functions are among those below the uses.
        refusal: why nothing may wait, if that is so.
    """

    places: Sequence[UsePlace] = ()
    ends: Sequence[int] = ()
    hooked: Sequence[int] = ()
    keeps_outputs: bool = False
    refusal: str | None = None

    def uses_in(self, graph: MicrobatchGraph) -> list[WeightUse] | None:
        """The uses in a graph; None if some of them cannot wait there."""
        uses, nodes = [], graph.nodes
        for place in self.places:
            use = WeightUse(nodes[place[0]], place, graph.edges[place[0]])
            if not use.can_wait:
                return None
            uses.append(use)
        if self.hooked and any(has_hooks(nodes[position]) for position in self.hooked):
            return None
        return uses


# ---- the search


_Candidate: TypeAlias = tuple[Node, Operation | None, tuple[int, ...]]
"""A node, what it does, and the positions of its edges into weights."""


class UseSearch:
    """A walk over the nodes that the inputs' half will run. It continues below edges found not to wait.

    Attributes:
        met_hooks: whether something does not wait because of what nodes have saved, such as hooks. Then the
            plan does not hold for other graphs of this shape.
    """

    def __init__(self, graph: MicrobatchGraph) -> None:
        self._graph = graph
        self._reached = set(graph.nodes[: graph.roots])
        self._ahead = list(self._reached)
        self._leaves: list[Node] = []
        # The nodes below each use that waits, and below each node that computes a weight.
        self._below: dict[_Candidate, Sequence[Node]] = {}
        others = [graph.nodes[position] for position in graph.others if position is not None]
        self._weights: dict[Node, Sequence[Node]] = dict.fromkeys(others, ())
        self._left = MOST_NODES
        self.met_hooks = False

    def plan(self) -> SplitPlan:
        """Walk until all is found."""
        while self._ahead:
            if refusing := self._walk():
                return SplitPlan(refusal=f"{refusing} runs in whole backward passes only")
            self._give_up_shared()
        position = self._graph.positions
        batches = _batches(self._below)
        below = list(dict.fromkeys(chain.from_iterable(self._below.values())))
        return SplitPlan(
            [
                UsePlace(position[node], how, edges, batches[node])
                for node, how, edges in self._below
            ],
            [position[node] for node in (*self._leaves, *(use[0] for use in self._below))],
            [position[node] for node in below if saved_names(type(node))],
            any(issubclass(type(node), BackwardCFunction) for node in below),
        )

    def _walk(self) -> str | None:
        """Walk on, or return the name of a function that allows no half of a backward pass."""
        ahead, reached = self._ahead, self._reached
        while ahead:
            node: Any = ahead.pop()
            kind = type(node)
            if kind is LEAF:
                self._leaves.append(node)
                continue
            if _refuses(kind):
                return cast("str", kind._forward_cls.__name__)
            waiting = self._waiting(node)
            for position, (successor, _) in enumerate(node.next_functions):
                if successor is not None and successor not in reached and position not in waiting:
                    reached.add(successor)
                    ahead.append(successor)
        return None

    def _waiting(self, node: Any) -> Collection[int]:
        """The positions of a node's edges that wait."""
        candidates: Iterable[_Candidate] = [
            (node, operation, operation.weights) for operation in OPERATIONS.get(type(node), ())
        ]
        if type(node).__name__ == _COMPILED and (positions := compiled.places_in(node)):
            candidates = [(node, None, tuple(positions))]
        for candidate in candidates:
            _, operation, positions = candidate
            edges = node.next_functions
            below = self._all_below([edges[position][0] for position in positions])
            if not below:
                continue
            use = WeightUse(node, UsePlace(0, operation, positions), edges)
            if not use.can_wait:
                self.met_hooks = True
            elif use.cost >= CHEAP:
                self._below[candidate] = below
                return {*positions}
        return ()

    # ---- weights

    def _all_below(self, nodes: Iterable[Node | None]) -> Sequence[Node]:
        """The nodes that computed some weights; nothing if one of them is no weight."""
        below: list[Node] = []
        for node in nodes:
            self._left = MOST_NODES
            of_one = self._nodes_below(node)
            if not of_one:
                return ()
            below += of_one
        return tuple(below)

    def _nodes_below(self, node: Node | None) -> Sequence[Node]:
        """The nodes that computed a tensor from parameters alone; nothing for other tensors."""
        if node is None:
            return ()
        below = self._weights.get(node)
        if below is None:
            below = self._weights[node] = self._look_below(node)
        return below

    def _look_below(self, node: Any) -> Sequence[Node]:
        kind = type(node)
        if kind is LEAF:
            plain = type(node.variable) in PLAIN and isinstance(node.variable, nn.Parameter)
            return (node,) if plain else ()
        self._left -= 1
        self.met_hooks |= has_hooks(node)
        if self._left < 0 or has_hooks(node):
            return ()
        edges = node.next_functions
        if kind in OPERATIONS and (kind not in PRODUCTS or (None, 0) in edges):
            return ()
        nodes: dict[Node, None] = {node: None}
        for successor, _ in edges:
            if successor is not None:
                below = self._nodes_below(successor)
                if not below:
                    return ()
                nodes.update(dict.fromkeys(below))
        return tuple(nodes) if len(nodes) > 1 else ()

    # ---- weights that are used in more than one way

    def _give_up_shared(self) -> None:
        """Drop the uses that cannot wait after all, so that the walk continues below them."""
        reached = self._reached
        lost = {use for use, below in self._below.items() if not reached.isdisjoint(below)}
        for use in lost.union(self._in_other_order()):
            del self._below[use]
            new = {node for node in _next(use) if node not in reached}
            reached |= new
            self._ahead += new

    def _in_other_order(self) -> Iterator[_Candidate]:
        """Uses below which some node would add up gradients in another order than a full backward.

        Gradients that reach a node directly arrive before all others. The sum of two numbers does not
        depend on their order; but for two tensors the order may decide the layout of the sum, and so the
        bits of what is computed from it.
        """
        above: dict[Node, list[_Candidate]] = {}
        for use, below in self._below.items():
            for node in below:
                above.setdefault(node, []).append(use)
        for node, uses in above.items():
            if len(uses) > 1:
                direct = sum(end is node for use in uses for end in _next(use))
                others = {one for use in uses for one in self._below[use]}
                indirect = sum(end is node for one in others for end, _ in one.next_functions)
                if direct and indirect and (type(node) is not LEAF or direct + indirect > 2):
                    yield from uses


_COMPILED = "CompiledFunctionBackward"


def _next(use: _Candidate) -> list[Node]:
    """The nodes to which a use's gradients go."""
    node, _, positions = use
    edges = node.next_functions
    return [cast("Node", edges[position][0]) for position in positions]


def _refuses(kind: Any) -> bool:
    """Tell whether a function runs in whole backward passes only, as reentrant checkpoints do."""
    if not issubclass(kind, BackwardCFunction):
        return False
    code = getattr(kind._forward_cls.backward, "__code__", None)
    return code is not None and "_is_checkpoint_valid" in code.co_names


def _batches(uses: dict[_Candidate, Sequence[Node]]) -> dict[Node, int]:
    """For each use's node the batch in which its weights get their gradients.

    Uses that share a node below them are in one batch, since that must run once.
    """
    groups: list[tuple[set[Node], list[Node]]] = []
    for use, below in uses.items():
        nodes, users = set(below), [use[0]]
        apart = []
        for group in groups:
            if nodes.isdisjoint(group[0]):
                apart.append(group)
            else:
                nodes |= group[0]
                users = group[1] + users
        groups = [*apart, (nodes, users)]
    batches: dict[Node, int] = {}
    batch = size = 0
    for nodes, users in groups:
        if size >= BATCH_BYTES:
            batch, size = batch + 1, 0
        leaves: list[Any] = [node for node in nodes if type(node) is LEAF]
        size += sum(leaf.variable.nbytes for leaf in leaves)
        batches.update(dict.fromkeys(users, batch))
    return batches
