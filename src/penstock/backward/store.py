"""The weight gradients of a microbatch that wait for the weights' half of its backward pass.

Inputs' half::

    loss ── … ── Deferred ── … ── Deferred ── … ── input        one ordinary backward pass
                    │                 │
                 (x, dy)           (x, dy)                      what the store keeps

Weights' half::

    (x, dy) ──> dW ──> accumulator of the weight ──> .grad      in batches, each one backward pass

The accumulators are autograd's own: they run the hooks, once per microbatch and weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from penstock.backward.pending import Pending, add_to_grad, join
from penstock.backward.weights import Target, parameter_target

Compute: TypeAlias = Callable[[], Sequence[Tensor | None]]

# Gradients that wait for their backward pass take memory, and a pass takes time of its own.
BATCH_BYTES = 16 * 2**20


@dataclass(eq=False, slots=True)
class Use:
    """A use of weights in one microbatch, and how to compute their gradients from it."""

    targets: tuple[Target, ...]
    compute: Compute


class WeightGradStore:
    """What one microbatch leaves for the weights' half of its backward pass."""

    def __init__(self) -> None:
        self.recording = False
        self.targets: dict[Target, None] = {}
        self.uses: list[Use] = []

    def expect(self, target: Target) -> None:
        """Says that a use of a weight will wait here."""
        self.targets[target] = None

    def add(self, targets: tuple[Target, ...], compute: Compute) -> None:
        """Keeps a use of weights, if the inputs' half is running."""
        if self.recording:
            self.uses.append(Use(targets, compute))

    def hold(self, target: Target, gradient: Tensor) -> None:
        """Keeps a gradient that is known already."""
        self.uses.append(Use((target,), partial(_known, gradient)))

    @contextlib.contextmanager
    def record(self, recording: bool = True) -> Iterator[None]:
        """Keeps uses, or with False keeps none, for as long as the context lasts."""
        before, self.recording = self.recording, recording
        try:
            yield
        finally:
            self.recording = before

    @contextlib.contextmanager
    def collect(self) -> Iterator[list[Use]]:
        """Yields a list that gets what is recorded in the context, instead of the store."""
        before, self.uses = self.uses, []
        try:
            with self.record():
                yield self.uses
        finally:
            self.uses = before

    def nodes(self) -> set[Node]:
        """Returns the nodes that belong to the weights' half alone."""
        return {node for target in self.targets for node in target.nodes}

    def leaves(self) -> dict[Node, Target]:
        """Returns the parameters whose gradients wait, by their accumulators."""
        nodes = (n for n in self.nodes() if type(n).__name__ == "AccumulateGrad")
        leaves = {node: cast("Any", node).variable for node in nodes}
        return {n: parameter_target(get_gradient_edge(leaf), leaf) for n, leaf in leaves.items()}

    def take(self, other: WeightGradStore) -> None:
        """Takes over what is in another store."""
        self.uses += other.uses
        other.uses.clear()
        other.targets.clear()

    def deliver(self, *, fused: bool = False, joined: bool = False) -> None:
        """Computes the gradients and adds them to the weights' ``.grad``; the store is empty then.

        Args:
            fused: Multiply straight into ``.grad`` where that is possible.
            joined: Compute as one product what can be.
        """
        uses, self.uses = self.uses, []
        self.targets.clear()
        if all(len(use.targets) == 1 and use.targets[0].is_parameter for use in uses):
            groups = _by_parameter(uses)
            groups = list(map(_joined, groups)) if joined else groups
            _deliver_in_batches([group for group in groups if not (fused and _fused(group))])
        else:
            _deliver_connected(uses)


def _known(gradient: Tensor) -> tuple[Tensor]:
    return (gradient,)


def _plus(before: Tensor | None, gradient: Tensor) -> Tensor:
    if before is None:
        return gradient
    # A dense tensor can take a sparse one, but not the reverse.
    return gradient + before if before.is_sparse else before + gradient


# ---- uses of parameters, each by itself


Group: TypeAlias = tuple[Tensor, list[Use]]
"""A parameter and all its uses."""


def _by_parameter(uses: list[Use]) -> list[Group]:
    """Takes the list apart, so that what has been used is free; the last group comes first."""
    groups: dict[int, Group] = {}
    for use in uses:
        weight = use.targets[0].like
        groups.setdefault(id(weight), (weight, []))[1].append(use)
    uses.clear()
    return list(groups.values())[::-1]


