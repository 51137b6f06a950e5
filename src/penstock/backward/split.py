"""The two halves of a stage's backward pass: the inputs' gradients, and later the weights'.

`stage_backward_input` runs autograd towards the inputs alone and keeps the gradients that flow into
the *intermediates* (see `penstock.backward.graph`). `stage_backward_weight` continues from there:

    [1] each intermediate computes the gradients on its edges into the weight side, and no others;
    [2] one backward pass takes all of them down to the weights, where autograd's own accumulation
        adds them to ``.grad`` and calls every hook once.

Together they run the kernels of a full backward pass and none of them twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from penstock.backward.full import (
    Gradients,
    Pair,
    explained,
    needs_gradient,
    pair_with_gradients,
    tensors_in,
)
from penstock.backward.graph import (
    ParamGroup,
    _get_grad_fn_or_grad_acc,
    _null_coalesce_accumulate,
    construct_reverse_graph,
    get_param_groups,
    nodes_of,
)
from penstock.backward.store import is_checkpointed, release
from penstock.errors import InternalError, UsageError


def stage_backward_input(
    stage_outputs_or_loss: Any,
    output_grads: Any,
    input_values: Sequence[Any],
    weights: Iterable[Tensor],
    *,
    accumulate_grad: bool = True,
) -> tuple[tuple[Tensor | None, ...], list[ParamGroup]]:
    """Computes the gradients of a stage's inputs for one microbatch, and nothing for its weights.

    Args:
        stage_outputs_or_loss: What the stage returned, or its loss: a list of tensors, or any nesting of
            tuples, lists and dicts of tensors and other values.
        output_grads: The outputs' gradients, in the same structure and of the same shapes; they must stay
            as they are until the weights' half. None for an entry says that it has no gradient, None in
            place of it all means ones everywhere.
        input_values: The inputs of the stage; those that are no tensors are allowed.
        weights: The parameters whose gradients `stage_backward_weight` will compute.
        accumulate_grad: Also add the gradients to the ``.grad`` of inputs that are leaves, and detach the
            outputs in place, so that their graph is freed although the caller keeps them. With False
            neither inputs nor outputs are touched.

    Returns:
        One gradient of each input's shape, or None if the input needs or gets none; and the param
        groups for `stage_backward_weight`: those of `get_param_groups`, in the order in which
        backward reached them, where ``intermediates`` is a list of nodes and ``grads`` one of tuples
        along it: for each output of the node the gradient that flowed in, or None. A node on the
        weight side in ``intermediates`` says that its gradient is known already; it may be there more than
        once, and its tuple ends with its last gradient.

    Raises:
        UsageError: ``output_grads`` has another structure than the outputs.
        StageError: Autograd failed; the cause is chained.
    """
    pairs = _seeds(stage_outputs_or_loss, output_grads)
    with explained("stage_backward_input", output=stage_outputs_or_loss, gradient=output_grads):
        dinputs, groups = _input_gradients(pairs, input_values, weights)
    if accumulate_grad:
        _accumulate(input_values, dinputs)
        _detach(tensors_in(stage_outputs_or_loss), input_values)
    return dinputs, groups


def stage_backward_weight(
    weights: Iterable[Tensor],
    param_groups: Sequence[ParamGroup],
    retain_graph: bool = False,
    *,
    return_grads: bool = True,
) -> tuple[Tensor | None, ...]:
    """Computes the weights' gradients from what `stage_backward_input` captured.

    They are added to the weights' ``.grad`` by autograd, so that hooks run as in a full backward.

    Args:
        weights: The parameters to compute gradients for; others get none.
        param_groups: The groups of one microbatch. Entries of ``grads`` that are None are skipped.
        retain_graph: Keep the groups and their graph for another call. Otherwise each group is
            emptied, but for ``params``, as soon as it has been used, and its memory is free.
        return_grads: With False the result holds None only, which saves a copy of the gradients.

    Returns:
        What this call added to each weight's ``.grad``, in the order of ``weights``; None where
        nothing flowed.

    Raises:
        UsageError: A group was used before, did not come from `stage_backward_input`, or holds others than
            the gradients that it captured; it is a RuntimeError too.
        StageError: Autograd or a hook failed; the cause is chained.
    """
    _check_groups(param_groups)
    weights = list(weights)
    nodes = [_get_grad_fn_or_grad_acc(weight) for weight in weights]
    leaves = {node: weight for node, weight in zip(nodes, weights, strict=True) if node is not None}
    with (
        explained("stage_backward_weight", weights=weights),
        _recording(leaves if return_grads else ()) as increments,
    ):
        deliver(param_groups, leaves, retain_graph=retain_graph)
    return tuple(None if node is None else increments.get(node) for node in nodes)


# ---- the inputs' half


def _seeds(outputs: Any, output_grads: Any) -> list[Pair]:
    if output_grads is None:
        return [(output, torch.ones_like(output)) for output in tensors_in(outputs)]
    pairs = pair_with_gradients(outputs, output_grads)
    return [(output, gradient) for output, gradient in pairs if gradient is not None]


def _input_gradients(
    pairs: Sequence[Pair], input_values: Sequence[Any], weights: Iterable[Tensor]
) -> tuple[Gradients, list[ParamGroup]]:
    inputs = {id(value): value for value in input_values if needs_gradient(value)}
    found, groups = capture(pairs, list(inputs.values()), weights)
    by_identity = dict(zip(inputs, found, strict=True))
    return tuple(by_identity.get(id(value)) for value in input_values), groups


def _accumulate(input_values: Sequence[Any], dinputs: Gradients) -> None:
    found = {id(value): (value, grad) for value, grad in zip(input_values, dinputs, strict=True)}
    for value, grad in found.values():
        if grad is not None and value.is_leaf:
            value.grad = _null_coalesce_accumulate(value.grad, grad)


def _detach(outputs: Iterable[Tensor], input_values: Sequence[Any]) -> None:
    kept = {id(value) for value in input_values}
    for output in outputs:
        if not output.is_leaf and id(output) not in kept:
            # A view cannot be detached in place; its graph lives until the caller drops it.
            with contextlib.suppress(RuntimeError):
                output.detach_()


# ---- the weights' half


class _GroupError(UsageError, RuntimeError):
    """Param groups that hold no gradients to continue from."""


def _check_groups(param_groups: Sequence[ParamGroup]) -> None:
    for position, group in enumerate(param_groups):
        if missing := {"intermediates", "grads", "weight_side"} - group.keys():
            raise _GroupError(
                f"param group {position} has no {', '.join(sorted(missing))}: it was used by an "
                "earlier stage_backward_weight (call that with retain_graph=True), or does not "
                "come from stage_backward_input"
            )
        if told := _unlike_captured(group["intermediates"], group["grads"], group["weight_side"]):
            raise _GroupError(
                f"param group {position}: {told}; leave grads as stage_backward_input returned it, or "
                "replace it by as many tensors of the same shapes"
            )


def _unlike_captured(nodes: Sequence[Node], grads: Any, weight_side: set[Node]) -> str | None:
    """Says how ``grads`` differs from what the inputs' half captures for these nodes; None if it does not."""
    if not isinstance(grads, list | tuple) or len(grads) != len(nodes):
        found = len(grads) if isinstance(grads, list | tuple) else type(grads).__name__
        return f"expected grads to be a list of {len(nodes)} tuples, one for each intermediate, found {found}"
    for index, (node, row) in enumerate(zip(nodes, grads, strict=True)):
        count = len(node._input_metadata)
        if not isinstance(row, list | tuple):
            return f"expected grads[{index}] to be a tuple of tensors, found {type(row).__name__}"
        # On the weight side a row ends with its last gradient.
        if len(row) > count or (len(row) < count and node not in weight_side):
            return f"expected grads[{index}] to hold {count} for {node.name()}, found {len(row)}"
        if wrong := [type(grad).__name__ for grad in row if not isinstance(grad, Tensor | None)]:
            return f"expected grads[{index}] to hold tensors or None, found {', '.join(wrong)}"
    return None


