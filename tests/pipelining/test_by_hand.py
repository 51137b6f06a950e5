"""Stages that are driven without a schedule, and weights that stages share."""

from __future__ import annotations

import re
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.partition import Shared
from penstock.pipelining import PipelineStage, ScheduleGPipe
from penstock.pipelining.schedules import PipelineScheduleSingle
from penstock.testing import WorkerPool
from tests.pipelining.either import WIDTH, Layer, Seat, X, sum_loss
from tests.pipelining.programs import LOOPS

PART = X[:2]


def driven(count: int = 2, **examples: Any) -> Seat:
    """Stages that know what travels."""
    seat = Seat("penstock", None, {0: list(range(count))}, **examples)
    passed: Any = (PART,)
    for stage in seat.stages:
        passed = stage._prepare_forward_infra(2, passed, {}, has_backward=True)
        stage._prepare_backward_infra(2)
    return seat


def squares(module: Any, output: Tensor) -> Tensor:
    """A loss of the output and, beside it, of the last weights."""
    loss: Tensor = output.square().sum() + module.second.weight.square().sum()
    return loss


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("examples", [{}, {"output_args": PART.clone().requires_grad_()}])
def test_without_a_schedule(halves: bool, examples: dict[str, Any]) -> None:
    seat = driven(**examples)
    first, last = seat.stages
    for microbatch in range(2):
        output = first.forward_one_chunk(microbatch, (PART,))
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
    squares(seat.reference[1], seat.expected(PART)).backward()
    torch.testing.assert_close(seat.gradients(), [p.grad for p in seat.reference.parameters()])
    assert len(last.output_chunks) == 2
    last.clear_runtime_states()
    assert last.output_chunks == []


