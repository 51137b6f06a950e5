"""A call of the pipeline: what a rank brings to it, what all bring together, and what came of it.

A rank's digest is a hash of how its arguments and its stages look. If all ranks have brought these digests
before, the call is known. If not, they exchange descriptions. A rank that refuses its arguments says so in
its digest; all ranks then refuse the call before anything is sent or changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from math import isfinite
from struct import pack, unpack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock._engine.devices import autocast_types
from penstock._engine.faults import versions, without_library_frames
from penstock._engine.microbatches import Batch, Microbatch
from penstock._engine.parallel import Adapters, spread, whole
from penstock._engine.rng import Draws
from penstock._engine.runtime.alike import Samples, may_differ
from penstock._engine.runtime.hooks import Hooks, Recorder
from penstock._engine.runtime.kinds import Agreement
from penstock._engine.runtime.loss import StepLoss, Weights
from penstock._engine.runtime.result import StepResult, StepTally
from penstock._engine.transport import Job
from penstock.errors import AgreementError, PenstockError, StageError
from penstock.schedule import Action, Op, Schedule
from penstock.stage import OverlapFunction


@dataclass(eq=False)
class Call:
    """One call of the pipeline. Every rank has one; they differ only in what their processes were given.

    What it says is complete before any rank begins it, see :meth:`refusing`.

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
        same_batch: whether every rank must be given the same batch; None: those in which several ranks were
            given something compare it now and then.
        settings: returns the settings of optimizers that all ranks must have alike.
        finalizes: whether gradients are averaged over replicas and reduced over shards at its end, rather
            than by a later call.
        slices: into how many slices sequences are cut in training, each a microbatch of its own in the batch;
            0 if stages hand on no state.
        overlap: the user's function that runs overlapped pairs, if any.
        custom: functions that do the work of some ops; each is called with the usual function for actions,
            which it may call, and the action.
    """

    batch: Batch = field(default_factory=Batch)
    loss: StepLoss | None = None
    trains: bool = True
    outputs: bool = False
    record: bool = False
    seed: tuple[int, int] | None = None
    keep: bool = False
    hooks: Hooks | None = None
    finite: bool = False
    refusal: PenstockError | None = None
    same_batch: bool | None = False
    settings: Callable[[], Samples] = dict
    finalizes: bool = True
    slices: int = 0
    overlap: OverlapFunction | None = None
    custom: Mapping[Op, Callable[[Callable[[Action], None], Action], None]] | None = None

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """A context that completes the call: an error in it is raised on all ranks, and none begins."""
        try:
            yield
        except Exception as error:
            self.batch, self.refusal = Batch(), refusal_of(error)

    @property
    def mode(self) -> str:
        """The mode of the call; with its arguments, it decides which values travel."""
        doing = "train" if self.trains else "evaluate"
        doing += "" if self.finalizes else " on"
        losses = "with" if self.loss else "without"
        return " ".join([doing, losses, "loss", *autocast_types()])

    @property
    def method(self) -> str:
        """The method that the user called."""
        return "step" if self.trains else "predict" if self.loss is None else "evaluate"


def refusal_of(error: Exception) -> PenstockError:
    """The error that every rank raises for one before the first microbatch, also of the user's code."""
    if isinstance(error, PenstockError):
        return error
    refusal = StageError(f"before the first microbatch: {type(error).__name__}: {error}")
    refusal.__cause__ = error.with_traceback(without_library_frames(error))
    return refusal


# ---- what the ranks bring


REFUSED = -1
"""The digest of a rank that refuses; all others are at least 0."""
MOST_SUMS = 5
"""The number of losses whose weights a :class:`Head` has room for."""


class Head(NamedTuple):
    """What a rank says before a call, in a few whole numbers: all that a known call needs.

    The first of them, :data:`EACH`, are of one call. The others stay, call after call, while the same is
    called with arguments that look the same.

    Attributes:
        step: the number of the step that it begins.
        mark: a hash of its samples, see :class:`Sampled`.
        digest: a hash of what it brings.
        expected: the number of the agreement that it expects; 0 for none, or if it refuses.
        learns: which of its weights learn, see :func:`mark_of`.
        sums: for each loss, the sum of the microbatches' weights; nan where it is not known here.
    """

    step: int
    mark: int
    digest: int
    expected: int
    learns: int
    sums: tuple[float, ...]

    def numbers(self) -> list[int]:
        """The numbers to send."""
        sums = self.sums[:MOST_SUMS]
        bits = unpack(f"={len(sums)}q", pack(f"={len(sums)}d", *sums))
        return [*self[:-1], len(self.sums), *bits]

    @staticmethod
    def read(numbers: Sequence[int]) -> Head:
        """Return what :meth:`numbers` sent."""
        step, mark, digest, expected, learns, count, *bits = numbers
        sums = unpack(f"={len(bits)}d", pack(f"={len(bits)}q", *bits))
        known = sums[:count] if count <= MOST_SUMS else ()
        return Head(step, mark, digest, expected, learns, known)


def is_known(heads: Sequence[Head]) -> bool:
    """Tell if ranks with these heads begin a call that they all know, so that none can refuse it any more."""
    first = heads[0]
    return (
        first.expected > 0
        and all((of.expected, len(of.sums)) == (first.expected, len(first.sums)) for of in heads)
        and not may_differ([head.mark for head in heads])
        and all(map(isfinite, first_known([head.sums for head in heads])))
    )


