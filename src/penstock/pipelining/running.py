"""The base class of torch-style schedules: split a batch, run it, and return what torch returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

# Unlike other pytrees, it includes the types that users register.
from torch.utils import _pytree as pytree

from penstock._engine.microbatches import Batch, Microbatch
from penstock._engine.runtime import (
    ActionEvent,
    Call,
    Hooks,
    Reduction,
    StepLoss,
    StepState,
    refusal_of,
)
from penstock._engine.values import tensors_in
from penstock.errors import MicrobatchError, PenstockError, ScheduleError, UsageError
from penstock.pipeline import Pipeline, before_meeting
from penstock.pipeline.plan import prove
from penstock.pipelining._utils import CallError, PlacementError
from penstock.pipelining.by_hand import FunctionDrive, LoopDrive, Perform, any_order, driving
from penstock.pipelining.microbatch import (
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from penstock.pipelining.rows import (
    ActionTuple,
    ComputationType,
    check_format,
    check_trains,
    proven,
    read_rows,
    schedule_of,
    to_order,
    to_tuple,
)
from penstock.pipelining.stage import StageBase
from penstock.schedule import (
    Action,
    Dependencies,
    Op,
    Overlap,
    Schedule,
    build,
    compute_only,
    prefetch,
    reduce_gradients,
    to_csv,
)
from penstock.schedule.action import COMPUTE_OPS, OVERLAPPED, STAGE_OPS, Entry
from penstock.schedule.base import Edges, flat

Custom = Callable[[ActionTuple, Any], None]
CUSTOM_OPS = frozenset({op.value for op in COMPUTE_OPS | STAGE_OPS} | {OVERLAPPED})
"""The operations that a custom function may replace."""


# ---- what the engine takes


def batch_of(arg_mbs: list[Any], kwarg_mbs: list[Any], targets: list[Any] | None) -> Batch:
    """Return this process's part of a batch."""
    here = any(arg_mbs) or any(kwarg_mbs)
    parts = list(map(_part, arg_mbs, kwarg_mbs)) if here else None
    sizes = [_sizes(of) for of in (arg_mbs if here else (), targets or ())]
    # The microbatches' numbers of samples matter only if they differ.
    unlike = next((counts for counts in sizes if len(set(counts)) > 1), None)
    return Batch(parts, targets, unlike, len(arg_mbs))


