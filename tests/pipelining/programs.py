"""Programs over several processes, as people write them: run with either import, they must show the same."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from penstock.errors import PenstockError
from tests.pipelining.either import (
    CHUNKS,
    IN_A_V,
    WIDTH,
    Layer,
    Replicas,
    Seat,
    X,
    Y,
    ddp,
    sum_loss,
)

# ---- what a schedule may be asked for


class Pair(Layer):
    """Gives two values on the last stage."""

    def forward(self, hidden: Tensor, scale: Tensor | None = None) -> Any:
        out = super().forward(hidden, scale)
        return out, out.mean()


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


def asked(group: Any, package: str, schedule: str, ways: Sequence[str]) -> dict[str, list[Any]]:
    """Output, losses and gradients of a step, for each way."""
    return {way: asked_for(group, package, schedule, way) for way in ways}


def asked_for(group: Any, package: str, schedule: str, way: str) -> list[Any]:
    seat = Seat(package, group, schedule)
    options, more = WAYS[way]
    if way == "merged":
        spec = (seat.names.TensorChunkSpec(0), seat.names.sum_reducer)
        options = {"output_merge_spec": spec}
        for stage in seat.stages:
            stage.submod.__class__ = Pair if stage.is_last else Layer
    one = seat.schedule(schedule, **{"loss_fn": scaled_loss, "scale_grads": True, **options})
    with torch.set_grad_enabled(way not in ("no loss", "evaluated")):
        output, losses = seat.step(one, "eval" if way == "evaluated" else "step", **more)
    values = [*(output if isinstance(output, tuple) else [output]), *losses, *seat.gradients()]
    return [None if value is None else value.tolist() for value in values]


# ---- what stages and schedules show


def after_a_step(group: Any, package: str) -> dict[str, Any]:
    seat = Seat(package, group, "GPipe")
    stage = seat.stages[0]
    output, _ = seat.step(seat.schedule("GPipe"))
    shown = {
        "graph": output is not None and output.requires_grad,
        "left": (len(stage.output_chunks), len(getattr(stage, "fwd_cache", ()))),
        "chunks": stage.chunks,
        "ranks": {str(index): rank for index, rank in stage.stage_index_to_group_rank.items()},
        "prefix": stage.log_prefix,
        "backward": stage.has_backward,
        "place": (stage.group_rank, stage.group_size, stage.is_first, stage.is_last),
        "group": stage.group is group,
    }
    stage.clear_runtime_states()
    return {**shown, "cleared": len(stage.output_chunks)}


def round_and_round(group: Any, package: str) -> None:
    """Inference whose output goes back to the first rank as the next input, by the same group."""
    seat = Seat(package, group, "GPipe")
    forwards = seat.schedule(seat.names._ScheduleForwardOnly, loss_fn=None)
    x, expected = X.clone(), X
    with torch.no_grad():
        for _ in range(3):
            expected = seat.expected(expected)
            if seat.rank == 0:
                forwards.step(x)
                dist.recv(x, src=1, group=group)
            else:
                dist.send(forwards.step(), dst=0, group=group)
    if seat.rank == 0:
        torch.testing.assert_close(x, expected)


def recounted(group: Any, package: str, schedule: str) -> None:
    """The number of microbatches is changed between steps."""
    seat = Seat(package, group, schedule)
    one = seat.schedule(schedule)
    for count in (CHUNKS, 2, 8):
        one._n_microbatches = count
        # One of the packages finds shapes once.
        one._stage_forward_initialized = one._stage_backward_initialized = False
        seat.zero()
        output, losses = seat.step(one)
        seat.check(output, losses)
        assert len(losses) == (count if seat.is_last else 0)


def refused(group: Any, package: str) -> list[str]:
    """One rank alone gets something wrong; every rank hears of it, and the next step works."""
    seat = Seat(package, group, "1F1B")
    one = seat.schedule("1F1B")
    forwards = Seat(package, group, "1F1B").schedule(seat.names._ScheduleForwardOnly, loss_fn=None)
    errors = []
    wrong: list[tuple[Any, Tensor, dict[str, Any]]] = [
        (one, X[:3], {}),
        (one, X, {"losses": ()}),
        (forwards, X, {"target": Y}),
    ]
    for schedule, x, more in wrong:
        try:
            schedule.step(x) if seat.rank == 0 else schedule.step(**{"target": Y, **more})
        except (ValueError, TypeError, RuntimeError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        seat.check_steps(one, 1)
    return errors


def stops_stepping(rank: int) -> None:
    """A process of two: rank 0 runs two batches without a loss, rank 1 a third one, and prints what it hears.

    It is no worker of the pool, since the rank that is silent is ended.
    """
    os.environ["PENSTOCK_TIMEOUT"] = "2"
    dist.init_process_group("gloo")
    seat = Seat("penstock", dist.group.WORLD, "GPipe")
    forwards = seat.schedule("GPipe", loss_fn=None)
    for _ in range(2):
        seat.step(forwards)
    if rank == 0:
        time.sleep(100)
    try:
        seat.step(forwards)
    except PenstockError as error:
        sys.stdout.write(str(error))


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
    one = seat.schedule(several if how == "subclass" else runtime, 2)
    if how == "prepared":
        one._prepare_schedule_with_comms(order, format="compute_comms")
    elif how == "attribute":
        one.pipeline_order_with_comms = order
        one.stage_index_to_group_rank = {s: rank for rank, here in held.items() for s in here}
    else:
        one.pipeline_order = order
        one._validate_and_set_stage_mapping(order)
        if how == "runtime":
            one._prepare_schedule_with_comms(order)
    seat.check_steps(one)


# ---- functions that do the runtime's work


def called_back(group: Any, package: str, schedule: str, threads: bool) -> dict[str, int]:
    """A function for every kind of work, as people write them; a pair in two threads where asked."""
    seat = Seat(package, group, schedule)
    one = seat.schedule(schedule)
    back = Callbacks(seat.names, threads)
    work = {"FORWARD": back.forward, "FULL_BACKWARD": back.backward, "OVERLAP_F_B": back.overlap}
    work |= {"BACKWARD_INPUT": back.backward, "BACKWARD_WEIGHT": back.weight}
    for kind, function in work.items():
        one.register_custom_function(getattr(seat.names, kind), function)
    seat.check_steps(one)
    return dict(back.counts)


class Callbacks:
    def __init__(self, names: Any, threads: bool) -> None:
        self.names, self.threads = names, threads
        self.counts: Counter[str] = Counter()

    def find(self, action: Any, context: Any) -> tuple[Any, Any, dict[int, Any]]:
        self.counts[action.computation_type.value] += 1
        here = {stage.stage_index: stage for stage in context.schedule_ref._stages}
        return context.schedule_ref, here[action.stage_index], here

    def wait(self, receives: Any, stage: Any, index: int) -> None:
        key = (stage.stage_index, index)
        assert key in receives
        self.names._wait_batch_p2p(receives.pop(key))

    def forward(self, action: Any, context: Any) -> None:
        index = action.microbatch_index
        schedule, stage, here = self.find(action, context)
        if not stage.is_first and stage.stage_index - 1 not in here:
            self.wait(schedule.fwd_recv_ops, stage, index)
        output = stage.forward_one_chunk(index, context.arg_mbs[index], context.kwarg_mbs[index])
        schedule._maybe_compute_loss(stage, output, context.target_mbs, index)
        if stage.stage_index + 1 in here:
            here[stage.stage_index + 1].set_local_fwd_input(output, index)

    def backward(self, action: Any, context: Any) -> None:
        index = action.microbatch_index
        schedule, stage, here = self.find(action, context)
        full = action.computation_type == self.names.FULL_BACKWARD
        if not stage.is_last and stage.stage_index + 1 not in here:
            self.wait(schedule.bwd_recv_ops, stage, index)
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


class InputsOnly(torch.autograd.Function):
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


inputs_only: Any = InputsOnly.apply


class Deferring(nn.Module):
    """A layer whose weight's gradient its user makes, if there are notes; a plain one without."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.notes: list[Any] | None = None
        self.weighed = 0

    def forward(self, hidden: Tensor) -> Tensor:
        if self.notes is None:
            return torch.tanh(hidden @ self.weight.t())
        return torch.tanh(inputs_only(hidden, self.weight, self.notes))

    def weigh(self) -> None:
        assert self.notes is not None
        grad, hidden = self.notes.pop(0)
        grad = grad.t() @ hidden
        self.weight.grad = grad if self.weight.grad is None else self.weight.grad + grad
        self.weighed += 1


