"""The functions of torch's module that splits a backward pass, under its names.

`stage_backward_input` runs autograd towards the inputs alone and keeps the gradients that flow towards the
weights; `stage_backward_weight` continues from there. Together they run the kernels of a full backward pass
and none of them twice. Where they meet in the graph: let *between* be the nodes from which an input can be
reached. They carry the inputs' gradients. The *weight side* is every other node from which a weight can be
reached. The two touch in few places::

    loss ── … ── MmBackward ── … ── MmBackward ── … ── input        between
                     │                   │
                 TBackward           TBackward                      weight side
                     │                   │
                 weight 1            weight 2

A node between that has an edge into the weight side is an *intermediate*: the gradients that flow into it are
all that the weight side ever needs. An output that is itself on the weight side (it depends on weights only)
is where that side begins, so it counts as an intermediate as well.

The split is the one of Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2. Pipelines use
`penstock.backward.SplitBackward` instead, which holds less between the halves.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from penstock.backward.passes import (
    Gradients,
    Pair,
    backward_to,
    explained,
    seeds_of,
    tensors_in,
)
from penstock.backward.saved import is_recomputed, saved_by
from penstock.errors import UsageError

ParamGroup: TypeAlias = dict[str, Any]
"""Weights whose gradients come from the same intermediates; see `get_param_groups` for the keys."""

ReverseGraph: TypeAlias = dict[Node, list[Node]]


def stage_backward(
    stage_output: Any,
    output_grads: Any,
    input_values: Sequence[Any],
    outputs_with_grads_idxs: Sequence[int] | None = None,
) -> Gradients:
    """Runs backward through a whole stage for one microbatch.

    The weights' gradients are added to their ``.grad``, as by ``backward()``.

    Args:
        stage_output: What the stage returned: a tensor, or nested tuples, lists and dicts of tensors and
            other values. Tensors that need no gradient are skipped.
        output_grads: The outputs' gradients, in the same structure and of the same shapes. None for an
            output or a container says that it has no gradient. None in place of it all says that every
            output is a scalar loss, whose gradient is one.
        input_values: The inputs of the stage; those that are no tensors are allowed.
        outputs_with_grads_idxs: Positions in ``stage_output`` and ``output_grads`` to use alone.

    Returns:
        One gradient of each input's shape, or None if the input needs or gets none. They do not include
        what was in an input's ``.grad`` before; afterwards every ``.grad`` of an input is None.

    Raises:
        UsageError: ``output_grads`` has another structure than ``stage_output``.
        StageError: Autograd failed; the cause is chained.
    """
    if outputs_with_grads_idxs is not None:
        stage_output = [stage_output[i] for i in outputs_with_grads_idxs]
        output_grads = [output_grads[i] for i in outputs_with_grads_idxs]
    pairs = seeds_of(stage_output, output_grads)
    with explained("stage_backward", output=stage_output, gradient=output_grads):
        return backward_to(pairs, input_values)


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
        _deliver(param_groups, leaves, retain_graph=retain_graph)
    return tuple(None if node is None else increments.get(node) for node in nodes)


# ---- the graph


def _get_grad_fn_or_grad_acc(t: Tensor) -> Node | None:
    """Returns the node that receives the gradient of ``t``.

    Args:
        t: Any tensor. Autograd makes the accumulator of a leaf lazily, so that is found through a
            view of the leaf, also where gradients are off.

    Returns:
        The function that made ``t``, the accumulator of a leaf, or None without ``requires_grad``.
    """
    if not t.requires_grad or t.grad_fn is not None:
        return t.grad_fn
    with torch.enable_grad():
        view = t.view_as(t).grad_fn
    return view.next_functions[0][0] if view is not None else None


def _null_coalesce_accumulate(lhs: Tensor | None, rhs: Tensor | None) -> Tensor | None:
    """Returns the sum of two gradients of one shape, either of which may be missing."""
    if lhs is None or rhs is None:
        return rhs if lhs is None else lhs
    return lhs + rhs


def _nodes_of(tensors: Iterable[Any]) -> list[Node]:
    """Returns the gradient nodes of those values that are tensors and require a gradient."""
    nodes = (_get_grad_fn_or_grad_acc(t) for t in tensors if isinstance(t, Tensor))
    return [node for node in nodes if node is not None]


def construct_reverse_graph(roots: Iterable[Node | None]) -> ReverseGraph:
    """Reverses the edges of the graph below ``roots``.

    Args:
        roots: Nodes to start from, usually those of a stage's outputs. None is skipped.

    Returns:
        For each node that can be reached, one entry per edge into it: the node the edge comes from.
        A root that nothing leads to has an empty list.
    """
    reverse: ReverseGraph = defaultdict(list)
    queue = deque(dict.fromkeys(root for root in roots if root is not None))
    reverse.update((root, []) for root in queue)
    while queue:
        node = queue.popleft()
        for successor, _ in node.next_functions:
            if successor is None:
                continue
            if successor not in reverse:
                queue.append(successor)
            reverse[successor].append(node)
    return reverse


def reverse_closure(
    roots: Iterable[Node | None],
    target_nodes: Collection[Node],
    reverse_edges_dict: Mapping[Node, list[Node]],
) -> tuple[set[Node], set[Node]]:
    """Walks the reversed edges from ``roots`` and stops at ``target_nodes``.

    Args:
        roots: Nodes to start from; they are always part of the closure. None is skipped.
        target_nodes: Nodes at which the walk stops.
        reverse_edges_dict: What `construct_reverse_graph` returned.

    Returns:
        The nodes walked through (no targets among them but roots), and the targets that were met.
    """
    closure = {root for root in roots if root is not None}
    visited_targets: set[Node] = set()
    pending = list(closure)
    while pending:
        for node in reverse_edges_dict.get(pending.pop(), ()):
            if node in closure:
                continue
            if node in target_nodes:
                visited_targets.add(node)
                continue
            closure.add(node)
            pending.append(node)
    return closure, visited_targets


def get_param_groups(
    inputs: Iterable[Node],
    params: Iterable[Node],
    reverse_edges_dict: Mapping[Node, list[Node]],
    roots: Iterable[Node] = (),
) -> list[ParamGroup]:
    """Groups the weights by the nodes at which their gradients leave the path to the inputs.

    Weights that share an intermediate, or a node on the way to one, form one group.

    Args:
        inputs: Nodes of the inputs.
        params: Nodes of the weights. One that is an input too counts as an input; one that no
            gradient reaches is left out.
        reverse_edges_dict: What `construct_reverse_graph` returned.
        roots: Nodes of the outputs; one that depends on weights only becomes an intermediate.

    Returns:
        In the order of ``params``, dicts with the sets of nodes ``params``, ``intermediates`` and
        ``weight_side``: all nodes from below the intermediates down to the params.
    """
    between, _ = reverse_closure(inputs, (), reverse_edges_dict)
    wanted = [p for p in params if p in reverse_edges_dict and p not in between]
    group_of: dict[Node, ParamGroup] = {}
    walked = set(between)
    for param in wanted:
        # The walk stops where one before has been, so each node is walked once.
        closure, met = reverse_closure((param,), walked, reverse_edges_dict)
        walked |= closure
        known = {id(group_of[n]): group_of[n] for n in (param, *met) if n in group_of}
        group, *others = known.values() or [_empty_group()]
        for other in others:
            for key, nodes in other.items():
                group[key] |= nodes
            group_of.update(dict.fromkeys(other["intermediates"] | other["weight_side"], group))
        group["params"].add(param)
        group["weight_side"] |= closure
        group["intermediates"] |= met & between
        group_of.update(dict.fromkeys(closure | met, group))
    for root in roots:
        if root in group_of and root not in between:
            group_of[root]["intermediates"].add(root)
    groups = {id(group_of[param]): group_of[param] for param in wanted}
    return [group for group in groups.values() if group["intermediates"]]


def _empty_group() -> ParamGroup:
    return {"params": set(), "intermediates": set(), "weight_side": set()}


# ---- the inputs' half


def _seeds(outputs: Any, output_grads: Any) -> list[Pair]:
    if output_grads is None:
        return [(output, torch.ones_like(output)) for output in tensors_in(outputs)]
    return seeds_of(outputs, output_grads)


def _input_gradients(
    pairs: Sequence[Pair], input_values: Sequence[Any], weights: Iterable[Tensor]
) -> tuple[Gradients, list[ParamGroup]]:
    tensors = [v for v in input_values if isinstance(v, Tensor) and v.requires_grad]
    inputs = {id(tensor): tensor for tensor in tensors}
    gradients, groups = _capture(pairs, list(inputs.values()), weights)
    by_identity = dict(zip(inputs, gradients, strict=True))
    return tuple(by_identity.get(id(value)) for value in input_values), groups


def _accumulate(input_values: Sequence[Any], dinputs: Gradients) -> None:
    once = {id(value): (value, grad) for value, grad in zip(input_values, dinputs, strict=True)}
    for value, grad in once.values():
        if grad is not None and value.is_leaf:
            value.grad = _null_coalesce_accumulate(value.grad, grad)


def _detach(outputs: Iterable[Tensor], input_values: Sequence[Any]) -> None:
    kept = {id(value) for value in input_values}
    for output in outputs:
        if not output.is_leaf and id(output) not in kept:
            # A view cannot be detached in place; its graph lives until the caller drops it.
            with contextlib.suppress(RuntimeError):
                output.detach_()


def _capture(
    pairs: Sequence[Pair], inputs: Sequence[Tensor], weights: Iterable[Tensor]
) -> tuple[Gradients, list[ParamGroup]]:
    """Returns the gradients of ``inputs``; and the groups that a gradient flowed into, in that order."""
    roots = _nodes_of(output for output, _ in pairs)
    leaves = {node: weight for weight in weights for node in _nodes_of((weight,))}
    reverse = construct_reverse_graph(roots)
    groups = get_param_groups(_nodes_of(inputs), leaves, reverse, roots)
    is_compiled = any(type(node).__name__ == "CompiledFunctionBackward" for node in reverse)
    flowing: dict[int, ParamGroup] = {}
    at_once: dict[Node, ParamGroup] = {}
    handles: dict[Node, RemovableHandle] = {}

    def keep(group: ParamGroup, node: Node, grads: Gradients) -> None:
        flowing[id(group)] = group
        group["intermediates"].append(node)
        group["grads"].append(grads)

    for group in groups:
        weight_side, inner = group["weight_side"], group["intermediates"] - group["weight_side"]
        is_early = inner and (is_compiled or _is_recomputed(inner | weight_side))
        group.update(intermediates=[], grads=[], owners=[])
        if is_early:
            at_once.update(dict.fromkeys(group["params"], group))
            continue
        for output, grad in pairs:
            for node in weight_side.intersection(_nodes_of([output])):
                keep(group, node, _at(output.output_nr, grad))
        for node in inner:
            handles[node] = _watch(node, weight_side, partial(keep, group))
    targets = [leaves[node] for node in at_once]
    runs_again = not all(isinstance(node, BackwardCFunction) for node in handles)
    try:
        gradients = _gradients(pairs, [*inputs, *targets], targets, retain_graph=runs_again)
    finally:
        for handle in handles.values():
            handle.remove()
    for (node, group), gradient in zip(at_once.items(), gradients[len(inputs) :], strict=True):
        if gradient is not None:
            keep(group, node, (gradient,))
    _keep_alive(list(flowing.values()), pairs)
    return gradients[: len(inputs)], list(flowing.values())


def _is_recomputed(nodes: Iterable[Node]) -> bool:
    """Says whether the weights' half would recompute a checkpoint once more, which selective ones forbid."""
    return any(is_recomputed(saved) for node in nodes for saved in saved_by(node))


