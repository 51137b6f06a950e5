"""The deferred engine: the gradients of heavy weights wait for the weights' half of backward.

Forward is left alone. Before the inputs' half of a microbatch runs, a search through its graph finds the
weights whose gradients can wait. The inputs' half is then one backward pass towards everything else, and the
weights' half computes what was left (`penstock.backward.store`).

A node that runs is freed, so no node may run in both halves. Nor may an accumulator, whose hooks must see the
gradient of a microbatch once. So an edge into a weight waits only if everything below it is reached over
edges that wait, and in no other way. A weight with a use that cannot wait gets its whole gradient in the
inputs' half, and so does everything that is unknown here, with the sums of a plain backward pass.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from penstock import compiled
from penstock.backward.full import (
    Gradients,
    Pair,
    backward_through,
    explained,
    seeds_of,
    stage_backward,
)
from penstock.backward.graph import construct_reverse_graph, nodes_of
from penstock.backward.operations import OPERATIONS, PRODUCTS
from penstock.backward.store import (
    LEAF,
    NodeUse,
    Standing,
    Use,
    WeightGradStore,
    are_apart,
    has_hooks,
)
from penstock.errors import UsageError

Edges: TypeAlias = Sequence[tuple[Any, int]]

# An expression of more nodes is taken for an activation, not for a weight.
MOST_NODES = 64


class Waiting(NamedTuple):
    """What waits in a microbatch, and where its inputs' half goes.

    Args:
        uses: The uses of weights whose gradients wait.
        leaves: The accumulators that the inputs' half reaches.
        owners: Keep nodes of Python functions alive, for which a reference to the node is not enough.
        refusing: The name of a function in the graph that runs in whole backward passes only, if there is
            one; then nothing waits.
    """

    uses: Sequence[Use] = ()
    leaves: Sequence[Node] = ()
    owners: Sequence[GradientEdge] = ()
    refusing: str | None = None

    def start(self) -> tuple[list[GradientEdge], WeightGradStore]:
        """Returns the ends of the backward pass that is the inputs' half, and the store that the uses fill.

        An empty list of ends stands for a full pass, where nothing waits.
        """
        store = WeightGradStore(self.owners)
        if not self.uses:
            return [], store
        ends = [GradientEdge(node, 0) for node in self.leaves]
        ends += [GradientEdge(use.node, 0) for use in self.uses]
        for use in self.uses:
            use.watch(store)
        return ends, store


def what_waits(pairs: Sequence[Pair], inputs: Iterable[Any], known: Container[Any] = ()) -> Waiting:
    """Finds what can wait.

    Args:
        pairs: The outputs with their gradients.
        inputs: The inputs of the stage.
        known: Rows of accumulators that are known to be those of weights.
    """
    # A plain leaf is no weight, so its accumulator, which takes long to find, need not be looked for.
    others = [x for x in inputs if isinstance(x, Tensor) and not (x.is_leaf and type(x) is Tensor)]
    search = _Search(nodes_of(output for output, _ in pairs), nodes_of(others), known)
    refusing = search.run()
    if refusing is not None:
        return Waiting(refusing=_name(refusing))
    below = chain.from_iterable(use.below for use in search.uses)
    in_python = any(issubclass(kind, BackwardCFunction) for kind in {*map(type, below)})
    owners = [get_gradient_edge(output) for output, _ in pairs] if in_python else []
    return Waiting(list(search.uses), search.leaves, owners)


def refusing(outputs: Iterable[Any]) -> str | None:
    """Returns the name of a function below ``outputs`` that runs in whole backward passes only, or None."""
    kinds = {type(node) for node in construct_reverse_graph(nodes_of(outputs))}
    return next((_name(kind) for kind in kinds if _refuses(kind)), None)


def _name(kind: Any) -> str:
    return cast("str", kind._forward_cls.__name__)


class _Search:
    """A walk over the nodes that the inputs' half will run. It continues below edges found not to wait.

    Attributes:
        uses: The uses that wait.
        leaves: The accumulators that were reached.
    """

    def __init__(
        self, roots: Iterable[Node], inputs: Iterable[Node], known: Container[Any]
    ) -> None:
        self.uses: dict[Use, None] = {}
        self.leaves: list[Node] = []
        self._reached = set(roots)
        self._ahead = list(self._reached)
        self._inputs = list(inputs)
        self._weights: dict[Node, Sequence[Node]] = dict.fromkeys(self._inputs, ())
        self._known = known
        self._left = MOST_NODES

    def run(self) -> type | None:
        """Walks until all is found, or returns a kind of node that allows no half of a backward pass."""
        while self._ahead:
            if refusing := self._walk():
                return refusing
            self._give_up_shared()
        return None

    def _walk(self) -> type | None:
        ahead, reached = self._ahead, self._reached
        while ahead:
            node: Any = ahead.pop()
            edges = node.next_functions
            kind = type(node)
            if kind not in _PLAIN:
                if kind is LEAF:
                    self.leaves.append(node)
                elif kind in OPERATIONS or kind is SPLIT:
                    edges = self._without_waiting(node, edges)
                elif places := compiled_weights_of(node):
                    edges = self._tried(FunctionUse, None, node, edges, places)
                elif not issubclass(kind, BackwardCFunction):
                    _PLAIN.add(kind)
                elif _refuses(kind):
                    return kind
            for successor, _ in edges:
                if successor is not None and successor not in reached:
                    reached.add(successor)
                    into = self.leaves if type(successor) is LEAF else ahead
                    into.append(successor)
        return None

    def _without_waiting(self, node: Any, edges: Edges) -> Edges:
        """Returns the edges of a node of a known kind that do not wait."""
        if type(node) is SPLIT:
            places = weights_of(node)
            return self._tried(FunctionUse, tuple(places), node, edges, tuple(places.values()))
        for operation in OPERATIONS[type(node)]:
            left = self._tried(NodeUse, operation, node, edges, operation.weights)
            if left is not edges:
                return left
        return edges

    def _tried(
        self, kind: Any, how: Any, node: Any, edges: Edges, positions: Sequence[int]
    ) -> Edges:
        if not positions:
            return edges
        # C calls instead of Python loops, since a compiled node may have very many edges.
        wanted = [*map(edges.__getitem__, positions)]
        below: Sequence[Node] = next(zip(*wanted, strict=True))
        if self._inputs or below not in self._known:
            below = self._all_below(below)
        use: Use = kind(how, node, wanted, below)
        if not below or not use.can_wait():
            return edges
        self.uses[use] = None
        return [edges[position] for position in {*range(len(edges))}.difference(positions)]

    # ---- weights

    def _all_below(self, nodes: Iterable[Node]) -> Sequence[Node]:
        """Returns the nodes that computed some weights; an empty tuple if one of them is no weight."""
        below: list[Node] = []
        for node in nodes:
            found = self._weight(node)
            if not found:
                return ()
            below += found
        return tuple(below)

    def _weight(self, node: Node | None) -> Sequence[Node]:
        """Returns the nodes that computed a weight from parameters alone.

        An empty tuple for other tensors.
        """
        if node is None:
            return ()
        found = self._weights.get(node)
        if found is None:
            self._left = MOST_NODES
            found = self._weights[node] = self._look_below(node)
        return found

    def _nodes_below(self, node: Any) -> Sequence[Node]:
        found = self._weights.get(node)
        if found is None:
            found = self._weights[node] = self._look_below(node)
        return found

    def _look_below(self, node: Any) -> Sequence[Node]:
        kind = type(node)
        if kind is LEAF:
            return (node,) if type(node.variable) is nn.Parameter else ()
        self._left -= 1
        if self._left < 0 or kind is SPLIT or has_hooks(node):
            return ()
        edges = node.next_functions
        if kind in OPERATIONS and (kind not in PRODUCTS or (None, 0) in edges):
            return ()
        if len(edges) == 1:
            below = self._nodes_below(edges[0][0])
            return (node, *below) if below else ()
        found: dict[Node, None] = {node: None}
        for successor, _ in edges:
            if successor is not None:
                below = self._nodes_below(successor)
                if not below:
                    return ()
                found.update(dict.fromkeys(below))
        return tuple(found)

    # ---- weights that are used in more than one way

    def _give_up_shared(self) -> None:
        """Drops the uses that cannot wait after all, so that the walk continues below them."""
        reached = self._reached
        lost = {use for use in self.uses if not reached.isdisjoint(use.below)}
        for use in lost.union(self._in_other_order()):
            del self.uses[use]
            new = {node for node, _ in use.edges} - reached
            reached |= new
            self._ahead += new

    def _in_other_order(self) -> Iterator[Use]:
        """Yields uses below which some node would add up gradients in another order than a full backward.

        Gradients that reach a node directly arrive before all others. The sum of two numbers does not
        depend on their order; but for two tensors the order may decide the layout of the sum, and so the
        bits of what is computed from it.
        """
        if are_apart(self.uses):
            return
        uses: dict[Node, list[Use]] = {}
        for use in self.uses:
            for node in use.below:
                uses.setdefault(node, []).append(use)
        for node, found in uses.items():
            if len(found) > 1:
                direct = sum(end is node for use in found for end, _ in use.edges)
                others = {one for use in found for one in use.below}
                indirect = sum(end is node for one in others for end, _ in one.next_functions)
                if direct and indirect and (type(node) is not LEAF or direct + indirect > 2):
                    yield from found


def _refuses(kind: Any) -> bool:
    """Says whether a function runs in whole backward passes only, as reentrant checkpoints do."""
    if not issubclass(kind, BackwardCFunction):
        return False
    code = getattr(kind._forward_cls.backward, "__code__", None)
    return code is not None and "_is_checkpoint_valid" in code.co_names


# Kinds of C++ nodes that are simply walked over. (Python functions may have a new kind for each call.)
_PLAIN: set[type] = set()


# ---- the engine


log = logging.getLogger("penstock")

# Classes by name, since most of them live in parts of torch that are not imported here.
_REASONS = {
    "FSDPModule": "FSDP reduces its gradients in the inputs' half",
    "FullyShardedDataParallel": "FSDP reduces its gradients in the inputs' half",
}


class DeferredBackward:
    """Splits the backward passes of one module.

    A weight gets its whole gradient in one of the halves: in the weights' half where all its uses can wait,
    else in the inputs' half, as in a full backward pass.

    Args:
        module: The stage's module.
        fused: Multiply the weights' gradients straight into ``.grad``, once there is one, without another
            tensor of the weight's size. This changes bits, and the accumulators do not run: it is only for
            weights without hooks of their own, and not for use with DistributedDataParallel. ``.grad`` keeps
            its type, which ``weight.grad_dtype`` tells.
        joined: The number of microbatches whose weight gradients are computed as one larger product. This
            changes bits and holds memory longer, and hooks run once for all of them. `flush` computes what
            is left over.
        reduced_later: Whether the caller reduces sharded gradients after the weights' half, instead of FSDP2
            in the inputs' half.

    Raises:
        UsageError: ``joined`` is less than 1.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        fused: bool = False,
        joined: int = 1,
        reduced_later: bool = False,
    ) -> None:
        if joined < 1:
            raise UsageError(
                f"joined={joined}: must be at least 1: the number of microbatches "
                "whose weight gradients are computed together"
            )
        self._module = module
        self._fused, self._joined = fused, joined
        self._reduced_later = reduced_later
        self._left: list[WeightGradStore] = []
        self._standing = Standing()
        self._whole: bool | None = None
        self._told = ""

    @property
    def is_plain(self) -> bool:
        """Whether a full backward pass puts nothing off."""
        return not self._fused and self._joined == 1

    def full(self, outputs: Any, output_grads: Any, inputs: Sequence[Any]) -> Gradients:
        """Runs both halves; arguments and result as of `input_half`."""
        if self.is_plain:
            return stage_backward(outputs, output_grads, inputs)
        found, store = self.input_half(outputs, output_grads, inputs)
        self.weight_half(store)
        return found

    def input_half(
        self, outputs: Any, output_grads: Any, inputs: Sequence[Any]
    ) -> tuple[Gradients, WeightGradStore]:
        """Computes the inputs' gradients, and those of the weights that cannot wait.

        Args:
            outputs: What forward returned, or its loss.
            output_grads: As for `stage_backward`; they must stay as they are until the other half.
            inputs: The inputs of the stage.

        Returns:
            One gradient of each input's shape, or None where it needs or gets none; and what `weight_half`
            needs.

        Raises:
            UsageError: ``output_grads`` has another structure than the outputs.
            StageError: Autograd failed; the cause is chained.
        """
        pairs = seeds_of(outputs, output_grads)
        with explained("the inputs' half of backward", output=outputs, gradient=output_grads):
            ends, store = self._waiting(pairs, inputs).start()
            return backward_through(pairs, inputs, ends), store

    def weight_half(self, store: WeightGradStore) -> None:
        """Computes what `input_half` has left in ``store``, and adds it to the weights' ``.grad``."""
        self._left.append(store)
        if len(self._left) >= self._joined:
            self._deliver()

    def flush(self) -> None:
        """Computes what was held back for a larger product, and forgets the step."""
        self._deliver()
        self._standing.clear()

    def _deliver(self) -> None:
        left, self._left = self._left, []
        if not left:
            return
        for store in left[1:]:
            left[0].take(store)
        with explained("the weights' half of backward"):
            left[0].deliver(fused=self._fused, joined=len(left) > 1, standing=self._standing)

    def _waiting(self, pairs: Sequence[Pair], inputs: Sequence[Any]) -> Waiting:
        """Returns what waits in a microbatch; logs once why nothing does."""
        if self._whole is None:
            said = _reason_in(self._module, reduced_later=self._reduced_later)
            self._whole = said is not None
            self._tell(said)
        waiting = Waiting() if self._whole else what_waits(pairs, inputs, self._standing)
        if waiting.refusing is not None:
            self._tell(f"{waiting.refusing} runs in whole backward passes only")
        return waiting

    def _tell(self, reason: str | None) -> None:
        if reason is not None and reason != self._told:
            self._told = reason
            log.info("no weight gradient of a stage waits: %s", reason)


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


