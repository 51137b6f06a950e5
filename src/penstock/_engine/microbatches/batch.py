"""A batch that is split, by the library or by the user."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock._engine.values import tensors_in
from penstock.errors import MicrobatchError


@dataclass
class Microbatch:
    """One part of a batch.

    Args:
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        samples: the number of samples that it holds; 0 if no argument is split.
        local: keyword arguments of any type that stay in this process and are not described to others.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    samples: int
    local: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """What a process brings to a call of the pipeline.

    Args:
        parts: the microbatches; ``None`` if this process was given no arguments.
        targets: for each microbatch, what the loss compares with; ``None`` if no target was given.
        samples: the number of samples of each microbatch; ``None`` if that is not known here.
        count: the number of microbatches; ``None`` if that is not known here.
        presplit: whether the user has split the batch; its outputs are then not merged either.
        counted: whether the samples are those of first tensors, since nobody said what counts them.
        weights: how much each microbatch counts in a mean, where that is not its samples.
        dim: the dimension of the tokens, if the batch is a packed row.
        sequences: the number of sequences of each microbatch, if the batch is a packed row.
        look: equal for batches of one pipeline that differ only in their data; ``None`` if that is unknown.
    """

    parts: Sequence[Microbatch] | None = None
    targets: Sequence[Any] | None = None
    samples: Sequence[int] | None = None
    count: int | None = None
    presplit: bool = False
    counted: bool = False
    weights: Sequence[int] | None = None
    dim: int | None = None
    sequences: Sequence[int] | None = None
    look: Hashable | None = None


class _Missing:
    """The type of :data:`MISSING`."""

    def __repr__(self) -> str:
        return "nothing"


MISSING: Any = _Missing()
"""Stands for an argument that was not passed, since ``None`` is a value that may be passed."""


class Microbatches:
    """A batch that is already split, possibly into microbatches of different lengths.

    It takes the place of the model's arguments: ``pipe.step(Microbatches(calls), target=targets)``, where
    ``targets`` is a list with one target for each. A rank that needs only the targets is given
    ``target=Microbatches(targets)``.

    Args:
        calls: the arguments of each microbatch: a tuple, a dict by name, or the only argument itself.
        targets: what the loss compares with in each microbatch; may be passed as ``target=`` instead.
        samples: the number of samples of each, which is its weight in a mean; by default, the size of its
            target's first tensor in dimension 0, or of its own where there is none in the target.

    Raises:
        MicrobatchError: there are no microbatches, or the lists have different lengths.
    """

    def __init__(
        self,
        calls: Sequence[Any],
        *,
        targets: Sequence[Any] | None = None,
        samples: Sequence[int] | None = None,
    ) -> None:
        if not calls:
            raise MicrobatchError("Microbatches([]) holds no microbatches; give at least one")
        lists = {"samples": samples, "targets": targets}
        wrong = {n: len(x) for n, x in lists.items() if x is not None and len(x) != len(calls)}
        if wrong:
            raise MicrobatchError(f"{len(calls)} microbatches, but {wrong}; give one for each")
        self.calls = calls
        self.targets = targets
        split = [_arguments(call) for call in calls]
        counts = samples or [count_samples(pair) for pair in split]
        self._counted = not samples
        self.parts = tuple(
            Microbatch(args, kwargs, count)
            for (args, kwargs), count in zip(split, counts, strict=True)
        )

    def __len__(self) -> int:
        return len(self.parts)

    def batch(self, target: Any) -> Batch:
        """Return what the pipeline takes.

        Raises:
            MicrobatchError: targets were passed twice, or not one for each microbatch.
        """
        if target is not MISSING and target is not None and self.targets is not None:
            raise MicrobatchError(
                "targets were passed both in Microbatches(targets=...) and as target=; pass one of them"
            )
        targets = target if self.targets is None else self.targets
        if targets is None:
            targets = [None] * len(self)
        samples = [part.samples for part in self.parts]
        batch = Batch(self.parts, None, samples, len(self), presplit=True, counted=self._counted)
        if targets is MISSING:
            return batch
        if not isinstance(targets, Sequence) or len(targets) != len(self):
            what = len(targets) if isinstance(targets, Sequence) else type(targets).__name__
            raise MicrobatchError(
                f"{len(self)} microbatches, but target={what}; give a list of one target for each"
            )
        samples = samples_by_targets(targets, samples) if self._counted else samples
        return replace(batch, targets=targets, samples=samples)


def _arguments(call: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if type(call) is tuple:
        return call, {}
    if type(call) is dict and all(isinstance(key, str) for key in call):
        return (), call
    return (call,), {}


def count_samples(value: Any) -> int:
    """How many samples a value holds that no rule says: the size of its first tensor in dimension 0."""
    return next((tensor.shape[0] for tensor in tensors_in(value) if tensor.dim()), 0)


def samples_by_targets(targets: Sequence[Any], samples: Sequence[int]) -> list[int]:
    """The samples of microbatches by their targets, or as they are if these do not say.

    Arguments may be larger than what they are about: a graph has one target, and many nodes.
    """
    of_targets = [count_samples(target) for target in targets]
    return of_targets if of_targets and all(of_targets) else list(samples)