def _deliver_in_batches(groups: list[Group]) -> None:
    batch: list[Group] = []
    size = 0
    while groups:
        batch.append(groups.pop())
        size += batch[-1][0].nbytes
        if size >= BATCH_BYTES or not groups:
            _deliver_to_parameters(batch)
            batch, size = [], 0


def _joined(group: Group) -> Group:
    weight, uses = group
    pending = [use.compute for use in uses if isinstance(use.compute, Pending)]
    others = [use for use in uses if not isinstance(use.compute, Pending)]
    return weight, [Use(uses[0].targets, one) for one in join(pending)] + others


def _fused(group: Group) -> bool:
    """Multiplies into ``.grad`` and returns whether that was all that there was to do."""
    weight, uses = group
    with torch.no_grad():
        uses[:] = [
            use
            for use in uses
            if not isinstance(use.compute, Pending)
            or not add_to_grad(use.compute, cast("Any", weight))
        ]
    return not uses


class _Delivery(torch.autograd.Function):
    """A node above the accumulators of some parameters, whose backward computes their gradients.

    They come into being inside the backward pass, so that nothing but the engine refers to them and
    an accumulator may keep one as ``.grad`` without a copy.
    """

    @staticmethod
    def forward(ctx: Any, groups: list[Group], *weights: Tensor) -> Tensor:
        ctx.groups = groups
        return torch.empty((), device=weights[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, *[_total(uses) for _, uses in ctx.groups]


def _deliver_to_parameters(groups: list[Group]) -> None:
    with torch.enable_grad():
        root = cast("Any", _Delivery).apply(groups, *[weight for weight, _ in groups])
    torch.autograd.backward([root], [root.detach()])


def _total(uses: list[Use]) -> Tensor | None:
    """Returns the sum of the gradients in the order of the uses; empties the list."""
    uses.reverse()
    total: Tensor | None = None
    while uses:
        (gradient,) = uses.pop().compute()
        if gradient is not None:
            total = _plus(total, gradient)
    return total


# ---- uses that are connected through common parameters


Key: TypeAlias = tuple[Node, int]


def key_of(target: Target) -> Key:
    """Returns what two targets have in common that are the same weight."""
    return target.edge.node, target.edge.output_nr


def _deliver_connected(uses: list[Use]) -> None:
    """Delivers in one backward pass all uses that reach one parameter: its accumulator runs once."""
    groups = _connected(uses)
    uses.clear()
    while groups:
        batch: list[Use] = []
        while groups and _bytes_of(batch) < BATCH_BYTES:
            batch += groups.pop(next(iter(groups)))
        _deliver_to_edges(batch)


def _connected(uses: Iterable[Use]) -> dict[int, list[Use]]:
    """Returns the uses by a number that is the same for all that reach a common parameter."""
    groups: dict[int, list[Use]] = {}
    owner: dict[int, int] = {}
    for use in uses:
        _join(use, groups, owner)
    return groups


def _join(use: Use, groups: dict[int, list[Use]], owner: dict[int, int]) -> None:
    leaves = {id(leaf) for target in use.targets for leaf in target.leaves}
    joined = sorted({owner[leaf] for leaf in leaves if leaf in owner})
    first = joined[0] if joined else len(owner)
    group = groups.setdefault(first, [])
    for other in joined[1:]:
        group += groups.pop(other)
        owner.update((leaf, first) for leaf, mark in list(owner.items()) if mark == other)
    group.append(use)
    owner.update(dict.fromkeys(leaves, first))


def _bytes_of(uses: Iterable[Use]) -> int:
    return sum(target.like.nbytes for target in {t: None for use in uses for t in use.targets})


def _deliver_to_edges(batch: list[Use]) -> None:
    edges = {key_of(target): target.edge for use in batch for target in use.targets}
    with torch.no_grad():
        found = summed(batch)
    if found:
        torch.autograd.backward([edges[key] for key in found], list(found.values()))


def summed(batch: list[Use]) -> dict[Key, Tensor]:
    """Returns the gradients by weight, summed in the order of the uses; empties ``batch``."""
    found: dict[Key, Tensor] = {}
    batch.reverse()
    while batch:
        use = batch.pop()
        for target, gradient in zip(use.targets, use.compute(), strict=True):
            if gradient is not None:
                key = key_of(target)
                found[key] = _plus(found.pop(key, None), gradient)
    return found
