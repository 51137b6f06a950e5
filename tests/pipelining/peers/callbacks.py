"""Functions that do the runtime's work: run with either import."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch.distributed as dist

from tests.pipelining.peers.seats import CHUNKS, Seat, sum_loss


def called_back(group: Any, package: str, threads: bool) -> dict[str, int]:
    """DualPipeV with functions that do the work of the runtime, in two threads where asked."""
    ranks = dist.get_world_size(group)
    seat = Seat(package, group, {r: [r, 2 * ranks - 1 - r] for r in range(ranks)})
    made = seat.names.ScheduleDualPipeV(seat.stages, 2 * ranks, loss_fn=sum_loss, scale_grads=False)
    back = Callbacks(seat.names, threads)
    made.register_custom_function(seat.names.FORWARD, back.forward)
    made.register_custom_function(seat.names.OVERLAP_F_B, back.overlap)
    for _ in range(2):
        seat.zero()
        found = seat.step(made)
    seat.check(*found)
    return dict(back.counts)


class Callbacks:
    def __init__(self, names: Any, threads: bool) -> None:
        self.names, self.threads = names, threads
        self.counts: Counter[str] = Counter()

    def forward(self, action: Any, context: Any) -> None:
        schedule = context.schedule_ref
        assert isinstance(schedule, self.names._PipelineScheduleRuntime)
        here = {stage.stage_index: stage for stage in schedule._stages}
        stage, index = here[action.stage_index], action.microbatch_index
        self.counts["forward"] += 1
        if not stage.is_first and stage.stage_index - 1 not in here:
            key = (stage.stage_index, index)
            assert key in schedule.fwd_recv_ops
            self.names._wait_batch_p2p(schedule.fwd_recv_ops.pop(key))
        output = stage.forward_one_chunk(index, context.arg_mbs[index], context.kwarg_mbs[index])
        schedule._maybe_compute_loss(stage, output, context.target_mbs, index)
        if stage.stage_index + 1 in here:
            here[stage.stage_index + 1].set_local_fwd_input(output, index)

    def backward(self, action: Any, context: Any) -> None:
        schedule = context.schedule_ref
        here = {stage.stage_index: stage for stage in schedule._stages}
        stage, index = here[action.stage_index], action.microbatch_index
        self.counts["backward"] += 1
        if not stage.is_last and stage.stage_index + 1 not in here:
            key = (stage.stage_index, index)
            assert key in schedule.bwd_recv_ops
            self.names._wait_batch_p2p(schedule.bwd_recv_ops.pop(key))
        loss = schedule._maybe_get_loss(stage, index)
        schedule.backward_counter[stage.stage_index] += 1
        last = schedule.backward_counter[stage.stage_index] == schedule._n_microbatches
        stage.backward_one_chunk(index, loss=loss, full_backward=True, last_backward=last)
        if stage.stage_index - 1 in here:
            passed = stage.get_local_bwd_output(index)
            here[stage.stage_index - 1].set_local_bwd_input(passed, index)

    def overlap(self, action: Any, context: Any) -> None:
        self.counts["pairs"] += 1
        forward, backward = action.sub_actions
        if not self.threads:
            self.forward(forward, context)
            self.backward(backward, context)
            return
        thread = threading.Thread(target=self.backward, args=(backward, context), daemon=True)
        thread.start()
        self.forward(forward, context)
        thread.join()


def halves_called_back(group: Any, package: str, schedule: str, splits: bool) -> dict[str, int]:
    """Functions for every kind of backward; a full one in its two halves where asked."""
    ranks = dist.get_world_size(group)
    seat = Seat(package, group, {r: [r, r + ranks] for r in range(ranks)})
    names = seat.names
    made = names.get_schedule_class(schedule)(
        seat.stages, CHUNKS, loss_fn=sum_loss, scale_grads=False
    )
    counts: Counter[str] = Counter()

    def stage_of(action: Any) -> Any:
        return next(s for s in made._stages if s.stage_index == action.stage_index)

    def backward(action: Any, context: Any) -> None:
        full = action.computation_type == names.FULL_BACKWARD
        stage, index = stage_of(action), action.microbatch_index
        counts["full" if full else "input"] += 1
        if not stage.is_last:
            key = (stage.stage_index, index)
            names._wait_batch_p2p(made.bwd_recv_ops.pop(key))
        loss = made._maybe_get_loss(stage, index)
        made.backward_counter[stage.stage_index] += full
        stage.backward_one_chunk(index, loss=loss, full_backward=full and not splits)
        if full and splits:
            stage.backward_weight_one_chunk(index)

    def weight(action: Any, context: Any) -> None:
        counts["weight"] += 1
        made.backward_counter[action.stage_index] += 1
        stage_of(action).backward_weight_one_chunk(action.microbatch_index)

    for kind in (names.FULL_BACKWARD, names.BACKWARD_INPUT):
        made.register_custom_function(kind, backward)
    made.register_custom_function(names.BACKWARD_WEIGHT, weight)
    for _ in range(2):
        seat.zero()
        found = seat.step(made)
    seat.check(*found)
    return dict(counts)
