"""Cut a model into a number of stages that cost alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.errors import PartitionError, UsageError
from penstock.partition.balance import choose_cuts
from penstock.partition.costs import Measure, check_measure, stage_costs
from penstock.partition.traced.blocks import Blocks
from penstock.partition.traced.cutting import TracedCut, assemble
from penstock.partition.traced.export import Exported, export
from penstock.partition.traced.marks import Point
from penstock.partition.traced.skeleton import Skeleton
from penstock.partition.traced.traces import Cuts, Traces
from penstock.schedule import Placement
from penstock.values import spec_of_arguments

Balance = Measure | Sequence[float]
"""What is to be balanced: something that is measured, or a weight for each block."""

_REPEATS = 3


def cut_into(
    model: nn.Module,
    stages: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    balance: Balance = "flops",
    placement: Placement | None = None,
) -> TracedCut:
    """Cut a model between its blocks so that no rank costs more than it must.

    Args:
        model: as for :func:`cut_traced`.
        stages: how many.
        args: of a call with one microbatch; only ``"time"`` uses their numbers.
        kwargs: its arguments by name.
        balance: ``"flops"``, ``"parameters"``, ``"memory"`` or ``"time"``, or a weight for each block. Times
            differ from machine to machine: measure once and give the weights where several processes cut.
        placement: which rank holds which stage; by default each rank one.

    Raises:
        PartitionError: the model cannot be traced, or has fewer blocks than stages.
        UsageError: nothing that can be balanced, or weights of another number.
    """
    fine = _Fine(model, stages, tuple(args), dict(kwargs or {}))
    if fine.count < stages:
        raise PartitionError(
            f"the {type(model).__name__} has {fine.count} blocks, which cannot be cut into {stages} stages: "
            f"{', '.join(fine.names)}; ask for at most {fine.count}"
        )
    starts = choose_cuts(fine.weights(balance), stages, placement)
    return fine.cut([fine.points[start - 1] for start in starts[1:]])


@dataclass(frozen=True)
class Block:
    """A part of a model between two places where it can be cut.

    Args:
        name: the module that it begins with.
        costs: what it costs, by what was measured.
    """

    name: str
    cost: float


def weigh_blocks(
    model: nn.Module,
    stages: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    balance: Measure = "flops",
) -> list[Block]:
    """The blocks that :func:`cut_into` shares out, with what they cost.

    Args:
        model: as for :func:`cut_into`, like what follows.
        stages: how many; large modules are opened where there would be too few blocks.
        args: of a call with one microbatch.
        kwargs: its arguments by name.
        balance: what is measured.
    """
    fine = _Fine(model, stages, tuple(args), dict(kwargs or {}))
    return [Block(*pair) for pair in zip(fine.names, fine.weights(balance), strict=True)]


class _Fine:
    """A model cut between all its blocks."""

    def __init__(
        self, model: nn.Module, stages: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._model, self._args, self._kwargs = model, args, kwargs
        self._call = spec_of_arguments(args, kwargs)
        self._skeleton = Skeleton(model)
        paths = [path for path, _ in model.named_modules() if path]
        self._exported: Exported = export(
            self._skeleton, self._call, paths, training=model.training
        )
        self.points = Blocks(model, self._exported.graph, stages).points()

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return len(self.points) + 1

    @property
    def names(self) -> list[str]:
        """The blocks, by the modules that they begin at."""
        return ["the beginning", *map(str, self.points)]

    def cut(self, points: Iterable[Point]) -> TracedCut:
        """The model cut at some of the points."""
        return assemble(self._model, self._traces(points))

    def weights(self, balance: Balance) -> list[float]:
        """What each block costs.

        Raises:
            UsageError: as :func:`cut_into`.
        """
        if not isinstance(balance, str):
            return self._given(balance)
        check_measure(balance)
        if balance == "time":
            costs = stage_costs(
                self.cut(self.points).partition, self._args, self._kwargs, repeats=_REPEATS
            )
        else:
            costs = self._without_data()
        return [cost.by(balance) for cost in costs]

    def _without_data(self) -> Any:
        parts = assemble(self._skeleton.model, self._traces(self.points)).partition
        args, kwargs = self._call.fill([self._skeleton.empty(spec) for spec in self._call.tensors])
        with self._skeleton.mode:
            return stage_costs(parts, args, kwargs)

    def _given(self, weights: Sequence[float]) -> list[float]:
        if len(weights) != self.count:
            raise UsageError(
                f"{len(weights)} weights for {self.count} blocks; give one for each, which begin at: "
                f"{', '.join(self.names)}"
            )
        return [float(weight) for weight in weights]

    def _traces(self, points: Iterable[Point]) -> Traces:
        cuts = Cuts(tuple(points), in_code=False)
        return Traces(
            self._skeleton,
            cuts,
            self._call,
            training=self._model.training,
            exported=self._exported,
        )