@contextlib.contextmanager
def _recording(accumulators: Iterable[Node]) -> Iterator[dict[Node, Tensor]]:
    """Yields a dict that fills with what flows into ``accumulators``."""
    increments: dict[Node, Tensor] = {}
    handles = [node.register_prehook(partial(_record, increments, node)) for node in accumulators]
    try:
        yield increments
    finally:
        for handle in handles:
            handle.remove()


def _record(increments: dict[Node, Tensor], node: Node, grads: Gradients) -> None:
    if grads[0] is not None:
        increments[node] = grads[0]


# ---- deliver: take captured gradients from the intermediates down to the weights
# The engine computes an edge of a node only if the running backward pass needs what lies behind it. So an
# intermediate that is called *inside* a pass that asks for the weight side alone does no work towards the
# inputs. That pass consists of one node of our own, whose backward makes the calls. No hook on the nodes or
# on their tensors runs a second time, since no gradient travels through the graph. And all calls belong to
# one pass, so that a checkpointed block is recomputed once for all of them.


Flow: TypeAlias = tuple[GradientEdge, Tensor | None]
"""A gradient and where it flows."""

# A compromise: gradients that wait for a backward pass take memory, and each pass has a fixed cost.
BATCH_BYTES = 16 * 2**20


def deliver(
    param_groups: Sequence[ParamGroup], leaves: Mapping[Node, Tensor], *, retain_graph: bool
) -> None:
    """Adds the gradients that follow from ``param_groups`` to the ``.grad`` of ``leaves``.

    Args:
        param_groups: As `stage_backward_input` returned them.
        leaves: The weights, by their accumulators.
        retain_graph: Keep the groups and their graph; otherwise each group is emptied when used.
    """
    batch = _Batch(leaves, retain_graph=retain_graph)
    needed = [edge for group in param_groups for edge in _edges_to_compute(group)]
    work = partial(_compute, param_groups, batch)
    if needed:
        run_inside_backward(work, needed)
    else:
        work()
    batch.run()


