"""Schedules that say themselves what happens, stage call by stage call: run with either import."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.pipelining.either import CPU, WIDTH, Model, Names, Seat, X, Y


def own_loop(group: Any, package: str, kind: str) -> list[int]:
    """A class that says itself what happens; evaluation and training in turn."""
    seat = Seat(package, group, "GPipe")
    made = seat.schedule(LOOPS[kind](seat.names))
    for _ in range(2):
        _, losses = seat.step(made, "eval")
        seat.zero()
        seat.check(*seat.step(made))
    stage = seat.stages[0]
    return [len(losses), len(stage.fwd_cache), len(stage.bwd_cache)]


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


LOOPS = {"fills": loop_of_fills, "turns": loop_of_turns}


class Sharded:
    """This process's part of two replicas or shards of two ranks, and the gradients of the plain model."""

    def __init__(self, package: str, layers: int, how: str) -> None:
        self.names = Names(package)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        replica, rank = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
        model = Model(layers)
        self.reference, self.mine = copy.deepcopy(model), list(range(rank, layers, 2))
        self.modules: list[Any] = [model.get_submodule(f"layers.{index}") for index in self.mine]
        if how == "ddp":
            dp = mesh["dp"].get_group()
            self.modules = [DistributedDataParallel(m, process_group=dp) for m in self.modules]
        else:
            for module in self.modules:
                fully_shard(module, mesh=mesh["dp"])
        part = torch.zeros(2, WIDTH, requires_grad=True)
        examples = [(part if index else part.detach(), part) for index in self.mine]
        places = zip(self.modules, self.mine, examples, strict=True)
        self.stages = [
            self.names.PipelineStage(m, i, layers, CPU, *given, group=mesh["pp"].get_group())
            for m, i, given in places
        ]
        half = slice(4 * replica, 4 * replica + 4)
        self.given = ((X[half],), {}) if rank == 0 else ((), {"target": Y[half]})

    def check(self, made: Any) -> None:
        """Two steps; the gradients of the last are those of the plain model."""
        for _ in range(2):
            for module in self.modules:
                module.zero_grad()
            made.step(*self.given[0], **self.given[1])
        nn.functional.mse_loss(self.reference(X), Y).backward()
        for index, module in zip(self.mine, self.modules, strict=True):
            other = self.reference.get_submodule(f"layers.{index}").parameters()
            for mine, theirs in zip(module.parameters(), other, strict=True):
                grad = mine.grad
                found = grad.full_tensor() if isinstance(grad, DTensor) else grad
                torch.testing.assert_close(found, theirs.grad)


def sharded_loop(group: Any, package: str, kind: str, how: str) -> None:
    """The loop over stages that are replicated or sharded, two by two processes."""
    seat = Sharded(package, 2, how)
    seat.check(LOOPS[kind](seat.names)(seat.stages[0], 2, loss_fn=nn.MSELoss()))


def sharded_order(group: Any, package: str, how: str) -> None:
    """An order that says when sharded stages are gathered, freed and reduced, or does not say it."""
    seat = Sharded(package, 4, "fsdp")
    names, options = seat.names, {"loss_fn": nn.MSELoss(), "scale_grads": True}
    order = names.ScheduleInterleaved1F1B(seat.stages, 2, **options).pipeline_order
    made = names._PipelineScheduleRuntime(seat.stages, 2, **options)
    if how == "given whole":
        rows = {r: names._add_unshard_reshard(row) for r, row in order.items()}
        rows = {r: names._add_reduce_grad(row, 2) for r, row in rows.items()}
        rows = names._add_send_recv(rows, lambda stage: stage % 2, 4)
        made._prepare_schedule_with_comms(rows, format="compute_comms")
    else:
        made._prepare_schedule_with_comms(order)
    seat.check(made)
