"""A call of the pipeline: what each rank is told and tells afterwards, and what they call the model with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from penstock.errors import AgreementError, PenstockError, UsageError
from penstock.rng import Draw
from penstock.runtime.bind import Replacement
from penstock.runtime.health import Trouble
from penstock.runtime.hooks import Hooks
from penstock.schedule import Edge, Schedule, Span
from penstock.step import Loss, Numbers, Scale
from penstock.values import Batch, Microbatch, ValueSpec, autocast_types, spec_of_arguments

# ---- what a rank is told, and what it tells

Schedules = Callable[[int, tuple[Edge, ...] | None], Schedule]
"""The proven schedule for so many microbatches, and for these edges where they depend on the call."""


@dataclass(frozen=True)
class Call:
    """One call of the pipeline; every rank has one, alike but for what its process was given.

    Args:
        schedules: the schedule for what comes out to be called with.
        batch: what this process was given.
        loss: how to compute the loss, where there is one.
        trains: whether gradients are wanted.
        outputs: whether every rank shall get the last stage's outputs.
        record: whether to note when each action ran.
        draw: what random numbers are drawn for; without it they come from torch's generators as they are.
        keep: whether the rank of the last stage shall report its losses and outputs as they are.
        replaced: by kind of work, what does it instead.
        hooks: what to call before and after actions, where there are any.
        whole_batch: whether batch norms update their statistics once, as the whole batch would.
        scale: what else the gradients are scaled by.
        finite: whether to look whether the loss and the gradients are finite.
        noted: whether somebody in this process asks what the ranks do right now.
        refused: what is wrong with what this process was given; the ranks tell each other, and none begins.
    """

    schedules: Schedules
    batch: Batch
    loss: Loss | None = None
    trains: bool = True
    outputs: bool = False
    record: bool = False
    draw: Draw | None = None
    keep: bool = False
    replaced: Mapping[str, Replacement] = field(default_factory=dict)
    hooks: Hooks | None = None
    whole_batch: bool = False
    scale: Scale | None = None
    finite: bool = False
    noted: bool = False
    refused: PenstockError | None = None

    @property
    def mode(self) -> str:
        """What else the values depend on: a model may give others in evaluation, and under autocast."""
        doing = "train" if self.trains else "evaluate"
        losses = "with" if self.loss else "without"
        return " ".join([doing, losses, "loss", *autocast_types()])


@dataclass(frozen=True)
class Refusal:
    """That a call was not begun: nothing was sent or changed, and every rank has such an error.

    Attributes:
        error: what is wrong; its cause is there on the rank where that happened.
    """

    error: PenstockError


@dataclass(frozen=True)
class Report:
    """What a rank knows after a call.

    Attributes:
        schedule: what was run.
        numbers: what the call comes to.
        outputs: of the last stage, where asked.
        spans: when each action ran, where asked.
        elapsed: seconds, where asked.
        owed: the batch's tensors that require grad, and their gradients.
        ready: whether the user split the batch, and so gets its outputs one by one.
        losses: of the microbatches, not scaled, on the rank of the last stage.
        kept: the last stage's outputs there, where asked.
        trouble: where something is not finite, if it was looked for.
    """

    schedule: Schedule
    numbers: Numbers
    outputs: list[Any] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    elapsed: float = 0.0
    owed: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    ready: bool = False
    losses: list[Tensor] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    trouble: Trouble | None = None


def reports_of(found: Sequence[Report | Refusal]) -> list[Report]:
    """What ranks report.

    Raises:
        PenstockError: they refused the call. Of several the one with a cause; where it was found inside of
            Penstock is of no use to who made the call.
    """
    errors = [one.error for one in found if isinstance(one, Refusal)]
    if errors:
        raise max(errors, key=lambda error: error.__cause__ is not None).with_traceback(None)
    return [one for one in found if isinstance(one, Report)]


# ---- what the model is called with: each rank brings what it was given, and all agree on the whole

Key = int | str
"""An argument, by position or name."""


REFUSED = -1
"""In place of the number of what a rank brings, which is 0 or more."""


class Brought:
    """What one rank brings to a call.

    Args:
        batch: as far as this process was given it.
        mode: what else the values depend on, such as whether the model is in training.
        refused: what is wrong with what this process was given.

    Attributes:
        refused: the same, or that the batch holds something that cannot be described to others.
    """

    def __init__(self, batch: Batch, mode: str, refused: PenstockError | None = None) -> None:
        self.refused = refused
        self._batch = batch
        self._mode = mode
        self._kinds: list[Microbatch] = []
        self._specs: list[ValueSpec] = []
        self._of: list[int] = []
        try:
            for part in batch.parts or ():
                self._enter(part)
        except PenstockError as error:
            self.refused = error

    def _enter(self, part: Microbatch) -> None:
        """Note a microbatch; those of one kind are described once."""
        for index, known in enumerate(self._kinds):
            if part.kind is not None and part.kind == known.kind:
                self._of.append(index)
                return
        self._of.append(len(self._kinds))
        self._kinds.append(part)
        self._specs.append(spec_of_arguments(part.args, part.kwargs))

    @cached_property
    def number(self) -> int:
        """A number of 62 bits that differs where anything does; :data:`REFUSED` where something is wrong."""
        if self.refused is not None:
            return REFUSED
        shapes = "\n".join(spec.digest() for spec in self._specs)
        text = f"{self._mode}\n{self._facts()}\n{self._of}\n{shapes}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 2

    def _facts(self) -> dict[str, Any]:
        batch = self._batch
        samples = None if batch.samples is None else list(batch.samples)
        return {
            "count": batch.count,
            "samples": samples,
            "target": batch.targets is not None,
            "ready": None if batch.count is None else batch.ready,
        }

    def to_json(self) -> dict[str, Any]:
        """Plain data for :func:`merge_calls`."""
        kinds = [
            [[key, ValueSpec.of(value).to_json()] for key, value in _named(part).items()]
            for part in self._kinds
        ]
        return {"mode": self._mode, "kinds": kinds, "of": self._of, **self._facts()}


def _named(part: Microbatch) -> dict[Key, Any]:
    named: dict[Key, Any] = dict(enumerate(part.args))
    return named | part.kwargs


@dataclass(frozen=True)
class ModelCall:
    """What the model is called with, on all ranks together.

    Args:
        specs: of each microbatch's ``(args, kwargs)``.
        samples: how many each microbatch holds.
        given: for each rank the arguments that it was given.
        targets: for each rank whether it was given the target.
        ready: whether the user split the batch.
    """

    specs: tuple[ValueSpec, ...]
    samples: tuple[int, ...]
    given: tuple[frozenset[Key], ...]
    targets: tuple[bool, ...]
    ready: bool = False

    @property
    def count(self) -> int:
        """How many microbatches there are."""
        return len(self.specs)

    @cached_property
    def names(self) -> tuple[list[Key], list[str]]:
        """The arguments by position, and those by name."""
        everything = frozenset().union(*self.given)
        positions = [key for key in everything if isinstance(key, int)]
        return sorted(positions), sorted(key for key in everything if isinstance(key, str))

    def completed(self, rank: int, parts: Sequence[Microbatch] | None) -> Sequence[Microbatch]:
        """A rank's microbatches; what it was not given is there without data, on the meta device."""
        positions, names = self.names
        if parts is not None and self.given[rank] >= {*positions, *names}:
            return parts
        own = parts or [Microbatch((), {}, 0)] * self.count
        return [
            _with_placeholders(part, spec, samples)
            for part, spec, samples in zip(own, self.specs, self.samples, strict=True)
        ]


