"""Stages that are driven without a schedule."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.pipelining import PipelineStage, ScheduleGPipe
from penstock.pipelining._utils import PipeliningMetadataError
from penstock.pipelining.schedules import PipelineScheduleSingle
from penstock.testing import WorkerPool

X = torch.linspace(-1, 1, 8).reshape(2, 4)


def driven(count: int = 2, **examples: Any) -> tuple[list[PipelineStage], nn.Module]:
    """Stages that know what travels, and a copy of their model."""
    torch.manual_seed(0)
    modules = [nn.Linear(4, 4) for _ in range(count)]
    whole = copy.deepcopy(nn.Sequential(*modules))
    stages = [PipelineStage(m, i, count, "cpu", **examples) for i, m in enumerate(modules)]
    passed: Any = (X,)
    for stage in stages:
        passed = stage._prepare_forward_infra(2, passed, {}, has_backward=True)
        stage._prepare_backward_infra(2)
    return stages, whole


def squares(module: Any, output: Tensor) -> Tensor:
    """A loss of the output and, beside it, of the last weights."""
    loss: Tensor = output.square().sum() + module.weight.square().sum()
    return loss


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("examples", [{}, {"output_args": X.clone().requires_grad_()}])
def test_without_a_schedule(halves: bool, examples: dict[str, Any]) -> None:
    (first, last), whole = driven(**examples)
    for microbatch in range(2):
        output = first.forward_one_chunk(microbatch, (X,))
        assert first.get_fwd_send_ops(microbatch) == []
        last.set_local_fwd_input(output, microbatch)
        loss = squares(last.submod, last.forward_one_chunk(microbatch, ()))
        last.backward_one_chunk(microbatch, loss=loss, full_backward=not halves)
        first.set_local_bwd_input(last.get_local_bwd_output(microbatch), microbatch)
        first.backward_one_chunk(microbatch, full_backward=not halves)
        for stage in (first, last) if halves else ():
            stage.backward_weight_one_chunk(microbatch)
    for stage in (first, last):
        stage.perform_reduce_grad(2)
    squares(whole[1], whole(X)).backward()  # type: ignore[index]
    found = [p.grad for stage in (first, last) for p in stage.submod.parameters()]
    torch.testing.assert_close(found, [p.grad for p in whole.parameters()])
    assert len(last.output_chunks) == 2
    last.clear_runtime_states()
    assert last.output_chunks == []


def test_what_comes_too_early_is_named() -> None:
    first, last = driven()[0]
    with pytest.raises(RuntimeError, match="get_fwd_recv_ops comes first"):
        last.forward_one_chunk(0, ())
    last.set_local_fwd_input(first.forward_one_chunk(0, (X,)), 0)
    last.forward_one_chunk(0, ())
    with pytest.raises(RuntimeError, match="get_bwd_recv_ops comes first"):
        first.backward_one_chunk(0)
    with pytest.raises(RuntimeError, match="out of range of 2 chunks"):
        first.backward_one_chunk(2)
    with pytest.raises(RuntimeError, match="starts at loss="):
        last.backward_one_chunk(0)
    with pytest.raises(AssertionError, match="full_backward=False"):
        last.backward_weight_one_chunk(0)
    fresh = PipelineStage(nn.Linear(4, 4), 0, 2, "cpu")
    with pytest.raises(RuntimeError, match="_initialize_stage"):
        fresh.get_fwd_recv_ops(0)
    assert fresh.backward_one_chunk(0) is None
    fresh._has_backward = True
    with pytest.raises(RuntimeError, match="no chunks yet"):
        fresh.backward_one_chunk(0)


def test_the_next_step_drops_what_was_left() -> None:
    (stage,), _ = driven(1)
    stage.forward_one_chunk(0, (X,))
    assert stage.in_flight == 1
    ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss).step(X, target=X)
    assert stage.in_flight == 0
    assert stage.fwd_cache == {}


class Once(PipelineScheduleSingle):
    """Sends one microbatch of another length than was agreed."""

    def _step_microbatches(
        self, arg_mbs: Any = None, kwarg_mbs: Any = None, *_: Any, **__: Any
    ) -> None:
        args, kwargs = self._check_inputs(arg_mbs, kwarg_mbs)
        self._initialize_stage(args[0], kwargs[0])
        stage: Any = self._stage
        if stage.is_first:
            stage.forward_one_chunk(0, (args[0][0].repeat(2, 1),), kwargs[0])
            stage.get_fwd_send_ops(0)


def other_values(group: Any) -> str:
    rank = dist.get_rank(group)
    schedule = Once(PipelineStage(nn.Linear(4, 4), rank, 2, "cpu", group=group), 2)
    if rank:
        schedule.step(return_outputs=False)
        return ""
    with pytest.raises(PipeliningMetadataError) as found:
        schedule.step(X)
    return str(found.value)


def test_another_value_than_was_agreed(workers: WorkerPool) -> None:
    says, _ = workers.run(f"{__name__}:other_values", 2, 60.0)
    assert "stage 0, microbatch 0: its output" in says
    assert "expected float32[1, 4]" in says
