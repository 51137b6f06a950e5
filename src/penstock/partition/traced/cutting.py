"""Cut a model into stages by tracing a call of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.errors import PartitionError
from penstock.partition.base import Partition, Shared
from penstock.partition.shared import find_shared
from penstock.partition.traced.layout import check_points
from penstock.partition.traced.ownership import share_out
from penstock.partition.traced.skeleton import Skeleton
from penstock.partition.traced.stage import TracedStage
from penstock.partition.traced.traces import Cuts, Traces
from penstock.values import spec_of_arguments


@dataclass(frozen=True)
class TracedCut:
    """A model that was traced and cut.

    Args:
        traces: its graphs.
        modules: its stages.
        shared: what several of them hold.
    """

    traces: Traces
    modules: tuple[TracedStage, ...]
    shared: tuple[Shared, ...]

    @property
    def partition(self) -> Partition:
        """The stages, as a pipeline takes them."""
        edges = self.traces.first.wiring.edges
        return Partition(self.modules, edges, self.shared, self.modules[0].describe)


def cut_traced(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    cuts: Cuts | None = None,
) -> TracedCut:
    """Cut a model at marks in the graph of a call.

    Args:
        model: any that ``torch.export`` can trace; it is not changed, and shares its parameters with the
            stages.
        args: of a call with one microbatch; only shapes and types count.
        kwargs: its arguments by name.
        cuts: where; by default at each ``pipe_split()`` in its code.

    Raises:
        PartitionError: it cannot be traced, or not be cut there.
    """
    cuts = cuts or Cuts()
    check_points(model, cuts.points)
    call = spec_of_arguments(tuple(args), dict(kwargs or {}))
    traces = Traces(Skeleton(model), cuts, call, training=model.training)
    _check_stages(traces)
    return assemble(model, traces)


def assemble(model: nn.Module, traces: Traces) -> TracedCut:
    """The stages of a model whose graphs are cut."""
    ownership = share_out(model, traces.first, traces.layout.stages)
    saved = set(model.state_dict(keep_vars=True))
    together: list[TracedStage] = []
    for index, own in enumerate(zip(ownership.tensors, ownership.names, strict=True)):
        TracedStage(index, traces, *own, saved, together).train(model.training)
    cut = TracedCut(traces, tuple(together), find_shared(model, together))
    cut.partition.check_covers(model)
    return cut


def _check_stages(traces: Traces) -> None:
    if traces.layout.marks and traces.layout.stages == 1:
        raise PartitionError(
            f"the cuts {list(traces.layout.marks)} leave the whole model in one stage; "
            "cut between two modules that compute something"
        )
