"""Steps over two processes: run with either import, they must show the same."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.pipelining.either import CHUNKS, WIDTH, Layer, Seat, X, Y

# ---- what a schedule may be asked for


class Pair(Layer):
    """Gives two values on the last stage."""

    def forward(self, hidden: Tensor, scale: Tensor | None = None) -> Any:
        made = super().forward(hidden, scale)
        return made, made.mean()


def scaled_loss(output: Any, target: Tensor, factor: float = 1.0) -> Tensor:
    first = output[0] if isinstance(output, tuple) else output
    return nn.functional.mse_loss(first, target) * factor


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "by name": ({}, {"scale": torch.linspace(0.5, 1.5, 2 * CHUNKS).reshape(-1, 1)}),
    "summed": ({"scale_grads": False}, {"return_outputs": False, "loss_kwargs": {"factor": 0.5}}),
    "merged": ({}, {}),
    "no loss": ({"loss_fn": None}, {}),
    "evaluated": ({}, {}),
}
"""For each way the options of the schedule and of the step."""


def asked(group: Any, package: str, schedule: str, way: str) -> list[Any]:
    """Output, losses and gradients of a step."""
    seat = Seat(package, group, schedule)
    options, more = WAYS[way]
    if way == "merged" and seat.is_last:
        last = next(stage for stage in seat.stages if stage.is_last)
        last.submod.__class__ = Pair
    if way == "merged":
        spec = (seat.names.TensorChunkSpec(0), seat.names.sum_reducer)
        options = {"output_merge_spec": spec}
    made = seat.schedule(schedule, **{"loss_fn": scaled_loss, "scale_grads": True, **options})
    with torch.set_grad_enabled(way not in ("no loss", "evaluated")):
        output, losses = seat.step(made, "eval" if way == "evaluated" else "step", **more)
    values = [*(output if isinstance(output, tuple) else [output]), *losses, *seat.gradients()]
    return [None if value is None else value.tolist() for value in values]


def from_a_file(group: Any, package: str, schedule: str, path: str, format: str) -> None:
    """A schedule's file, loaded into the class that takes any."""
    seat = Seat(package, group, schedule)
    named = seat.schedule(schedule)
    if format == "compute_comms":
        named._prepare_schedule_with_comms(named.pipeline_order)
    named._dump_csv(f"{path}-{seat.rank}.csv", format)
    made = seat.schedule(seat.names._PipelineScheduleRuntime)
    made._load_csv(f"{path}-{seat.rank}.csv", format)
    seat.check(*seat.step(made))


# ---- what stages and schedules show


def after_a_step(group: Any, package: str) -> dict[str, Any]:
    seat = Seat(package, group, "GPipe")
    stage, made = seat.stages[0], seat.schedule("GPipe")
    output, _ = seat.step(made)
    found = {
        "graph": output is not None and output.requires_grad,
        "outputs": len(stage.output_chunks),
        "forwards": len(stage.fwd_cache),
        "chunks": stage.chunks,
        "ranks": stage.stage_index_to_group_rank,
        "prefix": stage.log_prefix,
        "backward": stage.has_backward,
        "place": (stage.group_rank, stage.group_size, stage.is_first, stage.is_last),
        "group": stage.group is group,
    }
    stage.clear_runtime_states()
    return {**found, "cleared": len(stage.output_chunks)}


def round_and_round(group: Any, package: str) -> None:
    """Inference whose output goes back to the first rank as the next input, by the same group."""
    seat = Seat(package, group, "GPipe")
    made = seat.schedule(seat.names._ScheduleForwardOnly, loss_fn=None)
    x, expected = X.clone(), X
    with torch.no_grad():
        for _ in range(3):
            expected = seat.reference(expected)
            if seat.rank == 0:
                made.step(x)
                dist.recv(x, src=1, group=group)
            else:
                dist.send(made.step(), dst=0, group=group)
    if seat.rank == 0:
        torch.testing.assert_close(x, expected)