def deferred(group: Any, package: str, schedule: str) -> list[int]:
    """The gradients are those that the user's function makes, when the weights' half is due."""
    part = torch.zeros(2, WIDTH, requires_grad=True)

    def each(index: int, module: Any) -> dict[str, Any]:
        module.notes = []
        examples = {"input_args": part if index else part.detach(), "output_args": part}
        return {**examples, "dw_builder": lambda: module.weigh}

    count = 2 if schedule == "1F1B" else 4
    seat = Seat(package, group, schedule, lambda: [Deferring() for _ in range(count)], each=each)
    seat.check_steps(seat.schedule(schedule))
    with pytest.raises(AssertionError, match="backward_one_chunk"):
        seat.stages[0].backward_weight_one_chunk(bwd_chunk_id=0)
    return [module.weighed for module in seat.modules]


# ---- loops that say themselves what happens, stage call by stage call


def loop_of_fills(names: Any) -> Any:
    """All forwards, then all backwards; messages go peer by peer."""

    class Fills(names.PipelineScheduleSingle):  # type: ignore[misc] # of either package
        def wait(self, works: Any) -> None:
            for work in works.values():
                names._wait_batch_p2p(work)

        def _step_microbatches(self, *batch: Any, return_outputs: bool = True, **more: Any) -> None:
            args, kwargs, targets, losses = [*batch, None, None, None, None][:4]
            args, kwargs = self._check_inputs(args, kwargs, targets, losses)
            stage, count = self._stage, self._n_microbatches
            self._initialize_stage(
                args[0], kwargs[0], targets and targets[0], more.get("loss_kwargs")
            )
            sent = []
            for i in range(count):
                self.wait(names._sorted_batch_p2p(stage.get_fwd_recv_ops(i), desc="forward"))
                output = stage.forward_one_chunk(
                    i, args[i], kwargs[i], save_forward_output=return_outputs
                )
                sent.append(names._sorted_batch_p2p(stage.get_fwd_send_ops(i)))
                self._maybe_compute_loss(stage, output, targets, i, more.get("loss_kwargs"))
            for i in range(count):
                self.wait(names._sorted_batch_p2p(stage.get_bwd_recv_ops(i), desc="backward"))
                loss = self._maybe_get_loss(stage, i)
                stage.backward_one_chunk(i, loss=loss, last_backward=i == count - 1)
                sent.append(names._sorted_batch_p2p(stage.get_bwd_send_ops(i)))
            for works in sent:
                self.wait(works)
            self._update_losses(stage, losses)
            stage.perform_reduce_grad(count if self.scale_grads else 1)

    return Fills


