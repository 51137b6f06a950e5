"""A pipeline stage under torch's name and arguments, a face over Penstock's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock.errors import UsageError
from penstock.parallel import group_of, let_cross, seat
from penstock.partition import Shared
from penstock.pipelining.actions import ActionTuple, ComputationType
from penstock.pipelining.refusals import CallError, PlacementError
from penstock.stage import PipelineStage as OwnStage

Perform = Callable[[ActionTuple], Any]
"""Carries out an action of the step that runs."""


class StageBase:
    """What schedules need of a stage.

    Attributes:
        submod: the slice of the model; it may be replaced before the first step.
        stage_index: which stage it is.
        num_stages: how many there are.
        device: where it lives.
        group: the process group of the pipeline.
        group_rank: this process's place there.
        group_size: how many processes it has.
        has_backward: whether the schedule runs a backward for it.
        edges: which values travel between the stages; ``None`` where each feeds the next.
        shared: the weights that stages share, the same on every rank: their gradients are added up and copies
            stay equal. Without it they are as many weights as there are stages that hold one.
    """

    submod: Any = None
    stage_index: int = 0
    num_stages: int = 1
    device: torch.device = torch.device("cpu")
    group: Any = None
    group_rank: int = 0
    group_size: int = 1
    has_backward: bool = False
    edges: Any = None
    shared: Sequence[Shared] = ()
    dw_builder: Any = None

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str,
        group: Any = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
    ) -> None:
        if not 0 <= stage_index < num_stages:
            raise UsageError(f"stage index {stage_index} is out of range of {num_stages} stages")
        self.submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = torch.device(device)
        self.group = group_of(group)
        self.group_rank, self.group_size = seat(self.group)
        if self.group_size > num_stages:
            raise PlacementError(
                f"{self.group_size} processes cannot run {num_stages} stages; each needs at least one"
            )
        self.dw_builder = dw_builder

    def own(self) -> OwnStage:
        """Penstock's stage.

        Raises:
            CallError: this stage has no module to run.
        """
        raise CallError(f"a {type(self).__name__} has nothing to run; make a PipelineStage")

    def bind(self, perform: Perform | None) -> None:
        """Say who carries out this stage's actions while a custom function runs."""

    @property
    def is_first(self) -> bool:
        """Whether the batch enters here."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.stage_index == self.num_stages - 1


class PipelineStage(StageBase):
    """A stage of a model that was cut by hand.

    Args:
        submodule: the slice.
        stage_index: which stage it is, from 0.
        num_stages: how many there are.
        device: where it lives; the slice is moved there.
        input_args: example inputs of a microbatch; not needed, as the next three: shapes are found, and may
            change from step to step.
        output_args: example outputs.
        output_grads: examples of the gradients that come back.
        input_grads: examples of the gradients that go back.
        group: the process group of the pipeline, or a ``DeviceMesh`` with a dimension ``pp``; by default all
            processes.
        dw_builder: not needed: the weights' half of backward is made by the stage's engine.
        get_mesh: ``(dimension names, layout) -> DeviceMesh``, for DTensors that arrive on meshes that this
            process has on none of its parameters.

    Raises:
        UsageError: the index is not below the count.
        PlacementError: there are more processes than stages.
    """

    def __init__(  # noqa: PLR0913 - torch's arguments
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str,
        input_args: Tensor | tuple[Tensor, ...] | None = None,
        output_args: Tensor | tuple[Tensor, ...] | None = None,
        output_grads: Tensor | tuple[Tensor | None, ...] | None = None,
        input_grads: Tensor | tuple[Tensor | None, ...] | None = None,
        group: Any = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
        get_mesh: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, group, dw_builder)
        self.examples = (input_args, output_args, input_grads, output_grads)
        if get_mesh is not None:
            let_cross([submodule], get_mesh)
        self._own: OwnStage | None = None
        self._perform: Perform | None = None
        self.output_chunks: list[Any] = []

    def own(self) -> OwnStage:
        """Penstock's stage; it is made when first asked for."""
        if self._own is None or self._own.module is not self.submod:
            self._own = OwnStage(self.submod, self.stage_index, self.num_stages, self.device)
            self.submod = self._own.module
        return self._own

    def bind(self, perform: Perform | None) -> None:
        """Say who carries out this stage's actions while a custom function runs."""
        self._perform = perform

    # ---- one microbatch by hand, or from a custom function within a step

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Forward of a microbatch. Within a step its arguments come from the batch and the stages before."""
        if self._perform is not None:
            return self._perform(self._action(ComputationType.FORWARD, fwd_chunk_id))
        output = self.own().forward(fwd_chunk_id, args, dict(kwargs or {}))
        if save_forward_output and self.is_last:
            self.output_chunks.append(output)
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> Any:
        """Backward of a microbatch, or its inputs' half. By hand it needs a step, or no gradient."""
        kind = ComputationType.FULL_BACKWARD if full_backward else ComputationType.BACKWARD_INPUT
        return self._within_a_step(self._action(kind, bwd_chunk_id))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        """The weights' half of a microbatch's backward."""
        return self._within_a_step(self._action(ComputationType.BACKWARD_WEIGHT, bwd_chunk_id))

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Nothing: stages of one process hand over by themselves."""

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Nothing: stages of one process hand over by themselves."""

    def get_local_bwd_output(self, mb_index: int) -> tuple[Any, ...]:
        """Nothing: stages of one process hand over by themselves."""
        return ()

    def clear_runtime_states(self) -> None:
        """Drop what microbatches have left here."""
        self.output_chunks.clear()
        if self._own is not None and self._perform is None:
            self._own.clear()

    def _action(self, kind: ComputationType, microbatch: int) -> ActionTuple:
        return ActionTuple(self.stage_index, kind, microbatch)

    def _within_a_step(self, action: ActionTuple) -> Any:
        if self._perform is None:
            raise CallError(
                f"{action} runs within a step of a schedule; to drive a stage by hand take "
                "penstock.PipelineStage"
            )
        return self._perform(action)


@dataclass(frozen=True)
class PipeInfo:
    """What :func:`build_stage` needs to know of a pipe.

    Args:
        graph: the model's graph, uncut.
        num_stages: how many stages there are.
        has_loss_and_backward: always false: the loss belongs to the schedule.
        shared: the weights that stages share.
    """

    graph: fx.Graph
    num_stages: int
    has_loss_and_backward: bool = False
    shared: tuple[Shared, ...] = ()


def build_stage(
    stage_module: nn.Module,
    stage_index: int,
    pipe_info: PipeInfo,
    device: torch.device | str,
    group: Any = None,
) -> PipelineStage:
    """A stage of a pipe on a device.

    Args:
        stage_module: from :meth:`Pipe.get_stage_module`; it may have been worked on since.
        stage_index: which stage it is.
        pipe_info: from :meth:`Pipe.info`.
        device: where it is to live.
        group: the process group of the pipeline; by default all processes.
    """
    stage = PipelineStage(stage_module, stage_index, pipe_info.num_stages, device, group=group)
    stage.shared = pipe_info.shared
    return stage


_PipelineStageBase = StageBase
