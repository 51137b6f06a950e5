"""The losses of a step while its stages run: where they come from, and what backward starts from.

The last stage computes the loss of each microbatch, or once that of the batch; any stage may add losses of
its own in its forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock._engine.parallel import gathered
from penstock._engine.rng import LOSS
from penstock._engine.runtime.calls import StepState
from penstock._engine.runtime.derivatives import derivatives_checked
from penstock._engine.runtime.loss import MAIN, Losses, StepLoss, zero_loss
from penstock._engine.runtime.loss_check import LossCheck
from penstock._engine.runtime.whole import BatchOutputs, Evaluate, Joins
from penstock._engine.values import map_tensors, tensors_in
from penstock.errors import MicrobatchError, UsageError
from penstock.stage import PipelineStage, enter


class StageLosses:
    """The losses that the stages of this process compute in a step.

    Args:
        stages: the stages by index.

    Attributes:
        added: collects the losses that a stage adds in its forward.
        check: compares the loss with what it says, once.
        seeds: the gradients of the roots that losses gave, by stage and microbatch; backward takes them.
    """

    def __init__(self, stages: Mapping[int, PipelineStage]) -> None:
        self._stages = stages
        self.added = Losses()
        self.check = LossCheck()
        self._batch: BatchOutputs | None = None
        self.seeds: dict[tuple[int, int], list[Tensor | None]] = {}

    def take_up(self, step: StepState, *, has_last: bool) -> None:
        """Take up a step.

        Args:
            step: the state of the call.
            has_last: whether the last stage is in this process.

        Raises:
            UsageError: the loss is over the batch, whose outputs cannot be put together.
        """
        loss, call = step.call.loss, step.agreement.model_call
        self._step, self._batch = step, None
        if self.check.is_due:
            self.check.begin()
        for stage in self._stages.values():
            stage.on_undo = self.added.clear
        self.seeds.clear()
        if loss is None or loss.over != "batch" or not has_last:
            return
        try:
            self._batch = BatchOutputs(call.count, Joins(loss, call))
        except MicrobatchError as error:
            raise UsageError(
                f'over="batch" puts the outputs of microbatches together, and {error}; let the '
                "pipeline split the batch, along one dimension of each tensor"
            ) from None

    def roots(
        self,
        stage: PipelineStage,
        microbatch: int,
        output: Any,
        inputs: Any,
        leaves: list[Tensor],
        arrived: Sequence[Sequence[Tensor]],
    ) -> list[Tensor]:
        """Return what a stage's backward starts from because of its losses, after its forward.

        Args:
            stage: the stage.
            microbatch: which microbatch it was.
            output: the model's output, if it is the last stage.
            inputs: the values that came from other stages.
            leaves: gets a leaf for each tensor of the target that requires grad.
            arrived: the leaves of each of those values.
        """
        function, index = self._step.call.loss, stage.index
        if function is None:
            self.added.clear()
            return []
        if not stage.is_last:
            return self._seeded(index, microbatch, self._take_added(index, microbatch))
        if self._batch is not None:
            return self._add_to_batch(self._batch, function, stage, microbatch, output)
        if self._step.weights.shares[microbatch]:
            target = self._step.targets[microbatch]
            if self._step.call.trains:
                target = _target_entered(target, leaves)
            refuses: AbstractContextManager[Any] = nullcontext()
            if self.check.is_due and function.check and len(self._step.parts) > 1:
                call, evaluate = self._step.agreement.model_call, partial(self._call_loss, function)
                pair = output, target
                self.check.take(
                    function, call, microbatch, pair, partial(evaluate, microbatch), stage.device
                )
                came = [leaf for of_value in arrived for leaf in of_value]
                refuses = derivatives_checked(output, inputs, came)
            with refuses:
                loss = self._evaluate(function, stage, microbatch, output, target)
            if function.metrics:
                self._step.tally.measure(microbatch, index, output, target)
        else:
            # A microbatch of weight 0: a mean over nothing is NaN, and so is its gradient.
            loss = zero_loss(output)
        # Backward starts from the whole loss as a plain tensor, with a plain seed.
        main = gathered(loss)
        self._step.tally.add_main(microbatch, index, main)
        totals = self._take_added(index, microbatch) if self.added.terms else {}
        totals[MAIN] = main + totals[MAIN] if MAIN in totals else main
        return self._seeded(index, microbatch, totals)

    def _evaluate(
        self, function: StepLoss, stage: PipelineStage, microbatch: int, output: Any, target: Any
    ) -> Tensor:
        """The loss of an output, with the random numbers of a microbatch."""
        draws = self._step.draws[stage.index][microbatch]
        if draws is not None:
            draws.enter(LOSS, 0)
        try:
            return self._call_loss(function, microbatch, output, target)
        except Exception as error:
            if target is None:
                error.add_note("loss_fn was called without a target; pass target= to the step")
            raise

    def _call_loss(self, function: StepLoss, microbatch: int, output: Any, target: Any) -> Tensor:
        plan = self._step.agreement.kinds[microbatch].plan
        compute = function.of_microbatch
        return compute(output, target) if plan is None else plan.apart(compute, output, target)

    def _add_to_batch(
        self,
        batch: BatchOutputs,
        function: StepLoss,
        stage: PipelineStage,
        microbatch: int,
        output: Any,
    ) -> list[Tensor]:
        """Add an output to those of the batch; with the last one, compute the loss and its gradients."""
        step, index, roots = self._step, stage.index, list[Tensor]()
        if self.added.terms:
            roots = self._seeded(index, microbatch, self._take_added(index, microbatch))
        if function.metrics:
            step.tally.measure(microbatch, index, output, step.targets[microbatch])
        share, seed = step.weights.whole
        if batch.add(microbatch, output):
            evaluate: Evaluate = partial(self._evaluate, function, stage, microbatch)
            if not share:
                evaluate = zero_loss
            targets = [_without_gradient(target) for target in step.targets]
            # The loss may use weights of this stage, also those that other stages share.
            with stage.shared_context:
                loss, gradients = batch.differentiate(targets, evaluate, seed)
            step.tally.add_main(0, index, gathered(loss), share)
            for number, of_output in gradients.items():
                self.seeds.setdefault((index, number), []).extend(of_output)
        return roots + [tensor for tensor in tensors_in(output) if tensor.requires_grad]

    def _take_added(self, stage: int, microbatch: int) -> dict[str, Tensor]:
        """Tally the losses that a stage has added, and return their sums by whose weights they count."""
        weights = self._step.weights
        self._step.tally.add_losses(microbatch, stage, self.added)
        totals = self.added.totals(weights.added.keys())
        self.added.clear()
        # Where it has no weight, a mean is one over nothing: NaN, and so is its gradient.
        return {n: total for n, total in totals.items() if weights.of_added(n).seeds[microbatch]}

    def _seeded(self, stage: int, microbatch: int, totals: Mapping[str, Tensor]) -> list[Tensor]:
        """The roots of sums of losses, by whose weights they count."""
        roots: list[Tensor] = []
        seeds: list[Tensor | None] = []
        for name, total in totals.items():
            if total.requires_grad:
                roots.append(total)
                seed = self._step.weights.of_added(name).seeds[microbatch]
                seeds.append(torch.full_like(total, seed))
        if roots:
            self.seeds[stage, microbatch] = seeds
        return roots


def _without_gradient(target: Any) -> Any:
    """A target for a loss over the batch.

    Raises:
        UsageError: a tensor in it requires grad.
    """
    if any(tensor.requires_grad for tensor in tensors_in(target)):
        raise UsageError(
            'over="batch" gives no gradients to targets; detach the target, or pass what requires grad '
            "to the model"
        )
    return _target_entered(target, [])


def _target_entered(target: Any, leaves: list[Tensor]) -> Any:
    """A target for a loss with gradients; of tensors that require grad, ``leaves`` gets a leaf each."""
    learns = False
    for tensor in (target,) if isinstance(target, Tensor) else tensors_in(target):
        learns |= tensor.requires_grad
        if tensor.is_inference():
            # Autograd cannot save such tensors for backward.
            return map_tensors(target, torch.clone)
    return enter(target, leaves, copies=True) if learns else target
