"""A stage's backward pass in two halves: the gradients of heavy weights wait for the second.

Forward is left alone. Before the inputs' half of a microbatch, a search through its graph finds the weights
whose gradients can wait. The inputs' half is then one backward pass towards everything else; on its way it
keeps a pair (input, output gradient) for each use of such a weight. The weights' half turns those into
gradients and hands them to autograd's own accumulators, which run the hooks::

    I:   loss ── … ── Addmm ── … ── Addmm ── … ── input        one pass, towards all but the weights
                        │             │
                     (x, dy)       (x, dy)                     what is kept

    W:   (x, dy) ──> dW ──> … ──> accumulator ──> .grad        in batches, each one pass

A node that runs is freed, so no node may run in both halves. Nor may an accumulator, whose hooks must see the
gradient of a microbatch once. So an edge into a weight waits only if everything below it is reached over
edges that wait, and in no other way. A weight with a use that cannot wait gets its whole gradient in the
inputs' half, and so does everything that is unknown here, with the sums of a plain backward pass.

Microbatches mostly have equal graphs. So the first one's search leaves a plan that says where in the graph
the uses are, and a microbatch whose graph looks the same follows that.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, repeat, starmap
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from penstock import compiled
from penstock.backward.operations import OPERATIONS, PRODUCTS, Operation, node_type
from penstock.backward.passes import Gradients, Pair, backward_to, failure, run_backward, seeds_of
from penstock.backward.saved import has_hooks, is_recomputed, read_early, saved_names
from penstock.backward.torch_names import _get_grad_fn_or_grad_acc
from penstock.errors import PenstockError, StageError

log = logging.getLogger("penstock")

LEAF: Any = node_type("AccumulateGrad")
"""The type of the nodes that add to ``.grad``."""

# An expression of more nodes is taken for an activation, not for a weight.
MOST_NODES = 64

# A compromise: gradients that wait for a backward pass take memory, and each pass has a fixed cost.
BATCH_BYTES = 2**20

# How many kinds of graphs an engine remembers. A stage has a few, one for each kind of microbatch.
MOST_PLANS = 16


class SplitBackward:
    """Splits the backward passes of one module.

    A weight gets its whole gradient in one of the halves: in the weights' half where all its uses can wait,
    else in the inputs' half, as in a full backward pass. Hooks run as in a full backward pass, and the
    gradients have the same bits::

        split = SplitBackward(module)
        (dx,), pending = split.input_half(module(x), dy, [x])
        split.weight_half(pending)

    Args:
        module: The stage's module.
        reduced_later: Whether the caller reduces sharded gradients after the weights' half, instead of FSDP2
            in the inputs' half.
    """

    def __init__(self, module: nn.Module, *, reduced_later: bool = False) -> None:
        self._module = module
        self._reduced_later = reduced_later
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._is_whole: bool | None = None
        self._logged = ""

    def full(self, outputs: Any, output_grads: Any, inputs: Sequence[Any]) -> Gradients:
        """Runs both halves as one backward pass; arguments, result and errors as of `input_half`."""
        pairs = seeds_of(outputs, output_grads)
        try:
            return backward_to(pairs, inputs)
        except PenstockError:
            raise
        except Exception as error:
            told = {"output": outputs, "gradient": output_grads}
            raise failure("backward", error, **told) from error

    def input_half(
        self, outputs: Any, output_grads: Any, inputs: Sequence[Any]
    ) -> tuple[Gradients, PendingGradients]:
        """Computes the inputs' gradients, and those of the weights that cannot wait.

        Args:
            outputs: What forward returned, or its loss: a list of tensors, or a nested value.
            output_grads: The gradients, in the same structure, None where there is none. They must stay as
                they are until the other half. None in place of it all says that each output is a loss.
            inputs: The inputs of the stage. They need not be leaves, nor tensors.

        Returns:
            One gradient of each input's shape, or None where it needs or gets none; and what `weight_half`
            needs.

        Raises:
            UsageError: ``output_grads`` has another structure than the outputs.
            StageError: Autograd failed; the cause is chained.
        """
        pairs = seeds_of(outputs, output_grads)
        pending = PendingGradients()
        try:
            ends = self._prepare(pairs, inputs, pending)
            grads = backward_to(pairs, inputs, ends)
        except PenstockError:
            raise
        except Exception as error:
            told = {"output": outputs, "gradient": output_grads}
            raise failure("the inputs' half of backward", error, **told) from error
        finally:
            pending.collect()
        return grads, pending

    def weight_half(self, pending: PendingGradients) -> None:
        """Computes the gradients that `input_half` has left, and adds them to the weights' ``.grad``.

        Raises:
            StageError: Autograd failed, or an input has changed since the inputs' half.
        """
        try:
            with torch.no_grad():
                pending.deliver()
        except PenstockError:
            raise
        except Exception as error:
            raise failure("the weights' half of backward", error) from error

    def _prepare(
        self, pairs: Sequence[Pair], inputs: Sequence[Any], pending: PendingGradients
    ) -> list[GradientEdge]:
        """Lets ``pending`` watch the uses that wait; returns where the inputs' half goes.

        No ends stand for a full pass, where nothing waits.
        """
        if self._is_whole is None:
            reason = _reason_in(self._module, reduced_later=self._reduced_later)
            self._is_whole = reason is not None
            self._log(reason)
        if self._is_whole:
            return []
        graph = _Graph(pairs, inputs)
        plan = self._plans.get(graph.shape)
        uses = None if plan is None else plan.uses_in(graph.nodes)
        if plan is None or uses is None:
            # A graph of the same shape may still differ in what its nodes have saved.
            search = _Search(graph)
            plan = search.plan()
            uses = plan.uses_in(graph.nodes)
            if not search.met_hooks:
                self._remember(graph, plan)
            self._log(plan.refusal)
        if not uses:
            return []
        pending.watch(uses)
        if plan.keeps_outputs:
            pending.owners = [get_gradient_edge(output) for output, _ in pairs]
        return list(map(GradientEdge, map(graph.nodes.__getitem__, plan.ends), repeat(0)))

    def _remember(self, graph: _Graph, plan: _Plan) -> None:
        if len(self._plans) >= MOST_PLANS:
            del self._plans[next(iter(self._plans))]
        self._plans[graph.shape] = plan

    def _log(self, reason: str | None) -> None:
        if reason is not None and reason != self._logged:
            self._logged = reason
            log.info("no weight gradient of a stage waits: %s", reason)


# Classes by name, since most of them live in parts of torch that are not imported here.
_REASONS = {
    "FSDPModule": "FSDP reduces its gradients in the inputs' half",
    "FullyShardedDataParallel": "FSDP reduces its gradients in the inputs' half",
}


def _reason_in(root: nn.Module, *, reduced_later: bool) -> str | None:
    """Says why no backward pass of a module may be cut in two, if there is a reason."""
    for name, module in root.named_modules():
        kinds = [kind.__name__ for kind in type(module).__mro__]
        reason = next((_REASONS[kind] for kind in kinds if kind in _REASONS), None)
        if reduced_later and "FSDPModule" in kinds:
            reason = None
        if "DistributedDataParallel" in kinds and _is_searching(module):
            reason = "DistributedDataParallel searches the graph for its parameters"
        if reason is not None:
            return f"in {name or type(module).__name__}, {reason}"
    return None


def _is_searching(module: Any) -> bool:
    return bool(module.find_unused_parameters or module.static_graph)


# ---- what waits between the halves


class PendingGradients:
    """What one microbatch's inputs' half leaves for its weights' half; its length is the uses that wait.

    Attributes:
        owners: Keep nodes of Python functions alive, for which a reference to the node is not enough.
    """

    def __init__(self) -> None:
        self.owners: list[GradientEdge] = []
        self._batches: dict[int, list[_Use]] = {}
        self._arrived: dict[_Use, Any] = {}
        self._reading: list[_Use] = []

    def __len__(self) -> int:
        return sum(map(len, self._batches.values()))

    def counts(self) -> list[int]:
        """Returns how many weights each use that waits has."""
        return [len(use.edges) for uses in self._batches.values() for use in uses]

    def watch(self, uses: Iterable[_Use]) -> None:
        """Notes what arrives at the nodes of some uses in the next backward pass."""
        arrive = self._arrived.setdefault
        for use in uses:
            if use.operation is None:
                compiled.leave_weights(use.node, partial(arrive, use))
                use.node = None
                continue
            if use.value is None:
                self._reading.append(use)
                use.node.register_prehook(use.read)
            # A hook written in C, which leaves the gradients as they are.
            use.node.register_prehook(partial(arrive, use))
            if use.value is not None:
                use.node = None

    def collect(self) -> None:
        """Takes what has arrived, in this order, and drops what would keep the graph alive."""
        for use, arrived in self._arrived.items():
            if use.operation is None:
                use.compute = arrived
            elif arrived[0] is None:
                continue
            else:
                use.grad = arrived[0]
            self._batches.setdefault(use.batch, []).append(use)
        self._arrived.clear()
        for use in self._reading:
            use.node = None
        self._reading.clear()

    def deliver(self) -> None:
        """Adds the gradients to the weights' ``.grad``; nothing waits then."""
        batches, self._batches = self._batches, {}
        for batch in [*batches]:
            _deliver(batches.pop(batch))
        self.owners.clear()


