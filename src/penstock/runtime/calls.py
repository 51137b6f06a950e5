"""The agreement before a step: one word from each rank, and more only when something is new.

A rank's word is a hash of what it brings: the shapes of its arguments, whether it has a target, whether it
trains. If all ranks have brought these words before, the call is known. If not, they exchange descriptions,
and all of them number the new kinds of microbatches alike. A rank that refuses its arguments says so in its
word; all ranks then refuse the call before anything is sent or changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import (
    AgreementError,
    PenstockError,
    UsageError,
    error_named,
    public_name,
)
from penstock.faults import versions
from penstock.parallel import Adapter
from penstock.rng import Draws
from penstock.runtime.hooks import Hooks, Recorder
from penstock.runtime.loss import Loss, Weights
from penstock.runtime.result import StepResult, StepTally
from penstock.schedule import Schedule
from penstock.transport import Transport
from penstock.values import (
    Batch,
    Layout,
    Microbatch,
    TensorLayout,
    check_plain,
    flatten,
    layout_of,
    restrided,
    unflatten,
)

Key = int | str
"""An argument, by position or name."""


@dataclass(frozen=True)
class Call:
    """One call of the pipeline. Every rank has one; they differ only in what their processes were given.

    Args:
        batch: as much of the batch as this process was given.
        loss: how to compute the loss, if there is one.
        trains: whether gradients are wanted.
        outputs: whether every rank gets the last stage's outputs.
        record: whether to note when each action ran.
        seed: the (seed, step) of random numbers; None leaves torch's generators as they are.
        keep: whether the rank of the last stage reports its outputs as they are.
        hooks: the hooks on actions, if any.
        finite: whether to check that the loss and the gradients are finite.
        refusal: the error in this process's arguments, if any; all ranks learn of it, and none begins.
        mark: a hash of the batch itself, if all ranks must be given the same one; otherwise 0.
    """

    batch: Batch
    loss: Loss | None = None
    trains: bool = True
    outputs: bool = False
    record: bool = False
    seed: tuple[int, int] | None = None
    keep: bool = False
    hooks: Hooks | None = None
    finite: bool = False
    refusal: PenstockError | None = None
    mark: int = 0

    @property
    def mode(self) -> str:
        """The mode of the call; with its arguments, it decides which values travel."""
        doing = "train" if self.trains else "evaluate"
        losses = "with" if self.loss else "without"
        return " ".join([doing, losses, "loss", *autocast_types()])


def autocast_types() -> list[str]:
    """The types that autocast computes in now, by type of device; empty outside of autocast."""
    return [
        f"{kind}:{torch.get_autocast_dtype(kind)}"
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]


# ---- what one rank brings


REFUSED = -1
"""The word of a rank that refuses; all others are at least 0."""
_REMEMBERED = 1024
"""The number of descriptions kept for later microbatches that look the same."""


def describe_call(call: Call, traits: str, known: dict[Any, Any]) -> dict[str, Any]:
    """One rank's offer to a call, as JSON data for :func:`merge_offers`.

    Args:
        call: the call, with as much of the batch as this process was given.
        traits: which parameters of this rank's stages learn, and which stages are in training mode.
        known: a cache of descriptions, by what the microbatches look like.

    Raises:
        SpecError: an argument cannot travel.
    """
    batch = call.batch
    numbers: dict[Any, int] = {}
    kinds: list[Any] = []
    of: list[int] = []
    for part in batch.parts or ():
        key = _look(part) if part.kind is None else part.kind
        if key not in numbers:
            numbers[key] = len(kinds)
            kinds.append(_kind_of(part, known))
        of.append(numbers[key])
    return {
        "mode": call.mode,
        "traits": traits,
        "kinds": kinds,
        "of": of,
        "count": batch.count,
        "samples": None if batch.samples is None else list(batch.samples),
        "target": batch.targets is not None,
        "presplit": None if batch.count is None else batch.presplit,
    }


def word_of(offer: Mapping[str, Any]) -> int:
    """A hash of an offer, at least 0."""
    return int.from_bytes(hashlib.sha256(repr(offer).encode()).digest()[:8]) >> 2


def _named(part: Microbatch) -> dict[Key, Any]:
    named: dict[Key, Any] = dict(enumerate(part.args))
    return named | part.kwargs


def _kind_of(part: Microbatch, known: dict[Any, Any]) -> list[Any]:
    """The layouts of a microbatch's arguments, as JSON data."""
    look = _look(part)
    if look not in known:
        if len(known) >= _REMEMBERED:
            known.clear()
        for key, value in _named(part).items():
            check_plain(value, f"argument {key!r}")
        known[look] = [[key, layout_in(value).describe()] for key, value in _named(part).items()]
    kind: list[Any] = known[look]
    return kind


