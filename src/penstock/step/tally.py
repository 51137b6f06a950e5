"""Add up losses and metrics: of one rank in a step, and then over all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from penstock.parallel import whole
from penstock.schedule import Timeline
from penstock.step.loss import MAIN, Losses, Metric, Number, Weights, measured

# ---- the result of a step


TimelineKind = Literal["measured", "replayed"]
"""Whether a timeline was measured on the ranks' own clocks, or replayed from measured durations."""


@dataclass(frozen=True)
class StepResult:
    """The result of a step or evaluation; the same on every rank.

    Attributes:
        loss: of the whole batch, including what the model added by :func:`penstock.add_loss`.
        losses: that of ``loss_fn`` alone under ``"main"``, and added losses under their names, unweighted.
        metrics: the user's metrics, by name.
        weight: the weight of the batch: its samples, or what ``loss_weight`` says.
        finite: whether the loss and the gradients are finite; if not, the step raises by default.
        outputs: the model's output for the whole batch, if it was asked for.
        timeline: when each rank did what, in seconds, if it was asked for.
        timeline_kind: ``"measured"`` on the ranks' own clocks; or ``"replayed"``, if all ranks share a
            process and take turns, so that their measured durations were put on one clock per rank.
        bubble: the fraction of the ranks' time in which they computed nothing, if it was asked for.
    """

    loss: float
    losses: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    weight: float = 0.0
    finite: bool = True
    outputs: Any = None
    timeline: Timeline | None = None
    timeline_kind: TimelineKind | None = None
    bubble: float | None = None


# ---- the sums of a rank, and what they come to over all ranks


class _Entry(NamedTuple):
    """A number of a microbatch, and its factor in the sum."""

    microbatch: int
    stage: int
    value: Number
    factor: float


class Tally:
    """The losses and metrics of one rank in one step.

    Args:
        weights: how much each microbatch counts.
        metrics: to be measured on the last stage.
    """

    def __init__(self, weights: Weights, metrics: Mapping[str, Metric]) -> None:
        self._weights = weights
        self._metrics = metrics
        self._entries: defaultdict[tuple[str, str], list[_Entry]] = defaultdict(list)

    def add_main(self, microbatch: int, stage: int, loss: Tensor) -> None:
        """Note the loss of a microbatch."""
        share = self._weights.shares[microbatch]
        self._enter(("main", ""), _Entry(microbatch, stage, _own(loss), share))

    def add_losses(self, microbatch: int, stage: int, losses: Losses) -> None:
        """Note the losses that a stage added to a microbatch's."""
        share = self._weights.shares[microbatch]
        for name, value in losses.named().items():
            self._enter(("loss", name), _Entry(microbatch, stage, value, share))
        for term in losses:
            entry = _Entry(microbatch, stage, _own(term.value), share * term.weight)
            self._enter(("added", ""), entry)

    def measure(self, microbatch: int, stage: int, output: Any, target: Any) -> None:
        """Evaluate the metrics of a microbatch."""
        if not self._metrics:
            return
        with torch.no_grad():
            for name, metric in self._metrics.items():
                found = metric(output, target)
                over, under, factor = measured(name, found, self._weights.counts[microbatch])
                self._enter(("over", name), _Entry(microbatch, stage, over, factor))
                self._enter(("under", name), _Entry(microbatch, stage, under, factor))

    def _enter(self, row: tuple[str, str], entry: _Entry) -> None:
        self._entries[row].append(entry)

    def mains(self) -> list[Tensor]:
        """The losses of the microbatches in order, on the rank that computed them."""
        found = sorted(self._entries.get(("main", ""), ()), key=lambda entry: entry.microbatch)
        return [entry.value for entry in found if isinstance(entry.value, Tensor)]

    def sums(self) -> Sums:
        """Everything that was noted, added up."""
        rows = {row: sorted(found, key=lambda e: e[:2]) for row, found in self._entries.items()}
        values = iter(_on_cpu([entry.value for found in rows.values() for entry in found]))
        totals = {
            row: sum((entry.factor * next(values) for entry in found), 0.0)
            for row, found in rows.items()
        }
        return Sums(totals, tuple(self._metrics))


def _own(loss: Tensor) -> Tensor:
    """A copy, since the scalar from a loss function may be a view of memory as large as the output."""
    return loss.detach().clone()


def _on_cpu(values: Sequence[Number]) -> list[float]:
    """Numbers as floats; tensors are brought to the CPU in one transfer per device."""
    found: dict[int, float] = {}
    devices = {value.device for value in values if isinstance(value, Tensor)}
    for device in devices:
        here = [i for i, v in enumerate(values) if isinstance(v, Tensor) and v.device == device]
        joined = torch.stack([whole(torch.as_tensor(values[i])).reshape(()).double() for i in here])
        found |= dict(zip(here, joined.tolist(), strict=True))
    return [found[i] if isinstance(v, Tensor) else float(v) for i, v in enumerate(values)]


@dataclass(frozen=True)
class Sums:
    """The sums of one rank.

    Args:
        totals: the sums, by kind and name.
        metrics: the names of the metrics, the same on every rank.
    """

    totals: Mapping[tuple[str, str], float]
    metrics: tuple[str, ...]

    @property
    def names(self) -> frozenset[str]:
        """The names of losses that stages of this rank added."""
        return frozenset(name for kind, name in self.totals if kind == "loss")

    def row(self, names: Iterable[str]) -> Tensor:
        """This rank's numbers in a fixed order, to be added up over the ranks.

        Args:
            names: of all added losses, the same on every rank.
        """
        keys = self._keys(names)
        seen = [float(name in self.names) for name in names]
        numbers = [*(self.totals.get(key, 0.0) for key in keys), *seen]
        return torch.tensor(numbers, dtype=torch.float64)

    def read(self, row: Sequence[float], names: Sequence[str], weight: float) -> StepResult:
        """The numbers of the step, from the sum of all ranks' rows."""
        keys = self._keys(names)
        found = dict(zip(keys, row, strict=False))
        seen = dict(zip(names, row[len(keys) :], strict=True))
        main, added = found["main", ""], found["added", ""]
        losses = {name: found["loss", name] for name in names if seen[name]}
        metrics = {name: _ratio(found["over", name], found["under", name]) for name in self.metrics}
        return StepResult(main + added, {MAIN: main, **losses}, metrics, weight)

    def _keys(self, names: Iterable[str]) -> list[tuple[str, str]]:
        measured = [(kind, name) for name in self.metrics for kind in ("over", "under")]
        return [("main", ""), ("added", ""), *measured, *(("loss", name) for name in names)]


def _ratio(over: float, under: float) -> float:
    return over / under if under else float("nan")
