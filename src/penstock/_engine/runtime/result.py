"""The numbers of a step: added up on each rank while it runs, and over all ranks at its end."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, reduce
from itertools import chain
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Literal, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from penstock._engine.parallel import whole
from penstock._engine.runtime.loss import (
    MAIN,
    Losses,
    Metric,
    Number,
    StepLoss,
    Weights,
    metric_terms,
)
from penstock._engine.runtime.stopping import GracefulStop
from penstock._engine.transport import Group, Job, Replicas
from penstock.errors import AgreementError, UsageError
from penstock.schedule import Slow, Timeline

TimelineKind = Literal["measured", "replayed"]
"""Whether a timeline was measured on the ranks' own clocks, or replayed from measured durations."""


@dataclass(frozen=True)
class StepCost:
    """The cost of a step in this process; the functions are called on demand.

    Args:
        seconds: how long the step took.
        devices: the number of devices that shared the work.
        memory: returns the peak bytes of this process.
        flops: returns the model's floating-point operations, or None.
        peak: returns a device's peak operations per second, or None.
    """

    seconds: float
    devices: int
    memory: Callable[[], int]
    flops: Callable[[], float | None]
    peak: Callable[[], float | None]


class StepNumbers(NamedTuple):
    """The numbers of a step; see :class:`StepResult`."""

    loss: float = 0.0
    losses: Mapping[str, float] = MappingProxyType({})
    metrics: Mapping[str, float] = MappingProxyType({})
    finite: bool = True


@dataclass(frozen=True, eq=False, repr=False)
class StepResult:
    """The result of a step or evaluation; the same on every rank, but for time and memory.

    Attributes:
        read: returns the numbers. Where one process has all ranks, on a GPU, it waits for the step.
        weight: the weight of the batch: its samples, or what the loss's ``weight`` says.
        outputs: the model's output for the whole batch, if it was asked for.
        timeline: when each rank ran each action, in seconds, if it was asked for.
        timeline_kind: ``"measured"`` on the ranks' own clocks; or ``"replayed"``, if all ranks share a
            process and take turns, so that their measured durations were put on one clock per rank.
        bubble: the fraction of the ranks' time in which they computed nothing, if it was asked for.
        slow: the ranks, stages and links that took longer than they should, the worst first, if the step was
            recorded: than the costs of the plan say, or without a plan, than in the first recorded step. The
            latest four recorded steps are looked at together.
        cost: the time, memory and operations that the properties below report.
    """

    read: Callable[[], StepNumbers] = StepNumbers
    weight: float = 0.0
    outputs: Any = None
    timeline: Timeline | None = None
    timeline_kind: TimelineKind | None = None
    bubble: float | None = None
    slow: tuple[Slow, ...] = ()
    cost: StepCost | None = None

    def __repr__(self) -> str:
        rest = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if f.name not in ("read", "cost", "timeline")
        ]
        return f"StepResult({', '.join([*(f'{k}={v!r}' for k, v in self.read()._asdict().items()), *rest])})"

    @property
    def loss(self) -> float:
        """The loss of the whole batch, including losses added by :func:`penstock.add_loss`."""
        return self.read().loss

    @property
    def losses(self) -> Mapping[str, float]:
        """The loss of ``loss_fn`` under ``"main"``, then added losses by name, all unweighted."""
        return self.read().losses

    @property
    def metrics(self) -> Mapping[str, float]:
        """The user's metrics, by name."""
        return self.read().metrics

    @property
    def finite(self) -> bool:
        """Whether the loss and the gradients are finite; if not, the step raises by default."""
        return self.read().finite

    @property
    def seconds(self) -> float:
        """How long ``pipe.step`` took in this process, in seconds."""
        return math.nan if self.cost is None else self.cost.seconds

    @property
    def throughput(self) -> float:
        """Samples, or what the loss's ``weight`` counts such as tokens, per second over all replicas."""
        return self.weight / self.seconds

    @property
    def memory(self) -> int:
        """The peak bytes of this process so far: the most allocated on a GPU, or resident without one."""
        return 0 if self.cost is None else self.cost.memory()

    @property
    def tflops(self) -> float | None:
        """The model's own floating-point operations per second and device, in 10^12.

        Matrix products, convolutions and attention are counted, in one run without data on first use.
        Backward counts twice as much as forward, and recomputation does not count. None if
        the model cannot be run without data.
        """
        flops = None if self.cost is None else self.cost.flops()
        if self.cost is None or flops is None:
            return None
        return flops / (self.seconds * self.cost.devices * 1e12)

    @property
    def mfu(self) -> float | None:
        """``tflops`` as a share of the device's peak, from 0 to 1; None if either is not known."""
        peak = None if self.cost is None else self.cost.peak()
        if peak is None or self.tflops is None:
            return None
        return self.tflops * 1e12 / peak


_Row = tuple[str, str]
"""A kind of number and its name: ("main", ""), ("loss", name), ("over", metric) ..."""
_MAIN, _ADDED, _LARGEST = ("main", ""), ("added", ""), ("largest", "")


