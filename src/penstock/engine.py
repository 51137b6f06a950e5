"""Pipeline: the user's object. It wires the parts together and does little itself."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from penstock.errors import PoisonedError, UsageError
from penstock.hosting import check_given, connect_if_launched, ends_of, held_by, placed_on, world_of
from penstock.microbatch import Microbatch, Rules, merge, output_dim, split_batch
from penstock.partition import save_index, save_stage
from penstock.plan import Plan, Stages, check_model, cut, make_plan
from penstock.runtime import (
    Order,
    Rank,
    Report,
    Task,
    agree_plan,
    channels,
    drive,
    engine_for,
)
from penstock.schedule import Action, Schedule, Span, Timeline, parse_action, replay
from penstock.schedule.base import flat
from penstock.stage import PipelineStage, home_of
from penstock.step import Loss, LossFunction, Reduction, StepResult, scale_gradients
from penstock.transport import Transport

T = TypeVar("T")


class Pipeline:
    """A model cut into stages that ranks run as a pipeline.

    The same lines run in one process, where all ranks live in it and take turns, and under ``torchrun``,
    where this process is one rank.

    Args:
        model: an ``nn.Sequential``, or a model whose forward is a chain of modules, cut by ``stages``.
        schedule: a name (see :func:`penstock.schedule.names`), a ``.csv`` or ``.json`` file, or a
            :class:`~penstock.schedule.Schedule`.
        ranks: how many ranks; by default the world size under torchrun, else as the stages need.
        microbatches: into how many parts a batch is split; by default two a rank.
        loss_fn: ``(output, target) -> scalar``; without it the pipeline only predicts.
        reduction: whether ``loss_fn`` is a ``"mean"`` or a ``"sum"`` over samples.
        stages: how many, or for each stage its modules' paths in the order of the calls, or a Partition.
        rules: how arguments are split, by position or name; by default along dimension 0. ``"target"``
            says it of the target, and ``"output"`` along which dimension outputs are put together.
        device: where the stages live; by default where the model is. ``"cuda"`` under torchrun is the
            device of ``LOCAL_RANK``.
        group: under torchrun, the process group of this pipeline's ranks; by default all.
        engine: how backward is cut in two, see :class:`PipelineStage`; by default what the schedule needs.

    Raises:
        UsageError: something asked for cannot be had; see its subclasses in :mod:`penstock.errors`.
        AgreementError: the ranks were given different plans.
    """

    def __init__(  # noqa: PLR0913 - the one place where a user says everything, by name
        self,
        model: nn.Module,
        *,
        schedule: str | os.PathLike[str] | Schedule = "1F1B",
        ranks: int | None = None,
        microbatches: int | None = None,
        loss_fn: LossFunction | None = None,
        reduction: Reduction = "mean",
        stages: Stages = None,
        rules: Rules | None = None,
        device: torch.device | str | None = None,
        group: Any = None,
        engine: str | None = None,
    ) -> None:
        check_model(model)
        home = placed_on(device)
        found = connect_if_launched(home or home_of(model), group)
        plan = make_plan(
            schedule, world_of(found) if ranks is None else ranks, stages, microbatches
        )
        ends = ends_of(plan, found)
        parts = cut(model, stages, plan.stages).modules
        # Only these are moved to the device: the others may not fit there.
        held = sorted(s for e in ends for s in plan.training.placement.stages_on(e.rank))
        made = [PipelineStage(parts[i], i, plan.stages, home, engine=engine) for i in held]
        loss = None if loss_fn is None else Loss(loss_fn, reduction)
        self._set_up(plan, ends, made, loss, rules)

    @classmethod
    def from_stages(  # noqa: PLR0913 - as the constructor
        cls,
        stages: Sequence[PipelineStage],
        *,
        schedule: str | os.PathLike[str] | Schedule,
        microbatches: int | None = None,
        loss_fn: LossFunction | None = None,
        reduction: Reduction = "mean",
        rules: Rules | None = None,
        group: Any = None,
    ) -> Pipeline:
        """A pipeline of stages placed by hand.

        Args:
            stages: in one process all of them; under torchrun those of this rank.
            schedule: a name or a Schedule; it says which stage belongs on which rank.
            microbatches: as for :class:`Pipeline`, like what follows.
            loss_fn: computes the loss on the last stage.
            reduction: ``"mean"`` or ``"sum"``.
            rules: how arguments are split.
            group: the process group of this pipeline's ranks.
        """
        check_given(stages)
        found = connect_if_launched(stages[0].device, group)
        plan = make_plan(schedule, world_of(found), stages[0].count, microbatches)
        pipe = cls.__new__(cls)
        loss = None if loss_fn is None else Loss(loss_fn, reduction)
        pipe._set_up(plan, ends_of(plan, found), stages, loss, rules)
        return pipe

    def _set_up(
        self,
        plan: Plan,
        ends: Sequence[Transport],
        stages: Sequence[PipelineStage],
        loss: Loss | None,
        rules: Rules | None,
    ) -> None:
        schedule = plan.training
        self._plan, self._loss, self._rules = plan, loss, rules
        self._ranks = [Rank(end, held_by(schedule, end, stages, len(ends))) for end in ends]
        for stage in self.stages:
            stage.prefer_engine(engine_for(schedule, stage.index))
        self._failure: BaseException | None = None
        self._run([agree_plan(rank.transport, schedule) for rank in self._ranks])
        for rank in self._ranks:
            rank.transport.open(channels(schedule))
        counts = self._run([rank.exchange(len(rank.parameters)) for rank in self._ranks])
        self._counts: list[int] = counts[0]

    # ---- what a pipeline is

    @property
    def schedule(self) -> Schedule:
        """The schedule of a training step, with its messages."""
        return self._plan.training

    @property
    def leads(self) -> bool:
        """Whether rank 0 lives in this process: the one that prints and writes for all."""
        return any(rank.number == 0 for rank in self._ranks)

    @property
    def stages(self) -> tuple[PipelineStage, ...]:
        """The stages that live in this process, in order."""
        held = {index: stage for rank in self._ranks for index, stage in rank.stages.items()}
        return tuple(held[index] for index in sorted(held))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that live in this process, under their names in the unsplit model."""
        for stage in self.stages:
            yield from stage.module.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that live in this process."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers that live in this process, under their names in the unsplit model."""
        return {
            name: tensor
            for stage in self.stages
            for name, tensor in stage.module.state_dict().items()
        }

    # ---- what a pipeline does

    def step(self, *args: Any, target: Any, record: bool = False, **kwargs: Any) -> StepResult:
        """Forward and backward of a batch; gradients are added to the parameters' ``.grad``.

        Arguments that require grad get theirs too, on the rank that holds the first stage.

        Args:
            args: the model's arguments; under torchrun the same on every rank.
            target: what ``loss_fn`` compares with, split like the arguments.
            record: whether to note when each action ran.
            kwargs: the model's arguments by name.

        Returns:
            The same result on every rank.

        Raises:
            StageError: the model's or the loss's code raised.
            PoisonedError: an earlier call failed.
        """
        if self._loss is None:
            raise UsageError("step needs a loss; give the Pipeline a loss_fn")
        if not self._plan.training.trains:
            raise UsageError(
                f"the schedule {self.schedule.name!r} has no backward; eval does without"
            )
        if torch.is_inference_mode_enabled():
            raise UsageError(
                "step under torch.inference_mode() has no gradients; call it outside, or use eval"
            )
        parts, targets = self._parts(args, kwargs, target, fewer=False)
        order = Order(self._plan.training, parts, targets, self._loss, record=record)
        return self._carry_out(order)

    def eval(self, *args: Any, target: Any, outputs: bool = False, **kwargs: Any) -> StepResult:
        """The loss of a batch in evaluation mode, without gradients.

        Args:
            args: as for :meth:`step`; the batch may be smaller than a training batch.
            target: as for :meth:`step`.
            outputs: whether to give every rank the model's outputs.
            kwargs: the model's arguments by name.
        """
        if self._loss is None:
            raise UsageError("eval needs a loss; give the Pipeline a loss_fn, or use predict")
        parts, targets = self._parts(args, kwargs, target)
        schedule = self._plan.proven(len(parts), trains=False)
        with self._evaluating():
            return self._carry_out(Order(schedule, parts, targets, self._loss, outputs=outputs))

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for a batch in evaluation mode, on every rank."""
        parts, _ = self._parts(args, kwargs)
        schedule = self._plan.proven(len(parts), trains=False)
        with self._evaluating():
            return self._carry_out(Order(schedule, parts, outputs=True)).outputs

    def zero_grad(self) -> None:
        """Drop the gradients of the parameters that live in this process."""
        for parameter in self.parameters():
            parameter.grad = None

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients so that their norm over the whole model is at most ``max_norm``.

        Returns:
            The norm before, the same on every rank.
        """
        norm = self._run([rank.gradient_norm(self._counts) for rank in self._ranks])[0]
        scale_gradients(self.parameters(), norm, max_norm)
        return norm

    def agree(self, value: Any) -> list[Any]:
        """Exchange a JSON value between the ranks: all ranks' values, in rank order."""
        return self._run([rank.exchange(value) for rank in self._ranks])[0]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the weights as safetensors, a file a stage and an index, under the model's names."""
        path, count = Path(folder), self._plan.stages
        sizes = [
            [[i, save_stage(stage.module, path, i, count)] for i, stage in rank.stages.items()]
            for rank in self._ranks
        ]
        gathered = self._run(
            [rank.exchange(found) for rank, found in zip(self._ranks, sizes, strict=True)]
        )[0]
        if self.leads:
            save_index(path, {index: found for of in gathered for index, found in of})

    def close(self) -> None:
        """Give back what the transport holds, and the process group where this Pipeline started it."""
        for rank in self._ranks:
            rank.transport.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- how

    def _parts(
        self, args: Sequence[Any], kwargs: dict[str, Any], target: Any = None, *, fewer: bool = True
    ) -> tuple[list[Microbatch], list[Any]]:
        count = self._plan.microbatches
        return split_batch(args, kwargs, target, self._rules, count, fewer=fewer)

    def _carry_out(self, order: Order) -> StepResult:
        dim = output_dim(self._rules) if order.outputs else 0
        training = order.schedule.trains
        with torch.set_grad_enabled(training):
            reports = self._run([rank.run(order) for rank in self._ranks])
        first = reports[0]
        outputs = merge(first.outputs, dim) if order.outputs else None
        if not order.record:
            return StepResult(first.loss, outputs)
        return self._with_timeline(order.schedule, reports, outputs)

    def _with_timeline(
        self, schedule: Schedule, reports: Sequence[Report], outputs: Any
    ) -> StepResult:
        loss = reports[0].loss
        if len(reports) == schedule.ranks > 1:
            timeline = replay(schedule, _durations(reports))
            return StepResult(loss, outputs, timeline, "replayed", timeline.bubble)
        timeline = self._gather(schedule, reports[0])
        return StepResult(loss, outputs, timeline, "measured", timeline.bubble)

    def _gather(self, schedule: Schedule, report: Report) -> Timeline:
        """All ranks' spans, each on its own clock from the moment its program began."""
        rows = self.agree([[str(s.action), s.start, s.end] for s in report.spans])
        spans = (
            Span(rank, action, start, end)
            for rank, row in enumerate(rows)
            for text, start, end in row
            for action in flat((parse_action(text),))
        )
        return Timeline(tuple(spans), schedule.ranks)

    def _run(self, tasks: Sequence[Task[T]]) -> list[T]:
        if self._failure is not None:
            raise PoisonedError(
                f"an earlier call failed ({type(self._failure).__name__}: {self._failure}); "
                "build a new Pipeline"
            ) from self._failure
        try:
            return drive(tasks)
        except BaseException as error:
            self._failure = error
            for rank in self._ranks:
                rank.clear()
            raise

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluation mode, with each module's own mode restored afterwards."""
        modes = [(m, m.training) for stage in self.stages for m in stage.module.modules()]
        for stage in self.stages:
            stage.module.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def _durations(reports: Sequence[Report]) -> dict[Action, float]:
    """How long each action took, in seconds, in however many pieces."""
    found: defaultdict[Action, float] = defaultdict(float)
    for report in reports:
        for span in report.spans:
            found[span.action] += span.duration
    return found