def loop_of_turns(names: Any) -> Any:
    """One forward, one backward in halves; what is sent and what is received go together."""

    class Turns(names.PipelineScheduleSingle):  # type: ignore[misc] # of either package
        def _step_microbatches(self, *batch: Any, **_: Any) -> None:
            args, kwargs, targets, losses = [*batch, None, None, None, None][:4]
            args, kwargs = self._check_inputs(args, kwargs, targets, losses)
            stage, count = self._stage, self._n_microbatches
            self._initialize_stage(args[0], kwargs[0], targets and targets[0])
            warm = min(count, stage.num_stages - stage.stage_index)
            sends: list[Any] = []
            done = 0
            for i in range(count + warm):
                if i < count:
                    ops = sends + stage.get_fwd_recv_ops(i)
                    names._wait_batch_p2p(names._batch_p2p(ops, desc="fwd_recv"))
                    output = stage.forward_one_chunk(i, args[i], kwargs[i])
                    self._maybe_compute_loss(stage, output, targets, i)
                    sends = stage.get_fwd_send_ops(i)
                if i >= warm - 1 and done < count:
                    ops = sends + stage.get_bwd_recv_ops(done)
                    names._wait_batch_p2p(names._batch_p2p(ops, desc="bwd_recv"))
                    loss = self._maybe_get_loss(stage, done)
                    stage.backward_one_chunk(done, loss=loss, full_backward=False)
                    sends = stage.get_bwd_send_ops(done)
                    stage.backward_weight_one_chunk(done, last_backward=done == count - 1)
                    done += 1
            names._wait_batch_p2p(names._batch_p2p(sends))
            self._update_losses(stage, losses)
            stage.perform_reduce_grad(count if self.scale_grads else 1)

    return Turns


LOOPS: dict[str, Callable[[Any], Any]] = {"fills": loop_of_fills, "turns": loop_of_turns}


def own_loop(group: Any, package: str, kind: str) -> list[int]:
    """Evaluation and training in turn."""
    seat = Seat(package, group, "GPipe")
    loop = seat.schedule(LOOPS[kind](seat.names))
    for _ in range(2):
        _, losses = seat.step(loop, "eval")
        seat.check_steps(loop, 1)
    stage = seat.stages[0]
    return [len(losses), len(getattr(stage, "fwd_cache", ()))]  # gone in torch 2.15


# ---- what stages hand to each other


