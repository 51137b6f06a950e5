"""A weights' half of backward that is the user's own: run with either import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.pipelining.peers.loops import LOOPS
from tests.pipelining.peers.orders import row
from tests.pipelining.peers.seats import CHUNKS, WIDTH, Seat, one_each, sum_loss


class Weighing:
    """Counts what it was asked to do."""

    def __init__(self) -> None:
        self.built = self.done = 0

    def builder(self) -> Callable[[], None]:
        self.built += 1

        def run() -> None:
            self.done += 1

        return run


def under_whole_backwards(group: Any, package: str, schedule: str) -> dict[str, int]:
    """A builder under a schedule that knows no halves."""
    weighing = Weighing()
    seat = Seat(package, group, one_each(group), dw_builder=weighing.builder)
    made = seat.names.get_schedule_class(schedule)(
        seat.stages[0], CHUNKS, loss_fn=sum_loss, scale_grads=False
    )
    seat.check(*seat.step(made))
    with pytest.raises(AssertionError, match="backward_one_chunk"):
        seat.stages[0].backward_weight_one_chunk(bwd_chunk_id=0)
    return {"built": weighing.built, "done": weighing.done}


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
        self.notes: list[Any] = []
        self.defers = False
        self.order: list[str] = []

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.defers:
            return torch.tanh(hidden @ self.weight.t())
        return torch.tanh(apart(hidden, self.weight, self.notes))

    def weigh(self) -> None:
        grad, hidden = self.notes.pop(0)
        found = grad.t() @ hidden
        self.weight.grad = found if self.weight.grad is None else self.weight.grad + found
        self.order.append("W")


def under_halves(group: Any, package: str, schedule: str) -> list[int]:
    """A builder under schedules with halves: the gradients are those it makes."""
    ranks = dist.get_world_size(group)
    held = {rank: [rank, rank + ranks] for rank in range(ranks)}
    seat = Seat(package, group, held, Deferring)
    for module in seat.modules:
        assert isinstance(module, Deferring)
        module.defers = True
    count = 2 * ranks
    size = 4 if schedule == "by hand" else 2
    stages = [
        seat.names.PipelineStage(
            module,
            index,
            count,
            torch.device("cpu"),
            input_args=torch.zeros(size, WIDTH, requires_grad=index > 0),
            output_args=torch.zeros(size, WIDTH, requires_grad=True),
            group=group,
            dw_builder=lambda m=module: m.weigh,
        )
        for index, module in zip(seat.mine, seat.modules, strict=True)
    ]
    seat.stages = stages
    if schedule == "by hand":
        made = _with_weights(seat.names)(stages, 2, loss_fn=sum_loss, scale_grads=False)
    else:
        made = seat.names.get_schedule_class(schedule)(
            stages, CHUNKS, loss_fn=sum_loss, scale_grads=False
        )
    for _ in range(2):
        seat.zero()
        found = seat.step(made)
    seat.check(*found)
    assert not any(module.notes for module in seat.modules)
    return [len(module.order) for module in seat.modules if isinstance(module, Deferring)]


def _with_weights(names: Any) -> Any:
    class WithWeights(names.PipelineScheduleMulti):  # type: ignore[misc] # of either package
        def __init__(self, stages: Any, n_microbatches: int, **options: Any) -> None:
            super().__init__(stages, n_microbatches, **options)
            self.pipeline_order = {
                0: row(names, "0F0 0F1 2F0 2F1 - 2I0 2W0 0I0 2I1 0W0 0B1 2W1"),
                1: row(names, "- 1F0 1F1 3F0 3I0 3F1 1B0 3I1 3W0 1B1 3W1"),
            }
            self._validate_and_set_stage_mapping(self.pipeline_order)

    return WithWeights


def under_a_loop(group: Any, package: str, kind: str) -> int:
    """A builder under a schedule that is a loop of its own."""
    seat = Seat(package, group, one_each(group), Deferring)
    module = seat.modules[0]
    assert isinstance(module, Deferring)
    module.defers = True
    part = torch.zeros(2, WIDTH, requires_grad=True)
    stage = seat.names.PipelineStage(
        module,
        seat.rank,
        seat.ranks,
        torch.device("cpu"),
        input_args=part if seat.rank else part.detach(),
        output_args=part,
        group=group,
        dw_builder=lambda: module.weigh,
    )
    seat.stages = [stage]
    made = LOOPS[kind](seat.names)(stage, CHUNKS, loss_fn=sum_loss, scale_grads=False)
    for _ in range(2):
        seat.zero()
        found = seat.step(made)
    seat.check(*found)
    return len(module.order)