def layout_in(value: Any) -> Layout:
    """The layout of a value that can travel."""
    leaves, tree = flatten(value)
    return Layout(tree, tuple(layout_of(x) if isinstance(x, Tensor) else x for x in leaves))


def _look(part: Microbatch) -> Any:
    """A key that quickly tells microbatches of different kinds apart."""
    looks: list[Any] = []
    for key, value in _named(part).items():
        leaves, tree = flatten(value)
        looks += [key, tree]
        for x in leaves:
            is_tensor = isinstance(x, Tensor)
            looks.append((x.shape, x.dtype, x.stride(), x.requires_grad) if is_tensor else repr(x))
    return tuple(looks)


_LOOKED_AT = 4096
"""The number of elements that are sampled from a tensor to tell batches apart."""


def mark_of(batch: Any) -> int:
    """A hash of a batch, at least 1; large tensors are sampled."""
    digest = hashlib.sha256()
    for leaf in flatten(batch)[0]:
        if isinstance(leaf, Tensor):
            digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
            if leaf.layout is torch.strided and not leaf.is_meta and not leaf.is_nested:
                # An odd stride reaches all columns in turn.
                stride = leaf.numel() // _LOOKED_AT | 1
                sample = leaf.detach().reshape(-1)[::stride].contiguous().cpu()
                digest.update(sample.view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())
    return (int.from_bytes(digest.digest()[:8]) >> 2) + 1


def check_marks(marks: Sequence[int]) -> None:
    """Check that ranks that need the same batch were given it.

    Raises:
        AgreementError: they were given different batches.
    """
    if len({*marks}) > 1:
        first: dict[int, int] = {}
        for rank, mark in enumerate(marks):
            first.setdefault(mark, rank)
        listed = ", ".join(f"rank {rank}" for rank in first.values())
        raise AgreementError(
            f"the ranks of one pipeline were given different batches: those of {listed} differ. Give all "
            "ranks of a pipeline the same batch: a sampler that divides the data, such as "
            "DistributedSampler, counts replicas, not ranks, and shuffles with the same seed on all of them"
        )


# ---- what all ranks bring together


@dataclass(frozen=True)
class ModelCall:
    """The arguments of the model, from all ranks together.

    Args:
        kinds: for each microbatch, its arguments' layouts, by position or name.
        descriptions: for each microbatch, the same as text: equal for microbatches of one kind.
        samples: the number of samples in each microbatch.
        passed: for each rank, the arguments that it was passed.
        targets: for each rank, whether it was passed the target.
        presplit: whether the user split the batch.
    """

    kinds: tuple[Mapping[Key, Layout], ...]
    descriptions: tuple[str, ...]
    samples: tuple[int, ...]
    passed: tuple[frozenset[Key], ...]
    targets: tuple[bool, ...]
    presplit: bool = False

    @property
    def count(self) -> int:
        """The number of microbatches."""
        return len(self.kinds)

    @cached_property
    def names(self) -> tuple[list[Key], list[str]]:
        """The positions and the names of all arguments."""
        keys = frozenset().union(*self.passed)
        positions = [key for key in keys if isinstance(key, int)]
        return sorted(positions), sorted(key for key in keys if isinstance(key, str))

    def complete(self, rank: int, parts: Sequence[Microbatch] | None) -> Sequence[Microbatch]:
        """A rank's microbatches, with tensors on the meta device for arguments that it was not passed."""
        positions, names = self.names
        if parts is not None and self.passed[rank] >= {*positions, *names}:
            return parts
        mine = parts or [Microbatch((), {}, samples) for samples in self.samples]
        return [complete(part, kind) for part, kind in zip(mine, self.kinds, strict=True)]


def complete(part: Microbatch, kind: Mapping[Key, Layout]) -> Microbatch:
    """A microbatch with all arguments of its kind; those that it lacks are on the meta device."""
    passed = _named(part)
    full = {key: passed[key] if key in passed else _placeholder(of) for key, of in kind.items()}
    positions = sorted(key for key in full if isinstance(key, int))
    kwargs = {key: value for key, value in full.items() if isinstance(key, str)}
    return replace(part, args=tuple(full[p] for p in positions), kwargs=kwargs)


