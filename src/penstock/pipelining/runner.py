"""Runs the steps of torch-style schedules on Penstock's engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from penstock.errors import PenstockError, SpecError
from penstock.faults import FIRST_STEP, Patience
from penstock.pipeline.plan import Plan
from penstock.pipeline.ranks import LocalRanks
from penstock.pipeline.setup import being_made, connect_if_launched, ends_of, ranks_of
from penstock.pipeline.weights import HeldWeights
from penstock.pipelining.rows import ActionTuple, to_entry, to_tuple
from penstock.pipelining.stage import StageBase
from penstock.runtime import Call, Report
from penstock.schedule import Action, Op, Schedule
from penstock.schedule.action import OVERLAPPED, Entry
from penstock.stage import PipelineStage as OwnStage
from penstock.step import Loss
from penstock.values import Batch, Microbatch, arrived, flatten
from penstock.values.structure import mapped, tensors_of

Custom = Callable[[ActionTuple, Any], None]


def _detached(tensor: Tensor) -> Tensor:
    return arrived(tensor).detach()


class Runner:
    """The ranks of this process for one schedule. All processes of the group make it together.

    Args:
        schedule: of a training step, with or without its messages.
        stages: those of this process.
    """

    def __init__(self, schedule: Schedule, stages: Sequence[StageBase]) -> None:
        self._faces = list(stages)
        self._held: list[OwnStage] = [stage.own() for stage in stages]
        self._context: Any = None
        self._custom: dict[str, Custom] = {}
        self._replaced: dict[str, Callable[[Entry, Any], None]] = {}
        edges = next((tuple(s.edges) for s in stages if s.edges is not None), None)
        self._plan = Plan(
            schedule, schedule.ranks, schedule.stages, schedule.microbatches, edges or None
        )
        training = self._plan.training
        describe = None if edges else self._held[0].describe
        # The ranks meet in their first step. Before it, each may take as long as it likes.
        patience = Patience(meeting=FIRST_STEP)
        found = connect_if_launched(self._held[0].device, stages[0].group, patience)
        with being_made(found):
            ends = ends_of(self._plan, found)
            local = LocalRanks(ranks_of(self._plan, ends, self._held, describe, by_hand=True))
            local.assemble(training)
            shared = next((stage.shared for stage in stages if stage.shared), ())
            self._local = local
            self._weights = HeldWeights(local, shared, training.placement.rank_of)

    def serves(self, schedule: Schedule, stages: Sequence[StageBase]) -> bool:
        """Whether this runner still fits a schedule and its stages, whose modules may have been replaced."""
        held = [stage.own() for stage in stages]
        return self._plan.schedule is schedule and all(
            a is b for a, b in zip(held, self._held, strict=True)
        )

    def run(
        self,
        batch: Batch,
        loss: Loss | None,
        custom: Mapping[str, Custom],
        context: Any,
        *,
        trains: bool,
    ) -> tuple[list[Tensor], list[Any]]:
        """Run a training step, or its forwards alone.

        Returns:
            The losses and outputs of the last stage, if it is in this process.
        """

        def schedules(count: int, edges: Any) -> Schedule:
            return self._plan.proven(count, edges, trains=trains)

        self._context = context
        if self._custom != custom:
            # Made once and kept, since programs that the runtime has bound hold these functions.
            self._custom = dict(custom)
            self._replaced = {name: self._replacing(custom[name]) for name in custom}
        replaced = self._replaced
        call = Call(schedules, batch, loss, trains=trains, keep=True, replaced=replaced)
        with self._weights.training() if trains else nullcontext():
            reports: list[Report] = self._local.carry_out(call)
        losses = [found for report in reports for found in report.losses]
        # Detached, since backward has freed their graph.
        outputs = [mapped(found, _detached) for report in reports for found in report.kept]
        return losses, outputs

    def refuse(self, error: PenstockError, *, trains: bool) -> None:
        """Tell all ranks, which are in the same step, what is wrong with what this one was given.

        Raises:
            PenstockError: this error, on every rank.
        """
        self._local.carry_out(
            Call(lambda *_: self._plan.training, Batch(), trains=trains, refused=error)
        )

    def _replacing(self, function: Custom) -> Callable[[Entry, Any], None]:
        """A custom function in the form that the runtime calls; the stages here then run what it asks for."""

        def run(entry: Entry, perform: Callable[[Action], Any]) -> None:
            def by_hand(action: ActionTuple) -> Any:
                own = to_entry(action)
                return perform(own) if isinstance(own, Action) else None

            for face in self._faces:
                face.bind(by_hand)
            try:
                function(to_tuple(entry), self._context)
            finally:
                for face in self._faces:
                    face.bind(None)

        return run


def batch_of(arg_mbs: list[Any], kwarg_mbs: list[Any], targets: list[Any] | None) -> Batch:
    """The microbatches that this process was given."""
    parts = None
    if any(arg_mbs) or any(kwarg_mbs):
        pairs = zip(arg_mbs, kwarg_mbs, strict=True)
        parts = [_part(args, kwargs) for args, kwargs in pairs]
    sizes = [_sizes(of) for of in (arg_mbs if parts else None, targets) if of is not None]
    # The samples of each microbatch matter only if they differ.
    unlike = [found for found in sizes if found is not None and len(set(found)) > 1]
    return Batch(parts, targets, unlike[0] if unlike else None, len(arg_mbs))


def _part(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Microbatch:
    """A microbatch; what cannot be described to other ranks, such as a block mask, is set aside."""
    told: dict[str, Any] = {}
    aside: dict[str, Any] = {}
    for name, value in kwargs.items():
        (told if _describable(value) else aside)[name] = value
    return Microbatch(tuple(args), told, 0, aside=aside)


def _describable(value: Any) -> bool:
    try:
        flatten(value)
    except SpecError:
        return False
    return True


def _sizes(parts: Sequence[Any]) -> list[int] | None:
    first = [next(tensors_of(part), ("", None))[1] for part in parts]
    sizes = [len(tensor) for tensor in first if tensor is not None and tensor.dim()]
    return sizes if len(sizes) == len(parts) else None


CUSTOM_OPS = frozenset(
    {op.value for op in (Op.F, Op.B, Op.I, Op.W, Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD)}
    | {OVERLAPPED}
)
"""The kinds of work that a custom function may replace."""