def recounted(group: Any, package: str, schedule: str) -> list[int]:
    """A schedule that is told another number of microbatches between steps."""
    seat = Seat(package, group, schedule)
    made = seat.schedule(schedule)
    counts = []
    for count in (CHUNKS, 2, 8):
        made._n_microbatches = count
        # One of the packages finds shapes once.
        made._stage_forward_initialized = made._stage_backward_initialized = False
        seat.zero()
        output, losses = seat.step(made)
        seat.check(output, losses)
        counts.append(len(losses))
    return counts


def refused(group: Any, package: str) -> list[str]:
    """One rank alone is given something wrong; every rank hears of it, and the next step works."""
    seat = Seat(package, group, "1F1B")
    made = seat.schedule("1F1B")
    forwards = Seat(package, group, "1F1B").schedule(seat.names._ScheduleForwardOnly, loss_fn=None)
    told = []
    wrong: list[tuple[Any, Tensor, dict[str, Any]]] = [
        (made, X[:3], {}),
        (made, X, {"losses": ()}),
        (forwards, X, {"target": Y}),
    ]
    for schedule, x, more in wrong:
        try:
            schedule.step(x) if seat.rank == 0 else schedule.step(**{"target": Y, **more})
        except (ValueError, TypeError, RuntimeError) as error:
            told.append(f"{type(error).__name__}: {error}")
        seat.zero()
        seat.check(*seat.step(made))
    return told


# ---- orders that people write down


ORDERS: dict[str, tuple[list[str], list[list[int]]]] = {
    "loop": (
        ["0F0 0F1 2F0 2F1 - 2B0 - 2B1 0B0 - 0B1", "- 1F0 1F1 3F0 3B0 3F1 3B1 1B0 - 1B1 -"],
        [[0, 2], [1, 3]],
    ),
    "unbalanced": (
        [
            "0F0 0F1 1F0 1F1 - 4F0 4B0 4F1 4B1 1B0 1B1 0B0 0B1",
            "- 2F0 3F0 2F1 3F1 3B0 2B0 3B1 2B1",
        ],
        [[0, 1, 4], [2, 3]],
    ),
    "messages": (
        [
            "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1",
            "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1B1 1SEND_B0 1SEND_B1",
        ],
        [[0], [1]],
    ),
}


def by_hand(group: Any, package: str, which: str, how: str) -> None:
    rows, stages = ORDERS[which]
    held = dict(enumerate(stages))
    seat = Seat(package, group, held)
    names = seat.names
    order = {rank: names.row(text) for rank, text in enumerate(rows)}
    several, runtime = names.PipelineScheduleMulti, names._PipelineScheduleRuntime
    made = seat.schedule(several if how == "subclass" else runtime, 2)
    if how == "prepared":
        made._prepare_schedule_with_comms(order, format="compute_comms")
    elif how == "attribute":
        made.pipeline_order_with_comms = order
        made.stage_index_to_group_rank = {s: rank for rank, here in held.items() for s in here}
    else:
        made.pipeline_order = order
        made._validate_and_set_stage_mapping(order)
        if how == "runtime":
            made._prepare_schedule_with_comms(order)
    for _ in range(2):
        seat.zero()
        found = seat.step(made)
    seat.check(*found)


# ---- functions that do the runtime's work


def called_back(group: Any, package: str, schedule: str, threads: bool) -> dict[str, int]:
    """A function for every kind of work, as people write them; a pair in two threads where asked."""
    seat = Seat(package, group, schedule)
    made = seat.schedule(schedule)
    back = Callbacks(seat.names, threads)
    work = {"FORWARD": back.forward, "FULL_BACKWARD": back.backward, "OVERLAP_F_B": back.overlap}
    work |= {"BACKWARD_INPUT": back.backward, "BACKWARD_WEIGHT": back.weight}
    for kind, function in work.items():
        made.register_custom_function(getattr(seat.names, kind), function)
    for _ in range(2):
        seat.zero()
        found = seat.step(made)
    seat.check(*found)
    return dict(back.counts)


