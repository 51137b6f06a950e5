"""A call of the pipeline: what each rank gets and reports, and what all agree on before data move."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import (
    AgreementError,
    MessageError,
    PenstockError,
    SpecError,
    UsageError,
    error_named,
    public_name,
)
from penstock.faults import versions
from penstock.rng import Draw
from penstock.runtime.bind import Replacement
from penstock.runtime.driver import Task, Wait
from penstock.runtime.exchange import Specs
from penstock.runtime.instrumentation import Hooks, Trouble
from penstock.schedule import Edge, Schedule, Span
from penstock.step import Loss, Scale, StepResult
from penstock.transport import Transport
from penstock.values import (
    Batch,
    Family,
    Inferred,
    Microbatch,
    ValueSpec,
    autocast_types,
    new_family,
    spec_of_arguments,
)

# ---- what a rank gets, and what it reports

Schedules = Callable[[int, tuple[Edge, ...] | None], Schedule]
"""Gives the proven schedule for a number of microbatches, and for edges that may depend on the call."""


@dataclass(frozen=True)
class Call:
    """One call of the pipeline. Every rank has one; they differ only in what their processes were given.

    Args:
        schedules: gives the schedule, once it is known what the model is called with.
        batch: what this process was given.
        loss: how to compute the loss, if there is one.
        trains: whether gradients are wanted.
        outputs: whether every rank gets the last stage's outputs.
        record: whether to note when each action ran.
        draw: the step that random numbers are drawn for; None leaves torch's generators as they are.
        keep: whether the rank of the last stage reports its losses and outputs as they are.
        replaced: custom functions, by the kind of action that they do instead.
        hooks: what to call before and after actions, if anything.
        whole_batch: whether batch norms update their statistics once, as for the whole batch.
        scale: what else the gradients are scaled by.
        finite: whether to check that the loss and the gradients are finite.
        noted: whether something in this process asks what the ranks are doing right now.
        refused: what is wrong with what this process was given; all ranks hear of it, and none begins.
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
        """What the specs depend on besides arguments.

        A model may give other values in evaluation or autocast.
        """
        doing = "train" if self.trains else "evaluate"
        losses = "with" if self.loss else "without"
        return " ".join([doing, losses, "loss", *autocast_types()])


@dataclass(frozen=True)
class Refusal:
    """A call that was not begun: nothing was sent or changed, and every rank has such an error.

    Attributes:
        error: what is wrong; it has its cause on the rank where that happened.
    """

    error: PenstockError


@dataclass(frozen=True)
class Report:
    """What a rank knows after a call.

    Attributes:
        schedule: the schedule that was run.
        numbers: the loss, losses and metrics.
        outputs: of the last stage, if asked for.
        spans: when each action ran, if asked for.
        elapsed: the time of the call in seconds, if asked for.
        owed: the batch's tensors that require grad, with their gradients.
        ready: whether the user split the batch, and so gets its outputs one by one.
        losses: of the microbatches, not scaled, on the rank of the last stage.
        kept: the last stage's outputs on its rank, if asked for.
        trouble: what is not finite, if that was looked for.
    """

    schedule: Schedule
    numbers: StepResult
    outputs: list[Any] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    elapsed: float = 0.0
    owed: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    ready: bool = False
    losses: list[Tensor] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    trouble: Trouble | None = None


def reports_of(found: Sequence[Report | Refusal]) -> list[Report]:
    """The reports of all ranks in this process.

    Raises:
        PenstockError: they refused the call. Of several errors, the one with a cause is raised; frames
            inside Penstock are dropped, since they tell the caller nothing.
    """
    errors = [one.error for one in found if isinstance(one, Refusal)]
    if errors:
        raise max(errors, key=lambda error: error.__cause__ is not None).with_traceback(None)
    return [one for one in found if isinstance(one, Report)]


# ---- what the model is called with: each rank brings what it was given, and all agree on the sum of it

Key = int | str
"""An argument, by position or name."""


REFUSED = -1
"""Stands for a refusal, in place of the number of what a rank brings (0 or more)."""


