"""A batch in parts: by which rules it is split, and how outputs are put together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.errors import MicrobatchError
from penstock.values.trees import Opened, opened, tensors_of

# ---- what a batch is once it is split


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
"""Stands for an argument that was not given, where ``None`` is a value."""


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
            raise MicrobatchError("Microbatches([]) holds no microbatches; give at least one")
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
                "targets were given both in Microbatches(targets=...) and as target=; give one of them"
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


# ---- how an argument, or a whole call, is split


@dataclass(frozen=True)
class Split:
    """Split every tensor of an argument along a dimension."""

    dim: int = 0


@dataclass(frozen=True)
class Replicate:
    """Give every microbatch the whole argument."""


REPLICATE = Replicate()
"""Give every microbatch the whole argument: a rule for ``Pipeline(rules=...)``."""
Splitter = Callable[[Any, Sequence[int]], Sequence[Any]]
"""From an argument and the number of samples of each microbatch: its part in each."""
Rule: TypeAlias = "Split | Replicate | Splitter | Mapping[Any, Rule]"
"""How an argument is split; a mapping says it of its items, fields or positions one by one."""
CallSplitter = Callable[[tuple[Any, ...], dict[str, Any], Any, int], Microbatches]
"""From the arguments, those by name, the target and a number: so many microbatches, or fewer."""
Rules: TypeAlias = Mapping[int | str, Rule] | CallSplitter
"""For an argument, by position or name, how it is split; or a function that splits the whole call.

Without a rule a tensor is split along dimension 0, and one without dimensions goes to every microbatch
whole. ``"target"`` says it of the target, and ``"output"`` along which dimension outputs are put together.
"""


def check_rules(rules: Any) -> None:
    """Check that batches can be split so.

    Raises:
        MicrobatchError: what was given is no rule; the message names the argument it is for.
    """
    if rules is None or callable(rules):
        return
    if not isinstance(rules, Mapping):
        raise MicrobatchError(
            f"rules={rules!r}: must be a mapping from arguments, by position or name, to how each is split, "
            "or a function that splits the whole call"
        )
    for name, rule in rules.items():
        if isinstance(rule, Mapping):
            check_rules(rule)
        elif isinstance(rule, type) or not (isinstance(rule, Split | Replicate) or callable(rule)):
            raise MicrobatchError(
                f"rules={{{name!r}: {rule!r}}}: must be Split(dim), REPLICATE, a function "
                "(value, sizes) -> parts, or a mapping of these"
            )


TARGET = "target"
"""The name under which rules speak of ``target=``."""
OUTPUT = "output"
"""The name under which rules say along which dimension outputs are put together."""


# ---- put the outputs of microbatches together


def output_dim(rules: Rules | None) -> int:
    """Along which dimension outputs are put together.

    Raises:
        MicrobatchError: arguments are split along another dimension than 0, and no rule says it of outputs.
    """
    if not isinstance(rules, Mapping):
        return 0
    given = rules.get(OUTPUT)
    if isinstance(given, Split):
        return given.dim
    if given is not None:
        raise MicrobatchError(
            f"rules={{'output': {given!r}}}: outputs are put together by Split(dim)"
        )
    dims = sorted({rule.dim for rule in rules.values() if isinstance(rule, Split)} - {0})
    if dims:
        raise MicrobatchError(
            f"arguments are split along dimension {dims[0]}; say along which one outputs are put "
            f"together: rules={{'output': Split({dims[0]})}} or Split(0)"
        )
    return 0


def merge(outputs: Sequence[Any], dim: int = 0) -> Any:
    """Put the outputs of microbatches together.

    Args:
        outputs: one for each microbatch, all of one structure. Tensors with dimensions are concatenated
            along ``dim``, those without are stacked; other values must be equal in all.
        dim: the dimension of the samples.

    Raises:
        MicrobatchError: the structures or values differ.
    """
    first = outputs[0]
    if any(type(output) is not type(first) for output in outputs):
        kinds = sorted({type(output).__name__ for output in outputs})
        raise MicrobatchError(f"microbatches gave outputs of different types: {kinds}")
    if isinstance(first, Tensor):
        return _joined(outputs, dim)
    parts = [found for found in map(opened, outputs) if found is not None]
    if parts:
        return parts[0].made([merge(items, dim) for items in _columns(parts)])
    if any(output != first for output in outputs):
        raise MicrobatchError(f"microbatches gave different values: {list(outputs)}")
    return first


def _joined(tensors: Sequence[Tensor], dim: int) -> Tensor:
    if not tensors[0].dim():
        return torch.stack(list(tensors))
    try:
        return torch.cat(list(tensors), dim)
    except (RuntimeError, IndexError) as error:
        shapes = [list(tensor.shape) for tensor in tensors]
        raise MicrobatchError(
            f"outputs of the shapes {shapes} cannot be put together along dimension {dim}; give "
            "Microbatches(...) instead of a batch to get them one by one"
        ) from error


def _columns(parts: Sequence[Opened]) -> list[list[Any]]:
    first = parts[0]
    if any(set(part.keys) != set(first.keys) for part in parts):
        lengths = sorted({len(part.keys) for part in parts})
        if all(isinstance(part.keys, range) for part in parts):
            raise MicrobatchError(f"microbatches gave outputs of different lengths: {lengths}")
        raise MicrobatchError("microbatches gave dicts with different keys")
    found = [dict(zip(part.keys, part.items, strict=True)) for part in parts]
    return [[items[key] for items in found] for key in first.keys]
