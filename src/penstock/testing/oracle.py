"""The gradient oracle: it compares a pipelined step with the unsplit model in a plain loop."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from penstock.pipeline import Pipeline
from penstock.pipeline.plan import Stages
from penstock.runtime import LossFunction, LossWeight, Reduction, collect_losses
from penstock.schedule import Schedule
from penstock.values import Rules


@dataclass(frozen=True)
class Case:
    """A model, a batch and a loss.

    Args:
        model: the model; it is copied, and not changed itself.
        args: its positional arguments.
        target: what the loss compares with.
        loss_fn: ``(output, target) -> scalar``.
        reduction: whether that is a mean or a sum over samples.
        kwargs: the model's arguments by name.
        rules: how arguments are split.
        loss_weight: over how many things a microbatch's loss is a mean, such as the tokens of its target that
            count; the loss of the batch is the mean over all of these.
    """

    model: nn.Module
    args: Sequence[Any]
    target: Any
    loss_fn: LossFunction
    reduction: Reduction = "mean"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    rules: Rules | None = None
    loss_weight: LossWeight | None = None


@dataclass(frozen=True)
class Verdict:
    """What the pipeline computed, and what it should have computed.

    Attributes:
        loss: the pipeline's loss.
        expected_loss: the plain loop's loss.
        gradients: the gradients of the parameters that are in this process, by name.
        expected: the gradients of the same parameters in the plain loop.
    """

    loss: float
    expected_loss: float
    gradients: dict[str, Tensor | None]
    expected: dict[str, Tensor | None]

    def differences(self) -> dict[str, float]:
        """The largest absolute difference of the loss and of each gradient."""
        gaps = {name: _distance(grad, self.expected[name]) for name, grad in self.gradients.items()}
        return {"loss": abs(self.loss - self.expected_loss), **gaps}

    def check(self, tolerance: float) -> None:
        """Check that nothing differs by more than the tolerance.

        Raises:
            AssertionError: something does; the message lists it.
        """
        wrong = {name: gap for name, gap in self.differences().items() if not gap <= tolerance}
        if wrong:
            raise AssertionError(
                f"differs from the unsplit model by more than {tolerance}: {wrong}"
            )

    def digest(self) -> dict[str, str]:
        """For the loss and each gradient a text, which is equal for two of them exactly if all bits are."""
        prints = {name: _fingerprint(grad) for name, grad in self.gradients.items()}
        return {"loss": self.loss.hex(), **prints}


def _distance(gradient: Tensor | None, expected: Tensor | None) -> float:
    if gradient is None or expected is None:
        return 0.0 if gradient is expected else float("inf")
    gradient, expected = gradient.to_dense(), expected.to_dense()
    return float((gradient - expected).abs().max()) if gradient.numel() else 0.0


def _fingerprint(gradient: Tensor | None) -> str:
    if gradient is None:
        return "none"
    raw = gradient.detach().to_dense().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()


def compare(  # noqa: PLR0913 - what a user of Pipeline chooses, by name
    case: Case,
    *,
    schedule: str | PathLike[str] | Schedule,
    microbatches: int | None = None,
    ranks: int | None = None,
    stages: Stages = None,
    group: Any = None,
    steps: int = 1,
) -> Verdict:
    """Run a case through a pipeline and through a plain loop.

    Args:
        case: what to run.
        schedule: as for :class:`penstock.Pipeline`, like the next three.
        microbatches: how many microbatches.
        ranks: how many ranks.
        stages: how the model is cut.
        group: the process group; each of its processes calls this, and gets a verdict on its own stages.
        steps: how many steps to run, without zeroing gradients between them.
    """
    expected_loss, expected = plain_loop(case, steps)
    pipe = Pipeline(
        copy.deepcopy(case.model),
        schedule=schedule,
        ranks=ranks,
        microbatches=microbatches,
        stages=stages,
        loss_fn=case.loss_fn,
        reduction=case.reduction,
        rules=case.rules,
        loss_weight=case.loss_weight,
        group=group,
        # What is not finite is for the verdict to tell.
        nonfinite="warn",
    )
    with pipe:
        for _ in range(steps):
            result = pipe.step(*case.args, target=case.target, **case.kwargs)
        gradients = {name: p.grad for name, p in pipe.named_parameters()}
    return Verdict(result.loss, expected_loss, gradients, {n: expected[n] for n in gradients})


def plain_loop(case: Case, steps: int = 1) -> tuple[float, dict[str, Tensor | None]]:
    """The loss and gradients of the unsplit model for all samples at once, with the losses that it adds."""
    model = copy.deepcopy(case.model)
    for _ in range(steps):
        with collect_losses() as added:
            output = model(*case.args, **case.kwargs)
        loss = case.loss_fn(output, case.target) + added.total()
        loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}