class _Weighed(NamedTuple):
    """A number of a microbatch, and its factor in the sum."""

    row: _Row
    microbatch: int
    stage: int
    value: Number
    factor: float


_PLACE = itemgetter(slice(3))
"""Where a number belongs: its row, then its microbatch and stage."""


class StepTally:
    """The losses and metrics of one process in one step.

    Args:
        weights: how much each microbatch counts.
        metrics: the metrics by name, for the last stage.
    """

    def __init__(self, weights: Weights, metrics: Mapping[str, Metric]) -> None:
        self._weights = weights
        self._metrics = metrics
        self._terms: list[_Weighed] = []

    def add_main(
        self, microbatch: int, stage: int, loss: Tensor, share: float | None = None
    ) -> None:
        """Note the loss of a microbatch, or with its own share that of the batch."""
        # A copy, since the scalar from a loss function may be a view of memory as large as the output.
        value = loss.detach().clone()
        share = self._weights.shares[microbatch] if share is None else share
        self._terms.append(_Weighed(_MAIN, microbatch, stage, value, share))

    def add_losses(self, microbatch: int, stage: int, losses: Losses) -> None:
        """Note the losses that a stage added for a microbatch."""
        for name, value in losses.named().items():
            share = self._weights.of_added(name).shares[microbatch]
            self._terms.append(_Weighed(("loss", name), microbatch, stage, value, share))
        for name, value, weight in losses.terms:
            share = self._weights.of_added(name).shares[microbatch] * weight
            number = value.detach().clone()
            self._terms.append(_Weighed(_ADDED, microbatch, stage, number, share))

    def measure(self, microbatch: int, stage: int, output: Any, target: Any) -> None:
        """Evaluate the metrics of a microbatch."""
        with torch.no_grad():
            for name, metric in self._metrics.items():
                over, under, factor = metric_terms(
                    name, metric(output, target), self._weights.counts[microbatch]
                )
                for kind, number in (("over", over), ("under", under)):
                    self._terms.append(_Weighed((kind, name), microbatch, stage, number, factor))

    def main_losses(self) -> list[Tensor]:
        """The losses of the microbatches in order, on the rank that computed them."""
        main = [term for term in sorted(self._terms, key=_PLACE) if term.row == _MAIN]
        return [term.value for term in main if isinstance(term.value, Tensor)]

    def summed(self, largest: Tensor | None) -> Callable[[], tuple[dict[_Row, float], bool]]:
        """Add up all that was noted, by microbatch and stage: the same bits in every schedule.

        Args:
            largest: the largest gradient, if it is to be looked at.

        Returns:
            A function that reads the sums, and whether the largest gradient is finite.
        """
        terms = sorted(self._terms, key=_PLACE)
        if largest is not None:
            terms.append(_Weighed(_LARGEST, 0, 0, largest, 1.0))
        # Of those on a device, one transfer for each type. They are stacked now, as some are views of memory
        # as large as an output.
        tensors: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for term in terms:
            if isinstance(term.value, Tensor):
                kind = term.value.device, term.value.dtype
                tensors[kind].append(whole(term.value).reshape(()))
        stacked = {kind: torch.stack(of_kind).double() for kind, of_kind in tensors.items()}

        def read() -> tuple[dict[_Row, float], bool]:
            numbers = {kind: iter(row.tolist()) for kind, row in stacked.items()}
            sums = dict[_Row, float]()
            for row, _, _, value, factor in terms:
                kind = (value.device, value.dtype) if isinstance(value, Tensor) else None
                number = float(value) if kind is None else next(numbers[kind])
                # A term with factor 0 may be nan.
                sums[row] = sums.get(row, 0.0) + (factor * number if factor else 0.0)
            return sums, math.isfinite(sums.pop(_LARGEST, 0.0))

        return read