def _placeholder(layout: Layout) -> Any:
    device = torch.device("meta")
    leaves = [
        restrided(x.empty(device), x.strides).requires_grad_(x.learns)
        if isinstance(x, TensorLayout)
        else x
        for x in layout.leaves
    ]
    return unflatten(leaves, layout.tree)


def merge_offers(offers: Sequence[Mapping[str, Any]]) -> ModelCall:
    """Merge the ranks' offers. The result is the same on every rank, and so are errors.

    Args:
        offers: each rank's :func:`describe_call`, in rank order.

    Raises:
        AgreementError: ranks differ in something that several of them were passed.
        UsageError: something is missing on all ranks.
    """
    mode = _check_equal(offers, "mode", "what they do")
    count = _check_equal(offers, "count", "the number of microbatches")
    samples = _check_equal(offers, "samples", "the samples of the microbatches")
    if count is None or not any(offer["kinds"] for offer in offers):
        name = next(method for start, method in _METHODS.items() if mode.startswith(start))
        raise UsageError(
            f"{name}() was given no batch; call it with the model's arguments, at least on the rank of the "
            "first stage. A Pipeline has no train() mode: step trains, and eval and predict evaluate"
        )
    texts = [_merge_kinds(offers, microbatch) for microbatch in range(count)]
    layouts: dict[str, dict[Key, Layout]] = {}
    for text in texts:
        if text not in layouts:
            layouts[text] = {key: Layout.read(of) for key, of in json.loads(text)}
            _check_positions(layouts[text])
    passed = tuple(frozenset(key for key, _ in _first_kind(offer)) for offer in offers)
    return ModelCall(
        tuple(layouts[text] for text in texts),
        tuple(f"{mode} {text}" for text in texts),
        tuple(samples or [0] * count),
        passed,
        tuple(bool(offer["target"]) for offer in offers),
        bool(_check_equal(offers, "presplit", "whether the batch is split already")),
    )


_METHODS = {"train": "step", "evaluate with loss": "eval", "evaluate": "predict"}
"""The method that the user called, by the start of the mode."""


def _first_kind(offer: Mapping[str, Any]) -> list[Any]:
    kinds: list[list[Any]] = offer["kinds"]
    return kinds[0] if kinds else []


def _check_equal(offers: Sequence[Mapping[str, Any]], key: str, what: str) -> Any:
    """The value that all ranks with one have in common."""
    values = {rank: offer[key] for rank, offer in enumerate(offers) if offer[key] is not None}
    if len({json.dumps(value) for value in values.values()}) > 1:
        listed = "; ".join(f"rank {rank}: {value}" for rank, value in values.items())
        raise AgreementError(f"ranks differ in {what}: {listed}")
    return next(iter(values.values()), None)


def _merge_kinds(offers: Sequence[Mapping[str, Any]], microbatch: int) -> str:
    """The layouts of a microbatch's arguments on all ranks together, as JSON."""
    merged: dict[Key, tuple[int, Any]] = {}
    for rank, offer in enumerate(offers):
        kind = offer["of"][microbatch] if offer["of"] else -1
        for key, layout in offer["kinds"][kind] if kind >= 0 else ():
            first, other = merged.setdefault(key, (rank, layout))
            if other != layout:
                shown = [", ".join(map(str, Layout.read(x).leaves)) for x in (other, layout)]
                raise AgreementError(
                    f"ranks were called with different shapes: argument {key!r} of microbatch {microbatch} "
                    f"is {shown[0]} on rank {first} and {shown[1]} on rank {rank}; pass every rank the same "
                    "batch"
                )
    return json.dumps([[key, layout] for key, (_, layout) in merged.items()])


def _check_positions(layouts: Mapping[Key, Layout]) -> None:
    positions = sorted(key for key in layouts if isinstance(key, int))
    if positions != list(range(len(positions))):
        raise UsageError(
            f"arguments {positions} were passed by position, but the arguments before them are missing on "
            "all ranks"
        )


def raise_refusals(transport: Transport | None, refusal: PenstockError | None) -> None:
    """Raise the error of the first rank that refuses, on every rank."""
    if transport is None:
        assert refusal is not None
        raise refusal
    mine = None if refusal is None else [public_name(type(refusal)), str(refusal)]
    reasons = transport.exchange(mine)
    if refusal is not None and all(reason == mine for reason in reasons):
        raise refusal
    first = next(rank for rank, reason in enumerate(reasons) if reason is not None)
    name, text = reasons[first]
    here = refusal if first == transport.rank else None
    error = (error_named(name) if here is None else type(here))(f"rank {first}: {text}")
    error.rank = first
    raise error from (None if here is None else here.__cause__)


