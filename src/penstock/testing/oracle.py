"""The gradient oracle: it compares a pipelined step with the unsplit model in a plain loop."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock._engine.microbatches import Microbatches, RulesGiven
from penstock._engine.runtime import Loss, LossFunction, collect_losses
from penstock.errors import UsageError
from penstock.partition import randomness
from penstock.pipeline import Pipeline
from penstock.pipeline.plan import Stages
from penstock.schedule import Schedule

SEED = 11
"""The seed of the random numbers, in the pipeline and in a plain loop over microbatches."""
LIMIT = 0.1
"""The norm to which gradients are clipped before an optimizer step."""
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Case:
    """A model, a batch and a loss.

    Args:
        model: the model, which is copied and not changed.
        args: its positional arguments; or :class:`penstock.Microbatches`, which the plain loop also runs one
            by one, with the same random numbers.
        target: the target of the loss; for microbatches a list.
        loss_fn: ``(output, target) -> scalar``, or a :class:`penstock.Loss`.
        kwargs: the model's arguments by name.
        split: how arguments are split.
    """

    model: nn.Module
    args: Sequence[Any]
    target: Any
    loss_fn: LossFunction | Loss
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    split: RulesGiven | None = None

    @property
    def loss(self) -> Loss:
        """The loss, which reports values that are not finite in place of stopping."""
        loss = self.loss_fn if isinstance(self.loss_fn, Loss) else Loss(self.loss_fn)
        return replace(loss, nonfinite="warn")


@dataclass(frozen=True)
class Verdict:
    """What the pipeline computed, and what it should have computed.

    Attributes:
        loss: the pipeline's loss.
        expected_loss: the plain loop's loss.
        gradients: the gradients of the parameters in this process, by name.
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
            AssertionError: the loss or a gradient differs by more; the message lists all that do.
        """
        wrong = {name: gap for name, gap in self.differences().items() if not gap <= tolerance}
        if wrong:
            raise AssertionError(
                f"differs from the unsplit model by more than {tolerance}: {wrong}"
            )

    def digest(self) -> dict[str, str]:
        """A text for the loss and for each gradient; two texts are equal exactly if all bits are."""
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
    mesh: Any = None,
    steps: int = 1,
    optimizer: MakeOptimizer | None = None,
) -> Verdict:
    """Run a case through a pipeline and through a plain loop.

    Args:
        case: the case to run.
        schedule: as for :class:`penstock.Pipeline`, like the next three.
        microbatches: the number of microbatches.
        ranks: the number of ranks.
        stages: how the model is cut.
        mesh: as for the Pipeline; each process calls this, and gets a verdict on its own stages.
        steps: how many steps to run; the verdict is on the last one.
        optimizer: makes the optimizer that trains between the steps, with clipped gradients. Without it,
            gradients add up.
    """
    pipe = Pipeline(
        copy.deepcopy(case.model),
        schedule=schedule,
        ranks=ranks,
        microbatches=microbatches,
        stages=stages,
        loss_fn=case.loss,
        split=case.split,
        mesh=mesh,
        seed=SEED,
    )
    with pipe:
        return judge(pipe, case, steps=steps, optimizer=optimizer)


def judge(
    pipe: Pipeline, case: Case, *, steps: int = 1, optimizer: MakeOptimizer | None = None
) -> Verdict:
    """Run a case through a pipeline that you have made, and through a plain loop.

    Where the case has microbatches, the loop draws the random numbers of the pipeline.

    Args:
        pipe: the pipeline, without gradients, that cuts a copy of the case's model and has its loss. Each of
            its processes calls this, and gets a verdict on its own stages.
        case: the case to run.
        steps: how many steps to run; the verdict is on the last one.
        optimizer: makes the optimizer that trains between the steps, with clipped gradients. Without it,
            gradients add up.

    Raises:
        UsageError: the case's model has other parameters than the pipeline.
    """
    seed, first = pipe.randomness.seed, pipe.randomness.step
    trainer = optimizer(pipe.parameters()) if optimizer else None
    for step in range(steps):
        if step and trainer:
            pipe.clip_grad_norm_(LIMIT)
            _train(trainer)
        result = pipe.step(*case.args, target=case.target, **case.kwargs)
    gradients = {name: p.grad for name, p in pipe.weights.here.named_parameters()}
    # The pipeline knows its units when it is cut, as its first step does.
    draws = None if seed == "off" else _RandomNumbers(seed, first, pipe.units)
    loss, expected = _loop(case, steps, optimizer, draws)
    if unknown := sorted(gradients.keys() - expected.keys()):
        raise UsageError(
            f"the case's model has no parameter {', '.join(unknown)}; let the pipeline cut a copy of it"
        )
    return Verdict(result.loss, loss, gradients, {name: expected[name] for name in gradients})


def _train(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def plain_loop(
    case: Case, steps: int = 1, optimizer: MakeOptimizer | None = None
) -> tuple[float, dict[str, Tensor | None]]:
    """The loss and gradients of the unsplit model, with the losses that it adds.

    The loop runs all samples at once, or microbatches one by one where the case has them.

    Args:
        case: the case to run.
        steps: the number of steps.
        optimizer: makes the optimizer that trains between the steps.
    """
    return _loop(case, steps, optimizer, _RandomNumbers(SEED, 0, None))


class _RandomNumbers(NamedTuple):
    """The random numbers of a pipeline: its seed, the number of its first step, and its units."""

    seed: int
    first: int
    units: Sequence[str] | None

    def of(self, model: nn.Module, step: int, microbatch: int) -> AbstractContextManager[None]:
        step += self.first
        return randomness(model, seed=self.seed, step=step, microbatch=microbatch, units=self.units)


def _loop(
    case: Case, steps: int, optimizer: MakeOptimizer | None, draws: _RandomNumbers | None
) -> tuple[float, dict[str, Tensor | None]]:
    model = copy.deepcopy(case.model)
    trainer = optimizer(model.parameters()) if optimizer else None
    # A batch of all samples draws numbers that no microbatch would.
    draws = draws if _is_split(case) else None
    for step in range(steps):
        if step and trainer:
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            _train(trainer)
        loss = 0.0
        for index, part in enumerate(_parts(case)):
            with draws.of(model, step, index) if draws else nullcontext():
                loss += _train_on(case, model, part)
    return loss, {name: p.grad for name, p in model.named_parameters()}


def _train_on(case: Case, model: nn.Module, part: _Part) -> float:
    args, kwargs, target, share = part
    with collect_losses() as added:
        output = model(*args, **kwargs)
    loss = (case.loss.function(output, target) + added.total()) * share
    loss.backward()
    return float(loss.detach())


def _parts(case: Case) -> Iterator[_Part]:
    if not _is_split(case):
        yield case.args, case.kwargs, case.target, 1.0
        return
    parts = case.args[0].parts
    loss = case.loss
    weigh = loss.weight if callable(loss.weight) else None
    weights = [
        float(weigh(target)) if weigh else part.samples
        for part, target in zip(parts, case.target, strict=True)
    ]
    for part, target, weight in zip(parts, case.target, weights, strict=True):
        # A part of weight 0 may have no loss: a mean over nothing is NaN.
        if weight:
            share = weight / sum(weights) if loss.reduction == "mean" else 1.0
            yield part.args, part.kwargs, target, share


_Part = tuple[Sequence[Any], Mapping[str, Any], Any, float]
"""One call of the plain loop: arguments, arguments by name, target, and its share of the loss."""


def _is_split(case: Case) -> bool:
    return bool(case.args) and isinstance(case.args[0], Microbatches)