class _Use:
    """A use of weights in one microbatch.

    Args:
        node: The autograd node that uses the weights.
        place: Where it is, and what it does.

    Attributes:
        edges: Where the gradients of the weights go.
        value: What the gradients are computed from, with ``arguments``. None until the node is about to run,
            if a checkpoint has yet to recompute it.
        can_wait: Whether that can be kept.
        grad: The output's gradient.
        compute: For a compiled function: computes the gradients.
    """

    can_wait = True
    grad: Tensor | None = None
    value: Tensor | None = None
    compute: Any = None

    def __init__(self, node: Any, place: _Place) -> None:
        _, operation, positions, self.batch = place
        self.node, self.operation = node, operation
        edges = node.next_functions
        self.edges = list(starmap(GradientEdge, map(edges.__getitem__, positions)))
        if operation is None:
            return
        raw = getattr(node, operation.raw)
        if operation.applies is not None and not operation.applies(node):
            self.can_wait = False
        elif raw.unpack_hook is not None:
            # Other hooks on saved tensors may allow only one call, which belongs to the node.
            self.can_wait = is_recomputed(raw)
        else:
            value = getattr(node, operation.value)
            self.can_wait = type(value) in _PLAIN and value.layout is torch.strided
            self.value = value.detach()
            self.version = value._version
            self.arguments = tuple(map(getattr, repeat(node), operation.rest))
            if operation.form is not None:
                self._keep_form(operation)

    def _keep_form(self, operation: Operation) -> None:
        before = len(operation.others)
        like = self.arguments[before]
        form = like.shape, like.stride()
        self.arguments = (*self.arguments[:before], form, *self.arguments[before + 1 :])

    def read(self, grads: Gradients) -> None:
        """Reads what a checkpoint recomputes; autograd calls it just before it runs the node."""
        if grads[0] is not None:
            node, operation = self.node, cast("Operation", self.operation)
            tensors = {operation.form, *operation.others}
            arguments = [
                read_early(node, name) if name in tensors else getattr(node, name)
                for name in operation.rest
            ]
            self.value = value = read_early(node, operation.value).detach()
            self.version, self.arguments = value._version, tuple(arguments)
            if operation.form is not None:
                self._keep_form(operation)

    def gradients(self) -> Sequence[Tensor | None]:
        """Computes a gradient or None for each edge, and drops what it was computed from.

        Raises:
            StageError: An input has changed since the inputs' half.
        """
        if self.operation is None:
            compute, self.compute = self.compute, None
            gradients: Sequence[Tensor | None] = compute()
            return gradients
        grad, value = self.grad, cast("Tensor", self.value)
        self.grad = self.value = None
        if value._version != self.version:
            raise StageError(
                "an input of an operation with a weight was changed in place between the inputs' half "
                f"and the weights' half of backward; its shape is {tuple(value.shape)}"
            )
        return self.operation.gradient(grad, value, *self.arguments)