# ---- a check at set-up: all ranks run the same plan


def check_plans(
    transport: Transport, schedule: Schedule, details: Mapping[str, str] | None = None
) -> None:
    """Check that all ranks run the same schedule of the same model with the same versions.

    Args:
        transport: this rank's end.
        schedule: the schedule of a training step.
        details: texts that must be the same on every rank too, by name.

    Raises:
        AgreementError: they do not; the message lists which rank has what.
    """
    mine = {
        "schedule": f"{schedule.name} {_digest(str(schedule))}",
        "microbatches": str(schedule.microbatches),
        **versions(),
        "precision": " ".join([str(torch.get_default_dtype()), *autocast_types()]),
        **(details or {}),
    }
    plans = transport.exchange(mine)
    differing = []
    for name in dict.fromkeys(name for plan in plans for name in plan):
        holders: dict[str, list[str]] = {}
        for rank, plan in enumerate(plans):
            holders.setdefault(plan.get(name, "none"), []).append(str(rank))
        if len(holders) > 1:
            listed = (
                f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
                for value, ranks in holders.items()
            )
            differing.append(f"{name}: {', '.join(listed)}")
    if differing:
        raise AgreementError(
            f"ranks differ in {'; in '.join(differing)}; give every rank the same code, settings and versions"
        )


def describe_stages(modules: Sequence[nn.Module]) -> dict[str, str]:
    """A text for each stage, equal if and only if its tensors have the same names, shapes and types."""
    return {f"stage {index}": _described(module) for index, module in enumerate(modules)}


def _described(module: nn.Module) -> str:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    lines = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
    return f"{len(lines)} tensors {_digest(chr(10).join(lines))}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# ---- a call that is carried out


@dataclass
class Agreement:
    """What the ranks agreed on; it holds for every call with the same offers.

    Attributes:
        model_call: the arguments of the model.
        kinds: the number of each microbatch's kind, the same on every rank.
        plans: the partition's plan for each microbatch.
        program: the program of this process.
    """

    model_call: ModelCall
    kinds: tuple[int, ...]
    plans: tuple[Any, ...]
    program: Any = field(repr=False)


class StepState:
    """A call that is being carried out: this process's inputs, and its results.

    Args:
        call: the call.
        agreement: what the ranks agreed on for it.
        weights: how much each microbatch counts.
        rank: this rank.
        devices: the devices of the stages here.

    Attributes:
        draws: returns the draws of a microbatch on a device; None leaves the generators alone.
        parts: the arguments of each microbatch, with tensors on the meta device for what is not here.
        targets: the targets of the microbatches.
        tally: adds up losses and metrics.
        adapters: the adapters of replicated and sharded stages.
        recorder: notes when actions run, if asked for.
        outputs: the last stage's outputs by microbatch, where they are kept.
        shared: the outputs in order, on every rank, if asked for.
        batch_gradients: the batch's tensors that require grad, with their gradients.
        result: the loss, losses and metrics, once the call is done.
        flops: counts the model's floating-point operations, see :class:`StepResult`.
    """

    def __init__(
        self,
        call: Call,
        agreement: Agreement,
        weights: Weights,
        rank: int,
        devices: Sequence[torch.device],
    ) -> None:
        self.call, self.agreement, self.weights = call, agreement, weights
        self.parts = agreement.model_call.complete(rank, call.batch.parts)
        self.targets = call.batch.targets or [None] * len(self.parts)
        self.tally = StepTally(weights, call.loss.metrics if call.loss is not None else {})
        self.adapters: Mapping[int, Adapter] = {}
        self.recorder = Recorder(devices[0]) if call.record else None
        self.outputs: dict[int, Any] = {}
        self.shared: list[Any] = []
        self.batch_gradients: list[tuple[Tensor, Tensor]] = []
        self.result = StepResult(0.0)
        self.flops: Callable[[], float | None] = lambda: None
        self.draws: Callable[[int, torch.device], Draws | None] = lambda *_: None
        if call.seed is not None:
            self.draws = cache(partial(Draws, *call.seed))

    @property
    def kept(self) -> list[Any]:
        """The last stage's outputs in order, on its rank."""
        return [self.outputs[index] for index in sorted(self.outputs)]
