"""Microbatches put together again, and the loss of a whole batch.

With ``over="batch"`` the outputs of all microbatches meet in the last stage, the loss is computed once,
and its gradient is cut up again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock._engine.microbatches import (
    TARGET,
    Replicate,
    Split,
    Ways,
    merge,
    output_rule,
)
from penstock._engine.runtime.kinds import ModelCall
from penstock._engine.runtime.loss import StepLoss
from penstock._engine.values import map_tensors
from penstock.errors import MicrobatchError
from penstock.schedule import Op, Schedule

Evaluate = Callable[[Any, Any], Tensor]
"""``(output, target)`` -> the loss."""


# ---- microbatches put together again


class Joins:
    """Puts outputs and targets of microbatches together.

    Args:
        loss: the loss, with the rules by which batches are split.
        call: what the ranks brought, which says how many samples each microbatch has.

    Raises:
        MicrobatchError: there is no rule by which to put them together.
    """

    def __init__(self, loss: StepLoss, call: ModelCall) -> None:
        rules = loss.rules if isinstance(loss.rules, Mapping) else {}
        rule = rules.get(TARGET)
        each = rule.values() if isinstance(rule, Mapping) else (rule,)
        said = all(isinstance(item, Split | Replicate | None) for item in each)
        if call.presplit or call.counted or not said:
            raise MicrobatchError("the batch was split by the user's own rule")
        packed = call.dim is not None
        self._ways = call.ways
        self._target = None if packed else rule
        self._output = output_rule(loss.rules, packed=packed)

    def outputs(self, parts: Mapping[int, Any]) -> Any:
        """The output of several microbatches."""
        return merge([*parts.values()], self._output, self._of(parts), alike=True)

    def targets(self, parts: Mapping[int, Any]) -> Any:
        """Their target."""
        if isinstance(self._target, Replicate):
            return next(iter(parts.values()))
        return merge([*parts.values()], self._target, self._of(parts), alike=True, what=TARGET)

    def _of(self, parts: Mapping[int, Any]) -> Ways:
        return [(dim, [sizes[microbatch] for microbatch in parts]) for dim, sizes in self._ways]


# ---- the loss of a whole batch


class BatchOutputs:
    """The outputs of a step's microbatches, for a loss that is computed once.

    Args:
        count: the number of microbatches.
        joins: puts microbatches together.
    """

    def __init__(self, count: int, joins: Joins) -> None:
        self._count, self._joins = count, joins
        self._outputs: dict[int, Any] = {}

    def add(self, microbatch: int, output: Any) -> bool:
        """Add the output of a microbatch; whether all are there."""
        self._outputs[microbatch] = output
        return len(self._outputs) == self._count

    def differentiate(
        self, targets: Sequence[Any], evaluate: Evaluate, seed: float
    ) -> tuple[Tensor, dict[int, list[Tensor | None]]]:
        """The loss, and for each microbatch the gradients of those of its outputs that require grad."""
        learners: dict[int, list[Tensor]] = {}

        def cut(microbatch: int, tensor: Tensor) -> Tensor:
            leaf = tensor.detach()
            if tensor.requires_grad and torch.is_grad_enabled():
                leaf.requires_grad_()
                learners[microbatch].append(leaf)
                # The loss may change its arguments in place, which a leaf does not allow.
                return leaf.view_as(leaf)
            return leaf

        leaves = {}
        for microbatch in sorted(self._outputs):
            learners[microbatch] = []
            leaves[microbatch] = map_tensors(self._outputs[microbatch], partial(cut, microbatch))
        loss = evaluate(
            self._joins.outputs(leaves), self._joins.targets({m: targets[m] for m in leaves})
        )
        if loss.requires_grad:
            loss.backward(torch.full_like(loss.detach(), seed))
        return loss, {m: [leaf.grad for leaf in of] for m, of in learners.items()}


def forwards_first(schedule: Schedule) -> bool:
    """Tell whether a schedule runs all forwards of the last stage before its first backward."""
    last = schedule.stages - 1
    ops = [
        action.op
        for action in schedule.actions(schedule.placement.rank_of[last])
        if action.stage == last and action.op in (Op.F, Op.B, Op.I)
    ]
    forwards = ops.count(Op.F)
    return all(op is Op.F for op in ops[:forwards])
