"""``torch.autograd.grad`` inside a stage's own forward, for weights that autograd cannot reach."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from penstock.backward.store import Key, Use, WeightGradStore, key_of, summed
from penstock.backward.weights import Target

Anchor: TypeAlias = Callable[[torch.device], Tensor]
Gradients: TypeAlias = tuple[Tensor | None, ...]


def gradients_inside(
    store: WeightGradStore,
    anchor: Anchor,
    outputs: Any,
    inputs: Any,
    *args: Any,
    **options: Any,
) -> Gradients:
    """Computes what ``torch.autograd.grad`` would without a store; arguments and result as there.

    Nothing is left in ``store``.
    """
    wanted = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    targets = _waiting_among(wanted, store.targets)
    if not targets:
        with store.record(False):
            return _gradients(outputs, inputs, *args, **options)
    allow_unused = options.pop("allow_unused", None)
    anchors = [anchor(target.like.device) for target in targets.values()]
    with store.collect() as uses:
        found = _gradients(outputs, (*wanted, *anchors), *args, allow_unused=True, **options)
        gradients = _added(wanted, found, targets, uses, bool(options.get("create_graph")))
    _check_used(gradients, allow_unused)
    return gradients


def _gradients(*args: Any, **options: Any) -> Gradients:
    return cast("Gradients", torch.autograd.grad(*args, **options))


def _waiting_among(wanted: Sequence[Any], targets: Iterable[Target]) -> dict[int, Target]:
    by_weight = {id(target.like): target for target in targets if target.is_parameter}
    return {id(value): by_weight[id(value)] for value in wanted if id(value) in by_weight}


def _added(
    wanted: Sequence[Any],
    found: Sequence[Tensor | None],
    targets: dict[int, Target],
    uses: list[Use],
    create_graph: bool,
) -> Gradients:
    keys = {key_of(target) for target in targets.values()}
    of_interest = [use for use in uses if any(key_of(target) in keys for target in use.targets)]
    with contextlib.nullcontext() if create_graph else torch.no_grad():
        waiting: dict[Key, Tensor] = summed(of_interest)
    result: list[Tensor | None] = []
    for value, gradient in zip(wanted, found, strict=False):
        target = targets.get(id(value))
        other = None if target is None else waiting.get(key_of(target))
        result.append(
            gradient if other is None else other if gradient is None else gradient + other
        )
    return tuple(result)


def _check_used(gradients: Sequence[Tensor | None], allow_unused: bool | None) -> None:
    if not allow_unused and any(gradient is None for gradient in gradients):
        raise RuntimeError(
            "One of the tensors to differentiate with respect to was not used in the graph. "
            "Set allow_unused=True if that is meant."
        )
