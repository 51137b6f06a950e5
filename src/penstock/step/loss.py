"""The loss of a batch from the losses of its microbatches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict, cast, get_args

import torch
from torch import Tensor

from penstock.errors import UsageError
from penstock.schedule.placement import whole_number
from penstock.step.metrics import Metric
from penstock.step.weights import (
    LossWeight,
    Replicas,
    Scale,
    Weights,
    check_weight,
    count,
    weigh,
)
from penstock.values.trees import tensors_of

Reduction = Literal["mean", "sum"]
LossFunction = Callable[[Any, Any], Tensor]
NonFinite = Literal["stop", "skip", "warn"]


class LossOptions(TypedDict, total=False):
    """What a Pipeline is told about its loss.

    Attributes:
        reduction: whether ``loss_fn`` is a ``"mean"``, the default, or a ``"sum"``.
        loss_weight: over how many things a microbatch's loss is that mean or sum; by default its samples.
            A function of the target, such as its count of valid tokens, or a number for the batch, or a
            list of one for each microbatch. A sum is divided by the weights of all.
        metrics: by name, ``(output, target) -> number``, which is averaged by the weights, or a pair of a
            sum and how many things it is over. They come back in ``result.metrics``.
        accumulate: of how many steps the gradients are to equal those of one large batch.
        replicas: the pipelines that train the same weights on other data: a process group of the ranks
            at this place in each of them, or :class:`Replicas`.
        nonfinite: what becomes of a step whose loss or gradients are not finite: ``"stop"``, the default,
            raises; ``"skip"`` drops its gradients; ``"warn"`` only tells.
    """

    reduction: Reduction
    loss_weight: LossWeight | None
    metrics: Mapping[str, Metric] | None
    accumulate: int
    replicas: Any
    nonfinite: NonFinite


@dataclass(frozen=True)
class Loss:
    """A loss function, how it reduces over the samples of a batch, and what is measured beside it.

    Backward of a microbatch starts from its weight, so that the microbatches add up to the loss of the batch;
    gradients are never rescaled afterwards.

    Args:
        function: ``(output, target) -> scalar``.
        reduction: ``"mean"`` where it averages, ``"sum"`` where it adds up.
        weight: over how many things a microbatch's loss is a mean or a sum; by default its samples.
        metrics: by name, ``(output, target) -> number``, or a pair of a sum and how many it is over.
        accumulate: of how many steps the gradients are to equal those of one large batch.
        replicas: the other pipelines that train the same weights.
        nonfinite: what becomes of a step whose loss or gradients are not finite.

    Raises:
        UsageError: another reduction, or another word for what to do.
    """

    function: LossFunction
    reduction: Reduction = "mean"
    weight: LossWeight | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    accumulate: int = 1
    replicas: Replicas = field(default_factory=Replicas)
    nonfinite: NonFinite = "stop"

    def __post_init__(self) -> None:
        if self.reduction not in get_args(Reduction):
            raise UsageError(f"reduction={self.reduction!r}: must be 'mean' or 'sum'")
        if self.nonfinite not in get_args(NonFinite):
            raise UsageError(f"nonfinite={self.nonfinite!r}: must be 'stop', 'skip' or 'warn'")
        check_weight("loss_weight", self.weight)
        if whole_number("accumulate", self.accumulate) < 1:
            raise UsageError(f"accumulate={self.accumulate}: must be at least 1 step")
        _check_function("loss_fn", self.function)
        if not isinstance(self.metrics, Mapping):
            raise UsageError(f"metrics={self.metrics!r}: must be functions by name, in a dict")
        for name, metric in self.metrics.items():
            _check_function(f"metrics[{name!r}]", metric)

    def weighed(self, weight: LossWeight | None) -> Loss:
        """With other weights, where there are some."""
        return self if weight is None else replace(self, weight=weight)

    def scale(self, accumulate: int | None, total: float | None, factor: float) -> Scale:
        """What else the gradients of a step are scaled by.

        Args:
            accumulate: for this step, in place of the usual.
            total: what the loss is divided by.
            factor: of a loss scaler.

        Raises:
            UsageError: they contradict each other.
        """
        usual = self.accumulate if total is None else 1
        found = Scale(usual if accumulate is None else accumulate, total, factor)
        if self.weight is not None and found.accumulate > 1:
            raise UsageError(
                "accumulate= with loss_weight=: what this step weighs among the others is not known; give "
                "total_weight=, the weight of all of them, or all batches in one step"
            )
        return found

    def counts(self, samples: Sequence[int], targets: Sequence[Any]) -> list[float]:
        """The weight of each microbatch, from how many samples it has and its target."""
        return count(self.weight, samples, targets)

    def weights(self, counts: Sequence[float], scale: Scale | None = None) -> Weights:
        """What each microbatch's loss is multiplied by, see :func:`penstock.step.weights.weigh`.

        Args:
            counts: the weight of each microbatch.
            scale: what else gradients are scaled by.
        """
        return weigh(
            self.reduction,
            counts,
            given=self.weight is not None,
            scale=scale,
            replicas=self.replicas,
        )

    def of_microbatch(self, output: Any, target: Any) -> Tensor:
        """The loss of a microbatch, not scaled.

        Raises:
            UsageError: the function gave no scalar tensor, or one that no gradient leads back from.
        """
        loss = self.function(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(f"loss_fn must give a scalar tensor, not {found}")
        if _requires_grad(output) and torch.is_grad_enabled() and not loss.requires_grad:
            raise UsageError(
                "loss_fn gave a loss that requires no grad for an output that does, so nothing would be "
                "trained; leave out detach(), item() and the like, and for a constant add output.sum() * 0"
            )
        return loss


def _check_function(name: str, function: Any) -> None:
    """Check that a function can be called with an output and a target.

    Raises:
        UsageError: it cannot; the message names the argument that it was given as.
    """
    if isinstance(function, type) or not callable(function):
        made = (
            f"; give an object of it, {function.__name__}()" if isinstance(function, type) else ""
        )
        raise UsageError(f"{name}={function!r}: must be a function (output, target){made}")
    try:
        inspect.signature(function).bind(None, None)
    except ValueError:
        return  # some functions that are not written in Python do not tell what they take
    except TypeError as error:
        raise UsageError(
            f"{name} is called with (output, target), which it refuses: {error}"
        ) from None


def _requires_grad(output: Any) -> bool:
    return any(tensor.requires_grad for _, tensor in tensors_of(output))


def nothing(output: Any) -> Tensor:
    """A loss of 0 whose gradient is 0, whatever stands in the output."""
    tensors = [tensor for _, tensor in tensors_of(output) if tensor.requires_grad]
    found: Tensor = cast("Any", _Nothing).apply(*tensors) if tensors else torch.zeros(())
    return found


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return tuple(map(torch.zeros_like, ctx.saved_tensors))
