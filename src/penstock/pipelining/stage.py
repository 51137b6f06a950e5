"""torch's stage: the engine's stage, with torch's constructor and methods to drive it by hand."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import P2POp
from torch.utils.hooks import RemovableHandle

from penstock import stage as engine
from penstock._engine.parallel import gathered, group_of, let_cross, seat
from penstock._engine.runtime import ActionEvent
from penstock._engine.values import tensors_in
from penstock.errors import UsageError
from penstock.partition import Shared
from penstock.pipeline import before_meeting
from penstock.pipelining._backward import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from penstock.pipelining._utils import (
    CallError,
    PipeInfo,
    PipeliningMetadataError,
    PlacementError,
    extract_tensor_metas,
    generate_stage_to_rank_mapping,
)
from penstock.pipelining.by_hand import FunctionDrive
from penstock.schedule import Action, Op, Schedule
from penstock.schedule.action import microbatch_of
from penstock.stage import Gradients

Build = Callable[[], Callable[[], object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStageInfo:
    """Which forward of which stage a context is for.

    Attributes:
        stage_index: the index of the stage.
        microbatch_index: the index of the microbatch.
        is_metadata_inference: always False: no stage runs to find out shapes.
    """

    stage_index: int
    microbatch_index: int
    is_metadata_inference: bool = False


Contexts = Callable[[PipelineStageInfo], AbstractContextManager[Any]]


class StageBase:
    """The attributes of a stage that schedules use.

    Attributes:
        submod: the slice of the model; it may be replaced before the first step.
        stage_index: the index of the stage.
        num_stages: the number of stages.
        device: the device of the stage.
        group: the process group of the pipeline.
        group_rank: this process's rank in the group.
        group_size: the number of processes in the group.
        chunks: the number of microbatches in the last step.
        has_backward: whether the stage runs a backward.
        stage_index_to_group_rank: the rank of each stage; round-robin until a schedule places the stages.
        output_chunks: on the last stage, the output of each microbatch of the last step.
        log_prefix: the name of the stage in messages.
        edges: the values that travel between stages; ``None`` if each stage feeds only the next.
        shared: the table of weights that stages share, the same on every rank. Their gradients are
            summed, and copies stay equal. Without it, each stage trains its own copy.
    """

    submod: Any = None
    stage_index: int = 0
    num_stages: int = 1
    group: Any = None
    group_rank: int = 0
    group_size: int = 1
    edges: Any = None
    shared: Sequence[Shared] = ()
    chunks: int | None = None
    is_first: bool = True
    is_last: bool = True
    stage_index_to_group_rank: dict[int, int]
    has_backward: bool = False
    _drive: FunctionDrive | None = None
    forward_contexts: Mapping[int, Contexts] = {}

    @property
    def leaves_results(self) -> bool:
        """Whether the engine keeps the outputs and computes the losses, as while a custom function runs."""
        return self._drive is not None and self._drive.leaves_results


class PipelineStage(StageBase, engine.PipelineStage):
    """A stage of a model that was cut by hand.

    Args:
        submodule: the stage's slice of the model.
        stage_index: the index of the stage, from 0.
        num_stages: the number of stages.
        device: the device to which the slice is moved.
        input_args: example inputs of a microbatch. All four examples are optional: shapes may change
            from step to step. A warning reports if the first step has other inputs or outputs.
        output_args: example outputs.
        output_grads: example gradients of the outputs.
        input_grads: example gradients of the inputs.
        group: the process group of the pipeline, or a ``DeviceMesh`` with a dimension ``pp``; by default all
            processes.
        dw_builder: for weights whose gradients autograd does not compute. It is called after each
            microbatch's backward, and returns a function that is called when the weights' half is due.
        get_mesh: ``(dimension names, layout) -> DeviceMesh``, for DTensors that arrive on a mesh that none
            of this process's parameters uses; the layout is always None.

    Raises:
        UsageError: the index is out of range.
        PlacementError: there are more processes than stages.
    """

    spread = (tuple, list)

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
        dw_builder: Build | None = None,
        get_mesh: Callable[..., Any] | None = None,
    ) -> None:
        with before_meeting(group):
            if not 0 <= stage_index < num_stages:
                raise UsageError(
                    f"stage index {stage_index} is out of range of {num_stages} stages"
                )
            self._examples = {
                "input_args": extract_tensor_metas(input_args),
                "output_args": extract_tensor_metas(output_args),
            }
            for gradients in (input_grads, output_grads):
                extract_tensor_metas(gradients, allow_none=True)
            self.group = group_of(group)
            self.group_rank, self.group_size = seat(self.group)
            if self.group_size > num_stages:
                raise PlacementError(
                    f"{self.group_size} processes cannot run {num_stages} stages; each needs at least one"
                )
            self.stage_index, self.num_stages = stage_index, num_stages
            self.dw_builder = dw_builder
            self.stage_index_to_group_rank = generate_stage_to_rank_mapping(
                self.group_size, num_stages
            )
            self.output_chunks: list[Any] = []
            self.log_prefix = f"[Stage {stage_index}]"
            self._noted: list[Any] | None = None
            self.forward_contexts: OrderedDict[int, Contexts] = OrderedDict()
            self._forward_of = 0
            super().__init__(submodule, stage_index, num_stages, device)
            if get_mesh is not None:
                let_cross([submodule], get_mesh)

    @property
    def submod(self) -> Any:
        """The slice of the model."""
        return self.module

    @submod.setter
    def submod(self, module: nn.Module) -> None:
        self.module = module

    # ---- the methods that the engine calls

    def _set_up(self) -> None:
        super()._set_up()
        self._run, self.call = self.call, self._call_noted

    def _call_noted(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; compare the first microbatch's shapes, and note what a call by hand wants."""
        with ExitStack() as stack:
            for context in self.forward_contexts.values():
                info = PipelineStageInfo(
                    stage_index=self.stage_index, microbatch_index=self._forward_of
                )
                stack.enter_context(context(info))
            output = self._run(*args, **kwargs)
        if self._examples:
            self._compare(input_args=args, output_args=output)
        if self._noted is not None:
            self._noted.append(output)
        return output

    def register_forward_context(self, context_factory: Contexts) -> RemovableHandle:
        """Let each forward of the stage's module run in a context.

        Args:
            context_factory: called with a :class:`PipelineStageInfo` before each forward, also one of
                :meth:`forward_one_chunk`; returns the context, which may not hold exceptions back.

        Returns:
            A handle whose ``remove()`` ends this.

        Raises:
            RuntimeError: there is such a context already.
        """
        if self.forward_contexts:
            raise CallError(
                f"stage {self.stage_index} has a forward context already; remove() its handle first"
            )
        handle = RemovableHandle(self.forward_contexts)
        self.forward_contexts[handle.id] = context_factory
        return handle

    def note_forward(self, event: ActionEvent) -> None:
        """Note which microbatch the next forward is of."""
        self._forward_of = microbatch_of(event.action) or 0

    def output_of(self, perform: Callable[[Action], None], action: Action) -> Any:
        """Let the engine perform a forward of this stage, and return the module's output."""
        outputs: list[Any] = []
        self._noted = outputs
        try:
            perform(action)
        finally:
            self._noted = None
        return outputs.pop()

    def _compare(self, **given: Any) -> None:
        """Warn if the first microbatch's inputs and output do not look like the examples."""
        for name, value in given.items():
            example, found = self._examples.pop(name), extract_tensor_metas(tensors_in(value))
            texts = [
                ", ".join(f"{of.dtype}{[*of.shape]}" for of in all_ or () if of)
                for all_ in (example, found)
            ]
            if example is not None and texts[0] != texts[1]:
                warnings.warn(
                    f"stage {self.stage_index}: the example {name} are {texts[0]}, and the step's values "
                    f"{texts[1]}; the step runs with those; correct the examples, or leave them out",
                    stacklevel=2,
                )

    def backward(self, microbatch: int, output_grads: Gradients | None) -> Gradients:
        """Run the full backward of a microbatch, and what ``dw_builder`` builds."""
        gradients = super().backward(microbatch, self._seeds(output_grads))
        if self.dw_builder is not None:
            self.dw_builder()()
        return gradients

    def backward_input(self, microbatch: int, output_grads: Gradients | None) -> Gradients:
        """Run the inputs' half; with ``dw_builder``, all of autograd's backward, and keep what it builds."""
        if self.dw_builder is None:
            return super().backward_input(microbatch, self._seeds(output_grads))
        gradients = super().backward(microbatch, self._seeds(output_grads))
        self._pending[microbatch] = self.dw_builder()
        return gradients

    def _seeds(self, output_grads: Gradients | None) -> Gradients | None:
        """The outputs' gradients; None on the last stage if it starts from the loss of a user's loop."""
        return output_grads if output_grads or not self.is_last else None

    def backward_weight(self, microbatch: int) -> None:
        """Run the weights' half; with ``dw_builder``, what it built."""
        if self.dw_builder is None:
            super().backward_weight(microbatch)
        elif microbatch in self._pending:
            self._pending.pop(microbatch)()
        else:
            self._lacks("backward_input", microbatch)

    def start(self, schedule: Schedule | None, chunks: int, *, trains: bool) -> None:
        """Begin a step: drop what a step by hand left, and record where a schedule places the stages."""
        self.clear_runtime_states()
        self.has_backward, self.chunks = trains, chunks
        if schedule is not None:
            self.stage_index_to_group_rank = dict(enumerate(schedule.placement.rank_of))

    def hand_to(self, drive: FunctionDrive | None) -> FunctionDrive | None:
        """Let the calls of this stage do what a drive says, and return the one before; None is none."""
        before, self._drive = self._drive, drive
        return before

    # ---- one microbatch by hand, in a step that a user's loop or function drives

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run the forward of a microbatch.

        Args:
            fwd_chunk_id: the microbatch's index.
            args: the arguments of the first stage. Other stages receive theirs from the previous one, by
                the schedule or by :meth:`get_fwd_recv_ops`.
            kwargs: keyword arguments.
            save_forward_output: whether the last stage keeps its output in ``output_chunks``.
        """
        action = Action(self.stage_index, Op.F, fwd_chunk_id)
        output = self._in_step().forward(self, action, args, dict(kwargs or {}))
        if save_forward_output and self.is_last and not self.leaves_results:
            self.output_chunks.append(output)
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run the backward of a microbatch, or its inputs' half; does nothing if ``has_backward`` is false.

        Args:
            bwd_chunk_id: the microbatch's index.
            loss: the loss that backward starts from, when the last stage is driven by hand.
            full_backward: whether to run both halves.
            last_backward: accepted and ignored: the step knows how many microbatches it has.
        """
        if self._may_go_back(bwd_chunk_id):
            op = Op.B if full_backward else Op.I
            action = Action(self.stage_index, op, bwd_chunk_id)
            self._in_step().backward(self, action, loss)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the weights' half of a backward; the arguments are those of :meth:`backward_one_chunk`."""
        if not self._may_go_back(bwd_chunk_id):
            return
        drive = self._in_step()
        if bwd_chunk_id not in self._pending:
            raise CallError(
                f"stage {self.stage_index}: microbatch {bwd_chunk_id} has no half of a backward; "
                "call backward_one_chunk(..., full_backward=False) first"
            )
        drive.perform(Action(self.stage_index, Op.W, bwd_chunk_id))

    def _in_step(self) -> FunctionDrive:
        """Return what performs the calls of this stage in the running step."""
        if self._drive is None:
            raise CallError(
                f"stage {self.stage_index} is in no step: forward_one_chunk, backward_one_chunk and others "
                "belong in a schedule's own _step_microbatches or in a custom function; to run a stage by "
                "itself, take penstock.PipelineStage and call its forward and backward"
            )
        return self._drive

    def _may_go_back(self, microbatch: int) -> bool:
        """Tell whether there is a backward, and the microbatch is one of the step's."""
        if not self.has_backward:
            return False
        if self.chunks is not None and not 0 <= microbatch < self.chunks:
            raise CallError(
                f"stage {self.stage_index}: chunk {microbatch} is out of range of {self.chunks} chunks"
            )
        return True

    def start_from_loss(self, microbatch: int, loss: Tensor | None) -> None:
        """Let the last stage's backward of a microbatch start from its loss; others' start from gradients."""
        if not self.is_last:
            return
        if loss is None:
            raise CallError(
                f"backward of stage {self.stage_index}, the last one, starts at loss=, which is missing"
            )
        self.start_from(microbatch, gathered(loss))

    def perform_reduce_grad(self, grad_scale_factor: int = 1) -> None:
        """By hand, after a step's last backward: scale the gradients, which the step reduces at its end."""
        self.scale_grads(grad_scale_factor)

    def start_gradient_reduction(self) -> None:
        """Do nothing: a step reduces the gradients at its end, while other stages still compute."""

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        """Scale the gradients; see :meth:`perform_reduce_grad`."""
        self.perform_reduce_grad(grad_scale_factor)

    def release_fwd_send_outputs(self, fwd_chunk_id: int) -> None:
        """Do nothing: of an output that was sent only its place in autograd's graph is kept."""

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide the gradients by a number; in a loop by hand once they are reduced, at the step's end."""
        if self._drive is not None:
            self._drive.divide(self, grad_scale_factor)
            return
        for parameter in self.submod.parameters() if grad_scale_factor != 1 else ():
            if parameter.grad is not None:
                parameter.grad.div_(grad_scale_factor)

    # ---- messages by hand: the engine sends and receives, so there is nothing to wait for

    def _message(self, op: Op, microbatch: int, *, sends: bool) -> list[P2POp]:
        """Send or receive what belongs to a microbatch's forward or backward."""
        drive, action = self._in_step(), Action(self.stage_index, op, microbatch)
        drive.send(action) if sends else drive.receive(action)
        return []

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        """By hand: receive a microbatch's values."""
        return self._message(Op.F, fwd_chunk_id, sends=False)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        """By hand: send a microbatch's values."""
        return self._message(Op.F, fwd_chunk_id, sends=True)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        """By hand: receive the values' gradients."""
        if not self.has_backward:
            return []
        return self._message(Op.B, bwd_chunk_id, sends=False)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        """By hand: send the gradients to the previous stage."""
        if not self._may_go_back(bwd_chunk_id):
            return []
        return self._message(Op.B, bwd_chunk_id, sends=True)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Do nothing: what the previous stage gave is on its way, also in this process."""

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        """Do nothing: the gradients of the next stage are on their way, also in this process."""

    def get_local_bwd_output(self, mb_index: int) -> tuple[Any, ...]:
        """Return nothing: the gradients are on their way to the previous stage."""
        return ()

    def clear_runtime_states(self) -> None:
        """Drop what microbatches left here; within a step, nothing."""
        if self._drive is None:
            self.output_chunks.clear()
            self.clear()


def as_tuple(output: Any) -> tuple[Any, ...]:
    """Return a stage's output as a tuple."""
    return tuple(output) if isinstance(output, tuple | list) else (output,)


def build_stage(
    stage_module: nn.Module,
    stage_index: int,
    pipe_info: PipeInfo,
    device: torch.device | str,
    group: Any = None,
) -> PipelineStage:
    """Build a stage of a pipe on a device.

    Args:
        stage_module: the result of :meth:`Pipe.get_stage_module`, possibly changed since.
        stage_index: the index of the stage.
        pipe_info: the result of :meth:`Pipe.info`.
        device: the device of the stage.
        group: the process group of the pipeline; by default all processes.
    """
    stage = PipelineStage(stage_module, stage_index, pipe_info.num_stages, device, group=group)
    stage.shared, stage.edges = pipe_info.shared, pipe_info.edges
    return stage


_PipelineStageBase = StageBase
_normalize_model_output_as_tuple = as_tuple

# Includes names that users import from torch's module of the same name.
__all__ = [
    "PipeInfo",
    "PipelineStage",
    "PipelineStageInfo",
    "PipeliningMetadataError",
    "StageBase",
    "build_stage",
    "extract_tensor_metas",
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
]