def _gradients(
    pairs: Sequence[Pair], wanted: Sequence[Tensor], leaves: Iterable[Tensor], *, retain_graph: bool
) -> Gradients:
    """Runs backward towards ``wanted`` and nowhere else; hooks on ``leaves`` do not run yet."""
    if not pairs or not wanted:
        return (None,) * len(wanted)
    outputs, seeds = zip(*pairs, strict=True)
    with _hooks_suspended(leaves):
        return torch.autograd.grad(
            outputs, wanted, seeds, retain_graph=retain_graph, allow_unused=True
        )


@contextlib.contextmanager
def _hooks_suspended(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Keeps tensor hooks on ``leaves`` from running now: they will run when ``.grad`` is written."""
    with contextlib.ExitStack() as stack:
        for leaf in leaves:
            handle = leaf.register_hook(lambda _: None)
            hooks = handle.hooks_dict_ref()
            handle.remove()
            stack.callback(hooks.update, dict(hooks))
            hooks.clear()
        yield


def _watch(
    node: Node, weight_side: set[Node], keep: Callable[[Node, Gradients], None]
) -> RemovableHandle:
    """Calls ``keep`` with what flows into an intermediate when it runs."""
    if not isinstance(node, BackwardCFunction):
        return node.register_prehook(partial(keep, node))

    # A backward written in Python computes all its gradients, whatever is needed. Those of the weights are
    # taken now, which saves a second call.
    def take_results(results: Gradients, _: Gradients) -> None:
        for (successor, index), grad in zip(node.next_functions, results, strict=True):
            if successor in weight_side and grad is not None:
                keep(successor, _at(index, grad))

    return node.register_hook(take_results)


def _at(index: int, grad: Tensor | None) -> Gradients:
    return (*(None,) * index, grad)


def _keep_alive(groups: Sequence[ParamGroup], pairs: Sequence[Pair]) -> None:
    """Keeps captured nodes of Python functions alive, for which a reference to the node is not enough."""
    nodes = chain.from_iterable(group["intermediates"] for group in groups)
    if any(isinstance(node, BackwardCFunction) for node in nodes):
        for group in groups:
            group["owners"] = [get_gradient_edge(output) for output, _ in pairs]


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
        if fault := _fault_in(group["intermediates"], group["grads"], group["weight_side"]):
            raise _GroupError(
                f"param group {position}: {fault}; leave grads as stage_backward_input returned it, or "
                "replace it by as many tensors of the same shapes"
            )


def _fault_in(nodes: Sequence[Node], grads: Any, weight_side: set[Node]) -> str | None:
    """Says how ``grads`` differs from what the inputs' half captures for these nodes; None if it does not."""
    if not isinstance(grads, list | tuple) or len(grads) != len(nodes):
        kind = len(grads) if isinstance(grads, list | tuple) else type(grads).__name__
        return f"expected grads to be a list of {len(nodes)} tuples, one for each intermediate, found {kind}"
    for index, (node, row) in enumerate(zip(nodes, grads, strict=True)):
        count, what = len(node._input_metadata), f"expected grads[{index}] to"
        if not isinstance(row, list | tuple):
            return f"{what} be a tuple of tensors, found {type(row).__name__}"
        # On the weight side a row ends with its last gradient.
        if len(row) > count or (len(row) < count and node not in weight_side):
            return f"{what} hold {count} for {node.name()}, found {len(row)}"
        if wrong := [type(grad).__name__ for grad in row if not isinstance(grad, Tensor | None)]:
            return f"{what} hold tensors or None, found {', '.join(wrong)}"
    return None


@contextlib.contextmanager
def _recording(accumulators: Iterable[Node]) -> Iterator[dict[Node, Tensor]]:
    """Yields a dict that fills with what flows into ``accumulators``."""
    increments: dict[Node, Tensor] = {}

    def record(node: Node, grads: Gradients) -> None:
        if grads[0] is not None:
            increments[node] = grads[0]

    handles = [node.register_prehook(partial(record, node)) for node in accumulators]
    try:
        yield increments
    finally:
        for handle in handles:
            handle.remove()


# A compromise: gradients that wait for a backward pass take memory, and each pass has a fixed cost.
BATCH_BYTES = 16 * 2**20


def _deliver(
    param_groups: Sequence[ParamGroup], leaves: Mapping[Node, Tensor], *, retain_graph: bool
) -> None:
    """Adds the gradients that follow from ``param_groups`` to the ``.grad`` of ``leaves``.

    The engine computes an edge of a node only if the running backward pass needs what lies behind it. So an
    intermediate that is called *inside* a pass that asks for the weight side alone does no work towards the
    inputs. That pass consists of one node of our own, whose backward makes the calls. No hook on the nodes
    or on their tensors runs a second time, since no gradient travels through the graph. And all calls belong
    to one pass, so that a checkpointed block is recomputed once for all of them.
    """
    needed = [
        GradientEdge(successor, index)
        for group in param_groups
        for node in group["intermediates"]
        if node not in group["weight_side"]
        for successor, index in node.next_functions
        if successor in group["weight_side"]
    ]
    work = partial(_continue_from, param_groups, leaves, retain_graph=retain_graph)
    if not needed:
        work()
        return
    with torch.enable_grad():
        start = torch.zeros((), requires_grad=True)
        carried: Tensor = cast("Any", _Carrier).apply(start, work)
    torch.autograd.grad([carried], [get_gradient_edge(start), *needed], allow_unused=True)


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


def _continue_from(
    param_groups: Sequence[ParamGroup], leaves: Mapping[Node, Tensor], *, retain_graph: bool
) -> None:
    flows: list[tuple[GradientEdge, Tensor]] = []
    targets: list[Tensor] = []
    for position, group in enumerate(param_groups, start=1):
        for edge, grad in _flows_from(group):
            flows.append((edge, _fitted(grad, edge, leaves.get(edge.node))))
        targets += (leaves[node] for node in group["params"] if node in leaves)
        if not retain_graph:
            for key in group.keys() - {"params"}:
                del group[key]
        is_much = sum(grad.nbytes for _, grad in flows) >= BATCH_BYTES
        if flows and targets and (is_much or position == len(param_groups)):
            edges, seeds = zip(*flows, strict=True)
            flows.clear()
            torch.autograd.backward(edges, seeds, retain_graph=retain_graph, inputs=targets)
            targets.clear()


def _flows_from(group: ParamGroup) -> Iterator[tuple[GradientEdge, Tensor]]:
    """Yields the gradients at the edges into the weight side that follow from the captured ones."""
    weight_side = group["weight_side"]
    for node, grads in zip(group["intermediates"], group["grads"], strict=True):
        if all(grad is None for grad in grads):
            continue
        if node in weight_side:
            edges = [(node, index) for index in range(len(grads))]
        else:
            # A node written in C++, whose saved tensors stay. It gives None for edges that are not needed.
            edges, grads = node.next_functions, node(*grads)
            grads = grads if isinstance(grads, tuple) else (grads,)
        for edge, grad in zip(edges, grads, strict=True):
            if edge[0] in weight_side and grad is not None:
                yield GradientEdge(*edge), grad


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