# ---- custom functions that offer the two halves of their backward separately


class SplitFunction(ABC):
    """A custom function whose weights' gradients can wait; use it like ``torch.autograd.Function``.

    A subclass lists in ``weights`` the positions of the arguments that are weights, and defines three
    static methods. The ``ctx`` of forward is autograd's, without ``needs_input_grad``. The ``ctx`` of the
    two halves has ``saved_tensors`` and the attributes that forward has set, other than ``split``. If the
    weights' half does not wait, the two halves run one after the other::

        class Scale(SplitFunction):
            weights = (1,)

            @staticmethod
            def forward(ctx, x, scale):
                ctx.save_for_backward(x, scale)
                return x * scale

            @staticmethod
            def backward_input(ctx, grad):
                return grad * ctx.saved_tensors[1], None

            @staticmethod
            def backward_weight(ctx, grad):
                return ((grad * ctx.saved_tensors[0]).sum(0),)

        y = Scale.apply(x, scale)
    """

    weights: ClassVar[tuple[int, ...]]

    @staticmethod
    @abstractmethod
    def forward(ctx: Any, *args: Any) -> Any:
        """Returns the output; saves for backward as usual."""

    @staticmethod
    @abstractmethod
    def backward_input(ctx: Any, *grads: Any) -> Sequence[Tensor | None]:
        """Returns a gradient or None for each argument of forward; None for the weights."""

    @staticmethod
    @abstractmethod
    def backward_weight(ctx: Any, *grads: Any) -> Sequence[Tensor | None]:
        """Returns a gradient or None for each weight, in the order of ``weights``."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Runs forward on positional arguments."""
        return cast("Any", _Split).apply(cls, *args)