def _part(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Microbatch:
    """Make a microbatch; keyword arguments go to the stages of the rank that was passed them."""
    return Microbatch(tuple(args), {}, 0, local=dict(kwargs))


def _sizes(parts: Sequence[Any]) -> list[int]:
    """The size of each part's first tensor, if all have one."""
    first = [next(iter(tensors_in(part)), None) for part in parts]
    sizes = [len(tensor) for tensor in first if tensor is not None and tensor.dim()]
    return sizes if len(sizes) == len(parts) else []


# ---- the schedule that users make


@dataclass
class PipelineContext:
    """A custom function's second argument: the running schedule and the arguments of its step."""

    schedule_ref: Any
    arg_mbs: list[tuple[Any, ...]] | None = None
    kwarg_mbs: list[dict[str, Any]] | None = None
    target_mbs: list[Any] | None = None
    losses: list[Any] | None = None

    @property
    def stages(self) -> list[StageBase]:
        """The stages of this process."""
        stages: list[StageBase] = self.schedule_ref.stages
        return stages


class Arrived:
    """Stands for torch's dict of pending receives: everything has already arrived."""

    def __contains__(self, key: object) -> bool:
        return True

    def pop(self, key: object, default: Any = None) -> list[Any]:
        """No work to wait for."""
        return []


DEFAULTS: dict[str, Any] = {
    "n_microbatches": Parameter.empty,
    "loss_fn": None,
    "args_chunk_spec": None,
    "kwargs_chunk_spec": None,
    "output_merge_spec": None,
    "use_full_backward": None,
    "scale_grads": True,
    "backward_requires_autograd": True,
    "defer_pp_recv": False,
    "max_active_stages": 3,
    "unshard_lookahead": "full",
    "defer_reduce_grad_wait": False,
    "max_outstanding_sends": None,
}
"""The arguments of schedule classes besides their stages, in torch's order; not every class has all."""
SINCE_2_15 = tuple(DEFAULTS)[-4:]
"""Those of torch 2.15, the last two by name alone."""
OF_SEVERAL = ("use_full_backward", "backward_requires_autograd", "defer_pp_recv", *SINCE_2_15)
"""The arguments that only classes with several stages per rank have."""


def arguments(stages: str, without: Sequence[str] = ()) -> Signature:
    """Return a schedule class's arguments: ``stages`` names the first, ``without`` those that it lacks."""
    defaults = {stages: Parameter.empty, **DEFAULTS}
    named = {name: default for name, default in defaults.items() if name not in without}
    by_name = SINCE_2_15[2:]
    return Signature(
        [
            Parameter(
                name,
                Parameter.KEYWORD_ONLY if name in by_name else Parameter.POSITIONAL_OR_KEYWORD,
                default=value,
            )
            for name, value in named.items()
        ]
    )


class PipelineSchedule:
    """A schedule over stages that are already placed; the base class of all schedules.

    Args:
        stages: the stages of this process; classes with one stage per rank take it as ``stage``.
        n_microbatches: the number of microbatches in a batch.
        loss_fn: ``(output, target) -> scalar``; without it, only forward runs.
        args_chunk_spec: how to split positional arguments.
        kwargs_chunk_spec: how to split keyword arguments.
        output_merge_spec: how to merge outputs.
        use_full_backward: accepted and ignored.
        scale_grads: whether the loss is a mean over samples, so that the microbatches' gradients are
            averaged; otherwise they are summed. The loss is scaled before backward, never the gradients
            after it.
        backward_requires_autograd: whether ``step`` refuses to run while gradients are disabled.
        defer_pp_recv: accepted and ignored: receives are always posted where they are needed.
        max_active_stages: accepted and ignored, like the next two: the parameters of a stage under FSDP2 are
            gathered at the beginning of a step, and freed and reduced at its end.
        unshard_lookahead: see ``max_active_stages``.
        defer_reduce_grad_wait: see ``max_active_stages``.
        max_outstanding_sends: checked and ignored: a tensor that was sent is freed when a later message shows
            that it has arrived.

    Raises:
        UsageError: the schedule cannot run this number of microbatches or of stages per rank.
        PlacementError: the stages are not those that the schedule places on this rank.
    """

    recipe: ClassVar[str | None] = None
    """The name of Penstock's schedule."""
    trains: ClassVar[bool] = True
    """Whether the schedule may have a loss."""
    spells_out_messages: ClassVar[bool] = False
    """Whether its own order is that with messages, as that of torch's runtime is."""
    __signature__: ClassVar[Signature] = arguments("stages", OF_SEVERAL)

    def __init__(self, *args: Any, **options: Any) -> None:
        passed = self.__signature__.bind(*args, **options).arguments
        held, *_ = passed.values()
        chosen = DEFAULTS | passed
        self._stages: list[Any] = list(held) if isinstance(held, Sequence) else [held]
        self._num_stages = self._stages[0].num_stages
        self.pp_group_size = self._stages[0].group_size
        self.rank = self._stages[0].group_rank
        self.n_local_stages = len(self._stages)
        self._n_microbatches: int = chosen["n_microbatches"]
        self._loss_fn: Callable[..., Any] | None = chosen["loss_fn"]
        self._args_chunk_spec = chosen["args_chunk_spec"]
        self._kwargs_chunk_spec = chosen["kwargs_chunk_spec"]
        self._output_merge_spec = chosen["output_merge_spec"]
        self.scale_grads: bool = chosen["scale_grads"]
        self._has_backward = self._loss_fn is not None
        self._requires_autograd: bool = chosen["backward_requires_autograd"]
        self._defer_pp_recv: bool = chosen["defer_pp_recv"]
        self._internal_losses: list[Tensor] = []
        self._finalizes = True
        self._loop: LoopDrive | None = None
        self._begun = False
        self._custom: dict[str, Custom] = {}
        self._schedule: Schedule | None = None
        self._pipe: Pipeline | None = None
        self._runs: Schedule | None = None
        self._order: dict[int, list[ActionTuple | None]] | None = None
        self.fwd_recv_ops: Any = Arrived()
        self.bwd_recv_ops: Any = Arrived()
        self.backward_counter: Counter[int] = Counter()
        sends = chosen["max_outstanding_sends"]
        with before_meeting(self._stages[0].group):
            if self._n_microbatches < 1:
                raise UsageError(f"n_microbatches={self._n_microbatches}: must be at least 1")
            if sends is not None and (type(sends) is not int or sends < 0):
                raise UsageError(f"max_outstanding_sends={sends!r}: must be a whole number or None")
            self._build()

    @property
    def stages(self) -> list[StageBase]:
        """The stages of this process."""
        return self._stages

    @property
    def schedule(self) -> Schedule:
        """Penstock's schedule of a training step.

        Raises:
            CallError: the schedule has no actions yet.
        """
        if self._schedule is None and self._order:
            self._use_order(self._order)
        if self._schedule is None:
            raise CallError(
                f"{type(self).__name__} has no actions yet; load them with _load_csv, set pipeline_order, "
                "or use a class such as ScheduleInterleaved1F1B"
            )
        return self._schedule

    @property
    def _has_actions(self) -> bool:
        return self._schedule is not None or bool(self._order)

    @property
    def stage_index_to_group_rank(self) -> dict[int, int]:
        """The rank of each stage; it may be set until a schedule places the stages."""
        if not self._has_actions:
            rank_of: dict[int, int] = self._stages[0].stage_index_to_group_rank
            return rank_of
        return dict(enumerate(self.schedule.placement.rank_of))

    @stage_index_to_group_rank.setter
    def stage_index_to_group_rank(self, rank_of: dict[int, int]) -> None:
        if not self._has_actions:
            for stage in self._stages:
                stage.stage_index_to_group_rank = dict(rank_of)
        elif rank_of != self.stage_index_to_group_rank:
            raise PlacementError(
                f"stages on ranks {rank_of}, but the actions have them on {self.stage_index_to_group_rank}"
            )

    @property
    def pipeline_order(self) -> dict[int, list[ActionTuple | None]]:
        """Each rank's actions without messages, by rank.

        Assign it, or fill it in, to write your own schedule.
        """
        if self._order is None:
            known = self._schedule
            self._order = {} if known is None else to_order(compute_only(known).programs)
        return self._order

    @pipeline_order.setter
    def pipeline_order(self, order: dict[int, list[ActionTuple | None]]) -> None:
        self._order, self._schedule = order, None

    @property
    def pipeline_order_with_comms(self) -> dict[int, list[ActionTuple | None]]:
        """Each rank's actions with messages, by rank."""
        return to_order(prove(self.schedule).programs)

    @pipeline_order_with_comms.setter
    def pipeline_order_with_comms(self, order: dict[int, list[ActionTuple | None]]) -> None:
        self._use_order(order)

    def _use_order(self, order: dict[int, list[ActionTuple | None]]) -> None:
        """Use hand-written actions, after a proof that they complete."""
        sizes = {"stages": self._num_stages, "microbatches": self._n_microbatches}
        self._adopt(proven(schedule_of(order, **sizes)))

    def _validate_and_set_stage_mapping(self, actions: dict[int, list[ActionTuple | None]]) -> None:
        self._use_order(actions)
        self._order = actions

    def _adopt(self, schedule: Schedule) -> None:
        """Use a schedule, if its sizes match those here."""
        if (schedule.ranks, schedule.stages) != (self.pp_group_size, self._num_stages):
            raise PlacementError(
                f"{schedule.name} has {schedule.stages} stages on {schedule.ranks} ranks, but here are "
                f"{self._num_stages} stages on {self.pp_group_size} ranks"
            )
        if schedule.microbatches != self._n_microbatches:
            raise PlacementError(
                f"{schedule.name} is for {schedule.microbatches} microbatches, not {self._n_microbatches}"
            )
        check_trains(schedule, wanted=self._has_backward)
        self._schedule, self._order = self._with_ops_of_custom(schedule), None

    def _with_ops_of_custom(self, schedule: Schedule) -> Schedule:
        """Add the UNSHARD, RESHARD and REDUCE_GRAD actions that custom functions replace."""
        if not self._custom.keys().isdisjoint((Op.UNSHARD, Op.RESHARD)):
            schedule = prefetch(schedule)
        return reduce_gradients(schedule) if Op.REDUCE_GRAD in self._custom else schedule

    def _check_sizes(self) -> None:
        """Check what the schedule requires of microbatches and loss; by default nothing."""

    def _build(self) -> None:
        """Build the schedule that the class is named after, and check that this rank holds its stages."""
        if self.recipe is None:
            return
        self._check_sizes()
        each, left = divmod(self._num_stages, self.pp_group_size)
        if left:
            raise PlacementError(
                f"{self._num_stages} stages cannot be divided evenly among {self.pp_group_size} ranks"
            )
        sizes = {"ranks": self.pp_group_size, "microbatches": self._n_microbatches}
        try:
            self._adopt(build(self.recipe, **sizes, stages_per_rank=each))
        except ScheduleError as error:
            raise PlacementError(str(error)) from error
        expected = list(self.schedule.placement.stages_on(self.rank))
        held = sorted(stage.stage_index for stage in self._stages if stage.submod is not None)
        if held and held != expected:
            raise PlacementError(
                f"rank {self.rank} holds stages {held}; {self.recipe} places {expected} there"
            )

    def _get_pipeline_order(self) -> dict[int, list[ActionTuple | None]] | None:
        """Each rank's actions, by rank; None if they are not known yet."""
        return self.pipeline_order or None

    # ---- running

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        finalize_gradients: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run a batch: forward, and backward if there is a loss.

        Args:
            args: the model's arguments, on the rank of the first stage.
            target: the target of the loss, on the rank of the last stage.
            losses: a list to fill with the microbatches' losses, on the rank of the last stage.
            return_outputs: whether to return the output.
            loss_kwargs: further arguments for ``loss_fn``.
            arg_mbs: each microbatch's positional arguments, in place of ``args``, for a batch that is
                already split.
            kwarg_mbs: likewise, the keyword arguments.
            target_mbs: likewise, the targets.
            finalize_gradients: whether the gradients of stages under FSDP2 are reduced at the end. Without,
                they stay with this process, and the next step that finalizes reduces them with its own; read
                ``.grad`` after that one. Other stages do not notice.
            kwargs: keyword arguments for the stages of this process.

        Returns:
            The merged output on the rank of the last stage, ``None`` on others.

        Raises:
            RuntimeError: gradients are disabled.
        """
        self._finalizes = finalize_gradients
        self._internal_losses.clear()  # a step by hand that failed leaves some
        self._begun = False
        try:
            if self._has_backward and self._requires_autograd and not torch.is_grad_enabled():
                raise CallError("step needs gradients; under torch.no_grad() call eval")
            self._follow_count()
            for stage in self._stages:
                stage.start(self._schedule, self._n_microbatches, trains=self._has_backward)
            if arg_mbs is kwarg_mbs is target_mbs is None:
                arg_mbs, kwarg_mbs = self._split_inputs(args, kwargs)
                if target is not None:
                    spec = TensorChunkSpec.from_tuple(pytree.tree_map(lambda _: 0, (target,)))
                    count = self._n_microbatches
                    parts, _ = split_args_kwargs_into_chunks((target,), None, count, spec)
                    target_mbs = [part for (part,) in parts]
            elif args or kwargs or target is not None:
                raise CallError(
                    "the step got a whole batch and one that is split already; pass arg_mbs, kwarg_mbs and "
                    "target_mbs, or the arguments and target"
                )
            arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
            batch = arg_mbs, kwarg_mbs, target_mbs
            self._in_a_loop(batch, losses, return_outputs, loss_kwargs=loss_kwargs)
        except Exception as error:
            if not self._begun:
                self._refuse(error)
            raise
        last = self._last_stage
        if last is None or not return_outputs:
            return None
        return self._merge_outputs(last.output_chunks)

    @property
    def _last_stage(self) -> Any:
        """The pipeline's last stage, if it is in this process."""
        return next((stage for stage in self._stages if stage.is_last), None)

    def _in_a_loop(self, batch: Any, *args: Any, **options: Any) -> None:
        """Run a batch by ``_step_microbatches``, which may be a loop of the user's own."""
        call = self._call(batch_of(*batch))
        try:
            with ExitStack() as stack:

                def begin() -> tuple[Dependencies, StepState, Perform]:
                    self._begun = True
                    schedule = self._all_actions()
                    step = self._pipeline(schedule).engine.driven(call)
                    return Dependencies(schedule), *stack.enter_context(step)

                self._loop = LoopDrive(begin)
                with driving(self._stages, self._loop):
                    self._step_microbatches(*batch, *args, **options)
            self._loop.end()
        finally:
            self._loop = None

    def _call(self, batch: Batch, **options: Any) -> Call:
        """Return what a step is to do."""
        hooks = Hooks(ActionEvent)
        for stage in self._stages:
            if stage.forward_contexts:
                hooks.add(stage.note_forward, None, f"{stage.stage_index}F*")
        return Call(
            batch,
            trains=self._has_backward,
            finalizes=self._finalizes or not self._has_backward,
            hooks=hooks or None,
            **options,
        )

    def _all_actions(self) -> Schedule:
        """The schedule; if there is none, what a loop by hand may do."""
        if self._has_actions:
            return self.schedule
        rank_of = tuple(self.stage_index_to_group_rank[i] for i in range(self._num_stages))
        return any_order(rank_of, self._n_microbatches, self._edges)

    @property
    def _edges(self) -> Edges | None:
        return next((stage.edges for stage in self._stages if stage.edges is not None), None)

    def _refuse(self, error: Exception) -> None:
        """Raise an error before this rank's step has begun on the other ranks, which are in the same one."""
        with suppress(PenstockError):
            pipe = self._pipeline(self._all_actions())
            call = Call(trains=self._has_backward, refusal=refusal_of(error))
            pipe.engine.perform(call)

    def eval(self, *args: Any, **options: Any) -> Any:
        """Run only the forwards of a batch, with the arguments and result of :meth:`step`."""
        trains, self._has_backward = self._has_backward, False
        try:
            return self.step(*args, **options)
        finally:
            self._has_backward = trains

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Run a batch that is already split, as :meth:`step` takes it; subclasses may override this."""
        if self._loop is not None and self._begun:
            raise CallError(
                "a step is run either by a loop over stages or by the schedule; this one is by hand already"
            )
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        check_trains(self.schedule, wanted=self._has_backward)
        loss = self._loss(loss_kwargs) if self._has_backward else None
        context = PipelineContext(self, arg_mbs, kwarg_mbs, target_mbs, losses)
        batch, custom = batch_of(arg_mbs, kwarg_mbs, target_mbs), self._custom_ops(context)
        call = self._call(batch, loss=loss, keep=True, custom=custom)
        self._begun = True
        done = self._pipeline(self.schedule).engine.perform(call)
        last = self._last_stage
        if last is None:
            return
        if return_outputs:
            last.output_chunks[:] = done.kept
        if losses is not None:
            main = done.tally.main_losses()
            losses[:] = main or self._losses_of(done.kept, target_mbs, loss_kwargs)

    def _losses_of(
        self, outputs: Sequence[Any], targets: Sequence[Any] | None, more: dict[str, Any] | None
    ) -> list[Tensor]:
        """Compute the losses of an evaluation."""
        if targets is None or self._loss_fn is None:
            return []
        function = self._loss(more).function
        with torch.no_grad():
            return [function(x, target) for x, target in zip(outputs, targets, strict=True)]

    def _follow_count(self) -> None:
        """Rebuild the schedule if ``_n_microbatches`` was changed: users set it between steps."""
        known = self._schedule
        if known is not None and known.microbatches != self._n_microbatches and self.recipe:
            self._build()

    def _loss(self, more: dict[str, Any] | None) -> StepLoss:
        function = partial(self._compute_loss, loss_kwargs=more) if more else self._compute_loss
        reduction: Reduction = "mean" if self.scale_grads else "sum"
        return StepLoss(function, reduction=reduction, check=False)

    def _pipeline(self, schedule: Schedule) -> Pipeline:
        """Return the pipeline that runs the steps; a new one if the schedule was replaced."""
        if self._runs is not schedule:
            if self._pipe is not None:
                self._pipe.close()
            self._pipe = Pipeline.from_stages(
                self._stages,
                schedule=schedule,
                edges=self._edges,
                shared=next((stage.shared for stage in self._stages if stage.shared), ()),
                mesh=self._stages[0].group,
                seed="off",
            )
            self._runs = schedule
        assert self._pipe is not None
        return self._pipe

    # ---- the parts of a step that a subclass may override

    def _split_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[list[Any], list[Any]]:
        """Split arguments into each microbatch's positional and keyword arguments."""
        if not args and not kwargs:
            count = self._n_microbatches
            return [()] * count, [{} for _ in range(count)]
        return split_args_kwargs_into_chunks(
            args, kwargs, self._n_microbatches, self._args_chunk_spec, self._kwargs_chunk_spec
        )

    def _check_inputs(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """Check a split batch, and fill in missing arguments with empty ones."""
        if not self.trains and (target_mbs is not None or losses is not None):
            raise CallError("a forward-only schedule has no loss; take ScheduleGPipe and call eval")
        count = self._n_microbatches
        lists = {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs}
        for name, parts in {**lists, "losses": losses}.items():
            if parts is not None and not isinstance(parts, list):
                raise TypeError(f"{name} must be a list, not a {type(parts).__name__}")
        for name, parts in lists.items():
            if parts is not None and len(parts) != count:
                raise MicrobatchError(
                    f"expected {count} microbatches, but {name} has {len(parts)}; give one for each"
                )
        return (
            [()] * count if arg_mbs is None else arg_mbs,
            [{} for _ in range(count)] if kwarg_mbs is None else kwarg_mbs,
        )

    def _compute_loss(
        self, output: Any, target: Any, loss_kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute a microbatch's loss."""
        if self._loss_fn is None:
            raise CallError("there is no loss; give the schedule a loss_fn")
        return self._loss_fn(output, target, **(loss_kwargs or {}))

    def _merge_outputs(self, output_chunks: list[Any]) -> Any:
        """Merge the outputs of the microbatches."""
        return merge_chunks(output_chunks, self._output_merge_spec)

    # ---- for a user's own ``_step_microbatches`` that drives the stages one by one. The ``_maybe``
    # methods do nothing while Penstock's engine runs the step: it computes losses together with the
    # last stage's forward.

    def _initialize_stage(
        self, args: Any, kwargs: Any, target: Any = None, loss_kwargs: Any = None
    ) -> None:
        """Begin a step by hand, as the loop of every rank does; outside of one, do nothing."""
        if self._loop is not None:
            self._loop.start()

    _initialize_stages = _initialize_stage

    def _maybe_compute_loss(
        self,
        stage: StageBase,
        output: Any,
        target_mbs: Sequence[Any] | None,
        mb_index: int,
        loss_kwargs: Any = None,
    ) -> None:
        """On the last stage, compute and keep a microbatch's loss."""
        if stage.leaves_results or not stage.is_last or self._loss_fn is None:
            return
        if target_mbs is None and not self._has_backward:
            return
        if target_mbs is None:
            raise CallError("the last stage's rank has no target; pass target= on that rank")
        loss = self._compute_loss(output, target_mbs[mb_index], loss_kwargs)
        self._internal_losses.append(loss)

    def _maybe_get_loss(self, stage: StageBase, mb_index: int) -> Tensor | None:
        """On the last stage, return a microbatch's loss."""
        if stage.leaves_results or not stage.is_last or self._loss_fn is None:
            return None
        if not 0 <= mb_index < len(self._internal_losses):
            raise CallError(
                f"there is no loss of microbatch {mb_index}; so far there are {len(self._internal_losses)}"
            )
        return self._internal_losses[mb_index]

    def _update_losses(self, stages: Any, losses: list[Any] | None) -> None:
        """On the rank of the last stage, move the losses into the caller's list."""
        held = stages if isinstance(stages, list) else [stages]
        if losses is not None and any(stage.is_last for stage in held):
            count = len(self._internal_losses)
            if count != self._n_microbatches:
                raise CallError(f"expected {self._n_microbatches} losses, found {count}")
            losses[:] = [loss.detach() for loss in self._internal_losses]
        self._internal_losses.clear()

    # ---- custom functions

    def register_custom_function(
        self, computation_type: ComputationType, custom_function: Custom
    ) -> None:
        """Let a function replace an operation.

        Args:
            computation_type: the operation; messages cannot be replaced.
            custom_function: ``(action, context)``. It may call the stages' ``forward_one_chunk``,
                ``backward_one_chunk`` and ``backward_weight_one_chunk``, which perform the
                action.

        Raises:
            ValueError: this operation cannot be replaced.
        """
        name = ComputationType(computation_type).value
        if name not in CUSTOM_OPS:
            raise UsageError(f"{name} cannot be replaced; {', '.join(sorted(CUSTOM_OPS))} can")
        self._custom[name] = custom_function
        if self._schedule is not None:
            self._schedule = self._with_ops_of_custom(self._schedule)

    def _custom_ops(self, context: PipelineContext) -> dict[Op, Any]:
        """The functions that do the work of some ops in a step."""
        ops: dict[Op, Any] = {
            Op(name): partial(self._call_custom, function, context)
            for name, function in self._custom.items()
            if name != OVERLAPPED
        }
        if OVERLAPPED in self._custom:
            pairs = {part: pair for pair in self.schedule.pairs for part in flat((pair,))}
            for op in (Op.F, Op.B, Op.I):
                usual = ops.get(op, lambda perform, action: perform(action))
                ops[op] = partial(self._call_pair, pairs, usual, context)
        return ops

    def _call_custom(
        self, function: Custom, context: Any, perform: Callable[[Any], None], entry: Entry
    ) -> None:
        """Call a custom function, whose calls of stages the engine performs."""
        with driving(self._stages, FunctionDrive(perform)):
            function(to_tuple(entry), context)

    def _call_pair(
        self,
        pairs: Mapping[Action, Overlap],
        usual: Callable[..., None],
        context: Any,
        perform: Callable[[Action], None],
        action: Action,
    ) -> None:
        """Run an overlapped pair when its backward is due: by then, the inputs of both are there."""
        pair = pairs.get(action)
        if pair is None:
            usual(perform, action)
        elif action == pair.backward:
            self._call_custom(self._custom[OVERLAPPED], context, perform, pair)

    def _assert_unsharded(self, stage: StageBase) -> None:
        """Do nothing: a stage's parameters are always gathered before its action runs."""

    # ---- files

    def _dump_csv(self, filename: Any, format: str = "compute_only") -> None:
        """Write the schedule, one row per rank, without messages or with them (``"compute_comms"``)."""
        check_format(format)
        only = format == "compute_only"
        rows = compute_only(self.schedule) if only else prove(self.schedule)
        Path(filename).write_text(to_csv(rows), encoding="utf-8", newline="")

    def _load_csv(self, filename: Any, format: str = "compute_only") -> None:
        """Read a schedule and prove that it can run.

        Args:
            filename: a file of either format.
            format: with ``"compute_only"`` messages are derived; with ``"compute_comms"`` they are in the
                file.

        Raises:
            RowsError: the file holds no schedule.
            PlacementError: the schedule is for other stages, or actions are missing or repeated.
        """
        check_format(format)
        schedule = read_rows(filename)
        if format == "compute_only" and schedule.communicates:
            raise PlacementError(
                f"{filename} spells out messages; load it with format='compute_comms'"
            )
        self._adopt(proven(schedule))