class Brought:
    """What one rank brings to a call.

    Args:
        batch: as much of the batch as this process was given.
        mode: what else the specs depend on, see :attr:`Call.mode`.
        refused: what is wrong with what this process was given.

    Attributes:
        refused: the same; or the error of a batch that cannot be described to other ranks.
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
        """Note a microbatch; microbatches of one kind are described once."""
        for index, known in enumerate(self._kinds):
            if part.kind is not None and part.kind == known.kind:
                self._of.append(index)
                return
        self._of.append(len(self._kinds))
        self._kinds.append(part)
        self._specs.append(spec_of_arguments(part.args, part.kwargs))

    @cached_property
    def number(self) -> int:
        """A 62-bit number that differs if anything differs; :data:`REFUSED` if something is wrong."""
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
        samples: how many samples each microbatch holds.
        given: for each rank, the arguments that it was given.
        targets: for each rank, whether it was given the target.
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
        """The positions and the names of all arguments."""
        everything = frozenset().union(*self.given)
        positions = [key for key in everything if isinstance(key, int)]
        return sorted(positions), sorted(key for key in everything if isinstance(key, str))

    def completed(self, rank: int, parts: Sequence[Microbatch] | None) -> Sequence[Microbatch]:
        """A rank's microbatches.

        Arguments that it was not given are filled in without data, on the meta device.
        """
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
    """Put together what the ranks brought. The result is the same on every rank, and so are errors.

    Args:
        brought: each rank's :meth:`Brought.to_json`, in rank order.

    Raises:
        AgreementError: ranks differ in what more than one was given.
        UsageError: something is missing on all ranks.
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
"""The method that the user called, by how the mode begins."""


def _first_kind(rank: Mapping[str, Any]) -> list[Any]:
    kinds: list[list[Any]] = rank["kinds"]
    return kinds[0] if kinds else []


def _check_one(brought: Sequence[Mapping[str, Any]], key: str, what: str) -> Any:
    """The value of those ranks that have one, which must all be equal."""
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


# ---- the agreement: that all run the same plan, and on what the model is called with


def agree_plan(
    transport: Transport, schedule: Schedule, told: Mapping[str, str] | None = None
) -> Task[None]:
    """Check that all ranks run the same schedule of the same model with the same versions.

    Args:
        transport: the rank's end.
        schedule: of a training step.
        told: what else must be the same on every rank, by name.

    Raises:
        AgreementError: they do not; the message lists which rank has what.
    """
    mine = {
        "schedule": f"{schedule.name} {_digest(str(schedule))}",
        "microbatches": str(schedule.microbatches),
        **versions(),
        "precision": " ".join([str(torch.get_default_dtype()), *autocast_types()]),
        **(told or {}),
    }
    ticket = transport.agree(mine)
    yield Wait(ticket, transport.rank, "waits to agree on the plan")
    differing = differences(ticket.take())
    if differing:
        raise AgreementError(
            f"ranks differ in {'; in '.join(differing)}; give every rank the same code, settings and versions"
        )


def differences(plans: Sequence[Mapping[str, str]]) -> list[str]:
    """The differences between the ranks' plans, as texts that say which ranks have what."""
    names = dict.fromkeys(name for plan in plans for name in plan)
    return [text for name in names if (text := _difference(name, plans))]


def _difference(name: str, plans: Sequence[Mapping[str, str]]) -> str:
    holders: dict[str, list[int]] = {}
    for rank, plan in enumerate(plans):
        holders.setdefault(plan.get(name, "none"), []).append(rank)
    if len(holders) == 1:
        return ""
    told = (
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        for value, ranks in holders.items()
    )
    return f"{name}: {', '.join(told)}"


def describe_stages(modules: Sequence[nn.Module]) -> dict[str, str]:
    """For each stage, a text that is equal exactly if its tensors have the same names, shapes and types."""
    return {f"stage {index}": _described(module) for index, module in enumerate(modules)}


def _described(module: nn.Module) -> str:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    lines = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
    return f"{len(lines)} tensors {_digest(chr(10).join(lines))}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Agreement:
    """All that was agreed on for a call.

    Args:
        model_call: what the model is called with.
        specs: for each microbatch, the specs of its values.
        schedule: the schedule that carries the call out.
        bound: the rank's bound programs for it, by what else calls ask for.
    """

    model_call: ModelCall
    specs: tuple[Specs, ...]
    schedule: Schedule
    bound: dict[Any, Any] = field(default_factory=dict, compare=False)