class Between(nn.Module):
    """A stage: what it hands on is made by ``give`` of its product, which is of what ``take`` finds."""

    def __init__(self, give: Callable[[Tensor], Any], take: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear, self.give, self.take = nn.Linear(WIDTH, WIDTH), give, take

    def forward(self, *args: Any) -> Any:
        return self.give(torch.tanh(self.linear(self.take(*args))))


def first_of(hidden: Tensor, *_: Tensor) -> Tensor:
    return hidden


KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[..., Tensor]]] = {
    "a mask": (
        lambda out: (out, out.detach() > 0),
        lambda hidden, mask: torch.where(mask, hidden, hidden * 0.5),
    ),
    "unused values": (lambda out: [out, out * 2, out.sum()], first_of),
    "a turned view": (lambda out: out.repeat(1, 2)[:, ::2].t(), lambda hidden: hidden.t()),
    "an expanded view": (
        lambda out: out.unsqueeze(1).expand(-1, 3, -1),
        lambda hidden: hidden.mean(1),
    ),
    "another type": (lambda out: out.double(), lambda hidden: hidden.float()),
    "a dict": (first_of, first_of),
    "a frozen stage": (first_of, first_of),
    "no parameters": (first_of, first_of),
}


def modules_of(kind: str) -> Sequence[nn.Module]:
    give, take = KINDS[kind]
    first, middle = Between(give, first_of), Between(give, take)
    last = Between(first_of, take)
    if kind == "a dict":
        last.give = lambda out: {"logits": out, "rest": (out * 3, out + 1)}
    first.requires_grad_(kind != "a frozen stage")
    return [first, nn.Identity() if kind == "no parameters" else middle, last]


def loss_of(output: Any, target: Tensor) -> Any:
    return sum_loss(output["logits"] if isinstance(output, dict) else output, target)


def handed(group: Any, package: str, schedule: str, kinds: Sequence[str]) -> None:
    """Three ranks, under a schedule or a loop of one's own."""
    held, loop = {rank: [rank] for rank in range(3)}, LOOPS.get(schedule)
    for kind in kinds:
        seat = Seat(package, group, held, partial(modules_of, kind), loss_of)
        chosen = schedule if loop is None else loop(seat.names)
        try:
            seat.check_steps(seat.schedule(chosen, scale_grads=False))
        except Exception as error:
            raise AssertionError(f"{kind}: {error}") from error


# ---- replicated and sharded stages


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WRAPS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "ddp": ddp,
    "fsdp": lambda module, mesh: fully_shard(module, mesh=mesh, reshard_after_forward=False),
    "mixed": lambda module, mesh: fully_shard(module, mesh=mesh, mp_policy=MIXED),
    "replicate": lambda module, mesh: replicate(module, mesh=mesh),
}


def spread(group: Any, package: str, schedule: str, how: str) -> list[float]:
    """Three steps and an evaluation of two replicas of two ranks, under a name, a loop or an order."""
    is_written = schedule in LOOPS or schedule.endswith("order")
    place = "GPipe" if schedule in LOOPS else "Interleaved1F1B"
    seat = Replicas(package, place if is_written else schedule, WRAPS[how])
    if schedule in LOOPS:
        one = seat.schedule(LOOPS[schedule](seat.names))
    else:
        one = with_order(seat, schedule) if is_written else seat.schedule(schedule)
    optimizers = [torch.optim.AdamW(module.parameters(), 0.01) for module in seat.modules]
    plain = torch.optim.AdamW(seat.reference.parameters(), 0.01)
    shown: list[Tensor] = []
    for _ in range(3):
        output, losses = seat.step(one)
        if how != "mixed":
            seat.check(output, losses)
        for optimizer in (*optimizers, plain):
            optimizer.step()
            optimizer.zero_grad()
        shown += losses
    if not is_written and schedule not in IN_A_V:
        with torch.no_grad():
            shown += seat.step(one, "eval")[1]
    dist.barrier(group=group)
    return [float(loss) for loss in shown]


def with_order(seat: Seat, which: str) -> Any:
    """An order that says when sharded stages are gathered, freed and reduced, or does not say it."""
    names = seat.names
    order = seat.schedule("Interleaved1F1B").pipeline_order
    one = seat.schedule(names._PipelineScheduleRuntime)
    if which == "whole order":
        rows = {r: names._add_unshard_reshard(row) for r, row in order.items()}
        rows = {r: names._add_reduce_grad(row, CHUNKS) for r, row in rows.items()}
        rows = names._add_send_recv(rows, lambda stage: stage % 2, 4)
        one._prepare_schedule_with_comms(rows, format="compute_comms")
    else:
        one._prepare_schedule_with_comms(order)
    return one
