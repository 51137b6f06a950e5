"""What the inputs' half of backward keeps, and how the weights' half computes the gradients from it."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NoReturn, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils import checkpoint

from penstock.backward.full import run_backward
from penstock.backward.operations import Gradients, Operation, node_type
from penstock.errors import StageError

# ---- the tensors that autograd nodes have saved: find them, read them once more, drop them early
# The ``_raw_saved_*`` attributes are described in torch's notes on autograd, "Hooks for saved tensors".


def is_checkpointed(node: Node) -> bool:
    """Says whether running ``node`` recomputes a region of non-reentrant checkpointing."""
    return any(map(is_recomputed, _saved(node)))


def is_recomputed(saved: Any) -> bool:
    """Says whether reading a saved tensor recomputes a region of non-reentrant checkpointing."""
    if saved.unpack_hook is None or type(saved.data).__module__ != checkpoint.__name__:
        return False
    return hasattr(saved.data, "handles")


def read_early(node: Any, name: str) -> Tensor:
    """Returns a saved tensor that a checkpoint recomputes, so that the node can still read it afterwards.

    A checkpoint hands out each tensor once in a backward pass, and records that in the tensor's holder. Here
    nothing is recorded. Seen in torch 2.13.
    """
    holder = getattr(node, f"_raw{name}").data
    holder.handles = _WithoutNotes(holder.handles)
    try:
        found: Tensor = getattr(node, name)
    finally:
        holder.handles = dict(holder.handles)
    return found


class _WithoutNotes(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        if value is not None:
            super().__setitem__(key, value)


def has_hooks(node: Node) -> bool:
    """Says whether hooks handle what ``node`` saved, as they do in a checkpointed region."""
    if not _attributes(type(node)):
        return False
    return any(saved.unpack_hook is not None for saved in _saved(node))


def release(nodes: Iterable[Node]) -> None:
    """Drops what ``nodes`` saved, so that they cannot run again.

    Tensors that already have a hook on saved tensors stay: torch allows no second hook.
    """
    for node in nodes:
        for saved in _saved(node):
            with contextlib.suppress(RuntimeError):
                saved.register_hooks(_drop, _complain)


def _saved(node: Node) -> Iterator[Any]:
    for name in _attributes(type(node)):
        saved = getattr(node, name)
        if isinstance(saved, tuple):
            yield from saved
        elif saved is not None:
            yield saved


# Bounded, since a Python function may have a new type for each call.
@lru_cache(1024)
def _attributes(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _drop(_: Tensor) -> None:
    """Packs a tensor into nothing."""


def _complain(_: object) -> NoReturn:
    raise RuntimeError(
        "what this node saved was freed after the inputs' half of backward; "
        "the weights' half does not need it, so something else runs the graph once more"
    )


# ---- the weight gradients of a microbatch that wait for the weights' half of its backward pass
# Inputs' half::
#
#     loss ── … ── Addmm ── … ── Addmm ── … ── input        one backward pass, towards all but the weights
# │             │                 (x, dy)       (x, dy)                     what the store keeps
#
# Weights' half::
#
#     (x, dy) ──> dW ──> … ──> accumulator of the weight ──> .grad      in batches, each one backward pass
#
# The accumulators are autograd's own: they run the hooks, once per microbatch and weight.


LEAF: Any = node_type("AccumulateGrad")
"""The type of the nodes that add to ``.grad``."""

_TRANSPOSED = node_type("TBackward0")

# A compromise: gradients that wait for a backward pass take memory, and each pass has a fixed cost.
BATCH_BYTES = 2**20


Edge: TypeAlias = tuple[Any, int]
"""A node, and which of its gradients."""


class Use(ABC):
    """A use of weights in one microbatch.

    Args:
        node: The autograd node that uses the weights.
        edges: Where the gradients of the weights go.
        below: All nodes on the way from there to the parameters, with the accumulators.
    """

    __slots__ = ("below", "edges", "node")

    def __init__(self, node: Any, edges: Sequence[Edge], below: Sequence[Node]) -> None:
        self.node = node
        self.edges = edges
        self.below = below

    def can_wait(self) -> bool:
        """Says whether what the gradients are computed from can be kept."""
        return True

    @abstractmethod
    def watch(self, store: WeightGradStore) -> None:
        """Adds itself to ``store`` once a gradient arrives at the node."""

    @abstractmethod
    def gradients(self) -> Gradients:
        """Computes a gradient or None for each edge, and drops what it was computed from."""


class NodeUse(Use):
    """A use that an `Operation` describes."""

    __slots__ = ("arguments", "grad", "operation", "store", "value", "version")

    def __init__(
        self, operation: Operation, node: Any, edges: Sequence[Edge], below: Sequence[Node]
    ) -> None:
        super().__init__(node, edges, below)
        self.operation = operation
        self.value: Tensor | None = None

    def can_wait(self) -> bool:
        """Reads what the gradients are computed from; False if that cannot be kept.

        What a checkpoint recomputes is read later, when the node is about to run. Other hooks on saved
        tensors may allow only one call, which belongs to the node.
        """
        node, operation = self.node, self.operation
        if operation.applies is not None and not operation.applies(node):
            return False
        raw = getattr(node, operation.raw)
        if raw.unpack_hook is not None:
            return is_recomputed(raw)
        value = self._read(node, getattr)
        return type(value) is Tensor and value.layout is torch.strided

    def _read(self, node: Any, get: Callable[[Any, str], Any]) -> Tensor:
        operation = self.operation
        value: Tensor = get(node, operation.value).detach()
        self.arguments = tuple([getattr(node, name) for name in operation.options])
        if operation.form is not None:
            like = get(node, operation.form)
            self.arguments = ((like.shape, like.stride()), *self.arguments)
        if operation.others:
            self.arguments = (*[get(node, n).detach() for n in operation.others], *self.arguments)
        self.value, self.version = value, value._version
        return value

    def watch(self, store: WeightGradStore) -> None:
        """Adds itself to ``store`` once a gradient arrives at the node."""
        self.store = store
        self.node.register_prehook(self)

    def __call__(self, grads: Gradients) -> None:
        """Called by autograd just before it runs the node."""
        (self.grad,) = grads
        if self.grad is not None:
            if self.value is None:
                self._read(self.node, read_early)
            self.store.uses.append(self)
        del self.store, self.node

    def gradients(self) -> Gradients:
        """Computes a gradient for each edge, and drops what it was computed from."""
        grad, value = self.pair()
        return self.operation.gradient(grad, value, *self.arguments)

    def pair(self) -> tuple[Tensor, Tensor]:
        """Returns the output's gradient and the input, and drops them here.

        Raises:
            StageError: The input has changed since the inputs' half.
        """
        grad, value = cast("tuple[Tensor, Tensor]", (self.grad, self.value))
        self.grad = self.value = None
        if value._version != self.version:
            raise StageError(
                "an input of an operation with a weight was changed in place between the inputs' half "
                f"and the weights' half of backward; its shape is {tuple(value.shape)}"
            )
        return grad, value


class WeightGradStore:
    """What one microbatch leaves for the weights' half of its backward pass.

    Attributes:
        uses: In the order in which gradients arrived.
        owners: Keep nodes of Python functions alive, for which a reference to the node is not enough.
    """

    def __init__(self, owners: Sequence[GradientEdge] = ()) -> None:
        self.uses: list[Use] = []
        self.owners = list(owners)

    def take(self, other: WeightGradStore) -> None:
        """Takes over what is in another store."""
        self.uses += other.uses
        self.owners += other.owners
        other.uses.clear()
        other.owners.clear()

    def deliver(
        self, *, fused: bool = False, joined: bool = False, standing: Standing | None = None
    ) -> None:
        """Computes the gradients and adds them to the weights' ``.grad``; the store is empty then.

        Args:
            fused: Multiply straight into ``.grad`` if possible.
            joined: Compute as one product what can be.
            standing: Nodes that earlier microbatches of the step have built.
        """
        uses, self.uses = self.uses, []
        if joined:
            uses = _joined(uses)
        if fused:
            with torch.no_grad():
                uses = [use for use in uses if not _add_to_grad(use)]
        standing = Standing() if standing is None else standing
        for batch in [uses] if _is_flat(uses) else _batches(_connected(uses)):
            if _is_flat(batch):
                standing.deliver(batch[0])
            else:
                _deliver(batch)
        self.owners.clear()


# ---- batches


def are_apart(uses: Collection[Use]) -> bool:
    """Says whether no node is below two uses, nor twice below one."""
    below = [use.below for use in uses]
    return len(set().union(*below)) == sum(map(len, below))


def _connected(uses: list[Use]) -> list[list[Use]]:
    """Groups uses that share a node below them, since it must run once; the first groups come last."""
    if are_apart(uses):
        return [[use] for use in reversed(uses)]
    above: dict[Node, Node] = {}

    def top(node: Node) -> Node:
        while (over := above.setdefault(node, node)) is not node:
            node = over
        return node

    for use in uses:
        first = top(use.below[0])
        for node in use.below[1:]:
            above[top(node)] = first
    groups: dict[Node, list[Use]] = {}
    for use in uses:
        groups.setdefault(top(use.below[0]), []).append(use)
    return list(groups.values())[::-1]


def _batches(groups: list[list[Use]]) -> Iterator[list[Use]]:
    while groups:
        batch: list[Use] = []
        size = 0
        while groups and size < BATCH_BYTES:
            group = groups.pop()
            if _is_flat(group):
                yield group
                continue
            leaves: set[Any] = {n for use in group for n in use.below if type(n) is LEAF}
            size += sum(leaf.variable.nbytes for leaf in leaves)
            batch += group
        if batch:
            yield batch


def _is_flat(group: list[Use]) -> bool:
    """Says whether a group is a single use of many weights, with nothing but their accumulators below."""
    return len(group) == 1 and len(group[0].below) == len(group[0].edges) > 2


def _deliver(batch: list[Use]) -> None:
    """Runs one backward pass for some uses."""
    with torch.no_grad():
        found = _summed(batch)
    first = {key for key in found if type(key[0]) is LEAF and key[0].variable.grad is None}
    roots = [GradientEdge(*key) for key in found if key not in first]
    seeds = [found[key] for key in found if key not in first]
    if first:
        weights = [node.variable for node, _ in first]
        given = [found.pop(key) for key in first]
        with torch.enable_grad():
            root = cast("Any", _Handover).apply(given, *weights)
        roots.append(get_gradient_edge(root))
        seeds.append(root.detach())
    run_backward(list(zip(roots, seeds, strict=True)), ())


def _summed(batch: list[Use]) -> dict[Edge, Tensor]:
    """Returns the gradient at each edge, summed in the order of the uses."""
    found: dict[Edge, Tensor] = {}
    for use in batch:
        for key, gradient in zip(use.edges, use.gradients(), strict=True):
            if gradient is not None:
                found[key] = _plus(found.pop(key), gradient) if key in found else gradient
    return found


def _plus(before: Tensor, gradient: Tensor) -> Tensor:
    # A sparse tensor can be added to a dense one, but not the reverse.
    return gradient + before if before.is_sparse else before + gradient


class _Handover(torch.autograd.Function):
    """A node above accumulators that gives each of them its first gradient.

    Only the engine holds a reference to the gradient then, so the accumulator keeps it as ``.grad`` without
    a copy.
    """

    @staticmethod
    def forward(ctx: Any, given: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.given = given
        return torch.empty((), device=weights[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        taken = tuple(ctx.given)
        ctx.given.clear()
        return None, *taken


class Standing:
    """Nodes of our own above the accumulators of uses of many weights, which run once for each microbatch.

    They keep the accumulators alive, and those keep their weights, so this must be cleared after each step.
    """

    def __init__(self) -> None:
        self._roots: dict[tuple[Node, ...], tuple[GradientEdge, Tensor]] = {}

    def __contains__(self, below: object) -> bool:
        """Whether these accumulators have a node above them, in this order."""
        return below in self._roots

    def deliver(self, use: Use) -> None:
        """Computes the gradients of a use and adds them to ``.grad``."""
        key = tuple(use.below)
        root = self._roots.get(key)
        if root is None:
            weights = [node.variable for node in cast("Any", key)]
            with torch.enable_grad():
                made = cast("Any", _Computation).apply(*weights)
            root = self._roots[key] = get_gradient_edge(made), made.detach()
        cast("Any", root[0].node).use = use
        run_backward([root], (), again=True)

    def clear(self) -> None:
        """Forgets all."""
        self._roots.clear()


class _Computation(torch.autograd.Function):
    """A node above accumulators that computes their gradients."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        return torch.empty((), device=weights[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        use, ctx.use = ctx.use, None
        return tuple(use.gradients())


