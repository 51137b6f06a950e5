"""The two halves of a backward pass, in the module and under the names where torch has them.

The inputs' half leaves every weight's ``.grad`` as it is. What it leaves for the other half is a list of
param groups: one for the gradients that could not wait, and one for each use of weights that waits.

The split is the one of Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from penstock._engine.values import leaves_in, named_leaves, tensors_in
from penstock.backward.nodes import LEAF, node_of
from penstock.backward.passes import Gradients, seeds_of, shapes_text
from penstock.backward.pending import PendingGradients, leaves_below
from penstock.backward.search import MicrobatchGraph
from penstock.backward.split import SharedGradients, SplitBackward
from penstock.errors import UsageError

ParamGroup: TypeAlias = dict[str, Any]
"""Weights whose gradients come from the same nodes; `stage_backward_input` says what is in it."""


def stage_backward(
    stage_output: Any,
    output_grads: Any,
    input_values: Sequence[Any],
    outputs_with_grads_idxs: Sequence[int] | None = None,
) -> Gradients:
    """Run backward through a whole stage for one microbatch, as ``SplitBackward.full`` does.

    Args:
        stage_output: what the stage returned, or its loss: a tensor, or a nested value.
        output_grads: the gradients, in the same structure; None for an output or a container says that it has
            no gradient, and None in place of it all that each output is a loss.
        input_values: the inputs of the stage.
        outputs_with_grads_idxs: positions in ``stage_output`` and ``output_grads`` to use alone.
    """
    if outputs_with_grads_idxs is not None:
        stage_output = [stage_output[i] for i in outputs_with_grads_idxs]
        output_grads = [output_grads[i] for i in outputs_with_grads_idxs]
    outputs, grads = _flat(stage_output, output_grads)
    return SplitBackward(nn.Module()).full(outputs, grads, input_values)


def stage_backward_input(
    stage_outputs_or_loss: Any,
    output_grads: Any,
    input_values: Sequence[Any],
    weights: Iterable[Tensor],
) -> tuple[Gradients, list[ParamGroup]]:
    """Compute the gradients of a stage's inputs for one microbatch, and add none to its weights.

    The gradients are added to the ``.grad`` of inputs that are leaves. The outputs are detached in place, so
    that their graph is freed although the caller keeps them.

    Args:
        stage_outputs_or_loss: a tensor, or a nested value.
        output_grads: the gradients, in the same structure; None for an output or a container says that it has
            no gradient, and None in place of it all means ones everywhere.
        input_values: the inputs of the stage; those that are no tensors are allowed.
        weights: the parameters whose gradients ``stage_backward_weight`` will add.

    Returns:
        One gradient of each input's shape, or None if the input needs or gets none; and the param groups,
        each a dict. ``params`` are the accumulators of its weights. Along the nodes in ``intermediates``,
        ``grads`` holds tuples of one gradient, which may be replaced by another or by None. An accumulator
        among the nodes says that the weight's gradient is known already.

    Raises:
        UsageError: ``output_grads`` has another structure than the outputs.
        StageError: autograd failed; the cause is chained.
    """
    outputs, grads = _flat(stage_outputs_or_loss, output_grads)
    if grads is None:
        grads = list(map(torch.ones_like, outputs))
    graph: list[Any] = MicrobatchGraph(*seeds_of(outputs, grads), ()).nodes
    leaves = {id(v): (v, v.grad) for v in input_values if isinstance(v, Tensor) and v.is_leaf}
    others = [node for node in graph if type(node) is LEAF and id(node.variable) not in leaves]
    shares = SharedGradients([node.variable for node in others])
    split = SplitBackward(nn.Module())
    with shares:
        dinputs, pending = split.input_half(outputs, grads, input_values)
        if any(use.operation is None for use in pending.uses):
            # What a compiled function leaves for later is not the gradient of a node.
            split.weight_half(pending)
    new = dict(zip(map(id, input_values), dinputs, strict=True))
    for key, (leaf, before) in leaves.items():
        leaf.grad = _null_coalesce_accumulate(before, new[key])
    for output in outputs:
        if not output.is_leaf and id(output) not in new:
            # A view cannot be detached in place; its graph lives until the caller drops it.
            with contextlib.suppress(RuntimeError):
                output.detach_()
    wanted = {node_of(weight) for weight in weights}
    known = {n: g for n, g in zip(others, shares.take(), strict=True) if g is not None}
    groups = [_group(known, known)]
    for use in pending.uses:
        params = leaves_below(edge.node for edge in use.edges)
        group = _group(params, {graph[use.position]: use.grad})
        groups.append(group | {"use": use, "owners": pending.owners})
    return dinputs, [group for group in groups if not wanted.isdisjoint(group["params"])]


def stage_backward_weight(
    weights: Iterable[Tensor], param_groups: Sequence[ParamGroup], retain_graph: bool = False
) -> Gradients:
    """Add the weights' gradients to their ``.grad``, from what ``stage_backward_input`` has left.

    Args:
        weights: the parameters to add gradients to; others are left alone.
        param_groups: the groups of one microbatch.
        retain_graph: keep the gradients in the groups, so that another call adds them once more. Otherwise
            the groups are emptied, but for ``params``.

    Returns:
        What this call added to each weight's ``.grad``, in the order of ``weights``; None where nothing was.

    Raises:
        UsageError: a group was used before, did not come from ``stage_backward_input``, or holds something
            else than gradients in ``grads``; it is a RuntimeError too.
        StageError: autograd or a hook failed; the cause is chained.
    """
    flows = [
        (node, gradient, group.get("use"))
        for place, group in enumerate(param_groups)
        for node, gradient in _gradients_in(group, place).items()
        if gradient is not None
    ]
    leaves: list[Any] = list(dict.fromkeys(chain.from_iterable(g["params"] for g in param_groups)))
    shares = SharedGradients([leaf.variable for leaf in leaves])
    pending = PendingGradients()
    with shares:
        for node, gradient, use in flows:
            if use is None:
                leaf = node.variable
                leaf.grad = _null_coalesce_accumulate(leaf.grad, gradient)
            else:
                use.grad = gradient
                pending.uses.append(use)
        SplitBackward(nn.Module()).weight_half(pending)
    added = dict(zip(leaves, shares.take(), strict=True))
    results = []
    for weight in weights:
        results.append(added.get(node_of(weight)))
        weight.grad = _null_coalesce_accumulate(weight.grad, results[-1])
    for group in param_groups:
        params = group["params"]
        group.clear()
        group["params"] = params
        if retain_graph:
            group |= _group(params, {n: added.pop(n) for n in params if n in added})
    return tuple(results)


def _flat(outputs: Any, grads: Any) -> tuple[list[Tensor], list[Tensor | None] | None]:
    """The tensors of a nested value that require grad, and the gradient at the place of each.

    Raises:
        UsageError: ``grads`` has another structure than ``outputs``.
    """
    if grads is None:
        return [tensor for tensor in tensors_in(outputs) if tensor.requires_grad], None
    places = {place: leaf for place, leaf in leaves_in(outputs) if isinstance(leaf, Tensor)}
    at = dict(leaves_in(grads))
    for (place, grad), (path, _) in zip(at.items(), named_leaves(grads, "gradient"), strict=True):
        if grad is None or (place in places and isinstance(grad, Tensor)):
            continue
        if place in places or isinstance(grad, Tensor):
            raise UsageError(
                f"{path} is a {type(grad).__name__}, and the output has "
                f"{'a tensor' if place in places else 'no tensor'} there; give the gradients in the output's "
                "structure: a tensor for each tensor, or None where no gradient flows"
            )
    used = {place: tensor for place, tensor in places.items() if tensor.requires_grad}
    return list(used.values()), [at.get(place) for place in used]


def _group(params: Iterable[Node], gradients: Mapping[Node, Tensor | None]) -> ParamGroup:
    grads = [(gradient,) for gradient in gradients.values()]
    return {"params": set(params), "intermediates": [*gradients], "grads": grads}


class _GroupError(UsageError, RuntimeError):
    """Param groups that hold no gradients to continue from."""


def _gradients_in(group: ParamGroup, place: int) -> dict[Any, Tensor | None]:
    """The gradient of each node of a group."""
    nodes, rows = group.get("intermediates"), group.get("grads")
    if nodes is None:
        raise _GroupError(
            f"param group {place} has no intermediates: it was used by an earlier stage_backward_weight "
            "(call that with retain_graph=True), or does not come from stage_backward_input"
        )
    rows = rows if isinstance(rows, list | tuple) else [rows]
    is_right = len(rows) == len(nodes) and all(
        isinstance(row, list | tuple) and len(row) == 1 and isinstance(row[0], Tensor | None)
        for row in rows
    )
    if not is_right:
        raise _GroupError(
            f"param group {place}: expected grads to be a list of {len(nodes)} tuples of one tensor or None, "
            f"one for each intermediate, found {shapes_text(rows)}; leave grads as stage_backward_input "
            "returned it, or replace its tensors by others of the same shapes"
        )
    return {node: gradient for node, (gradient,) in zip(nodes, rows, strict=True)}


def _null_coalesce_accumulate(lhs: Tensor | None, rhs: Tensor | None) -> Tensor | None:
    """The sum of two gradients of one shape, either of which may be missing."""
    if lhs is None or rhs is None:
        return rhs if lhs is None else lhs
    return lhs + rhs
