"""A stage's backward pass in two halves: the gradients of heavy weights wait for the second.

Forward is left alone. Before the inputs' half of a microbatch, a search through its graph finds the weights
whose gradients can wait. The inputs' half is then one backward pass towards everything else; on its way it
keeps a pair (input, output gradient) for each use of such a weight. The weights' half turns those into
gradients and hands them to autograd's own accumulators, which run the hooks::

    I:   loss ── … ── Addmm ── … ── Addmm ── … ── input        one pass, towards all but the weights
                        │             │
                     (x, dy)       (x, dy)                     what is kept

    W:   (x, dy) ──> dW ──> … ──> accumulator ──> .grad        in batches, each one pass

Microbatches mostly have equal graphs. So the first one's search leaves a plan that says where in the graph
the uses are, and a microbatch whose graph looks the same follows that.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from penstock.backward.nodes import edge_to
from penstock.backward.passes import Gradients, backward_to, raise_from, seeds_of
from penstock.backward.pending import PendingGradients
from penstock.backward.search import MicrobatchGraph, SplitPlan, UseSearch

log = logging.getLogger("penstock")

# How many shapes of graphs an engine remembers. A stage has a few, one for each kind of microbatch.
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
        module: the stage's module.
        reduced_later: whether the caller reduces sharded gradients after the weights' half, instead of FSDP2
            in the inputs' half.
    """

    def __init__(self, module: nn.Module, *, reduced_later: bool = False) -> None:
        self._module = module
        self._reduced_later = reduced_later
        self._plans: dict[tuple[Any, ...], SplitPlan] = {}
        self._is_whole: bool | None = None
        self._logged = ""

    def full(self, outputs: Any, output_grads: Any, inputs: Sequence[Any]) -> Gradients:
        """Run both halves as one backward pass; arguments, result and errors as of ``input_half``."""
        try:
            return backward_to(*seeds_of(outputs, output_grads), inputs)
        except Exception as error:
            raise_from(error, "backward", self._module, outputs, output_grads)

    def input_half(
        self, outputs: Any, output_grads: Any, inputs: Sequence[Any]
    ) -> tuple[Gradients, PendingGradients]:
        """Compute the inputs' gradients, and those of the weights that cannot wait.

        Args:
            outputs: what forward returned, or its loss: a tensor, or a flat list of tensors. A gradient edge
                may stand for a tensor, whose memory is then free (``torch.autograd.graph``).
            output_grads: a gradient or None for each. They must stay as they are until the other half. None
                in place of it all says that each output is a loss.
            inputs: the inputs of the stage. They need not be leaves, nor tensors.

        Returns:
            One gradient of each input's shape, or None where it needs or gets none; and what ``weight_half``
            needs.

        Raises:
            UsageError: the outputs are nested, or the gradients are not one for each of them.
            UsageError: a tensor of the module was changed in place that backward needs.
            StageError: autograd failed; the cause is chained.
        """
        pending = PendingGradients()
        try:
            roots, seeds = seeds_of(outputs, output_grads)
            ends = self._prepare(roots, seeds, inputs, pending)
            grads = backward_to(roots, seeds, inputs, ends)
        except Exception as error:
            raise_from(error, "the inputs' half of backward", self._module, outputs, output_grads)
        finally:
            pending.collect()
        return grads, pending

    def weight_half(self, pending: PendingGradients) -> None:
        """Compute the gradients that ``input_half`` has left, and add them to the weights' ``.grad``.

        Raises:
            StageError: autograd failed, or an input has changed since the inputs' half.
        """
        if not pending:
            return
        try:
            with torch.no_grad():
                pending.deliver()
        except Exception as error:
            raise_from(error, "the weights' half of backward", self._module)

    def _prepare(
        self,
        roots: Sequence[GradientEdge],
        seeds: Sequence[Tensor | None],
        inputs: Sequence[Any],
        pending: PendingGradients,
    ) -> list[GradientEdge]:
        """Let ``pending`` watch the uses that wait; return where the inputs' half goes.

        No ends stand for a full pass, where nothing waits.
        """
        if self._is_whole is None:
            reason = _reason_in(self._module, reduced_later=self._reduced_later)
            self._is_whole = reason is not None
            self._log(reason)
        if self._is_whole:
            return []
        graph = MicrobatchGraph(roots, seeds, inputs)
        plan = self._plans.get(graph.shape)
        uses = None if plan is None else plan.uses_in(graph)
        if plan is None or uses is None:
            # A graph of the same shape may still differ in what its nodes have saved.
            search = UseSearch(graph)
            plan = search.plan()
            uses = plan.uses_in(graph)
            if not search.met_hooks:
                self._remember(graph, plan)
            self._log(plan.refusal)
        if not uses:
            return []
        pending.watch(uses)
        if plan.keeps_outputs:
            pending.owners = list(roots)
        return [edge_to((graph.nodes[end], 0, None)) for end in plan.ends]

    def _remember(self, graph: MicrobatchGraph, plan: SplitPlan) -> None:
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
    """Why no backward pass of a module may be cut in two, if there is a reason."""
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


# ---- gradients of shared weights, collected beside ``.grad``
# A weight that several stages use has one gradient, the sum of their shares. In one process those stages
# hold the same parameter. If each added its share straight to ``.grad``, the bits of the sum would depend
# on which stages live together, and on whose backward runs first. So each stage collects its own share, and
# ``weights/sharing.py`` adds up all of them.


class SharedGradients:
    """A context in which the gradients of some parameters add up here, and not in their ``.grad``.

    When the context ends, also after an error, ``.grad`` holds again what it held before.

    Args:
        parameters: whose gradients.
    """

    def __init__(self, parameters: Sequence[Tensor] = ()) -> None:
        self.parameters = tuple(parameters)
        self._shares: list[Tensor | None] = [None] * len(self.parameters)
        self._outside: list[Tensor | None] = []

    def __enter__(self) -> None:
        self._outside = self._swap(self._shares)

    def __exit__(self, *_: object) -> None:
        self._shares = self._swap(self._outside)

    def take(self) -> list[Tensor | None]:
        """Return what was collected for each parameter since the last call, None where nothing was."""
        shares, self._shares = self._shares, [None] * len(self.parameters)
        return shares

    def _swap(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Put other gradients into ``.grad``, and return those that were there."""
        before = []
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            before.append(parameter.grad)
            parameter.grad = gradient
        return before