def first_known(rows: Sequence[Sequence[float]]) -> list[float]:
    """Of numbers that some ranks do not know, the first that is known in each column; nan for none."""
    return [max(column, key=isfinite) for column in zip(*rows, strict=True)]


# ---- a check at set-up: all ranks run the same plan


def check_plans(
    job: Job, schedule: Schedule, details: Mapping[str, str] | None, mine: Any
) -> list[Any]:
    """Check that all ranks run the same schedule of the same model with the same versions.

    Args:
        job: all processes.
        schedule: the schedule of a training step.
        details: texts that must be the same on every rank too, by name.
        mine: a JSON value for the other ranks of this pipeline.

    Returns:
        Those values, by rank.

    Raises:
        AgreementError: they do not; the message lists which rank has what.
    """
    plan = {
        "schedule": f"{schedule.name} {_digest(str(schedule))}",
        "microbatches": str(schedule.microbatches),
        **versions(),
        "precision": " ".join([str(torch.get_default_dtype()), *autocast_types()]),
        **(details or {}),
    }
    # The texts of all stages are long: only digests travel, unless they differ.
    digest = _digest(repr(sorted(plan.items())))
    rows = job.meet(lambda: [digest, job.activity.pipeline[0], mine], among=job.whole)
    if len({theirs for theirs, *_ in rows}) == 1:
        return [value for _, first, value in rows if first == job.activity.pipeline[0]]
    plans = dict(job.meet(lambda: [job.activity.name, plan], among=job.whole))
    differing = []
    for name in dict.fromkeys(name for plan in plans.values() for name in plan):
        holders: dict[str, list[str]] = {}
        for rank, theirs in plans.items():
            holders.setdefault(theirs.get(name, "none"), []).append(rank)
        if len(holders) > 1:
            texts = (f"{value} on {', '.join(ranks)}" for value, ranks in holders.items())
            differing.append(f"{name}: {', '.join(texts)}")
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


class StepState:
    """A call that is being carried out: this process's inputs, and its results.

    Args:
        call: the call.
        agreement: what the ranks agreed on for it.
        weights: how much each microbatch counts.
        parts: the arguments of each microbatch.
        devices: the device of each stage here.
        scores: what the author's code does in each microbatch; None for stages that were placed by hand.

    Attributes:
        draws: for each stage here, the draws of each microbatch; None leaves the generators alone.
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
        parts: Sequence[Microbatch],
        devices: Mapping[int, torch.device],
        scores: Sequence[Any] | None = None,
    ) -> None:
        self.call, self.agreement, self.weights = call, agreement, weights
        self.parts = list(parts)
        self.scores = [None] * len(self.parts) if scores is None else list(scores)
        self.targets = call.batch.targets or [None] * len(self.parts)
        self.tally = StepTally(weights, call.loss.metrics if call.loss is not None else {})
        self.adapters: Adapters | None = None
        self.recorder = Recorder(next(iter(devices.values()))) if call.record else None
        self.outputs: dict[int, Any] = {}
        self.shared: list[Any] = []
        self.batch_gradients: list[tuple[Tensor, Tensor]] = []
        self.result = StepResult()
        self.flops: Callable[[], float | None] = lambda: None
        self.draws: dict[int, Sequence[Draws | None]] = {}
        on: dict[torch.device, Sequence[Draws | None]] = {}
        for stage, device in devices.items():
            if device not in on:
                each, seed = range(len(self.parts)), call.seed
                on[device] = [None if seed is None else Draws(*seed, i, device) for i in each]
            self.draws[stage] = on[device]

    def bring(self, microbatch: int, args: Sequence[Any] | None, kwargs: Mapping[str, Any]) -> None:
        """Take other arguments for the stages of this process; without ``args``, those stay."""
        args = self.parts[microbatch].args if args is None else args
        self.parts[microbatch] = Microbatch(tuple(args), {}, 0, local=dict(kwargs))

    def sum_batch_gradients(self, job: Job) -> None:
        """Add up the gradients of the batch over the ranks: each has those of the stages that it runs."""
        learners = self.agreement.model_call.learners(self.parts, self.call.batch.targets)
        places = {id(tensor): place for place, tensor in reversed([*enumerate(learners)])}
        here: list[Tensor | None] = [None] * len(learners)
        sums: list[tuple[Tensor, Tensor]] = []
        for tensor, gradient in self.batch_gradients:
            place = places.get(id(tensor))
            if place is None:
                sums.append((tensor, gradient))  # it is a value that other ranks do not hear of
                continue
            before = here[place]
            here[place] = gradient if before is None else before + gradient
        dtype = reduce(torch.promote_types, [t.dtype for t in learners], torch.float32)
        rows = [torch.tensor([mine is not None for mine in here], device="cpu")]
        for tensor, mine in zip(learners, here, strict=True):
            rows.append(torch.zeros(tensor.shape, device="cpu") if mine is None else whole(mine))
        row = torch.cat([numbers.reshape(-1).to("cpu", dtype) for numbers in rows])
        total = job.pipeline.sum(row, "the sum of the gradients of the batch")
        users, *flat = total.split([numbers.numel() for numbers in rows])
        for tensor, used, numbers in zip(learners, users.tolist(), flat, strict=True):
            if used and not tensor.is_meta:
                gradient = numbers.reshape(tensor.shape).to(tensor.device, tensor.dtype)
                sums.append((tensor, spread(tensor, gradient)))
        self.batch_gradients = sums

    @property
    def kept(self) -> list[Any]:
        """The last stage's outputs in order, on its rank."""
        return [self.outputs[index] for index in sorted(self.outputs)]