_PLAIN = {Tensor, nn.Parameter}
"""The types of saved tensors that can be kept: others may compute their gradients in ways of their own."""


def _deliver(uses: Iterable[_Use]) -> None:
    """Runs one backward pass for some uses."""
    sums: dict[GradientEdge, Tensor] = {}
    for use in uses:
        for edge, gradient in zip(use.edges, use.gradients(), strict=True):
            if gradient is not None:
                sums[edge] = _plus(sums.pop(edge), gradient) if edge in sums else gradient
    first = [
        edge
        for edge in sums
        if type(edge[0]) is LEAF and cast("Any", edge[0]).variable.grad is None
    ]
    if first:
        weights = [edge.node.variable for edge in first]
        firsts = [sums.pop(edge) for edge in first]
        with torch.enable_grad():
            root = cast("Any", _Handover).apply(firsts, *weights)
        sums[get_gradient_edge(root)] = root.detach()
    run_backward(list(sums.items()))


def _plus(before: Tensor, gradient: Tensor) -> Tensor:
    # A sparse tensor can be added to a dense one, but not the reverse.
    return gradient + before if before.is_sparse else before + gradient


class _Handover(torch.autograd.Function):
    """A node above accumulators that gives each of them its first gradient.

    Only the engine holds a reference to the gradient then, so the accumulator keeps it as ``.grad`` without
    a copy.
    """

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.empty((), device=weights[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        gradients = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *gradients


# ---- the graph of a microbatch, and what is known about graphs of its shape


class _Graph:
    """The nodes below some outputs.

    Attributes:
        nodes: The outputs' nodes first, then in a fixed order.
        roots: How many of them are outputs' nodes.
        others: Where those of inputs are that might pass for weights.
        shape: The kinds of the nodes and where their edges lead, as one flat tuple; equal for equal graphs.
    """

    def __init__(self, pairs: Iterable[Pair], inputs: Iterable[Any]) -> None:
        # Edges that lead nowhere have None for a node.
        positions: dict[Any, int] = {None: -1}
        nodes: list[Any] = []
        for output, _ in pairs:
            node = output.grad_fn or _get_grad_fn_or_grad_acc(output)
            if positions.setdefault(node, len(nodes)) == len(nodes):
                nodes.append(node)
        self.nodes, self.positions = nodes, positions
        self.roots = count = len(nodes)
        # This loop is most of what a small stage's halves cost beyond a full backward pass.
        shape: list[Any] = []
        note, place, add = shape.append, positions.setdefault, nodes.append
        for node in nodes:
            kind = type(node)
            if kind is LEAF:
                note(type(node.variable))
                continue
            note(kind)
            for successor, _ in node.next_functions:
                position = place(successor, count)
                note(position)
                if position == count:
                    count += 1
                    add(successor)
        self.others: list[int | None] = []
        for value in inputs:
            # A plain leaf is no weight.
            if isinstance(value, Tensor) and not (type(value) is Tensor and value.is_leaf):
                node = value.grad_fn or _get_grad_fn_or_grad_acc(value)
                self.others.append(positions.get(node))
        self.shape = (self.roots, *self.others, *shape)


class _Place(NamedTuple):
    """Where in a graph weights are used.

    Args:
        position: The position of the node.
        operation: What the node does; None for a compiled function.
        edges: The positions of the edges whose gradients wait.
        batch: Uses of one batch get their gradients in one backward pass.
    """

    position: int
    operation: Operation | None
    edges: Sequence[int]
    batch: int = 0


class _Plan(NamedTuple):
    """What waits in graphs of one shape.

    Args:
        places: The uses that wait.
        ends: The positions of the nodes to which the inputs' half goes.
        hooked: The positions of nodes below the uses that have saved tensors, which hooks might handle.
        keeps_outputs: Whether nodes of Python functions are among those below the uses.
        refusal: Why nothing may wait, if that is so.
    """

    places: Sequence[_Place] = ()
    ends: Sequence[int] = ()
    hooked: Sequence[int] = ()
    keeps_outputs: bool = False
    refusal: str | None = None

    def uses_in(self, nodes: Sequence[Node]) -> list[_Use] | None:
        """Returns the uses in a graph; None if some of them cannot wait there."""
        uses = []
        for place in self.places:
            use = _Use(nodes[place[0]], place)
            if not use.can_wait:
                return None
            uses.append(use)
        if self.hooked and any(has_hooks(nodes[position]) for position in self.hooked):
            return None
        return uses


# ---- the search


_Candidate: TypeAlias = tuple[Node, Operation | None, tuple[int, ...]]
"""A node, what it does, and the positions of its edges into weights."""


class _Search:
    """A walk over the nodes that the inputs' half will run. It continues below edges found not to wait.

    Attributes:
        met_hooks: Whether something does not wait because of what nodes have saved, such as hooks. Then the
            plan does not hold for other graphs of this shape.
    """

    def __init__(self, graph: _Graph) -> None:
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

    def plan(self) -> _Plan:
        """Walks until all is found."""
        while self._ahead:
            if refusing := self._walk():
                return _Plan(refusal=f"{refusing} runs in whole backward passes only")
            self._give_up_shared()
        position = self._graph.positions
        batches = _batches(self._below)
        below = list(dict.fromkeys(chain.from_iterable(self._below.values())))
        return _Plan(
            [_Place(position[node], how, edges, batches[node]) for node, how, edges in self._below],
            [position[node] for node in (*self._leaves, *(use[0] for use in self._below))],
            [position[node] for node in below if saved_names(type(node))],
            any(issubclass(type(node), BackwardCFunction) for node in below),
        )

    def _walk(self) -> str | None:
        """Walks on, or returns the name of a function that allows no half of a backward pass."""
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
        """Returns the positions of a node's edges that wait."""
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
            if _Use(node, _Place(0, operation, positions)).can_wait:
                self._below[candidate] = below
                return {*positions}
            self.met_hooks = True
        return ()

    # ---- weights

    def _all_below(self, nodes: Iterable[Node | None]) -> Sequence[Node]:
        """Returns the nodes that computed some weights; nothing if one of them is no weight."""
        below: list[Node] = []
        for node in nodes:
            self._left = MOST_NODES
            of_one = self._nodes_below(node)
            if not of_one:
                return ()
            below += of_one
        return tuple(below)

    def _nodes_below(self, node: Node | None) -> Sequence[Node]:
        """Returns the nodes that computed a tensor from parameters alone; nothing for other tensors."""
        if node is None:
            return ()
        below = self._weights.get(node)
        if below is None:
            below = self._weights[node] = self._look_below(node)
        return below

    def _look_below(self, node: Any) -> Sequence[Node]:
        kind = type(node)
        if kind is LEAF:
            return (node,) if type(node.variable) is nn.Parameter else ()
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
        """Drops the uses that cannot wait after all, so that the walk continues below them."""
        reached = self._reached
        lost = {use for use, below in self._below.items() if not reached.isdisjoint(below)}
        for use in lost.union(self._in_other_order()):
            del self._below[use]
            new = {node for node in _next(use) if node not in reached}
            reached |= new
            self._ahead += new

    def _in_other_order(self) -> Iterator[_Candidate]:
        """Yields uses below which some node would add up gradients in another order than a full backward.

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
    """Returns the nodes to which a use's gradients go."""
    node, _, positions = use
    edges = node.next_functions
    return [cast("Node", edges[position][0]) for position in positions]


def _refuses(kind: Any) -> bool:
    """Says whether a function runs in whole backward passes only, as reentrant checkpoints do."""
    if not issubclass(kind, BackwardCFunction):
        return False
    code = getattr(kind._forward_cls.backward, "__code__", None)
    return code is not None and "_is_checkpoint_valid" in code.co_names


def _batches(uses: dict[_Candidate, Sequence[Node]]) -> dict[Node, int]:
    """Returns for each use's node the batch in which its weights get their gradients.

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


# ---- gradients of shared weights, collected beside ``.grad``
# A weight that several stages use has one gradient, the sum of their shares. In one process those stages
# hold the same parameter. If each added its share straight to ``.grad``, the bits of the sum would depend
# on which stages live together, and on whose backward runs first. So each stage collects its own share, and
# ``weights/sharing.py`` adds up all of them.


class SharedGradients:
    """A context in which the gradients of some parameters add up here, and not in their ``.grad``.

    When the context ends, also after an error, ``.grad`` holds again what it held before.

    Args:
        parameters: Whose gradients.
    """

    def __init__(self, parameters: Sequence[Tensor] = ()) -> None:
        self._parameters = tuple(parameters)
        self._shares: list[Tensor | None] = [None] * len(self._parameters)
        self._outside: list[Tensor | None] = []

    def __enter__(self) -> None:
        self._outside = [parameter.grad for parameter in self._parameters]
        self._put(self._shares)

    def __exit__(self, *_: object) -> None:
        self._shares = [parameter.grad for parameter in self._parameters]
        self._put(self._outside)
        self._outside = []

    def take(self) -> list[Tensor | None]:
        """Returns what was collected for each parameter since the last call, None where nothing was."""
        shares, self._shares = self._shares, [None] * len(self._parameters)
        return shares

    def _put(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