class Callbacks:
    def __init__(self, names: Any, threads: bool) -> None:
        self.names, self.threads = names, threads
        self.counts: Counter[str] = Counter()

    def find(self, action: Any, context: Any) -> tuple[Any, Any, dict[int, Any]]:
        self.counts[action.computation_type.value] += 1
        here = {stage.stage_index: stage for stage in context.schedule_ref._stages}
        return context.schedule_ref, here[action.stage_index], here

    def forward(self, action: Any, context: Any) -> None:
        index = action.microbatch_index
        schedule, stage, here = self.find(action, context)
        if not stage.is_first and stage.stage_index - 1 not in here:
            key = (stage.stage_index, index)
            assert key in schedule.fwd_recv_ops
            self.names._wait_batch_p2p(schedule.fwd_recv_ops.pop(key))
        output = stage.forward_one_chunk(index, context.arg_mbs[index], context.kwarg_mbs[index])
        schedule._maybe_compute_loss(stage, output, context.target_mbs, index)
        if stage.stage_index + 1 in here:
            here[stage.stage_index + 1].set_local_fwd_input(output, index)

    def backward(self, action: Any, context: Any) -> None:
        index = action.microbatch_index
        schedule, stage, here = self.find(action, context)
        full = action.computation_type == self.names.FULL_BACKWARD
        if not stage.is_last and stage.stage_index + 1 not in here:
            key = (stage.stage_index, index)
            assert key in schedule.bwd_recv_ops
            self.names._wait_batch_p2p(schedule.bwd_recv_ops.pop(key))
        loss = schedule._maybe_get_loss(stage, index)
        schedule.backward_counter[stage.stage_index] += full
        last = schedule.backward_counter[stage.stage_index] == schedule._n_microbatches
        stage.backward_one_chunk(index, loss=loss, full_backward=full, last_backward=last)
        if stage.stage_index - 1 in here:
            passed = stage.get_local_bwd_output(index)
            here[stage.stage_index - 1].set_local_bwd_input(passed, index)

    def weight(self, action: Any, context: Any) -> None:
        schedule, stage, _ = self.find(action, context)
        schedule.backward_counter[stage.stage_index] += 1
        stage.backward_weight_one_chunk(action.microbatch_index)

    def overlap(self, action: Any, context: Any) -> None:
        self.counts["pairs"] += 1
        forward, backward = action.sub_actions
        thread = threading.Thread(target=self.backward, args=(backward, context), daemon=True)
        thread.start() if self.threads else self.backward(backward, context)
        self.forward(forward, context)
        if self.threads:
            thread.join()


# ---- a weights' half that is the user's own


class _InputsOnly(torch.autograd.Function):
    """A linear map that notes what its weight's gradient is made of, and makes none."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, notes: list[Any]) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.notes = notes
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        hidden, weight = ctx.saved_tensors
        ctx.notes.append((grad.detach().clone(), hidden.detach().clone()))
        return grad @ weight, None, None


apart: Any = _InputsOnly.apply


class Deferring(nn.Module):
    """A layer that makes its weight's gradient when told; alone it is a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.notes: list[Any] | None = None
        self.weighed = 0

    def forward(self, hidden: Tensor) -> Tensor:
        if self.notes is None:
            return torch.tanh(hidden @ self.weight.t())
        return torch.tanh(apart(hidden, self.weight, self.notes))

    def weigh(self) -> None:
        assert self.notes is not None
        grad, hidden = self.notes.pop(0)
        found = grad.t() @ hidden
        self.weight.grad = found if self.weight.grad is None else self.weight.grad + found
        self.weighed += 1


def deferred(group: Any, package: str, schedule: str) -> list[int]:
    """The gradients are those that the user's function makes, when the weights' half is due."""
    seat = Seat(package, group, schedule, Deferring)
    count = 2 if schedule in ("GPipe", "1F1B") else 4
    for place, module in enumerate(seat.modules):
        assert isinstance(module, Deferring)
        module.notes, index = [], seat.mine[place]
        part = torch.zeros(2, WIDTH, requires_grad=True)
        seat.stages[place] = seat.names.PipelineStage(
            *(module, index, count, torch.device("cpu"), part if index else part.detach(), part),
            group=group,
            dw_builder=lambda m=module: m.weigh,
        )
    made = seat.schedule(schedule)
    for _ in range(2):
        seat.zero()
        found = seat.step(made)
    seat.check(*found)
    with pytest.raises(AssertionError, match="backward_one_chunk"):
        seat.stages[0].backward_weight_one_chunk(bwd_chunk_id=0)
    return [module.weighed for module in seat.modules if isinstance(module, Deferring)]
