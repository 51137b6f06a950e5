"""The loss of a batch: from the losses of its microbatches, and from losses that the model adds itself.

A model may call :func:`add_loss` anywhere in its forward, such as for a router's balance or for deep
supervision. A pipeline adds the value to the loss of the microbatch, whichever stage makes the call; in a
plain loop, :func:`collect_losses` does so.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import cached_property
from math import inf
from typing import Any, Literal, NamedTuple, SupportsFloat, cast, get_args

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from penstock._engine.microbatches import Rules, labels_that_count
from penstock._engine.parallel import gathered
from penstock._engine.transport import Replicas
from penstock._engine.values import tensors_in
from penstock.errors import UsageError, listed
from penstock.schedule.base import whole_number

logger = logging.getLogger("penstock")

# ---- losses that a model adds in its forward


MAIN = "main"
"""The name under which the loss of ``loss_fn`` is reported."""


class Term(NamedTuple):
    """One added loss."""

    name: str
    value: Tensor
    weight: float


class Losses:
    """The losses that a model added during a forward.

    Attributes:
        differentiable: whether gradients were enabled when the forward began.
        terms: the added losses.
    """

    def __init__(self) -> None:
        self.differentiable = torch.is_grad_enabled()
        self.terms: list[Term] = []

    def __enter__(self) -> Losses:
        """Start a new collection of the losses given to :func:`add_loss`."""
        self.differentiable = torch.is_grad_enabled()
        self.terms = []
        self._token = _collected.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _collected.reset(self._token)

    def clear(self) -> None:
        """Forget all terms."""
        self.terms = []

    def total(self) -> Tensor:
        """The weighted sum of all terms; 0 if there are none."""
        return self.totals().get(MAIN, torch.zeros((), device="cpu"))

    def totals(self, apart: Collection[str] = ()) -> dict[str, Tensor]:
        """The weighted sums of terms: of each name in ``apart``, and of all others under ``"main"``."""
        sums: dict[str, Tensor] = {}
        for name, value, weight in self.terms:
            if weight:
                # Multiplied only here: a recomputed checkpoint must save the same tensors as its first run.
                group, term = name if name in apart else MAIN, value.reshape(()) * weight
                sums[group] = sums[group] + term if group in sums else term
        return sums

    def named(self) -> dict[str, Tensor]:
        """For each name, the sum of its terms without their weights, detached."""
        sums: dict[str, Tensor] = {}
        for name, value, _ in self.terms:
            term = value.detach().reshape(()).clone()
            sums[name] = sums[name] + term if name in sums else term
        return sums


_collected: ContextVar[Losses | None] = ContextVar("penstock_losses", default=None)


def collect_losses() -> Losses:
    """Collect the losses given to :func:`add_loss` in this context.

    ::

        with penstock.collect_losses() as losses:
            output = model(x)
        (loss_fn(output, target) + losses.total()).backward()
    """
    return Losses()


def add_loss(name: str, value: Tensor, weight: float = 1.0) -> None:
    """Add ``weight * value`` to the loss that is being computed.

    A model calls this in its forward. In a pipeline's stages and inside :func:`collect_losses` the value is
    added; elsewhere, such as when backward recomputes a forward, the call does nothing.

    Args:
        name: the name under which the value is reported, without its weight; values of one name are added
            up.
        value: a scalar tensor for one microbatch, a mean or a sum like the loss itself. If it is one over
            something else than the loss, such as other tokens, the loss's ``weight`` counts that by
            this name.
        weight: the factor of the value in the loss.

    Raises:
        UsageError: the value is not a scalar tensor, or gradients are disabled, so that it would train
            nothing.
    """
    if isinstance(value, Tensor) and has_torch_function_unary(value):
        # Between the units of a model, only the stage that has the value adds it.
        handle_torch_function(add_loss, (value,), name, value, weight)
        return
    losses = _collected.get()
    if losses is None:
        return
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise UsageError(f"add_loss({name!r}, ...) needs a scalar tensor, not {_size_shown(value)}")
    if not isinstance(name, str) or name == MAIN:
        raise UsageError(f"add_loss({name!r}, ...): the name must be a text other than {MAIN!r}")
    if losses.differentiable and weight and not torch.is_grad_enabled():
        raise UsageError(
            f"add_loss({name!r}, ...) was called with gradients disabled, so it would train nothing; call it "
            "outside of no_grad() and of checkpoints with use_reentrant=True, or with weight=0 to report it"
        )
    losses.terms.append(Term(name, gathered(value), float(weight)))


# ---- metrics


Metric = Callable[[Any, Any], Any]
"""``(output, target)`` -> a number, or a pair of a sum and the count that it is over."""
Number = float | Tensor


def metric_terms(name: str, result: Any, weight: float) -> tuple[Number, Number, float]:
    """A metric's result for a microbatch, as a numerator, a denominator, and the factor of both.

    Numbers are averaged over the microbatches by their weights, like a loss that is a mean. For pairs, the
    sum of all sums is divided by the sum of all counts.

    Raises:
        UsageError: the metric returned neither a number nor a pair of numbers.
    """
    if isinstance(result, tuple) and len(result) == 2 and all(map(_is_number, result)):
        return result[0], result[1], 1.0
    if _is_number(result):
        return result, 1.0, weight
    raise UsageError(
        f"the metric {name!r} must return a number or a pair of numbers, not {_size_shown(result)}"
    )


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)


def _size_shown(value: Any) -> Any:
    return list(value.shape) if isinstance(value, Tensor) else type(value).__name__


# ---- the loss of a batch, and how much each microbatch counts in it


Reduction = Literal["mean", "sum"]
"""Whether the loss of a microbatch is a mean or a sum over its items."""
LossOver = Literal["samples", "tokens", "batch"]
"""What a loss is a mean or a sum over, so that microbatches give that of the batch; or the batch itself."""
LossFunction = Callable[[Any, Any], Tensor]
"""``(output, target)`` of a microbatch -> its loss, a scalar tensor."""
OneWeight = float | Sequence[float] | Tensor | Callable[[Any], Any]
"""The weight of a batch, of each microbatch, or a function from a microbatch's target to its weight."""
LossWeight = OneWeight | Mapping[str, OneWeight | Literal["microbatch"]]
"""The weight of the loss, or weights by name: ``"main"`` for the loss, and names given to ``add_loss``."""
TotalWeight = float | Mapping[str, float]
"""What losses are divided by before backward: one number, or one for each name in ``weight``."""
_BY_MICROBATCH = "microbatch"
_MOST_LOSSES = 16
NonFinite = Literal["stop", "skip", "warn"]
"""What to do about a step whose loss or gradients are infinite or ``nan``."""