class Numbers:
    """Adds up a step's numbers by name: in one sum over the ranks, and one over the replicas.

    All ranks of all replicas keep one table of the names that they have met, so that each number has its
    place in the sums. A new name, on whichever rank, enters all tables, and the sums are made again.

    Attributes:
        wishes: how many processes wished to stop in the last call, see :class:`GracefulStop`.
    """

    def __init__(self) -> None:
        self._rows = sorted([_MAIN, _ADDED])
        self.wishes = 0.0, 0.0

    def share(
        self,
        job: Job,
        group: Group,
        tally: StepTally,
        loss: StepLoss | None,
        weights: Weights,
        largest: Tensor | None,
    ) -> StepResult:
        """The result of a call, the same on every rank.

        If nobody else makes the call, its numbers are read when they are asked for.

        Args:
            job: this process among the others.
            group: those that make the call.
            tally: the losses and metrics of this process.
            loss: the loss, if one was computed.
            weights: the weights of the microbatches.
            largest: the largest gradient here, if it is to be looked at.

        Raises:
            AgreementError: the ranks were given, or computed, different weights.
            UsageError: replicas that can only add up numbers have losses or metrics of different names.
        """
        replicas = Replicas() if loss is None else loss.replicas
        summed_here, metrics = tally.summed(largest), () if loss is None else loss.metrics
        wishes, unknown = GracefulStop.wishes(), 1.0
        if group.size == replicas.number == 1:
            self.wishes = wishes[0], wishes[1]
            return StepResult(cache(lambda: _numbers_of(*summed_here(), metrics)), weights.total)
        sums, finite = summed_here()
        while unknown:
            new = [row for row in sums if row not in self._rows]
            mine = [sums.get(row, 0.0) for row in self._rows]
            mine += [float(row in sums) for row in self._rows]
            mine += [_share(loss, weights, name) for _, name in self._rows]
            mine += [float(not finite), float(len(new)), *wishes, weights.mark]
            row = torch.tensor(mine, dtype=torch.float64, device="cpu")
            rows = [*group.gather(row, "the sum after the step")]
            _check_weights(job, weights, [float(theirs[-1]) for theirs in job.own(rows)])
            of_replicas = [self._of_pipeline(of) for of in job.by_replica(rows)]
            # Who makes the call goes on, stops, and learns of new names together.
            ends = reduce(torch.add, rows)[-5:-1]
            summed = torch.cat([reduce(torch.add, of_replicas), ends])
            if replicas.number > 1 and not job.reaches_replicas:
                summed = replicas.added(summed)
            *numbers, ill, unknown, signalled, late = summed.tolist()
            if unknown:
                self._learn(job, group, replicas, new)
        self.wishes = signalled, late
        result = _numbers_of(self._means(numbers, replicas.number), not ill, metrics)
        return StepResult(lambda: result, weights.total)

    def _of_pipeline(self, rows: Sequence[Tensor]) -> Tensor:
        """Of what the ranks of a pipeline bring: its values, which of them exist, and its shares of these."""
        size = len(self._rows)
        values, present = reduce(torch.add, rows)[: 2 * size].split(size)
        there = present.sign()
        return torch.cat([values, there, there * rows[0][2 * size : 3 * size]])

    def _means(self, numbers: Sequence[float], replicas: int) -> dict[_Row, float]:
        """The numbers that exist; a named loss that some replicas lack is the mean of those that have it."""
        size = len(self._rows)
        columns = numbers[:size], numbers[size : 2 * size], numbers[2 * size :]
        return {
            row: value / share if row[0] == "loss" and share and count < replicas else value
            for row, value, count, share in zip(self._rows, *columns, strict=True)
            if count
        }

    def _learn(self, job: Job, group: Group, replicas: Replicas, new: list[_Row]) -> None:
        """Add the new names of all that make the call to the table."""
        rows = [*chain(*group.meet(lambda: new))]
        self._rows = sorted({*self._rows, *map(tuple, rows)})
        if replicas.number > 1 and not job.reaches_replicas:
            mark = float(crc32(repr(self._rows).encode()) & 0xFFFF)
            marks = torch.tensor([mark, mark**2], dtype=torch.float64, device="cpu")
            once, squared = replicas.added(marks).tolist()
            if squared * replicas.number != once**2:
                raise UsageError(
                    f"replicas differ in the names of their losses and metrics, which are here "
                    f"{[name for _, name in self._rows if name]}; replicas that can only add up numbers must "
                    "all have the same: give replicas= a process group instead"
                )


def _numbers_of(values: Mapping[_Row, float], finite: bool, metrics: Iterable[str]) -> StepNumbers:
    """The numbers of a step, from its sums by name.

    Args:
        values: the sums.
        finite: whether all gradients are finite.
        metrics: the names of metrics that are there even if no microbatch was measured.
    """
    main = values.get(_MAIN, 0.0)
    loss = main + values.get(_ADDED, 0.0)
    losses, ratios = {MAIN: main}, dict.fromkeys(metrics, math.nan)
    for (kind, name), value in sorted(values.items()):
        if kind == "loss":
            losses[name] = value
        elif kind == "under":
            ratios[name] = values["over", name] / value if value else math.nan
    return StepNumbers(loss, losses, ratios, finite and math.isfinite(loss))


def _share(loss: StepLoss | None, weights: Weights, name: str) -> float:
    """This replica's share of the weight that a named loss is averaged by; 0 where losses are added up."""
    of = weights.of_added(name)
    if loss is None or not of.total:
        return 0.0
    adds_up = loss.reduction == "sum" and loss.weights.get(name, loss.weights[MAIN]) is None
    return 0.0 if adds_up else sum(of.counts) / of.total


def _check_weights(job: Job, weights: Weights, marks: Sequence[float]) -> None:
    """Check that all ranks of the pipeline have the same weights but for rounding, from their marks."""
    if max(marks) - min(marks) <= _ROUNDING * max(map(abs, marks)):
        return
    factor = max(weights.seeds, default=0.0)
    rows = job.pipeline.meet(lambda: f"{weights.total:g} in all, gradients times up to {factor:g}")
    raise AgreementError(
        "ranks differ in the weights of the loss: "
        f"{'; '.join(f'rank {rank}: {text}' for rank, text in enumerate(rows))}; give every rank the same "
        "weights of the loss, total_weight, accumulate and scaler, and the same targets where it is given "
        "any; discard the gradients of this step"
    )


_ROUNDING = 1e-12
"""The relative difference allowed between ranks' weights, which may differ by rounding only."""