# ---- faster sums, which change bits


def _joined(uses: list[Use]) -> list[Use]:
    """Joins uses that can be computed as one larger product, in the order of the first of each."""
    alike: dict[Any, list[Any]] = {}
    for use in uses:
        place = _place(use)
        key = use if place is None else (place, cast("NodeUse", use).arguments)
        alike.setdefault(key, []).append(use)
    return [_one(group) if len(group) > 1 else group[0] for group in alike.values()]


def _one(group: list[NodeUse]) -> NodeUse:
    grads, values = zip(*(use.pair() for use in group), strict=True)
    one = group[0]
    one.grad, one.value = torch.cat(grads), torch.cat(values)
    one.version = one.value._version
    return one


def _add_to_grad(use: Use) -> bool:
    """Multiplies straight into ``.grad``; returns whether that was possible."""
    place = _place(use)
    if place is None:
        return False
    leaf, is_transposed = place
    weight: Any = leaf.variable
    if weight.grad is None or not weight.grad.is_contiguous() or _is_hooked(weight):
        return False
    one = cast("NodeUse", use)
    alpha = one.arguments[2] if len(one.arguments) > 2 else 1
    grad, value = one.pair()
    left, right = (grad.t(), value.conj()) if is_transposed else (value.mH, grad)
    into = weight.grad
    into.addmm_(left.to(into.dtype), right.to(into.dtype), alpha=alpha.conjugate())
    return True


def _place(use: Use) -> tuple[Any, bool] | None:
    """Returns the accumulator below a sum over rows, and whether there is a transpose in between."""
    if not isinstance(use, NodeUse) or not use.operation.by_rows:
        return None
    node: Any = use.edges[0][0]
    if type(node) is _TRANSPOSED:
        ((below, _),) = node.next_functions
        return (below, True) if type(below) is LEAF else None
    return (node, False) if type(node) is LEAF else None


def _is_hooked(weight: Any) -> bool:
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)
