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

from penstock.errors import MicrobatchError
from penstock.microbatches import TARGET, Split, merge, output_dim
from penstock.runtime.kinds import ModelCall
from penstock.runtime.loss import StepLoss
from penstock.schedule import Op, Schedule
from penstock.values import map_tensors

Evaluate = Callable[[Any, Any], Tensor]
"""``(output, target)`` -> the loss."""


# ---- microbatches put together again


class Joins:
    """Puts outputs and targets of microbatches together.

    Args:
        loss: the loss, with the rules by which batches are split.
        call: what the ranks brought, which says how many samples each microbatch has.
        guesses: whether to try it with a batch that the user has split: if all tensors have one entry for
            each sample, they can be put together.

    Raises:
        MicrobatchError: there is no rule by which to put them together.
    """

    def __init__(self, loss: StepLoss, call: ModelCall, *, guesses: bool = False) -> None:
        rules = loss.rules or {}
        rule = rules.get(TARGET, Split()) if isinstance(rules, Mapping) else Split()
        said = not isinstance(rule, Mapping) and not callable(rule)
        if (call.presplit and not call.counted) or ((call.counted or not said) and not guesses):
            # Where the user has counted the samples of each microbatch, it is for them to say what counts.
            raise MicrobatchError("the batch was split by the user's own rule")
        self._samples, self._exact = call.samples, call.counted or not said
        self._target: Any = rule if said else Split()
        self._output = 0 if call.presplit else output_dim(loss.rules, call.dim)
        if call.dim and said:
            self._target = Split(call.dim)

    def outputs(self, parts: Mapping[int, Any]) -> Any:
        """The output of several microbatches."""
        return self._joined(parts, self._output)

    def targets(self, parts: Mapping[int, Any]) -> Any:
        """Their target."""
        if not isinstance(self._target, Split):
            return next(iter(parts.values()))
        return self._joined(parts, self._target.dim or 0)

    def _joined(self, parts: Mapping[int, Any], dim: int) -> Any:
        samples = [self._samples[microbatch] for microbatch in parts]
        return merge([*parts.values()], dim, samples, exact=self._exact)


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
    """Whether a schedule runs all forwards of the last stage before its first backward."""
    last = schedule.stages - 1
    ops = [
        action.op
        for action in schedule.actions(schedule.placement.rank_of[last])
        if action.stage == last and action.op in (Op.F, Op.B, Op.I)
    ]
    forwards = ops.count(Op.F)
    return all(op is Op.F for op in ops[:forwards])