def _compute(param_groups: Sequence[ParamGroup], batch: _Batch) -> None:
    for group in param_groups:
        for node, grads in zip(group["intermediates"], group["grads"], strict=True):
            batch.add(_results(node, grads, group["weight_side"]))
        batch.close(group)


def _edges_to_compute(group: ParamGroup) -> Iterator[GradientEdge]:
    weight_side = group["weight_side"]
    for node in group["intermediates"]:
        if node not in weight_side:
            yield from _edges_into(weight_side, node)


def _edges_into(weight_side: set[Node], node: Node) -> Iterator[GradientEdge]:
    for successor, index in node.next_functions:
        if successor in weight_side:
            yield GradientEdge(successor, index)


def _results(node: Node, grads: Gradients, weight_side: set[Node]) -> Iterator[Flow]:
    """Yields the gradients at the edges into the weight side that follow from ``grads``."""
    if node in weight_side:
        yield from ((GradientEdge(node, index), grad) for index, grad in enumerate(grads))
    elif any(grad is not None for grad in grads):
        for (successor, index), grad in zip(
            node.next_functions, call_node(node, grads), strict=True
        ):
            if successor in weight_side:
                yield GradientEdge(successor, index), grad


def _fitted(grad: Tensor, edge: GradientEdge, leaf: Tensor | None) -> Tensor:
    """Returns ``grad`` as the engine would have brought it to ``edge``.

    Nodes leave it to the engine to undo broadcasting and to drop an imaginary part.
    """
    # No public name says what a node expects. torch.autograd itself looks here for the shape of a
    # gradient edge; seen in torch 2.13.
    expected: Any = leaf if leaf is not None else edge.node._input_metadata[edge.output_nr]
    if grad.is_complex() and not expected.dtype.is_complex:
        grad = grad.real
    return grad if grad.shape == expected.shape else grad.sum_to_size(expected.shape)


class _Batch:
    """Gradients at edges into the weight side that are collected for one backward pass."""

    def __init__(self, leaves: Mapping[Node, Tensor], *, retain_graph: bool) -> None:
        self._leaves = leaves
        self._retain_graph = retain_graph
        self._waiting: list[tuple[GradientEdge, Tensor]] = []
        self._targets: list[Tensor] = []
        self._bytes = 0

    def add(self, flows: Iterator[Flow]) -> None:
        """Takes the gradients that are there."""
        for edge, grad in flows:
            if grad is not None:
                self._bytes += grad.nbytes
                self._waiting.append((edge, _fitted(grad, edge, self._leaves.get(edge.node))))

    def close(self, group: ParamGroup) -> None:
        """Notes that all gradients of ``group`` are there, and runs the pass once enough are waiting."""
        self._targets += (self._leaves[node] for node in group["params"] if node in self._leaves)
        if not self._retain_graph:
            _empty(group)
        if self._bytes >= BATCH_BYTES:
            self.run()

    def run(self) -> None:
        """Takes what is waiting down to the weights."""
        waiting, targets = self._waiting, self._targets
        self._waiting, self._targets, self._bytes = [], [], 0
        if waiting and targets:
            edges, grads = zip(*waiting, strict=True)
            torch.autograd.backward(edges, grads, retain_graph=self._retain_graph, inputs=targets)


