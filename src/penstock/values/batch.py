"""What a batch is once it is split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from penstock.errors import MicrobatchError
from penstock.values.trees import tensors_of


@dataclass(frozen=True)
class Microbatch:
    """One part of a batch.

    Args:
        args: positional arguments of the model.
        kwargs: arguments by name.
        samples: how many samples of the batch it holds; 0 where no argument is split.
        kind: parts of one batch and kind are alike in all but data; ``None`` says nothing.
        aside: arguments by name that stay in this process, whatever they are: no other is told of them.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    samples: int
    kind: int | None = None
    aside: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """What a process brings to a call of the pipeline.

    Args:
        parts: the microbatches; ``None`` where this process was given no argument.
        targets: for each microbatch, what the loss compares with; ``None`` where none was given.
        samples: how many samples each microbatch holds; ``None`` where that is not known here.
        count: how many microbatches there are; ``None`` where that is not known here.
        ready: whether the user split it: its outputs are not put together either.
    """

    parts: Sequence[Microbatch] | None = None
    targets: Sequence[Any] | None = None
    samples: Sequence[int] | None = None
    count: int | None = None
    ready: bool = False


class _Missing:
    """Nothing was given; ``None`` is something."""

    def __repr__(self) -> str:
        return "nothing"


MISSING: Any = _Missing()


class Microbatches:
    """A batch that is split already, also into microbatches of different lengths.

    It stands where the arguments of the model would: ``pipe.step(Microbatches(calls), target=targets)``
    with a list of one target for each. To a rank that needs no arguments, the targets alone are given as
    ``target=Microbatches(targets)``.

    Args:
        calls: the arguments of each microbatch: a tuple of them, a dict of them by name, or the only one.
        targets: what the loss compares with in each microbatch; may be given as ``target=`` instead.
        samples: how many samples each holds, which is its weight in a mean; by default what its first
            tensor has in dimension 0.

    Raises:
        MicrobatchError: there are none, or lists of different lengths.
    """

    def __init__(
        self,
        calls: Sequence[Any],
        *,
        targets: Sequence[Any] | None = None,
        samples: Sequence[int] | None = None,
    ) -> None:
        if not calls:
            raise MicrobatchError("a list of no microbatches; give at least one")
        given = {"samples": samples, "targets": targets}
        lengths = {name: len(found) for name, found in given.items() if found is not None}
        wrong = {name: length for name, length in lengths.items() if length != len(calls)}
        if wrong:
            raise MicrobatchError(f"{len(calls)} microbatches, but {wrong}; give one for each")
        self.calls = calls
        self.targets = targets
        split = [_call_of(call) for call in calls]
        counts = samples or [_samples_of(args, kwargs) for args, kwargs in split]
        self.parts = tuple(
            Microbatch(args, kwargs, count)
            for (args, kwargs), count in zip(split, counts, strict=True)
        )

    def __len__(self) -> int:
        return len(self.parts)

    def batch(self, target: Any) -> Batch:
        """What the pipeline takes.

        Raises:
            MicrobatchError: targets were given twice, or not one for each microbatch.
        """
        if target is not MISSING and target is not None and self.targets is not None:
            raise MicrobatchError(
                "targets are given with the Microbatches and as target=; give one"
            )
        found = target if self.targets is None else self.targets
        if found is None:
            found = [None] * len(self)
        samples = [part.samples for part in self.parts]
        if found is MISSING:
            return Batch(self.parts, None, samples, len(self), ready=True)
        if not isinstance(found, Sequence) or len(found) != len(self):
            what = f"{len(found)}" if isinstance(found, Sequence) else type(found).__name__
            raise MicrobatchError(
                f"{len(self)} microbatches, but target={what}; give a list of one target for each"
            )
        return Batch(self.parts, found, samples, len(self), ready=True)


def _call_of(call: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if type(call) is tuple:
        return call, {}
    if type(call) is dict and all(isinstance(key, str) for key in call):
        return (), call
    return (call,), {}


def _samples_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    found: list[Tensor] = [tensor for _, tensor in tensors_of((args, kwargs)) if tensor.dim()]
    return found[0].shape[0] if found else 0
