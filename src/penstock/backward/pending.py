"""The uses of weights in one microbatch whose gradients wait for the weights' half."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from penstock._engine import compiled
from penstock.backward.nodes import LEAF, edge_to, is_recomputed, read_early
from penstock.backward.offload import SavedTensor
from penstock.backward.operations import Operation
from penstock.backward.passes import Gradients, backward_to
from penstock.errors import StageError


class UsePlace(NamedTuple):
    """Where in a graph weights are used.

    Args:
        position: the position of the node.
        operation: what the node does; None for a compiled function.
        edges: the positions of the edges whose gradients wait.
        batch: uses of one batch get their gradients in one backward pass.
    """

    position: int
    operation: Operation | None
    edges: Sequence[int]
    batch: int = 0


class WeightUse:
    """A use of weights in one microbatch.

    Args:
        node: the autograd node that uses the weights.
        place: where it is, and what it does.
        edges: all edges of the node.

    Attributes:
        position: the position of the node in its graph.
        edges: where the gradients of the weights go.
        value: what the gradients are computed from, with ``arguments``. None until the node is about to run,
            if a checkpoint has yet to recompute it.
        can_wait: whether that can be kept.
        grad: the output's gradient.
        compute: for a compiled function: computes the gradients.
    """

    can_wait = True
    grad: Tensor | None = None
    value: Tensor | None = None
    compute: Any = None

    def __init__(self, node: Any, place: UsePlace, edges: Sequence[Any]) -> None:
        self.position, operation, positions, self.batch = place
        self.node, self.operation = node, operation
        self.edges = [edge_to((*edges[position], None)) for position in positions]
        if operation is None:
            return
        raw = getattr(node, operation.raw)
        if operation.applies is not None and not operation.applies(node):
            self.can_wait = False
        elif raw.unpack_hook is not None and not isinstance(raw.data, SavedTensor):
            # Other hooks on saved tensors may allow only one call, which belongs to the node.
            self.can_wait = is_recomputed(raw)
        else:
            value = getattr(node, operation.value)
            self.can_wait = type(value) in PLAIN and value.layout is torch.strided
            self.value = value.detach()
            self.version = value._version
            self.arguments = operation.read(node)
            if operation.form is not None:
                self._keep_form(operation)

    @property
    def cost(self) -> float:
        """The multiplications that its gradients take; infinity if nobody knows."""
        if self.value is None or self.operation is None or self.operation.cost is None:
            return inf
        return self.operation.cost(self.value, *self.arguments)

    def _keep_form(self, operation: Operation) -> None:
        before = len(operation.others)
        like = self.arguments[before]
        form = like.shape, like.stride()
        self.arguments = (*self.arguments[:before], form, *self.arguments[before + 1 :])

    def read(self, grads: Gradients) -> None:
        """Read what a checkpoint recomputes; autograd calls it just before it runs the node."""
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
        """Compute a gradient or None for each edge, and drop what it was computed from.

        Raises:
            StageError: an input has changed since the inputs' half.
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
                f"and the weights' half of backward: [{value.type()} {list(value.shape)}] is at version "
                f"{value._version}; expected version {self.version} instead"
            )
        return self.operation.gradient(grad, value, *self.arguments)


PLAIN = {Tensor, nn.Parameter, FakeTensor}
"""The types of saved tensors that can be kept: others may compute their gradients in ways of their own."""


def leaves_below(nodes: Iterable[Node]) -> set[Any]:
    """The accumulators of weights that some nodes lead to, or are themselves."""
    ahead = list(nodes)
    reached = set(ahead)
    for node in ahead:
        below = {successor for successor, _ in node.next_functions if successor} - reached
        reached |= below
        ahead += below
    return {node for node in reached if type(node) is LEAF}


class PendingGradients:
    """What one microbatch's inputs' half leaves for its weights' half; its length is the uses that wait.

    Attributes:
        uses: what waits, in the order in which backward has reached it.
        owners: keep nodes of Python functions alive, for which a reference to the node is not enough.
    """

    def __init__(self) -> None:
        self.uses: list[WeightUse] = []
        self.owners: list[GradientEdge] = []
        self._arrived: dict[WeightUse, Any] = {}
        self._reading: list[WeightUse] = []

    def __len__(self) -> int:
        return len(self.uses)

    def watch(self, uses: Iterable[WeightUse]) -> None:
        """Note what arrives at the nodes of some uses in the next backward pass."""
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
        """Take what has arrived, and drop what would keep the graph alive."""
        for use, arrived in self._arrived.items():
            if use.operation is None:
                use.compute = arrived
            elif arrived[0] is None:
                continue
            else:
                use.grad = arrived[0]
            self.uses.append(use)
        self._arrived.clear()
        for use in self._reading:
            use.node = None
        self._reading.clear()

    @property
    def weights(self) -> set[int]:
        """The weights whose gradients wait, by identity."""
        leaves = leaves_below(edge.node for use in self.uses for edge in use.edges)
        return {id(leaf.variable) for leaf in leaves}

    def deliver(self) -> None:
        """Add the gradients to the weights' ``.grad``; nothing waits then."""
        batches: dict[int, list[WeightUse]] = {}
        for use in self.uses:
            batches.setdefault(use.batch, []).append(use)
        self.uses = []
        for batch in [*batches]:
            _deliver(batches.pop(batch))
        self.owners.clear()


def _deliver(uses: Iterable[WeightUse]) -> None:
    """Run one backward pass for some uses, whose gradients are summed in their order."""
    sums: dict[Any, Tensor] = {}
    for use in uses:
        for edge, gradient in zip(use.edges, use.gradients(), strict=True):
            if gradient is not None:
                sums[edge] = _plus(sums.pop(edge), gradient) if edge in sums else gradient
    # Nothing else may refer to a first gradient, or it is copied.
    gradient = None
    first = [edge for edge in sums if type(edge[0]) is LEAF and edge[0].variable.grad is None]
    if first:
        weights = [edge.node.variable for edge in first]
        gradients = [sums.pop(edge) for edge in first]
        with torch.enable_grad():
            root = cast("Any", _Handover).apply(gradients, *weights)
        sums[get_gradient_edge(root)] = root.detach()
    backward_to([*sums], [*sums.values()])


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
