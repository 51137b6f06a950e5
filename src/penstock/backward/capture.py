"""Run backward towards the inputs and keep what the weights' half will need."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from penstock.backward.full import Gradients, Pair
from penstock.backward.graph import (
    ParamGroup,
    _get_grad_fn_or_grad_acc,
    construct_reverse_graph,
    get_param_groups,
    nodes_of,
)
from penstock.backward.store import is_checkpointed, release
from penstock.errors import InternalError

Capture: TypeAlias = tuple[int, Node, Gradients]
"""The position of a group, a node, and the gradients that flow into the node."""

Leaves: TypeAlias = dict[Node, Tensor]

# Freeing takes microseconds per tensor, which only tiny stages notice, and those have little to free.
RELEASE_BYTES = 2**20


def capture(
    pairs: Sequence[Pair], inputs: Sequence[Tensor], weights: Iterable[Tensor]
) -> tuple[Gradients, list[ParamGroup]]:
    """Computes the gradients of ``inputs``, and fills param groups on the way.

    Args:
        pairs: The outputs with their gradients.
        inputs: Tensors that require a gradient.
        weights: The parameters to make groups of.

    Returns:
        The gradients of ``inputs``, and the groups that something flowed into, in the order in
        which it did.
    """
    roots = nodes_of(output for output, _ in pairs)
    leaves: Leaves = {node: weight for weight in weights for node in nodes_of((weight,))}
    reverse = construct_reverse_graph(roots)
    groups = get_param_groups(nodes_of(inputs), leaves, reverse, roots)
    early = _early(groups, leaves, reverse)
    later = [position for position in range(len(groups)) if position not in early]
    captures = list(_root_captures(pairs, groups, later))
    with _watching(groups, later, captures) as watched:
        targets = {node: leaves[node] for node in chain(*(groups[p]["params"] for p in early))}
        grads, found = _run(pairs, inputs, targets, retain_graph=bool(watched))
    captures += _leaf_captures(groups, early, found)
    if watched and _bytes_of(captures) >= RELEASE_BYTES:
        kept = watched.union(*(group["weight_side"] for group in groups))
        release(node for node in reverse if node not in kept)
    return grads, _filled(groups, captures, pairs)


def _run(
    pairs: Sequence[Pair], inputs: Sequence[Tensor], targets: Leaves, *, retain_graph: bool
) -> tuple[Gradients, dict[Node, Tensor]]:
    """Runs backward towards ``inputs`` and ``targets`` and nowhere else."""
    wanted = [*inputs, *targets.values()]
    if not pairs or not wanted:
        return (None,) * len(inputs), {}
    outputs, seeds = zip(*pairs, strict=True)
    with hooks_suspended(targets.values()):
        grads = torch.autograd.grad(
            outputs, wanted, seeds, retain_graph=retain_graph, allow_unused=True
        )
    found = zip(targets, grads[len(inputs) :], strict=True)
    return grads[: len(inputs)], {node: grad for node, grad in found if grad is not None}


# ---- groups that do not wait


def _early(groups: Sequence[ParamGroup], leaves: Leaves, nodes: Iterable[Node]) -> list[int]:
    """Returns the positions of the groups whose gradients are computed with the inputs'.

    They wait in full, and reach ``.grad`` with the rest. A compiled function frees what it saved
    as it runs, and refuses to run in a pass that keeps the graph for others.
    """
    compiled = any(_is_compiled(node) for node in nodes)
    return [
        position
        for position, group in enumerate(groups)
        if group["intermediates"] - group["weight_side"]
        and (compiled or _is_cheap(group, leaves) or _is_recomputed(group))
    ]


def _is_cheap(group: ParamGroup, leaves: Leaves) -> bool:
    """Says whether all weights are vectors: less to compute than there would be to keep."""
    return all(leaves[node].dim() <= 1 for node in group["params"])


def _is_recomputed(group: ParamGroup) -> bool:
    """Says whether the other half would recompute a region, which selective checkpoints forbid."""
    return any(map(is_checkpointed, group["intermediates"] | group["weight_side"]))


def _is_compiled(node: Node) -> bool:
    return type(node).__name__ == "CompiledFunctionBackward"


@contextlib.contextmanager
def hooks_suspended(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Keeps tensor hooks on ``leaves`` from running, since they will when ``.grad`` is written."""
    with contextlib.ExitStack() as stack:
        for leaf in leaves:
            handle = leaf.register_hook(_no_change)
            hooks = handle.hooks_dict_ref()
            handle.remove()
            stack.callback(hooks.update, dict(hooks))
            hooks.clear()
        yield