def _empty(group: ParamGroup) -> None:
    for key in group.keys() - {"params"}:
        del group[key]


# ---- single nodes, for some of their edges only


class _Carrier(torch.autograd.Function):
    """The identity, whose backward does some work."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, work: Callable[[], None]) -> Tensor:
        ctx.work = work
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        ctx.work()
        return grad_outputs[0], None


def run_inside_backward(work: Callable[[], None], needed: Sequence[GradientEdge]) -> None:
    """Calls ``work`` inside a backward pass that needs the gradients at some edges.

    Args:
        work: Called once. Inside it, `call_node` computes the gradients at ``needed``.
        needed: The edges that the engine regards as needed. The pass itself brings no gradients to them.
    """
    with torch.enable_grad():
        leaf = torch.zeros((), requires_grad=True)
        carried: Tensor = cast("Any", _Carrier).apply(leaf, work)
    own = get_gradient_edge(leaf)
    torch.autograd.grad([carried], [own, *needed], allow_unused=True)


def call_node(node: Node, grads: Gradients) -> Gradients:
    """Returns the gradients that ``node`` sends along its edges when ``grads`` flow into it.

    Args:
        node: A node written in C++; its saved tensors stay.
        grads: One gradient or None for each output of the forward operation.

    Returns:
        One gradient per edge, None for edges that the running backward pass does not need.
    """
    result = cast("Callable[..., Tensor | Gradients | None]", node)(*grads)
    return result if isinstance(result, tuple) else (result,)


# ---- capture: run backward towards the inputs, and keep what the weights' half will need


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
        The gradients of ``inputs``; and the groups that a gradient flowed into, in the order in which the
        first one did.
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


# ---- groups that are computed with the inputs' gradients


def _early(groups: Sequence[ParamGroup], leaves: Leaves, nodes: Iterable[Node]) -> list[int]:
    """Returns the positions of the groups whose gradients are computed together with those of the inputs.

    The finished gradients are kept, and reach ``.grad`` with the rest. A compiled function frees what it
    saved as it runs, and refuses to run in a pass that keeps the graph for another one.
    """
    compiled = any(_is_compiled(node) for node in nodes)
    return [
        position
        for position, group in enumerate(groups)
        if group["intermediates"] - group["weight_side"]
        and (compiled or _is_cheap(group, leaves) or _is_recomputed(group))
    ]


def _is_cheap(group: ParamGroup, leaves: Leaves) -> bool:
    """Says whether all weights are vectors, whose gradients are smaller than what would have to be kept."""
    return all(leaves[node].dim() <= 1 for node in group["params"])


def _is_recomputed(group: ParamGroup) -> bool:
    """Says whether the weights' half would recompute a checkpoint once more, which selective ones forbid."""
    return any(map(is_checkpointed, group["intermediates"] | group["weight_side"]))


def _is_compiled(node: Node) -> bool:
    return type(node).__name__ == "CompiledFunctionBackward"


@contextlib.contextmanager
def hooks_suspended(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Keeps tensor hooks on ``leaves`` from running now: they will run when ``.grad`` is written."""
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


# ---- groups whose gradients are captured, to be computed later


def _root_captures(
    pairs: Sequence[Pair], groups: Sequence[ParamGroup], later: Iterable[int]
) -> Iterator[Capture]:
    """Yields the gradients given for outputs that depend on weights only."""
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

    # A backward written in Python computes all its gradients, whatever is needed. Those of the weights are
    # taken now, which saves a second call.
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
    """Returns what keeps captured nodes of Python functions alive: a reference to the node is not enough."""
    if any(isinstance(node, BackwardCFunction) for _, node, _ in captures):
        return [get_gradient_edge(output) for output, _ in pairs]
    return []
