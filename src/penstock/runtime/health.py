"""Whether what a step makes is finite, and where it first is not.

During the step each value and gradient that leaves a stage is only added up, which waits for no device. The
sums are looked at after the step, and only where the loss or the gradients' norm is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.stage import PipelineStage
from penstock.values import flatten

OUTPUT, LOSS, GRADIENT, WEIGHTS = range(4)
"""What can be not finite, in the order in which a step makes it."""


class Spot(NamedTuple):
    """Where something is not finite; the earliest compares as the smallest.

    Args:
        kind: what it is.
        microbatch: of which; 0 for the gradients of weights.
        distance: how far the stage is along the way, forward or back.
        stage: which.
        rank: where it lives.
    """

    kind: int
    microbatch: int
    distance: int
    stage: int
    rank: int

    @property
    def action(self) -> str:
        """The action that made it."""
        op = "B" if self.kind in (GRADIENT, WEIGHTS) else "F"
        return f"{self.stage}{op}{self.microbatch}"

    def __str__(self) -> str:
        at = f"stage {self.stage}, rank {self.rank}"
        if self.kind == WEIGHTS:
            return f"the gradients of the weights of {at}"
        return f"{_WORDS[self.kind]} of microbatch {self.microbatch} in {at}, action {self.action}"


_WORDS = {
    OUTPUT: "the output",
    LOSS: "the loss",
    GRADIENT: "the gradient of the inputs",
}


class Health:
    """What one rank sees in one training step.

    Args:
        rank: which.
        stages: how many the pipeline has.
    """

    def __init__(self, rank: int, stages: int) -> None:
        self._rank = rank
        self._stages = stages
        self._sums: list[tuple[Spot, Tensor]] = []

    def forward(self, stage: int, microbatch: int, output: Any) -> None:
        """A stage has given its output."""
        spot = Spot(OUTPUT, microbatch, stage, stage, self._rank)
        self._note(spot, flatten(output)[0])

    def backward(self, stage: int, microbatch: int, gradients: Sequence[Tensor | None]) -> None:
        """A stage has given the gradients of its inputs."""
        spot = Spot(GRADIENT, microbatch, self._stages - stage, stage, self._rank)
        self._note(spot, gradients)

    def _note(self, spot: Spot, tensors: Iterable[Tensor | None]) -> None:
        for tensor in tensors:
            if type(tensor) is Tensor and tensor.is_floating_point():
                self._sums.append((spot, _sum_of(tensor)))

    def spots(self, losses: Sequence[Tensor], stages: Iterable[PipelineStage]) -> list[Spot]:
        """Everything that is not finite here.

        Args:
            losses: of the microbatches, where the last stage is here.
            stages: those of this rank.
        """
        last = self._stages - 1
        found = [spot for spot, total in self._sums if not bool(total.isfinite())]
        for microbatch, loss in enumerate(losses):
            if not bool(loss.isfinite()):
                found.append(Spot(LOSS, microbatch, last, last, self._rank))
        for stage in stages:
            if not has_finite_gradients([stage]):
                distance = self._stages - stage.index
                found.append(Spot(WEIGHTS, 0, distance, stage.index, self._rank))
        return found


def _sum_of(tensor: Tensor) -> Tensor:
    """A number that is finite if all are; small types add up in a larger one, so as not to overflow."""
    wide = torch.float32 if tensor.itemsize < 4 else None
    return tensor.detach().sum(dtype=wide)


def has_finite_gradients(stages: Iterable[PipelineStage]) -> bool:
    """Whether the norm of the weights' gradients is finite; of sharded ones their owners find out."""
    gradients = [
        parameter.grad
        for stage in stages
        for parameter in stage.module.parameters()
        if type(parameter.grad) is Tensor and not parameter.grad.is_sparse
    ]
    return not gradients or bool(nn.utils.get_total_norm(gradients).isfinite())


class Trouble(NamedTuple):
    """A step whose loss or gradients are not finite.

    Args:
        loss: of the batch.
        first: where it began, if that was in this pipeline.
    """

    loss: float
    first: Spot | None

    def __str__(self) -> str:
        gradients = "" if not math.isfinite(self.loss) else ", but gradients are not finite"
        if self.first is None:
            return f"the loss is {self.loss:g}{gradients}; it began in another replica"
        return f"the loss is {self.loss:g}{gradients}; the first that is not finite is {self.first}"