@dataclass(frozen=True)
class Weights:
    """How much each microbatch of a step counts.

    Attributes:
        counts: the weight of each microbatch.
        shares: the factor of each microbatch's loss in the loss of the batch.
        seeds: the factor of each microbatch's loss in backward.
        total: the sum of all weights, over all replicas.
        whole: the share and the seed of a loss that is computed once for the batch.
        added: the weights of the added losses that have weights of their own, by name.
    """

    counts: Sequence[float] = ()
    shares: Sequence[float] = ()
    seeds: Sequence[float] = ()
    total: float = 0.0
    whole: tuple[float, float] = (0.0, 0.0)
    added: Mapping[str, Weights] = field(default_factory=dict)

    def of_added(self, name: str) -> Weights:
        """The weights of an added loss."""
        return self.added.get(name, self)

    @property
    def mark(self) -> float:
        """A number that differs if gradients are scaled differently."""
        seeds = [*self.seeds, *(seed for of in self.added.values() for seed in of.seeds)]
        return sum([place * seed for place, seed in enumerate(seeds, start=1)])


@dataclass(frozen=True)
class Loss:
    """A loss function, and what its value means; ``Pipeline(loss_fn=)`` takes it.

    ::

        loss_fn = penstock.Loss(token_loss, weight=lambda target: (target != -100).sum())

    Args:
        function: ``(output, target) -> scalar``, called with those of a microbatch.
        reduction: whether the scalar is a ``"mean"`` or a ``"sum"`` over the items of a microbatch.
        weight: the number of items of a microbatch; by default its samples. A function of the target, such
            as one that counts valid tokens; or a number for the batch; or a list with one number for each
            microbatch. A sum is divided by the sum of the weights. Or a dict of such weights, for ``"main"``
            and for losses by the name that :func:`penstock.add_loss` was given: one that is not named counts
            by the weights of ``"main"``, and so does one of ``"microbatch"``, which says that this is meant,
            as for a balance of experts.
        over: ``"samples"``: the loss is a mean or a sum over samples, so that microbatches make up that of
            the batch. ``"tokens"``: over the labels of the target that are not -100; ``weight`` then counts
            them by default. ``"batch"``: it compares samples with each other, as contrastive losses do, and
            is computed once on the outputs of all microbatches.
        metrics: functions by name, ``(output, target)`` -> a number, which is averaged by the weights, or a
            pair of a sum and the count that it is over. They come back in ``result.metrics``.
        nonfinite: what to do about a step whose loss or gradients are not finite: ``"stop"`` raises;
            ``"skip"`` drops all gradients, also those that earlier steps have added up; ``"warn"`` only logs
            it: with the next step where one process has all ranks, on a GPU, so that the host does not wait
            for each step.
        target: the name of an argument of the model that is also the target, where a call is given none.
        check: whether the first step compares the loss of a few rows of two microbatches together with those
            of their own, for which it calls the function four more times; or, where the model's forward
            computes the loss, that of the first microbatch with that of its halves. False takes the losses of
            microbatches as they are.

    Raises:
        UsageError: an option has an invalid value.
    """

    function: LossFunction
    _: KW_ONLY
    reduction: Reduction = "mean"
    weight: LossWeight | None = None
    over: LossOver = "samples"
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    nonfinite: NonFinite = "stop"
    target: str | None = None
    check: bool = True

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Call the function itself, as a plain loop does."""
        return self.function(output, target)

    def __post_init__(self) -> None:
        check_function("loss_fn", self.function)
        if not isinstance(self.metrics, Mapping):
            raise UsageError(f"metrics={self.metrics!r}: must be functions by name, in a dict")
        for name, metric in self.metrics.items():
            check_function(f"metrics[{name!r}]", metric)
        _check_choice("reduction", self.reduction, Reduction)
        _check_choice("over", self.over, LossOver)
        _check_choice("nonfinite", self.nonfinite, NonFinite)
        if not isinstance(self.target, str | None):
            raise UsageError(f"target={self.target!r}: must name an argument of the model")
        if not isinstance(self.check, bool):
            raise UsageError(f"check={self.check!r}: must be True or False")
        for name, weight in _by_name(self.weight).items():
            is_text = isinstance(weight, str | bytes)
            fits = callable(weight) or isinstance(weight, SupportsFloat | Sequence)
            may_be = weight is None if name == MAIN else weight == _BY_MICROBATCH
            if not may_be and (is_text or not fits):
                also = (
                    ""
                    if name == MAIN
                    else f", or {_BY_MICROBATCH!r}, to count as the main loss does"
                )
                raise UsageError(
                    f"{_shown('weight', self.weight, name)}={weight!r} of the loss: must be a number for the "
                    f"batch, a list of one for each microbatch, or a function of the target{also}"
                )


def _check_choice(name: str, value: Any, choices: Any) -> None:
    *others, last = map(repr, get_args(choices))
    if value not in get_args(choices):
        raise UsageError(f"{name}={value!r}: must be {', '.join(others)} or {last}")


@dataclass(frozen=True, kw_only=True)
class StepLoss(Loss):
    """A :class:`Loss` in a step, with what else decides how much each microbatch counts.

    Backward of a microbatch starts from the microbatch's weight, so that the microbatches' gradients add up
    to those of the batch, and are never rescaled afterwards.

    Args:
        accumulate: the number of steps whose gradients together equal those of one large batch.
        replicas: the pipelines that train the same weights on other data.
        total_weight: what the loss is divided by in backward, in place of the weight of the batch; by name
            if ``weight`` is.
        factor: the factor of a loss scaler.
        rules: the rules by which batches are split.

    Raises:
        UsageError: an option has an invalid value.
    """

    accumulate: int = 1
    replicas: Replicas = field(default_factory=Replicas)
    total_weight: TotalWeight | None = None
    factor: float = 1.0
    rules: Rules | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if whole_number("accumulate", self.accumulate) < 1:
            raise UsageError(f"accumulate={self.accumulate}: must be at least 1 step")
        totals = {} if self.total_weight is None else _by_name(self.total_weight)
        for name, total in totals.items():
            if not (isinstance(total, SupportsFloat) and 0 <= float(total) < inf):
                raise UsageError(
                    f"{_shown('total_weight', self.total_weight, name)}={total!r}: must be a number of at "
                    "least 0"
                )
        if totals and totals.keys() != self.weights.keys():
            raise UsageError(
                f"total_weight is given for {[*totals]}, and losses are weighted by themselves under "
                f"{[*self.weights]}: give total_weight= a dict with a number for each of these"
            )

    @cached_property
    def weights(self) -> dict[str, OneWeight | None]:
        """The weight of the loss itself, as ``"main"``, and of each added loss that has one of its own."""
        weights = {MAIN: None, **_by_name(self.weight)}
        if self.over == "tokens" and weights[MAIN] is None:
            weights[MAIN] = _labels_of
        return {
            name: weight.tolist() if isinstance(weight, Tensor) else weight
            for name, weight in weights.items()
            if not isinstance(weight, str)
        }

    @cached_property
    def _in_steps(self) -> dict[tuple[int | None, float], StepLoss]:
        """The losses of steps that say nothing of weights: one object for those that say the same."""
        return {}

    @cached_property
    def asks_targets(self) -> bool:
        """Whether how much microbatches count depends on the numbers in their targets."""
        return any(map(callable, self.weights.values()))

    def is_by_custom(self, name: str) -> bool:
        """Tell whether an added loss is said to be one of each microbatch by itself."""
        return isinstance(_by_name(self.weight).get(name), str)

    def warn_of_unknown(self, names: Iterable[str]) -> None:
        """Log weights by a name that no loss of a step has."""
        unknown = [*(_by_name(self.weight).keys() - {MAIN, *names})]
        if unknown:
            logger.warning(
                "penstock: weight= of the loss names %s, and no such loss was added in the first step; there "
                "are %s. A name is %r, for the loss itself, or that in penstock.add_loss(name, ...)",
                listed(sorted(unknown)), listed(names), MAIN,
            )  # fmt: skip

    @classmethod
    def for_steps(
        cls,
        loss: LossFunction | Loss,
        replicas: Replicas | None = None,
        rules: Rules | None = None,
    ) -> StepLoss:
        """The loss of a Pipeline's steps, from the ``loss_fn`` that the user gave."""
        loss = loss if isinstance(loss, Loss) else Loss(loss)
        said = {one.name: getattr(loss, one.name) for one in fields(Loss)}
        return cls(**said, replicas=replicas or Replicas(), rules=rules)

    def in_step(
        self,
        loss_weight: LossWeight | None = None,
        accumulate: int | None = None,
        total_weight: TotalWeight | None = None,
        factor: float = 1.0,
    ) -> StepLoss:
        """The loss of one step, with what its arguments say.

        Raises:
            UsageError: the arguments are wrong or contradict each other.
        """
        if accumulate is not None:
            accumulate = whole_number("accumulate", accumulate)
        key = accumulate, factor
        # What the user may change in place is read anew in each step.
        is_held = isinstance(self.weight, Sequence | Mapping | Tensor)
        is_usual = loss_weight is None and total_weight is None and not is_held
        if is_usual and key in self._in_steps:
            return self._in_steps[key]
        options: dict[str, Any] = {}
        if loss_weight is not None:
            by_name = {**_by_name(self.weight), **_by_name(loss_weight)}
            options["weight"] = by_name if by_name.keys() - {MAIN} else by_name[MAIN]
        if total_weight is not None:
            options |= {"accumulate": 1, "total_weight": total_weight}
        if accumulate is not None:
            options["accumulate"] = accumulate
        says_more = options or factor != 1 or is_held
        loss = replace(self, factor=factor, **options) if says_more else self
        if loss.accumulate > 1 and total_weight is not None:
            raise UsageError(
                "give accumulate= or total_weight=, not both: each says what the loss is divided by"
            )
        if loss.accumulate > 1 and any(weight is not None for weight in loss.weights.values()):
            raise UsageError(
                "accumulate= with weights of the loss: those of the other steps are not known; give "
                "total_weight=, which is the weight of all of them together, or give all batches in one step"
            )
        if is_usual:
            if len(self._in_steps) == _MOST_LOSSES:
                self._in_steps.clear()
            self._in_steps[key] = loss
        return loss

    def counts(
        self, samples: Sequence[int], targets: Sequence[Any], name: str = MAIN
    ) -> list[float]:
        """The weight of each microbatch, for the loss itself or for an added one.

        By default it is the number of samples; a single number is divided in proportion to them.

        Args:
            samples: the samples of each microbatch; if all are 0, nothing is split, and all count the same.
            targets: the target of each microbatch.
            name: the name of the loss.

        Raises:
            UsageError: a weight is negative or no number, or not every microbatch has one.
        """
        weight = self.weights[name]
        if callable(weight):
            return _checked_counts([weight(target) for target in targets])
        if isinstance(weight, Sequence):
            if len(weight) != len(samples):
                raise UsageError(
                    f"weights of the loss: {len(weight)} numbers for {len(samples)} microbatches; "
                    "give one for each, one for the batch, or a function of the target"
                )
            return _checked_counts(weight)
        counts = [float(number) for number in samples] if any(samples) else [1.0] * len(samples)
        if weight is None:
            return counts
        return _checked_counts([float(weight) * number / sum(counts) for number in counts])

    def weigh(self, counts: Mapping[str, Sequence[float]], totals: Sequence[float]) -> Weights:
        """The factor of each microbatch's loss.

        For a mean, it is the microbatch's weight divided by the total. A sum is divided only if the user
        gives weights. If all weights are 0, so are the loss and its gradients.

        Args:
            counts: the weights of the microbatches, for the loss itself and for added ones that have some.
            totals: for each of these, the sum of its weights over all replicas.
        """
        main, *added = (
            self._weighed(name, of, total)
            for (name, of), total in zip(counts.items(), totals, strict=True)
        )
        return replace(main, added=dict(zip([*counts][1:], added, strict=True))) if added else main

    def _weighed(self, name: str, counts: Sequence[float], total: float) -> Weights:
        divides = self.reduction == "mean" or self.weights[name] is not None
        parts = counts if self.reduction == "mean" else [1.0] * len(counts)
        divisor = total * self.accumulate if divides else 1.0
        if self.total_weight is not None:
            divisor = float(_by_name(self.total_weight)[name])
        factor = self.factor * (self.replicas.number if self.replicas.averaged else 1)
        shown = total if divides else 1.0
        seeds = [factor * part for part in _over(parts, divisor)]
        batch = [sum(counts) if self.reduction == "mean" else 1.0]
        whole = _over(batch, shown)[0], factor * _over(batch, divisor)[0]
        return Weights(counts, _over(parts, shown), seeds, total, whole)

    def of_microbatch(self, output: Any, target: Any) -> Tensor:
        """The unscaled loss of a microbatch.

        Raises:
            UsageError: the function did not return a scalar tensor, or returned one without a gradient.
        """
        loss = self.function(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UsageError(f"loss_fn must return a scalar tensor, not {_size_shown(loss)}")
        if not loss.requires_grad and torch.is_grad_enabled() and _requires_grad(output):
            raise UsageError(
                "loss_fn returned a loss that requires no grad for an output that does, so it would train "
                "nothing; leave out detach(), item() and the like, and for a constant add output.sum() * 0"
            )
        return loss


def _labels_of(target: Any) -> int:
    """The number of labels of a target that are not -100, for a loss over tokens."""
    counts = [count for count in map(labels_that_count, tensors_in(target)) if count is not None]
    if len(counts) != 1:
        raise UsageError(
            'over="tokens" counts the labels of the target that are not -100, and the target holds '
            f"{len(counts)} tensors of whole numbers, not one; say weight=, a function of the target that "
            "counts them"
        )
    return counts[0]


def _by_name(option: Any) -> dict[str, Any]:
    """An option for each loss, by its name; if it is not given by names, it is that of the main one."""
    return dict(option) if isinstance(option, Mapping) else {MAIN: option}


def _shown(keyword: str, option: Any, name: str) -> str:
    return f"{keyword}[{name!r}]" if isinstance(option, Mapping) else keyword


def _checked_counts(items: Sequence[Any]) -> list[float]:
    """Check weights and make them floats; tensors that hold one number move to the CPU together."""
    if items and all(isinstance(item, Tensor) and item.numel() == 1 for item in items):
        items = torch.stack([item.detach().reshape(()) for item in items]).tolist()
    try:
        counts = [float(item) for item in items]
    except (TypeError, ValueError, RuntimeError) as error:
        kinds = sorted({type(item).__name__ for item in items})
        raise UsageError(
            f"the weight of the loss gave {', '.join(kinds)}; it must return a number"
        ) from error
    for index, number in enumerate(counts):
        if not 0 <= number < inf:
            raise UsageError(
                f"the weight of the loss of microbatch {index} is {number}; it must be a number of at least 0"
            )
    return counts


def _over(parts: Sequence[float], divisor: float) -> list[float]:
    return [part / divisor if divisor else 0.0 for part in parts]


def check_function(name: str, function: Any) -> None:
    """Check that a loss function or metric, given as the argument ``name``, takes an output and a target.

    Raises:
        UsageError: it does not.
    """
    if isinstance(function, type) or not callable(function):
        hint = (
            f"; give an object of it, {function.__name__}()" if isinstance(function, type) else ""
        )
        raise UsageError(f"{name}={function!r}: must be a function (output, target){hint}")
    try:
        inspect.signature(function).bind(None, None)
    except ValueError:
        return  # some functions that are not written in Python have no signature
    except TypeError as error:
        raise UsageError(
            f"{name} is called with (output, target), which it does not accept: {error}"
        ) from None


def _requires_grad(output: Any) -> bool:
    return any(tensor.requires_grad for tensor in tensors_in(output))


def zero_loss(output: Any, target: Any = None) -> Tensor:
    """A loss of 0 whose gradient is 0, even if the output holds nan."""
    tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    loss: Tensor = (
        cast("Any", _ZeroLoss).apply(*tensors) if tensors else torch.zeros((), device="cpu")
    )
    return loss


class _ZeroLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return tuple(map(torch.zeros_like, ctx.saved_tensors))
