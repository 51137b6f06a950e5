"""Schedules that say themselves what happens, stage call by stage call: run with either import."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.pipelining.peers.seats import (
    CHUNKS,
    WIDTH,
    Model,
    Seat,
    batch,
    names_of,
    one_each,
    sum_loss,
)


def own_loop(group: Any, package: str, kind: str) -> list[int]:
    """A class that says itself what happens, stage call by stage call."""
    names = names_of(package)
    ranks = dist.get_world_size(group)
    in_a_v = kind == "v"
    held = {r: [r, 2 * ranks - 1 - r] for r in range(ranks)} if in_a_v else one_each(group)
    seat = Seat(package, group, held)
    if in_a_v:
        made = loop_in_a_v(names)(seat.stages, CHUNKS, loss_fn=sum_loss, scale_grads=False)
        made.stage_index_to_group_rank = {s: r for r, row in held.items() for s in row}
        for stage in seat.stages:
            stage.stage_index_to_group_rank = made.stage_index_to_group_rank
    else:
        loop = LOOPS[kind](names)
        made = loop(seat.stages[0], CHUNKS, loss_fn=sum_loss, scale_grads=False)
    _, losses = seat.step(made, "eval")
    counted = len(losses)
    for _ in range(2):
        seat.zero()
        found = seat.step(made)
    seat.check(*found)
    seat.step(made, "eval")
    seat.zero()
    seat.check(*seat.step(made))
    kept = [len(stage.fwd_cache) + len(stage.bwd_cache) for stage in seat.stages]
    return [counted, *kept]


def _wait(names: Any, works: Any) -> None:
    for work in works.values() if isinstance(works, dict) else [works]:
        names._wait_batch_p2p(work)


def loop_of_fills(names: Any) -> Any:
    class Fills(names.PipelineScheduleSingle):  # type: ignore[misc] # of either package
        def _step_microbatches(
            self,
            arg_mbs: Any = None,
            kwarg_mbs: Any = None,
            target_mbs: Any = None,
            losses: Any = None,
            return_outputs: bool = True,
            loss_kwargs: Any = None,
        ) -> None:
            args, kwargs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
            first = None if target_mbs is None else target_mbs[0]
            self._initialize_stage(args[0], kwargs[0], first, loss_kwargs)
            stage, sent = self._stage, []
            for i in range(self._n_microbatches):
                _wait(names, names._sorted_batch_p2p(stage.get_fwd_recv_ops(i), desc="forward"))
                output = stage.forward_one_chunk(
                    i, args[i], kwargs[i], save_forward_output=return_outputs
                )
                sent += names._sorted_batch_p2p(stage.get_fwd_send_ops(i)).values()
                self._maybe_compute_loss(stage, output, target_mbs, i, loss_kwargs)
            for i in range(self._n_microbatches):
                _wait(names, names._sorted_batch_p2p(stage.get_bwd_recv_ops(i), desc="backward"))
                loss = self._maybe_get_loss(stage, i)
                last = i == self._n_microbatches - 1
                stage.backward_one_chunk(i, loss=loss, last_backward=last)
                sent += names._sorted_batch_p2p(stage.get_bwd_send_ops(i)).values()
            for work in sent:
                _wait(names, work)
            self._update_losses(stage, losses)
            stage.perform_reduce_grad(self._n_microbatches if self.scale_grads else 1)

    return Fills


def loop_of_turns(names: Any) -> Any:
    """One forward, one backward in halves; what is sent and what is received go together."""

    class Turns(names.PipelineScheduleSingle):  # type: ignore[misc] # of either package
        def _step_microbatches(
            self,
            arg_mbs: Any = None,
            kwarg_mbs: Any = None,
            target_mbs: Any = None,
            losses: Any = None,
            return_outputs: bool = True,
            loss_kwargs: Any = None,
        ) -> None:
            args, kwargs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
            first = None if target_mbs is None else target_mbs[0]
            self._initialize_stage(args[0], kwargs[0], first)
            stage, count = self._stage, self._n_microbatches
            warm = min(count, stage.num_stages - stage.stage_index)
            sends: list[Any] = []
            done = 0
            for i in range(count + warm):
                if i < count:
                    ops = sends + stage.get_fwd_recv_ops(i)
                    names._wait_batch_p2p(names._batch_p2p(ops, desc="fwd_recv"))
                    output = stage.forward_one_chunk(i, args[i], kwargs[i])
                    self._maybe_compute_loss(stage, output, target_mbs, i)
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


def loop_in_a_v(names: Any) -> Any:
    """Two stages a rank; at the turn of the V values and gradients stay in the process."""

    class There(names.PipelineScheduleMulti):  # type: ignore[misc] # of either package
        def _step_microbatches(
            self,
            arg_mbs: Any = None,
            kwarg_mbs: Any = None,
            target_mbs: Any = None,
            losses: Any = None,
            return_outputs: bool = True,
            loss_kwargs: Any = None,
        ) -> None:
            args, kwargs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
            first = None if target_mbs is None else target_mbs[0]
            self._initialize_stages(args[0], kwargs[0], first)
            here = {stage.stage_index: stage for stage in self._stages}
            for i in range(self._n_microbatches):
                for index, stage in here.items():
                    if index - 1 not in here:
                        names._wait_batch_p2p(names._batch_p2p(stage.get_fwd_recv_ops(i)))
                    output = stage.forward_one_chunk(i, args[i], kwargs[i])
                    self._maybe_compute_loss(stage, output, target_mbs, i)
                    if index + 1 in here:
                        here[index + 1].set_local_fwd_input(output, i)
                    else:
                        names._wait_batch_p2p(names._batch_p2p(stage.get_fwd_send_ops(i)))
            for i in range(self._n_microbatches if self._has_backward else 0):
                for index, stage in reversed(here.items()):
                    if index + 1 not in here:
                        names._wait_batch_p2p(names._batch_p2p(stage.get_bwd_recv_ops(i)))
                    loss = self._maybe_get_loss(stage, i)
                    last = i == self._n_microbatches - 1
                    stage.backward_one_chunk(i, loss=loss, last_backward=last)
                    if index - 1 in here:
                        here[index - 1].set_local_bwd_input(stage.get_local_bwd_output(i), i)
                    else:
                        names._wait_batch_p2p(names._batch_p2p(stage.get_bwd_send_ops(i)))
            self._update_losses(self._stages, losses)

    return There


LOOPS = {"fills": loop_of_fills, "turns": loop_of_turns}


def traced_loop(group: Any, package: str, kind: str) -> int:
    """The loop over stages that were traced and cut."""
    names = names_of(package)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    model = Model(ranks)
    reference = copy.deepcopy(model)
    x, target = batch()
    spec = {f"layers.{i}": names.SplitPoint.BEGINNING for i in range(1, ranks)}
    pipe = names.pipeline(model, (x.chunk(CHUNKS)[0],), split_spec=spec)
    stage = pipe.build_stage(rank, torch.device("cpu"), group)
    made = LOOPS[kind](names)(stage, CHUNKS, loss_fn=sum_loss, scale_grads=False)
    output: Any = None
    losses: list[Any] = []
    for _ in range(2):
        stage.submod.zero_grad()
        if rank == 0:
            made.step(x)
        elif rank == ranks - 1:
            output = made.step(target=target, losses=losses)
        else:
            made.step()
    loss = sum_loss(reference(x), target)
    loss.backward()
    if output is not None:
        torch.testing.assert_close(output, reference(x))
        torch.testing.assert_close(sum(losses), loss)
    for name, parameter in stage.submod.named_parameters():
        expected = reference.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=4e-5)
    return len(list(stage.submod.parameters()))


def replicated_loop(group: Any, package: str, kind: str, how: str) -> float:
    """The loop over stages that are replicated or sharded, two by two processes."""
    names = names_of(package)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica, rank = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
    model = Model(2)
    reference = copy.deepcopy(model)
    module: nn.Module = model.get_submodule(f"layers.{rank}")
    if how == "ddp":
        module = DistributedDataParallel(module, process_group=mesh["dp"].get_group())
    else:
        fully_shard(module, mesh=mesh["dp"])
    part = torch.zeros(2, WIDTH, requires_grad=True)
    given = part if rank else part.detach()
    stage = names.PipelineStage(
        module, rank, 2, torch.device("cpu"), given, part, group=mesh["pp"].get_group()
    )
    made = LOOPS[kind](names)(stage, 2, loss_fn=nn.MSELoss())
    x, target = batch()
    half = slice(4 * replica, 4 * replica + 4)
    for _ in range(2):
        module.zero_grad()
        made.step(x[half]) if rank == 0 else made.step(target=target[half])
    nn.functional.mse_loss(reference(x), target).backward()
    gap = 0.0
    expected = reference.get_submodule(f"layers.{rank}").parameters()
    for mine, theirs in zip(module.parameters(), expected, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        found = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
        gap = max(gap, float((found - theirs.grad).abs().max()))
    return gap


def sharded_order(group: Any, package: str, how: str) -> list[str]:
    """Sharded stages, in an order that says when they are gathered, freed and reduced, or does not say it."""
    names = names_of(package)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica, rank = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
    model = Model(4)
    reference = copy.deepcopy(model)
    mine = [rank, rank + 2]
    modules = [model.get_submodule(f"layers.{index}") for index in mine]
    for module in modules:
        fully_shard(module, mesh=mesh["dp"])
    stages = [
        names.PipelineStage(module, i, 4, torch.device("cpu"), group=mesh["pp"].get_group())
        for i, module in zip(mine, modules, strict=True)
    ]
    options = {"loss_fn": nn.MSELoss(), "scale_grads": True}
    order = names.ScheduleInterleaved1F1B(stages, 4, **options).pipeline_order
    made = names._PipelineScheduleRuntime(stages, 4, **options)
    if how == "given whole":
        rows = {r: names._add_unshard_reshard(row) for r, row in order.items()}
        rows = {r: names._add_reduce_grad(row, 4) for r, row in rows.items()}
        rows = names._add_send_recv(rows, lambda stage: stage % 2, 4)
        made._prepare_schedule_with_comms(rows, format="compute_comms")
    else:
        made._prepare_schedule_with_comms(order)
    x, target = batch()
    half = slice(4 * replica, 4 * replica + 4)
    for _ in range(2):
        for module in modules:
            module.zero_grad()
        made.step(x[half]) if rank == 0 else made.step(target=target[half])
    nn.functional.mse_loss(reference(x), target).backward()
    for index, module in zip(mine, modules, strict=True):
        other = reference.get_submodule(f"layers.{index}")
        for name, parameter in module.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            found = parameter.grad.full_tensor()
            torch.testing.assert_close(found, other.get_parameter(name).grad)
    return sorted({str(action) for row in made.pipeline_order.values() for action in row if action})


def in_microbatches(group: Any, package: str, schedule: str) -> int:
    """Batches that somebody has split already."""
    ranks = dist.get_world_size(group)
    single = schedule in ("GPipe", "1F1B")
    held = one_each(group) if single else {r: [r, r + ranks] for r in range(ranks)}
    seat = Seat(package, group, held)
    made = seat.names.get_schedule_class(schedule)(
        seat.stages[0] if single else seat.stages, CHUNKS, loss_fn=sum_loss, scale_grads=False
    )
    for stage in seat.stages:
        stage.has_backward = True
    x, target = batch()
    losses: list[Any] = []
    if seat.rank == 0:
        made._step_microbatches([(part,) for part in x.chunk(CHUNKS)])
    else:
        made._step_microbatches(target_mbs=list(target.chunk(CHUNKS)), losses=losses)
    last = seat.stages[-1]
    outputs = made._merge_outputs(last.output_chunks) if last.is_last else None
    seat.check(outputs, losses)
    return len(last.output_chunks)