_REMEMBERED = 1024
"""How many calls are remembered; the oldest are forgotten first, the same ones on every rank."""


class Agreements:
    """Remembers what was agreed on.

    Whole calls by what the ranks brought, and specs of single microbatches.
    """

    def __init__(self) -> None:
        self.of_calls: dict[tuple[int, ...], Agreement] = {}
        self.described: dict[str, tuple[Any, Specs]] = {}
        self._families: dict[Any, Family[Inferred]] = {}
        self._traits: Any = None

    def write(self, key: tuple[int, ...], agreement: Agreement) -> None:
        """Remember an agreement, and forget the oldest beyond :data:`_REMEMBERED`."""
        self.of_calls[key] = agreement
        for memory in (self.of_calls, self.described):
            while len(memory) > _REMEMBERED:
                del memory[next(iter(memory))]  # type: ignore[arg-type] # of its own keys

    def outdated(self, traits: Any) -> bool:
        """Whether parameters were frozen, unfrozen or cast since the last call."""
        last, self._traits = self._traits, traits
        return last not in (None, traits)

    def clear(self) -> None:
        """Forget everything."""
        self.of_calls.clear()
        self.described.clear()
        self._families.clear()

    def families(self, mode: str) -> Callable[[int, ValueSpec], Family[Inferred]]:
        """Finds what a stage here has given for arguments that differ from these in their sizes alone."""
        return lambda stage, arguments: self._families.setdefault(
            (mode, stage, arguments.kind()), new_family()
        )


def look_up(
    transport: Transport, brought: Brought, agreements: Agreements, traits: Any
) -> Task[tuple[tuple[int, ...], Agreement | None]]:
    """Find the agreement for what the ranks bring; it takes one small message from each.

    Every rank remembers the same agreements, since all of them remember each one together.

    Args:
        transport: the rank's end.
        brought: what this rank brings.
        agreements: those of this rank.
        traits: of this rank's parameters.

    Returns:
        The key of the agreement; and the agreement itself, if such a call was made before.

    Raises:
        PenstockError: what is wrong with what some rank was given; raised on every rank.
    """
    word = torch.tensor([agreements.outdated(traits), brought.number], dtype=torch.int64)
    ticket = transport.gather(word)
    yield Wait(ticket, transport.rank, "waits to hear whether shapes changed")
    rows = [(int(changed), int(number)) for changed, number in ticket.take()]
    if any(changed for changed, _ in rows):
        agreements.clear()
    key = tuple(number for _, number in rows)
    if REFUSED in key:
        yield from _tell_refusals(transport, brought)
    return key, agreements.of_calls.get(key)


def _tell_refusals(transport: Transport, brought: Brought) -> Task[None]:
    """Raise the error of the first rank that refuses, on every rank."""
    own = brought.refused
    mine = None if own is None else [public_name(type(own)), str(own)]
    ticket = transport.agree(mine)
    yield Wait(ticket, transport.rank, "waits to hear why a call was refused")
    told = ticket.take()
    if own is not None and all(found == mine for found in told):
        raise own
    first = next(rank for rank, found in enumerate(told) if found is not None)
    kind, text = told[first]
    own = own if first == transport.rank else None
    error = (error_named(kind) if own is None else type(own))(f"rank {first}: {text}")
    error.rank = first
    raise error from (None if own is None else own.__cause__)


def agree_model_call(transport: Transport, brought: Brought) -> Task[ModelCall]:
    """Put together what the model is called with.

    Raises:
        AgreementError: ranks were called with different shapes.
        UsageError: something was given to no rank.
    """
    ticket = transport.agree(brought.to_json())
    yield Wait(ticket, transport.rank, "waits for the shapes of the batch")
    try:
        return merge_calls(ticket.take())
    except SpecError as error:
        # Another rank may know the class that is missing here, so not all ranks refuse the call.
        raise MessageError(
            f"rank {transport.rank}: what another rank was given: {error}"
        ) from error
