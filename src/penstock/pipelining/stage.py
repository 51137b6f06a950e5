"""Pipeline stages with torch's name and arguments, built on Penstock's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.backward import stage_backward, stage_backward_input, stage_backward_weight
from penstock.errors import UsageError
from penstock.parallel import group_of, let_cross, seat
from penstock.partition import Shared
from penstock.pipelining._debug import map_debug_info
from penstock.pipelining._utils import (
    CallError,
    GetMeshCallback,
    InferenceMode,
    PipeInfo,
    PipeliningMetadataError,
    PlacementError,
    TensorMeta,
    extract_tensor_meta,
    extract_tensor_metas,
    flatten_args,
    generate_stage_to_rank_mapping,
    to_local_if_dtensor,
    validate_and_normalize_to_tuple,
    validate_static_arg_grad_correspondence,
    validate_tensors_metadata,
)
from penstock.pipelining.by_hand import ByHand, P2POp, Wires
from penstock.pipelining.rows import ActionTuple, ComputationType
from penstock.stage import Gradients
from penstock.stage import PipelineStage as OwnStage
from penstock.values import flatten

# ---- Penstock's stage as it is used here, and one whose weights' half of backward is the user's


Build = Callable[[], Callable[[], object]]


class HeldStage(OwnStage):
    """A stage that takes not only a tuple but also a list as several arguments."""

    spread = (tuple, list)


class OwnWeights(HeldStage):
    """A stage for which the user computes a part of the weights' half; autograd does the rest before.

    Args:
        args: of the stage.
        build: called after each microbatch's backward; returns the function that does the rest.
    """

    def __init__(self, *args: Any, build: Build) -> None:
        super().__init__(*args)
        self._build = build
        self._put_off: dict[int, Callable[[], object]] = {}

    def backward(self, microbatch: int, output_grads: Sequence[Tensor | None] | None) -> Gradients:
        """Full backward of a microbatch."""
        found = super().backward(microbatch, output_grads)
        self._build()()
        return found

    def backward_input(
        self, microbatch: int, output_grads: Sequence[Tensor | None] | None
    ) -> Gradients:
        """The inputs' half; the user's part is made, but put off."""
        found = super().backward(microbatch, output_grads)
        self._put_off[microbatch] = self._build()
        return found

    def backward_weight(self, microbatch: int) -> None:
        """The weights' half, which is the user's part."""
        self._put_off.pop(microbatch)()

    def clear(self) -> None:
        """Drop whatever microbatches have left here."""
        super().clear()
        self._put_off.clear()


# ---- what schedules need of a stage


Perform = Callable[[ActionTuple], Any]
"""Carries out an action of the running step."""


class StageBase:
    """What schedules need of a stage.

    Attributes:
        submod: the slice of the model; it may be replaced before the first step.
        stage_index: the index of the stage.
        num_stages: the number of stages.
        device: where it lives.
        group: the process group of the pipeline.
        group_rank: the rank of this process in it.
        group_size: its number of processes.
        has_backward: whether the schedule runs a backward for the stage.
        chunks: the number of microbatches in the last step.
        stage_index_to_group_rank: the rank of each stage; a loop until a schedule places the stages.
        output_chunks: on the last stage, the output of each microbatch of the last step.
        log_prefix: the name of the stage in messages.
        edges: which values travel between the stages; ``None`` if each stage feeds the next.
        shared: the table of weights that stages share, the same on every rank. Their gradients are added
            up, and copies stay equal. Without it, each stage has a weight of its own.
    """

    submod: Any = None
    stage_index: int = 0
    num_stages: int = 1
    device: torch.device = torch.device("cpu")
    group: Any = None
    group_rank: int = 0
    group_size: int = 1
    edges: Any = None
    shared: Sequence[Shared] = ()
    dw_builder: Any = None
    chunks: int | None = None
    has_backward: bool = False

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str,
        group: Any = None,
        dw_builder: Build | None = None,
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
        self.stage_index_to_group_rank = generate_stage_to_rank_mapping(self.group_size, num_stages)
        self.output_chunks: list[Any] = []
        self.log_prefix = f"[Stage {stage_index}]"

    def own(self) -> OwnStage:
        """Penstock's stage.

        Raises:
            CallError: this stage has no module to run.
        """
        raise CallError(f"a {type(self).__name__} has nothing to run; make a PipelineStage")

    def place(self, rank_of: Mapping[int, int]) -> None:
        """Set the rank of each stage."""
        self.stage_index_to_group_rank = dict(rank_of)

    def agree(self, chunks: int, args: Any, kwargs: Any = None) -> Any:
        """Agree with the neighbouring stages on what travels, before the stage is driven by hand.

        Args:
            chunks: the number of microbatches.
            args: the arguments of a microbatch; or what the previous stage gives, if it is in this process.
            kwargs: keyword arguments.

        Returns:
            What the stage gives, if the next one is in this process.

        Raises:
            CallError: this stage has no module to run.
        """
        raise CallError(f"a {type(self).__name__} has nothing to run; make a PipelineStage")

    def start(self, rank_of: Sequence[int] | None, chunks: int, *, trains: bool) -> None:
        """A step begins.

        Args:
            rank_of: the rank of each stage, if a schedule places them.
            chunks: the number of microbatches.
            trains: whether there is a backward.
        """
        self.has_backward, self.chunks = trains, chunks
        self.output_chunks.clear()
        if rank_of is not None:
            self.place(dict(enumerate(rank_of)))

    def end(self, outputs: Sequence[Any]) -> None:
        """The engine has run a step; keep its outputs."""
        self.output_chunks[:] = outputs

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


# ---- the stage that users make


class PipelineStage(StageBase):
    """A stage of a model that was cut by hand.

    Args:
        submodule: the slice.
        stage_index: which stage it is, from 0.
        num_stages: how many there are.
        device: where it lives; the slice is moved there.
        input_args: example inputs of a microbatch. They are not needed, and neither are the next three
            arguments: shapes are found automatically, and may change from step to step.
        output_args: example outputs.
        output_grads: example gradients of the outputs.
        input_grads: example gradients of the inputs.
        group: the process group of the pipeline, or a ``DeviceMesh`` with a dimension ``pp``; by default all
            processes.
        dw_builder: for weights whose gradients are not computed by autograd. It is called after each
            microbatch's backward, and returns a function that is called when the weights' half is due.
        get_mesh: ``(dimension names, layout) -> DeviceMesh``, for DTensors that arrive on a mesh that none
            of this process's parameters have.

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
        dw_builder: Build | None = None,
        get_mesh: GetMeshCallback | None = None,
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, group, dw_builder)
        self.examples = (input_args, output_args, input_grads, output_grads)
        for place, given in enumerate(self.examples):
            validate_and_normalize_to_tuple(given, allow_none=place > 1)
        if get_mesh is not None:
            let_cross([submodule], get_mesh)
        self._own: OwnStage | None = None
        self._by_hand: ByHand | None = None
        self._perform: Perform | None = None
        self._halves: set[int] = set()
        self.fwd_cache: dict[int, tuple[Any, list[Tensor]]] = {}
        self.bwd_cache: dict[int, tuple[Tensor | None, ...]] = {}

    def own(self) -> OwnStage:
        """Penstock's stage, made on first use."""
        if self._own is None or self._own.module is not self.submod:
            place = (self.submod, self.stage_index, self.num_stages, self.device)
            build = self.dw_builder
            self._own = HeldStage(*place) if build is None else OwnWeights(*place, build=build)
            self.submod = self._own.module
        return self._own

    def _hand(self) -> ByHand:
        """The stage in the form that is driven by hand."""
        own = self.own()
        if self._by_hand is None or self._by_hand.own is not own:
            wires = Wires(self.group, self.group_rank, self._rank_of, self.device)
            self._by_hand = ByHand(own, wires, self.examples[1])
        return self._by_hand

    def _rank_of(self, stage: int) -> int:
        return self.stage_index_to_group_rank[stage]

    def bind(self, perform: Perform | None) -> None:
        """Say who carries out this stage's actions while a custom function runs."""
        self._perform = perform

    def start(self, rank_of: Sequence[int] | None, chunks: int, *, trains: bool) -> None:
        """A step begins; drop what a step by hand has left."""
        super().start(rank_of, chunks, trains=trains)
        if self._by_hand is not None:
            self.clear_runtime_states()

    # ---- one microbatch by hand, or from a custom function within a step

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Forward of a microbatch.

        Args:
            fwd_chunk_id: its index.
            args: the arguments of the first stage. Other stages get them from the previous one: within a
                step from the schedule, otherwise by :meth:`get_fwd_recv_ops` or
                :meth:`set_local_fwd_input`.
            kwargs: keyword arguments.
            save_forward_output: whether the last stage keeps its output in ``output_chunks``.
        """
        if self._perform is not None:
            return self._perform(self._action(ComputationType.FORWARD, fwd_chunk_id))
        output = self._hand().forward(fwd_chunk_id, args, dict(kwargs or {}))
        if save_forward_output and self.is_last:
            self.output_chunks.append(output)
        taken = flatten((tuple(args), dict(kwargs or {})))[0]
        self.fwd_cache[fwd_chunk_id] = (_as_tuple(output), taken)
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> Any:
        """Backward of a microbatch, or its inputs' half; does nothing if ``has_backward`` is false.

        Args:
            bwd_chunk_id: its index.
            loss: where backward starts, when the last stage is driven by hand.
            full_backward: whether to run both halves.
            last_backward: by hand, whether this is the last backward of the step, after which gradients are
                reduced over replicas and shards.
        """
        kind = ComputationType.FULL_BACKWARD if full_backward else ComputationType.BACKWARD_INPUT
        if self._perform is not None:
            return self._perform(self._action(kind, bwd_chunk_id))
        if not self.has_backward:
            return None
        self._check_chunk(bwd_chunk_id)
        found = self._hand().backward(bwd_chunk_id, loss, full=full_backward)
        self.fwd_cache.pop(bwd_chunk_id, None)
        self.bwd_cache[bwd_chunk_id] = found
        if not full_backward:
            self._halves.add(bwd_chunk_id)
        elif last_backward:
            self._hand().finish()
        return None

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        """The weights' half of a microbatch's backward; for the arguments see :meth:`backward_one_chunk`."""
        if self._perform is not None:
            return self._perform(self._action(ComputationType.BACKWARD_WEIGHT, bwd_chunk_id))
        if not self.has_backward:
            return None
        if bwd_chunk_id not in self._halves:
            raise CallError(
                f"stage {self.stage_index}: microbatch {bwd_chunk_id} has no half of a backward; "
                "call backward_one_chunk(..., full_backward=False) first"
            )
        self._halves.remove(bwd_chunk_id)
        self._hand().weight(bwd_chunk_id)
        if last_backward:
            self._hand().finish()
        return None

    def perform_reduce_grad(self, grad_scale_factor: int = 1) -> None:
        """By hand, after a step's last backward: reduce gradients over replicas or shards, and scale them."""
        self._hand().finish()
        self.scale_grads(grad_scale_factor)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide the gradients by a number."""
        if grad_scale_factor == 1:
            return
        for parameter in self.submod.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(grad_scale_factor)

    # ---- what travels, by hand

    def agree(self, chunks: int, args: Any, kwargs: Mapping[str, Any] | None = None) -> Any:
        """Agree with the neighbouring stages on what travels."""
        self.chunks = chunks
        return self._hand().prepare(chunks, args, dict(kwargs or {}), trains=self.has_backward)

    def _prepare_forward_infra(
        self,
        num_microbatches: int,
        args: Any,
        kwargs: Mapping[str, Any] | None = None,
        has_backward: bool = False,
    ) -> Any:
        """Like :meth:`agree`, but also sets ``has_backward``."""
        self.has_backward = has_backward or self.has_backward
        return self.agree(num_microbatches, args, kwargs)

    def _prepare_backward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> None:
        """Does nothing: what comes back follows from what was sent."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        """By hand: the receives of a microbatch's values."""
        return self._hand().receives(fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        """By hand: the sends of a microbatch's values."""
        return self._hand().sends(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        """By hand: the receives of the values' gradients."""
        return self._hand().receives_back(bwd_chunk_id) if self.has_backward else []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        """By hand: the sends of the gradients to the previous stage."""
        if not self.has_backward or self.is_first:
            return []
        self._check_chunk(bwd_chunk_id)
        return self._hand().sends_back(self.bwd_cache.pop(bwd_chunk_id))

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """By hand.

        Take the output of the previous stage, if it is in this process. Does nothing in a step.
        """
        if self._perform is None:
            self._hand().take(mb_index, prev_stage_outputs)

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        """By hand.

        Take the gradients from the next stage, if it is in this process. Does nothing in a step.
        """
        if self._perform is None:
            self._hand().take_back(mb_index, next_stage_bwd_outputs)

    def get_local_bwd_output(self, mb_index: int) -> tuple[Any, ...]:
        """By hand: the gradients for the previous stage, if it is in this process. Empty in a step."""
        return self.bwd_cache.pop(mb_index) if self._perform is None else ()

    def clear_runtime_states(self) -> None:
        """Drop what microbatches have left here."""
        for left in (self.output_chunks, self.fwd_cache, self.bwd_cache, self._halves):
            left.clear()
        if self._own is not None and self._perform is None:
            self._own.clear()
        if self._by_hand is not None:
            self._by_hand.clear()

    def _check_chunk(self, chunk_id: int) -> None:
        if self.chunks is None:
            raise CallError(
                f"stage {self.stage_index} has no chunks yet; a step of a schedule sets them"
            )
        if not 0 <= chunk_id < self.chunks:
            raise CallError(
                f"stage {self.stage_index}: chunk {chunk_id} is out of range of {self.chunks} chunks"
            )

    def _action(self, kind: ComputationType, microbatch: int) -> ActionTuple:
        return ActionTuple(self.stage_index, kind, microbatch)


def _as_tuple(output: Any) -> tuple[Any, ...]:
    return tuple(output) if isinstance(output, tuple | list) else (output,)


def build_stage(
    stage_module: nn.Module,
    stage_index: int,
    pipe_info: PipeInfo,
    device: torch.device | str,
    group: Any = None,
) -> PipelineStage:
    """A stage of a pipe on a device.

    Args:
        stage_module: from :meth:`Pipe.get_stage_module`; it may have been changed since.
        stage_index: which stage it is.
        pipe_info: from :meth:`Pipe.info`.
        device: the device to put it on.
        group: the process group of the pipeline; by default all processes.
    """
    stage = PipelineStage(stage_module, stage_index, pipe_info.num_stages, device, group=group)
    stage.shared = pipe_info.shared
    return stage


_PipelineStageBase = StageBase

# Including what can be imported from torch's module of the same name.
__all__ = [
    "GetMeshCallback",
    "InferenceMode",
    "PipeInfo",
    "PipelineStage",
    "PipeliningMetadataError",
    "StageBase",
    "TensorMeta",
    "build_stage",
    "extract_tensor_meta",
    "extract_tensor_metas",
    "flatten_args",
    "map_debug_info",
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
    "to_local_if_dtensor",
    "validate_and_normalize_to_tuple",
    "validate_static_arg_grad_correspondence",
    "validate_tensors_metadata",
]
