"""What backward of a microbatch starts from: the loss, what stages added to it, the values they gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.losses import Losses
from penstock.runtime.arguments import chosen
from penstock.runtime.companions import Companion
from penstock.schedule import Edge
from penstock.stage import PipelineStage
from penstock.step import Loss, Tally, Weights, nothing
from penstock.trees import mapped, tensors_of


class Roots:
    """Makes of a stage's output what its backward starts from, and keeps the seeds until then.

    A loss that a stage in the middle added is a root beside the values that the stage gives; on the last
    stage it is part of the loss.

    Args:
        loss: computed on the last stage, where there is one.
        weights: how much each microbatch counts.
        targets: for each microbatch, what the loss compares with.

    Attributes:
        tally: where losses and metrics are noted.
        weights: of the microbatches.
    """

    def __init__(
        self,
        loss: Loss | None = None,
        weights: Weights | None = None,
        targets: Sequence[Any] = (),
    ) -> None:
        self._loss = loss
        self.weights = weights or Weights()
        self._targets = targets
        self.tally = Tally(self.weights, loss.metrics if loss else {})
        self._seeds: dict[tuple[int, int], Tensor] = {}

    def maker(
        self,
        stage: PipelineStage,
        microbatch: int,
        given: Sequence[Edge],
        added: Losses,
        companions: Sequence[Companion] = (),
    ) -> Callable[[Any], tuple[Any, ...]]:
        """What makes the roots of an output.

        Args:
            stage: where the output comes from.
            microbatch: of which.
            given: the values that the stage makes for others.
            added: filled while its forward runs.
            companions: told when the loss begins.
        """

        def make(output: Any) -> tuple[Any, ...]:
            roots = chosen(given, output, wired=stage.wired)
            if self._loss is None:
                return tuple(roots)
            own = None
            if stage.is_last:
                for companion in companions:
                    companion.loss(microbatch)
                own = self._main(self._loss, stage.index, microbatch, output)
            self.tally.add_losses(microbatch, stage.index, added)
            if len(added):
                own = added.total() if own is None else own + added.total()
            if own is not None:
                roots.append(own)
                self._seeds[stage.index, microbatch] = self._seed(own, microbatch)
            return tuple(roots)

        return make

    def _main(self, loss: Loss, stage: int, microbatch: int, output: Any) -> Tensor:
        if self.weights.shares[microbatch]:
            target = _saveable(self._targets[microbatch])
            found = loss.of_microbatch(output, target)
            self.tally.measure(microbatch, stage, output, target)
        else:
            # A mean over nothing is no number, and its gradient is none either.
            found = nothing(output)
        self.tally.add_main(microbatch, stage, found)
        return found

    def _seed(self, root: Tensor, microbatch: int) -> Tensor:
        return torch.full_like(root.detach(), self.weights.seeds[microbatch])

    def seeds(self, stage: int, microbatch: int) -> list[Tensor]:
        """What backward starts with at the loss, where the stage has a part in it."""
        found = self._seeds.pop((stage, microbatch), None)
        return [] if found is None else [found]


def _saveable(target: Any) -> Any:
    """A target that autograd can keep for backward, as it cannot what was made in inference mode."""
    if torch.is_grad_enabled() and any(tensor.is_inference() for _, tensor in tensors_of(target)):
        return mapped(target, torch.clone)
    return target