def _no_change(_: Tensor) -> None:
    """Leaves a gradient as it is."""


def _leaf_captures(
    groups: Sequence[ParamGroup], early: Iterable[int], found: dict[Node, Tensor]
) -> Iterator[Capture]:
    for position in early:
        for node in groups[position]["params"] & found.keys():
            yield position, node, (found[node],)


# ---- groups that wait


def _root_captures(
    pairs: Sequence[Pair], groups: Sequence[ParamGroup], later: Iterable[int]
) -> Iterator[Capture]:
    """Yields the given gradients of outputs that depend on weights only."""
    for position in later:
        for output, gradient in pairs:
            node = _get_grad_fn_or_grad_acc(output)
            if node is not None and node in groups[position]["weight_side"]:
                yield position, node, _at(output.output_nr, gradient)


@contextlib.contextmanager
def _watching(
    groups: Sequence[ParamGroup], later: Iterable[int], captures: list[Capture]
) -> Iterator[set[Node]]:
    """Appends to ``captures`` what flows into the intermediates, in the order backward runs.

    Yields:
        The nodes that will run again.
    """
    handles = {
        node: _watch(node, groups[position]["weight_side"], partial(_append, captures, position))
        for position in later
        for node in groups[position]["intermediates"] - groups[position]["weight_side"]
    }
    try:
        yield {node for node in handles if not isinstance(node, BackwardCFunction)}
    finally:
        for handle in handles.values():
            handle.remove()


def _append(captures: list[Capture], position: int, node: Node, grads: Gradients) -> None:
    captures.append((position, node, grads))


def _watch(
    node: Node, weight_side: set[Node], found: Callable[[Node, Gradients], None]
) -> RemovableHandle:
    if not isinstance(node, BackwardCFunction):
        return node.register_prehook(partial(found, node))

    # A backward in Python computes all its gradients whatever is needed. Taking those of the weights
    # now spares it the second call.
    def take_results(results: Gradients, _: Gradients) -> None:
        _check_complete(node)
        for (successor, index), grad in zip(node.next_functions, results, strict=True):
            if successor in weight_side and grad is not None:
                found(successor, _at(index, grad))

    return node.register_hook(take_results)


def _check_complete(node: Any) -> None:
    edges = sum(successor is not None for successor, _ in node.next_functions)
    if sum(node.needs_input_grad) < edges:
        raise InternalError(
            f"{node.name()} was asked for {sum(node.needs_input_grad)} of {edges} gradients in the "
            "inputs' half: this version of torch splits Python functions itself"
        )


def _bytes_of(captures: Iterable[Capture]) -> int:
    return sum(grad.nbytes for _, _, grads in captures for grad in grads if grad is not None)


def _at(index: int, grad: Tensor | None) -> Gradients:
    return (*(None,) * index, grad)


# ---- the result


def _filled(
    groups: Sequence[ParamGroup], captures: Sequence[Capture], pairs: Sequence[Pair]
) -> list[ParamGroup]:
    owners = _owners(captures, pairs)
    for group in groups:
        group.update(intermediates=[], grads=[], owners=owners)
    for position, node, grads in captures:
        groups[position]["intermediates"].append(node)
        groups[position]["grads"].append(grads)
    return [groups[position] for position in dict.fromkeys(capture[0] for capture in captures)]


def _owners(captures: Sequence[Capture], pairs: Sequence[Pair]) -> list[Any]:
    """Returns what keeps captured nodes alive that, being Python functions, do not do so alone."""
    if any(isinstance(node, BackwardCFunction) for _, node, _ in captures):
        return [get_gradient_edge(output) for output, _ in pairs]
    return []