class Masks(nn.Module):
    """Takes a mask before the values that learn."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, mask: Tensor, hidden: Tensor, scale: Tensor) -> Tensor:
        return self.linear(hidden.where(mask, 0.0)) * scale  # type: ignore[no-any-return]


def test_gradients_by_hand_stand_at_the_places_of_the_values() -> None:
    stage = PipelineStage(Masks(), 1, 2, "cpu")
    stage._prepare_forward_infra(1, has_backward=True)
    values = PART > 0, PART, torch.tensor(3.0)
    stage.set_local_fwd_input(values, 0)
    stage.backward_one_chunk(0, loss=stage.forward_one_chunk(0).sum())
    mask, *leaves = [v.clone().requires_grad_(v.is_floating_point()) for v in values]
    expected = torch.autograd.grad(stage.submod(mask, *leaves).sum(), leaves)
    gradients = stage.get_local_bwd_output(0)
    assert gradients[0] is None
    torch.testing.assert_close(gradients[1:], expected)


def test_what_comes_too_early_is_named() -> None:
    first, last = driven().stages
    with pytest.raises(RuntimeError, match="set_local_fwd_input comes first"):
        last.forward_one_chunk(0, ())
    last.set_local_fwd_input(first.forward_one_chunk(0, (PART,)), 0)
    last.forward_one_chunk(0, ())
    with pytest.raises(RuntimeError, match="set_local_bwd_input comes first"):
        first.backward_one_chunk(0)
    with pytest.raises(RuntimeError, match="out of range of 2 chunks"):
        first.backward_one_chunk(2)
    with pytest.raises(RuntimeError, match="starts at loss="):
        last.backward_one_chunk(0)
    with pytest.raises(AssertionError, match="full_backward=False"):
        last.backward_weight_one_chunk(0)
    fresh = PipelineStage(Layer(), 0, 2, "cpu")
    fresh.stage_index_to_group_rank = {0: 0, 1: 1}
    with pytest.raises(RuntimeError, match="drive them in its _step_microbatches"):
        fresh.get_fwd_send_ops(0)
    fresh.backward_one_chunk(0)  # without a backward they do nothing
    fresh.backward_weight_one_chunk(0)
    fresh.has_backward = True
    with pytest.raises(RuntimeError, match="no chunks yet"):
        fresh.backward_one_chunk(0)


def test_the_next_step_drops_what_was_left() -> None:
    (stage,) = driven(1).stages
    stage.forward_one_chunk(0, (PART,))
    assert stage.in_flight == 1
    ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss).step(PART, target=PART)
    assert stage.in_flight == 0
    assert stage.fwd_cache == {}


def test_a_loop_that_failed_leaves_nothing_for_the_next_step() -> None:
    seat = Seat("penstock", None, {0: [0]})
    calls = count()

    def loss(output: Tensor, target: Tensor) -> Any:
        if next(calls) == 1:
            raise ZeroDivisionError
        return sum_loss(output, target)

    loop = seat.schedule(LOOPS["fills"](seat.names), loss_fn=loss)
    with pytest.raises(ZeroDivisionError):
        seat.step(loop)
    seat.check_steps(loop, 1)


class Early(PipelineScheduleSingle):
    """Does, on each rank, what a function says."""

    says: Any
    current: Any

    def _step_microbatches(
        self, arg_mbs: Any = None, kwarg_mbs: Any = None, *_: Any, **__: Any
    ) -> None:
        parts = self._check_inputs(arg_mbs, kwarg_mbs)[0]
        self._initialize_stage(parts[0], {})
        self.says(self._stage, parts)


def other_values(stage: Any, args: Any) -> None:
    """The second microbatch gives another length than the first."""
    for index, (x,) in enumerate(args if stage.is_first else []):
        stage.forward_one_chunk(index, (x.repeat(1 + index, 1),))
        stage.get_fwd_send_ops(index)


def too_early(stage: Any, args: Any) -> None:
    if not stage.is_first:
        stage.forward_one_chunk(0)


def by_the_schedule_too(stage: Any, args: Any) -> None:
    """The class has no actions, and the step has begun by hand."""
    PipelineScheduleSingle._step_microbatches(Early.current)


WRONG = {"other_values": other_values, "too_early": too_early, "both": by_the_schedule_too}


def wrong_loop(group: Any, what: str) -> str:
    seat = Seat("penstock", group, "GPipe")
    Early.says, Early.current = staticmethod(WRONG[what]), seat.schedule(Early, 2)
    try:
        Early.current.step(*([PART] if seat.is_first else []), return_outputs=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("what", "rank", "says"),
    [
        ("other_values", 0, "SpecError: 0SEND_F1: .*float32.2, 4.*float32.1, 4"),
        ("too_early", 1, "stage 1 has nothing for microbatch 0; get_fwd_recv_ops comes first"),
        ("both", 0, "either by a loop over stages or by the schedule"),
    ],
)
def test_a_loop_that_goes_wrong_is_named_on_every_rank(
    workers: WorkerPool, what: str, rank: int, says: str
) -> None:
    answers = workers.run(f"{__name__}:wrong_loop", 2, 60.0, what=what)
    assert re.search(says, answers[rank])
    assert all(answers)


# ---- weights that stages share: equal where that is asked for

TABLE = (Shared(("0.weight", "1.weight"), ((0, "weight"), (1, "weight"))),)


def tied() -> list[nn.Module]:
    first, last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
    last.weight = first.weight
    return [first, last]


def train(group: Any, asked: bool) -> list[list[float]]:
    seat = Seat("penstock", group, "GPipe", tied)
    (stage,) = seat.stages
    stage.shared = TABLE if asked else ()
    schedule = seat.schedule("GPipe")
    optimizer = torch.optim.AdamW(stage.submod.parameters(), 0.1)
    plain = torch.optim.AdamW(seat.reference.parameters(), 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        result = seat.step(schedule)
        if asked:
            seat.check(*result)
        for one in (optimizer, plain):
            one.step()
    weight: list[list[float]] = stage.submod.weight.tolist()
    return weight


@pytest.mark.parametrize("asked", [True, False])
def test_shared_weights_over_processes(workers: WorkerPool, asked: bool) -> None:
    first, last = workers.run(f"{__name__}:train", 2, 60.0, asked=asked)
    assert (first == last) is asked
