"""The schedule classes, with the names and arguments of ``torch.distributed.pipelining.schedules``."""

from __future__ import annotations

from typing import Any

from penstock.errors import ScheduleError, UsageError
from penstock.pipelining._utils import (
    CallError,
    generate_rank_to_stage_mapping,
    generate_stage_to_rank_mapping,
)
from penstock.pipelining.by_hand import start_by_peer, start_messages, wait_all
from penstock.pipelining.liveness import (
    PipelineActivationLiveness,
    analyze_pipeline_activation_liveness,
)
from penstock.pipelining.microbatch import (
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from penstock.pipelining.rows import (
    ActionTuple,
    ComputationType,
    check_computes,
    check_format,
)
from penstock.pipelining.running import (
    OF_SEVERAL,
    Custom,
    PipelineContext,
    PipelineSchedule,
    arguments,
)
from penstock.pipelining.stage import PipelineStage, StageBase

__all__ = [
    "PipelineActivationLiveness",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "TensorChunkSpec",
    "analyze_pipeline_activation_liveness",
    "generate_rank_to_stage_mapping",
    "generate_stage_to_rank_mapping",
    "get_schedule_class",
    "merge_chunks",
    "split_args_kwargs_into_chunks",
]

FORWARD = F = ComputationType.FORWARD
BACKWARD_INPUT = I = ComputationType.BACKWARD_INPUT  # noqa: E741 - torch's name
BACKWARD_WEIGHT = W = ComputationType.BACKWARD_WEIGHT
FULL_BACKWARD = B = ComputationType.FULL_BACKWARD
OVERLAP_F_B = ComputationType.OVERLAP_F_B
UNSHARD, RESHARD = ComputationType.UNSHARD, ComputationType.RESHARD
REDUCE_GRAD, WAIT_REDUCE_GRAD = ComputationType.REDUCE_GRAD, ComputationType.WAIT_REDUCE_GRAD
SEND_F, RECV_F = ComputationType.SEND_F, ComputationType.RECV_F
SEND_B, RECV_B = ComputationType.SEND_B, ComputationType.RECV_B
WAIT_SEND_F, WAIT_SEND_B = ComputationType.WAIT_SEND_F, ComputationType.WAIT_SEND_B

_Action = ActionTuple
_ComputationType = ComputationType
_TARGET_CHUNK_SPEC = TensorChunkSpec(0)
_CustomFunctionProtocol = Custom
_PipelineContext = PipelineContext
_PipelineSchedule = PipelineSchedule
_PipelineStageBase = StageBase
_wait_batch_p2p = wait_all
_batch_p2p = start_messages
_sorted_batch_p2p = start_by_peer


# ---- one stage per rank


class PipelineScheduleSingle(PipelineSchedule):
    """A schedule with one stage per rank."""

    __signature__ = arguments("stage", OF_SEVERAL)

    @property
    def _stage(self) -> Any:
        return self._stages[0]


class ScheduleForwardOnly(PipelineScheduleSingle):
    """Forwards only, without a loss."""

    recipe, trains = "forward-only", False

    def _check_sizes(self) -> None:
        if self._loss_fn is not None:
            raise CallError(
                "a forward-only schedule has no backward, so that the loss would train nothing; take "
                "ScheduleGPipe, or leave out loss_fn"
            )


class ScheduleGPipe(PipelineScheduleSingle):
    """All forwards, then all backwards."""

    recipe = "GPipe"


class Schedule1F1B(PipelineScheduleSingle):
    """One forward, one backward, after a warm-up; needs at least as many microbatches as stages."""

    recipe = "1F1B"

    def _check_sizes(self) -> None:
        if self._n_microbatches < self._num_stages:
            raise UsageError(
                f"{self._n_microbatches} microbatches for {self._num_stages} stages: there must be at least "
                "as many microbatches as stages"
            )


_ScheduleForwardOnly = ScheduleForwardOnly

# ---- several stages per rank


class PipelineScheduleMulti(PipelineSchedule):
    """A schedule with several stages per rank."""

    __signature__ = arguments("stages")

    def _prepare_schedule_with_comms(
        self, actions: dict[int, list[ActionTuple | None]], format: str = "compute_only"
    ) -> None:
        """Use a hand-written schedule: ``"compute_comms"`` contains messages, ``"compute_only"`` does not."""
        check_format(format)
        if format == "compute_only":
            check_computes(actions)
        self._use_order(actions)
        self._order = actions if format == "compute_only" else None

    _load_actions = _prepare_schedule_with_comms


class ScheduleRuntime(PipelineScheduleMulti):
    """Runs any schedule; load its actions with ``_load_csv`` before the first step."""

    spells_out_messages = True

    def _dump_csv(self, filename: Any, format: str = "compute_comms") -> None:
        """Write the schedule, one row per rank; by default with its messages."""
        super()._dump_csv(filename, format)


_PipelineScheduleRuntime = ScheduleRuntime


class ScheduleLoopedBFS(ScheduleRuntime):
    """All microbatches of a stage, then those of the rank's next stage (arXiv:2211.05953)."""

    recipe = "LoopedBFS"
    __signature__ = arguments(
        "stages", ("args_chunk_spec", "kwargs_chunk_spec", "use_full_backward")
    )


class _Named(ScheduleRuntime):
    __signature__ = arguments("stages", ("use_full_backward",))


class _InRounds(_Named):
    """Its microbatches run in equal rounds, if possible of one for each rank."""

    number_of_rounds: int
    microbatches_per_round: int

    def _check_sizes(self) -> None:
        microbatches, ranks = self._n_microbatches, self.pp_group_size
        rounds = max(1, microbatches // ranks)
        if microbatches % rounds:
            raise UsageError(
                f"{microbatches} microbatches cannot be divided into {rounds} equal rounds; use a multiple "
                f"of the number of rounds, such as {rounds * ranks}"
            )
        self.number_of_rounds, self.microbatches_per_round = rounds, microbatches // rounds


class ScheduleInterleaved1F1B(_InRounds):
    """1F1B over several stages per rank (arXiv:2104.04473); microbatches run in equal rounds."""

    recipe = "Interleaved1F1B"


class ScheduleInterleavedZeroBubble(_InRounds):
    """Interleaved 1F1B with backward in halves (arXiv:2401.10241); microbatches run in equal rounds."""

    recipe = "InterleavedZeroBubble"


class ScheduleZBVZeroBubble(_Named):
    """Zero bubble on stages placed in a V (arXiv:2401.10241), two per rank."""

    recipe = "ZB-V"


class ScheduleDualPipeV(_Named):
    """DualPipe on stages placed in a V (arXiv:2412.19437), two per rank; needs a microbatch per stage."""

    recipe = "DualPipeV"


_NAMED = (
    *(Schedule1F1B, ScheduleInterleaved1F1B, ScheduleGPipe, ScheduleLoopedBFS),
    *(ScheduleInterleavedZeroBubble, PipelineScheduleSingle, PipelineScheduleMulti),
    *(ScheduleZBVZeroBubble, ScheduleDualPipeV),
)
_CLASSES = {one.__name__.removeprefix("Schedule"): one for one in _NAMED}


def get_schedule_class(schedule_name: str) -> type[PipelineSchedule]:
    """The class of a schedule.

    Args:
        schedule_name: the schedule's name, in upper or lower case.

    Raises:
        ValueError: there is no schedule of this name.
    """
    for name, chosen in _CLASSES.items():
        if name.lower() == schedule_name.lower():
            return chosen
    raise ScheduleError(f"no schedule {schedule_name!r}; there are {', '.join(_CLASSES)}")