class _Split(torch.autograd.Function):
    """Runs both halves, unless a use has asked to keep the weights' half for later."""

    @staticmethod
    def forward(ctx: Any, kind: type[SplitFunction], *args: Any) -> Any:
        ctx.split = SimpleNamespace(kind=kind, places=_places(kind, args), use=None)
        return kind.forward(ctx, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        split, kept = ctx.split, _kept(ctx)
        found = list(split.kind.backward_input(kept, *grads))
        if split.use is not None:
            split.use.keep(partial(split.kind.backward_weight, kept, *grads))
        elif any(ctx.needs_input_grad[1 + position] for position in split.kind.weights):
            of_weights = split.kind.backward_weight(kept, *grads)
            for position, grad in zip(split.kind.weights, of_weights, strict=True):
                found[position] = grad
        return None, *found


SPLIT: type = _Split._backward_cls
"""The type of the graph nodes of such functions."""


class FunctionUse(Use):
    """A call of a `SplitFunction` or of a compiled function.

    Args:
        positions: Which gradients of the weights' half go to the edges; None for all of them, in order.
        place: The arguments of `Use`.
    """

    __slots__ = ("_compute", "_positions", "_store")

    def __init__(self, positions: Sequence[int] | None, *place: Any) -> None:
        super().__init__(*place)
        self._positions = positions

    def watch(self, store: WeightGradStore) -> None:
        """Adds itself to ``store`` once a gradient arrives at the node."""
        self._store = store
        self.node.split.use = self

    def keep(self, compute: Callable[[], Sequence[Tensor | None]]) -> None:
        """Puts the weights' half of the function into the store."""
        self._store.uses.append(self)
        self.node.split.use = None
        self._compute = compute
        del self._store, self.node

    def gradients(self) -> Sequence[Tensor | None]:
        """Computes a gradient or None for each edge, and forgets what it was computed from."""
        found = self._compute()
        del self._compute
        return found if self._positions is None else [found[p] for p in self._positions]


def compiled_weights_of(node: Any) -> Sequence[int]:
    """Returns the edges that lead to weights in a compiled function's node, if that can be split too."""
    if type(node).__name__ != _COMPILED:
        return ()
    # Imported on first use, since it takes seconds and most programs compile nothing.
    found: Sequence[int] = compiled.places_in(node)
    return found


_COMPILED = "CompiledFunctionBackward"


def weights_of(node: Any) -> dict[int, int]:
    """Returns, for each of a function's weights that has an edge of the node, that edge's position."""
    edges = node.next_functions
    places = enumerate(node.split.places)
    return {index: place for index, place in places if place is not None and edges[place][0]}


def _places(kind: type[SplitFunction], args: Sequence[Any]) -> list[int | None]:
    """Returns each weight's position among the arguments that are tensors: only tensors have edges."""
    tensors = [position for position, value in enumerate(args) if isinstance(value, Tensor)]
    return [tensors.index(p) if p in tensors else None for p in kind.weights]


def _kept(ctx: Any) -> SimpleNamespace:
    """Returns what both halves use.

    Saved tensors are read once here, as a checkpoint allows no second time.
    """
    names = {name: value for name, value in vars(ctx).items() if name != "split"}
    return SimpleNamespace(**names, saved_tensors=ctx.saved_tensors)