def _with_placeholders(part: Microbatch, spec: ValueSpec, samples: int) -> Microbatch:
    args, kwargs = spec.fill([found.empty("meta") for found in spec.tensors])
    mine = _named(part)
    args = tuple(mine.get(position, value) for position, value in enumerate(args))
    kwargs = {name: mine.get(name, value) for name, value in kwargs.items()}
    return Microbatch(args, kwargs, samples, part.kind, part.aside)


def merge_calls(brought: Sequence[Mapping[str, Any]]) -> ModelCall:
    """Put together what the ranks brought; the same on every rank, errors too.

    Args:
        brought: each rank's :meth:`Brought.to_json`, in rank order.

    Raises:
        AgreementError: ranks differ in what more than one was given.
        UsageError: something was given to no rank.
    """
    mode = _check_one(brought, "mode", "what they do")
    count = _check_one(brought, "count", "the number of microbatches")
    samples = _check_one(brought, "samples", "the samples of the microbatches")
    if count is None or not any(rank["kinds"] for rank in brought):
        name = _CALLS[next(call for call in _CALLS if mode.startswith(call))]
        raise UsageError(
            f"{name}() was given no batch; call it with the model's arguments, at least on the rank of the "
            "first stage. A Pipeline has no train() mode: step trains, and eval and predict evaluate"
        )
    specs = _merged_specs(brought, count)
    given = tuple(frozenset(key for key, _ in _first_kind(rank)) for rank in brought)
    targets = tuple(bool(rank["target"]) for rank in brought)
    ready = bool(_check_one(brought, "ready", "whether the batch is split already"))
    return ModelCall(tuple(specs), tuple(samples or [0] * count), given, targets, ready)


_CALLS = {"train": "step", "evaluate with loss": "eval", "evaluate": "predict"}
"""From how a mode begins to what the user called."""


def _first_kind(rank: Mapping[str, Any]) -> list[Any]:
    kinds: list[list[Any]] = rank["kinds"]
    return kinds[0] if kinds else []


def _check_one(brought: Sequence[Mapping[str, Any]], key: str, what: str) -> Any:
    """What all ranks have that have it."""
    found = {rank: own[key] for rank, own in enumerate(brought) if own[key] is not None}
    if len({json.dumps(value) for value in found.values()}) > 1:
        listed = "; ".join(f"rank {rank}: {value}" for rank, value in found.items())
        raise AgreementError(f"ranks differ in {what}: {listed}")
    return next(iter(found.values()), None)


def _merged_specs(brought: Sequence[Mapping[str, Any]], count: int) -> list[ValueSpec]:
    known: dict[tuple[int, ...], ValueSpec] = {}
    specs = []
    for microbatch in range(count):
        kinds = tuple(rank["of"][microbatch] if rank["of"] else -1 for rank in brought)
        if kinds not in known:
            known[kinds] = _merged_spec(brought, kinds, microbatch)
        specs.append(known[kinds])
    return specs


def _merged_spec(
    brought: Sequence[Mapping[str, Any]], kinds: Sequence[int], microbatch: int
) -> ValueSpec:
    found: dict[Key, tuple[int, Any]] = {}
    for rank, (own, kind) in enumerate(zip(brought, kinds, strict=True)):
        for key, spec in own["kinds"][kind] if kind >= 0 else ():
            first, other = found.setdefault(key, (rank, spec))
            if other != spec:
                gap = ValueSpec.from_json(other).difference(ValueSpec.from_json(spec))
                raise AgreementError(
                    f"ranks were called with different shapes: argument {key!r} of microbatch "
                    f"{microbatch}, rank {first} beside rank {rank}: {gap}; pass every rank the same batch"
                )
    return _spec_of({key: spec for key, (_, spec) in found.items()})


def _spec_of(specs: Mapping[Key, Any]) -> ValueSpec:
    values = {key: ValueSpec.from_json(spec).without_data() for key, spec in specs.items()}
    positions = sorted(key for key in values if isinstance(key, int))
    if positions != list(range(len(positions))):
        raise UsageError(
            f"arguments {positions} were given by position, but the arguments "
            "before them are missing on all ranks"
        )
    kwargs = {key: value for key, value in values.items() if isinstance(key, str)}
    return spec_of_arguments(tuple(values[position] for position in positions), kwargs)
